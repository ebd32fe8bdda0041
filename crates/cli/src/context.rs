//! What commands share: output, threads, ranks and provenance.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use clap::{Args, ValueEnum};
use termwise_analysis::request::Monitor;
use termwise_base::provenance::Provenance;
use termwise_base::{files, threads};
use termwise_report::{Document, Documented, Terminal, to_json, write};
use termwise_train::log::tell;

use crate::args::Cli;
use crate::error::{Exit, Failure};
use crate::progress::{Bar, stop_on_interrupt};
use crate::ranks::Ranks;

/// Characters of a line where nothing says how many there are.
const WIDTH: usize = 100;
/// Longer lines are hard to read.
const WIDEST: usize = 160;

/// When to colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// If standard output is a terminal and NO_COLOR is not set
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// How a result is printed.
#[derive(Clone, Copy, Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct Print {
    /// Print JSON, which `termwise report` renders
    #[arg(long)]
    pub json: bool,
    /// Suppress progress and warnings
    #[arg(long, short)]
    pub quiet: bool,
    /// Also print sections that are collapsed in the HTML report
    #[arg(long)]
    pub details: bool,
}

/// Where a result is printed or written.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub struct Output {
    /// Write an HTML report, JSON, figures and tables into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    #[command(flatten)]
    pub print: Print,
}

/// What a command works with.
pub struct Context<'a> {
    /// Threads to compute on.
    pub threads: usize,
    /// Standard output.
    pub out: &'a mut dyn Write,
    /// This build and how it was called.
    pub provenance: Provenance,
    /// As it was called.
    pub words: Vec<OsString>,
    /// The processes that share the work of this command.
    pub ranks: Ranks,
    terminal: Terminal,
    again: Option<Vec<OsString>>,
}

impl<'a> Context<'a> {
    pub fn new(cli: &Cli, args: &[OsString], again: Option<Vec<OsString>>, out: &'a mut dyn Write) -> Context<'a> {
        let color = match cli.color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => {
                let unwanted = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
                io::stdout().is_terminal() && !unwanted("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
            }
        };
        let terminal = Terminal { width: width(), color, details: false };
        let threads = cli.threads.unwrap_or_else(threads::available);
        Context {
            threads,
            out,
            words: args.to_vec(),
            provenance: crate::build::here(args),
            ranks: Ranks::alone(),
            terminal,
            again,
        }
    }

    /// Shares the work with the processes that were started with this one, if any were. Rank 0 alone speaks.
    pub fn join(&mut self) -> Result<(), Failure> {
        self.ranks = Ranks::join()?;
        Ok(())
    }

    /// Whether results and remarks are for another rank to give.
    pub fn is_silent(&self) -> bool {
        self.ranks.collective.rank() > 0
    }

    /// The words that start this program again.
    pub fn again(&self) -> Result<Vec<OsString>, Failure> {
        match &self.again {
            Some(words) => Ok(words.clone()),
            None => Ok(vec![std::env::current_exe().map_err(files::Error::io("find", "this program"))?.into()]),
        }
    }

    /// The interpreter that has called this program, if one has.
    pub fn called_by(&self) -> Option<OsString> {
        self.again.as_ref()?.first().cloned()
    }

    /// A pool of the threads to compute on.
    pub fn pool(&self) -> Result<rayon::ThreadPool, Failure> {
        Ok(threads::pool(self.threads)?)
    }

    /// Runs a long computation on the threads of this command, with progress on standard error. With `stopping`, signals ask it to stop and this
    /// text is printed. Returns its result and whether it was asked to stop.
    pub fn compute<T: Send, E: Into<Failure> + Send>(
        &self,
        quiet: bool,
        stopping: Option<&'static str>,
        work: impl FnOnce(&Monitor) -> Result<T, E> + Send,
    ) -> Result<(T, bool), Failure> {
        let stop = stopping.map(stop_on_interrupt).unwrap_or_default();
        let bar = Bar::new(quiet || self.is_silent());
        let (progress, message) = (|done, of, what: &str| bar.at(done, of, what), |text: &str| bar.tell(text));
        let monitor = Monitor { stop: &stop, progress: &progress, message: &message };
        let found = self.pool()?.install(|| work(&monitor)).map_err(Into::into)?;
        drop(bar);
        Ok((found, stop.load(Ordering::Relaxed)))
    }

    /// Prints a result, and writes it where that was asked for.
    pub fn emit<T: Documented>(&mut self, result: &T, output: &Output) -> Result<(), Failure> {
        if self.is_silent() {
            return Ok(());
        }
        // Files first: whoever closes the pipe has not said that they are unwanted.
        let page = output.out.as_deref().map(|folder| write(result, folder, Some(&self.provenance))).transpose()?;
        self.print(result, output.print)?;
        if let Some(page) = page.filter(|_| !output.print.quiet) {
            tell(&format!("written: {}", page.display()));
        }
        Ok(())
    }

    /// Prints a result as JSON or as a document.
    pub fn print<T: Documented>(&mut self, result: &T, print: Print) -> Result<(), Failure> {
        match print.json {
            _ if self.is_silent() => Ok(()),
            true => Ok(self.out.write_all(to_json(result, Some(&self.provenance)).as_bytes())?),
            false if print.details => self.print_document(&result.document(), true),
            false => self.print_brief(&result.summary()),
        }
    }

    /// Prints the first lines of a document, and how to see the rest.
    pub fn print_brief(&mut self, document: &Document) -> Result<(), Failure> {
        let (text, left_out) = document.to_terminal_brief(&self.terminal);
        self.out.write_all(text.as_bytes())?;
        if left_out > 0 {
            writeln!(self.out, "({left_out} more lines: --details)")?;
        }
        Ok(())
    }

    /// Prints what the JSON of a result looks like.
    pub fn schema(&mut self, schema: &serde_json::Value) -> Result<Exit, Failure> {
        Ok(writeln!(self.out, "{schema:#}").map(Exit::done)?)
    }

    /// Prints a document for this terminal.
    pub fn print_document(&mut self, document: &Document, details: bool) -> Result<(), Failure> {
        Ok(self.out.write_all(document.to_terminal(&Terminal { details, ..self.terminal }).as_bytes())?)
    }
}

/// Columns of the terminal.
pub fn width() -> usize {
    let asked = || std::env::var("COLUMNS").ok()?.parse().ok();
    let found = terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| usize::from(width.0)).or_else(asked);
    found.unwrap_or(WIDTH).clamp(20, WIDEST)
}
