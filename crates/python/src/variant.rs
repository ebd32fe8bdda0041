//! Variants.

use pyo3::basic::CompareOp;
use pyo3::prelude::*;
use termwise_analysis::variants::{Described, describe};
use termwise_attention::{Variant as Parts, presets};

use crate::errors::{Count, attention, value};
use crate::result::Found;
use crate::threads::compute;

/// An attention variant.
#[pyclass(frozen, from_py_object, module = "termwise")]
#[derive(Clone)]
pub struct Variant(pub Parts);

impl Variant {
    /// A variant from a variant or a variant string.
    pub fn of(any: &Bound<'_, PyAny>) -> PyResult<Parts> {
        if let Ok(variant) = any.cast::<Variant>() {
            return Ok(variant.get().0.clone());
        }
        let text: String = any.extract().map_err(|_| {
            let found = any.get_type();
            pyo3::exceptions::PyTypeError::new_err(format!(
                "a variant is a string such as \"taylor=0..4 norm=l2\" or a Variant, found {found}"
            ))
        })?;
        text.parse().map_err(attention)
    }
}

#[pymethods]
impl Variant {
    #[new]
    fn new(text: &Bound<'_, PyAny>) -> PyResult<Variant> {
        Ok(Variant(Variant::of(text)?))
    }

    /// Names and variant strings of all presets.
    #[staticmethod]
    fn presets() -> Vec<(&'static str, &'static str)> {
        presets::all().iter().map(|preset| (preset.name, preset.text)).collect()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("Variant({:?})", self.0.to_string())
    }

    fn __richcmp__(&self, other: &Bound<'_, PyAny>, op: CompareOp, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let Ok(other) = other.cast::<Variant>() else { return Ok(py.NotImplemented()) };
        let same = self.0 == other.get().0;
        match op {
            CompareOp::Eq => Ok(same.into_pyobject(py)?.to_owned().into_any().unbind()),
            CompareOp::Ne => Ok((!same).into_pyobject(py)?.to_owned().into_any().unbind()),
            _ => Ok(py.NotImplemented()),
        }
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        self.0.to_string().hash(&mut hasher);
        hasher.finish()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((slf.get_type().into_any(), (slf.get().0.to_string(),)))
    }

    #[getter]
    fn formula(&self) -> String {
        self.0.formula()
    }

    #[getter]
    fn canonical(&self) -> Variant {
        Variant(self.0.canonical())
    }

    fn equals(&self, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(self.0.canonical() == Variant::of(other)?.canonical())
    }

    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.0.warnings()
    }

    /// Whether q and k are rotated if rotary frequencies are given.
    #[getter]
    fn rope(&self) -> bool {
        self.0.rope
    }

    /// The part that has no backward pass, if there is one.
    #[getter]
    fn inference_only(&self) -> Option<&'static str> {
        self.0.inference_only()
    }

    /// Whether q, k and v are the only inputs.
    #[getter]
    fn has_no_extras(&self) -> bool {
        termwise_attention::AuxTensor::all().all(|aux| !self.0.needs(aux))
    }

    #[pyo3(signature = (dim, value_dim=None))]
    fn state_bytes(&self, dim: Count, value_dim: Option<Count>) -> Option<u128> {
        let (Count(dim), value_dim) = (dim, value_dim.map(|Count(count)| count));
        self.0.state_size(dim, value_dim.unwrap_or(dim)).map(|floats| floats.saturating_mul(4))
    }

    /// Source of a PyTorch module that computes the variant without termwise.
    fn to_torch(&self) -> PyResult<String> {
        termwise_analysis::export::torch(&self.0, &format!("termwise {}", env!("CARGO_PKG_VERSION"))).map_err(value)
    }

    /// Parts, formula and cost.
    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let described = compute(py, || describe(&[&self.0.to_string()], Default::default()))?.map_err(value)?;
        let found = Found::of(&Described { sizes: Default::default(), variants: described });
        py.import("termwise._results")?.getattr("Result")?.call1((found,))
    }
}
