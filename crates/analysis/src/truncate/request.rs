//! Entry point: from the names of a model and text to a truncation report, and the truncated model.

use std::path::{Path, PathBuf};

use termwise_base::files::create_folder;
use termwise_data::{Prepare, Source};
use termwise_model::Model;
use termwise_train::eval::Windows;
use termwise_train::settings::{Layer, Settings};
use termwise_train::source::{cache_folder, layers_of_model};

use super::{Choice, Options, Outcome, Report, Texts, check_place, run, save};
use crate::Error;
use crate::request::{Monitor, TextOptions, WINDOW, shown_name};

/// Options of [`measure`].
#[derive(Clone, Debug)]
pub struct Request {
    /// Model by name; default: the newest run.
    pub model: Option<String>,
    /// Text, with settings of data.
    pub text: TextOptions,
    /// Text for calibration and tuning; empty: the first half of the data.
    pub calibration: Vec<String>,
    /// Orders, coefficients, plan and ranks. Rank 0 writes files.
    pub options: Options,
    /// Tokens per window; default: as in training, otherwise 1024 or the context of the model.
    pub length: Option<usize>,
    /// Windows per batch.
    pub batch: usize,
    /// Largest number of batches; 0: all.
    pub batches: u64,
    /// Directory of the truncated model.
    pub save: Option<PathBuf>,
    /// Truncate all layers of the saved model at this order, calibrated, instead of following the plan.
    pub save_order: Option<usize>,
    /// Replace a model in that directory.
    pub overwrite: bool,
}

/// Truncates the exponential series of a model, measures loss and memory, and saves the model if requested. `changed` receives every
/// intermediate report.
///
/// # Errors
/// If the model or a text cannot be used, or the model cannot be saved.
pub fn measure(request: &Request, monitor: &Monitor, changed: &mut dyn FnMut(&Report)) -> Result<Truncated, Error> {
    let first = request.options.collective.rank() == 0;
    let folder = &monitor.model_folder(request.model.as_deref())?;
    if let Some(place) = &request.save {
        // Checked first, because measurements take long.
        check_place(folder, place, request.overwrite)?;
    }
    let (settings, trained) = request.settings(folder, &[])?;
    let data = request.open(&settings, request.text.has("data"), monitor)?;
    let calibration = match request.calibration.is_empty() {
        true => None,
        false => Some(request.open(&request.settings(folder, &request.calibration)?.0, true, monitor)?),
    };
    let model = Model::read(folder)?;
    let usual = if trained { settings.length } else { model.config.max_position_embeddings.min(WINDOW) };
    let length = request.length.unwrap_or(usual);
    monitor.warn_beyond_context(length, trained.then_some(settings.length), &model.config);
    let windows = Windows { batch: request.batch, length, stride: length };
    let texts = Texts::split(data.as_ref(), calibration.as_deref(), windows, request.batches)?;
    if let Some(folder) = request.options.journal.as_ref().and_then(|file| file.parent()).filter(|_| first) {
        create_folder(folder).map_err(termwise_train::Error::from)?;
    }
    let mut options = request.options.clone();
    options.orders.extend(request.save_order);
    let about = Report {
        model: shown_name(request.model.as_deref(), folder),
        data: settings.data.clone(),
        layout: settings.layout.clone(),
        calibration: (!request.calibration.is_empty()).then(|| request.calibration.join(", ")),
        ..Report::default()
    };
    let outcome = run(model, &texts, &options, monitor.stop, about, &mut |report, progress| {
        (monitor.progress)(progress.done, progress.total, progress.now);
        changed(report);
    })?;
    Ok(match &request.save {
        Some(to) if first => request.save(folder, outcome, to),
        _ => Truncated { report: outcome.report, not_saved: None },
    })
}

/// Result of [`measure`].
pub struct Truncated {
    /// All measurements.
    pub report: Report,
    /// Why the model was not saved, although that was requested.
    pub not_saved: Option<Error>,
}

impl Request {
    fn save(&self, model: &Path, mut outcome: Outcome, to: &Path) -> Truncated {
        let not_saved = self.write(model, &mut outcome, to).err();
        Truncated { report: outcome.report, not_saved }
    }

    /// Writes the model with all layers truncated, or truncated by the plan.
    fn write(&self, model: &Path, outcome: &mut Outcome, to: &Path) -> Result<(), Error> {
        let config = &outcome.model.config;
        let attention = match self.save_order {
            Some(order) => outcome.calibration.cut_layers(config, 0..config.num_hidden_layers, order, Choice::Calibrated)?,
            None => outcome.planned.take().ok_or_else(|| {
                Error::Sizes(
                    "the plan truncates no head, so no model was saved; allow more with --budget or --context, or use --save-order".into(),
                )
            })?,
        };
        save(&mut outcome.model, &attention, model, to, self.overwrite)
    }

    /// The settings of the data, or of other sources read in the same way; and whether the model is a checkpoint of a run.
    fn settings(&self, model: &Path, sources: &[String]) -> Result<(Settings, bool), Error> {
        let (mut layers, trained) = layers_of_model(model, &self.text.settings)?;
        layers.push(Layer::new(self.text.settings.clone(), "the command line")?);
        if !sources.is_empty() {
            let list = toml::Value::Array(sources.iter().cloned().map(toml::Value::String).collect());
            layers.push(Layer::new(toml::Table::from_iter([("data".to_owned(), list)]), "--calibration")?);
        }
        Ok((Settings::resolve(&layers)?, trained))
    }

    /// All of the data if they are named by the user, otherwise the held-out part of a run's data.
    fn open(&self, settings: &Settings, named: bool, monitor: &Monitor) -> Result<Box<dyn Source>, Error> {
        let warn = |text: &str| monitor.warn(text);
        let (how, cache) = (Prepare { warn: &warn, ..Prepare::default() }, cache_folder(self.text.cache.as_deref()));
        if named && let Some(whole) = settings.open_whole(&cache, &how)? {
            return Ok(Box::new(whole));
        }
        Ok(settings.open_source(&cache, &how)?)
    }
}
