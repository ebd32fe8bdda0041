//! Units: what is carried from chunk to chunk, and the heads that share it.
//!
//! ```text
//! H = Σ_s e^{c − c_s} · K(k_s) (κ_s·v_s)ᵀ  [N, ep]        z = Σ_s e^{c − c_s} · K(k_s)  [N]
//! ```
//!
//! over all keys before a chunk, c that of the last of them: factors are only ever differences within a chunk.

use crate::fused::plan::Head;
use crate::state::Basis;
use crate::{Error, Shape, Variant};

/// Heads of one kv head with the same state.
pub struct Unit {
    /// Its kv head.
    pub g: usize,
    /// Its heads.
    pub heads: Vec<usize>,
    /// The class of its keys.
    pub class: usize,
    /// The monomials of its kernel.
    pub basis: Basis,
    /// Whether a denominator needs z.
    pub sums: bool,
    /// Whether its heads (then only one) have a decay.
    pub decays: bool,
    /// Whether keys have weights, the same for all its heads.
    pub weighs_keys: bool,
    /// Where its state lies among those of a batch row.
    pub at: usize,
    /// Values of its state: H [N, ep], then z [N] where there is one, in whole vectors.
    pub len: usize,
}

/// The largest state of a head in bytes for which chunks are thought of.
const MAX_STATE: u128 = 1 << 30;

/// Whether a head can carry a state: a polynomial of the score, without clamp, whose monomials fit into memory.
pub fn finite(variant: &Variant, d: usize, e: usize) -> bool {
    variant.state_size(d, e.next_multiple_of(crate::kernels::PAD)).is_some_and(|size| size.saturating_mul(4) <= MAX_STATE)
}

/// The units of the heads that run in chunks, and the values of their states in one batch row.
pub fn units(heads: &[Head], shape: &Shape, ep: usize) -> Result<(Vec<Unit>, usize), Error> {
    let mut units: Vec<Unit> = Vec::new();
    let mut total = 0;
    for (h, head) in heads.iter().enumerate().filter(|(_, head)| head.chunked) {
        let variant = &head.variant;
        let orders: Vec<usize> = variant.kernel.polynomial().into_iter().flatten().map(|(n, _)| n).collect();
        let g = h / shape.group();
        let own = variant.decay.is_some() || variant.denominator.key_side();
        let shared = units.iter_mut().find(|unit| {
            let first = &heads[unit.heads[0]].variant;
            !own && first.decay.is_none()
                && !first.denominator.key_side()
                && (unit.g, unit.class, unit.weighs_keys) == (g, head.class, head.weighs_keys)
                && unit.sums == variant.denominator.sums()
                && unit.basis.orders() == orders
        });
        if let Some(unit) = shared {
            unit.heads.push(h);
            continue;
        }
        let basis = Basis::new(shape.d, &orders)?;
        let sums = variant.denominator.sums();
        let len = basis.rows() * ep + if sums { basis.rows().next_multiple_of(crate::kernels::PAD) } else { 0 };
        let (class, weighs_keys) = (head.class, head.weighs_keys);
        units.push(Unit { g, heads: vec![h], class, basis, sums, decays: variant.decay.is_some(), weighs_keys, at: total, len });
        total += len;
    }
    Ok((units, total))
}
