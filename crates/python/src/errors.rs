//! Errors as exceptions: what was asked makes no sense (ValueError), a file or the system failed (OSError), no memory (MemoryError), or the work
//! failed (RuntimeError). The message is that of the library.

use std::error::Error;

use pyo3::exceptions::{PyFileNotFoundError, PyMemoryError, PyOSError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;

/// The system call at the root of it, if there is one, as an exception with the message of `error`.
fn of_system(error: &(dyn Error + 'static)) -> Option<PyErr> {
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(cause) = cause.downcast_ref::<std::io::Error>() {
            return Some(match cause.kind() {
                std::io::ErrorKind::NotFound => PyFileNotFoundError::new_err(error.to_string()),
                _ => PyOSError::new_err(error.to_string()),
            });
        }
        next = cause.source();
    }
    None
}

/// What was asked makes no sense, unless a system call stands at the root of it.
pub fn value(error: impl Error + 'static) -> PyErr {
    of_system(&error).unwrap_or_else(|| PyValueError::new_err(error.to_string()))
}

/// The work failed.
pub fn runtime(error: impl Error + 'static) -> PyErr {
    of_system(&error).unwrap_or_else(|| PyRuntimeError::new_err(error.to_string()))
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

/// A number of something, as an argument: NumPy's whole numbers are taken, and a negative one is a ValueError.
pub struct Count(pub usize);

impl FromPyObject<'_, '_> for Count {
    type Error = PyErr;

    fn extract(any: Borrowed<'_, '_, PyAny>) -> PyResult<Count> {
        match any.extract::<i64>() {
            Ok(count) => usize::try_from(count)
                .map(Count)
                .map_err(|_| PyValueError::new_err(format!("a whole number from 0 on is expected, found {count}"))),
            Err(error) if error.is_instance_of::<PyTypeError>(any.py()) => Err(error),
            Err(_) => Err(PyValueError::new_err(format!("a whole number from 0 on is expected, found {}", any.repr()?))),
        }
    }
}
