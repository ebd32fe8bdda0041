//! `termwise export`.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use termwise_analysis::export;
use termwise_attention::Variant;
use termwise_base::files;
use termwise_train::log::print_line;

use crate::context::Context;
use crate::error::{Exit, Failure};

/// File without --out.
const DEFAULT_FILE: &str = "attention.py";

/// Export a variant as a PyTorch module
#[derive(Debug, Subcommand)]
pub enum ExportCommand {
    Torch(TorchArgs),
}

/// Write one Python file with a PyTorch module that computes a variant
///
/// The module has the projections and parameters of the variant, named as in checkpoints, and three forms: parallel, chunked and token by
/// token. The file contains reference values. Run as a program, it compares its output with them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise export torch \"taylor=0..2 norm=rms out\" --out attention.py && python attention.py
  termwise export torch gated_deltanet --out - | less")]
pub struct TorchArgs {
    /// Preset or variant string
    #[arg(value_name = "VARIANT")]
    pub variant: Variant,
    /// File to write, or - for standard output [default: attention.py, which must not exist]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

pub fn run(command: &ExportCommand, context: &mut Context) -> Result<Exit, Failure> {
    let ExportCommand::Torch(args) = command;
    let source = export::torch(&args.variant, &format!("termwise {}", crate::build::version()))?;
    let file = match &args.out {
        Some(file) if file == Path::new("-") => {
            return Ok(context.out.write_all(source.as_bytes()).map(Exit::done)?);
        }
        Some(file) => file,
        None if Path::new(DEFAULT_FILE).exists() => return Err(Failure::usage(format!("{DEFAULT_FILE} exists; name a file with --out"))),
        None => Path::new(DEFAULT_FILE),
    };
    files::write_whole(file, source.as_bytes())?;
    print_line(&format!("written: {0}; test it with: python {0}", file.display()));
    Ok(Exit::Success)
}
