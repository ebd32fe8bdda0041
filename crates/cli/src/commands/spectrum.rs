//! `termwise spectrum`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use termwise_base::threads;
use termwise_inspect::Error;
use termwise_inspect::spectrum::{self, MAX_CUT, Options, RowChoice, Spectrum};
use termwise_llama::Model;

use super::settings::DataSettings;
use super::source::{cache_folder, model_folder, open_for_model};
use super::terminal::bar;
use crate::print;

/// Measure the terms of the exponential series inside a model, and how many of them each head needs
///
/// For every layer and head: the size of the terms x^n/n! of its scores by order, scores and entropy, and the error of its output when the
/// series is cut at each even order. Writes spectrum.json and pictures into a folder and prints a table.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise spectrum path/to/llama --data book.txt
  termwise spectrum hf://owner/name --data book.txt --length 4096
  termwise spectrum                       the newest run in runs/, on the held-out part of its own data
  termwise spectrum runs/first/checkpoints/step-00001000
  termwise spectrum path/to/llama --data book.txt --rows all --tokens 65536 --orders 64 --out spectrum
  termwise spectrum --schema > spectrum.schema.json

The published metric is the dominant order over all scores: argmax over n of the mean of |x^n/n!|, here with absolute values and over visible
pairs only. Rows are queries, drawn from equal parts of each window; the same rows for every head.")]
pub struct SpectrumArgs {
    /// A folder of a model, a run, a checkpoint, or hf://OWNER/NAME[@REVISION] [default: the newest run in runs/]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Positions of a window [default: as in training, else 4096 or what the model was made for]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub length: Option<usize>,
    /// Tokens to read, in whole windows
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub tokens: u64,
    /// Rows of each window that are looked at, or `all`
    #[arg(long, default_value = "256", value_name = "N", value_parser = parse_rows)]
    pub rows: RowChoice,
    /// Seed of the choice of rows
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
    /// Highest order at which series are cut, an even number
    #[arg(long, default_value_t = 32, value_name = "P", value_parser = parse_order)]
    pub orders: usize,
    /// Folder for results [default: spectrum-NAME]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Use only the held-out part of the data that are named
    #[arg(long)]
    pub held_out_only: bool,
    /// Folder for tokenized text [default: termwise in the user's cache]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Say what forward pass and analysis took
    #[arg(long)]
    pub timing: bool,
    /// Print JSON; a folder is written only where --out names one
    #[arg(long)]
    pub json: bool,
    /// Print the JSON schema of spectrum.json and do nothing else
    #[arg(long)]
    pub schema: bool,
    #[command(flatten)]
    pub data: DataSettings,
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

/// Measures, writes and prints.
pub fn run<E>(args: &SpectrumArgs, threads: usize, out: &mut impl Write) -> Result<(), E>
where
    E: From<Error> + From<termwise_train::Error> + From<io::Error>,
{
    if args.schema {
        return Ok(print::json(&spectrum::schema(), out)?);
    }
    let model = model_folder(args.model.as_deref(), false)?;
    // On the hub a model is called by owner and name, and not by the folder of the cache.
    let name = short_name(args.model.as_deref().filter(|name| name.starts_with("hf://")).unwrap_or(&model.display().to_string()));
    let spectrum = measured(args, &model, &name, threads)?;
    let folder = args.out.clone().or_else(|| (!args.json).then(|| format!("spectrum-{name}").into()));
    let page = folder.as_deref().map(|folder| spectrum.write(folder)).transpose()?;
    if args.json {
        print::json(&spectrum, out)?;
    } else {
        print::spectrum(&spectrum, out)?;
    }
    if let Some(timing) = spectrum.timing {
        let (forward, analysis) = (timing.forward, timing.analysis);
        // Where standard error is closed there is nobody to tell.
        let _ = writeln!(io::stderr(), "forward {forward:.2} s, analysis {analysis:.2} s: {:.2} forward passes", 1.0 + analysis / forward);
    }
    if let Some(page) = page {
        let _ = writeln!(io::stderr(), "written: {}", page.display());
    }
    Ok(())
}

fn measured(args: &SpectrumArgs, folder: &Path, name: &str, threads: usize) -> Result<Spectrum, Error> {
    let pool = threads::pool(threads)?;
    // Before the text is tokenized, which may take long.
    let model = pool.install(|| Model::read(folder))?;
    let opened = open_for_model(folder, &args.data, args.held_out_only, &cache_folder(args.cache.as_deref()))?;
    let usual = opened.trained.unwrap_or(model.config.max_position_embeddings.min(4096));
    let windows = spectrum::windows(opened.source.as_ref(), args.length.unwrap_or(usual), args.tokens)?;
    let options = Options { orders: (0..=args.orders).step_by(2).collect(), rows: args.rows, seed: args.seed, ..Options::default() };
    let bar = bar("layers");
    let mut spectrum = pool.install(|| {
        spectrum::measure(&model, &windows, &options, &mut |progress| {
            bar.set_length(progress.of);
            bar.set_position(progress.done);
        })
    })?;
    bar.finish_and_clear();
    spectrum.model.name = name.to_owned();
    spectrum.text.data = opened.data;
    spectrum.made_by = Some(crate::build::here().into());
    spectrum.timing = spectrum.timing.filter(|_| args.timing);
    Ok(spectrum)
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
