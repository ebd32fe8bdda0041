//! The epilogue of a row: y = P · N(O · u / D) from its weighted sum u, and its backward pass.
//!
//! All engines finish their rows here. u and z have the log scale ρ of their row removed: the true values are u·e^ρ and z·e^ρ. ρ is the
//! running maximum subtracted from the scores of exp, or the log scale of the weights of a polynomial; otherwise 0.

use crate::parts::norm::{NormGrads, NormParams};
use crate::{Real, Variant};
use termwise_kernels::real::dot;

/// The inputs of one row's epilogue in addition to the sum over keys.
#[derive(Clone, Copy)]
pub struct Row<'a, R> {
    /// e^−ρ·Σ_s M·w; read if the denominator sums.
    pub z: R,
    /// S_t, the number of keys that the position sees.
    pub count: R,
    /// ρ, the log scale.
    pub rho: R,
    /// O_t, 1 without an output gate.
    pub out: R,
    /// P_t: one number, or one per channel; not read without a post gate.
    pub post: Post<'a, R>,
    /// e^{b−ρ} of a sum with a sink, otherwise 0.
    pub sink: R,
    /// γ [e], or empty.
    pub weight: &'a [R],
    /// β [e], or empty.
    pub bias: &'a [R],
    /// Whether the norm receives ρ ([`Variant::norm_restores_scale`]).
    pub norm_reads_scale: bool,
}

/// A post gate at one position.
#[derive(Clone, Copy)]
pub enum Post<'a, R> {
    /// One number for the head.
    One(R),
    /// One per channel [e].
    Each(&'a [R]),
}

/// Gradients of the inputs of a row's epilogue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowGrads<R> {
    /// dz
    pub z: R,
    /// dO_t
    pub out: R,
    /// dP_t, if it is a single number; if the post gate is the output gate, this is its second contribution.
    pub post: R,
}

impl<'a, R: Real> Row<'a, R> {
    #[inline(always)]
    fn denominator(&self, variant: &Variant) -> R {
        variant.denominator.value(self.z + self.sink, self.count, self.rho)
    }

    #[inline(always)]
    fn norm_params(&self) -> NormParams<'a, R> {
        let log_scale = if self.norm_reads_scale { self.rho } else { R::zero() };
        NormParams { weight: self.weight, bias: self.bias, log_scale }
    }
}

/// y [e] from u [e]. Returns D·e^−ρ.
#[inline(always)]
pub fn forward<R: Real>(variant: &Variant, row: Row<R>, u: &[R], y: &mut [R]) -> R {
    let denominator = row.denominator(variant);
    let factor = row.out / denominator;
    for (y, &u) in y.iter_mut().zip(u) {
        *y = u * factor;
    }
    variant.norm.forward(y, row.norm_params());
    if variant.post_gate.is_some() {
        gate(y, row.post);
    }
    denominator
}

/// Sums over far keys, with their log scale.
#[derive(Clone, Copy)]
pub struct FarSums<'a> {
    /// Σ_s M·w·v
    pub u: &'a [f32],
    /// Σ_s M·w
    pub z: f32,
    /// ρ
    pub log: f32,
}

/// U and z over near keys, multiplied by e^`near`, become those of the row. Returns ρ: the largest log of both and of a sink, or 0 if the sums
/// have no log scale.
#[inline(always)]
pub fn join(has_log_scale: bool, u: &mut [f32], z: &mut f32, near: f32, far: Option<FarSums>, sink: Option<f32>) -> f32 {
    let logs = [Some(near), far.map(|far| far.log), sink];
    let rho = if has_log_scale { logs.into_iter().flatten().fold(f32::NEG_INFINITY, f32::max) } else { 0.0 };
    let keep = (near - rho).exp();
    if keep != 1.0 {
        u.iter_mut().for_each(|u| *u *= keep);
        *z *= keep;
    }
    if let Some(far) = far {
        let add = (far.log - rho).exp();
        u.iter_mut().zip(far.u).for_each(|(u, far)| *u += add * far);
        *z += add * far.z;
    }
    rho
}

#[inline(always)]
fn gate<R: Real>(y: &mut [R], post: Post<R>) {
    match post {
        Post::One(post) => y.iter_mut().for_each(|y| *y *= post),
        Post::Each(post) => y.iter_mut().zip(post).for_each(|(y, &post)| *y *= post),
    }
}

/// dy [e] becomes du at the u [e] that entered `forward`; dγ and dβ are added to. `scratch` [2e] is overwritten; its second half
/// becomes dP_t [e] of a post gate per channel.
#[inline(always)]
pub fn backward<R: Real>(variant: &Variant, row: Row<R>, u: &[R], dy: &mut [R], scratch: &mut [R], grads: NormGrads<R>) -> RowGrads<R> {
    let params = row.norm_params();
    let denominator = row.denominator(variant);
    let factor = row.out / denominator;
    let (x, normed) = scratch[..2 * u.len()].split_at_mut(u.len());
    for (x, &u) in x.iter_mut().zip(u) {
        *x = u * factor;
    }
    let mut post = R::zero();
    if variant.post_gate.is_some() {
        normed.copy_from_slice(x);
        variant.norm.forward(normed, params);
        match row.post {
            Post::One(_) => post = dot(dy, normed),
            Post::Each(_) => normed.iter_mut().zip(&*dy).for_each(|(normed, &dy)| *normed *= dy),
        }
        gate(dy, row.post);
    }
    variant.norm.backward(x, params, dy, grads);
    // dy is now the gradient of x = O·u/D.
    let along = dot(dy, u) / denominator;
    let slope = variant.denominator.slope(row.z + row.sink, row.count, row.rho);
    let z = if slope == R::zero() { slope } else { -along * row.out / denominator * slope };
    dy.iter_mut().for_each(|dy| *dy *= factor);
    RowGrads { z, out: along, post }
}
