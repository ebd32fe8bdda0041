//! `termwise serve`.

use std::path::PathBuf;

use clap::Args;
use termwise_experiments::serve::Server;
use termwise_report::counted;
use termwise_train::log::print_line;

use crate::context::Context;
use crate::error::{Exit, Failure};
use crate::progress::stop_on_interrupt;

/// Watch training runs in a browser
///
/// Live loss curves; runs can be compared, sorted and filtered by settings; attention and memory of a model on a text. The server listens on
/// this machine only, under the printed address, which contains a token. It writes nothing. Ctrl-C stops it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise serve
  termwise serve sweeps/recall --port 8000
  ssh -L 8000:127.0.0.1:8000 machine termwise serve runs --port 8000     from another machine")]
pub struct ServeArgs {
    /// Folder of runs or sweeps, or a run
    #[arg(default_value = "runs", value_name = "RUNS")]
    pub folder: PathBuf,
    /// Port [default: a free one]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub port: u16,
}

pub fn run(args: &ServeArgs, context: &mut Context) -> Result<Exit, Failure> {
    let server = Server::open(&args.folder, args.port)?;
    let stop = stop_on_interrupt("stopping the server");
    writeln!(context.out, "{}", server.address())?;
    context.out.flush()?;
    print_line(&format!(
        "{} in {}; open the address in a browser; Ctrl-C stops the server",
        counted(server.runs(), "run"),
        args.folder.display()
    ));
    context.pool()?.install(|| server.run(&stop));
    Ok(Exit::Success)
}
