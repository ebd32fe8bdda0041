//! `termwise convert` and `termwise atlas`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{ArgGroup, Args};
use termwise_base::files::create_folder;
use termwise_convert::assemble::{assemble, attention};
use termwise_convert::atlas::{Atlas, Recalls};
use termwise_convert::calibrate::gather;
use termwise_convert::convert::{self, Budget, Conversion, PROBE_LENGTH, Prepared, Share};
use termwise_convert::frontier::ALL;
use termwise_convert::journal::{Journal, digest};
use termwise_convert::kinds::{Kind, key_bytes};
use termwise_convert::recall::Facts;
use termwise_convert::record::Record;
use termwise_inspect::cut;
use termwise_lab::plan::parse_bytes;
use termwise_llama::Model;
use termwise_train::tell::tell;

use super::settings::DataSettings;
use super::source::{model_folder, tokenizer_of};
use super::texts::TextArgs;
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};
use crate::progress::{Bar, stop_on_interrupt};

/// Replace a model's KV cache with fixed-size memory under a byte budget
///
/// Measures on calibration text the error of each KV head with each kind of memory and the effect of each KV head on the predictions. Then chooses one kind for
/// each KV head: the length of its window, heavy hitters (keys with the most accumulated attention), and 32, 8 or 4 bits. Every other command reads the model
/// that is written.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("budget").required(true).args(["bytes", "keys", "loss"]))]
#[command(after_help = "\
Examples:
  termwise convert path/to/llama --data book.txt --keys 128 --save small
  termwise convert path/to/llama --data book.txt --bytes 8MB --save small --out report
  termwise convert path/to/llama --data book.txt --loss +1% --save small
  termwise generate small --prompt Once --max-tokens 100000
  termwise eval small --data other.txt

With --out, finished measurements are kept there, and the same command resumes after Ctrl-C. Calibration and allocation use the first half of the text; losses are measured on the second.")]
pub struct ConvertArgs {
    /// A folder of a model, a run, a checkpoint, or hf://OWNER/NAME[@REVISION] [default: the newest run in runs/]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Bytes that one text may keep between tokens, as in 8MB
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub bytes: Option<u64>,
    /// The same as keys and values in float32 for each kv head, on average
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..1 << 30))]
    pub keys: Option<u64>,
    /// What the loss may rise by, as in +1%
    #[arg(long, value_name = "SHARE")]
    pub loss: Option<Share>,
    /// Contexts of each text that are evaluated
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = super::size(4096))]
    pub contexts: usize,
    /// Write the converted model into this folder [default: model in the folder of --out]
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// With --save: replace the model that is in the folder
    #[arg(long, requires = "save")]
    pub overwrite: bool,
    #[command(flatten)]
    pub texts: TextArgs,
    #[command(flatten)]
    pub data: DataSettings,
    #[command(flatten)]
    pub output: Output,
}

pub fn run(args: &ConvertArgs, context: &mut Context) -> Result<Exit, Failure> {
    let folder = &model_folder(args.model.as_deref(), args.output.quiet)?;
    // In its own folder a model is replaced: the same command may go on, or come again.
    let (save, overwrite) = match &args.save {
        Some(place) => (Some(place.clone()), args.overwrite),
        None => (args.output.out.as_ref().map(|out| out.join("model")), true),
    };
    if let Some(place) = &save {
        // Before anything is measured, which may take long.
        cut::check_place(folder, place, overwrite)?;
    }
    let budget = match (args.bytes, args.keys, args.loss) {
        (Some(bytes), ..) => Budget::Bytes(bytes),
        (_, Some(keys), _) => Budget::Keys(keys),
        (.., Some(Share(share))) => Budget::Loss(share),
        _ => return Err(Failure::usage("one of --bytes, --keys and --loss is needed")),
    };
    let stop = stop_on_interrupt("finishing this measurement");
    let bar = Bar::new(args.output.quiet);
    let out = args.output.out.clone();
    let (mut model, conversion, attention, record) = context.pool()?.install(|| -> Result<_, Failure> {
        let model = Model::read(folder)?;
        // Before the calibration, which takes long.
        convert::check_budget(&model.config, ALL, budget)?;
        let (data, texts) = args.texts.cut(folder, &args.data, &model.config, args.contexts, args.output.quiet)?;
        let tell = &mut |done: u64, of: u64, what: &str| bar.at(done, of, what);
        let prepared = Prepared::new(&model, (&texts.calibration, model.config.max_position_embeddings), ALL, out.as_deref(), &stop, tell)?;
        let kinds = convert::choose(&model, &prepared, ALL, &texts.calibration, budget, &stop, tell)?;
        let chosen: Vec<Option<Kind>> = kinds.iter().copied().map(Some).collect();
        let converted = assemble(&model, &prepared.ranges, &chosen)?;
        let mut journal = Journal::open(out.as_ref().map(|folder| folder.join("evaluation.jsonl")).as_deref())?;
        let identity = digest(&format!("{} {kinds:?}", prepared.ranges.identity_for(&kinds)));
        let measured = convert::evaluate(&model, &converted, &texts, &mut journal, &identity, &stop, tell)?;
        let config = &model.config;
        let (units, d) = ((config.num_hidden_layers * config.num_key_value_heads) as u64, config.head_dim);
        let bytes = convert::bytes_of(&kinds, d, prepared.overhead);
        let conversion = Conversion {
            model: args.model.clone().unwrap_or_else(|| folder.display().to_string()),
            data,
            budget,
            bytes,
            keys: bytes as f64 / (units * key_bytes(d)) as f64,
            cache_bytes: units * key_bytes(d) * config.max_position_embeddings as u64,
            context: config.max_position_embeddings,
            layers: config.num_hidden_layers,
            kv_heads: config.num_key_value_heads,
            kinds,
            calibration_tokens: texts.calibration.iter().map(Vec::len).sum(),
            measured,
        };
        let map = attention(&model.config, &chosen)?;
        let record = Record::new(&conversion.model, &converted, &model, bytes);
        Ok((converted, conversion, map, record))
    })?;
    drop(bar);
    context.emit(&conversion, &args.output)?;
    if let Some(to) = &save {
        cut::save(&mut model, &attention, folder, to, overwrite)?;
        record.write(to)?;
        if !args.output.quiet {
            tell(&format!("saved in {}", to.display()));
        }
    }
    Ok(Exit::Success)
}

/// Draw the atlas of a model's heads: what they look back at
///
/// For every head the share of its attention on far keys and on the first keys, how far it looks back, the standard deviation and the largest of the scores of far keys; with --removal
/// what the model loses where a kv head keeps a short window alone: KL, loss, and facts that it no longer finds.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise atlas path/to/llama --data book.txt
  termwise atlas path/to/llama --data book.txt --removal --facts 8 --heads 16 --out atlas")]
pub struct AtlasArgs {
    /// A folder of a model, a run, a checkpoint, or hf://OWNER/NAME[@REVISION] [default: the newest run in runs/]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Measure what the model loses with the memory of each kv head
    #[arg(long)]
    pub removal: bool,
    /// With --removal: facts that are asked for without it
    #[arg(long, value_name = "N", requires = "removal", value_parser = super::size(4096))]
    pub facts: Option<usize>,
    /// With --facts: kv heads, those whose removal does the most
    #[arg(long, value_name = "N", requires = "facts", default_value_t = 16, value_parser = super::size(1 << 16))]
    pub heads: usize,
    #[command(flatten)]
    pub texts: TextArgs,
    #[command(flatten)]
    pub data: DataSettings,
    #[command(flatten)]
    pub output: Output,
}

pub fn atlas(args: &AtlasArgs, context: &mut Context) -> Result<Exit, Failure> {
    let folder = &model_folder(args.model.as_deref(), args.output.quiet)?;
    let stop = stop_on_interrupt("finishing this context");
    let bar = Bar::new(args.output.quiet);
    let atlas = context.pool()?.install(|| -> Result<Atlas, Failure> {
        let model = Model::read(folder)?;
        let (data, texts) = args.texts.cut(folder, &args.data, &model.config, 0, args.output.quiet)?;
        let tell = &mut |done: u64, of: u64, what: &str| bar.at(done, of, what);
        let gathered = gather(&model, &texts.calibration, None, &stop, tell)?;
        let length = texts.calibration.first().map_or(0, Vec::len);
        let name = args.model.clone().unwrap_or_else(|| folder.display().to_string());
        let mut atlas = Atlas::new(&name, data, &model.config, &gathered, length);
        let Some(last) = texts.calibration.last().filter(|_| args.removal) else { return Ok(atlas) };
        let tokenizer = tokenizer_of(folder)?;
        let recall = match (&tokenizer, args.facts) {
            (Some(tokenizer), Some(facts)) => {
                Some((Facts::new(tokenizer, &texts.calibration, length, facts), Recalls { facts, heads: args.heads }))
            }
            (None, Some(_)) => return Err(Failure::usage("the model has no tokenizer.json, without which there are no facts to ask for")),
            _ => None,
        };
        if let Some(folder) = &args.output.out {
            create_folder(folder)?;
        }
        let mut journal = Journal::open(args.output.out.as_ref().map(|folder| folder.join("journal.jsonl")).as_deref())?;
        let context = &last[..last.len().min(PROBE_LENGTH)];
        atlas.add_removals(&Arc::new(model), (&gathered, context), recall, &mut journal, &stop, tell)?;
        Ok(atlas)
    })?;
    drop(bar);
    context.emit(&atlas, &args.output).map(Exit::done)
}
