//! `termwise completions` and `termwise man`, both made from the parser.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;
use termwise_base::files;
use termwise_train::tell::tell;

use super::reference;
use crate::args::command;
use crate::context::Context;
use crate::error::{Exit, Failure};

/// Print what a shell needs to complete commands and flags
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise completions bash > ~/.local/share/bash-completion/completions/termwise
  termwise completions zsh > ~/.zfunc/_termwise
  termwise completions fish > ~/.config/fish/completions/termwise.fish")]
pub struct CompletionsArgs {
    /// Which shell
    #[arg(value_enum)]
    pub shell: Shell,
}

pub fn completions(args: &CompletionsArgs, context: &mut Context) -> Result<Exit, Failure> {
    // Into memory first: the generator panics where it cannot write.
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command(), "termwise", &mut text);
    Ok(context.out.write_all(&text).map(Exit::done)?)
}

/// Print a manual page, or write one for every command
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise man train | man -l -
  termwise man --out ~/.local/share/man/man1
  termwise man --markdown --out docs/reference")]
pub struct ManArgs {
    /// Command, and its own command where it has several [default: the program]
    #[arg(value_name = "COMMAND", conflicts_with = "out")]
    pub command: Vec<String>,
    /// Write a page for the program and each command into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Write the reference of the documentation instead: commands, settings, parts and presets as Markdown
    #[arg(long, requires = "out")]
    pub markdown: bool,
}

pub fn man(args: &ManArgs, context: &mut Context) -> Result<Exit, Failure> {
    let mut program = command();
    program.build();
    if let Some(folder) = &args.out {
        files::create_folder(folder)?;
        if args.markdown {
            for (name, text) in reference::pages()? {
                files::write_whole(&folder.join(name), text.as_bytes())?;
            }
            tell(&format!("written: {}", folder.display()));
            return Ok(Exit::Success);
        }
        clap_mangen::generate_to(program, folder).map_err(files::Error::io("write manual pages to", folder))?;
        tell(&format!("written: {}", folder.display()));
        return Ok(Exit::Success);
    }
    let mut found = &program;
    for name in &args.command {
        let known = || found.get_subcommands().map(clap::Command::get_name).collect::<Vec<_>>().join(", ");
        found =
            found.find_subcommand(name).ok_or_else(|| Failure::usage(format!("there is no command `{name}`; known are {}", known())))?;
    }
    let name = found.get_display_name().unwrap_or("termwise").to_owned();
    let mut text = Vec::new();
    clap_mangen::Man::new(found.clone().name(name)).render(&mut text)?;
    Ok(context.out.write_all(&text).map(Exit::done)?)
}
