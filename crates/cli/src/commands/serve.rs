//! `termwise serve`.

use std::path::PathBuf;

use clap::Args;
use termwise_report::counted;
use termwise_serve::Server;
use termwise_train::tell::tell;

use crate::context::Context;
use crate::error::{Exit, Failure};
use crate::progress::stop_on_interrupt;

/// Watch the runs in a folder in a browser, while they train
///
/// A page on this machine alone: curves that grow, runs to compare, sort and filter by their settings, and the attention and memory of a run's
/// model on a text. It is reached only by the address that is printed, which holds a token. Nothing is written. Ctrl-C ends it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise serve
  termwise serve sweeps/recall --port 8000
  ssh -L 8000:127.0.0.1:8000 machine termwise serve runs --port 8000     from elsewhere")]
pub struct ServeArgs {
    /// Folder of runs, of sweeps, or a run
    #[arg(default_value = "runs", value_name = "RUNS")]
    pub folder: PathBuf,
    /// Port of this machine [default: one that is free]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub port: u16,
}

pub fn run(args: &ServeArgs, context: &mut Context) -> Result<Exit, Failure> {
    let server = Server::open(&args.folder, args.port)?;
    let stop = stop_on_interrupt("closing the page");
    writeln!(context.out, "{}", server.address())?;
    context.out.flush()?;
    tell(&format!("{} in {}; open the address in a browser, Ctrl-C ends", counted(server.runs(), "run"), args.folder.display()));
    context.pool()?.install(|| server.run(&stop));
    Ok(Exit::Success)
}
