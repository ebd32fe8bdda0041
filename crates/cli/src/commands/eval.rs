//! `termwise eval`.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use termwise_attention::{Mode, Variant};
use termwise_base::threads;
use termwise_llama::generate::{cut, warnings};
use termwise_llama::{Model, Options};
use termwise_train::eval::{Evaluation, Windows, evaluate_with};
use termwise_train::progress::describe;
use termwise_train::{Error, Result};

use super::settings::DataSettings;
use super::source::{Opened, cache_folder, model_folder, open_for_model};

/// Measure how well a model predicts text
///
/// Cross-entropy over all tokens, perplexity, bits a byte; for the built-in language also recall tokens apart and the excess over the best
/// possible. Of data named here all of it is used; without --data, the held-out part of what the checkpoint was trained on.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise eval                          the newest run in runs/
  termwise eval runs/first               its best checkpoint
  termwise eval path/to/llama --data book.txt --length 2048 --stride 512
  termwise eval runs/first/checkpoints/step-00001000 --data builtin --json
  termwise eval hf://owner/name --data book.txt
  termwise eval path/to/llama --data book.txt --order 4      softmax cut to its first orders

With a stride below the length, windows overlap: each asks for that many tokens and shows up to length − stride tokens before them.")]
pub struct EvalArgs {
    /// A folder of a model, a run, a checkpoint, or hf://OWNER/NAME[@REVISION] [default: the newest run in runs/]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Positions of a window [default: as in training, else 1024 or what the model was made for]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub length: Option<usize>,
    /// Tokens that a window asks for [default: the length]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub stride: Option<usize>,
    /// Windows computed at once
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = super::size(1 << 16))]
    pub batch: usize,
    /// Batches at most [default: all]
    #[arg(long, value_name = "N")]
    pub batches: Option<u64>,
    /// Use only the held-out part of the data that are named
    #[arg(long)]
    pub held_out_only: bool,
    /// Folder for tokenized text [default: termwise in the user's cache]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Cut every exp kernel to the series up to this order
    #[arg(long, value_name = "P")]
    pub order: Option<usize>,
    /// Give all heads this attention, where the weights of the model suffice
    #[arg(long, value_name = "VARIANT")]
    pub attention: Option<Variant>,
    /// How attention is computed: parallel, chunk, chunk=LENGTH or auto
    #[arg(long, default_value = "parallel", value_name = "MODE")]
    pub mode: Mode,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub data: DataSettings,
}

#[derive(Serialize)]
struct Report<'a> {
    model: String,
    data: &'a [String],
    held_out_only: bool,
    #[serde(flatten)]
    windows: Windows,
    #[serde(flatten)]
    evaluation: Evaluation,
}

/// Evaluates in a pool of that many threads.
pub fn run(args: &EvalArgs, threads: usize, out: &mut impl Write) -> Result<bool> {
    let folder = model_folder(args.model.as_deref(), false)?;
    let opened = open_for_model(&folder, &args.data, args.held_out_only, &cache_folder(args.cache.as_deref()))?;
    let Opened { source, data, held_out_only, trained } = &opened;
    let pool = threads::pool(threads)?;
    let (windows, (evaluation, nonpositive)) = pool.install(|| -> Result<_> {
        let mut model = Model::read(&folder)?;
        if let Some(attention) = &args.attention {
            model = model.with_attention(attention.clone())?;
        }
        if let Some(order) = args.order {
            model = model.with_attention(cut(&model.config, order)?)?;
        }
        let heads: Vec<Variant> = (0..model.config.num_hidden_layers).flat_map(|layer| model.config.heads(layer)).collect();
        for warning in warnings(&heads) {
            // Where standard error is closed there is nobody to tell.
            let _ = writeln!(std::io::stderr(), "warning: {warning}");
        }
        let usual = trained.unwrap_or(model.config.max_position_embeddings.min(1024));
        let length = args.length.unwrap_or(usual);
        let options = Options { mode: args.mode, ..Options::default() };
        let windows = Windows { batch: args.batch, length, stride: args.stride.unwrap_or(length) };
        Ok((windows, evaluate_with(&model, source.as_ref(), windows, args.batches.unwrap_or(0), options)?))
    })?;
    if let Some(at) = nonpositive {
        let _ = writeln!(std::io::stderr(), "warning: {at}, the first that is not positive");
    }
    let write = |error: std::io::Error| Error::Io { action: "write", path: "standard output".into(), source: error };
    if args.json {
        let report = Report { model: folder.display().to_string(), data, held_out_only: *held_out_only, windows, evaluation };
        let text = serde_json::to_string_pretty(&report).map_err(std::io::Error::from).map_err(write)?;
        writeln!(out, "{text}").map_err(write)?;
    } else {
        let Windows { length, stride, .. } = windows;
        let which = if *held_out_only { "held-out tokens" } else { "tokens" };
        writeln!(out, "{} {which} in windows of {length}, stride {stride}", evaluation.tokens).map_err(write)?;
        writeln!(out, "{}", describe(&evaluation).trim_start_matches("held-out ")).map_err(write)?;
    }
    Ok(true)
}
