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
use termwise_lab::{Error, variants, verify};

use args::{Cli, Command};

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
    ($($($library:ident)::+: $usage:expr,)*) => {$(
        impl From<$($library::)+Error> for Failure {
            fn from(error: $($library::)+Error) -> Failure {
                let usage: fn(&$($library::)+Error) -> bool = $usage;
                Failure::Work(error.to_string(), if usage(&error) { USAGE } else { FAILURE })
            }
        }
    )*};
}

failures! {
    termwise_base::threads: |_| false,
    termwise_data: |_| false,
    termwise_generate: |_| false,
    termwise_inspect: termwise_inspect::Error::is_usage,
    termwise_lab: Error::is_usage,
    termwise_papers: termwise_papers::Error::is_usage,
    termwise_train: |_| false,
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Output(error)
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli, &mut io::stdout().lock()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(FAILURE),
        // Whoever read our output has seen enough, as in `termwise variants | head -1`.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(Failure::Output(error)) => fail(&format!("cannot write the output: {error}"), FAILURE),
        Err(Failure::Work(message, code)) => fail(&message, code),
    }
}

fn fail(message: &str, code: u8) -> ExitCode {
    // Where even standard error is closed there is nobody to tell.
    let _ = writeln!(io::stderr(), "error: {message}");
    ExitCode::from(code)
}

/// Whether everything that was checked holds.
fn run(cli: Cli, out: &mut impl Write) -> Result<bool, Failure> {
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
            Ok(true)
        }
        Command::Reproduce(args) => commands::reproduce::run::<Failure>(&args, threads, out),
        Command::Verify(args) => verify(args, threads, out),
        Command::Plan(args) => commands::plan::run::<Failure>(&args, threads, out).map(|()| true),
        Command::Train(args) => Ok(commands::train::run(&args, cli.threads, out)?),
        Command::Eval(args) => Ok(commands::eval::run(&args, threads, out)?),
        Command::Cut(args) => commands::cut::run::<Failure>(&args, threads, out).map(|()| true),
        Command::Generate(args) => commands::generate::run::<Failure>(&args, threads, out).map(|()| true),
        Command::Spectrum(args) => commands::spectrum::run::<Failure>(&args, threads, out).map(|()| true),
        Command::Sweep(args) => Ok(commands::sweep::run(&args, threads, out)?),
        Command::Report(args) => commands::report::run::<Failure>(&args, out).map(|()| true),
        Command::Separation(args) => commands::separation::run::<Failure>(&args, out).map(|()| true),
        Command::Data(command) => commands::data::run::<Failure>(&command, out).map(|()| true),
        Command::Tokenizer(command) => commands::tokenizer::run::<Failure>(&command, out).map(|()| true),
        Command::Bench(bench) => commands::bench::run::<Failure>(&bench, threads, out).map(|()| true),
    }
}

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
