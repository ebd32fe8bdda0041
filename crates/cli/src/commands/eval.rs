//! `termwise eval`.

use clap::Args;
use termwise_analysis::evaluate::{self, Request, SliceOptions};
use termwise_analysis::request::TextOptions;
use termwise_attention::{Mode, Variant};
use termwise_model::Precision;

use super::settings::ModelArgs;
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};

/// Measure the loss of a model on text
///
/// Cross-entropy per token, perplexity and bits per byte; on builtin data also the loss on recall tokens and the excess over the entropy of
/// the data. With --data, all of it is used; without, the held-out part of the training data.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise eval                          the newest run in runs/
  termwise eval runs/first               its best checkpoint
  termwise eval path/to/llama --data book.txt --length 2048 --stride 512
  termwise eval runs/first/checkpoints/step-00001000 --data builtin --json
  termwise eval hf://owner/name --data book.txt
  termwise eval path/to/llama --data book.txt --order 4      softmax truncated at order 4
  termwise eval runs/first --slices      also the loss on associative-recall hits and by position

With a stride below the length, windows overlap: each predicts STRIDE tokens, with up to LENGTH − STRIDE tokens of context before them.")]
pub struct EvalArgs {
    #[command(flatten)]
    pub input: ModelArgs,
    /// Tokens per window [default: as in training, otherwise 1024 or the context of the model]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub length: Option<usize>,
    /// Predicted tokens per window [default: the length]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub stride: Option<usize>,
    /// Windows per batch
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = super::size(1 << 16))]
    pub batch: usize,
    /// Largest number of batches [default: all]
    #[arg(long, value_name = "N")]
    pub batches: Option<u64>,
    /// Use only the held-out part of --data
    #[arg(long)]
    pub held_out_only: bool,
    /// Truncate every exp kernel at this order
    #[arg(long, value_name = "P", value_parser = crate::args::order())]
    pub order: Option<usize>,
    /// Replace the attention of all heads by this variant
    #[arg(long, value_name = "VARIANT")]
    pub attention: Option<Variant>,
    /// How attention is computed: parallel, chunk, chunk=LENGTH or auto
    #[arg(long, default_value = "parallel", value_name = "MODE")]
    pub mode: Mode,
    /// Also print the loss by associative-recall hit, training frequency and position
    #[arg(long)]
    pub slices: bool,
    /// With --slices: tokens of the n-grams whose earlier occurrence in the context makes a hit
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=64), requires = "slices")]
    pub ngram: u8,
    /// With --slices: text in which n-grams are counted [default: the training text of the run]
    #[arg(long, value_name = "FILE", num_args = 1.., requires = "slices")]
    pub train_data: Vec<String>,
    /// Precision of linear layers and products of attention: f32, or bf16 with float32 sums
    #[arg(long, default_value = "f32", value_name = "TYPE")]
    pub precision: Precision,
    #[command(flatten)]
    pub output: Output,
}

pub fn run(args: &EvalArgs, context: &mut Context) -> Result<Exit, Failure> {
    context.join()?;
    let request = Request {
        model: args.input.model.clone(),
        text: TextOptions { held_out_only: args.held_out_only, ..args.input.text() },
        length: args.length,
        stride: args.stride,
        batch: args.batch,
        batches: args.batches.unwrap_or(0),
        order: args.order,
        attention: args.attention.clone(),
        mode: args.mode,
        precision: args.precision,
        collective: context.ranks.collective.clone(),
        slices: args.slices.then(|| SliceOptions::new(args.ngram.into()).train_data(args.train_data.clone())),
    };
    let (found, _) = context.compute(args.output.print.quiet, None, |monitor| evaluate::run(&request, monitor))?;
    context.emit(&found, &args.output).map(Exit::done)
}
