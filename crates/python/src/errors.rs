//! Library errors as Python exceptions: the classes of `termwise._errors`, which are also `ValueError`, `OSError`, `MemoryError` or
//! `RuntimeError`.

use std::error::Error;

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyType;

/// Replaces flags in a message with keyword arguments: `--calibration-length` becomes `calibration_length`.
fn with_keywords(message: &str) -> String {
    let mut found = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(at) = rest.find("--") {
        let (before, after) = (&rest[..at], &rest[at + 2..]);
        let end = after.find(|c: char| !c.is_ascii_lowercase() && c != '-').unwrap_or(after.len());
        let name = after[..end].trim_end_matches('-');
        let inside = before.ends_with(|c: char| c.is_alphanumeric() || c == '-');
        found.push_str(before);
        rest = if inside || name.is_empty() || name.starts_with('-') {
            found.push_str("--");
            after
        } else {
            match name {
                "from" => found.push_str("init_from"),
                "out" => found.push_str("folder"),
                _ => found.push_str(&name.replace('-', "_")),
            }
            &after[name.len()..]
        };
    }
    found + rest
}

/// An exception of this class of `termwise._errors`.
fn exception(class: &str, message: String) -> PyErr {
    let message = with_keywords(&message);
    Python::attach(|py| {
        let class =
            py.import("termwise._errors").and_then(|module| module.getattr(class)).and_then(|class| Ok(class.cast_into::<PyType>()?));
        match class {
            Ok(class) => PyErr::from_type(class, message),
            Err(_) => PyRuntimeError::new_err(message),
        }
    })
}

/// An invalid argument.
pub fn input(message: impl Into<String>) -> PyErr {
    exception("InputError", message.into())
}

/// A file that does not exist.
pub fn missing(message: impl Into<String>) -> PyErr {
    exception("MissingFileError", message.into())
}

/// A run that another process is computing.
pub fn busy(message: impl Into<String>) -> PyErr {
    exception("BusyError", message.into())
}

/// A computation that failed.
pub fn failed(message: impl Into<String>) -> PyErr {
    exception("RunError", message.into())
}

/// The system call that caused an error, if there is one, as an exception with the message of `error`.
fn of_system(error: &(dyn Error + 'static)) -> Option<PyErr> {
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(cause) = cause.downcast_ref::<std::io::Error>() {
            return Some(match cause.kind() {
                std::io::ErrorKind::NotFound => missing(error.to_string()),
                _ => exception("FileError", error.to_string()),
            });
        }
        next = cause.source();
    }
    None
}

/// An invalid argument, or a file error if a system call caused it.
pub fn value(error: impl Error + 'static) -> PyErr {
    of_system(&error).unwrap_or_else(|| input(error.to_string()))
}

/// A computation that failed, or a file error if a system call caused it.
pub fn runtime(error: impl Error + 'static) -> PyErr {
    of_system(&error).unwrap_or_else(|| failed(error.to_string()))
}

/// Errors of `termwise-attention`.
pub fn attention(error: termwise_attention::Error) -> PyErr {
    use termwise_attention::Error as E;
    match error {
        E::Memory { .. } => exception("OutOfMemoryError", error.to_string()),
        E::File { .. } => exception("FileError", error.to_string()),
        _ => input(error.to_string()),
    }
}

/// A count as an argument. NumPy integers are accepted; a negative number is a ValueError.
pub struct Count(pub usize);

impl FromPyObject<'_, '_> for Count {
    type Error = PyErr;

    fn extract(any: Borrowed<'_, '_, PyAny>) -> PyResult<Count> {
        match any.extract::<i64>() {
            Ok(count) => usize::try_from(count).map(Count).map_err(|_| input(format!("a non-negative integer is expected, found {count}"))),
            Err(error) if error.is_instance_of::<PyTypeError>(any.py()) => Err(error),
            Err(_) => Err(input(format!("a non-negative integer is expected, found {}", any.repr()?))),
        }
    }
}
