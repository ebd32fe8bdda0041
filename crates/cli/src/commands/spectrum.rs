//! `termwise spectrum`.

use clap::Args;
use termwise_analysis::request::TextOptions;
use termwise_analysis::spectrum::{self, MAX_CUT, Request, RowChoice};
use termwise_model::Precision;

use super::settings::ModelArgs;
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};

/// Measure which Taylor terms each attention head needs
///
/// For every layer and head: the magnitude of the terms x^n/n! of its scores, score and entropy statistics, and the error of its output
/// when the series is truncated at each even order.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise spectrum path/to/llama --data book.txt
  termwise spectrum hf://owner/name --data book.txt --length 4096
  termwise spectrum                       the newest run in runs/, on the held-out part of its own data
  termwise spectrum runs/first/checkpoints/step-00001000
  termwise spectrum path/to/llama --data book.txt --queries all --tokens 65536 --max-order 64 --out spectrum

The published metric is the dominant order over all scores: argmax over n of the mean of |x^n/n!|, here with absolute values and over visible
pairs only. Queries are sampled from equal parts of each window and are the same for every head.")]
pub struct SpectrumArgs {
    #[command(flatten)]
    pub input: ModelArgs,
    /// Tokens per window [default: as in training, otherwise 1024 or the context of the model]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub length: Option<usize>,
    /// Tokens to read, in whole windows
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub tokens: u64,
    /// Sampled queries per window, or `all`
    #[arg(long, default_value = "256", value_name = "N", value_parser = parse_rows)]
    pub queries: RowChoice,
    /// Seed of the sampled queries
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Highest truncation order, an even number
    #[arg(long, default_value_t = 32, value_name = "P", value_parser = parse_order)]
    pub max_order: usize,
    /// Precision of linear layers and products of attention: f32, or bf16 with float32 sums
    #[arg(long, default_value = "f32", value_name = "TYPE")]
    pub precision: Precision,
    /// Use only the held-out part of --data
    #[arg(long)]
    pub held_out_only: bool,
    /// Print the time of forward pass and analysis
    #[arg(long)]
    pub timing: bool,
    #[command(flatten)]
    pub output: Output,
}

fn parse_rows(text: &str) -> Result<RowChoice, String> {
    match text.parse() {
        _ if text == "all" => Ok(RowChoice::All),
        Ok(count) if count > 0 => Ok(RowChoice::Sampled(count)),
        _ => Err("it must be `all` or a number of at least 1".into()),
    }
}

fn parse_order(text: &str) -> Result<usize, String> {
    let order = text.parse().ok().filter(|order| order % 2 == 0 && *order <= MAX_CUT);
    order.ok_or_else(|| format!("it must be an even number from 0 to {MAX_CUT}"))
}

pub fn run(args: &SpectrumArgs, context: &mut Context) -> Result<Exit, Failure> {
    context.join()?;
    let request = Request {
        model: args.input.model.clone(),
        text: TextOptions { held_out_only: args.held_out_only, ..args.input.text() },
        length: args.length,
        tokens: args.tokens,
        queries: args.queries,
        seed: args.seed,
        max_order: args.max_order,
        timing: args.timing,
        precision: args.precision,
        collective: context.ranks.collective.clone(),
    };
    let (found, _) = context.compute(args.output.print.quiet, None, |monitor| spectrum::of_model(&request, monitor))?;
    context.emit(&found, &args.output).map(Exit::done)
}
