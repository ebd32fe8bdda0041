//! `termwise demo`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use termwise_experiments::demo::{self, Demo, DemoOptions};
use termwise_train::log::print_line;
use termwise_train::progress::Display;

use crate::context::Context;
use crate::error::{Exit, Failure};
use crate::progress::{Bar, stop_on_interrupt};

/// Write an interactive demo of softmax as a Taylor series
///
/// One HTML file that works offline: a small model that recalls facts, a slider for the number of Taylor terms, and the attention weights,
/// predictions and memory at each order. The three models are trained first, as ordinary runs, which takes about a minute. Finished runs
/// are reused.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise demo
  termwise demo --out site/demo.html --runs runs/demo
  termwise generate runs/demo/softmax        its model is an ordinary run")]
pub struct DemoArgs {
    /// HTML file to write
    #[arg(long, default_value = "demo.html", value_name = "FILE")]
    pub out: PathBuf,
    /// Folder of its training runs
    #[arg(long, default_value = "runs/demo", value_name = "DIR")]
    pub runs: PathBuf,
    /// Training steps [default: 1500]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub steps: Option<usize>,
    /// Suppress progress and warnings
    #[arg(long, short)]
    pub quiet: bool,
}

pub fn run(args: &DemoArgs, context: &mut Context) -> Result<Exit, Failure> {
    let options = DemoOptions {
        out: args.out.clone(),
        runs: args.runs.clone(),
        steps: args.steps,
        threads: context.threads,
        provenance: context.provenance.clone(),
    };
    let stop = stop_on_interrupt("finishing the step and writing a checkpoint");
    let display = || {
        let bar = Bar::new(args.quiet);
        Display::To(Arc::new(move |event| bar.training(event)))
    };
    let Some(Demo { path, bytes, .. }) = demo::run(&options, &stop, &display)? else { return Ok(Exit::Interrupted) };
    if !args.quiet {
        print_line(&format!("written: {} ({} KB); open it in a browser", path.display(), bytes / 1000));
    }
    Ok(Exit::Success)
}
