//! What can be written on the command line.

use clap::builder::RangedU64ValueParser;
use clap::{CommandFactory, Parser, Subcommand};
use termwise_report::Terminal;

use crate::commands::audit::AuditArgs;
use crate::commands::bench::BenchArgs;
use crate::commands::config::ConfigArgs;
use crate::commands::convert::{AtlasArgs, ConvertArgs};
use crate::commands::cut::CutArgs;
use crate::commands::data::DataCommand;
use crate::commands::eval::EvalArgs;
use crate::commands::export::ExportCommand;
use crate::commands::frontier::FrontierArgs;
use crate::commands::generate::GenerateArgs;
use crate::commands::manual::{CompletionsArgs, ManArgs};
use crate::commands::plan::PlanArgs;
use crate::commands::play::PlayArgs;
use crate::commands::report::ReportArgs;
use crate::commands::reproduce::ReproduceArgs;
use crate::commands::runs::RunsArgs;
use crate::commands::separation::SeparationArgs;
use crate::commands::serve::ServeArgs;
use crate::commands::show::ShowArgs;
use crate::commands::spectrum::SpectrumArgs;
use crate::commands::sweep::SweepArgs;
use crate::commands::tokenizer::TokenizerCommand;
use crate::commands::train::TrainArgs;
use crate::commands::variants::VariantsArgs;
use crate::commands::verify::VerifyArgs;
use crate::context::{Color, width};

const EXAMPLES: &str = "\
Examples:
  termwise reproduce                              why softmax attention is more expressive, within five minutes
  termwise play                                   a page on which you take the terms of softmax away
  termwise variants                               every preset and every part to build variants from
  termwise variants \"taylor=0..4 norm=l2\" norm    what these two are, what they cost, whether they are equal
  termwise verify                                 check that this build computes what it says
  termwise bench attention --variants softmax,norm,\"taylor=0..4\"
  termwise plan paper-small                       what a model will cost, and when a state beats a cache
  termwise train --attention \"norm conv=3\"        train a small model on the built-in language
  termwise train --data corpus.txt --model tiny   or on text of your own
  termwise generate path/to/model --prompt Once   write text with a model
  termwise spectrum path/to/model --data book.txt how many terms of the series its heads need

`termwise help COMMAND` says more about each. Exit codes: 0 done, 1 failed or a check missed, 2 arguments that cannot be used (a named file or model that is missing included), 3 some of several prompts failed, 75 another process is at work in the folder, 130 interrupted with what is
finished kept. Environment: NO_COLOR, COLUMNS, HF_HOME and HF_HUB_OFFLINE for the hub, XDG_CACHE_HOME for tokenized text.";

/// Heading of the options that every command has.
const GLOBAL: &str = "Global options";

/// Softmax attention taken apart, term by term.
#[derive(Debug, Parser)]
#[command(
    name = "termwise",
    version = crate::build::version(),
    long_version = crate::build::long_version(),
    after_help = EXAMPLES,
    max_term_width = 120
)]
pub struct Cli {
    /// Threads to compute on [default: all cores]
    #[arg(long, global = true, value_name = "N", value_parser = size(1024), help_heading = GLOBAL)]
    pub threads: Option<usize>,
    /// When to colour
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t, hide_possible_values = true, hide_default_value = true, help_heading = GLOBAL)]
    pub color: Color,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Reproduce(ReproduceArgs),
    Play(PlayArgs),
    Variants(VariantsArgs),
    Separation(Box<SeparationArgs>),
    Train(Box<TrainArgs>),
    Sweep(SweepArgs),
    Eval(Box<EvalArgs>),
    Generate(Box<GenerateArgs>),
    Report(ReportArgs),
    Runs(RunsArgs),
    Serve(ServeArgs),
    Config(Box<ConfigArgs>),
    Spectrum(Box<SpectrumArgs>),
    Cut(Box<CutArgs>),
    Atlas(Box<AtlasArgs>),
    Convert(Box<ConvertArgs>),
    Frontier(Box<FrontierArgs>),
    Audit(Box<AuditArgs>),
    Plan(Box<PlanArgs>),
    Show(ShowArgs),
    #[command(subcommand)]
    Export(Box<ExportCommand>),
    #[command(subcommand)]
    Data(DataCommand),
    #[command(subcommand)]
    Tokenizer(TokenizerCommand),
    Verify(VerifyArgs),
    Bench(BenchArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// Commands by what they are for, as help lists them.
const GROUPS: [(&str, &[&str]); 5] = [
    ("Learn", &["reproduce", "play", "variants", "separation"]),
    ("Train", &["train", "sweep", "eval", "generate", "report", "runs", "serve", "config"]),
    ("Inspect", &["spectrum", "cut", "atlas", "convert", "frontier", "audit", "plan", "show", "export"]),
    ("Data", &["data", "tokenizer"]),
    ("Developer", &["verify", "bench", "completions", "man"]),
];

/// Names that people bring along from other programs, for every command that has such a flag.
const ALIASES: &[(&str, &[&str])] = &[
    ("accumulate", &["gradient-accumulation-steps"]),
    ("adam-eps", &["adam-epsilon"]),
    ("batch", &["batch-size"]),
    ("beta1", &["adam-beta1"]),
    ("beta2", &["adam-beta2"]),
    ("clip", &["grad-clip", "max-grad-norm"]),
    ("data", &["dataset"]),
    ("eval-batches", &["eval-iters"]),
    ("eval-every", &["eval-interval", "eval-steps"]),
    ("head-dim", &["d-head"]),
    ("heads", &["n-head", "n-heads", "num-heads", "num-attention-heads"]),
    ("hidden", &["n-embd", "hidden-size", "d-model"]),
    ("kv-heads", &["n-kv-head", "n-kv-heads", "num-kv-heads", "num-key-value-heads"]),
    ("layers", &["n-layer", "n-layers", "num-layers", "num-hidden-layers"]),
    ("length", &["block-size", "seq-len", "seq-length", "sequence-length"]),
    ("log-every", &["log-interval", "logging-steps"]),
    ("lr", &["learning-rate"]),
    ("max-tokens", &["max-new-tokens"]),
    ("mlp", &["intermediate-size"]),
    ("checkpoint-every", &["save-steps"]),
    ("steps", &["max-iters", "max-steps"]),
    ("vocab", &["vocab-size"]),
    ("warmup", &["warmup-iters", "warmup-steps"]),
];

/// The parser: every command, with aliases, and help by groups.
pub fn command() -> clap::Command {
    let mut command = aliased(Cli::command());
    let terminal = Terminal { width: width().min(120), ..Terminal::default() };
    let mut listed = String::new();
    for (group, names) in GROUPS {
        listed += &format!("{group}:\n");
        for name in names {
            let about = command.find_subcommand(name).and_then(|command| command.get_about()).map(ToString::to_string);
            listed += &terminal.text(&format!("  {name:<13}"), &about.unwrap_or_default());
        }
        listed.push('\n');
    }
    command = command
        .help_template(format!("{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{listed}Options:\n{{options}}{{after-help}}"));
    command
}

fn aliased(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        // `--order -1` is a value out of range, not an unknown flag.
        let arg = if arg.get_long().is_some() && arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg };
        let found = ALIASES.iter().find(|(name, _)| arg.get_long() == Some(name));
        found.map_or(arg.clone(), |(_, names)| arg.aliases(*names))
    });
    command.mut_subcommands(aliased)
}

/// From 1 to that many.
pub(crate) fn size(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// An order at which a series may be cut.
pub(crate) fn order() -> fn(&str) -> Result<usize, String> {
    const MOST: usize = termwise_attention::parts::kernel::taylor::MAX_ORDER;
    |text| text.parse().ok().filter(|&order| order <= MOST).ok_or_else(|| format!("it must be a whole number from 0 to {MOST}"))
}

pub const LARGE: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    #[test]
    fn the_parser_is_sound_and_every_command_is_in_a_group() {
        command().debug_assert();
        let grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let all: Vec<String> =
            command().get_subcommands().map(|command| command.get_name().to_owned()).filter(|name| name != "help").collect();
        assert_eq!(all, grouped);
    }

    #[test]
    fn every_alias_is_of_a_flag_and_no_flag_is_an_alias() {
        let mut longs = Vec::new();
        fn collect(command: &clap::Command, longs: &mut Vec<String>) {
            longs.extend(command.get_arguments().filter_map(|arg| arg.get_long()).map(str::to_owned));
            command.get_subcommands().for_each(|command| collect(command, longs));
        }
        collect(&command(), &mut longs);
        for (name, aliases) in ALIASES {
            assert!(longs.iter().any(|long| long == name), "--{name}");
            assert!(aliases.iter().all(|alias| longs.iter().all(|long| long != alias)), "--{name}");
        }
    }
    /// The commands of a page: lines of its shell blocks that call the program, as words.
    fn commands_of(page: &str) -> Vec<Vec<String>> {
        let mut found = Vec::new();
        for block in page.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next()) {
            let joined = block.replace("\\\n", " ");
            for line in joined.lines().map(str::trim) {
                let line = line.strip_prefix("cargo run --release -- ").map_or(line.to_owned(), |rest| format!("termwise {rest}"));
                if !line.starts_with("termwise ") {
                    continue;
                }
                let (mut words, mut word, mut quote, mut any) = (Vec::new(), String::new(), None, false);
                for c in line.chars() {
                    match (c, quote) {
                        ('#', None) if !any => break,
                        ('>' | '|', None) => break,
                        (c, Some(open)) if c == open => quote = None,
                        ('"' | '\'', None) => (quote, any) = (Some(c), true),
                        (' ', None) if any => {
                            words.push(std::mem::take(&mut word));
                            any = false;
                        }
                        (' ', None) => {}
                        (c, _) => {
                            word.push(c);
                            any = true;
                        }
                    }
                }
                words.extend(any.then_some(word));
                found.push(words);
            }
        }
        found
    }

    #[test]
    fn every_command_of_the_documentation_is_one() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut pages = vec![root.join("README.md"), root.join("CONTRIBUTING.md"), root.join("ARCHITECTURE.md")];
        let mut folders = vec![root.join("docs")];
        while let Some(folder) = folders.pop() {
            for path in std::fs::read_dir(folder).expect("documentation").map(|entry| entry.expect("a file").path()) {
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|ending| ending == "md") {
                    pages.push(path);
                }
            }
        }
        let mut count = 0;
        for page in pages {
            for words in commands_of(&std::fs::read_to_string(&page).unwrap_or_default()) {
                count += 1;
                let parsed = command().try_get_matches_from(&words).and_then(|matches| Cli::from_arg_matches(&matches));
                assert!(
                    parsed.is_ok(),
                    "{}: {}\n{}",
                    page.display(),
                    words.join(" "),
                    parsed.err().map(|error| error.to_string()).unwrap_or_default()
                );
            }
        }
        assert!(count > 40, "{count} commands were found");
    }

    #[test]
    fn every_command_and_flag_is_explained() {
        let mut waiting = vec![command()];
        while let Some(command) = waiting.pop() {
            let name = command.get_name().to_owned();
            assert!(command.get_about().is_some(), "{name} has no help");
            for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
                assert!(argument.get_help().is_some(), "{name}: {} has no help", argument.get_id());
            }
            waiting.extend(command.get_subcommands().cloned());
        }
    }
}
