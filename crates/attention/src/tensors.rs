//! Inputs and outputs of attention: shapes, tensors, gradients.
//!
//! Legend: B batch, T positions, H heads, G key-value heads (H a multiple of G), d head dimension of q and k, e of v.

use std::fmt::{self, Write as _};
use std::ops::Range;

use crate::{Error, KeyRange, Real};
use termwise_kernels::disjoint::{Axes, Axis, Disjoint};

/// Sizes of one attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// B, batch size.
    pub batch: usize,
    /// T, sequence length.
    pub time: usize,
    /// H, query heads.
    pub heads: usize,
    /// G, key-value heads; head h reads kv head h / (H / G).
    pub kv_heads: usize,
    /// d, head dimension of q and k.
    pub d: usize,
    /// e, head dimension of v and y.
    pub e: usize,
}

impl Shape {
    /// Checks the requirements of all engines: no empty dimension, H a multiple of G, head dimensions up to 256, and no tensor
    /// of an engine exceeds the address space.
    pub fn validate(&self) -> Result<(), Error> {
        let Shape { batch, time, heads, kv_heads, d, e } = *self;
        if batch == 0 || time == 0 || heads == 0 || kv_heads == 0 {
            return Err(Error::Shape(format!("batch {batch}, time {time}, heads {heads} and KV heads {kv_heads} must all be at least 1")));
        }
        if heads % kv_heads != 0 {
            return Err(Error::Shape(format!(
                "{heads} heads cannot be shared by {kv_heads} KV heads: the first must be a multiple of the second"
            )));
        }
        if !(1..=256).contains(&d) || !(1..=256).contains(&e) {
            return Err(Error::Shape(format!("head dimensions must be between 1 and 256, found d = {d}, e = {e}")));
        }
        // Engines pad positions to tiles and dimensions to vectors, and store a tensor once per preparation (at most H)
        // and per task (at most a few dozen): with these factors included, no later product can overflow.
        let padded =
            time.checked_add(256).and_then(|time| time.checked_mul(batch)?.checked_mul(heads)?.checked_mul(heads)?.checked_mul(256));
        match padded.and_then(|values| values.checked_mul(64 * size_of::<f64>())) {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
            _ => Err(Error::Shape(format!("batch {batch}, time {time} and heads {heads} together exceed the address space"))),
        }
    }

    /// Heads and dimension of q, k and v.
    pub(crate) fn rows_of_heads(&self) -> [[usize; 2]; 3] {
        [[self.heads, self.d], [self.kv_heads, self.d], [self.kv_heads, self.e]]
    }

    /// H / G, query heads that share one kv head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// B·T, rows of q, k, v and y.
    pub(crate) fn rows(&self) -> usize {
        self.batch * self.time
    }

    /// Values in a row of q, k and v: H·d, G·d, G·e.
    pub(crate) fn widths(&self) -> [usize; 3] {
        [self.heads * self.d, self.kv_heads * self.d, self.kv_heads * self.e]
    }

    /// Values of y, [B, T, H, e].
    pub(crate) fn outputs(&self) -> usize {
        self.rows() * self.heads * self.e
    }

    pub(crate) fn check_outputs(&self, tensor: &str, found: usize) -> Result<(), Error> {
        check_length(format_args!("{tensor}"), self.outputs(), found)
    }
}

/// The kind of an auxiliary tensor: an input beyond q, k and v that some part of a variant reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum AuxKind {
    /// Input gate before its sigmoid, [B, T, G].
    InGate,
    /// Output gate before its nonlinearity, [B, T, H].
    OutGate,
    /// Post gate before its nonlinearity, [B, T, H], or [B, T, H, e] per channel.
    PostGate,
    /// Decay gate before its nonlinearity, [B, T, H], or [B, T, H, channels of a score] per channel.
    DecayGate,
    /// β of the write rule before its sigmoid, [B, T, G].
    Beta,
    /// a_h of a decay with a learned rate, [H].
    DecayRate,
    /// Weights of the norm of q, [d] or [H·d].
    QNorm,
    /// Weights of the norm of k, [d] or [G·d].
    KNorm,
    /// γ of the output norm, [e].
    NormWeight,
    /// β of the output norm, [e].
    NormBias,
    /// m_h of the `position` denominator, [H].
    NormConst,
    /// b_h of a sum with a sink, [H].
    Sink,
    /// Learned a_n, [H, number of orders], orders ascending.
    Coefficients,
    /// Short convolution over q, [H·d, width]; the last tap is the current position.
    ConvQ,
    /// Short convolution over k, [G·d, width].
    ConvK,
    /// Short convolution over v, [G·e, width].
    ConvV,
    /// Projection of q to fewer dimensions, [H, dim, d].
    DimQ,
    /// Projection of k to fewer dimensions, [G, dim, d].
    DimK,
    /// W of the learned features of q, [H, n, n]; n is d, or dim.
    FeatureQ,
    /// b of the learned features of q, [H, n].
    FeatureQBias,
    /// W of the learned features of k, [G, n, n].
    FeatureK,
    /// b of the learned features of k, [G, n].
    FeatureKBias,
}

impl AuxKind {
    /// Every kind, in the order in which models list their parameters.
    pub const ALL: [AuxKind; 22] = [
        AuxKind::InGate,
        AuxKind::OutGate,
        AuxKind::PostGate,
        AuxKind::DecayGate,
        AuxKind::Beta,
        AuxKind::DecayRate,
        AuxKind::QNorm,
        AuxKind::KNorm,
        AuxKind::NormWeight,
        AuxKind::NormBias,
        AuxKind::NormConst,
        AuxKind::Sink,
        AuxKind::Coefficients,
        AuxKind::ConvQ,
        AuxKind::ConvK,
        AuxKind::ConvV,
        AuxKind::DimQ,
        AuxKind::DimK,
        AuxKind::FeatureQ,
        AuxKind::FeatureQBias,
        AuxKind::FeatureK,
        AuxKind::FeatureKBias,
    ];

    /// The tensor of this kind that the near or the far branch reads: the same one unless each branch has its own.
    pub fn of(self, range: KeyRange) -> AuxTensor {
        AuxTensor { kind: self, range: if self.is_per_branch() { range } else { KeyRange::Near } }
    }

    /// Whether the near and the far branch each have a tensor of this kind.
    pub fn is_per_branch(self) -> bool {
        use AuxKind::{Coefficients, DimK, DimQ, FeatureK, FeatureKBias, FeatureQ, FeatureQBias};
        matches!(self, Coefficients | DimQ | DimK | FeatureQ | FeatureQBias | FeatureK | FeatureKBias)
    }
}

/// An auxiliary tensor: its kind, and the branch that reads it.
///
/// Its `Display` form is its Python keyword, such as `in_gate` or `far_coefficients`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AuxTensor {
    /// Its kind.
    pub kind: AuxKind,
    /// The branch that reads it; near if both branches do.
    pub range: KeyRange,
}

impl AuxTensor {
    /// Every auxiliary tensor, in the order in which models list their parameters: those of the far branch are last.
    pub fn all() -> impl Iterator<Item = AuxTensor> {
        let of = |range| AuxKind::ALL.into_iter().map(move |kind| AuxTensor { kind, range });
        of(KeyRange::Near).chain(of(KeyRange::Far).filter(|aux| aux.kind.is_per_branch()))
    }

    /// True for gate logits, which a model projects from its hidden state at every position; false for parameters.
    pub fn is_gate_logits(self) -> bool {
        matches!(self.kind, AuxKind::InGate | AuxKind::OutGate | AuxKind::PostGate | AuxKind::DecayGate | AuxKind::Beta)
    }
}

impl From<AuxKind> for AuxTensor {
    /// The tensor of the near branch, or of both branches.
    fn from(kind: AuxKind) -> AuxTensor {
        kind.of(KeyRange::Near)
    }
}

impl fmt::Display for AuxTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.range.is_far() {
            f.write_str("far_")?;
        }
        for (i, c) in format!("{:?}", self.kind).char_indices() {
            if c.is_uppercase() && i > 0 {
                f.write_char('_')?;
            }
            f.write_char(c.to_ascii_lowercase())?;
        }
        Ok(())
    }
}

/// One value for each [`AuxTensor`], present or not.
#[derive(Clone, Debug)]
pub struct AuxTensors<T>([[Option<T>; AuxKind::ALL.len()]; KeyRange::ALL.len()]);

impl<T> Default for AuxTensors<T> {
    fn default() -> Self {
        AuxTensors(std::array::from_fn(|_| std::array::from_fn(|_| None)))
    }
}

impl<T> AuxTensors<T> {
    fn place(aux: AuxTensor) -> (usize, usize) {
        (aux.range as usize, aux.kind as usize)
    }

    /// The value, if present.
    pub fn get(&self, aux: impl Into<AuxTensor>) -> Option<&T> {
        let (range, kind) = Self::place(aux.into());
        self.0[range][kind].as_ref()
    }

    /// Mutable access to the value, if present.
    pub fn get_mut(&mut self, aux: impl Into<AuxTensor>) -> Option<&mut T> {
        let (range, kind) = Self::place(aux.into());
        self.0[range][kind].as_mut()
    }

    /// Sets a value.
    pub fn set(&mut self, aux: impl Into<AuxTensor>, value: T) {
        let (range, kind) = Self::place(aux.into());
        self.0[range][kind] = Some(value);
    }

    /// The values that are present, in the order of [`AuxTensor::all`].
    pub fn iter(&self) -> impl Iterator<Item = (AuxTensor, &T)> {
        AuxTensor::all().filter_map(|aux| Some((aux, self.get(aux)?)))
    }

    /// Mutable access to the values that are present.
    fn iter_mut(&mut self) -> impl Iterator<Item = (AuxTensor, &mut T)> {
        let ranges = KeyRange::ALL.into_iter().zip(&mut self.0);
        ranges.flat_map(|(range, values)| {
            let kinds = AuxKind::ALL.into_iter().zip(values);
            kinds.filter_map(move |(kind, value)| Some((AuxTensor { kind, range }, value.as_mut()?)))
        })
    }
}

/// A tensor of rows, one per batch row and position, with a constant stride: a separate tensor, or columns of a larger one.
#[derive(Debug)]
pub struct Rows<'a, R> {
    values: &'a [R],
    /// Stride of rows; `None` if they are contiguous.
    stride: Option<usize>,
}

impl<R> Clone for Rows<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Rows<'_, R> {}

impl<'a, R> Rows<'a, R> {
    /// Rows with this stride, the first at the start of `values`.
    pub fn strided(values: &'a [R], stride: usize) -> Rows<'a, R> {
        Rows { values, stride: Some(stride) }
    }

    /// The values from the first row on, including those between rows.
    pub fn values(&self) -> &'a [R] {
        self.values
    }

    /// Stride of rows of `width` values.
    pub fn stride(&self, width: usize) -> usize {
        self.stride.unwrap_or(width)
    }

    /// Row `row` of rows of `width` values.
    pub(crate) fn row(&self, row: usize, width: usize) -> &'a [R] {
        &self.values[row * self.stride(width)..][..width]
    }

    /// Some of the rows.
    fn part(&self, rows: &Range<usize>, width: usize) -> Rows<'a, R> {
        let (stride, len) = (self.stride(width), self.values.len());
        Rows { values: &self.values[rows.start * stride..(rows.end * stride).min(len)], stride: self.stride }
    }

    fn check(&self, tensor: &str, rows: usize, width: usize) -> Result<(), Error> {
        check_rows(tensor, rows, width, self.stride, self.values.len())
    }
}

impl<'a, R, T: AsRef<[R]> + ?Sized> From<&'a T> for Rows<'a, R> {
    fn from(values: &'a T) -> Rows<'a, R> {
        Rows { values: values.as_ref(), stride: None }
    }
}

/// The tensors that an attention reads, row-major.
///
/// ```
/// use termwise_attention::Inputs;
///
/// let (q, k, v) = ([0.0f32; 8], [0.0; 4], [0.0; 4]);
/// let separate = Inputs::new(&q, &k, &v).lengths(&[1][..]);
/// let together = Inputs::packed(&[0.0f32; 16], [8, 4, 4]);
/// # let _ = (separate, together);
/// ```
#[derive(Clone, Debug)]
pub struct Inputs<'a, R> {
    pub(crate) x: [Rows<'a, R>; 3],
    pub(crate) aux_tensors: AuxTensors<&'a [R]>,
    pub(crate) lengths: Option<&'a [usize]>,
    documents: Option<&'a [usize]>,
}

impl<'a, R> Inputs<'a, R> {
    /// q [B, T, H, d], k [B, T, G, d] and v [B, T, G, e].
    pub fn new(q: impl Into<Rows<'a, R>>, k: impl Into<Rows<'a, R>>, v: impl Into<Rows<'a, R>>) -> Inputs<'a, R> {
        Inputs { x: [q.into(), k.into(), v.into()], aux_tensors: AuxTensors::default(), lengths: None, documents: None }
    }

    /// q, k and v concatenated in one tensor [B·T, H·d + G·d + G·e], whose widths are those of [`crate::Layer::widths`].
    pub fn packed(qkv: &'a [R], widths: [usize; 3]) -> Inputs<'a, R> {
        let (firsts, stride) = packed_places(widths);
        Inputs {
            x: firsts.map(|first| Rows::strided(qkv.get(first..).unwrap_or_default(), stride)),
            aux_tensors: AuxTensors::default(),
            lengths: None,
            documents: None,
        }
    }

    /// Adds all gate logits and parameters that the variants need.
    pub fn with_aux(self, aux_tensors: AuxTensors<&'a [R]>) -> Inputs<'a, R> {
        Inputs { aux_tensors, ..self }
    }

    /// Adds one of them.
    pub fn with(mut self, aux: impl Into<AuxTensor>, values: &'a [R]) -> Inputs<'a, R> {
        self.aux_tensors.set(aux, values);
        self
    }

    /// Adds the number of valid positions in each batch row, [B]; later ones are padding: their keys are masked, their outputs are zero.
    pub fn lengths(self, lengths: impl Into<Option<&'a [usize]>>) -> Inputs<'a, R> {
        Inputs { lengths: lengths.into(), ..self }
    }

    /// Adds several documents per batch row that do not attend to each other: the start of each among the B·T positions, and B·T at the end, like
    /// `cu_seqlens` elsewhere. Positions, convolution, decays and all sums restart with each. A document is within one batch row; padding
    /// is also a document.
    pub fn documents(self, boundaries: impl Into<Option<&'a [usize]>>) -> Inputs<'a, R> {
        Inputs { documents: boundaries.into(), ..self }
    }

    /// q
    pub fn q(&self) -> Rows<'a, R> {
        self.x[0]
    }

    /// k
    pub fn k(&self) -> Rows<'a, R> {
        self.x[1]
    }

    /// v
    pub fn v(&self) -> Rows<'a, R> {
        self.x[2]
    }

    /// A gate's logits or a parameter, if given.
    pub fn get(&self, aux: impl Into<AuxTensor>) -> Option<&'a [R]> {
        self.aux_tensors.get(aux).copied()
    }

    /// An input that the variant needs.
    pub(crate) fn aux(&self, aux: impl Into<AuxTensor>) -> &'a [R] {
        self.get(aux).expect("presence of every auxiliary tensor is checked before an engine runs")
    }

    /// Number of valid positions of a batch row.
    pub(crate) fn length(&self, row: usize, shape: &Shape) -> usize {
        self.lengths.map_or(shape.time, |lengths| lengths[row])
    }

    /// Checks that every tensor is present and has the expected length, so engines may index without
    /// checks. Lengths of rows must be at least `shortest`.
    pub(crate) fn check(&self, shape: &Shape, aux_tensors: impl Iterator<Item = (AuxTensor, usize)>, shortest: usize) -> Result<(), Error> {
        for ((x, name), width) in self.x.iter().zip(TENSORS).zip(shape.widths()) {
            x.check(name, shape.rows(), width)?;
        }
        for (aux, expected) in aux_tensors {
            check_length(format_args!("{aux}"), expected, self.get(aux).map_or(0, |values| values.len()))?;
        }
        if let Some(lengths) = self.lengths {
            check_length(format_args!("lengths"), shape.batch, lengths.len())?;
            let possible = shortest..=shape.time;
            if let Some((row, length)) = lengths.iter().enumerate().find(|(_, length)| !possible.contains(length)) {
                let time = shape.time;
                return Err(Error::Shape(format!("batch row {row} has length {length}: it must be from {shortest} to {time}")));
            }
        }
        self.check_documents(shape)
    }

    fn check_documents(&self, shape: &Shape) -> Result<(), Error> {
        let (Some(documents), rows) = (self.documents, shape.rows()) else { return Ok(()) };
        let ascend = documents.windows(2).all(|pair| pair[0] < pair[1]);
        if documents.first() != Some(&0) || documents.last() != Some(&rows) || !ascend {
            return Err(Error::Shape(format!(
                "boundaries of documents must ascend from 0 to the {rows} positions of the call, found {documents:?}"
            )));
        }
        if self.lengths.is_some() {
            return Err(Error::Shape("rows have lengths or documents, not both: make padding a separate document".into()));
        }
        match (1..shape.batch).map(|row| row * shape.time).find(|start| documents.binary_search(start).is_err()) {
            Some(start) => {
                Err(Error::Shape(format!("a document must be within one batch row: {start}, the start of a row, must be a boundary")))
            }
            None => Ok(()),
        }
    }

    /// Boundaries of documents and lengths of rows; empty if there are none.
    pub(crate) fn partition(&self) -> [&[usize]; 2] {
        [self.documents, self.lengths].map(Option::unwrap_or_default)
    }

    /// Rejects documents if the call continues from a state.
    pub(crate) fn check_no_documents(&self) -> Result<(), Error> {
        match self.documents {
            Some(_) => Err(Error::Shape("several documents cannot continue from one state: use one state per document".into())),
            None => Ok(()),
        }
    }

    /// The documents of a call, each as a separate call: its positions among the B·T, its shape and its inputs. The complete call if it has none.
    pub(crate) fn each_document(&self, shape: &Shape) -> impl Iterator<Item = (Range<usize>, Shape, Inputs<'a, R>)> + use<'a, R>
    where
        R: Clone,
    {
        let (inputs, shape) = (self.clone(), *shape);
        let count = inputs.documents.map_or(1, |documents| documents.len() - 1);
        (0..count).map(move |i| match inputs.documents {
            None => (0..shape.rows(), shape, inputs.clone()),
            Some(documents) => {
                let at = documents[i]..documents[i + 1];
                (at.clone(), Shape { batch: 1, time: at.len(), ..shape }, inputs.part(&at, &shape))
            }
        })
    }

    fn part(&self, at: &Range<usize>, shape: &Shape) -> Inputs<'a, R> {
        let mut widths = shape.widths().into_iter();
        let x = self.x.map(|x| x.part(at, widths.next().expect("three tensors")));
        let mut aux_tensors = AuxTensors::default();
        for (aux, &values) in self.aux_tensors.iter() {
            aux_tensors.set(aux, &values[positions_of(aux, at, shape, values.len())]);
        }
        Inputs { x, aux_tensors, lengths: None, documents: None }
    }
}

/// Destination of the gradients, shaped like the inputs. Gradients are added to the existing values.
#[derive(Debug)]
pub struct Grads<'a, R> {
    x: GradRows<'a, R>,
    pub(crate) aux_tensors: AuxTensors<&'a mut [R]>,
}

#[derive(Debug)]
enum GradRows<'a, R> {
    Apart([&'a mut [R]; 3]),
    Packed(&'a mut [R], [usize; 3]),
}

impl<'a, R> Grads<'a, R> {
    /// Of q [B, T, H, d], k [B, T, G, d] and v [B, T, G, e].
    pub fn new(q: &'a mut [R], k: &'a mut [R], v: &'a mut [R]) -> Grads<'a, R> {
        Grads { x: GradRows::Apart([q, k, v]), aux_tensors: AuxTensors::default() }
    }

    /// Of q, k and v concatenated in one tensor, as in [`Inputs::packed`].
    pub fn packed(qkv: &'a mut [R], widths: [usize; 3]) -> Grads<'a, R> {
        Grads { x: GradRows::Packed(qkv, widths), aux_tensors: AuxTensors::default() }
    }

    /// Adds one for every gate logit and parameter that the variants need.
    pub fn with_aux(self, aux_tensors: AuxTensors<&'a mut [R]>) -> Grads<'a, R> {
        Grads { aux_tensors, ..self }
    }

    /// Adds one of them.
    pub fn with(mut self, aux: impl Into<AuxTensor>, values: &'a mut [R]) -> Grads<'a, R> {
        self.aux_tensors.set(aux, values);
        self
    }

    /// The gradient of an input that the variant needs.
    pub(crate) fn aux(&mut self, aux: impl Into<AuxTensor>) -> &mut [R] {
        self.aux_tensors.get_mut(aux).expect("presence of every auxiliary tensor is checked before an engine runs")
    }

    /// The gradients of some of the B·T positions, and of all parameters.
    pub(crate) fn part(&mut self, at: &Range<usize>, shape: &Shape) -> Grads<'_, R> {
        let rows = |width: usize| at.start * width..at.end * width;
        let x = match &mut self.x {
            GradRows::Apart(x) => {
                let mut widths = shape.widths().into_iter();
                GradRows::Apart(x.each_mut().map(|x| &mut x[rows(widths.next().expect("three tensors"))]))
            }
            GradRows::Packed(x, widths) => GradRows::Packed(&mut x[rows(widths.iter().sum())], *widths),
        };
        let mut aux_tensors = AuxTensors::default();
        for (aux, values) in self.aux_tensors.iter_mut() {
            let own = positions_of(aux, at, shape, values.len());
            aux_tensors.set(aux, &mut values[own]);
        }
        Grads { x, aux_tensors }
    }

    /// Row `row` of the gradient of tensor `which` (0 q, 1 k, 2 v).
    pub(crate) fn row(&mut self, which: usize, row: usize, shape: &Shape) -> &mut [R] {
        let width = shape.widths()[which];
        match &mut self.x {
            GradRows::Apart(x) => &mut x[which][row * width..][..width],
            GradRows::Packed(x, widths) => {
                let (firsts, stride) = packed_places(*widths);
                &mut x[firsts[which] + row * stride..][..width]
            }
        }
    }

    /// Rows of the gradients of q, k and v for several tasks, each with its own heads in one batch row.
    pub(crate) fn columns(&mut self, shape: &Shape) -> [Disjoint<'_, R>; 3] {
        let Shape { batch, time, heads, kv_heads, d, e } = *shape;
        let axes = |stride: usize, heads: usize, dim: usize| Axes {
            batch: Axis { count: batch, step: time * stride },
            heads: Axis { count: heads, step: dim },
            rows: Axis { count: time, step: stride },
            width: dim,
        };
        let sizes = [(heads, d), (kv_heads, d), (kv_heads, e)];
        match &mut self.x {
            GradRows::Apart(x) => {
                let mut sizes = sizes.into_iter();
                x.each_mut().map(|x| {
                    let (heads, dim) = sizes.next().expect("three tensors");
                    Disjoint::new(x, axes(heads * dim, heads, dim))
                })
            }
            GradRows::Packed(x, widths) => {
                let (_, stride) = packed_places(*widths);
                Disjoint::side_by_side(x, sizes.map(|(heads, dim)| axes(stride, heads, dim)))
            }
        }
    }

    /// Checks that there is a destination for every gradient.
    pub(crate) fn check(&self, shape: &Shape, aux_tensors: impl Iterator<Item = (AuxTensor, usize)>) -> Result<(), Error> {
        let (rows, widths) = (shape.rows(), shape.widths());
        match &self.x {
            GradRows::Apart(x) => {
                for ((x, name), width) in x.iter().zip(TENSORS).zip(widths) {
                    check_length(format_args!("gradient of {name}"), rows * width, x.len())?;
                }
            }
            GradRows::Packed(_, found) if *found != widths => {
                return Err(Error::Shape(format!("gradients of q, k and v have rows of {found:?} values, the layer's have {widths:?}")));
            }
            GradRows::Packed(x, _) => check_rows("gradient of q, k and v", rows, widths.iter().sum(), None, x.len())?,
        }
        for (aux, expected) in aux_tensors {
            check_length(format_args!("gradient of {aux}"), expected, self.aux_tensors.get(aux).map_or(0, |values| values.len()))?;
        }
        Ok(())
    }
}

/// The range of some of the B·T positions in an auxiliary tensor of `len` values: all of a parameter.
fn positions_of(aux: AuxTensor, at: &Range<usize>, shape: &Shape, len: usize) -> Range<usize> {
    let columns = len / shape.rows();
    if aux.is_gate_logits() { at.start * columns..at.end * columns } else { 0..len }
}

const TENSORS: [&str; 3] = ["q", "k", "v"];

/// Offsets of q, k and v in a concatenated row, and the length of the row.
fn packed_places([q, k, v]: [usize; 3]) -> ([usize; 3], usize) {
    ([0, q, q.saturating_add(k)], q.saturating_add(k).saturating_add(v))
}

/// Checks that `rows` rows of `width` values with this stride have `found` values; values after the last row may be missing.
fn check_rows(tensor: &str, rows: usize, width: usize, stride: Option<usize>, found: usize) -> Result<(), Error> {
    let Some(stride) = stride else { return check_length(format_args!("{tensor}"), rows * width, found) };
    if stride < width {
        return Err(Error::Shape(format!("rows of {tensor} have {width} values and a stride of only {stride}")));
    }
    let wanted = (rows - 1).checked_mul(stride).and_then(|before| before.checked_add(width));
    match wanted {
        Some(wanted) if (wanted..=wanted + stride - width).contains(&found) => Ok(()),
        wanted => {
            Err(Error::Tensor { tensor: format!("{tensor} ({rows} rows, stride {stride})"), expected: wanted.unwrap_or(usize::MAX), found })
        }
    }
}

/// Checks the length of one tensor.
pub(crate) fn check_length(tensor: std::fmt::Arguments, expected: usize, found: usize) -> Result<(), Error> {
    if expected == found { Ok(()) } else { Err(Error::Tensor { tensor: tensor.to_string(), expected, found }) }
}

/// Numerical findings of a forward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// The first (lowest batch row, head, position) denominator that was not positive, if the variant divides by a sum.
    pub nonpositive: Option<Nonpositive>,
}

impl Report {
    /// Checks a denominator D·e^−ρ of a row, if the variant divides by a sum.
    pub(crate) fn see<R: Real>(&mut self, (row, head, position): (usize, usize, usize), scaled: R, rho: R) {
        if let Some(value) = not_positive(scaled, rho)
            && self.nonpositive.is_none_or(|first| (row, head, position) < (first.row, first.head, first.position))
        {
            self.nonpositive = Some(Nonpositive { row, head, position, value });
        }
    }

    /// Converts the report of a document that starts at this one of the B·T positions to one of the complete call.
    pub(crate) fn of_document(mut self, start: usize, shape: &Shape) -> Report {
        if let Some(at) = &mut self.nonpositive {
            (at.row, at.position) = (at.row + start / shape.time, at.position + start % shape.time);
        }
        self
    }

    /// The earlier of two reports.
    pub(crate) fn or(mut self, other: Report) -> Report {
        let place = |report: &Report| report.nonpositive.map(|at| (at.row, at.head, at.position));
        if place(&self).is_none() || place(&other).is_some_and(|other| Some(other) < place(&self)) {
            self = other;
        }
        self
    }
}

/// D if it is not a positive finite number, from D·e^−ρ.
fn not_positive<R: Real>(scaled: R, rho: R) -> Option<f64> {
    let sound = scaled > R::zero() && scaled < R::infinity();
    (!sound).then(|| if scaled == R::zero() { 0.0 } else { scaled.wide() * rho.wide().exp() })
}

/// A denominator that was zero, negative, infinite or NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nonpositive {
    /// Batch row.
    pub row: usize,
    /// Head.
    pub head: usize,
    /// Position.
    pub position: usize,
    /// Its value.
    pub value: f64,
}
