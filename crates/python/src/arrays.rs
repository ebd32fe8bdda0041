//! Arrays of Python as slices, without copies where they lie in rows; all unsafe code of this crate.
//!
//! Buffers stay exported while a call runs, so that their memory stays where it is, and calls run without the interpreter's lock. As with
//! NumPy's own functions, whoever changes an input in another thread meanwhile gets numbers that are a mixture.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use termwise_attention::{Real, Rows};

/// A number type of both sides.
pub trait Number: Real + Element {
    /// As NumPy calls it.
    const NAME: &'static str;
}

impl Number for f32 {
    const NAME: &'static str = "float32";
}

impl Number for f64 {
    const NAME: &'static str = "float64";
}

/// An array that is read.
pub struct Tensor<R: Number> {
    shape: Vec<usize>,
    held: Held<R>,
}

enum Held<R: Number> {
    /// The array's own memory; rows of that width lie that far apart.
    Rows(PyBuffer<R>, usize),
    /// In another order than by rows.
    Copied(Vec<R>),
}

fn buffer<R: Number>(name: &str, array: &Bound<'_, PyAny>) -> PyResult<PyBuffer<R>> {
    PyBuffer::get(array).map_err(|_| {
        let found = array.getattr("dtype").map_or_else(|_| array.get_type().to_string(), |dtype| dtype.to_string());
        if found == R::NAME {
            return crate::errors::input(format!("{name} is not aligned in memory: give a copy of it"));
        }
        PyTypeError::new_err(format!(
            "{name} is {found}, and the others are {}: give all arrays one dtype, float32 or float64, in the machine's byte order",
            R::NAME
        ))
    })
}

impl<R: Number> Tensor<R> {
    /// An array whose rows, of all but the first two dimensions, are to be read; copied only where these do not lie equally far apart.
    pub fn rows(py: Python<'_>, name: &str, array: &Bound<'_, PyAny>) -> PyResult<Tensor<R>> {
        let buffer = buffer::<R>(name, array)?;
        let shape = buffer.shape().to_vec();
        let held = match row_stride(&shape, buffer.strides(), size_of::<R>()) {
            Some(stride) => Held::Rows(buffer, stride),
            None => Held::Copied(buffer.to_vec(py)?),
        };
        Ok(Tensor { shape, held })
    }

    /// Its sizes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn width(&self) -> usize {
        self.shape.iter().skip(2).product()
    }

    /// Its rows.
    pub fn as_rows(&self) -> Rows<'_, R> {
        match &self.held {
            Held::Copied(values) => Rows::from(&values[..]),
            Held::Rows(buffer, stride) => {
                let (rows, width) = (self.shape.iter().take(2).product::<usize>(), self.width());
                if *stride == width {
                    return Rows::from(self.values(buffer, rows * width));
                }
                Rows::strided(self.values(buffer, (rows.max(1) - 1) * stride + width), *stride)
            }
        }
    }

    /// From the first value on.
    fn values<'a>(&'a self, buffer: &'a PyBuffer<R>, len: usize) -> &'a [R] {
        if buffer.item_count() == 0 {
            return &[];
        }
        // SAFETY: the exporter says that rows of `width` values lie `stride` apart from this address on; `len` ends with the last of them.
        // `PyBuffer::get` has checked alignment, and memory stays while the buffer is held.
        unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<R>(), len) }
    }
}

/// From one row to the next, in values, where rows of all but the first two dimensions are contiguous and lie equally far apart.
fn row_stride(shape: &[usize], strides: &[isize], size: usize) -> Option<usize> {
    let mut width = 1;
    for (&len, &stride) in shape.iter().zip(strides).skip(2).rev() {
        if len != 1 && stride != (width * size) as isize {
            return None;
        }
        width *= len;
    }
    let outer: Vec<(usize, isize)> = shape.iter().copied().zip(strides.iter().copied()).take(2).filter(|(len, _)| *len != 1).collect();
    let bytes = match outer[..] {
        [] => return Some(width),
        [(_, stride)] => stride,
        [(_, first), (len, second)] if first == len as isize * second => second,
        _ => return None,
    };
    let stride = usize::try_from(bytes).ok().filter(|bytes| bytes % size == 0)? / size;
    (stride >= width).then_some(stride)
}

/// A contiguous array that is read; copied where it is not.
pub fn flat<R: Number>(py: Python<'_>, name: &str, array: &Bound<'_, PyAny>) -> PyResult<Flat<R>> {
    let buffer = buffer::<R>(name, array)?;
    Ok(if buffer.is_c_contiguous() { Flat::Own(buffer) } else { Flat::Copied(buffer.to_vec(py)?) })
}

/// See [`flat`].
pub enum Flat<R: Number> {
    Own(PyBuffer<R>),
    Copied(Vec<R>),
}

impl<R: Number> Flat<R> {
    pub fn values(&self) -> &[R] {
        match self {
            Flat::Copied(values) => values,
            // SAFETY: contiguous, aligned, and kept while the buffer is held.
            Flat::Own(buffer) => buffer.as_slice_ptr().map_or(&[], |values| unsafe { values.as_ref() }),
        }
    }
}

/// A contiguous array that is written, of which no other is part: see [`apart`].
pub struct Output<R: Number>(PyBuffer<R>);

impl<R: Number> Output<R> {
    pub fn new(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Output<R>> {
        let buffer = buffer::<R>(name, array)?;
        if buffer.readonly() || !buffer.is_c_contiguous() {
            return Err(crate::errors::input(format!("{name} is written to: give an array that is contiguous and not read-only")));
        }
        Ok(Output(buffer))
    }

    pub fn shape(&self) -> &[usize] {
        self.0.shape()
    }

    pub fn values(&mut self) -> &mut [R] {
        // SAFETY: contiguous, aligned, writable, kept while the buffer is held; `apart` has made sure that no other slice reads or writes it.
        self.0.as_slice_ptr().map_or(&mut [], |mut values| unsafe { values.as_mut() })
    }

    fn bytes(&self) -> (usize, usize) {
        (self.0.buf_ptr() as usize, self.0.buf_ptr() as usize + self.0.len_bytes())
    }
}

/// Refuses outputs that share memory with each other or with inputs.
pub fn apart<'a, R: Number + 'a>(
    outputs: impl IntoIterator<Item = &'a Output<R>>,
    rows: &'a [Tensor<R>],
    flat: impl IntoIterator<Item = &'a Flat<R>>,
) -> PyResult<()> {
    let mut written: Vec<(usize, usize)> = outputs.into_iter().map(Output::bytes).filter(|(from, to)| from < to).collect();
    written.sort_unstable();
    let read = rows.iter().map(|tensor| tensor.as_rows().values()).chain(flat.into_iter().map(Flat::values));
    let read = read.map(|values| (values.as_ptr() as usize, values.as_ptr() as usize + size_of_val(values)));
    let shared = |(from, to): (usize, usize)| written.iter().any(|&(first, last)| from < last && first < to);
    if written.windows(2).any(|pair| pair[0].1 > pair[1].0) || read.filter(|(from, to)| from < to).any(shared) {
        return Err(crate::errors::input("an array that is written shares memory with another one: give outputs arrays of their own"));
    }
    Ok(())
}
