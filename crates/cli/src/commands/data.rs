//! `termwise data`: text made ready for training, and a look at it; flags that name text.

use std::io;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Serialize;
use termwise_data::{DataConfig, Documents, Prepare, Prepared, Progress, Rows, Source, TextSource, Tokenizer};
use termwise_report::Documented;
use termwise_train::settings::{Layer, Settings};

use super::settings::DataSettings;
use super::source::{cache_folder, warning};
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};
use crate::progress::Bar;

/// Tokenize and inspect training data
#[derive(Debug, Subcommand)]
pub enum DataCommand {
    Prepare(PrepareArgs),
    Show(ShowArgs),
}

/// Text, and how it is cut into documents.
#[derive(Debug, Args)]
pub struct TextArgs {
    /// Files, folders, globs, or hf://datasets/OWNER/NAME[@REVISION]/GLOB; .txt, .jsonl (also .gz, .zst), .parquet
    #[arg(value_name = "SOURCE")]
    pub sources: Vec<String>,
    /// Field of JSON lines or column of parquet files that holds the text
    #[arg(long, default_value = "text", value_name = "NAME")]
    pub field: String,
    /// How text files are cut into documents: file, line, blank-line or separator:TEXT
    #[arg(long, default_value = "file", value_name = "HOW")]
    pub documents: Documents,
}

impl TextArgs {
    /// These settings, others at their defaults.
    pub fn config(&self) -> DataConfig {
        DataConfig { sources: self.sources.clone(), field: self.field.clone(), documents: self.documents.clone(), ..DataConfig::default() }
    }
}

/// Data as a training names them, and where their tokens are kept.
#[derive(Debug, Args)]
pub struct DataArgs {
    /// Files, folders, globs, or hf://datasets/OWNER/NAME[@REVISION]/GLOB; .txt, .jsonl (also .gz, .zst), .parquet
    #[arg(value_name = "SOURCE", conflicts_with = "data")]
    pub sources: Vec<String>,
    #[command(flatten)]
    pub settings: DataSettings,
    /// Folder for tokens [default: termwise in the user's cache folder]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Tokenize again even if tokens are there
    #[arg(long)]
    pub rebuild: bool,
}

impl DataArgs {
    fn settings(&self) -> termwise_train::Result<Settings> {
        let mut layers = vec![self.settings.layer()?];
        if !self.sources.is_empty() {
            let list = toml::Value::Array(self.sources.iter().cloned().map(toml::Value::String).collect());
            layers.push(Layer::new(toml::Table::from_iter([("data".to_owned(), list)]), "the command line")?);
        }
        Settings::resolve(&layers)
    }

    /// Tokenizes; says how far it is where standard error is a terminal.
    fn text(&self, config: &DataConfig, quiet: bool) -> termwise_data::Result<TextSource> {
        let bar = Bar::new(quiet);
        let progress = |progress: &Progress| bar.at(progress.read, progress.file_bytes, "bytes tokenized");
        let how = Prepare { rebuild: self.rebuild, progress: &progress, warn: &warning(quiet), ..Prepare::default() };
        TextSource::prepare(config, &cache_folder(self.cache.as_deref()), &how)
    }
}

/// Tokenize text once, for all runs that use it
///
/// Tokens are kept in the cache and found again as long as files, tokenizer and settings are the same; the share held out and the layout
/// of rows may change freely.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise data prepare tinyshakespeare.txt --held-out 0.1
  termwise data prepare addresses.txt --documents line --tokenizer llama2/tokenizer.json
  termwise data prepare 'corpus/*.jsonl.zst' --field content
  termwise data prepare 'hf://datasets/HuggingFaceFW/fineweb/sample/10BT/*.parquet' --tokenizer tokenizer.json")]
pub struct PrepareArgs {
    #[command(flatten)]
    pub data: DataArgs,
    #[command(flatten)]
    pub output: Output,
}

/// Print the rows of batches as text or as tokens
///
/// Without a source, documents of the built-in language: facts such as `k12 v7`, words such as `w3`, and questions such as `? k12 v7`. With `--data
/// builtin:parity`, bits, and the parity that is asked for after each.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise data show
  termwise data show --builtin-options \"facts=3 keys=8 length=32\" --batch 1
  termwise data show --builtin-options \"facts=3 updates=2 gap=8 length=48\" --batch 1
  termwise data show --data builtin:parity --batch 1 --length 24
  termwise data show tinyshakespeare.txt --seed 1 --index 0 --batch 2 --length 200
  termwise data show tinyshakespeare.txt --held-out-batch --index 3
  termwise data show tinyshakespeare.txt --batch 16 --count 2000 --json > batches.jsonl")]
pub struct ShowArgs {
    #[command(flatten)]
    pub data: DataArgs,
    /// Seed of the run
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Number of the first batch
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub index: u64,
    /// Batches to show
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub count: u64,
    /// Rows of the batch
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = super::size(1 << 16))]
    pub batch: usize,
    /// Tokens of a row [default: 256, a document of the built-in language, or 64 bits]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub length: Option<usize>,
    /// A held-out batch instead of one for training
    #[arg(long)]
    pub held_out_batch: bool,
    /// One JSON line a batch: ids and labels [batch, length]; a label is the token that follows, -100 where none counts
    #[arg(long)]
    pub json: bool,
}

/// One line of `data show --json`.
#[derive(Debug, Serialize)]
struct Shown<'a> {
    index: u64,
    ids: Vec<&'a [u32]>,
    labels: Vec<&'a [i32]>,
}

pub fn run(command: &DataCommand, context: &mut Context) -> Result<Exit, Failure> {
    match command {
        DataCommand::Prepare(args) => {
            let config = args.data.settings()?.data_config()?;
            let config = config.ok_or_else(|| Failure::usage("built-in data need no tokens; name files, folders or globs"))?;
            context.emit(&Prepared::new(&args.data.text(&config, args.output.quiet)?), &args.output)
        }
        DataCommand::Show(args) => show(args, context),
    }
    .map(Exit::done)
}

fn show(args: &ShowArgs, context: &mut Context) -> Result<(), Failure> {
    let settings = args.data.settings()?;
    let (builtin, text);
    let mut about = None;
    let (source, tokenizer, usual): (&dyn Source, &Tokenizer, usize) = match (settings.builtin()?, settings.data_config()?) {
        (Some(source), _) => {
            builtin = (source.tokenizer()?, source);
            (&builtin.1, &builtin.0, builtin.1.document().unwrap_or(64))
        }
        (None, config) => {
            text = args.data.text(&config.unwrap_or_default(), false)?;
            about = Some(Prepared::new(&text));
            (&text, text.tokenizer(), 256)
        }
    };
    if let Some(prepared) = about.filter(|_| !args.json) {
        context.print_document(&prepared.document(), false)?;
        writeln!(context.out)?;
    }
    // Elsewhere labels are the text itself, a token further on.
    let labelled = settings.builtin()?.is_some_and(|builtin| builtin.has_own_labels());
    let (length, out) = (args.length.unwrap_or(usual), &mut context.out);
    let mut batch = Rows::default();
    for index in (0..args.count).map_while(|more| args.index.checked_add(more)) {
        if !args.held_out_batch {
            source.train(args.seed, index, args.batch, length, &mut batch)?;
        } else if !source.held_out(index, args.batch, length, &mut batch)? {
            // Fewer than were asked for are what there is; none at all is an error.
            return if index > args.index { Ok(()) } else { Err(beyond(source, args, length)?) };
        }
        let (ids, labels) = (batch.ids.chunks(length), batch.labels.chunks(length));
        if args.json {
            let shown = Shown { index, ids: ids.collect(), labels: labels.collect() };
            serde_json::to_writer(&mut *out, &shown).map_err(io::Error::from)?;
            writeln!(out)?;
            continue;
        }
        for (row, (ids, labels)) in ids.zip(labels).enumerate() {
            // Up to padding; what is not asked for may stand between.
            let shown = labels.iter().rposition(|&label| label != -100).map_or(0, |last| last + 1);
            let asked = labels.iter().filter(|&&label| label != -100).count();
            writeln!(out, "── batch {index}, row {row}, {asked} tokens asked for\n{}", tokenizer.decode(&ids[..shown], false)?)?;
            if labelled {
                let labels: Vec<u32> = labels.iter().filter_map(|&label| u32::try_from(label).ok()).collect();
                writeln!(out, "asked for at each, the mark included:\n{}", tokenizer.decode(&labels, false)?)?;
            }
        }
    }
    Ok(())
}

/// That there is no held-out batch of the number asked for, and which is the last.
fn beyond(source: &dyn Source, args: &ShowArgs, length: usize) -> Result<Failure, Failure> {
    let (mut count, mut batch) = (0, Rows::default());
    while source.held_out(count, args.batch, length, &mut batch)? {
        count += 1;
    }
    let found = match count {
        0 => "nothing is held out".to_owned(),
        _ => format!("of {} × {length} tokens each, the last is {}", args.batch, count - 1),
    };
    Ok(Failure::usage(format!("there is no held-out batch {}; {found}", args.index)))
}
