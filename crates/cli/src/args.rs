//! Parsing of the command line.

use std::ffi::OsString;
use std::fmt::Write as _;

use clap::builder::RangedU64ValueParser;
use clap::{Arg, ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::commands::bench::BenchArgs;
use crate::commands::completions::{CompletionsArgs, ManArgs};
use crate::commands::config::ConfigArgs;
use crate::commands::data::DataCommand;
use crate::commands::demo::DemoArgs;
use crate::commands::eval::EvalArgs;
use crate::commands::export::ExportCommand;
use crate::commands::generate::GenerateArgs;
use crate::commands::kv::{AtlasArgs, AuditArgs, ConvertArgs, FrontierArgs, KvCommand};
use crate::commands::plan::PlanArgs;
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
use crate::commands::truncate::TruncateArgs;
use crate::commands::variants::VariantsArgs;
use crate::commands::verify::VerifyArgs;
use crate::context::Color;

/// Text that `termwise --help-all` adds to `termwise --help`.
const EXAMPLES: &str = "\
Examples:
  termwise reproduce                              experiments of two papers, in a few minutes
  termwise demo                                   interactive demo in one HTML file
  termwise variants \"taylor=0..4 norm=l2\" norm    compare two variants
  termwise plan paper-small                       cost of a model before training
  termwise train --attention \"norm conv=3\"        train on synthetic associative recall
  termwise train --data corpus.txt --model tiny   train on text
  termwise generate path/to/model --prompt Once   generate text
  termwise spectrum path/to/model --data book.txt number of Taylor terms that each head needs

Exit codes:
  0 success   1 failure, or a check failed   2 unusable arguments, or a missing file or model
  3 some of several prompts failed   75 another process uses the folder   130 interrupted; finished work is kept

Environment: NO_COLOR, COLUMNS; HF_HOME, HF_HUB_OFFLINE (hub); XDG_CACHE_HOME (tokenized text)";

/// Heading of the options of every command.
const GLOBAL: &str = "Global options";
/// Name of the flag that prints help with all settings.
const HELP_ALL: &str = "help-all";

/// Softmax attention as a Taylor series, each order a recurrent network
#[derive(Debug, Parser)]
#[command(name = "termwise", version = crate::build::version(), long_version = crate::build::long_version(), max_term_width = 120)]
pub struct Cli {
    /// Threads [default: all cores]
    #[arg(long, global = true, value_name = "N", value_parser = size(1024), help_heading = GLOBAL)]
    pub threads: Option<usize>,
    /// Colored output: auto, always or never
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t, hide_possible_values = true, hide_default_value = true, help_heading = GLOBAL)]
    pub color: Color,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Reproduce(ReproduceArgs),
    #[command(alias = "play")]
    Demo(DemoArgs),
    Variants(VariantsArgs),
    Train(Box<TrainArgs>),
    Sweep(SweepArgs),
    Eval(Box<EvalArgs>),
    Generate(Box<GenerateArgs>),
    Runs(RunsArgs),
    Report(ReportArgs),
    Serve(ServeArgs),
    Spectrum(Box<SpectrumArgs>),
    #[command(alias = "cut")]
    Truncate(Box<TruncateArgs>),
    #[command(subcommand)]
    Kv(KvCommand),
    Plan(Box<PlanArgs>),
    #[command(subcommand)]
    Export(Box<ExportCommand>),
    #[command(subcommand)]
    Data(DataCommand),
    #[command(subcommand)]
    Tokenizer(TokenizerCommand),
    Verify(VerifyArgs),
    Bench(BenchArgs),
    Completions(CompletionsArgs),
    // Earlier names, not listed in help.
    #[command(hide = true)]
    Separation(Box<SeparationArgs>),
    #[command(hide = true)]
    Config(Box<ConfigArgs>),
    #[command(hide = true)]
    Show(ShowArgs),
    #[command(hide = true)]
    Man(ManArgs),
    #[command(hide = true)]
    Convert(Box<ConvertArgs>),
    #[command(hide = true)]
    Frontier(Box<FrontierArgs>),
    #[command(hide = true)]
    Audit(Box<AuditArgs>),
    #[command(hide = true)]
    Atlas(Box<AtlasArgs>),
}

/// Commands by purpose, in the order of help.
const GROUPS: [(&str, &[&str]); 5] = [
    ("Learn", &["reproduce", "demo", "variants"]),
    ("Train", &["train", "sweep", "eval", "generate", "runs", "report", "serve"]),
    ("Inspect", &["spectrum", "truncate", "kv", "plan", "export"]),
    ("Data", &["data", "tokenizer"]),
    ("Develop", &["verify", "bench", "completions"]),
];

/// Hidden aliases of flags: names in other programs and in earlier versions.
const ALIASES: &[(&str, &[&str])] = &[
    ("accumulate", &["gradient-accumulation-steps"]),
    ("adam-eps", &["adam-epsilon"]),
    ("batch", &["batch-size"]),
    ("beta1", &["adam-beta1"]),
    ("beta2", &["adam-beta2"]),
    ("builtin-options", &["language"]),
    ("clip", &["grad-clip", "max-grad-norm"]),
    ("data", &["dataset"]),
    ("eval-batches", &["eval-iters"]),
    ("eval-every", &["eval-interval", "eval-steps"]),
    ("final-lr-ratio", &["final-lr"]),
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

/// Parses a command line. `--help-all` is `--help` with every setting.
pub fn parse(args: &[OsString]) -> Result<Cli, clap::Error> {
    let wanted = format!("--{HELP_ALL}");
    let all = args.iter().take_while(|word| *word != "--").any(|word| *word == *wanted);
    let help = OsString::from("--help");
    let words = args.iter().map(|word| if *word == *wanted { &help } else { word });
    let matches = command(all).try_get_matches_from(words)?;
    Cli::from_arg_matches(&matches)
}

/// The parser of all commands, with aliases. Help lists rare settings only if `all` is set.
pub fn command(all: bool) -> clap::Command {
    let command = prepared(Cli::command(), all);
    let mut listed = String::new();
    for (group, names) in GROUPS {
        for (i, name) in names.iter().enumerate() {
            let about = command.find_subcommand(name).and_then(|command| command.get_about()).map(ToString::to_string);
            let _ = writeln!(listed, "{:<9}{name:<13}{}", if i == 0 { group } else { "" }, about.unwrap_or_default());
        }
    }
    let options = match all {
        true => format!("Options:\n{{options}}\n\n{EXAMPLES}"),
        false => "Options: --threads N, --color WHEN, --version; COMMAND --help, --help-all".to_owned(),
    };
    command.help_template(format!("{{about}}\n{{usage-heading}} {{usage}}\n\n{listed}{options}"))
}

fn prepared(command: clap::Command, all: bool) -> clap::Command {
    let mut rare = false;
    let mut command = command.mut_args(|arg| {
        // `--order -1` is a value out of range, not an unknown flag.
        let arg = if arg.get_long().is_some() && arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg };
        // Rare options are marked as hidden from short help.
        let is_rare = arg.is_hide_short_help_set() && !arg.is_hide_set();
        rare |= is_rare;
        let arg = if is_rare { arg.hide(!all).hide_short_help(false) } else { arg };
        let found = ALIASES.iter().find(|(name, _)| arg.get_long() == Some(name));
        found.map_or(arg.clone(), |(_, names)| arg.aliases(*names))
    });
    if rare {
        let flag = Arg::new(HELP_ALL).long(HELP_ALL).action(ArgAction::SetTrue).help("Print help with all settings").help_heading(GLOBAL);
        command = command.arg(flag);
    }
    command.mut_subcommands(|command| prepared(command, all))
}

/// A parser of whole numbers from 1 to `most`.
pub(crate) fn size(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// A parser of truncation orders.
pub(crate) fn order() -> fn(&str) -> Result<usize, String> {
    const MAX: usize = termwise_attention::parts::kernel::taylor::MAX_ORDER;
    |text| text.parse().ok().filter(|&order| order <= MAX).ok_or_else(|| format!("it must be a whole number from 0 to {MAX}"))
}

pub const LARGE: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parser_is_sound_and_every_command_is_in_a_group() {
        command(false).debug_assert();
        let grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let all: Vec<String> =
            command(false).get_subcommands().filter(|own| !own.is_hide_set()).map(|own| own.get_name().to_owned()).collect();
        assert_eq!(all, grouped);
    }

    #[test]
    fn every_alias_is_of_a_flag_and_no_flag_is_an_alias() {
        let mut longs = Vec::new();
        fn collect(command: &clap::Command, longs: &mut Vec<String>) {
            longs.extend(command.get_arguments().filter_map(|arg| arg.get_long()).map(str::to_owned));
            command.get_subcommands().for_each(|command| collect(command, longs));
        }
        collect(&command(false), &mut longs);
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
                let parsed = parse(&words.iter().map(Into::into).collect::<Vec<_>>());
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
        let mut waiting = vec![command(true)];
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
