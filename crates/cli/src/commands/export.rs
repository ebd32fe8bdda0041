//! `termwise export`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use termwise_analysis::export;
use termwise_attention::Variant;
use termwise_base::files;
use termwise_train::log::tell;

use crate::context::Context;
use crate::error::{Exit, Failure};

/// Export a variant as a PyTorch module
#[derive(Debug, Subcommand)]
pub enum ExportCommand {
    Torch(TorchArgs),
}

/// Write one Python file with a plain PyTorch module that computes a variant
///
/// The module has the projections and parameters that the variant needs, under the names of checkpoints, and three forms: parallel, in chunks,
/// and token by token. Reference values are inside: run as a program, the file compares itself with them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise export torch \"taylor=0..2 norm=rms out\" --out attention.py && python attention.py
  termwise export torch gated_deltanet | less")]
pub struct TorchArgs {
    /// Preset or expression
    #[arg(value_name = "NAME_OR_EXPRESSION")]
    pub variant: Variant,
    /// File to write [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

pub fn run(command: &ExportCommand, context: &mut Context) -> Result<Exit, Failure> {
    let ExportCommand::Torch(args) = command;
    let source = export::torch(&args.variant, &format!("termwise {}", crate::build::version()))?;
    match &args.out {
        None => context.out.write_all(source.as_bytes())?,
        Some(file) => {
            files::write_whole(file, source.as_bytes())?;
            tell(&format!("written: {}", file.display()));
        }
    }
    Ok(Exit::Success)
}
