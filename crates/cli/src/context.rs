//! Shared by all commands: output, threads, ranks and provenance.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use clap::{Args, ValueEnum};
use termwise_analysis::request::Monitor;
use termwise_base::provenance::Provenance;
use termwise_base::{files, threads};
use termwise_report::{Document, Documented, Terminal, to_json, write};
use termwise_train::log::print_line;

use crate::args::Cli;
use crate::error::Failure;
use crate::progress::{Bar, stop_on_interrupt};
use crate::ranks::Ranks;

/// Columns if the width of the terminal is unknown.
const WIDTH: usize = 100;
/// The largest line width, for readability.
const MAX_WIDTH: usize = 160;

/// When to color output.
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

/// The environment of a command.
pub struct Context<'a> {
    /// Number of threads.
    pub threads: usize,
    /// Standard output.
    pub out: &'a mut dyn Write,
    /// The build and the command line.
    pub provenance: Provenance,
    /// The command line.
    pub words: Vec<OsString>,
    /// The processes that share the work of this command.
    pub ranks: Ranks,
    terminal: Terminal,
    respawn_argv: Option<Vec<OsString>>,
}

impl<'a> Context<'a> {
    pub fn new(cli: &Cli, args: &[OsString], respawn_argv: Option<Vec<OsString>>, out: &'a mut dyn Write) -> Context<'a> {
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
        Context { threads, out, words: args.to_vec(), provenance: crate::build::here(args), ranks: Ranks::alone(), terminal, respawn_argv }
    }

    /// Joins the processes that a launcher has started with this one. Only rank 0 prints.
    pub fn join(&mut self) -> Result<(), Failure> {
        self.ranks = Ranks::join()?;
        Ok(())
    }

    /// Whether another rank prints results and warnings.
    pub fn is_silent(&self) -> bool {
        self.ranks.collective.rank() > 0
    }

    /// The arguments that start this program again.
    pub fn respawn_argv(&self) -> Result<Vec<OsString>, Failure> {
        match &self.respawn_argv {
            Some(words) => Ok(words.clone()),
            None => Ok(vec![std::env::current_exe().map_err(files::Error::io("find", "this program"))?.into()]),
        }
    }

    /// The Python interpreter that called this program, if any.
    pub fn called_by(&self) -> Option<OsString> {
        self.respawn_argv.as_ref()?.first().cloned()
    }

    /// A thread pool.
    pub fn pool(&self) -> Result<rayon::ThreadPool, Failure> {
        Ok(threads::pool(self.threads)?)
    }

    /// Runs a long computation in a thread pool, with progress on standard error. With `stopping`, a signal prints this text and requests a
    /// stop. Returns the result and whether a stop was requested.
    pub fn compute<T: Send, E: Into<Failure> + Send>(
        &self,
        quiet: bool,
        stopping: Option<&'static str>,
        work: impl FnOnce(&Monitor) -> Result<T, E> + Send,
    ) -> Result<(T, bool), Failure> {
        let stop = stopping.map(stop_on_interrupt).unwrap_or_default();
        let bar = Bar::new(quiet || self.is_silent());
        let (progress, message) = (|done, of, what: &str| bar.at(done, of, what), |text: &str| bar.print_line(text));
        let monitor = Monitor { stop: &stop, progress: &progress, message: &message };
        let found = self.pool()?.install(|| work(&monitor)).map_err(Into::into)?;
        drop(bar);
        Ok((found, stop.load(Ordering::Relaxed)))
    }

    /// Prints a result, and writes it with --out.
    pub fn emit<T: Documented>(&mut self, result: &T, output: &Output) -> Result<(), Failure> {
        if self.is_silent() {
            return Ok(());
        }
        // Files are written first, because the reader of standard output may have closed the pipe.
        let page = output.out.as_deref().map(|folder| write(result, folder, Some(&self.provenance))).transpose()?;
        self.print(result, output.print)?;
        if let Some(page) = page.filter(|_| !output.print.quiet) {
            print_line(&format!("written: {}", page.display()));
        }
        Ok(())
    }

    /// Prints a result as JSON or as a document.
    pub fn print<T: Documented>(&mut self, result: &T, print: Print) -> Result<(), Failure> {
        match print.json {
            _ if self.is_silent() => Ok(()),
            true => Ok(self.out.write_all(to_json(result, Some(&self.provenance)).as_bytes())?),
            false if print.details => self.print_document(&result.document(), true),
            false => {
                let document = result.document();
                let printed = self.print_lines(&result.summary())?;
                let all = document.to_terminal(&Terminal { details: true, ..self.terminal }).lines().count();
                self.print_hint(all.saturating_sub(printed))
            }
        }
    }

    /// Prints the first lines of a document, and how to print the rest.
    pub fn print_brief(&mut self, document: &Document) -> Result<(), Failure> {
        let all = document.to_terminal(&self.terminal).lines().count();
        let printed = self.print_lines(document)?;
        self.print_hint(all - printed)
    }

    /// Prints the first lines of a document. Returns their number.
    fn print_lines(&mut self, document: &Document) -> Result<usize, Failure> {
        let (text, _) = document.to_terminal_brief(&self.terminal);
        self.out.write_all(text.as_bytes())?;
        Ok(text.lines().count())
    }

    fn print_hint(&mut self, left_out: usize) -> Result<(), Failure> {
        if left_out > 0 {
            writeln!(self.out, "({left_out} more lines: --details)")?;
        }
        Ok(())
    }

    /// Prints a document.
    pub fn print_document(&mut self, document: &Document, details: bool) -> Result<(), Failure> {
        Ok(self.out.write_all(document.to_terminal(&Terminal { details, ..self.terminal }).as_bytes())?)
    }
}

/// Width of the terminal in columns.
pub fn width() -> usize {
    let asked = || std::env::var("COLUMNS").ok()?.parse().ok();
    let found = terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| usize::from(width.0)).or_else(asked);
    found.unwrap_or(WIDTH).clamp(20, MAX_WIDTH)
}
