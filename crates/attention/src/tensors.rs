//! What goes into an attention and what comes out: shapes, tensors, gradients.
//!
//! Legend: B batch, T positions, H heads, G key-value heads (H a multiple of G), d head dimension of q and k, e of v.

use crate::extras::extra_lengths;
use crate::{Error, Real, Rope, Variant};

/// Sizes of one attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// B, rows of the batch.
    pub batch: usize,
    /// T, positions in a row.
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
    /// Checks what every engine relies on: nothing empty, H a multiple of G, head dimensions up to 256.
    pub fn validate(&self) -> Result<(), Error> {
        let Shape { batch, time, heads, kv_heads, d, e } = *self;
        if batch == 0 || time == 0 || heads == 0 || kv_heads == 0 {
            return Err(Error::Shape(format!("batch {batch}, time {time}, heads {heads} and kv heads {kv_heads} must all be at least 1")));
        }
        if heads % kv_heads != 0 {
            return Err(Error::Shape(format!(
                "{heads} heads cannot be shared by {kv_heads} kv heads: the first must be a multiple of the second"
            )));
        }
        if !(1..=256).contains(&d) || !(1..=256).contains(&e) {
            return Err(Error::Shape(format!("head dimensions must lie between 1 and 256, found d = {d}, e = {e}")));
        }
        Ok(())
    }

    /// H / G, query heads that share one kv head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Length of an additional input of this kind.
    pub fn extra_len(&self, extra: Extra, variant_params: usize) -> usize {
        let rows = self.batch * self.time;
        match extra {
            Extra::InGate => rows * self.kv_heads,
            Extra::OutGate | Extra::PostGate | Extra::DecayGate => rows * self.heads,
            Extra::NormWeight | Extra::NormBias => self.e,
            Extra::NormConst => self.heads,
            Extra::Coefficients => self.heads * variant_params,
            Extra::ConvQ => self.heads * self.d * variant_params,
            Extra::ConvK => self.kv_heads * self.d * variant_params,
            Extra::ConvV => self.kv_heads * self.e * variant_params,
        }
    }
}

/// An input beyond q, k and v that some part of a variant asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Extra {
    /// Input gate before its sigmoid, [B, T, G].
    InGate,
    /// Output gate before its nonlinearity, [B, T, H].
    OutGate,
    /// Post gate before its sigmoid, [B, T, H].
    PostGate,
    /// Decay gate before its nonlinearity, [B, T, H].
    DecayGate,
    /// γ of the output norm, [e].
    NormWeight,
    /// β of the output norm, [e].
    NormBias,
    /// m_h of the `position` denominator, [H].
    NormConst,
    /// Learned a_n, [H, number of orders], orders ascending.
    Coefficients,
    /// Short convolution over q, [H·d, width]; the last tap is the present position.
    ConvQ,
    /// Short convolution over k, [G·d, width].
    ConvK,
    /// Short convolution over v, [G·e, width].
    ConvV,
}

impl Extra {
    /// Every kind, in the order in which models list their parameters.
    pub const ALL: [Extra; 11] = [
        Extra::InGate,
        Extra::OutGate,
        Extra::PostGate,
        Extra::DecayGate,
        Extra::NormWeight,
        Extra::NormBias,
        Extra::NormConst,
        Extra::Coefficients,
        Extra::ConvQ,
        Extra::ConvK,
        Extra::ConvV,
    ];

    /// True for signals that a model projects from its hidden state at every position, false for parameters proper.
    pub fn is_signal(self) -> bool {
        matches!(self, Extra::InGate | Extra::OutGate | Extra::PostGate | Extra::DecayGate)
    }
}

/// One value for each [`Extra`], present or not.
#[derive(Clone, Debug)]
pub struct Extras<T>([Option<T>; Extra::ALL.len()]);

impl<T> Default for Extras<T> {
    fn default() -> Self {
        Extras(std::array::from_fn(|_| None))
    }
}

impl<T> Extras<T> {
    /// The value, if present.
    pub fn get(&self, extra: Extra) -> Option<&T> {
        self.0[extra as usize].as_ref()
    }

    /// The value, if present, to be changed.
    pub fn get_mut(&mut self, extra: Extra) -> Option<&mut T> {
        self.0[extra as usize].as_mut()
    }

    /// Puts a value in place.
    pub fn set(&mut self, extra: Extra, value: T) {
        self.0[extra as usize] = Some(value);
    }

    /// The values that are present.
    pub fn iter(&self) -> impl Iterator<Item = (Extra, &T)> {
        Extra::ALL.into_iter().filter_map(|extra| Some((extra, self.get(extra)?)))
    }
}

/// The tensors that an attention reads, row-major.
pub struct Inputs<'a, R> {
    /// [B, T, H, d]
    pub q: &'a [R],
    /// [B, T, G, d]
    pub k: &'a [R],
    /// [B, T, G, e]
    pub v: &'a [R],
    /// Gate signals and parameters that the variant asks for.
    pub extras: Extras<&'a [R]>,
    /// Positions that count in each batch row, [B]; later ones are padding: their keys are not seen, their outputs are zero.
    pub lengths: Option<&'a [usize]>,
    /// Rotary frequencies, read where the variant has RoPE on.
    pub rope: &'a Rope,
}

/// Where the gradients go, shaped like the inputs. They are added to what is there.
pub struct Grads<'a, R> {
    /// [B, T, H, d]
    pub q: &'a mut [R],
    /// [B, T, G, d]
    pub k: &'a mut [R],
    /// [B, T, G, e]
    pub v: &'a mut [R],
    /// One for every extra that the variant asks for.
    pub extras: Extras<&'a mut [R]>,
}

/// What one forward pass saw that a caller may want to act on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// The first (lowest batch row, head, position) denominator that was not positive, where the variant divides by a sum.
    pub nonpositive: Option<Nonpositive>,
}

/// A denominator that was zero, negative or NaN.
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

/// An attention ready to run on one shape: the reference and the fused engine have the same signature.
pub trait Attention<R: Real> {
    /// y [B, T, H, e] from the inputs; keeps what `backward` needs.
    fn forward(&mut self, inputs: &Inputs<R>, y: &mut [R]) -> Result<Report, Error>;

    /// Adds the gradients of Σ y·dy to `grads`; `inputs` are those of the last `forward`.
    fn backward(&mut self, inputs: &Inputs<R>, dy: &[R], grads: &mut Grads<R>) -> Result<(), Error>;
}

impl<R> Inputs<'_, R> {
    /// An input that the variant asks for.
    pub(crate) fn extra(&self, extra: Extra) -> &[R] {
        self.extras.get(extra).copied().expect("presence of every extra is checked before an engine runs")
    }

    /// Positions of a batch row that count.
    pub(crate) fn length(&self, row: usize, shape: &Shape) -> usize {
        self.lengths.map_or(shape.time, |lengths| lengths[row])
    }

    /// Checks that every tensor is there and as long as the shape says, so that engines may index without care.
    pub(crate) fn check(&self, heads: &[Variant], shape: &Shape) -> Result<(), Error> {
        let Shape { batch, time, d, .. } = *shape;
        let expected = tensor_lengths(shape);
        for ((tensor, expected), found) in expected.into_iter().zip([self.q.len(), self.k.len(), self.v.len()]) {
            check_length(format_args!("{tensor}"), expected, found)?;
        }
        for (extra, expected) in extra_lengths(heads, shape)? {
            check_length(format_args!("{extra:?}"), expected, self.extras.get(extra).map_or(0, |values| values.len()))?;
        }
        if heads.iter().any(|variant| variant.rope) {
            check_length(format_args!("rope frequencies"), d / 2, self.rope.frequencies().len())?;
        }
        if let Some(lengths) = self.lengths {
            check_length(format_args!("lengths"), batch, lengths.len())?;
            if let Some((row, length)) = lengths.iter().enumerate().find(|(_, length)| !(1..=time).contains(length)) {
                return Err(Error::Shape(format!("batch row {row} has length {length}: between 1 and the {time} positions are possible")));
            }
        }
        Ok(())
    }
}

impl<R> Grads<'_, R> {
    /// Where the gradient of an input goes that the variant asks for.
    pub(crate) fn extra(&mut self, extra: Extra) -> &mut [R] {
        self.extras.get_mut(extra).expect("presence of every extra is checked before an engine runs")
    }

    /// Checks that there is room for every gradient.
    pub(crate) fn check(&self, heads: &[Variant], shape: &Shape) -> Result<(), Error> {
        let expected = tensor_lengths(shape);
        for ((tensor, expected), found) in expected.into_iter().zip([self.q.len(), self.k.len(), self.v.len()]) {
            check_length(format_args!("gradient of {tensor}"), expected, found)?;
        }
        for (extra, expected) in extra_lengths(heads, shape)? {
            check_length(format_args!("gradient of {extra:?}"), expected, self.extras.get(extra).map_or(0, |values| values.len()))?;
        }
        Ok(())
    }
}

fn tensor_lengths(shape: &Shape) -> [(&'static str, usize); 3] {
    let Shape { batch, time, heads, kv_heads, d, e } = *shape;
    let rows = batch * time;
    [("q", rows * heads * d), ("k", rows * kv_heads * d), ("v", rows * kv_heads * e)]
}

/// Checks the length of one tensor.
pub(crate) fn check_length(tensor: std::fmt::Arguments, expected: usize, found: usize) -> Result<(), Error> {
    if expected == found { Ok(()) } else { Err(Error::Tensor { tensor: tensor.to_string(), expected, found }) }
}
