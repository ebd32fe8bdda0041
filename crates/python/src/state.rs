//! Recurrent states and KV caches of layers.

use std::path::{Path, PathBuf};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use termwise_attention::{FusedOptions, Layer as Planned, Mode, State as Kept, StateKind};

use crate::arrays::Output;
use crate::errors::{Count, attention, runtime, value};
use crate::layer::{Call, Given, Layer, nonpositive};
use crate::threads::compute;

/// The state of a layer between tokens, for all batch rows.
#[pyclass(module = "termwise._core")]
pub struct State {
    inner: Kept,
}

fn memory(cache: bool) -> StateKind {
    if cache { StateKind::Cache } else { StateKind::Auto }
}

impl State {
    pub fn new(py: Python<'_>, layer: &Planned, batch: usize, cache: bool) -> PyResult<State> {
        Ok(State { inner: compute(py, || layer.state_with(batch, memory(cache)))?.map_err(attention)? })
    }

    pub fn read(py: Python<'_>, layer: &Planned, path: &Path, batch: usize, cache: bool) -> PyResult<State> {
        if !path.exists() {
            return Err(crate::errors::missing(format!("{}: the file does not exist", path.display())));
        }
        let read = compute(py, || Kept::load(path, layer, batch, memory(cache)))?;
        // The file exists and does not match the layer.
        Ok(State { inner: read.map_err(value)? })
    }

    pub fn of_bytes(py: Python<'_>, layer: &Planned, bytes: &[u8], batch: usize, cache: bool) -> PyResult<State> {
        let mut read = compute(py, || Kept::from_bytes(bytes, Path::new("the state"), &[(layer, memory(cache))], batch))?.map_err(value)?;
        Ok(State { inner: read.pop().expect("one layer") })
    }
}

#[pymethods]
impl State {
    /// Processes T positions of every row and writes their outputs to y.
    fn extend(
        &mut self,
        py: Python<'_>,
        given: Given<'_>,
        y: &Bound<'_, PyAny>,
        mode: &str,
    ) -> PyResult<Option<(usize, usize, usize, f64)>> {
        let mode: Mode = mode.parse().map_err(attention)?;
        let layer = self.inner.layer().clone();
        let (call, mut y) = (Call::<f32>::new(py, &layer, &given)?, Output::<f32>::new("y", y)?);
        let (batch, time) = call.sizes(&Layer::of(layer.clone()), "y", &y)?;
        if batch != self.inner.batch() {
            let own = self.inner.batch();
            return Err(crate::errors::input(format!(
                "q has {batch} batch rows, expected {own} as in the state: make a state with layer.state({batch}), or choose rows with state.select"
            )));
        }
        call.apart([&y])?;
        let state = &mut self.inner;
        let report = compute(py, || {
            if time == 1 {
                return state.step(&call.inputs(), y.values());
            }
            let options = FusedOptions::default().mode(mode).continues(state.memory());
            layer.fused_with(batch, time, options)?.extend(state, &call.inputs(), y.values())
        })?;
        Ok(nonpositive(report.map_err(attention)?))
    }

    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        compute(py, || self.inner.save(&path))?.map_err(attention)
    }

    /// The bytes of [`State::save`].
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = compute(py, || Kept::to_bytes(std::slice::from_ref(&self.inner)))?.map_err(runtime)?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn select(&self, py: Python<'_>, rows: Vec<Count>) -> PyResult<State> {
        let rows: Vec<usize> = rows.into_iter().map(|Count(row)| row).collect();
        Ok(State { inner: compute(py, || self.inner.select(&rows))?.map_err(attention)? })
    }

    /// Converts an `exp` cache into the state of a layer with a truncated series.
    fn compress(&mut self, py: Python<'_>, layer: &Layer) -> PyResult<()> {
        let state = &mut self.inner;
        compute(py, || state.compress(&layer.inner).map(drop))?.map_err(attention)
    }

    fn copy(&self) -> State {
        State { inner: self.inner.clone() }
    }

    fn clear(&mut self) {
        self.inner.clear();
    }

    #[getter]
    fn bytes(&self) -> usize {
        self.inner.bytes()
    }

    #[getter]
    fn batch(&self) -> usize {
        self.inner.batch()
    }

    /// Whether the caller requested a cache.
    #[getter]
    fn is_cache(&self) -> bool {
        self.inner.memory() == StateKind::Cache
    }

    #[getter]
    fn is_constant(&self) -> bool {
        self.inner.is_constant()
    }

    #[getter]
    fn positions(&self) -> Vec<usize> {
        (0..self.inner.batch()).filter_map(|row| self.inner.position(row)).collect()
    }
}
