//! Entry point: from the names of a model and text to a spectrum.

use std::sync::Arc;

use termwise_model::{Model, Precision};
use termwise_train::collective::Collective;

use super::{Options, RowChoice, Spectrum, check_kernels, measure_with, windows};
use crate::Error;
use crate::request::{Monitor, TextOptions, WINDOW, short_name, shown_name};

/// Options of [`of_model`].
#[derive(Clone, Debug)]
pub struct Request {
    /// Model by name; default: the newest run.
    pub model: Option<String>,
    /// Text.
    pub text: TextOptions,
    /// Tokens per window; default: as in training, otherwise 1024 or the context of the model.
    pub length: Option<usize>,
    /// Tokens to read, in whole windows.
    pub tokens: u64,
    /// Queries per window.
    pub queries: RowChoice,
    /// Seed of the sampled queries.
    pub seed: u64,
    /// Highest truncation order, an even number.
    pub max_order: usize,
    /// Keep the time of forward pass and analysis in the result.
    pub timing: bool,
    /// Precision of linear layers and products of attention.
    pub precision: Precision,
    /// Ranks that share the windows.
    pub collective: Arc<dyn Collective>,
}

/// Measures the Taylor terms of the scores of every attention head, and the error of truncation.
///
/// # Errors
/// If the model or the text cannot be used, or no head has an `exp` or `taylor` kernel.
pub fn of_model(request: &Request, monitor: &Monitor) -> Result<Spectrum, Error> {
    let folder = monitor.model_folder(request.model.as_deref())?;
    // The model before the text, because tokenization may take long.
    let model = Model::read(&folder)?;
    check_kernels(&model)?;
    let opened = request.text.open(&folder, monitor)?;
    let usual = opened.trained.unwrap_or(model.config.max_position_embeddings.min(WINDOW));
    let windows = windows(opened.source.as_ref(), request.length.unwrap_or(usual), request.tokens)?;
    monitor.warn_beyond_context(windows.iter().map(Vec::len).max().unwrap_or(0), opened.trained, &model.config);
    let orders = (0..=request.max_order).step_by(2).collect();
    let options = Options { orders, rows: request.queries, seed: request.seed, precision: request.precision, ..Options::default() };
    request.precision.warning().into_iter().for_each(|warning| monitor.warn(warning));
    let mut show = |progress: super::Progress| (monitor.progress)(progress.done, progress.of, "layers");
    let mut spectrum = measure_with(&model, &windows, &options, &*request.collective, &mut show)?;
    spectrum.model.name = short_name(&shown_name(request.model.as_deref(), &folder));
    spectrum.text.data = opened.data;
    spectrum.timing = spectrum.timing.filter(|_| request.timing);
    Ok(spectrum)
}
