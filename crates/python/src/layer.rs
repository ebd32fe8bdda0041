//! Layers: forward and backward on arrays.

use std::sync::{LazyLock, Mutex, PoisonError};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use termwise_attention::{
    Attention, AuxSource, AuxTensor, AuxTensors, Fused, FusedOptions, Grads, Init, Inputs, Layer as Planned, Mode, Report, Rope, Saved,
    Scratch,
};

use crate::arrays::{Flat, Number, Output, Tensor, apart, flat};
use crate::errors::{Count, attention};
use crate::threads::compute;
use crate::variant::Variant;

/// Memory for intermediate results of all layers.
static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::default);

/// Largest number of cached engines per layer.
const ENGINES: usize = 8;

/// Key of a cached engine: B, T and the mode.
type Sizes = (usize, usize, Mode);

/// A denominator that was not positive: batch row, head, position, value.
type Nonpositive = Option<(usize, usize, usize, f64)>;

/// An attention layer: variants, sizes and RoPE, checked and planned once.
#[pyclass(frozen, module = "termwise._core")]
pub struct Layer {
    pub inner: Planned,
    engines: Mutex<Vec<(Sizes, Fused)>>,
}

impl Layer {
    pub fn of(inner: Planned) -> Layer {
        Layer { inner, engines: Mutex::default() }
    }

    /// A cached engine that no call uses, or a new one.
    fn take(&self, batch: usize, time: usize, mode: Mode) -> Result<Fused, termwise_attention::Error> {
        let mut engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = engines.iter().position(|(key, _)| *key == (batch, time, mode)) {
            return Ok(engines.swap_remove(at).1);
        }
        drop(engines);
        self.inner.fused_with(batch, time, FusedOptions::default().mode(mode).scratch(&SCRATCH))
    }

    fn put_back(&self, key: Sizes, engine: Fused) {
        let mut engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        if engines.len() == ENGINES {
            engines.remove(0);
        }
        engines.push((key, engine));
    }

    /// Checks the shapes of q, k, v and y, or its gradient, and returns B and T.
    fn batch_and_time(&self, shapes: [(&str, &[usize]); 4]) -> PyResult<(usize, usize)> {
        let (batch, time) = match *shapes[0].1 {
            [batch, time, _, _] => (batch, time),
            _ => (0, 0),
        };
        let shape = if batch * time == 0 { None } else { Some(self.inner.shape(batch, time).map_err(attention)?) };
        let own = self.inner.shape(1, 1).map_err(attention)?;
        let expected = [(own.heads, own.d), (own.kv_heads, own.d), (own.kv_heads, own.e), (own.heads, own.e)];
        for ((name, found), (heads, dim)) in shapes.into_iter().zip(expected) {
            if shape.is_none() || *found != [batch, time, heads, dim] {
                let place = if batch * time == 0 { "batch, time".to_owned() } else { format!("{batch}, {time}") };
                return Err(crate::errors::input(format!(
                    "{name} has shape {found:?}, expected [{place}, {heads}, {dim}]: tensors are [batch, time, heads, dimension]"
                )));
            }
        }
        Ok((batch, time))
    }
}

/// The input arrays of a call.
pub struct Call<R: Number> {
    x: Vec<Tensor<R>>,
    extras: Vec<(AuxTensor, Flat<R>)>,
    lengths: Option<Vec<usize>>,
    documents: Option<Vec<usize>>,
}

/// The inputs of a call from Python: q, k, v, the auxiliary inputs in the order of the layer, lengths, documents.
#[derive(FromPyObject)]
pub struct Given<'py>(
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Vec<Bound<'py, PyAny>>,
    Option<Vec<usize>>,
    Option<Vec<usize>>,
);

impl<R: Number> Call<R> {
    pub fn new(py: Python<'_>, layer: &Planned, given: &Given<'_>) -> PyResult<Call<R>> {
        let Given(q, k, v, extras, lengths, documents) = given;
        let specs = layer.aux_specs();
        if extras.len() != specs.len() {
            return Err(crate::errors::input(format!("the layer has {} auxiliary inputs, found {}", specs.len(), extras.len())));
        }
        let x = [("q", q), ("k", k), ("v", v)].into_iter().map(|(name, x)| Tensor::rows(py, name, x)).collect::<PyResult<_>>()?;
        let extras =
            specs.iter().zip(extras).map(|(spec, x)| Ok((spec.aux, flat(py, &spec.aux.to_string(), x)?))).collect::<PyResult<_>>()?;
        Ok(Call { x, extras, lengths: lengths.clone(), documents: documents.clone() })
    }

    pub fn inputs(&self) -> Inputs<'_, R> {
        let mut extras = AuxTensors::default();
        self.extras.iter().for_each(|(extra, values)| extras.set(*extra, values.values()));
        let inputs = Inputs::new(self.x[0].as_rows(), self.x[1].as_rows(), self.x[2].as_rows()).with_aux(extras);
        inputs.lengths(self.lengths.as_deref()).documents(self.documents.as_deref())
    }

    fn shapes<'a>(&'a self, last: (&'a str, &'a [usize])) -> [(&'a str, &'a [usize]); 4] {
        [("q", self.x[0].shape()), ("k", self.x[1].shape()), ("v", self.x[2].shape()), last]
    }

    /// Rejects outputs that share memory with inputs.
    pub fn apart<'a>(&'a self, outputs: impl IntoIterator<Item = &'a Output<R>>) -> PyResult<()> {
        apart(outputs, &self.x, self.extras.iter().map(|(_, values)| values))
    }

    /// B and T of a call of this layer.
    pub fn sizes_of_inputs(&self, layer: &Layer) -> PyResult<(usize, usize)> {
        let own = layer.inner.shape(1, 1).map_err(attention)?;
        let q = self.x[0].shape();
        let y: Vec<usize> = q.iter().copied().take(2).chain([own.heads, own.e]).collect();
        layer.batch_and_time(self.shapes(("y", &y)))
    }

    /// B and T of a call of this layer with this output.
    pub fn sizes(&self, layer: &Layer, name: &str, y: &Output<R>) -> PyResult<(usize, usize)> {
        layer.batch_and_time(self.shapes((name, y.shape())))
    }
}

pub fn nonpositive(report: Report) -> Nonpositive {
    report.nonpositive.map(|at| (at.row, at.head, at.position, at.value))
}

/// Whether an array is float64; an error for types other than float32 and float64.
fn is_wide(array: &Bound<'_, PyAny>) -> PyResult<bool> {
    let dtype = array.getattr("dtype").map_err(|_| PyTypeError::new_err(format!("an array is needed, found {}", array.get_type())))?;
    match dtype.str()?.to_str()? {
        "float32" => Ok(false),
        "float64" => Ok(true),
        other => Err(PyTypeError::new_err(format!(
            "arrays of {other} are not supported: convert them to float32, or to float64 for the reference"
        ))),
    }
}

#[pymethods]
impl Layer {
    #[new]
    #[pyo3(signature = (variants, heads, kv_heads, dim, value_dim, rope))]
    fn new(
        variants: Vec<Bound<'_, PyAny>>,
        heads: Count,
        kv_heads: Count,
        dim: Count,
        value_dim: Count,
        rope: Option<f64>,
    ) -> PyResult<Layer> {
        let [heads, kv_heads, dim, value_dim] = [heads, kv_heads, dim, value_dim].map(|Count(count)| count);
        let mut variants = variants.iter().map(Variant::of).collect::<PyResult<Vec<_>>>()?;
        let mut sizes = Planned::new(heads, kv_heads, dim).value_dim(value_dim);
        match rope {
            Some(theta) => sizes = sizes.rope(Rope::new(dim, theta, None).map_err(attention)?),
            // q and k are not rotated.
            None => variants.iter_mut().for_each(|variant| variant.rope = false),
        }
        let planned = match &variants[..] {
            [one] => sizes.variant(one),
            _ => sizes.heads(&variants),
        };
        Ok(Layer::of(planned.map_err(attention)?))
    }

    /// The variants of its heads.
    #[getter]
    fn variants(&self) -> Vec<Variant> {
        self.inner.heads().iter().cloned().map(Variant).collect()
    }

    /// H, G, d, e.
    #[getter]
    fn sizes(&self) -> PyResult<(usize, usize, usize, usize)> {
        let shape = self.inner.shape(1, 1).map_err(attention)?;
        Ok((shape.heads, shape.kv_heads, shape.d, shape.e))
    }

    /// Its parts as plain data, in JSON.
    #[getter]
    fn parts(&self) -> String {
        crate::parts::of_layer(&self.inner).to_string()
    }

    /// Auxiliary inputs: name, name in checkpoints, whether logits, shape of a parameter or outputs of a projection, initialization, bias.
    #[getter]
    fn extras<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let spec = |spec: &termwise_attention::AuxSpec| {
            let found = PyDict::new(py);
            found.set_item("name", spec.aux.to_string())?;
            found.set_item("tensor", spec.name)?;
            match &spec.source {
                AuxSource::Projection { outputs, bias } => {
                    found.set_item("logits", true)?;
                    found.set_item("shape", vec![*outputs])?;
                    found.set_item("bias", bias)?;
                }
                AuxSource::Parameter { shape, init } => {
                    found.set_item("logits", false)?;
                    found.set_item("shape", shape)?;
                    found.set_item(
                        "init",
                        match init {
                            Init::Constant(x) => ("constant", x),
                            Init::Uniform(x) => ("uniform", x),
                        },
                    )?;
                }
            }
            Ok(found)
        };
        self.inner.aux_specs().iter().map(spec).collect()
    }

    /// Computes y, and U, z and ρ for `backward` if `saved` is given.
    #[pyo3(signature = (given, y, saved, fused, mode))]
    fn forward(
        &self,
        py: Python<'_>,
        given: Given<'_>,
        y: &Bound<'_, PyAny>,
        saved: Option<[Bound<'_, PyAny>; 3]>,
        fused: bool,
        mode: &str,
    ) -> PyResult<Nonpositive> {
        let mode: Mode = mode.parse().map_err(attention)?;
        if is_wide(y)? {
            self.forward_naive::<f64>(py, &given, y)
        } else if fused {
            self.forward_fused(py, &given, y, saved, mode)
        } else {
            self.forward_naive::<f32>(py, &given, y)
        }
    }

    /// Adds the gradients of Σ y·dy to those of q, k, v and the auxiliary inputs. Without `saved` the forward pass is recomputed.
    #[pyo3(signature = (given, saved, dy, grads, fused, mode))]
    #[allow(clippy::too_many_arguments, reason = "all that a backward pass reads and writes")]
    fn backward(
        &self,
        py: Python<'_>,
        given: Given<'_>,
        saved: Option<[Bound<'_, PyAny>; 3]>,
        dy: &Bound<'_, PyAny>,
        grads: Vec<Bound<'_, PyAny>>,
        fused: bool,
        mode: &str,
    ) -> PyResult<()> {
        let mode: Mode = mode.parse().map_err(attention)?;
        if is_wide(dy)? {
            self.backward_with::<f64>(py, &given, dy, grads, |call, dy, grads| {
                let shape = |i: usize| call.x[i].shape();
                let mut engine = self.inner.naive::<f64>(shape(0)[0], shape(0)[1])?;
                let saved = engine.forward(&call.inputs(), &mut vec![0.0; dy.len()])?;
                engine.backward(&call.inputs(), &saved, dy, grads)
            })
        } else if !fused {
            self.backward_with::<f32>(py, &given, dy, grads, |call, dy, grads| {
                let shape = |i: usize| call.x[i].shape();
                let mut engine = self.inner.naive::<f32>(shape(0)[0], shape(0)[1])?;
                let saved = engine.forward(&call.inputs(), &mut vec![0.0; dy.len()])?;
                engine.backward(&call.inputs(), &saved, dy, grads)
            })
        } else {
            let saved = saved
                .map(|saved| -> PyResult<Vec<Flat<f32>>> { saved.iter().map(|x| flat(py, "what was saved", x)).collect() })
                .transpose()?;
            self.backward_with::<f32>(py, &given, dy, grads, |call, dy, grads| {
                let (batch, time) = (call.x[0].shape()[0], call.x[0].shape()[1]);
                let mut engine = self.take(batch, time, mode)?;
                let inputs = call.inputs();
                let saved = match &saved {
                    Some(saved) => engine.saved_from(&inputs, [saved[0].values(), saved[1].values(), saved[2].values()]),
                    None => engine.forward(&inputs, &mut vec![0.0; dy.len()]),
                };
                let done = saved.and_then(|saved| engine.backward(&inputs, &saved, dy, grads));
                self.put_back((batch, time, mode), engine);
                done
            })
        }
    }

    /// An empty state: of constant size if the variant allows it, unless `cache`.
    fn state(&self, py: Python<'_>, batch: Count, cache: bool) -> PyResult<crate::state::State> {
        crate::state::State::new(py, &self.inner, batch.0, cache)
    }

    /// A state from the bytes of a file.
    fn state_of_bytes(&self, py: Python<'_>, bytes: &[u8], batch: usize, cache: bool) -> PyResult<crate::state::State> {
        crate::state::State::of_bytes(py, &self.inner, bytes, batch, cache)
    }

    /// A state from a file.
    fn load_state(&self, py: Python<'_>, path: std::path::PathBuf, batch: Count, cache: bool) -> PyResult<crate::state::State> {
        crate::state::State::read(py, &self.inner, &path, batch.0, cache)
    }
}

impl Layer {
    fn forward_naive<R: Number>(&self, py: Python<'_>, given: &Given<'_>, y: &Bound<'_, PyAny>) -> PyResult<Nonpositive> {
        let (call, mut y) = (Call::<R>::new(py, &self.inner, given)?, Output::<R>::new("y", y)?);
        let (batch, time) = call.sizes(self, "y", &y)?;
        call.apart([&y])?;
        let report = compute(py, || self.inner.naive::<R>(batch, time)?.infer(&call.inputs(), y.values()))?;
        Ok(nonpositive(report.map_err(attention)?))
    }

    fn forward_fused(
        &self,
        py: Python<'_>,
        given: &Given<'_>,
        y: &Bound<'_, PyAny>,
        saved: Option<[Bound<'_, PyAny>; 3]>,
        mode: Mode,
    ) -> PyResult<Nonpositive> {
        let (call, mut y) = (Call::<f32>::new(py, &self.inner, given)?, Output::<f32>::new("y", y)?);
        let (batch, time) = call.sizes(self, "y", &y)?;
        let mut saved = match saved {
            Some(saved) => saved.iter().map(|x| Output::<f32>::new("what is saved", x)).collect::<PyResult<Vec<_>>>()?,
            None => Vec::new(),
        };
        call.apart(saved.iter().chain([&y]))?;
        let report = compute(py, || {
            let mut engine = self.take(batch, time, mode)?;
            let inputs = call.inputs();
            let report = if saved.is_empty() {
                engine.infer(&inputs, y.values())
            } else {
                engine.forward(&inputs, y.values()).and_then(|own| keep(&own, &mut saved).map(|()| own.report()))
            };
            self.put_back((batch, time, mode), engine);
            report
        })?;
        Ok(nonpositive(report.map_err(attention)?))
    }

    fn backward_with<R: Number>(
        &self,
        py: Python<'_>,
        given: &Given<'_>,
        dy: &Bound<'_, PyAny>,
        grads: Vec<Bound<'_, PyAny>>,
        run: impl FnOnce(&Call<R>, &[R], &mut Grads<R>) -> Result<(), termwise_attention::Error> + Send,
    ) -> PyResult<()> {
        let (call, dy) = (Call::<R>::new(py, &self.inner, given)?, Tensor::<R>::rows(py, "the gradient of y", dy)?);
        self.batch_and_time(call.shapes(("the gradient of y", dy.shape())))?;
        let specs = self.inner.aux_specs();
        if grads.len() != 3 + specs.len() {
            return Err(crate::errors::input(format!("{} gradients are computed, found {} arrays", 3 + specs.len(), grads.len())));
        }
        let mut grads = grads.iter().map(|x| Output::<R>::new("a gradient", x)).collect::<PyResult<Vec<_>>>()?;
        call.apart(&grads)?;
        apart(&grads, std::slice::from_ref(&dy), [])?;
        let own;
        let dy = match dy.as_rows() {
            rows if rows.values().len() == dy.shape().iter().product::<usize>() => rows.values(),
            rows => {
                let width = dy.shape()[2] * dy.shape()[3];
                own = rows.values().chunks(rows.stride(width)).flat_map(|row| &row[..width]).copied().collect::<Vec<R>>();
                &own
            }
        };
        let done = compute(py, || {
            let (x, extras) = grads.split_at_mut(3);
            let [q, k, v] = x else { unreachable!("three of them") };
            let mut grads = Grads::new(q.values(), k.values(), v.values());
            for (spec, place) in specs.iter().zip(extras) {
                grads = grads.with(spec.aux, place.values());
            }
            run(&call, dy, &mut grads)
        })?;
        done.map_err(attention)
    }
}

/// Copies the sums of a forward pass into arrays of the caller.
fn keep(saved: &Saved, to: &mut [Output<f32>]) -> Result<(), termwise_attention::Error> {
    for (to, from) in to.iter_mut().zip(saved.values()) {
        let to = to.values();
        if to.len() != from.len() {
            let tensor = "what is saved".to_owned();
            return Err(termwise_attention::Error::Tensor { tensor, expected: from.len(), found: to.len() });
        }
        to.copy_from_slice(from);
    }
    Ok(())
}
