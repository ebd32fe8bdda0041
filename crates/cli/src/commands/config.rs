//! `termwise train --print-config`; `termwise config` is its earlier name.

use std::path::PathBuf;

use clap::Args;
use termwise_train::settings::{Layer, Settings};

use super::settings::AllSettings;
use crate::context::Context;
use crate::error::{Exit, Failure};

/// Print a settings file (earlier name of `termwise train --print-config`)
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise config > settings.toml
  termwise config --recipe paper --model paper-small --lr 3e-4 > paper.toml
  termwise train --config settings.toml")]
pub struct ConfigArgs {
    /// TOML file with settings; may be repeated
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,
    #[command(flatten)]
    pub settings: AllSettings,
}

pub fn run(args: &ConfigArgs, context: &mut Context) -> Result<Exit, Failure> {
    print(&args.config, &args.settings, context)
}

/// Prints the settings of these files and flags as a file.
pub(super) fn print(files: &[PathBuf], settings: &AllSettings, context: &mut Context) -> Result<Exit, Failure> {
    let mut layers = files.iter().map(Layer::read).collect::<Result<Vec<_>, _>>()?;
    layers.push(settings.layer(None)?);
    let text = format!("# Settings for `termwise train --config FILE`.\n\n{}", Settings::resolve(&layers)?.with_zeros(&layers).to_toml());
    Ok(context.out.write_all(text.as_bytes()).map(Exit::done)?)
}
