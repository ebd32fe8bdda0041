//! The loss of a model on text.

use std::sync::Arc;

use termwise_attention::{Mode, Variant};
use termwise_model::decode::{truncate_attention, warnings};
use termwise_model::{Model, Precision, SessionOptions};
use termwise_train::Evaluated;
use termwise_train::collective::Collective;
use termwise_train::eval::{Windows, evaluate_with};
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
    /// Precision of projections, MLP and output projection.
    pub precision: Precision,
    /// Ranks that share the windows.
    pub collective: Arc<dyn Collective>,
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
    let (evaluation, nonpositive) = evaluate_with(&model, source.as_ref(), windows, request.batches, options, &*request.collective)?;
    if let Some(at) = nonpositive {
        monitor.warn(&format!("{at}, the first that is not positive"));
    }
    Ok(Evaluated { model: folder.display().to_string(), data, held_out_only, windows, evaluation })
}
