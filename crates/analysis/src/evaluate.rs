//! The loss of a model on text.

use std::path::Path;
use std::sync::Arc;

use termwise_attention::{Mode, Variant};
use termwise_data::{Rows, Source};
use termwise_model::decode::{truncate_attention, warnings};
use termwise_model::{Model, Precision, SessionOptions};
use termwise_train::Evaluated;
use termwise_train::collective::Collective;
use termwise_train::eval::{Windows, evaluate_observed, evaluate_with};
use termwise_train::slices::SliceCounter;
use termwise_train::source::Opened;

use crate::Error;
use crate::request::{Monitor, TextOptions, WINDOW};

/// Options of [`run`].
#[derive(Clone, Debug)]
pub struct Request {
    /// Model by name; default: the newest run.
    pub model: Option<String>,
    /// Text.
    pub text: TextOptions,
    /// Tokens per window; default: as in training, otherwise 1024 or the context of the model.
    pub length: Option<usize>,
    /// Predicted tokens per window; default: the length.
    pub stride: Option<usize>,
    /// Windows per batch.
    pub batch: usize,
    /// Largest number of batches; 0: all.
    pub batches: u64,
    /// Order at which every exp kernel is truncated.
    pub order: Option<usize>,
    /// Variant that replaces the attention of all heads.
    pub attention: Option<Variant>,
    /// How attention is computed.
    pub mode: Mode,
    /// Precision of linear layers and products of attention.
    pub precision: Precision,
    /// Ranks that share the windows.
    pub collective: Arc<dyn Collective>,
    /// Also split the loss by associative-recall hit, training frequency and position.
    pub slices: Option<SliceOptions>,
}

/// How the loss is split.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SliceOptions {
    /// Tokens of the n-grams whose earlier occurrence makes a hit.
    pub ngram: usize,
    /// Text in which n-grams are counted; default: the training text of the run.
    pub train_data: Vec<String>,
}

impl SliceOptions {
    /// For n-grams of this many tokens, counted in the training text of the run.
    pub fn new(ngram: usize) -> SliceOptions {
        SliceOptions { ngram, train_data: Vec::new() }
    }

    /// Counted in this text.
    pub fn train_data(self, train_data: Vec<String>) -> SliceOptions {
        SliceOptions { train_data, ..self }
    }
}

/// Measures the loss of a model on text.
///
/// # Errors
/// If the model or the text cannot be used, or the model has no weights for the attention.
pub fn run(request: &Request, monitor: &Monitor) -> Result<Evaluated, Error> {
    let folder = monitor.model_folder(request.model.as_deref())?;
    let Opened { source, data, held_out_only, trained, .. } = request.text.open(&folder, monitor)?;
    let mut model = Model::read(&folder)?;
    if let Some(attention) = &request.attention {
        model = model.with_attention(attention.clone())?;
    }
    if let Some(order) = request.order {
        model = model.with_attention(truncate_attention(&model.config, order)?)?;
    }
    let heads: Vec<Variant> = (0..model.config.num_hidden_layers).flat_map(|layer| model.config.heads(layer)).collect();
    warnings(&heads).iter().for_each(|warning| monitor.warn(&warning.to_string()));
    let length = request.length.unwrap_or(trained.unwrap_or(model.config.max_position_embeddings.min(WINDOW)));
    monitor.warn_beyond_context(length, trained, &model.config);
    let options = SessionOptions::default().mode(request.mode).precision(request.precision);
    request.precision.warning().into_iter().for_each(|warning| monitor.warn(warning));
    let windows = Windows { batch: request.batch, length, stride: request.stride.unwrap_or(length) };
    let mut slices = None;
    let (evaluation, nonpositive) = match &request.slices {
        None => evaluate_with(&model, source.as_ref(), windows, request.batches, options, &*request.collective)?,
        Some(requested) => {
            if request.collective.size() > 1 {
                let expected = "use one process: --slices needs the loss of every position".into();
                let (place, key, found) = (String::new(), "ranks".into(), request.collective.size().to_string());
                return Err(termwise_train::Error::Setting { place, key, found, expected }.into());
            }
            let mut counter = SliceCounter::new(requested.ngram);
            let mut observe = |rows: &Rows, losses: &[f64]| counter.add(rows, losses);
            let found = evaluate_observed(&model, source.as_ref(), windows, request.batches, options, &mut observe)?;
            let counts = match training_text(request, requested, &folder, trained.is_some(), monitor)? {
                TrainingText::Named(training) => Some(counter.count_in(training.as_ref())?),
                TrainingText::Evaluated => Some(counter.count_in(source.as_ref())?),
                TrainingText::Unknown => {
                    monitor.warn("the training text is unknown, so n-grams are not counted; name it with --train-data");
                    None
                }
            };
            slices = Some(counter.finish(counts.as_ref()));
            found
        }
    };
    if let Some(at) = nonpositive {
        monitor.warn(&format!("{at}, the first that is not positive"));
    }
    Ok(Evaluated { model: folder.display().to_string(), data, held_out_only, windows, evaluation, slices })
}

/// The text in which n-grams are counted.
enum TrainingText {
    /// Another source.
    Named(Box<dyn Source>),
    /// The part of the evaluated source that is not held out.
    Evaluated,
    /// The model is not a run, and no text was named. The evaluated text does not replace it: its own n-grams would be counted.
    Unknown,
}

/// The named text, or the training text of the run.
fn training_text(
    request: &Request,
    requested: &SliceOptions,
    folder: &Path,
    is_run: bool,
    monitor: &Monitor,
) -> Result<TrainingText, Error> {
    let mut text = request.text.clone();
    if !requested.train_data.is_empty() {
        text.held_out_only = false;
        let names = requested.train_data.iter().cloned().map(toml::Value::String).collect();
        text.settings.insert("data".into(), toml::Value::Array(names));
    } else if is_run && text.has("data") {
        text.settings.remove("data");
    } else {
        return Ok(if is_run || text.held_out_only { TrainingText::Evaluated } else { TrainingText::Unknown });
    }
    Ok(TrainingText::Named(text.open(folder, monitor)?.source))
}
