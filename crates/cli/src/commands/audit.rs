//! `termwise audit`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use termwise_convert::audit::{self, Audit, Options};
use termwise_convert::record::Record;
use termwise_inspect::spectrum::windows;
use termwise_llama::Model;

use super::settings::DataSettings;
use super::source::{cache_folder, model_folder, open_packed, tokenizer_of};
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};
use crate::progress::{Bar, stop_on_interrupt};

/// Check a converted model against its original
///
/// Whether its weights and memory are the recorded ones; the same text by the plain formula, at once, as a prompt in parts and token by token; whether memory
/// is constant; the share of sinks, window and chosen keys in each head's output, and predictions with each switched off; greedy continuations, scored by the original; and
/// facts at several distances that the original recalls. A verdict for each check, by a rule that is printed; the exit code is 0 if all hold.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise audit small --against path/to/llama --data book.txt
  termwise audit small --against path/to/llama --data book.txt --contexts 4 --length 2048 --out audit")]
pub struct AuditArgs {
    /// The converted model: a folder of a model, a run or a checkpoint
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// The original
    #[arg(long, value_name = "MODEL")]
    pub against: String,
    /// Tokens of a context [default: 1024, or what the original was made for]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub length: Option<usize>,
    /// Contexts
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = super::size(4096))]
    pub contexts: usize,
    /// Facts of each task and distance that are asked for
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = super::size(4096))]
    pub facts: usize,
    /// Tokens of each continuation
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = super::size(1 << 16))]
    pub tokens: usize,
    /// Folder for tokenized text [default: termwise in the user's cache]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    #[command(flatten)]
    pub data: DataSettings,
    #[command(flatten)]
    pub output: Output,
}

pub fn run(args: &AuditArgs, context: &mut Context) -> Result<Exit, Failure> {
    let folder = model_folder(Some(&args.model), args.output.quiet)?;
    let original = model_folder(Some(&args.against), args.output.quiet)?;
    let stop = stop_on_interrupt("finishing this check");
    let bar = Bar::new(args.output.quiet);
    let audit = context.pool()?.install(|| -> Result<Audit, Failure> {
        // The record first: it refuses conversions of earlier builds whose parts were removed.
        let record = Record::read(&folder)?;
        let (model, against) = (Arc::new(Model::read(&folder)?), Arc::new(Model::read(&original)?));
        // A model without one is asked for no facts.
        let tokenizer = tokenizer_of(&original)?;
        let opened = open_packed(&original, &args.data, None, &cache_folder(args.cache.as_deref()), args.output.quiet)?;
        let length = args.length.unwrap_or(against.config.max_position_embeddings.min(super::WINDOW));
        let mut contexts = windows(opened.source.as_ref(), length, (args.contexts * length) as u64)?;
        contexts.truncate(args.contexts);
        let options = Options {
            record: record.as_ref(),
            tokenizer: tokenizer.as_ref(),
            facts: args.facts,
            tokens: args.tokens,
            between: &mut |_, _| Ok(()),
        };
        let found = audit::audit(&model, &against, &contexts, options, &stop, &mut |done, of, what| bar.at(done, of.max(done), what))?;
        Ok(Audit { model: args.model.clone(), against: args.against.clone(), ..found })
    })?;
    drop(bar);
    context.emit(&audit, &args.output)?;
    Ok(Exit::passed(audit.passed()))
}
