//! `termwise spectrum`.

use std::path::{Path, PathBuf};

use clap::Args;
use termwise_inspect::spectrum::{self, MAX_CUT, Options, RowChoice};
use termwise_llama::Model;

use super::WINDOW;
use super::settings::DataSettings;
use super::source::{cache_folder, model_folder, open_for_model, warn_beyond_context};
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};
use crate::progress::Bar;

/// Measure the terms of the exponential series inside a model, and how many of them each head needs
///
/// For every layer and head: the size of the terms x^n/n! of its scores by order, scores and entropy, and the error of its output when the
/// series is cut at each even order.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise spectrum path/to/llama --data book.txt
  termwise spectrum hf://owner/name --data book.txt --length 4096
  termwise spectrum                       the newest run in runs/, on the held-out part of its own data
  termwise spectrum runs/first/checkpoints/step-00001000
  termwise spectrum path/to/llama --data book.txt --queries all --tokens 65536 --max-order 64 --out spectrum
  termwise spectrum --schema > spectrum.schema.json

The published metric is the dominant order over all scores: argmax over n of the mean of |x^n/n!|, here with absolute values and over visible
pairs only. Queries are drawn from equal parts of each window; the same ones for every head.")]
pub struct SpectrumArgs {
    /// A folder of a model, a run, a checkpoint, or hf://OWNER/NAME[@REVISION] [default: the newest run in runs/]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Positions of a window [default: as in training, else 1024 or what the model was made for]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub length: Option<usize>,
    /// Tokens to read, in whole windows
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub tokens: u64,
    /// Queries of each window that are looked at, or `all`
    #[arg(long, default_value = "256", value_name = "N", value_parser = parse_rows)]
    pub queries: RowChoice,
    /// Seed of the choice of queries
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Highest order at which series are cut, an even number
    #[arg(long, default_value_t = 32, value_name = "P", value_parser = parse_order)]
    pub max_order: usize,
    /// Use only the held-out part of the data that are named
    #[arg(long)]
    pub held_out_only: bool,
    /// Folder for tokenized text [default: termwise in the user's cache]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Say what forward pass and analysis took
    #[arg(long)]
    pub timing: bool,
    /// Print the JSON schema of spectrum.json and do nothing else
    #[arg(long)]
    pub schema: bool,
    #[command(flatten)]
    pub data: DataSettings,
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
    if args.schema {
        return context.schema(&spectrum::schema());
    }
    context.join()?;
    let quiet = args.output.quiet || context.is_silent();
    let folder = model_folder(args.model.as_deref(), quiet)?;
    // On the hub a model is called by owner and name, and not by the folder of the cache.
    let name = short_name(args.model.as_deref().filter(|name| name.starts_with("hf://")).unwrap_or(&folder.display().to_string()));
    let pool = context.pool()?;
    // Before the text is tokenized, which may take long.
    let model = pool.install(|| Model::read(&folder))?;
    spectrum::check_kernels(&model)?;
    let opened = open_for_model(&folder, &args.data, args.held_out_only, &cache_folder(args.cache.as_deref()), quiet)?;
    let usual = opened.trained.unwrap_or(model.config.max_position_embeddings.min(WINDOW));
    let windows = spectrum::windows(opened.source.as_ref(), args.length.unwrap_or(usual), args.tokens)?;
    warn_beyond_context(windows.iter().map(Vec::len).max().unwrap_or(0), opened.trained, &model.config, quiet);
    let options = Options { orders: (0..=args.max_order).step_by(2).collect(), rows: args.queries, seed: args.seed, ..Options::default() };
    let bar = Bar::new(quiet);
    let collective = context.ranks.collective.clone();
    let mut show = |progress: spectrum::Progress| bar.at(progress.done, progress.of, "layers");
    let measured = pool.install(|| spectrum::measure_with(&model, &windows, &options, &*collective, &mut show));
    drop(bar);
    let mut spectrum = measured?;
    spectrum.model.name = name;
    spectrum.text.data = opened.data;
    spectrum.timing = spectrum.timing.filter(|_| args.timing);
    context.emit(&spectrum, &args.output).map(Exit::done)
}

/// What a model is called: the last part of its path, for a checkpoint with that of its run; owner and name on the hub.
fn short_name(name: &str) -> String {
    if let Some(rest) = name.strip_prefix("hf://") {
        return rest.replace(['/', '@'], "-");
    }
    let path = std::path::absolute(name).unwrap_or_else(|_| Path::new(name).to_owned());
    let part = |path: &Path| path.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned());
    let parent = path.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "checkpoints"));
    match parent.and_then(Path::parent) {
        Some(run) => format!("{}-{}", part(run), part(&path)),
        None => part(&path),
    }
}
