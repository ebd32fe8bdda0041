//! `termwise plan`.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use termwise_lab::Error;
use termwise_lab::plan::{self, Options, parse_bytes, parse_count};

use crate::print;

/// Say what a model will cost before running it
///
/// Parameters; operations, bytes and time a token in each mode; state against KV cache and the contexts at which they are even; the order that
/// fits a memory; training time and memory. Counts are exact, times follow from the machine's peaks and assumptions that are printed.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise plan paper-small
  termwise plan paper-small --memory 2GiB --context 65536 --batch 4
  termwise plan runs/first --attention \"taylor=0..4 norm=l2\"
  termwise plan paper-large --tokens 40B --hardware all --svg plan.svg

Models: tiny, small-test, medium-test, paper-small, paper-deep, paper-large; or a folder with a config.json, a run, a checkpoint, hf://OWNER/NAME.
Hardware: here (measured), a100, h100, rtx4090, m2-ultra, xeon-8480 (by data sheet), or all.")]
pub struct PlanArgs {
    /// A preset's name, a folder of a model, a run, a checkpoint, or hf://OWNER/NAME[@REVISION]
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Preset or expression for every head [default: the model's own]
    #[arg(long, value_name = "VARIANT")]
    pub attention: Option<String>,
    /// Tokens of context [default: what the model was made for]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub context: Option<u64>,
    /// Rows computed together
    #[arg(long, default_value = "1", value_name = "N", value_parser = parse_count)]
    pub batch: u64,
    /// Positions of a chunk [default: 128]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub chunk: Option<u64>,
    /// Memory that has to hold states or caches, as in 2GiB [default: the machine's, if its data sheet says]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub memory: Option<u64>,
    /// Tokens to train on, as in 5B [default: 20 a parameter]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub tokens: Option<u64>,
    /// Tokens in the vocabulary [default: the model's; of presets 32,000 for the paper's, 257 for others]
    #[arg(long, value_name = "N", value_parser = crate::args::size(1 << 24))]
    pub vocab: Option<usize>,
    /// Machine; may be given several times, and the first is the one that times of modes are for [default: here]
    #[arg(long, value_name = "NAME")]
    pub hardware: Vec<String>,
    /// Draw state against cache into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
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
            tokens: self.tokens,
            hardware: self.hardware.clone(),
            threads,
        }
    }
}

/// Plans, draws where asked, and prints.
pub fn run<E: From<Error> + From<io::Error>>(args: &PlanArgs, threads: usize, out: &mut impl Write) -> Result<(), E> {
    let plan = plan::plan(&args.options(threads))?;
    if let Some(path) = &args.svg {
        let write = std::fs::write(path, plan.figure().to_svg());
        write.map_err(termwise_llama::Error::io("write", path)).map_err(Error::from)?;
    }
    if args.json {
        print::json(&plan, out)?;
    } else {
        print::plan(&plan, out)?;
    }
    Ok(())
}
