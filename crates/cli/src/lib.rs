//! `termwise`: softmax attention taken apart, term by term.
//!
//! [`run()`] is the program as a function. A command is arguments → one library call → one result → [`Context::emit`]. The computation and the
//! documents are in the libraries; this crate contains the command line and the terminal.
//!
//! Exit codes:
//! - 0: it is done;
//! - 1: something failed while working, or a check missed;
//! - 2: the arguments cannot be used: unknown or contradictory ones, or a named model, text or settings file that is missing or unsuitable;
//! - 3: some of several results failed, and the others are complete: prompts of `generate`;
//! - 75: another process is at work in the same folder;
//! - 130: it was interrupted, and what was finished by then can be taken up again.

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

use termwise_train::log::{draw, readable, tell};

use args::{Cli, Command};
use context::Context;
use error::{Exit, Failure};

/// Runs the program with these arguments, the first of which is its name, on the standard streams. Gives the exit code.
///
/// Sweeps start this program again, once for each run: by the words `again`, such as those of `python -m termwise`, before the arguments of
/// the run; without them by the file of this process.
///
/// It can be called inside another program, and more than once. A command that can stop in good order takes SIGINT, SIGTERM, SIGUSR1 and SIGHUP, and
/// gives them back at its end; the second of them ends the process. The other commands leave signals as they are: where the caller's own
/// handler only takes note of SIGINT, as Python's does, the caller sets it to its default before, so that Ctrl-C ends them.
pub fn run(args: impl IntoIterator<Item = OsString>, again: Option<Vec<OsString>>) -> u8 {
    let _signals = progress::GiveBack;
    let args: Vec<OsString> = args.into_iter().collect();
    (match ended(args, again) {
        Ok(exit) => exit,
        // Whoever read our output has seen enough, as in `termwise variants | head -1`.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Success,
        Err(Failure::Output(error)) => fail(&format!("cannot write the output: {error}"), Exit::Failure),
        Err(Failure::Library(message, exit)) => fail(&message, exit),
    }) as u8
}

fn fail(message: &str, exit: Exit) -> Exit {
    if !message.is_empty() {
        tell(&format!("error: {message}"));
    }
    exit
}

fn ended(args: Vec<OsString>, again: Option<Vec<OsString>>) -> Result<Exit, Failure> {
    let cli = match args::parse(&args) {
        Ok(cli) => cli,
        Err(error) => {
            if error.use_stderr() {
                // Errors repeat what was typed.
                draw(&readable(&error.render().to_string()));
                return Ok(Exit::Usage);
            }
            return Ok(error.print().map(Exit::done)?);
        }
    };
    // For work outside the pools of single commands, such as tokenizing. It fails only where a pool is there already.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(cli.threads.unwrap_or_else(termwise_base::threads::available)).build_global();
    let mut out = io::stdout().lock();
    let mut context = Context::new(&cli, &args, again, &mut out);
    let exit = command(cli, &mut context).inspect_err(|failure| context.ranks.fail(failure))?;
    // Ranks wait for each other here.
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
