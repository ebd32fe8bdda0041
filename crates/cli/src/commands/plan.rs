//! `termwise plan`.

use clap::Args;
use termwise_analysis::plan::{self, Network, Options, parse_bytes, parse_count};

use crate::context::{Context, Output};
use crate::error::{Exit, Failure};

/// Estimate memory, operations and time of a model
///
/// Parameters; operations, bytes and time per token in each mode; state against KV cache and their break-even context; the highest order
/// that fits into memory; training time and memory. Counts are exact. Times follow from the peak performance of the machine and printed
/// assumptions.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise plan paper-small
  termwise plan paper-small --memory 2GiB --context 65536 --batch 4
  termwise plan runs/first --attention \"taylor=0..4 norm=l2\"
  termwise plan paper-large --train-tokens 40B --hardware all --out plan
  termwise plan paper-small --batch 64 --ranks 8 --network 12.5GB --latency 5    a step shared over 100 Gbit/s

Models: tiny, small-test, medium-test, paper-small, paper-deep, paper-large; or a folder with a config.json, a run, a checkpoint, hf://OWNER/NAME.
Hardware: here (measured), a100, h100, rtx4090, m2-ultra, xeon-8480 (by data sheet), or all.")]
pub struct PlanArgs {
    /// Preset, model folder, run, checkpoint or hf://OWNER/NAME[@REVISION]
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Preset or variant string for every head [default: that of the model]
    #[arg(long, value_name = "VARIANT")]
    pub attention: Option<String>,
    /// Context length [default: that of the model]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub context: Option<u64>,
    /// Rows per batch
    #[arg(long, default_value = "1", value_name = "N", value_parser = parse_count)]
    pub batch: u64,
    /// Chunk length [default: 128]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub chunk: Option<u64>,
    /// Memory for states or caches, such as 2GiB [default: that of the hardware]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub memory: Option<u64>,
    /// Training tokens, such as 5B [default: 20 per parameter]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub train_tokens: Option<u64>,
    /// Vocabulary size [default: that of the model; 32,000 for paper presets, 257 for others]
    #[arg(long, value_name = "N", value_parser = crate::args::size(1 << 24))]
    pub vocab: Option<usize>,
    /// Hardware; may be repeated, times per mode are for the first [default: here]
    #[arg(long, value_name = "NAME")]
    pub hardware: Vec<String>,
    /// Processes that share a training step over a network
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub ranks: Option<u64>,
    /// Network bandwidth per process, in bytes per second
    #[arg(long, value_name = "SIZE", default_value = "1.25GB", value_parser = parse_bytes, requires = "ranks")]
    pub network: u64,
    /// Network latency in microseconds
    #[arg(long, value_name = "X", default_value_t = 50.0, value_parser = parse_latency, requires = "ranks")]
    pub latency: f64,
    #[command(flatten)]
    pub output: Output,
}

fn parse_latency(text: &str) -> Result<f64, String> {
    let microseconds = text.parse().ok().filter(|x: &f64| x.is_finite() && *x >= 0.0);
    microseconds.ok_or_else(|| "it must be zero or a positive number of microseconds".into())
}

impl PlanArgs {
    fn options(&self, threads: usize) -> Options {
        Options {
            model: self.model.clone(),
            attention: self.attention.clone(),
            vocabulary: self.vocab,
            context: self.context,
            chunk: self.chunk,
            batch: self.batch,
            memory: self.memory,
            tokens: self.train_tokens,
            hardware: self.hardware.clone(),
            threads,
            network: self.ranks.map(|ranks| Network { ranks, bandwidth: self.network as f64, latency: 1e-6 * self.latency }),
        }
    }
}

pub fn run(args: &PlanArgs, context: &mut Context) -> Result<Exit, Failure> {
    let plan = plan::plan(&args.options(context.threads))?;
    context.emit(&plan, &args.output).map(Exit::done)
}
