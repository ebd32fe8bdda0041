//! `termwise cut`.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use clap::Args;
use termwise_base::files::{create_folder, write_whole};
use termwise_data::{Prepare, Source};
use termwise_inspect::cut::{self, Budget, Choice, Options, Outcome, Report, Texts};
use termwise_lab::plan::parse_count;
use termwise_llama::Model;
use termwise_report::to_json;
use termwise_train::eval::Windows;
use termwise_train::settings::{Layer, Settings};
use termwise_train::tell::tell;

use super::WINDOW;
use super::settings::DataSettings;
use super::source::{cache_folder, layers_of_model, model_folder, warn_beyond_context, warning};
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};
use crate::progress::{Bar, stop_on_interrupt};

/// Measure what cutting exp to a finite order costs and saves
///
/// Every layer cut at each order with three kinds of coefficients at the same state: Taylor's, Taylor's around each head's mean score, and
/// fitted to each head's output on calibration text; one layer at a time; and a plan of kv heads to cut that stays within a budget.
/// Without --data, the held-out part of what the checkpoint was trained on is used. The first part of the data calibrates, the second tunes the plan, and everything reported is measured on the rest.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise cut                                       the newest run in runs/, on the held-out part of its own data
  termwise cut path/to/llama --data book.txt
  termwise cut path/to/llama --data book.txt --orders 2,4 --budget 2% --context 8192 --save cut-model
  termwise cut path/to/llama --data book.txt --calibration other.txt --out results
  termwise cut --schema > cut.schema.json
  termwise generate cut-model --prompt Once          writes with the states of the plan
  termwise eval path/to/llama --data book.txt --order 4   equals Taylor's point at order 4 where --calibration is given

A model that was trained on single documents should be evaluated on them: --layout padded takes one document per window. Windows of packed text
cross the ends of documents, where such a model predicts badly and a cut can even lower the loss.

With --out results are written as they come (cut.json, losses.jsonl; at the end index.html with figures and tables); Ctrl-C leaves what is finished, and the same command
goes on from there.")]
pub struct CutArgs {
    /// A folder of a model, a run, a checkpoint, or hf://OWNER/NAME[@REVISION] [default: the newest run in runs/]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Orders to cut at
    #[arg(long, value_name = "P,P,...", value_delimiter = ',', default_values_t = [2, 4, 6, 8, 10, 12, 16], value_parser = order)]
    pub orders: Vec<usize>,
    /// Kinds of coefficients to compare: taylor, calibrated
    #[arg(long, value_name = "KIND,...", value_delimiter = ',', default_values_t = Choice::ALL)]
    pub coefficients: Vec<Choice>,
    /// Kind of coefficients with which one layer is cut at a time [default: the best of the curves]
    #[arg(long, value_name = "KIND")]
    pub map: Option<Choice>,
    /// Do not cut one layer at a time
    #[arg(long)]
    pub no_map: bool,
    /// What the loss of a plan may rise by, as in 1%
    #[arg(long, value_name = "PART", default_value = "1%")]
    pub budget: Budget,
    /// Make no plan
    #[arg(long)]
    pub no_plan: bool,
    /// Tokens of context at which bytes are counted [default: what the model was made for]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub context: Option<u64>,
    /// Text to calibrate and tune on; all of --data is then evaluated on [default: the first half of --data]
    #[arg(long, value_name = "PATH")]
    pub calibration: Vec<String>,
    /// Sampled queries of each head that coefficients are fitted to
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = crate::args::size(1 << 24))]
    pub queries: usize,
    /// Fit each layer on what the layers below give once they are cut; takes a pass over the calibration text for each layer and order
    #[arg(long)]
    pub sequential: bool,
    /// Positions of a window [default: as in training, else 1024 or what the model was made for]
    #[arg(long, value_name = "N", value_parser = crate::args::size(1 << 20))]
    pub length: Option<usize>,
    /// Windows computed at once
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = crate::args::size(1 << 16))]
    pub batch: usize,
    /// Batches of the data to use at most, in all [default: all]
    #[arg(long, value_name = "N")]
    pub batches: Option<u64>,
    /// Write the model with the plan's cuts into this folder, or with --save-order all layers cut
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// With --save: replace the model that is in the folder
    #[arg(long, requires = "save")]
    pub overwrite: bool,
    /// With --save: cut all layers at this order, calibrated, instead of following the plan
    #[arg(long, value_name = "P", requires = "save", value_parser = order)]
    pub save_order: Option<usize>,
    /// Folder for tokenized text [default: termwise in the user's cache]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Print the JSON schema of cut.json and do nothing else
    #[arg(long)]
    pub schema: bool,
    #[command(flatten)]
    pub data: DataSettings,
    #[command(flatten)]
    pub output: Output,
}

fn order(text: &str) -> Result<usize, String> {
    match text.trim().parse() {
        Ok(order) if order <= 60 => Ok(order),
        _ => Err("an order is a whole number up to 60".into()),
    }
}

pub fn run(args: &CutArgs, context: &mut Context) -> Result<Exit, Failure> {
    if args.schema {
        return context.schema(&cut::schema());
    }
    context.join()?;
    let (silent, quiet) = (context.is_silent(), args.output.quiet || context.is_silent());
    let folder = &model_folder(args.model.as_deref(), quiet)?;
    if let Some(place) = &args.save {
        // Before anything is measured, which may take long.
        cut::check_place(folder, place, args.overwrite)?;
    }
    let (settings, trained) = settings(folder, args, &[])?;
    let cache = cache_folder(args.cache.as_deref());
    let data = open(&settings, &cache, args.data.has("data"), quiet)?;
    let own = match args.calibration.is_empty() {
        true => None,
        false => Some(open(&self::settings(folder, args, &args.calibration)?.0, &cache, true, quiet)?),
    };
    let stop = stop_on_interrupt("finishing this measurement");
    let bar = Bar::new(quiet);
    let collective = context.ranks.collective.clone();
    let made_by = context.provenance.clone();
    let outcome = context.pool()?.install(|| -> Result<Outcome, Failure> {
        let model = Model::read(folder)?;
        let usual = if trained { settings.length } else { model.config.max_position_embeddings.min(WINDOW) };
        let length = args.length.unwrap_or(usual);
        warn_beyond_context(length, trained.then_some(settings.length), &model.config, quiet);
        let windows = Windows { batch: args.batch, length, stride: length };
        let texts = Texts::split(data.as_ref(), own.as_deref(), windows, args.batches.unwrap_or(0))?;
        if let Some(folder) = args.output.out.as_ref().filter(|_| !silent) {
            create_folder(folder)?;
        }
        let mut orders = args.orders.clone();
        orders.extend(args.save_order);
        let options = Options {
            orders,
            coefficients: args.coefficients.clone(),
            map: args.map,
            draw_map: !args.no_map,
            budget: (!args.no_plan).then_some(args.budget),
            context: args.context,
            rows: args.queries,
            sequential: args.sequential,
            windows,
            journal: args.output.out.as_ref().map(|folder| folder.join("losses.jsonl")),
            collective,
        };
        let about = Report {
            model: folder.display().to_string(),
            data: settings.data.clone(),
            layout: settings.layout.clone(),
            calibration: (!args.calibration.is_empty()).then(|| args.calibration.join(", ")),
            ..Report::default()
        };
        let mut written = Ok(());
        let outcome = cut::run(model, &texts, &options, &stop, about, &mut |report, progress| {
            bar.at(progress.done, progress.total, progress.now);
            if let (Some(folder), Ok(()), false) = (&args.output.out, &written, silent) {
                written = write_whole(&folder.join("cut.json"), to_json(report, Some(&made_by)).as_bytes());
            }
        })?;
        written?;
        Ok(outcome)
    })?;
    drop(bar);
    context.emit(&outcome.report, &args.output)?;
    if let Some(to) = args.save.as_ref().filter(|_| !silent) {
        save(folder, args, outcome, to)?;
        if !args.output.quiet {
            tell(&format!("saved in {}", to.display()));
        }
    }
    Ok(if stop.load(Ordering::Relaxed) { Exit::Interrupted } else { Exit::Success })
}

/// The model with all layers cut, or with the plan's cuts.
fn save(model: &Path, args: &CutArgs, mut outcome: Outcome, to: &Path) -> Result<(), Failure> {
    let config = &outcome.model.config;
    let attention = match args.save_order {
        Some(order) => outcome.calibration.cut_layers(config, 0..config.num_hidden_layers, order, Choice::Calibrated)?,
        None => outcome.planned.take().ok_or_else(|| {
            Failure::usage("the plan has no cuts, so there is nothing to save; allow more with --budget or --context, or use --save-order")
        })?,
    };
    Ok(cut::save(&mut outcome.model, &attention, model, to, args.overwrite)?)
}

/// The settings of the data, or of other sources read in the same way; and whether the model is a checkpoint of a run.
fn settings(model: &Path, args: &CutArgs, sources: &[String]) -> termwise_train::Result<(Settings, bool)> {
    let (mut layers, trained) = layers_of_model(model, &args.data)?;
    layers.push(args.data.layer()?);
    if !sources.is_empty() {
        let list = toml::Value::Array(sources.iter().cloned().map(toml::Value::String).collect());
        layers.push(Layer::new(toml::Table::from_iter([("data".to_owned(), list)]), "--calibration")?);
    }
    Ok((Settings::resolve(&layers)?, trained))
}

/// All of the data that are named here; of a run's own data the held-out part.
fn open(settings: &Settings, cache: &Path, named: bool, quiet: bool) -> termwise_train::Result<Box<dyn Source>> {
    let how = Prepare { warn: &warning(quiet), ..Prepare::default() };
    if named && let Some(whole) = settings.open_whole(cache, &how)? {
        return Ok(Box::new(whole));
    }
    settings.open_source(cache, &how)
}
