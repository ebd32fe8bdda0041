//! Models: logits, loss, generation, spectra, truncation.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyInterruptedError;
use pyo3::prelude::*;
use serde::Deserialize;
use serde_json::json;
use termwise_analysis::spectrum::{self, Options as SpectrumOptions, RowChoice};
use termwise_analysis::truncate::{self as cut, Choice, Options as CutOptions, Report, Texts};
use termwise_data::Tokenizer;
use termwise_model::decode::{Decoder, DecoderOptions, MemoryPolicy, SamplingOptions, truncate_attention};
use termwise_model::generate::{GenerationEvent, GenerationOptions, TextGenerator};
use termwise_model::weights::WriteOptions;
use termwise_model::{Batch, Config, Model as Llama, Objective, SessionOptions};
use termwise_train::eval::Windows;
use termwise_train::resolve;
use termwise_train::source::{cache_folder, open_for_model};

use crate::arrays::Output;
use crate::commands::parsed;
use crate::errors::{Count, runtime, value};
use crate::layer::Layer;
use crate::result::Found;
use crate::threads::{compute, supervise};
use crate::variant::Variant;

/// Default length of a window, without one of the caller or of training.
const WINDOW: usize = 1024;

/// A model and its tokenizer.
#[pyclass(frozen, module = "termwise._core")]
pub struct Model {
    inner: Arc<Llama>,
    folder: PathBuf,
    tokenizer: Result<Arc<Tokenizer>, String>,
}

/// Loads the model of this name; see [`resolve`].
#[pyfunction]
pub fn load_model(py: Python<'_>, name: Option<&str>, tokenizer: Option<&str>) -> PyResult<Model> {
    let folder = resolved(name)?;
    let inner = compute(py, || Llama::read(&folder))?.map_err(value)?;
    let tokenizer = own_tokenizer(&folder, tokenizer, &inner.config).map(Arc::new);
    Ok(Model { inner: Arc::new(inner), folder, tokenizer })
}

/// The folder of the model of this name.
fn resolved(name: Option<&str>) -> PyResult<PathBuf> {
    let found = resolve::model(name).map_err(|error| match error {
        termwise_train::Error::NoModel { .. } => crate::errors::missing(error.to_string()),
        _ => value(error),
    })?;
    Ok(found.folder)
}

/// [`resolved`] for the package.
#[pyfunction]
pub fn find_model(name: &str) -> PyResult<PathBuf> {
    resolved(Some(name))
}

/// The attention of every layer of a `config.json`.
#[pyfunction]
pub fn layers_of_config(config: &str) -> PyResult<Vec<Layer>> {
    let config = Config::from_json_str(config, "the configuration").map_err(value)?;
    let layers = config.attention_layers(config.max_position_embeddings).map_err(value)?;
    Ok(layers.into_iter().map(Layer::of).collect())
}

/// The model of a `config.json` as plain data in JSON, and the attention of its layers for at most `positions` positions.
#[pyfunction]
pub fn model_of_config(config: &str, positions: usize) -> PyResult<(String, Vec<Layer>)> {
    let config = Config::from_json_str(config, "the configuration").map_err(value)?;
    let layers = config.attention_layers(positions).map_err(value)?;
    Ok((crate::parts::of_config(&config).map_err(value)?.to_string(), layers.into_iter().map(Layer::of).collect()))
}

/// The named tokenizer, that of the model, that of the synthetic task, or bytes if the vocabulary fits.
fn own_tokenizer(folder: &Path, named: Option<&str>, config: &Config) -> Result<Tokenizer, String> {
    let open = |name: &str| Tokenizer::open(name, None).map_err(|error| error.to_string());
    let place = folder.display().to_string();
    match (named, config.vocab_size) {
        (Some(name), _) => open(name),
        _ if folder.join("tokenizer.json").exists() => open(&place),
        (None, vocabulary) => match termwise_train::source::language_of(folder).map_err(|error| error.to_string())? {
            Some(language) => language.tokenizer().map_err(|error| error.to_string()),
            None if matches!(vocabulary, 256 | 257) => open("bytes"),
            None => Err(format!("{place} has no tokenizer.json: name a tokenizer when loading, or give token ids")),
        },
    }
}

/// Token ids from an array of uint32 [B, T].
fn ids(py: Python<'_>, array: &Bound<'_, PyAny>) -> PyResult<(Vec<u32>, usize, usize)> {
    let buffer = PyBuffer::<u32>::get(array)?;
    match *buffer.shape() {
        [batch, time] if batch * time > 0 => Ok((buffer.to_vec(py)?, batch, time)),
        ref other => Err(crate::errors::input(format!("token ids must be [batch, time] without empty dimensions, found shape {other:?}"))),
    }
}

/// Options of generation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Writes {
    max_tokens: usize,
    temperature: f64,
    top_k: usize,
    top_p: f64,
    min_p: f64,
    repetition_penalty: f64,
    seed: u64,
    stop: Vec<String>,
    echo: bool,
    batch: usize,
    order: Option<usize>,
    beyond_context: bool,
    ignore_end: bool,
}

/// The text of a spectrum or a truncation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reads {
    /// Settings of data.
    data: toml::Table,
    /// Token ids instead of data, for a spectrum.
    ids: Option<Vec<u32>>,
    length: Option<usize>,
    cache: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Spectrum {
    tokens: u64,
    queries: Option<usize>,
    seed: u64,
    max_order: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cut {
    orders: Vec<usize>,
    coefficients: Vec<String>,
    draw_map: bool,
    budget: Option<String>,
    context: Option<u64>,
    queries: usize,
    sequential: bool,
    batch: usize,
    batches: u64,
    save: Option<PathBuf>,
    overwrite: bool,
}

impl Model {
    fn own_tokenizer(&self) -> PyResult<&Tokenizer> {
        self.tokenizer.as_deref().map_err(|problem| crate::errors::input(problem.clone()))
    }

    fn usual_length(&self, trained: Option<usize>) -> usize {
        trained.unwrap_or(self.inner.config.max_position_embeddings.min(WINDOW))
    }

    fn name(&self) -> String {
        self.folder.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned())
    }
}

/// Texts as JSON, and the index and error of each prompt that failed.
type Generated = (Vec<String>, Vec<(usize, String)>);

#[pymethods]
impl Model {
    /// Copies a parameter into an array of float32 of its shape.
    fn copy_tensor(&self, name: &str, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let found = self.inner.params.get(name).map_err(value)?;
        let mut out = Output::<f32>::new(name, out)?;
        if out.values().len() != found.len() {
            let found = found.len();
            return Err(crate::errors::input(format!("{name} has {found} values, found room for {}", out.values().len())));
        }
        out.values().copy_from_slice(found);
        Ok(())
    }

    #[getter]
    fn folder(&self) -> &Path {
        &self.folder
    }

    /// The content of `config.json`.
    #[getter]
    fn config(&self) -> String {
        self.inner.config.to_json_string()
    }

    #[getter]
    fn parameters(&self) -> PyResult<usize> {
        self.inner.config.parameter_count().map_err(value)
    }

    /// The variants of each layer's heads.
    #[getter]
    fn variants(&self) -> Vec<Vec<Variant>> {
        (0..self.inner.config.num_hidden_layers).map(|layer| self.inner.config.heads(layer).into_iter().map(Variant).collect()).collect()
    }

    /// This model with another variant that needs no further weights.
    fn with_attention(&self, variant: &Bound<'_, PyAny>) -> PyResult<Model> {
        let inner = self.inner.with_attention(Variant::of(variant)?).map_err(value)?;
        Ok(Model { inner: Arc::new(inner), folder: self.folder.clone(), tokenizer: self.tokenizer.clone() })
    }

    /// This model with every exp truncated to this order.
    fn with_order(&self, order: Count) -> PyResult<Model> {
        let Count(order) = order;
        let map = truncate_attention(&self.inner.config, order).map_err(value)?;
        let inner = self.inner.with_attention(map).map_err(value)?;
        Ok(Model { inner: Arc::new(inner), folder: self.folder.clone(), tokenizer: self.tokenizer.clone() })
    }

    fn save(&self, folder: PathBuf) -> PyResult<()> {
        std::fs::create_dir_all(&folder)?;
        // Read before writing: the folder may be that of the model, and files may be links.
        let mut companions = Vec::new();
        for name in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"] {
            let from = self.folder.join(name);
            if from.is_file() {
                companions.push((folder.join(name), std::fs::read(from)?));
            }
        }
        self.inner.write(&folder, &WriteOptions::default()).map_err(value)?;
        for (to, bytes) in companions {
            if std::fs::read(&to).is_ok_and(|found| found == bytes) {
                continue;
            }
            termwise_base::files::write_whole(&to, &bytes).map_err(value)?;
        }
        Ok(())
    }

    fn encode(&self, text: &str, special: bool) -> PyResult<Vec<u32>> {
        self.own_tokenizer()?.encode(text, special).map_err(value)
    }

    fn decode(&self, ids: Vec<u32>) -> PyResult<String> {
        self.own_tokenizer()?.decode(&ids, true).map_err(value)
    }

    /// Logits [B, T, V] of ids [B, T].
    fn logits(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, lengths: Option<Vec<usize>>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let ((ids, batch, time), mut out) = (self::ids(py, ids)?, Output::<f32>::new("logits", out)?);
        let model = &self.inner;
        compute(py, || {
            let mut session = model.session(batch, time, SessionOptions::default().forward_only(true))?;
            session.run(&model.params, &ids, lengths.as_deref())?;
            session.logits(&model.params, 0..batch * time, out.values())
        })?
        .map_err(value)
    }

    /// Sum of losses, number of predicted tokens, and the loss of each position.
    fn loss(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        labels: Vec<i32>,
        lengths: Option<Vec<usize>>,
    ) -> PyResult<(f64, usize, Vec<f64>)> {
        let (ids, batch, time) = self::ids(py, ids)?;
        let model = &self.inner;
        compute(py, || {
            let mut session = model.session(batch, time, SessionOptions::default().forward_only(true))?;
            let batch = Batch::new(&ids, &labels).lengths(lengths.as_deref());
            let loss = session.loss(&model.params, &batch)?;
            Ok((loss.sum, loss.count, session.token_losses().to_vec()))
        })?
        .map_err(|error: termwise_model::Error| value(error))
    }

    /// The completion of each prompt, as JSON, and the index and error of each failed prompt. The callback receives the text in pieces, in the
    /// order of the prompts.
    fn generate(&self, py: Python<'_>, prompts: Vec<String>, options: &str, callback: Option<&Bound<'_, PyAny>>) -> PyResult<Generated> {
        let options: Writes = parsed(options)?;
        let tokenizer = self.own_tokenizer()?;
        let config = &self.inner.config;
        let sampling = SamplingOptions::default()
            .temperature(options.temperature)
            .top_k(options.top_k)
            .top_p(options.top_p)
            .min_p(options.min_p)
            .repetition_penalty(options.repetition_penalty)
            .seed(options.seed);
        sampling.validate().map_err(value)?;
        let decoding = DecoderOptions::default()
            .rows(options.batch.clamp(1, prompts.len().max(1)))
            .memory(options.order.map_or(MemoryPolicy::Auto, MemoryPolicy::Truncate))
            .beyond_context(options.beyond_context);
        let ends = match () {
            () if options.ignore_end => Vec::new(),
            () if config.eos_token_id.is_empty() => vec![tokenizer.end()],
            () => config.eos_token_id.clone(),
        };
        let generation = GenerationOptions::default()
            .sampling(sampling)
            .max_tokens(options.max_tokens)
            .stop_strings(options.stop)
            .end_tokens(ends)
            .echo(options.echo);
        supervise(py, callback, |watch| {
            let decoder = Decoder::new(self.inner.clone(), decoding).map_err(value)?;
            let (mut written, mut failed) = (Vec::new(), Vec::new());
            let writing = TextGenerator::new(config, decoder, tokenizer, generation, &prompts);
            let done = writing.run(&mut |piece| {
                match piece {
                    GenerationEvent::Text(text) => watch.send(json!({ "text": text })),
                    GenerationEvent::Finished(end) => written.push(serde_json::to_string(&end).expect("texts and whole numbers are JSON")),
                    GenerationEvent::Failed(one) => failed.push((one.index, one.error.to_string())),
                }
                !watch.stop.load(Ordering::Relaxed)
            });
            done.map_err(value)?;
            Ok((written, failed))
        })
    }

    fn spectrum(&self, py: Python<'_>, reads: &str, options: &str, callback: Option<&Bound<'_, PyAny>>) -> PyResult<Found> {
        let (reads, options): (Reads, Spectrum) = (parsed(reads)?, parsed(options)?);
        let how = SpectrumOptions {
            orders: (0..=options.max_order).step_by(2).collect(),
            rows: options.queries.map_or(RowChoice::All, RowChoice::Sampled),
            seed: options.seed,
            ..SpectrumOptions::default()
        };
        supervise(py, callback, |watch| {
            let (windows, data) = match reads.ids {
                Some(ids) => {
                    let length = reads.length.unwrap_or(self.usual_length(None)).max(1);
                    (ids.chunks(length).map(<[u32]>::to_vec).collect(), Vec::new())
                }
                None => {
                    let opened =
                        open_for_model(&self.folder, &reads.data, false, &cache_folder(reads.cache.as_deref()), &Default::default())
                            .map_err(value)?;
                    let length = reads.length.unwrap_or(self.usual_length(opened.trained));
                    (spectrum::windows(opened.source.as_ref(), length, options.tokens).map_err(value)?, opened.data)
                }
            };
            let mut found = spectrum::measure(&self.inner, &windows, &how, &mut |progress| {
                watch.send(json!({ "done": progress.done, "of": progress.of }));
            })
            .map_err(value)?;
            found.model.name = self.name();
            found.text.data = data;
            found.timing = None;
            Ok(Found::of(&found))
        })
    }

    fn cut(&self, py: Python<'_>, reads: &str, options: &str, callback: Option<&Bound<'_, PyAny>>) -> PyResult<Found> {
        let (reads, options): (Reads, Cut) = (parsed(reads)?, parsed(options)?);
        let refuse = |problem: String| crate::errors::input(problem);
        let coefficients = options
            .coefficients
            .iter()
            .map(|word| word.parse::<Choice>())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| refuse(error.to_string()))?;
        let budget = options.budget.as_deref().map(str::parse).transpose().map_err(refuse)?;
        if let Some(place) = &options.save {
            cut::check_place(&self.folder, place, options.overwrite).map_err(value)?;
        }
        supervise(py, callback, |watch| {
            let opened = open_for_model(&self.folder, &reads.data, false, &cache_folder(reads.cache.as_deref()), &Default::default())
                .map_err(value)?;
            let length = reads.length.unwrap_or(self.usual_length(opened.trained));
            let windows = Windows { batch: options.batch, length, stride: length };
            let texts = Texts::split(opened.source.as_ref(), None, windows, options.batches).map_err(value)?;
            let how = CutOptions {
                orders: options.orders,
                coefficients,
                map: None,
                draw_map: options.draw_map,
                budget,
                context: options.context,
                queries: options.queries,
                sequential: options.sequential,
                journal: None,
                collective: std::sync::Arc::new(termwise_train::collective::Alone),
            };
            let about = Report {
                model: self.folder.display().to_string(),
                data: opened.data.clone(),
                layout: opened.layout.clone(),
                ..Report::default()
            };
            let mut outcome = cut::run((*self.inner).clone(), &texts, &how, &watch.stop, about, &mut |_, progress| {
                watch.send(json!({ "done": progress.done, "of": progress.total, "now": progress.now }));
            })
            .map_err(value)?;
            if watch.stop.load(Ordering::Relaxed) {
                return Err(PyInterruptedError::new_err("interrupted"));
            }
            if let Some(to) = &options.save {
                let nothing = || refuse("the plan truncates no layer, so no model was saved: raise budget or context".into());
                let attention = outcome.planned.take().ok_or_else(nothing)?;
                cut::save(&mut outcome.model, &attention, &self.folder, to, options.overwrite).map_err(runtime)?;
            }
            Ok(Found::of(&outcome.report))
        })
    }
}
