//! Flags of settings, generated from the list that also parses settings files.

use std::path::{Path, PathBuf};

use clap::builder::ValueParser;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use termwise_analysis::request::TextOptions;
use termwise_train::settings::Layer;
use termwise_train::settings::keys::{DATA, KEYS, Key, Kind};
use termwise_train::settings::presets;
use toml::{Table, Value};

/// The origin of flags in error messages.
const SOURCE: &str = "the command line";

/// Every setting as a flag except `threads`, which is a global option.
#[derive(Clone, Debug, Default)]
pub struct AllSettings(Table);

/// The settings of data as flags.
#[derive(Clone, Debug, Default)]
pub struct DataSettings(Table);

/// A model, and the text that it reads.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Model folder, run, checkpoint or hf://OWNER/NAME[@REVISION] [default: the newest run in runs/]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Folder for tokenized text [default: termwise in the user's cache]
    #[arg(long, hide_short_help = true, value_name = "DIR", help_heading = DATA)]
    cache: Option<PathBuf>,
    #[command(flatten)]
    data: DataSettings,
}

impl ModelArgs {
    /// The text, for an analysis.
    pub fn text(&self) -> TextOptions {
        self.data.text(self.cache.as_deref())
    }
}

impl AllSettings {
    /// The given flags, with the number of threads.
    pub fn layer(&self, threads: Option<usize>) -> termwise_train::Result<Layer> {
        let mut table = self.0.clone();
        if let Some(threads) = threads {
            table.insert("threads".into(), Value::Integer(threads as i64));
        }
        Layer::new(table, SOURCE)
    }
}

impl DataSettings {
    /// The given flags.
    pub fn layer(&self) -> termwise_train::Result<Layer> {
        Layer::new(self.0.clone(), SOURCE)
    }

    /// Text for an analysis.
    pub fn text(&self, cache: Option<&Path>) -> TextOptions {
        TextOptions { settings: self.0.clone(), cache: cache.map(Path::to_owned), ..TextOptions::default() }
    }
}

fn every() -> impl Iterator<Item = &'static Key> {
    KEYS.iter().filter(|key| key.name != "threads")
}

fn of_data() -> impl Iterator<Item = &'static Key> {
    KEYS.iter().filter(|key| key.group == DATA)
}

/// The flag of a setting, with its default in help. Rare ones are listed by `--help-all` only.
fn training_flag(key: &'static Key) -> Arg {
    let help = presets::default_of(key.name).map_or(key.help.to_owned(), |value| format!("{} [default: {value}]", key.help));
    flag(key).help(help).hide_short_help(!key.is_common())
}

/// The flag of a setting of data for commands that read a model. Defaults come from the model.
fn data_flag(key: &'static Key) -> Arg {
    flag(key).hide_short_help(!COMMON_MODEL_SETTINGS.contains(&key.name))
}

/// Settings of data that `--help` of commands with a model lists.
const COMMON_MODEL_SETTINGS: [&str; 3] = ["data", "tokenizer", "documents"];

fn flag(key: &'static Key) -> Arg {
    let kind = key.kind;
    let parse = move |text: &str| kind.parse(text).ok_or_else(|| format!("it must be {}", kind.expected()));
    let (name, action) = match kind {
        Kind::Count => ("N", ArgAction::Set),
        Kind::Number => ("X", ArgAction::Set),
        Kind::Switch => ("true|false", ArgAction::Set),
        Kind::Text => ("TEXT", ArgAction::Set),
        Kind::List => ("PATH", ArgAction::Append),
        Kind::Attention => ("VARIANT", ArgAction::Set),
    };
    let arg = Arg::new(key.name).long(key.shown().replace('_', "-")).help(key.help).help_heading(key.group);
    let arg = arg.value_name(name).action(action).value_parser(ValueParser::from(parse)).allow_negative_numbers(true);
    if kind == Kind::Switch { arg.num_args(0..=1).require_equals(true).default_missing_value("true") } else { arg }
}

fn collect(matches: &ArgMatches, keys: impl Iterator<Item = &'static Key>) -> Table {
    let mut table = Table::new();
    for key in keys {
        let Some(values) = matches.get_many::<Value>(key.name) else { continue };
        let values: Vec<Value> = values.cloned().collect();
        let value = match key.kind {
            // Each occurrence is a list of one.
            Kind::List => Some(Value::Array(values.into_iter().filter_map(|v| v.as_array().cloned()).flatten().collect())),
            _ => values.into_iter().next_back(),
        };
        if let Some(value) = value {
            table.insert(key.name.into(), value);
        }
    }
    table
}

macro_rules! flags {
    ($type:ident, $keys:ident, $flag:ident) => {
        impl FromArgMatches for $type {
            fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
                Ok($type(collect(matches, $keys())))
            }

            fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
                self.0.extend(collect(matches, $keys()));
                Ok(())
            }
        }

        impl Args for $type {
            fn augment_args(command: Command) -> Command {
                command.args($keys().map($flag))
            }

            fn augment_args_for_update(command: Command) -> Command {
                Self::augment_args(command)
            }
        }
    };
}

flags!(AllSettings, every, training_flag);
flags!(DataSettings, of_data, data_flag);
