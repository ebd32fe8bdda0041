//! `termwise kv`: fixed-size memory in place of a KV cache.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand};
use termwise_analysis::kv::atlas::Recalls;
use termwise_analysis::kv::convert::{Budget, Share};
use termwise_analysis::kv::{self, AtlasOptions, AuditOptions, ConvertOptions, FrontierOptions, Granularity, TextSplit};
use termwise_analysis::plan::parse_bytes;
use termwise_base::files::write_whole;
use termwise_report::to_json;
use termwise_train::log::print_line;

use super::settings::{DataSettings, ModelArgs};
use crate::context::{Context, Output, Print};
use crate::error::{Exit, Failure};

/// Replace a KV cache with fixed-size memory, and audit it
#[derive(Debug, Subcommand)]
pub enum KvCommand {
    Convert(Box<ConvertArgs>),
    Frontier(Box<FrontierArgs>),
    Audit(Box<AuditArgs>),
    Atlas(Box<AtlasArgs>),
}

pub fn run(command: &KvCommand, context: &mut Context) -> Result<Exit, Failure> {
    match command {
        KvCommand::Convert(args) => convert(args, context),
        KvCommand::Frontier(args) => frontier(args, context),
        KvCommand::Audit(args) => audit(args, context),
        KvCommand::Atlas(args) => atlas(args, context),
    }
}

/// Printed after Ctrl-C.
const STOPPING: &str = "finishing this measurement";

/// Texts for calibration and evaluation.
#[derive(Debug, Args)]
pub struct TextArgs {
    /// Text for calibration [default: all of --data]; only the second half of calibration text is evaluated
    #[arg(long, value_name = "PATH")]
    pub calibration: Vec<String>,
    /// Tokens per evaluated context [default: 2048 or the context of the model]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub length: Option<usize>,
    /// Calibration contexts over all texts
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 4, value_parser = super::size(4096))]
    pub calibration_contexts: usize,
    /// Tokens per calibration context [default: 2048 or the context of the model]
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = super::size(1 << 20))]
    pub calibration_length: Option<usize>,
}

impl TextArgs {
    fn split(&self, input: &ModelArgs) -> TextSplit {
        TextSplit {
            text: input.text(),
            calibration: self.calibration.clone(),
            length: self.length,
            calibration_contexts: self.calibration_contexts,
            calibration_length: self.calibration_length,
        }
    }
}

/// Replace a model's KV cache with fixed-size memory under a byte budget
///
/// Measures on calibration text the error of each KV head with each kind of memory and the effect of each KV head on the predictions. Then chooses one kind for
/// each KV head: the length of its window, heavy hitters (keys with the most accumulated attention), and 16, 8 or 4 bits. The folder gets the model, which
/// every other command reads, a report, kv_memory.json with the memory of each KV head, and finished measurements.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("budget").required(true).args(["bytes", "keys", "loss"]))]
#[command(after_help = "\
Examples:
  termwise kv convert path/to/llama --data book.txt --keys 128 --save small
  termwise kv convert path/to/llama --data book.txt --bytes 8MB --granularity layer --save small
  termwise kv convert path/to/llama --data book.txt --loss +1% --save small
  termwise generate small --prompt Once --max-tokens 100000
  termwise eval small --data other.txt

The same command resumes after Ctrl-C. Calibration and allocation use the first half of the text; losses are measured on the second.")]
pub struct ConvertArgs {
    #[command(flatten)]
    pub input: ModelArgs,
    /// Budget in bytes per sequence, such as 8MB
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub bytes: Option<u64>,
    /// Budget as 16-bit key/value pairs per KV head, on average
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..1 << 30))]
    pub keys: Option<u64>,
    /// Budget as the largest relative loss increase, such as +1%
    #[arg(long, value_name = "SHARE")]
    pub loss: Option<Share>,
    /// Evaluated contexts per text
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = super::size(4096))]
    pub contexts: usize,
    /// Unit of allocation: one memory kind per KV head or per layer
    #[arg(long, value_name = "UNIT", default_value = "head")]
    pub granularity: Granularity,
    /// Write the converted model and the report into this folder
    #[arg(long, alias = "out", value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Replace another model in the folder
    #[arg(long, requires = "save")]
    pub overwrite: bool,
    #[command(flatten)]
    pub texts: TextArgs,
    #[command(flatten)]
    pub print: Print,
}

impl ConvertArgs {
    fn options(&self) -> Result<ConvertOptions, Failure> {
        let budget = match (self.bytes, self.keys, self.loss) {
            (Some(bytes), ..) => Budget::Bytes(bytes),
            (_, Some(keys), _) => Budget::Keys(keys),
            (.., Some(Share(share))) => Budget::Loss(share),
            _ => return Err(Failure::usage("one of --bytes, --keys and --loss is required")),
        };
        Ok(ConvertOptions {
            model: self.input.model.clone(),
            budget,
            contexts: self.contexts,
            texts: self.texts.split(&self.input),
            granularity: self.granularity,
            save: self.save.clone(),
            overwrite: self.overwrite,
        })
    }
}

pub fn convert(args: &ConvertArgs, context: &mut Context) -> Result<Exit, Failure> {
    let options = args.options()?;
    let (found, _) = context.compute(args.print.quiet, Some(STOPPING), |monitor| kv::convert(&options, monitor))?;
    let output = Output { out: args.save.clone(), print: args.print };
    context.emit(&found, &output)?;
    if let Some(to) = options.save.filter(|_| !args.print.quiet) {
        print_line(&format!("saved: {}", to.display()));
    }
    Ok(Exit::Success)
}

/// Measure how far back each attention head attends
///
/// For every head: the attention mass on far keys and on the first keys, the mean distance, and the standard deviation and maximum of far
/// scores. With --removal: KL, loss and recall of the model when one KV head keeps only a short window.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise kv atlas path/to/llama --data book.txt
  termwise kv atlas path/to/llama --data book.txt --removal --facts 8 --heads 16 --out atlas")]
pub struct AtlasArgs {
    #[command(flatten)]
    pub input: ModelArgs,
    /// Measure the effect of removing the memory of each KV head
    #[arg(long)]
    pub removal: bool,
    /// With --removal: recall queries per KV head
    #[arg(long, value_name = "N", requires = "removal", value_parser = super::size(4096))]
    pub facts: Option<usize>,
    /// With --facts: number of KV heads, those with the largest effect
    #[arg(long, value_name = "N", requires = "facts", default_value_t = 16, value_parser = super::size(1 << 16))]
    pub heads: usize,
    #[command(flatten)]
    pub texts: TextArgs,
    #[command(flatten)]
    pub output: Output,
}

pub fn atlas(args: &AtlasArgs, context: &mut Context) -> Result<Exit, Failure> {
    let options = AtlasOptions {
        model: args.input.model.clone(),
        removal: args.removal,
        recall: args.facts.map(|facts| Recalls { facts, heads: args.heads }),
        texts: args.texts.split(&args.input),
        journal: args.output.out.clone(),
    };
    let (found, _) = context.compute(args.output.print.quiet, Some(STOPPING), |monitor| kv::atlas(&options, monitor))?;
    context.emit(&found, &args.output).map(Exit::done)
}

/// Compare loss and KL of fixed-size memories at equal bytes
///
/// Uniform windows, heavy hitters, 8-bit and 4-bit quantized caches, and choices per KV head, at equal bytes on the same contexts. Reports
/// loss and KL by position, with intervals over contexts and verdicts by a fixed rule.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise kv frontier path/to/llama --data book.txt --out frontier
  termwise kv frontier path/to/llama --data book.txt --data news.txt --calibration book.txt --keys 64,128 --contexts 12 --out frontier
  termwise kv frontier path/to/llama --data book.txt --methods window,\"heavy hitters\",\"8 bits per head\" --out frontier

With --out every measurement is written immediately (frontier.jsonl, frontier.json). After Ctrl-C the same command resumes, even with more contexts,
budgets or methods.")]
pub struct FrontierArgs {
    #[command(flatten)]
    pub input: ModelArgs,
    /// Budgets as 16-bit key/value pairs per KV head
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_values_t = [128, 256, 512, 1024])]
    pub keys: Vec<u64>,
    /// Methods to compare [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub methods: Vec<String>,
    /// Evaluated contexts per text
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = super::size(4096))]
    pub contexts: usize,
    #[command(flatten)]
    pub texts: TextArgs,
    #[command(flatten)]
    pub output: Output,
}

pub fn frontier(args: &FrontierArgs, context: &mut Context) -> Result<Exit, Failure> {
    let options = FrontierOptions {
        model: args.input.model.clone(),
        keys: args.keys.clone(),
        methods: args.methods.clone(),
        contexts: args.contexts,
        texts: args.texts.split(&args.input),
        journal: args.output.out.clone(),
    };
    let (made_by, mut written) = (context.provenance.clone(), Ok(()));
    let (found, stopped) = context.compute(args.output.print.quiet, Some(STOPPING), |monitor| {
        kv::frontier(&options, monitor, &mut |found| {
            if let (Some(folder), Ok(())) = (&options.journal, &written) {
                written = write_whole(&folder.join("frontier.json"), to_json(found, Some(&made_by)).as_bytes());
            }
        })
    })?;
    written?;
    context.emit(&found, &args.output)?;
    Ok(Exit::stopped(stopped))
}

/// Check a converted model against its original
///
/// Checks that weights and memory match the record; that the reference formula, full-sequence, chunked and token-by-token evaluation agree; and
/// that memory is constant. Measures the contribution of sinks, window and heavy hitters to each head, greedy continuations scored by the
/// original, and recall at several distances. Each check has a printed rule and a verdict. The exit code is 0 if no check fails.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise kv audit small --against path/to/llama --data book.txt
  termwise kv audit small --against path/to/llama --data book.txt --contexts 4 --length 2048 --out audit")]
pub struct AuditArgs {
    /// Converted model
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Original model
    #[arg(long, value_name = "MODEL")]
    pub against: String,
    /// Tokens per context [default: 1024 or the context of the original]
    #[arg(long, value_name = "N", value_parser = super::size(1 << 20))]
    pub length: Option<usize>,
    /// Contexts
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = super::size(4096))]
    pub contexts: usize,
    /// Recall queries per task and distance
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = super::size(4096))]
    pub facts: usize,
    /// Tokens per continuation
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = super::size(1 << 16))]
    pub tokens: usize,
    /// Folder for tokenized text [default: termwise in the user's cache]
    #[arg(long, hide_short_help = true, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    #[command(flatten)]
    pub data: DataSettings,
    #[command(flatten)]
    pub output: Output,
}

pub fn audit(args: &AuditArgs, context: &mut Context) -> Result<Exit, Failure> {
    let options = AuditOptions {
        model: args.model.clone(),
        against: args.against.clone(),
        text: args.data.text(args.cache.as_deref()),
        length: args.length,
        contexts: args.contexts,
        facts: args.facts,
        tokens: args.tokens,
    };
    let (found, _) = context.compute(args.output.print.quiet, Some("finishing this check"), |monitor| kv::audit(&options, monitor))?;
    context.emit(&found, &args.output)?;
    Ok(Exit::passed(found.passed()))
}
