//! `termwise frontier`.

use std::sync::atomic::Ordering;

use clap::Args;
use termwise_base::files::{create_folder, write_whole};
use termwise_convert::convert::Prepared;
use termwise_convert::frontier::{self, Frontier, Method, Options};
use termwise_llama::Model;
use termwise_report::to_json;

use super::settings::DataSettings;
use super::source::model_folder;
use super::texts::TextArgs;
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};
use crate::progress::{Bar, stop_on_interrupt};

/// Compare loss and KL of all kinds of fixed-size memory at equal bytes
///
/// Uniform windows, heavy hitters, quantized caches of 8 and 4 bits, and choices per KV head, at equal bytes, on the same contexts;
/// by position, with intervals over contexts and verdicts by a rule that is stated in advance.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise frontier path/to/llama --data book.txt --out frontier
  termwise frontier path/to/llama --data book.txt --data news.txt --calibration book.txt --keys 64,128 --contexts 12 --out frontier
  termwise frontier path/to/llama --data book.txt --methods window,chosen,\"8 bits by head\" --out frontier

With --out every measurement is kept as it comes (journal.jsonl, frontier.json); Ctrl-C leaves what is finished, and the same command goes on from there, also with more
contexts, budgets or methods.")]
pub struct FrontierArgs {
    /// A folder of a model, a run, a checkpoint, or hf://OWNER/NAME[@REVISION] [default: the newest run in runs/]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Budgets, in keys and values in float32 for each kv head
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_values_t = [64, 128, 256, 512])]
    pub keys: Vec<u64>,
    /// Methods to compare [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub methods: Vec<String>,
    /// Contexts of each text that are evaluated
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = super::size(4096))]
    pub contexts: usize,
    #[command(flatten)]
    pub texts: TextArgs,
    #[command(flatten)]
    pub data: DataSettings,
    #[command(flatten)]
    pub output: Output,
}

pub fn run(args: &FrontierArgs, context: &mut Context) -> Result<Exit, Failure> {
    let folder = &model_folder(args.model.as_deref(), args.output.quiet)?;
    let stop = stop_on_interrupt("finishing this measurement");
    let bar = Bar::new(args.output.quiet);
    let (out, made_by) = (args.output.out.clone(), context.provenance.clone());
    let frontier = context.pool()?.install(|| -> Result<Frontier, Failure> {
        let model = Model::read(folder)?;
        let methods = Method::named(&args.methods)?;
        // Before the calibration, which takes long.
        Method::check_budgets(&methods, &args.keys, &model.config)?;
        let (_, texts) = args.texts.cut(folder, &args.data, &model.config, args.contexts, args.output.quiet)?;
        if let Some(folder) = &out {
            create_folder(folder)?;
        }
        let tell = &mut |done: u64, of: u64, what: &str| bar.at(done, of, what);
        let families = Method::families(&methods);
        let prepared = Prepared::new(&model, (&texts.calibration, texts.length()), &families, out.as_deref(), &stop, tell)?;
        let journal = out.as_ref().map(|folder| folder.join("frontier.jsonl"));
        let options = Options { keys: args.keys.clone(), methods: args.methods.clone(), journal: journal.as_deref() };
        let about = Frontier {
            model: args.model.clone().unwrap_or_else(|| folder.display().to_string()),
            calibration_tokens: texts.calibration.iter().map(Vec::len).sum(),
            ..Frontier::default()
        };
        let mut written = Ok(());
        let found = frontier::run(&model, &prepared, &texts, &options, about, &stop, tell, &mut |state| {
            if let (Some(folder), Ok(())) = (&out, &written) {
                written = write_whole(&folder.join("frontier.json"), to_json(state, Some(&made_by)).as_bytes());
            }
        })?;
        written?;
        Ok(found)
    })?;
    drop(bar);
    context.emit(&frontier, &args.output)?;
    Ok(if stop.load(Ordering::Relaxed) { Exit::Interrupted } else { Exit::Success })
}
