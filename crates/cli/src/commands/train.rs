//! `termwise train`.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use termwise_lab::bench::peak_gflops;
use termwise_train::progress::{Display, describe};
use termwise_train::settings::{Layer, Settings};
use termwise_train::{Error, Outcome, Result, RunOptions, Start, nonfinite, run as runs};

use super::settings::AllSettings;
use super::source::{cache_folder, prepare_with_progress};
use super::terminal::stop_on_interrupt;

/// Train a model
///
/// Everything is decided by settings: flags, above files given with --config, above defaults. The run's folder keeps them all, its
/// metrics (metrics.jsonl, and events for TensorBoard), and checkpoints that Hugging Face's tools open.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise train --model tiny --attention norm --steps 2000
  termwise train --data corpus/ --tokenizer tokenizer.json --model small-test --name first
  termwise train --recipe paper --data \"hf://datasets/HuggingFaceFW/fineweb/data/CC-MAIN-2024-51/*.parquet\"
  termwise train --resume runs/first
  termwise train --resume runs/first --steps 5000
  termwise train --replay runs/first/nonfinite-step-1234

Ctrl-C finishes the step, writes a checkpoint and ends; a second Ctrl-C ends at once. However a run ends, resumed it goes on bit for bit.")]
pub struct TrainArgs {
    /// TOML file with settings, under the names of the flags with _ for -; may be given several times
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,
    /// Name of the run [default: made from model, attention and a hash of the settings]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Folder of runs
    #[arg(long, default_value = "runs", value_name = "DIR")]
    pub runs: PathBuf,
    /// Continue a run from its newest good checkpoint, or from exactly this checkpoint
    #[arg(long, value_name = "RUN_OR_CHECKPOINT", num_args = 0..=1, default_missing_value = "")]
    pub resume: Option<PathBuf>,
    /// Repeat a step that was not finite, from the folder that it left
    #[arg(long, value_name = "DIR", conflicts_with_all = ["resume", "config"])]
    pub replay: Option<PathBuf>,
    /// Folder for tokenized text [default: termwise in the user's cache]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Say nothing while working
    #[arg(long)]
    pub quiet: bool,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: AllSettings,
}

/// Whether the run was finished, or the replayed step was the same.
pub fn run(args: &TrainArgs, threads: Option<usize>, out: &mut impl Write) -> Result<bool> {
    if let Some(folder) = &args.replay {
        return replay(folder, args.json, out);
    }
    let mut layers = args.config.iter().map(Layer::read).collect::<Result<Vec<_>>>()?;
    layers.push(args.settings.layer(threads)?);
    let (folder, start) = place(args, &layers)?;
    let settings = if start == Start::Fresh { Settings::resolve(&layers)? } else { runs::resumed_settings(&folder, &layers)? };
    let source = prepare_with_progress(&settings, &cache_folder(args.cache.as_deref()), args.quiet)?;
    let options = RunOptions {
        start,
        display: if args.quiet { Display::Silent } else { Display::Auto },
        stop: stop_on_interrupt("finishing the step and writing a checkpoint"),
        peak: (!args.quiet).then(|| peak_gflops() * 1e9),
        files: settings.tokenizer_files()?,
        provenance: crate::build::here(),
        ..RunOptions::new(&folder)
    };
    let outcome = runs::train(&settings, source.as_ref(), &options)?;
    report(&outcome, args.json, out)?;
    Ok(outcome.finished)
}

/// The run's folder and where it begins.
fn place(args: &TrainArgs, layers: &[Layer]) -> Result<(PathBuf, Start)> {
    let named = || -> Result<PathBuf> {
        match &args.name {
            Some(name) => Ok(args.runs.join(name)),
            None => Ok(args.runs.join(Settings::resolve(layers)?.name())),
        }
    };
    match &args.resume {
        None => Ok((named()?, Start::Fresh)),
        Some(path) if path.as_os_str().is_empty() => Ok((named()?, Start::Resume)),
        Some(path) => {
            // A checkpoint lies two folders below its run.
            let is_step = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
            match path.parent().and_then(Path::parent) {
                Some(run) if is_step => Ok((run.to_owned(), Start::At(path.clone()))),
                _ => Ok((path.clone(), Start::Resume)),
            }
        }
    }
}

fn report(outcome: &Outcome, json: bool, out: &mut impl Write) -> Result<()> {
    let write = |error: std::io::Error| Error::Io { action: "write", path: "standard output".into(), source: error };
    if json {
        let text = serde_json::to_string_pretty(outcome).map_err(std::io::Error::from).map_err(write)?;
        return writeln!(out, "{text}").map_err(write);
    }
    let Outcome { folder, step, finished, checkpoint, loss, held_out, best, skipped, warnings, tokens_per_second } = outcome;
    let mut text = format!("{} after step {step}", if *finished { "finished" } else { "stopped" });
    if let Some(loss) = loss {
        text += &format!(", loss {loss:.4}, {tokens_per_second:.0} tokens/s");
    }
    text += "\n";
    if let Some(evaluation) = held_out {
        text += &format!("{}\n", describe(evaluation));
    }
    if let Some(best) = best {
        text += &format!("best held-out loss {:.4} at step {}\n", best.loss, best.step);
    }
    if *skipped > 0 {
        text += &format!("{skipped} updates were skipped\n");
    }
    if *warnings > 0 {
        text += &format!("{warnings} warnings, kept in {}\n", folder.join("warnings.log").display());
    }
    text += &format!("checkpoint {}\n", checkpoint.display());
    if *finished {
        text += &format!("next: termwise generate {0}, or eval, spectrum, cut, report {0}\n", folder.display());
    } else {
        text += &format!("continue with: termwise train --resume {}\n", folder.display());
    }
    out.write_all(text.as_bytes()).map_err(write)
}

fn replay(folder: &Path, json: bool, out: &mut impl Write) -> Result<bool> {
    let write = |error: std::io::Error| Error::Io { action: "write", path: "standard output".into(), source: error };
    let replay = nonfinite::replay(folder)?;
    let text = if json {
        serde_json::to_string_pretty(&replay).map_err(std::io::Error::from).map_err(write)?
    } else {
        match &replay.now {
            Some(now) if replay.same() => format!("the same again: {now}"),
            Some(now) => format!("not the same\nbefore: {}\nnow: {now}", replay.before),
            None => format!("finite now\nbefore: {}", replay.before),
        }
    };
    writeln!(out, "{text}").map_err(write)?;
    Ok(replay.same())
}
