//! `termwise`: softmax attention taken apart, term by term. Arguments are read here and results printed; the work is in
//! the libraries.

mod args;
mod build;
mod commands;
mod print;
mod text;

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;

use clap::Parser;
use termwise_base::threads;
use termwise_lab::{variants, verify};
use termwise_train::run::{LOCKED, STOPPED};
use termwise_train::tell::{draw, readable, tell};

use args::{Cli, Command};
use commands::Ended;

/// A check did not pass, or something failed while working.
const FAILURE: u8 = 1;
/// What was asked for makes no sense; clap's own errors have the same code.
const USAGE: u8 = 2;

enum Failure {
    /// What went wrong in a library, and the exit code.
    Work(String, u8),
    /// Standard output is gone or full.
    Output(io::Error),
}

macro_rules! failures {
    ($($($library:ident)::+: $code:expr,)*) => {$(
        impl From<$($library::)+Error> for Failure {
            fn from(error: $($library::)+Error) -> Failure {
                let code: fn(&$($library::)+Error) -> u8 = $code;
                Failure::Work(error.to_string(), code(&error))
            }
        }
    )*};
}

failures! {
    termwise_base::threads: |_| FAILURE,
    termwise_data: |_| FAILURE,
    termwise_generate: |_| FAILURE,
    termwise_inspect: |error| if error.is_usage() { USAGE } else { FAILURE },
    termwise_lab: |error| if error.is_usage() { USAGE } else { FAILURE },
    termwise_papers: |error| if error.is_usage() { USAGE } else { FAILURE },
    termwise_train: |error| if matches!(error, termwise_train::Error::RunLocked { .. }) { LOCKED } else { FAILURE },
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Output(error)
    }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    match run(cli, &mut io::stdout().lock()) {
        Ok(Ended::Well) => ExitCode::SUCCESS,
        Ok(Ended::Unwell) => ExitCode::from(FAILURE),
        Ok(Ended::Stopped) => ExitCode::from(STOPPED),
        // Whoever read our output has seen enough, as in `termwise variants | head -1`.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(Failure::Output(error)) => fail(&format!("cannot write the output: {error}"), FAILURE),
        Err(Failure::Work(message, code)) => fail(&message, code),
    }
}

/// What clap has to say: help and version go to standard output, errors are made readable first, since they repeat what was typed.
fn usage(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        draw(&readable(&error.render().to_string()));
        return ExitCode::from(USAGE);
    }
    match write!(io::stdout(), "{}", error.render()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => fail(&format!("cannot write the output: {error}"), FAILURE),
        _ => ExitCode::SUCCESS,
    }
}

fn fail(message: &str, code: u8) -> ExitCode {
    tell(&format!("error: {message}"));
    ExitCode::from(code)
}

fn run(cli: Cli, out: &mut impl Write) -> Result<Ended, Failure> {
    let threads = cli.threads.unwrap_or_else(threads::available);
    // For work outside the pools of single commands, such as tokenizing. It fails only where a pool is there already, and this is the first.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    match cli.command {
        Command::Variants(args) => {
            let sizes = args.sizes();
            let texts: Vec<&str> = args.variants.iter().map(String::as_str).collect();
            match (texts.is_empty(), args.json) {
                (true, false) => print::catalogue(&variants::catalogue(sizes)?, out)?,
                (true, true) => print::json(&variants::catalogue(sizes)?, out)?,
                (false, false) => print::descriptions(&variants::describe(&texts, sizes)?, sizes, out)?,
                (false, true) => print::json(&print::Described { sizes, variants: &variants::describe(&texts, sizes)? }, out)?,
            }
            Ok(Ended::Well)
        }
        Command::Reproduce(args) => commands::reproduce::run::<Failure>(&args, threads, out),
        Command::Verify(args) => verify(args, threads, out).map(Ended::from),
        Command::Plan(args) => commands::plan::run::<Failure>(&args, threads, out).map(|()| Ended::Well),
        Command::Train(args) => commands::train::run::<Failure>(&args, cli.threads, out),
        Command::Eval(args) => commands::eval::run::<Failure>(&args, threads, out).map(|()| Ended::Well),
        Command::Cut(args) => commands::cut::run::<Failure>(&args, threads, out).map(|()| Ended::Well),
        Command::Generate(args) => commands::generate::run::<Failure>(&args, threads, out).map(|()| Ended::Well),
        Command::Spectrum(args) => commands::spectrum::run::<Failure>(&args, threads, out).map(|()| Ended::Well),
        Command::Sweep(args) => commands::sweep::run::<Failure>(&args, threads, out),
        Command::Report(args) => commands::report::run::<Failure>(&args, out).map(|()| Ended::Well),
        Command::Separation(args) => commands::separation::run::<Failure>(&args, out).map(|()| Ended::Well),
        Command::Data(command) => commands::data::run::<Failure>(&command, out).map(|()| Ended::Well),
        Command::Tokenizer(command) => commands::tokenizer::run::<Failure>(&command, out).map(|()| Ended::Well),
        Command::Bench(bench) => commands::bench::run::<Failure>(&bench, threads, out).map(|()| Ended::Well),
    }
}

/// Whether every check holds.
fn verify(args: args::VerifyArgs, threads: usize, out: &mut impl Write) -> Result<bool, Failure> {
    let options = args.options(threads);
    if args.json {
        let mut cases = Vec::new();
        let summary = verify::run(&options, &mut |case| {
            cases.push(case.clone());
            ControlFlow::Continue(())
        })?;
        print::json(&print::Verified { seed: options.seed, cases: &cases, summary }, out)?;
        return Ok(summary.missed == 0);
    }
    // Lines go through a channel, since the checks run on threads of their own and standard output belongs to this one.
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            verify::run(&options, &mut move |case| match send.send(case.clone()) {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            })
        });
        let mut printer = print::CasePrinter::default();
        let printed = receive.iter().try_for_each(|case| printer.case(&case, out));
        // Without a reader the checks end at their next case.
        drop(receive);
        let summary = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        printed?;
        print::summary(summary, options.seed, out)?;
        Ok(summary.missed == 0)
    })
}
