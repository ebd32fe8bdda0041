//! The extension module of the Python package `termwise`. It converts types, releases the GIL, calls the library, and converts errors to exceptions.
//! `python/termwise` adds names, defaults and documentation.

mod arrays;
mod commands;
mod engine;
mod errors;
mod kv;
mod layer;
mod meter;
mod model;
mod parts;
mod result;
mod state;
mod threads;
mod variant;

use pyo3::prelude::*;

#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("LOADER_FILE", termwise_model::config::LOADER_FILE)?;
    m.add("LOADER_SOURCE", termwise_model::config::LOADER_SOURCE)?;
    m.add_class::<layer::Layer>()?;
    m.add_class::<meter::Meter>()?;
    m.add_class::<model::Model>()?;
    m.add_class::<result::Found>()?;
    m.add_class::<state::State>()?;
    m.add_class::<variant::Variant>()?;
    m.add_function(wrap_pyfunction!(threads::get_threads, m)?)?;
    m.add_function(wrap_pyfunction!(threads::set_threads, m)?)?;
    m.add_function(wrap_pyfunction!(model::find_model, m)?)?;
    m.add_function(wrap_pyfunction!(model::layers_of_config, m)?)?;
    m.add_function(wrap_pyfunction!(model::load_model, m)?)?;
    m.add_function(wrap_pyfunction!(model::model_of_config, m)?)?;
    m.add_function(wrap_pyfunction!(commands::main, m)?)?;
    m.add_function(wrap_pyfunction!(engine::model_of_settings, m)?)?;
    m.add_function(wrap_pyfunction!(commands::settings, m)?)?;
    m.add_function(wrap_pyfunction!(kv::run_atlas, m)?)?;
    m.add_function(wrap_pyfunction!(kv::run_audit, m)?)?;
    m.add_function(wrap_pyfunction!(kv::run_convert, m)?)?;
    m.add_function(wrap_pyfunction!(kv::run_frontier, m)?)?;
    m.add_function(wrap_pyfunction!(commands::run_reproduce, m)?)?;
    m.add_function(wrap_pyfunction!(commands::run_separation, m)?)?;
    m.add_function(wrap_pyfunction!(commands::run_sweep, m)?)?;
    m.add_function(wrap_pyfunction!(commands::train, m)?)?;
    Ok(())
}
