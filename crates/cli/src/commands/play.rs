//! `termwise play`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use termwise_llama::Model;
use termwise_papers::play::{self, MODELS};
use termwise_train::progress::Display;
use termwise_train::settings::Layer;
use termwise_train::tell::tell;
use termwise_train::{RunOptions, Start, train};

use super::source::{cache_folder, prepare_with_progress};
use crate::context::Context;
use crate::error::{Exit, Failure};
use crate::progress::{Bar, stop_on_interrupt};

/// Make a page to play with: take the terms of softmax away and watch what a model forgets
///
/// One HTML file that works offline: a small model that recalls facts, a slider for the number of terms, its weights and answers, the memory of
/// each order beside the cache of softmax; switches for decay, window and write rule. Its three models are trained first, as ordinary runs,
/// in less than a minute of processor time on a Zen 4; runs that are finished are taken as they are.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise play
  termwise play --out site/play.html --runs runs/play
  termwise generate runs/play/softmax        its model is a run like any other")]
pub struct PlayArgs {
    /// The file to write
    #[arg(long, default_value = "play.html", value_name = "FILE")]
    pub out: PathBuf,
    /// Folder of the runs of its models
    #[arg(long, default_value = "runs/play", value_name = "DIR")]
    pub runs: PathBuf,
    /// Steps of training; fewer make models that recall less [default: 1500]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub steps: Option<usize>,
    /// Neither progress nor remarks on standard error
    #[arg(long, short)]
    pub quiet: bool,
}

pub fn run(args: &PlayArgs, context: &mut Context) -> Result<Exit, Failure> {
    let mut above = format!("threads = {}\n", context.threads);
    above += &args.steps.map(|steps| format!("steps = {steps}\n")).unwrap_or_default();
    let above = Layer::parse(&above, "the arguments")?;
    let stop = stop_on_interrupt("finishing the step and writing a checkpoint");
    let (mut models, mut recall) = (Vec::new(), Vec::new());
    for (name, attention) in MODELS {
        let settings = play::settings(attention, Some(above.clone()))?;
        let source = prepare_with_progress(&settings, &cache_folder(None), args.quiet)?;
        let folder = args.runs.join(name);
        let bar = Bar::new(args.quiet);
        let options = RunOptions {
            start: if folder.join("settings.toml").is_file() { Start::Resume } else { Start::Fresh },
            display: Display::To(Arc::new(move |event| bar.training(event))),
            stop: stop.clone(),
            files: settings.tokenizer_files()?,
            provenance: context.provenance.clone(),
            ..RunOptions::new(&folder)
        };
        let outcome = train(&settings, source.as_ref(), &options)?;
        drop(options);
        if !outcome.finished {
            return Ok(Exit::Interrupted);
        }
        recall.extend(outcome.held_out.and_then(|found| found.recall).map(|recall| format!("{name} {:.3}", recall.loss)));
        models.push((name, Model::read(&outcome.checkpoint)?));
    }
    let mut made = format!("Made by termwise {} on {}.", context.provenance.build, context.provenance.instructions);
    if !recall.is_empty() {
        made += &format!(" Held-out loss on answers, in nats: {}; guessing has {:.2}.", recall.join(", "), 16f64.ln());
    }
    let html = play::page(&models, &made)?;
    play::write(&html, &args.out)?;
    if !args.quiet {
        tell(&format!("written: {} ({} KB); open it in a browser", args.out.display(), html.len() / 1000));
    }
    Ok(Exit::Success)
}
