//! The parameters of a model in the precision in which a forward pass reads them.

use std::ops::Range;

use half::bf16;
use termwise_kernels::bf16::WeightMatrix;

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
