//! Spectra of models that are computed outside of termwise.

use pyo3::prelude::*;
use termwise_analysis::spectrum::{Meter as Sums, ModelFacts, Options, RowChoice};

use crate::errors::{Count, value};
use crate::layer::{Call, Given, Layer};
use crate::result::Found;
use crate::threads::compute;

/// Measures the inputs of the attention of each layer.
#[pyclass(module = "termwise._core")]
pub struct Meter {
    inner: Option<Sums>,
}

impl Meter {
    fn sums(&mut self) -> PyResult<&mut Sums> {
        self.inner.as_mut().ok_or_else(|| crate::errors::input("this spectrum is finished"))
    }
}

#[pymethods]
impl Meter {
    #[new]
    fn new(max_order: Count, queries: Option<Count>, seed: Count) -> PyResult<Meter> {
        let rows = queries.map_or(RowChoice::All, |Count(queries)| RowChoice::Sampled(queries));
        let options = Options { orders: (0..=max_order.0).step_by(2).collect(), rows, seed: seed.0 as u64, ..Options::default() };
        Ok(Meter { inner: Some(Sums::new(options).map_err(value)?) })
    }

    /// Starts a batch with rows of these lengths.
    fn begin(&mut self, lengths: Vec<usize>) -> PyResult<()> {
        self.sums()?.begin(&lengths);
        Ok(())
    }

    /// Measures a layer.
    fn see(&mut self, py: Python<'_>, index: usize, layer: &Layer, given: Given<'_>) -> PyResult<()> {
        let call = Call::<f32>::new(py, &layer.inner, &given)?;
        let (batch, time) = call.sizes_of_inputs(layer)?;
        let shape = layer.inner.shape(batch, time).map_err(crate::errors::attention)?;
        let sums = self.sums()?;
        compute(py, || sums.see(index, &layer.inner, &shape, &call.inputs()))?.map_err(value)
    }

    /// The spectrum.
    fn finish(
        &mut self,
        name: String,
        parameters: u64,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        data: Vec<String>,
    ) -> PyResult<Found> {
        let sums = self.inner.take().ok_or_else(|| crate::errors::input("this spectrum is finished"))?;
        Ok(Found::of(&sums.finish(ModelFacts { name, parameters, heads, kv_heads, head_dim }, data)))
    }
}
