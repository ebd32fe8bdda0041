//! `termwise`: softmax attention as a Taylor series, each order a recurrent network.
//!
//! [`run()`] is the program as a function. A command is arguments → one library call → one result → [`Context::emit`]. The computation and the
//! documents are in the libraries; this crate contains the command line and the terminal.
//!
//! Exit codes:
//! - 0: success;
//! - 1: a failure at run time, or a check failed;
//! - 2: unusable arguments, or a named model, text or settings file that is missing or unsuitable;
//! - 3: some prompts of `generate` failed, the others are complete;
//! - 75: another process uses the same directory;
//! - 130: interrupted; finished work is kept and the command can be resumed.

mod args;
mod build;
mod commands;
mod context;
mod error;
mod progress;
mod ranks;

pub use build::here as provenance;

use std::ffi::OsString;
use std::io::{self, Write};

use termwise_train::log::{draw, print_line, readable};

use args::{Cli, Command};
use context::Context;
use error::{Exit, Failure};

/// Runs the program with these arguments, the first of which is its name, on the standard streams. Returns the exit code.
///
/// Sweeps start one process per run: with `respawn_argv`, such as `python -m termwise`, before the arguments of the run; by default with the
/// executable of this process.
///
/// It can be called inside another program, and repeatedly. A command with a checkpoint handles SIGINT, SIGTERM, SIGUSR1 and SIGHUP, and
/// restores the previous handlers at its end; a second signal exits the process. The other commands do not change signal handlers. If the
/// caller's handler of SIGINT does not end the process, as in Python, the caller must restore the default first.
pub fn run(args: impl IntoIterator<Item = OsString>, respawn_argv: Option<Vec<OsString>>) -> u8 {
    let _signals = progress::RestoreSignals;
    let args: Vec<OsString> = args.into_iter().collect();
    (match parse_and_run(args, respawn_argv) {
        Ok(exit) => exit,
        // The reader of a pipe has closed it, as in `termwise variants | head -1`.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Success,
        Err(Failure::Output(error)) => fail(&format!("cannot write the output: {error}"), Exit::Failure),
        Err(Failure::Library(message, exit)) => fail(&message, exit),
    }) as u8
}

fn fail(message: &str, exit: Exit) -> Exit {
    if !message.is_empty() {
        print_line(&format!("error: {message}"));
    }
    exit
}

fn parse_and_run(args: Vec<OsString>, respawn_argv: Option<Vec<OsString>>) -> Result<Exit, Failure> {
    let cli = match args::parse(&args) {
        Ok(cli) => cli,
        Err(error) => {
            if error.use_stderr() {
                // Errors repeat the arguments, which may contain control characters.
                draw(&readable(&error.render().to_string()));
                return Ok(Exit::Usage);
            }
            return Ok(error.print().map(Exit::done)?);
        }
    };
    // For work outside the pools of single commands, such as tokenizing. It fails only if there is a global pool already.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(cli.threads.unwrap_or_else(termwise_base::threads::available)).build_global();
    let mut out = io::stdout().lock();
    let mut context = Context::new(&cli, &args, respawn_argv, &mut out);
    let exit = command(cli, &mut context).inspect_err(|failure| context.ranks.fail(failure))?;
    // Ranks synchronize here.
    drop(context);
    Ok(out.flush().map(|()| exit)?)
}

fn command(cli: Cli, context: &mut Context) -> Result<Exit, Failure> {
    match cli.command {
        Command::Variants(args) => commands::variants::run(&args, context),
        Command::Verify(args) => commands::verify::run(&args, context),
        Command::Bench(args) => commands::bench::run(&args, context),
        Command::Plan(args) => commands::plan::run(&args, context),
        Command::Demo(args) => commands::demo::run(&args, context),
        Command::Separation(args) => commands::separation::run(&args, context),
        Command::Spectrum(args) => commands::spectrum::run(&args, context),
        Command::Truncate(args) => commands::truncate::run(&args, context),
        Command::Kv(command) => commands::kv::run(&command, context),
        Command::Atlas(args) => commands::kv::atlas(&args, context),
        Command::Convert(args) => commands::kv::convert(&args, context),
        Command::Audit(args) => commands::kv::audit(&args, context),
        Command::Frontier(args) => commands::kv::frontier(&args, context),
        Command::Show(args) => commands::show::run(&args, context),
        Command::Runs(args) => commands::runs::run(&args, context),
        Command::Serve(args) => commands::serve::run(&args, context),
        Command::Config(args) => commands::config::run(&args, context),
        Command::Completions(args) => commands::completions::run(&args, context),
        Command::Man(args) => commands::completions::man(&args, context),
        Command::Reproduce(args) => commands::reproduce::run(&args, context),
        Command::Train(args) => commands::train::run(&args, cli.threads, context),
        Command::Eval(args) => commands::eval::run(&args, context),
        Command::Generate(args) => commands::generate::run(&args, context),
        Command::Sweep(args) => commands::sweep::run(&args, context),
        Command::Report(args) => commands::report::run(&args, context),
        Command::Export(command) => commands::export::run(&command, context),
        Command::Data(command) => commands::data::run(&command, context),
        Command::Tokenizer(command) => commands::tokenizer::run(&command, context),
    }
}
