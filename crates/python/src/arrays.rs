//! Python arrays as slices, without copies if rows are contiguous and equally spaced. All unsafe code of this crate.
//!
//! Buffers are exported during a call, so their memory stays valid without the GIL. As in NumPy, an input that another thread changes during the call
//! gives an undefined mixture of old and new values.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use termwise_attention::{Real, Rows};

/// A number type of Rust and NumPy.
pub trait Number: Real + Element {
    /// Its name in NumPy.
    const NAME: &'static str;
}

impl Number for f32 {
    const NAME: &'static str = "float32";
}

impl Number for f64 {
    const NAME: &'static str = "float64";
}

/// An input array.
pub struct Tensor<R: Number> {
    shape: Vec<usize>,
    held: Held<R>,
}

enum Held<R: Number> {
    /// The memory of the array, and the distance between rows in values.
    Rows(PyBuffer<R>, usize),
    /// A copy in row order.
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
    /// An input array. Rows consist of all but the first two dimensions; the array is copied if they are not equally spaced.
    pub fn rows(py: Python<'_>, name: &str, array: &Bound<'_, PyAny>) -> PyResult<Tensor<R>> {
        let buffer = buffer::<R>(name, array)?;
        let shape = buffer.shape().to_vec();
        let held = match row_stride(&shape, buffer.strides(), size_of::<R>()) {
            Some(stride) => Held::Rows(buffer, stride),
            None => Held::Copied(buffer.to_vec(py)?),
        };
        Ok(Tensor { shape, held })
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn width(&self) -> usize {
        self.shape.iter().skip(2).product()
    }

    /// The rows.
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

    /// The values from the first to the last row.
    fn values<'a>(&'a self, buffer: &'a PyBuffer<R>, len: usize) -> &'a [R] {
        if buffer.item_count() == 0 {
            return &[];
        }
        // SAFETY: the exporter guarantees rows of `width` values, `stride` apart, from this address on; `len` ends with the last row.
        // `PyBuffer::get` has checked alignment, and memory stays while the buffer is held.
        unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<R>(), len) }
    }
}

/// The distance between rows in values; None if rows, which are all but the first two dimensions, are not contiguous or not equally spaced.
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

/// A contiguous input array; other arrays are copied.
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

/// A contiguous output array. [`apart`] checks that no other array shares its memory.
pub struct Output<R: Number>(PyBuffer<R>);

impl<R: Number> Output<R> {
    pub fn new(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Output<R>> {
        let buffer = buffer::<R>(name, array)?;
        if buffer.readonly() || !buffer.is_c_contiguous() {
            return Err(crate::errors::input(format!("{name} is an output: give a contiguous array that is not read-only")));
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

/// Rejects outputs that share memory with each other or with inputs.
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
        return Err(crate::errors::input("an output shares memory with another array: give it memory of its own"));
    }
    Ok(())
}
