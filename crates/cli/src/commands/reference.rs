//! The reference of the documentation, made from what the program itself reads: its parser, its settings, its parts and presets.

use termwise_lab::variants::{Sizes, catalogue};
use termwise_report::{Block, Cell, Document, Documented, Section, Table};
use termwise_train::Settings;
use termwise_train::settings::keys::{Effect, KEYS};

use crate::args::command;
use crate::error::Failure;

/// Said at the head of every page.
const MADE: &str = "Made by `termwise man --markdown --out docs/reference`; a test holds it to the program.";

/// Names of files, and their text.
pub fn pages() -> Result<Vec<(&'static str, String)>, Failure> {
    let sizes = Sizes { heads: 16, kv_heads: 16, head_dim: 64, hidden: 1024 };
    let mut parts = catalogue(sizes)?.document();
    parts.lead.insert(0, Block::text(MADE));
    Ok(vec![("commands.md", commands()), ("settings.md", settings()?), ("parts.md", parts.to_markdown_without_figures())])
}

/// Every command with its help, as it is printed for a terminal of 100 columns.
fn commands() -> String {
    let mut out = format!("# Commands\n\n{MADE}\n");
    let mut program = command().term_width(100);
    program.build();
    write(&mut program, "termwise", 2, &mut out);
    out
}

fn write(command: &mut clap::Command, name: &str, depth: usize, out: &mut String) {
    let help = command.clone().render_long_help().to_string();
    let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
    // A fence longer than any in the text.
    *out += &format!("\n{} {name}\n\n````text\n{}\n````\n", "#".repeat(depth.min(4)), lines.join("\n").trim_end());
    let mut names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).filter(|sub| sub != "help").collect();
    for sub in names.drain(..) {
        let own = command.find_subcommand_mut(&sub).expect("its own name");
        write(own, &format!("{name} {sub}"), depth + 1, out);
    }
}

fn settings() -> Result<String, Failure> {
    let usual = Settings::from_toml("recipe = \"default\"", "the defaults")?.to_toml();
    let usual: toml::Table = usual.parse().expect("settings are valid TOML");
    let mut groups: Vec<&str> = Vec::new();
    for key in KEYS {
        if !groups.contains(&key.group) {
            groups.push(key.group);
        }
    }
    let sections = groups.into_iter().map(|group| {
        let mut table = Table::new("", ["setting", "is", "usual", "resumed runs may change it", "meaning"]);
        for key in KEYS.iter().filter(|key| key.group == group) {
            let value = usual.get(key.name).map_or(Cell::Empty, |value| Cell::code(value.to_string()));
            let change = match key.effect {
                Effect::Mathematics => "no",
                Effect::Data => "if the data are the same",
                Effect::Extent => "to go further",
                Effect::Rounding => "yes, the same up to rounding",
                Effect::Watching | Effect::Nothing => "yes",
            };
            table.rows.push(vec![Cell::code(key.name), Cell::text(key.kind.expected()), value, Cell::text(change), Cell::text(key.help)]);
        }
        Section::new(group, vec![Block::table(group, table)])
    });
    let lead = "Under these names in TOML files (`termwise train --config FILE`, the plan of a sweep, `settings.toml` of a run); as flags with `-` for `_`. \
        `termwise config` prints a file to begin with.";
    let page = Document { title: "Settings".into(), lead: vec![Block::text(MADE), Block::text(lead)], sections: sections.collect() };
    Ok(page.to_markdown_without_figures())
}
