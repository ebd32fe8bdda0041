//! `termwise config`.

use std::path::PathBuf;

use clap::Args;
use termwise_train::settings::{Layer, Settings};

use super::settings::AllSettings;
use crate::context::Context;
use crate::error::{Exit, Failure};

/// Print a settings file for `termwise train --config`, every setting with what it means
///
/// Flags and files change settings as for `termwise train`; 0 stands for another setting's value.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise config > settings.toml
  termwise config --recipe paper --model paper-small --lr 3e-4 > paper.toml
  termwise train --config settings.toml")]
pub struct ConfigArgs {
    /// TOML file with settings to begin with; may be given several times
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,
    #[command(flatten)]
    pub settings: AllSettings,
}

pub fn run(args: &ConfigArgs, context: &mut Context) -> Result<Exit, Failure> {
    let mut layers = args.config.iter().map(Layer::read).collect::<Result<Vec<_>, _>>()?;
    layers.push(args.settings.layer(None)?);
    let text = format!("# Settings for `termwise train --config FILE`.\n\n{}", Settings::resolve(&layers)?.with_zeros(&layers).to_toml());
    Ok(context.out.write_all(text.as_bytes()).map(Exit::done)?)
}
