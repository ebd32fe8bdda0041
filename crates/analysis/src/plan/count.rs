//! Operation and byte counts of attention.
//!
//! ```text
//! pair       a query and a key: q·k and w·v                            2·(d + e) operations
//! update     H += K(k)·vᵀ, z += K(k), and with decay H ← m·H            2·N·(e + s), 3·N·(e + s) with decay, and the monomials of k
//! query      Q(q)ᵀ·H and Q(q)ᵀ·z                                       2·N·(e + s), the monomials of q and their N factors
//! parallel   T(T+1)/2 pairs
//! chunk      pairs within chunks of L, T − L queries of the state, T updates
//! recurrent  one update and one query per token
//! window     W + S pairs per token in every mode; far keys are counted as above
//! cache      T pairs for the token at position T
//! ```
//!
//! Bytes are those of the engine's buffers: values are padded to vectors of 16 numbers, caches to blocks of 128 tokens. A test compares them
//! with [`termwise_attention::State`]. Not included are a few dozen bytes per head of other state, and the spare capacity of growing
//! columns of gates and decays.
//!
//! N is the number of monomials; s = 1 if the denominator sums. A multiply-add is two operations; a monomial of order 2 or above is one
//! multiplication with one of the order below. RoPE, gates, norms and the evaluation of w are not counted: they grow with
//! d or with pairs by much smaller factors.

use std::iter::Sum;

use serde::{Deserialize, Serialize};
use termwise_attention::MAX_ROWS;
use termwise_attention::combinatorics::monomials;
use termwise_attention::parts::heavy_hitters::HeavyHitters;
use termwise_attention::parts::quantize::CacheBits;
use termwise_attention::{Map, ScoreFn, Variant};

const FLOAT: u64 = 4;
const DOUBLE: u64 = 8;
/// Rows of values are padded to whole vectors.
const PAD: usize = 16;
/// Cache growth in tokens.
const BLOCK: u64 = 128;
/// Positions of a tile of the fused engine, and the default length of a chunk.
pub const TILE: usize = 128;

/// Sizes of a layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// KV heads, G.
    pub kv_heads: usize,
    /// d = e
    pub d: usize,
}

/// Costs of attention, summed over heads and layers. All are linear in the context, so sums are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// Operations of every query with one key.
    pub pair: f64,
    /// The same only for heads without a finite state.
    pub endless_pair: f64,
    /// Operations of updating the states by one token.
    pub update: f64,
    /// Operations of reading the states by the queries of one token.
    pub query: f64,
    /// float32 values in the states of one batch row, including padding.
    pub state: u64,
    /// The same, counted once per head that reads them.
    pub state_reads: u64,
    /// Bytes of keys and values per token, with a cache for every head.
    pub cache: u64,
    /// The same only for heads without a finite state.
    pub endless_cache: u64,
    /// Bytes of gates and decays per token in addition to `cache`, without blocks.
    pub cache_columns: u64,
    /// The same only for heads without a finite state.
    pub endless_columns: u64,
    /// Operations of the queries of one token with the keys of their windows.
    #[serde(default)]
    pub window: f64,
    /// float32 values of full windows and sinks in one batch row.
    #[serde(default)]
    pub ring: u64,
    /// Bytes of keys and values that the queries of a tile read per earlier key.
    pub tile: u64,
    /// The same only for heads without a finite state.
    pub endless_tile: u64,
}

/// The properties in which heads of one KV head must agree to share memory.
#[derive(Clone, PartialEq)]
struct Unit {
    kv_head: usize,
    rope: bool,
    conv: bool,
    map: Map,
    dim: Option<usize>,
    /// Window and sinks, and the other properties of the windowed cache.
    exact: Option<(usize, usize)>,
    kept: (Option<HeavyHitters>, Option<CacheBits>),
    moments: Option<Moments>,
}

#[derive(Clone, PartialEq)]
struct Moments {
    orders: Vec<usize>,
    sums: bool,
    in_gate: bool,
    /// The head that has its own decay or key weights and cannot share.
    owner: Option<usize>,
}

/// The orders of the state of all keys or of far keys; `None` without one, or if it is larger than the engine supports.
fn finite_orders(score_fn: &ScoreFn, d: usize) -> Option<Vec<usize>> {
    let polynomial = score_fn.kernel.polynomial().filter(|_| score_fn.has_finite_map())?;
    let orders: Vec<usize> = polynomial.into_iter().map(|(n, _)| n).collect();
    let rows = (0..=*orders.last()?).fold(0u128, |sum, n| sum.saturating_add(monomials(score_fn.score_dim(d), n)));
    (rows <= MAX_ROWS as u128).then_some(orders)
}

impl Attention {
    /// One layer whose heads have these variants.
    pub fn of_layer(heads: &[Variant], sizes: Sizes) -> Attention {
        let Sizes { kv_heads, d } = sizes;
        let group = heads.len() / kv_heads.max(1);
        let mut sum = Attention::default();
        let mut units: Vec<Unit> = Vec::new();
        let mut caches: Vec<Unit> = Vec::new();
        let mut rings: Vec<Unit> = Vec::new();
        for (h, variant) in heads.iter().enumerate() {
            let (decays, key_side) = (variant.decay.is_some(), variant.denominator.key_side());
            let remembered = variant.remembered();
            let moments = remembered.as_ref().and_then(|score_fn| finite_orders(score_fn, d)).map(|orders| Moments {
                orders,
                sums: variant.denominator.sums(),
                in_gate: variant.in_gate.is_some(),
                owner: (decays || key_side).then_some(h),
            });
            let (kv_head, rope, conv, map) = (h / group.max(1), variant.rope, variant.conv.is_some(), variant.near.kernel.map());
            let exact = variant.window.map(|window| (window, variant.sinks.unwrap_or(0)));
            let kept = (variant.heavy_hitters, variant.bits);
            let unit = Unit { kv_head, rope, conv, map, dim: variant.near.dim, exact, kept, moments };
            let add = |list: &mut Vec<Unit>, unit: Unit| {
                let first = !list.contains(&unit);
                if first {
                    list.push(unit);
                }
                first
            };

            let padded = d.next_multiple_of(PAD);
            let width = variant.kept_width(d);
            let row = FLOAT * (width + padded) as u64;
            let own_row = FLOAT * u64::from(variant.in_gate.is_some() || key_side) + DOUBLE * u64::from(decays);
            if let Some((window, sinks)) = exact {
                sum.window += 2.0 * (variant.near.score_dim(d) + d) as f64 * (window as f64 + sinks as f64);
                let far_keeps_keys = variant.far.is_some() && unit.moments.is_none();
                let own = Unit { moments: unit.moments.clone().filter(|moments| moments.owner.is_some()), ..unit.clone() };
                if let Some(bytes) = variant.window_bytes(d, d).filter(|_| !far_keeps_keys) {
                    let shared = if add(&mut rings, own) { (bytes as u64).div_ceil(FLOAT) } else { 0 };
                    let per_head = (own_row / FLOAT).saturating_mul((window as u64).saturating_add(sinks as u64));
                    sum.ring = sum.ring.saturating_add(shared).saturating_add(per_head);
                }
            }
            // Windows without far keys are the complete memory.
            let Some(score_fn) = &remembered else { continue };
            let pair = 2.0 * (score_fn.score_dim(d) + d) as f64;
            sum.pair += pair;
            sum.tile += FLOAT * (score_fn.score_dim(d) + d) as u64;
            let shared = add(&mut caches, Unit { moments: None, exact: None, ..unit.clone() });
            sum.cache += if shared { row } else { 0 };
            sum.cache_columns += own_row;
            let Some(moments) = &unit.moments else {
                sum.endless_pair += pair;
                sum.endless_tile += FLOAT * (score_fn.score_dim(d) + d) as u64;
                sum.endless_cache += if add(&mut units, unit) { row } else { 0 };
                sum.endless_columns += own_row;
                continue;
            };
            let rows = variant.state_rows(d).unwrap_or(0);
            let size = rows as u64 * (d as u64 + u64::from(moments.sums));
            let held = size + rows as u64 * (padded - d) as u64;
            let highest = moments.orders.last().copied().unwrap_or(0);
            let built = (2..=highest).map(|n| monomials(score_fn.score_dim(d), n) as f64).sum::<f64>();
            sum.query += 2.0 * size as f64 + built + rows as f64;
            sum.state_reads += held;
            if add(&mut units, unit) {
                sum.state += held;
                sum.update += if decays { 3.0 } else { 2.0 } * size as f64 + built;
            }
        }
        sum
    }

    /// Whether any head has a finite state.
    pub fn has_state(&self) -> bool {
        self.state > 0
    }

    /// Bytes of states, full windows, and growing caches after T tokens.
    pub fn kept_bytes(&self, context: u64) -> u64 {
        self.state.saturating_add(self.ring).saturating_mul(FLOAT).saturating_add(grown(self.endless_cache, self.endless_columns, context))
    }

    /// Bytes of a cache for every head after T tokens.
    pub fn cache_bytes(&self, context: u64) -> u64 {
        grown(self.cache, self.cache_columns, context)
    }

    /// Average cache growth per token in bytes, with a cache for every head.
    pub fn cache_growth(&self) -> u64 {
        self.cache + self.cache_columns
    }

    /// The same only for heads without a finite state; 0 if the memory has constant size.
    pub fn growth(&self) -> u64 {
        self.endless_cache + self.endless_columns
    }

    /// Average cost per token of a prompt of T tokens in parallel mode.
    pub fn parallel(&self, context: u64) -> Work {
        let keys = (context as f64 + 1.0) / 2.0;
        Work { flops: self.pair * keys + self.window, bytes: self.tile as f64 * keys / TILE.min(context as usize).max(1) as f64 }
    }

    /// Average cost per token of a prompt of T tokens in chunks of L; heads without a state run in parallel mode.
    pub fn chunk(&self, context: u64, length: u64) -> Work {
        let (t, l) = (context.max(1), length.clamp(1, context.max(1)));
        let (whole, rest) = (t / l, t % l);
        let pairs = |n: u64| n as f64 * (n as f64 + 1.0) / 2.0;
        let near = whole as f64 * pairs(l) + pairs(rest);
        let far = (t - l) as f64;
        let all = t as f64;
        let chunks = t.div_ceil(l) as f64;
        let flops =
            self.endless_pair * pairs(t) + (self.pair - self.endless_pair) * near + self.query * far + (self.update + self.window) * all;
        // The update of a chunk reads and writes the states; its queries read them once per head.
        let moved = FLOAT as f64 * (2.0 * self.state as f64 * chunks + self.state_reads as f64 * (chunks - 1.0));
        let tiles = self.endless_tile as f64 * pairs(t) / TILE.min(t as usize) as f64
            + (self.tile - self.endless_tile) as f64 * near / TILE.min(l as usize) as f64;
        Work { flops: flops / all, bytes: (moved + tiles) / all }
    }

    /// Cost of the token at position T, with states for heads that have them.
    pub fn recurrent(&self, context: u64) -> Work {
        let t = context as f64;
        Work {
            flops: self.update + self.query + self.window + self.endless_pair * t,
            bytes: FLOAT as f64 * (2.0 * self.state as f64 + self.ring as f64) + self.growth() as f64 * t,
        }
    }

    /// Cost of the token at position T, with a cache for every head.
    pub fn cached(&self, context: u64) -> Work {
        let ring = FLOAT as f64 * self.ring as f64;
        Work { flops: self.pair * context as f64 + self.window, bytes: self.cache_growth() as f64 * context as f64 + ring }
    }
}

impl Sum for Attention {
    fn sum<I: Iterator<Item = Attention>>(layers: I) -> Attention {
        layers.fold(Attention::default(), |a, b| Attention {
            pair: a.pair + b.pair,
            endless_pair: a.endless_pair + b.endless_pair,
            update: a.update + b.update,
            query: a.query + b.query,
            state: a.state.saturating_add(b.state),
            state_reads: a.state_reads.saturating_add(b.state_reads),
            cache: a.cache + b.cache,
            endless_cache: a.endless_cache + b.endless_cache,
            cache_columns: a.cache_columns + b.cache_columns,
            endless_columns: a.endless_columns + b.endless_columns,
            tile: a.tile + b.tile,
            endless_tile: a.endless_tile + b.endless_tile,
            window: a.window + b.window,
            ring: a.ring.saturating_add(b.ring),
        })
    }
}

/// Bytes of a cache after this many tokens: keys and values in whole blocks, and columns.
fn grown(rows: u64, columns: u64, context: u64) -> u64 {
    rows.saturating_mul(context.next_multiple_of(BLOCK)).saturating_add(columns.saturating_mul(context))
}

/// Operations, and bytes between memory and processor if processor caches contain only a tile or a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes read and written.
    pub bytes: f64,
}

#[cfg(test)]
mod tests;
