//! `termwise data`, and flags that name text.

use std::io;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use termwise_data::{DataConfig, Documents, Prepare};
use termwise_report::Documented;
use termwise_train::batches::{self, BatchRequest, Batches};
use termwise_train::settings::{Layer, Settings};

use super::settings::DataSettings;
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};
use crate::progress::while_tokenizing;

/// Tokenize and inspect training data
#[derive(Debug, Subcommand)]
pub enum DataCommand {
    Prepare(PrepareArgs),
    Show(ShowArgs),
}

/// Text, and how it is split into documents.
#[derive(Debug, Args)]
pub struct TextArgs {
    /// Files, folders, globs, or hf://datasets/OWNER/NAME[@REVISION]/GLOB; .txt, .jsonl (also .gz, .zst), .parquet
    #[arg(value_name = "SOURCE")]
    pub sources: Vec<String>,
    /// Field of JSON lines or column of parquet files that contains the text
    #[arg(long, default_value = "text", value_name = "NAME")]
    pub field: String,
    /// How text files are split into documents: file, line, blank-line or separator:TEXT
    #[arg(long, default_value = "file", value_name = "HOW")]
    pub documents: Documents,
}

impl TextArgs {
    /// These settings; the others have their defaults.
    pub fn config(&self) -> DataConfig {
        DataConfig { sources: self.sources.clone(), field: self.field.clone(), documents: self.documents.clone(), ..DataConfig::default() }
    }
}

/// Data as in `train`, and the folder of tokens.
#[derive(Debug, Args)]
pub struct DataArgs {
    /// Files, folders, globs, or hf://datasets/OWNER/NAME[@REVISION]/GLOB; .txt, .jsonl (also .gz, .zst), .parquet
    #[arg(value_name = "SOURCE", conflicts_with = "data")]
    pub sources: Vec<String>,
    #[command(flatten)]
    pub settings: DataSettings,
    /// Folder for tokenized text [default: termwise in the user's cache]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Tokenize even if tokens are in the cache
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

    /// Calls with options that show progress on standard error.
    fn with_progress<T>(&self, quiet: bool, work: impl FnOnce(&Prepare) -> T) -> T {
        while_tokenizing(quiet, |how| work(&Prepare { rebuild: self.rebuild, ..how }))
    }
}

/// Tokenize text once, for all runs that use it
///
/// Tokens are cached. The cache is used while files, tokenizer and settings are the same; the held-out share and the layout may change.
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
/// Without a source: documents of the synthetic associative-recall language, with facts such as `k12 v7`, words such as `w3`, and queries
/// such as `? k12 v7`. With `--data builtin:parity`: bits, and the parity after each bit.
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
    /// Index of the first batch
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub index: u64,
    /// Number of batches
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub count: u64,
    /// Rows per batch
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = super::size(1 << 16))]
    pub batch: usize,
    /// Tokens per row [default: 256, a document of the synthetic language, or 64 bits]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub length: Option<usize>,
    /// Held-out batches instead of training batches
    #[arg(long)]
    pub held_out_batch: bool,
    /// One JSON line per batch: ids and labels [batch, length]; a label is the next token, or -100 if it does not count
    #[arg(long)]
    pub json: bool,
}

pub fn run(command: &DataCommand, context: &mut Context) -> Result<Exit, Failure> {
    match command {
        DataCommand::Prepare(args) => {
            let (settings, cache) = (args.data.settings()?, args.data.cache.as_deref());
            let prepared = args.data.with_progress(args.output.print.quiet, |how| batches::prepare(&settings, cache, how))?;
            context.emit(&prepared, &args.output)
        }
        DataCommand::Show(args) => show(args, context),
    }
    .map(Exit::done)
}

fn show(args: &ShowArgs, context: &mut Context) -> Result<(), Failure> {
    let (settings, cache) = (args.data.settings()?, args.data.cache.as_deref());
    let mut request = BatchRequest::new();
    (request.seed, request.rows, request.length, request.held_out) = (args.seed, args.batch, args.length, args.held_out_batch);
    let batches = args.data.with_progress(false, |how| Batches::open(&settings, &request, cache, how))?;
    if let Some(prepared) = batches.prepared.as_ref().filter(|_| !args.json) {
        context.print_document(&prepared.document(), false)?;
        writeln!(context.out)?;
    }
    let out = &mut context.out;
    for index in (0..args.count).map_while(|more| args.index.checked_add(more)) {
        let Some(batch) = batches.get(index)? else {
            // Fewer batches than requested are printed; none is an error.
            return if index > args.index { Ok(()) } else { Err(Failure::usage(batches.missing(index)?)) };
        };
        if args.json {
            serde_json::to_writer(&mut *out, &batch).map_err(io::Error::from)?;
            writeln!(out)?;
            continue;
        }
        for (row, shown) in batches.texts(&batch)?.into_iter().enumerate() {
            writeln!(out, "── batch {index}, row {row}, {} labels\n{}", shown.labelled, shown.text)?;
            if let Some(labels) = shown.labels {
                writeln!(out, "labels, including the end marker:\n{labels}")?;
            }
        }
    }
    Ok(())
}
