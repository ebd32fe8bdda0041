//! Cost model of the modes: counted arithmetic divided by measured rates.
//!
//! Nanoseconds of one thread per position and head, forward plus backward, without the cost that both modes share:
//!
//! ```text
//! parallel   T/2 · key                 key = (8d + 6e) / RATE + WEIGHT           scores twice, dq, dk and weighted sums, dP, dv
//! chunk      L/2 · key + N · row       row = (6 + 2σ)·e / RATE + (8 + 4σ)·e / (RATE · heads that share a state) + MONOMIAL
//! ```
//!
//! σ = 1 − 1/splits is the fraction of time whose states are computed in advance. Chunks are faster from T = L + 2·N·row/key on. With a window these are
//! the costs of far keys, and chunks are faster W positions later: near keys cost the same in both modes. The three constants were measured on one
//! machine with AVX-512 (`termwise bench chunk`). Only their ratios matter, and those
//! differ little between machines, since all of it is arithmetic in the caches. Predicted and measured break-even T, four heads, d = e:
//! orders 0..2 at d = 16: 527 and 550; d = 32: 1,561 and 1,700; d = 64: 5,498 and 5,800; orders 0..3 at d = 16: 2,654 and 3,300.

use crate::fused::mode::Mode;
use crate::fused::plan::splits;
use crate::{Error, Layer, Shape, Variant};
use termwise_kernels::{PAD, TILE};

/// Floating-point operations of matrix products per nanosecond.
const RATE: f64 = 165.0;
/// Nanoseconds per weight: kernel, decay, masks, and their gradients.
const WEIGHT: f64 = 1.44;
/// Nanoseconds per monomial: computing it three times, and its gradient.
const MONOMIAL: f64 = 2.0;
/// The highest order for which [`Mode::Auto`] chooses chunks: with higher orders, float32 monomials lose negative scores to
/// cancellation, while parallel mode sums in float64.
const HIGHEST: usize = 8;
/// Rows of a state up to which chunks are half a tile long, since the scores within a chunk then cost more than the state.
const SMALL: usize = TILE;

/// The largest state of a head, in bytes, that can run in chunks.
const MAX_STATE: u128 = 1 << 30;

/// Whether a head can have a state, of all keys or of far keys: a polynomial of the score, without clamp, whose monomials fit into memory.
fn finite(variant: &Variant, d: usize, e: usize) -> bool {
    variant.remembered().is_some() && variant.state_size(d, e.next_multiple_of(PAD)).is_some_and(|size| size.saturating_mul(4) <= MAX_STATE)
}

fn key(variant: &Variant, shape: &Shape) -> f64 {
    let d = variant.remembered().map_or(shape.d, |score_fn| score_fn.score_dim(shape.d));
    (8 * d + 6 * shape.e) as f64 / RATE + WEIGHT
}

/// Positions whose keys a query scores individually in either mode.
fn window(variant: &Variant) -> usize {
    variant.window.unwrap_or(0)
}

/// Nanoseconds of the state per position with chunks of this length. The head has a finite state.
fn state(variant: &Variant, shape: &Shape, length: usize) -> f64 {
    let rows = variant.state_rows(shape.d).map_or(f64::INFINITY, |rows| rows as f64);
    let own = variant.decay.is_some() || variant.denominator.key_side();
    let shared = if own { 1.0 } else { shape.group() as f64 };
    let early = 1.0 - 1.0 / splits(shape, shape.time.div_ceil(length), variant.write.is_some()) as f64;
    let e = shape.e as f64;
    rows * (((6.0 + 2.0 * early) * e + (8.0 + 4.0 * early) * e / shared) / RATE + MONOMIAL)
}

/// The default length of chunks: a tile, or half of one if all states are small.
fn chunk_length(heads: &[Variant], able: &[bool], shape: &Shape) -> usize {
    let rows = |variant: &Variant| variant.state_rows(shape.d).unwrap_or(0);
    let most = heads.iter().zip(able).filter(|(_, able)| **able).map(|(variant, _)| rows(variant)).max().unwrap_or(0);
    if most <= SMALL as u128 && able.iter().all(|able| *able) { TILE / 2 } else { TILE }
}

/// Whether the cost model predicts that chunks of this length are faster for a head than parallel mode.
fn chunks_win(variant: &Variant, shape: &Shape, length: usize) -> bool {
    let saved = shape.time.saturating_sub(length).saturating_sub(window(variant)) as f64 / 2.0 * key(variant, shape);
    let orders = variant.remembered().and_then(|score_fn| score_fn.kernel.polynomial());
    let low = orders.is_some_and(|orders| orders.iter().all(|(n, _)| *n <= HIGHEST));
    low && finite(variant, shape.d, shape.e) && state(variant, shape, length) < saved
}

/// The number of positions from which on [`Mode::Auto`] runs a layer of such heads in chunks; `None` if it never does. The
/// shape's time is not read.
pub fn break_even(variant: &Variant, shape: Shape) -> Option<usize> {
    let length = chunk_length(std::slice::from_ref(variant), &[true], &shape);
    // The number of splits grows with T and then stays constant, so the result changes at most once.
    let mut time = length + 1;
    for _ in 0..4 {
        let at = Shape { time, ..shape };
        let next = (length + window(variant).min(u32::MAX as usize)) as f64 + 2.0 * state(variant, &at, length) / key(variant, &shape);
        if !next.is_finite() || next > u32::MAX as f64 {
            return None;
        }
        time = (next.floor() as usize + 1).max(length + 1);
    }
    chunks_win(variant, &Shape { time, ..shape }, length).then_some(time)
}

/// The length of chunks and the heads that use them; `None` if all run in parallel.
pub fn plan(layer: &Layer, shape: &Shape, mode: Mode) -> Result<Option<(usize, Vec<bool>)>, Error> {
    let heads = layer.heads();
    let able: Vec<bool> = heads.iter().map(|variant| finite(variant, shape.d, shape.e)).collect();
    match mode {
        Mode::Parallel => Ok(None),
        Mode::Chunk(Some(0)) => Err(Error::Shape("a chunk has at least 1 position, found 0".into())),
        Mode::Chunk(_) if !able.contains(&true) => Err(Error::Combination {
            variant: heads.first().map(Variant::to_string).unwrap_or_default(),
            reason: "chunks need a kernel with a finite state (taylor, power or feature, without clamp, of orders whose state fits \
                     into memory), and no head of the layer has one; use `parallel` or `auto`"
                .into(),
        }),
        Mode::Chunk(length) => Ok(Some((length.unwrap_or_else(|| chunk_length(heads, &able, shape)), able))),
        Mode::Auto => {
            let length = chunk_length(heads, &able, shape);
            let chunked: Vec<bool> = heads.iter().map(|variant| chunks_win(variant, shape, length)).collect();
            Ok(chunked.contains(&true).then_some((length, chunked)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { batch: 1, time: 1, heads: 4, kv_heads: 4, d: 16, e: 16 };

    fn variant(text: &str) -> Variant {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    fn layer(shape: Shape, texts: &[&str; 4]) -> Layer {
        let rope = crate::Rope::new(shape.d, 100.0, None).expect("a rope");
        Layer::new(4, shape.kv_heads, shape.d).rope(rope).heads(*texts).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn auto_changes_at_the_break_even() {
        for (text, d) in
            [("taylor=0..2", 16), ("taylor=0..2", 64), ("taylor=0..3", 16), ("feature=elu", 64), ("power=2 decay=softplus", 32)]
        {
            let shape = Shape { d, e: d, ..SHAPE };
            let layer = layer(shape, &[text; 4]);
            let time = break_even(&layer.heads()[0], shape).expect("there is a break-even");
            let taken = |time| plan(&layer, &Shape { time, ..shape }, Mode::Auto).expect("auto always can").is_some();
            assert!(!taken(time - 1) && taken(time) && taken(4 * time), "{text} at d = {d}: {time}");
        }
    }

    #[test]
    fn auto_runs_large_and_infinite_states_in_parallel() {
        for text in ["softmax", "taylor=0..2 clamp=5", "taylor=0..12", "taylor=0..8"] {
            assert_eq!(break_even(&variant(text), Shape { d: 64, ..SHAPE }), None, "{text}");
        }
    }

    #[test]
    fn shared_states_pay_earlier() {
        let grouped = Shape { kv_heads: 1, ..SHAPE };
        let (shared, own) = (variant("taylor=0..2"), variant("taylor=0..2 decay=softplus"));
        assert!(break_even(&shared, grouped) < break_even(&shared, SHAPE));
        assert!(break_even(&own, grouped) >= break_even(&own, SHAPE));
    }

    #[test]
    fn auto_chooses_per_head() {
        let layer = layer(SHAPE, &["softmax", "taylor=0..2", "taylor=0..4", "taylor=1"]);
        let (length, chunked) = plan(&layer, &Shape { time: 2000, ..SHAPE }, Mode::Auto).expect("possible").expect("chunks");
        assert_eq!((length, chunked), (TILE, vec![false, true, false, true]));
    }
}
