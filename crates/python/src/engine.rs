//! PyTorch as an engine of training. Rust has the training loop, the data, the metrics and the checkpoints. A `Learner` in Python has the model and its optimizer
//! (`termwise.torch.train.learner`), and a `Collective` communicates between processes.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use serde_json::{Value, json};
use termwise_data::Rows;
use termwise_model::weights::{self, NamedTensor, WriteOptions};
use termwise_model::{Config, Model, ParamLayout};
use termwise_train::checkpoint::OPTIMIZER;
use termwise_train::eval::Sums;
use termwise_train::learner::{Engine, Learner, operations};
use termwise_train::nonfinite::{Diagnosis, Place};
use termwise_train::step::Computed;
use termwise_train::{AdamW, Collective, Error, Result, Settings};

use crate::arrays::{Output, flat};
use crate::errors::value;

/// The PyTorch engine: `factory(config, settings)` returns a learner, `collective` is a Python `Collective`.
pub fn torch(py: Python<'_>, factory: Py<PyAny>, collective: Py<PyAny>) -> PyResult<(Arc<dyn Engine>, Arc<dyn Collective>)> {
    let (rank, size) = (collective.getattr(py, "rank")?.extract(py)?, collective.getattr(py, "size")?.extract(py)?);
    Ok((Arc::new(Torch { factory }), Arc::new(Processes { object: collective, rank, size })))
}

/// The settings of a file for a learner, in JSON, and the `config.json` of their model, for a vocabulary of this size.
#[pyfunction]
pub fn model_of_settings(toml: &str, vocabulary: usize) -> PyResult<(String, String)> {
    let settings = Settings::from_toml(toml, "the settings").map_err(value)?;
    let config = settings.config(vocabulary).map_err(value)?;
    Ok((words(&settings).to_string(), config.to_json_string()))
}

/// The settings for a learner.
fn words(settings: &Settings) -> Value {
    let adamw = settings.adamw();
    json!({
        "attention": settings.attention.as_str().map_or_else(|| settings.attention.to_string(), str::to_owned),
        "batch": settings.batch,
        "length": settings.length,
        "accumulate": settings.accumulate,
        "micro_batches": settings.micro_batches,
        "mode": settings.mode,
        "threads": settings.threads,
        "beta1": adamw.beta1,
        "beta2": adamw.beta2,
        "eps": adamw.eps,
        "weight_decay": adamw.weight_decay,
        "decay_matrices_only": adamw.decay_matrices_only,
    })
}

/// An exception as an error of the engine.
fn failed(error: PyErr) -> Error {
    Python::attach(|py| {
        error.print(py);
        Error::Engine { engine: "torch", problem: error.value(py).to_string() }
    })
}

/// The ranks started by torchrun.
struct Processes {
    object: Py<PyAny>,
    rank: usize,
    size: usize,
}

impl fmt::Debug for Processes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.size)
    }
}

impl Collective for Processes {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        Python::attach(|py| self.object.call_method1(py, "gather", (PyBytes::new(py, own),))?.extract(py)).map_err(failed)
    }

    // PyTorch sums gradients.
    fn exchange(&self, _: &[f32], _: &[usize], _: &mut [f32], _: &[usize]) -> Result<()> {
        Err(Error::Internal("the PyTorch engine exchanges gradients in PyTorch, not here"))
    }

    fn spread(&self, _: &mut [f32], _: &[usize]) -> Result<()> {
        Err(Error::Internal("the PyTorch engine gathers gradients in PyTorch, not here"))
    }

    fn abort(&self, exit: u8) {
        // Does not return.
        let _ = Python::attach(|py| self.object.call_method1(py, "abort", (exit,)));
    }
}

struct Torch {
    factory: Py<PyAny>,
}

impl fmt::Debug for Torch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Torch")
    }
}

impl Engine for Torch {
    fn name(&self) -> &'static str {
        "torch"
    }

    fn adopt(&self, model: Model, optimizer: AdamW, settings: &Settings) -> Result<Box<dyn Learner>> {
        let entries = model.params.layout().entries();
        let tensors = entries.iter().map(|entry| (entry.spec.name.clone(), entry.spec.shape.clone())).collect();
        let object = Python::attach(|py| {
            let object = self.factory.call1(py, (model.config.to_json_string(), words(settings).to_string()))?;
            object.setattr(py, "updates", optimizer.steps)?;
            Ok(object)
        });
        let learner = TorchLearner { object: object.map_err(failed)?, config: model.config.clone(), tensors };
        let moments = [(MOMENTS[0], &optimizer.first), (MOMENTS[1], &optimizer.second)];
        // There are no moments before the first update.
        let moments = moments.into_iter().filter(|_| optimizer.steps > 0);
        for (kind, params) in [("parameter", &model.params)].into_iter().chain(moments) {
            for (entry, values) in params.iter() {
                learner.put(kind, &entry.spec.name, values)?;
            }
        }
        Ok(Box::new(learner))
    }
}

/// The moments of AdamW, by their names in checkpoints.
const MOMENTS: [&str; 2] = ["first", "second"];

/// A model in Python.
struct TorchLearner {
    object: Py<PyAny>,
    config: Config,
    /// Names and shapes, in the order of a checkpoint.
    tensors: Vec<(String, Vec<usize>)>,
}

impl fmt::Debug for TorchLearner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TorchLearner")
    }
}

impl TorchLearner {
    fn call<T>(&self, work: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T> {
        Python::attach(|py| work(self.object.bind(py))).map_err(failed)
    }

    /// Copies a tensor to the learner.
    fn put(&self, kind: &str, name: &str, values: &[f32]) -> Result<()> {
        self.call(|object| {
            let room = object.call_method1("room", (name,))?;
            let mut to = Output::<f32>::new(name, &room)?;
            let found = to.values().len();
            if found != values.len() {
                return Err(crate::errors::input(format!("{name} has {} values, found an array of {found}", values.len())));
            }
            to.values().copy_from_slice(values);
            drop(to);
            object.call_method1("put", (kind, name, room)).map(drop)
        })
    }

    /// Writes the tensors of these kinds to a file; the kind is a prefix of the name, except for parameters.
    fn write(&self, path: &Path, kinds: &[&str]) -> Result<()> {
        let mut written = Ok(());
        self.call(|object| {
            let mut found = Vec::new();
            for kind in kinds {
                for (name, shape) in &self.tensors {
                    let label = if *kind == "parameter" { name.clone() } else { format!("{kind}.{name}") };
                    found.push((label, shape, flat::<f32>(object.py(), name, &object.call_method1("tensor", (*kind, name))?)?));
                }
            }
            let tensors: Vec<NamedTensor> =
                found.iter().map(|(name, shape, values)| NamedTensor { name, shape, data: values.values() }).collect();
            written = object.py().detach(|| weights::write_file(path, tensors, &WriteOptions::default()));
            Ok(())
        })?;
        Ok(written?)
    }
}

/// A batch as arguments of Python.
fn batch<'py>(py: Python<'py>, rows: &Rows) -> (usize, usize, Bound<'py, PyBytes>, Bound<'py, PyBytes>, Vec<usize>) {
    let ids: Vec<u8> = rows.ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
    let labels: Vec<u8> = rows.labels.iter().flat_map(|label| label.to_ne_bytes()).collect();
    (rows.rows, rows.time, PyBytes::new(py, &ids), PyBytes::new(py, &labels), rows.lengths.clone())
}

impl Learner for TorchLearner {
    fn prepare(&mut self, _: &Settings, _: &dyn Collective) -> Result<()> {
        self.call(|object| object.call_method0("prepare").map(drop))
    }

    fn gradient(&mut self, batches: &[Rows]) -> Result<()> {
        self.call(|object| {
            let batches = PyList::new(object.py(), batches.iter().map(|rows| batch(object.py(), rows)))?;
            object.call_method1("gradient", (batches,)).map(drop)
        })
    }

    fn reduce(&mut self, _: &dyn Collective) -> Result<Computed> {
        let (sum, tokens, bad): (f64, u64, i64) = self.call(|object| object.call_method0("reduce")?.extract())?;
        let bad_batch = usize::try_from(bad).ok();
        Ok(Computed { loss: sum / tokens.max(1) as f64, tokens, norm: f64::NAN, nonpositive: None, bad_batch })
    }

    fn norm(&self) -> Result<f64> {
        self.call(|object| object.call_method0("norm")?.extract())
    }

    fn update(&mut self, learning_rate: f64, scale: f64) -> Result<()> {
        self.call(|object| object.call_method1("update", (learning_rate, scale)).map(drop))
    }

    fn updates(&self) -> u64 {
        self.call(|object| object.getattr("updates")?.extract()).unwrap_or(0)
    }

    fn loss(&mut self, rows: &Rows) -> Result<Sums> {
        let losses: Vec<u8> = self.call(|object| object.call_method1("loss", (batch(object.py(), rows),))?.extract())?;
        let losses: Vec<f64> = losses.as_chunks::<8>().0.iter().map(|&bytes| f64::from_ne_bytes(bytes)).collect();
        Ok(Sums::of_losses(rows, &losses))
    }

    fn measures_together(&self) -> bool {
        self.call(|object| object.getattr("sharded")?.extract()).unwrap_or(false)
    }

    fn operations(&self, settings: &Settings) -> f64 {
        ParamLayout::new(&self.config).map_or(0.0, |layout| operations(&layout, &self.config, settings))
    }

    fn diagnose(&self, computed: &Computed, _: &[Rows], step: u64) -> Diagnosis {
        let place = |gradient: bool| {
            let name: Option<String> = self.call(|object| object.call_method1("first_bad", (gradient,))?.extract()).ok().flatten();
            // The index in the tensor is not determined.
            name.map(|tensor| Place { tensor, index: 0, layer: None, head: None, value: "not finite".into() })
        };
        Diagnosis {
            step,
            mode: "parallel".into(),
            loss: computed.loss.to_string(),
            norm: computed.norm.to_string(),
            batch: computed.bad_batch,
            denominator: None,
            forward: None,
            head: None,
            weight: place(false),
            gradient: place(true),
        }
    }

    fn collect(&mut self) -> Result<()> {
        self.call(|object| object.call_method0("collect").map(drop))
    }

    fn write_model(&self, folder: &Path) -> Result<Vec<&'static str>> {
        self.config.write(folder)?;
        self.write(&folder.join(weights::SINGLE_FILE), &["parameter"])?;
        Ok([self.config.files(), &[weights::SINGLE_FILE]].concat())
    }

    fn write_moments(&self, folder: &Path) -> Result<()> {
        self.write(&folder.join(OPTIMIZER), &MOMENTS)
    }
}
