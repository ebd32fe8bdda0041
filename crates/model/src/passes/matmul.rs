//! Matrix products with the parameters of a model, for many rows or few.

use std::ops::Range;

use half::bf16;
use termwise_kernels::bf16::{WeightMatrix, widen};
use termwise_kernels::gemm::Matrix;
use termwise_kernels::gemv;

use crate::architecture::LinearLayer;
use crate::error::Result;
use crate::ops::products::{Products, Weight};
use crate::ops::{Buffer, linear};

/// The largest number of rows for which GEMV is used. Up to this number, a product is bound by the memory bandwidth of its weights.
pub(crate) const GEMV_MAX_ROWS: usize = 32;

/// The parameters of a model as a forward pass reads them.
#[derive(Clone, Copy)]
pub(crate) enum WeightView<'a> {
    /// The flat buffer of [`crate::Params`].
    F32(&'a [f32]),
    /// Matrices rounded to bfloat16, everything else in float32.
    Bf16 {
        /// At the same offsets as in the flat buffer.
        matrices: &'a [bf16],
        vectors: &'a VectorParams,
    },
}

/// The parameters that are not matrices (norms, biases, parameters of attention), stored without the gaps of the flat buffer.
#[derive(Default)]
pub(crate) struct VectorParams {
    /// Offset in the flat buffer and offset in `values`, ascending.
    offsets: Vec<(usize, usize)>,
    values: Vec<f32>,
}

impl VectorParams {
    /// Appends the parameter at this offset of the flat buffer. Offsets must ascend.
    pub fn push(&mut self, offset: usize, values: &[f32]) {
        self.offsets.push((offset, self.values.len()));
        self.values.extend_from_slice(values);
    }

    pub fn values(&self) -> &[f32] {
        &self.values
    }

    fn get(&self, range: &Range<usize>) -> &[f32] {
        let found = self.offsets.binary_search_by_key(&range.start, |(offset, _)| *offset).expect("every vector was pushed");
        &self.values[self.offsets[found].1..][..range.len()]
    }
}

impl<'a> WeightView<'a> {
    /// A projection or the embedding.
    pub fn matrix(self, range: &Range<usize>) -> WeightMatrix<'a> {
        match self {
            WeightView::F32(values) => WeightMatrix::F32(&values[range.clone()]),
            WeightView::Bf16 { matrices, .. } => WeightMatrix::Bf16(&matrices[range.clone()]),
        }
    }

    /// A norm, a bias or a parameter of attention.
    pub fn vector(self, range: &Range<usize>) -> &'a [f32] {
        match self {
            WeightView::F32(values) => &values[range.clone()],
            WeightView::Bf16 { vectors, .. } => vectors.get(range),
        }
    }
}

/// How a pass computes its matrix products, with the buffers of the method.
pub(crate) enum MatMul<'a> {
    /// For many rows. A bfloat16 matrix is first converted to float32 in `widened`, which grows to the largest matrix of a block.
    Gemm { widened: &'a mut Buffer, products: &'a mut Products },
    /// For at most [`GEMV_MAX_ROWS`] rows. `columns` is scratch of length [`gemv::scratch_len`].
    Gemv { columns: &'a mut [f32] },
}

impl MatMul<'_> {
    /// y [M, outputs] = x [M, inputs] Wᵀ + b
    pub fn multiply(&mut self, x: &[f32], layer: &LinearLayer, weights: WeightView, y: &mut [f32]) -> Result<()> {
        let (weight, bias) = (weights.matrix(&layer.weight), layer.bias.as_ref().map(|range| weights.vector(range)));
        match self {
            MatMul::Gemv { columns } => gemv::forward(x, weight, bias, y, layer.inputs, columns),
            MatMul::Gemm { widened, products } => match weight {
                WeightMatrix::F32(weight) => {
                    let write = linear::start_with_bias(y, bias);
                    let (x, weight) =
                        (Matrix::new(x, x.len() / layer.inputs, layer.inputs), Weight::new(weight, layer.weight.start, layer.inputs));
                    products.forward(y, layer.outputs, write, x, weight)?;
                }
                WeightMatrix::Bf16(weight) => {
                    widened.ensure(weight.len())?;
                    widen(weight, widened);
                    linear::forward(x, widened, bias, y, layer.inputs);
                }
            },
        }
        Ok(())
    }
}
