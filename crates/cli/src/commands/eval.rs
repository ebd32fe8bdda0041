//! `termwise eval`.

use std::path::PathBuf;

use clap::Args;
use termwise_attention::{Mode, Variant};
use termwise_llama::generate::{cut, warnings};
use termwise_llama::{Model, Options};
use termwise_train::Evaluated;
use termwise_train::eval::{Windows, evaluate_with};

use super::settings::DataSettings;
use super::source::{Opened, cache_folder, model_folder, open_for_model, warn_beyond_context, warning};
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};

/// Measure how well a model predicts text
///
/// Cross-entropy over all tokens, perplexity, bits per byte; for the built-in language also recall tokens apart and the excess over the best
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
    #[arg(long, value_name = "P", value_parser = crate::args::order())]
    pub order: Option<usize>,
    /// Give all heads this attention, where the weights of the model suffice
    #[arg(long, value_name = "VARIANT")]
    pub attention: Option<Variant>,
    /// How attention is computed: parallel, chunk, chunk=LENGTH or auto
    #[arg(long, default_value = "parallel", value_name = "MODE")]
    pub mode: Mode,
    #[command(flatten)]
    pub data: DataSettings,
    #[command(flatten)]
    pub output: Output,
}

pub fn run(args: &EvalArgs, context: &mut Context) -> Result<Exit, Failure> {
    context.join()?;
    let quiet = args.output.quiet || context.is_silent();
    let folder = model_folder(args.model.as_deref(), quiet)?;
    let opened = open_for_model(&folder, &args.data, args.held_out_only, &cache_folder(args.cache.as_deref()), quiet)?;
    let Opened { source, data, held_out_only, trained, .. } = opened;
    let remark = warning(quiet);
    let collective = context.ranks.collective.clone();
    let (windows, (evaluation, nonpositive)) = context.pool()?.install(|| -> Result<_, Failure> {
        let mut model = Model::read(&folder)?;
        if let Some(attention) = &args.attention {
            model = model.with_attention(attention.clone())?;
        }
        if let Some(order) = args.order {
            model = model.with_attention(cut(&model.config, order)?)?;
        }
        let heads: Vec<Variant> = (0..model.config.num_hidden_layers).flat_map(|layer| model.config.heads(layer)).collect();
        warnings(&heads).iter().for_each(|warning| remark(&warning.to_string()));
        let length = args.length.unwrap_or(trained.unwrap_or(model.config.max_position_embeddings.min(super::WINDOW)));
        warn_beyond_context(length, trained, &model.config, quiet);
        let options = Options { mode: args.mode, ..Options::default() };
        let windows = Windows { batch: args.batch, length, stride: args.stride.unwrap_or(length) };
        Ok((windows, evaluate_with(&model, source.as_ref(), windows, args.batches.unwrap_or(0), options, &*collective)?))
    })?;
    if let Some(at) = nonpositive {
        remark(&format!("{at}, the first that is not positive"));
    }
    let found = Evaluated { model: folder.display().to_string(), data, held_out_only, windows, evaluation };
    context.emit(&found, &args.output).map(Exit::done)
}
