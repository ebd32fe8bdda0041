//! States: what is kept between tokens.

use std::path::{Path, PathBuf};

use pyo3::prelude::*;
use termwise_attention::{FusedOptions, Layer as Planned, Memory, Mode, State as Kept};

use crate::arrays::Output;
use crate::errors::attention;
use crate::layer::{Call, Given, Layer, nonpositive};
use crate::threads::compute;

/// What a layer keeps between tokens, for all its batch rows.
#[pyclass(module = "termwise._core")]
pub struct State {
    inner: Kept,
}

fn memory(cache: bool) -> Memory {
    if cache { Memory::Cache } else { Memory::Natural }
}

impl State {
    pub fn new(layer: Planned, batch: usize, cache: bool) -> PyResult<State> {
        Ok(State { inner: layer.state_with(batch, memory(cache)).map_err(attention)? })
    }

    pub fn read(layer: Planned, path: &Path, batch: usize, cache: bool) -> PyResult<State> {
        Ok(State { inner: Kept::load(path, &layer, batch, memory(cache)).map_err(attention)? })
    }
}

#[pymethods]
impl State {
    /// Takes T positions of every row in; y for each. One position is a step.
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

    fn save(&self, path: PathBuf) -> PyResult<()> {
        self.inner.save(&path).map_err(attention)
    }

    fn select(&self, rows: Vec<usize>) -> PyResult<State> {
        Ok(State { inner: self.inner.select(&rows).map_err(attention)? })
    }

    /// A cache of a softmax becomes the state of this layer, whose kernels are its series cut.
    fn compress(&mut self, layer: &Layer) -> PyResult<()> {
        self.inner.compress(&layer.inner).map(drop).map_err(attention)
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

    #[getter]
    fn is_constant(&self) -> bool {
        self.inner.is_constant()
    }

    #[getter]
    fn positions(&self) -> Vec<usize> {
        (0..self.inner.batch()).filter_map(|row| self.inner.position(row)).collect()
    }
}
