//! Errors as exceptions: what was asked makes no sense (ValueError), a file or the system failed (OSError), no memory (MemoryError), or the work
//! failed (RuntimeError). The message is that of the library.

use std::error::Error;

use pyo3::exceptions::{PyMemoryError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// Whether a system call stands at the root of it.
fn of_system(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<std::io::Error>() {
            return true;
        }
        next = error.source();
    }
    false
}

/// What was asked makes no sense, unless a system call stands at the root of it.
pub fn value(error: impl Error + 'static) -> PyErr {
    if of_system(&error) { PyOSError::new_err(error.to_string()) } else { PyValueError::new_err(error.to_string()) }
}

/// The work failed.
pub fn runtime(error: impl Error + 'static) -> PyErr {
    if of_system(&error) { PyOSError::new_err(error.to_string()) } else { PyRuntimeError::new_err(error.to_string()) }
}

/// Of `termwise-attention`.
pub fn attention(error: termwise_attention::Error) -> PyErr {
    use termwise_attention::Error as E;
    match error {
        E::Memory { .. } => PyMemoryError::new_err(error.to_string()),
        E::File { .. } => PyOSError::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
}
