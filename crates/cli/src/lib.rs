//! `termwise`: softmax attention taken apart, term by term.
//!
//! The program as a function, [`main_with`]. A command is arguments → a call of a library → a result → [`Context::emit`]: the work and the
//! documents are in the libraries, and everything that has to do with a terminal is here.
//!
//! Exit codes:
//! - 0: it is done;
//! - 1: something failed while working, or a check missed;
//! - 2: what was asked for makes no sense, by the arguments or by what they name;
//! - 75: another process is at work in the same folder;
//! - 130: it was interrupted, and what was finished by then can be taken up again.

mod args;
mod build;
mod commands;
mod context;
mod error;
mod progress;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::FromArgMatches;
use termwise_train::tell::{draw, readable, tell};

use args::{Cli, Command};
use context::Context;
use error::{Exit, Failure};

/// Runs the program with these arguments, the first of which is its name, on the standard streams.
pub fn main_with(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let parsed = args::command().try_get_matches_from(args).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            if error.use_stderr() {
                // Errors repeat what was typed.
                draw(&readable(&error.render().to_string()));
                return ExitCode::from(Exit::Usage);
            }
            return match error.print() {
                Err(error) if error.kind() != io::ErrorKind::BrokenPipe => fail(&cannot_write(&error), Exit::Failure),
                _ => ExitCode::from(Exit::Success),
            };
        }
    };
    let mut out = io::stdout().lock();
    let ended = run(cli, &mut out).and_then(|exit| out.flush().map(|()| exit).map_err(Failure::Output));
    match ended {
        Ok(exit) => ExitCode::from(exit),
        // Whoever read our output has seen enough, as in `termwise variants | head -1`.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::from(Exit::Success),
        Err(Failure::Output(error)) => fail(&cannot_write(&error), Exit::Failure),
        Err(Failure::Library(message, exit)) => fail(&message, exit),
    }
}

fn cannot_write(error: &io::Error) -> String {
    format!("cannot write the output: {error}")
}

fn fail(message: &str, exit: Exit) -> ExitCode {
    tell(&format!("error: {message}"));
    ExitCode::from(exit)
}

fn run(cli: Cli, out: &mut dyn Write) -> Result<Exit, Failure> {
    let mut context = Context::new(cli.threads, cli.color, out);
    let context = &mut context;
    // For work outside the pools of single commands, such as tokenizing. It fails only where a pool is there already.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(context.threads).build_global();
    match cli.command {
        Command::Variants(args) => commands::variants::run(&args, context),
        Command::Verify(args) => commands::verify::run(&args, context),
        Command::Bench(args) => commands::bench::run(&args, context),
        Command::Plan(args) => commands::plan::run(&args, context),
        Command::Separation(args) => commands::separation::run(&args, context),
        Command::Spectrum(args) => commands::spectrum::run(&args, context),
        Command::Cut(args) => commands::cut::run(&args, context),
        Command::Show(args) => commands::show::run(&args, context),
        Command::Runs(args) => commands::runs::run(&args, context),
        Command::Config(args) => commands::config::run(&args, context),
        Command::Completions(args) => commands::manual::completions(&args, context),
        Command::Man(args) => commands::manual::man(&args, context),
        Command::Reproduce(args) => commands::reproduce::run(&args, context),
        Command::Train(args) => commands::train::run(&args, cli.threads, context),
        Command::Eval(args) => commands::eval::run(&args, context),
        Command::Generate(args) => commands::generate::run(&args, context),
        Command::Sweep(args) => commands::sweep::run(&args, context),
        Command::Report(args) => commands::report::run(&args, context),
        Command::Data(command) => commands::data::run(&command, context),
        Command::Tokenizer(command) => commands::tokenizer::run(&command, context),
    }
}
