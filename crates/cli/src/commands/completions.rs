//! `termwise completions`: shell completions and man pages, generated from the parser.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use clap_complete::Shell;
use termwise_base::files;
use termwise_train::log::print_line;

use super::reference;
use crate::args::command;
use crate::context::Context;
use crate::error::{Exit, Failure};

/// Generate shell completions and man pages
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise completions bash > ~/.local/share/bash-completion/completions/termwise
  termwise completions zsh > ~/.zfunc/_termwise
  termwise completions fish > ~/.config/fish/completions/termwise.fish
  termwise completions man train | man -l -
  termwise completions man --out ~/.local/share/man/man1")]
pub struct CompletionsArgs {
    /// Shell, or man for man pages
    #[arg(value_enum, value_name = "SHELL")]
    pub target: Target,
    #[command(flatten)]
    pub man: PageOptions,
}

/// What to generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Target {
    Bash,
    Elvish,
    Fish,
    Powershell,
    Zsh,
    Man,
}

impl Target {
    fn shell(self) -> Option<Shell> {
        Some(match self {
            Target::Bash => Shell::Bash,
            Target::Elvish => Shell::Elvish,
            Target::Fish => Shell::Fish,
            Target::Powershell => Shell::PowerShell,
            Target::Zsh => Shell::Zsh,
            Target::Man => return None,
        })
    }
}

pub fn run(args: &CompletionsArgs, context: &mut Context) -> Result<Exit, Failure> {
    let Some(shell) = args.target.shell() else { return man_pages(&args.man, context) };
    if !args.man.command.is_empty() || args.man.out.is_some() {
        return Err(Failure::usage("COMMAND, --out and --markdown are for man pages: `termwise completions man`"));
    }
    // Into memory first: the generator panics if it cannot write.
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command(true), "termwise", &mut text);
    Ok(context.out.write_all(&text).map(Exit::done)?)
}

/// Print a man page, or write one for every command
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise man train | man -l -
  termwise man --out ~/.local/share/man/man1
  termwise man --markdown --out docs/reference")]
pub struct ManArgs {
    #[command(flatten)]
    pub pages: PageOptions,
}

/// Which man pages.
#[derive(Debug, Args)]
pub struct PageOptions {
    /// Man page: command and subcommand [default: the program]
    #[arg(value_name = "COMMAND", conflicts_with = "out")]
    pub command: Vec<String>,
    /// Man pages: write one per command into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Man pages: write the Markdown reference of commands, settings, parts and presets instead
    #[arg(long, requires = "out")]
    pub markdown: bool,
}

pub fn man(args: &ManArgs, context: &mut Context) -> Result<Exit, Failure> {
    man_pages(&args.pages, context)
}

fn man_pages(args: &PageOptions, context: &mut Context) -> Result<Exit, Failure> {
    let mut program = command(true);
    program.build();
    if let Some(folder) = &args.out {
        files::create_folder(folder)?;
        if args.markdown {
            for (name, text) in reference::pages()? {
                files::write_whole(&folder.join(name), text.as_bytes())?;
            }
            print_line(&format!("written: {}", folder.display()));
            return Ok(Exit::Success);
        }
        clap_mangen::generate_to(program, folder).map_err(files::Error::io("write manual pages to", folder))?;
        print_line(&format!("written: {}", folder.display()));
        return Ok(Exit::Success);
    }
    let mut found = &program;
    for name in &args.command {
        let known = || found.get_subcommands().map(clap::Command::get_name).collect::<Vec<_>>().join(", ");
        found = found.find_subcommand(name).ok_or_else(|| Failure::usage(format!("unknown command `{name}`; available: {}", known())))?;
    }
    let name = found.get_display_name().unwrap_or("termwise").to_owned();
    let mut text = Vec::new();
    clap_mangen::Man::new(found.clone().name(name)).render(&mut text)?;
    Ok(context.out.write_all(&text).map(Exit::done)?)
}
