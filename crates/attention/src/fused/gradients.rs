//! Gradients that tiles and chunks compute, divided among tasks per kv head and part of time.

use rayon::prelude::*;

use crate::fused::blocks::by_head;
use crate::fused::heap_bytes::scratch_memory;
use crate::fused::plan::{CallPlan, TimeParts};
use crate::{AuxKind, Buffer, Error, Grads, KeyRange, Shape};
use termwise_kernels::buffer::resize;
use termwise_kernels::disjoint::{Axes, Axis, Block, Blocks, Disjoint};

scratch_memory! {
    /// Gradients from tiles and chunks: of prepared rows, c, key weights and learned coefficients.
    TileGrads {
        /// Of queries [branches, N, T, dp].
        dq: Buffer,
        /// Of keys [K, Tp, dp] and values [K, Tp, ep].
        dk: Buffer,
        dv: Buffer,
        /// Of key weights [N, Tp].
        dkey_weights: Buffer,
        /// Of c, from queries and from keys [N, Tp].
        ddecay_queries: Vec<f64>,
        ddecay_keys: Vec<f64>,
        /// Of the learned coefficients of near and of far keys [parts or splits, N, orders].
        dlearned: [Vec<f64>; 2],
    }
}

/// Gradients of the queries of one part of time, of the heads of one kv head.
pub struct QueryGrads<'a> {
    /// [heads, positions, dp] of the near and of the far branch; the second is empty if no head sees far keys.
    pub dq: [Block<'a, f32>; 2],
    /// Contributions of queries to the gradient of c [heads, positions]; empty without a decay.
    pub ddecay: Block<'a, f64>,
    /// [heads, 1, orders] of near and of far keys.
    pub dlearned: [Block<'a, f64>; 2],
}

/// Gradients of the keys of one part of time, in whole tiles, of one kv head.
pub struct KeyGrads<'a> {
    /// [key transforms, positions, dp] and [key transforms, positions, ep]
    pub dk: Block<'a, f32>,
    pub dv: Block<'a, f32>,
    /// [heads, positions]; empty without gates.
    pub dkey_weights: Block<'a, f32>,
    /// Contributions of keys to the gradient of c [heads, positions]; empty without a decay.
    pub ddecay: Block<'a, f64>,
}

impl TileGrads {
    /// Sets the float64 sums to zero. Tasks initialize the float32 gradients.
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        let (n, kv, tp) = (l.head_count(), l.kv_count(), l.tp());
        self.dq.ensure(l.branches() * n * l.shape.time * l.dp)?;
        self.dk.ensure(kv * tp * l.dp)?;
        self.dv.ensure(kv * tp * l.ep)?;
        self.dkey_weights.ensure(l.has_gates() as usize * n * tp)?;
        let decays = l.heads.iter().any(|head| head.variant.decay.is_some()) as usize;
        resize(&mut self.ddecay_queries, decays * n * tp)?;
        resize(&mut self.ddecay_keys, decays * n * tp)?;
        for (range, dlearned) in KeyRange::ALL.into_iter().zip(&mut self.dlearned) {
            resize(dlearned, l.parts.count().max(l.splits) * n * l.learned(range))?;
        }
        let [near, far] = &mut self.dlearned;
        for sums in [&mut self.ddecay_queries, &mut self.ddecay_keys, near, far] {
            sums.fill(0.0);
        }
        Ok(())
    }

    /// Gradients of queries and keys in the order [B, G, parts]; the parts of queries are rotated: that of the first keys is part `turn`.
    pub fn places<'a>(
        &'a mut self,
        l: &CallPlan,
        cuts: &'a TimeParts,
        turn: usize,
    ) -> impl IndexedParallelIterator<Item = (QueryGrads<'a>, KeyGrads<'a>)> {
        let TileGrads { dq, dk, dv, dkey_weights, ddecay_queries, ddecay_keys, dlearned } = self;
        queries(l, cuts, turn, dq, ddecay_queries, dlearned).zip(keys(l, cuts, dk, dv, dkey_weights, ddecay_keys))
    }

    /// Adds the gradients of learned coefficients to those of the call.
    pub fn add_learned(&self, l: &CallPlan, grads: &mut Grads<f32>) {
        for (range, dlearned) in KeyRange::ALL.into_iter().zip(&self.dlearned) {
            let (learned, aux) = (l.learned(range), AuxKind::Coefficients.of(range));
            for (i, dlearned) in dlearned.chunks_exact(learned.max(1)).enumerate() {
                let h = i % l.shape.heads;
                if l.branches_of(h).any(|head| head.range == range && head.learned > 0) {
                    let to = &mut grads.aux(aux)[h * learned..(h + 1) * learned];
                    to.iter_mut().zip(dlearned).for_each(|(d, &g)| *d += g as f32);
                }
            }
        }
    }

    /// Only of queries.
    pub fn queries<'a>(&'a mut self, l: &CallPlan, cuts: &'a TimeParts) -> impl IndexedParallelIterator<Item = QueryGrads<'a>> {
        queries(l, cuts, 0, &mut self.dq, &mut self.ddecay_queries, &mut self.dlearned)
    }

    /// Only of keys.
    pub fn keys<'a>(&'a mut self, l: &CallPlan, cuts: &'a TimeParts) -> impl IndexedParallelIterator<Item = KeyGrads<'a>> {
        keys(l, cuts, &mut self.dk, &mut self.dv, &mut self.dkey_weights, &mut self.ddecay_keys)
    }
}

fn queries<'a>(
    l: &CallPlan,
    cuts: &'a TimeParts,
    turn: usize,
    dq: &'a mut [f32],
    ddecay: &'a mut [f64],
    dlearned: &'a mut [Vec<f64>; 2],
) -> impl IndexedParallelIterator<Item = QueryGrads<'a>> + use<'a> {
    let (s, group) = (&l.shape, l.shape.group());
    let none = || s.batch * s.kv_heads * cuts.count();
    let rows = |dq: &'a mut [f32]| match dq.is_empty() {
        true => Blocks::empty(none()),
        false => Disjoint::new(dq, by_head(s, l.dp)).blocks(group, &cuts.positions),
    };
    let (near, far) = dq.split_at_mut(l.head_count() * s.time * l.dp);
    let dq = [rows(near), rows(far)];
    let ddecay = by_position(ddecay, s, l.tp(), s.time, &cuts.positions);
    let mut ranges = KeyRange::ALL.into_iter();
    let dlearned = dlearned.each_mut().map(|dlearned| {
        let orders = l.learned(ranges.next().expect("near and far"));
        let axes = Axes {
            batch: Axis { count: s.batch, step: s.heads * orders },
            heads: Axis { count: s.heads, step: orders },
            rows: Axis { count: cuts.count(), step: l.head_count() * orders },
            width: orders,
        };
        Disjoint::new(dlearned, axes).blocks(group, &cuts.numbers)
    });
    let [near_q, far_q] = dq.map(|blocks| blocks.rotated(turn).par());
    let [near_learned, far_learned] = dlearned.map(|blocks| blocks.rotated(turn).par());
    let all = near_q.zip(far_q).zip(ddecay.rotated(turn).par()).zip(near_learned.zip(far_learned));
    all.map(|(((near, far), ddecay), (near_learned, far_learned))| QueryGrads {
        dq: [near, far],
        ddecay,
        dlearned: [near_learned, far_learned],
    })
}

fn keys<'a>(
    l: &CallPlan,
    cuts: &'a TimeParts,
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    dkey_weights: &'a mut [f32],
    ddecay: &'a mut [f64],
) -> impl IndexedParallelIterator<Item = KeyGrads<'a>> + use<'a> {
    let (s, pairs, positions, key_transforms) = (&l.shape, l.shape.batch * l.shape.kv_heads, l.tiles * l.tile, l.key_transforms.len());
    let per_transform = |width: usize| Axes {
        batch: Axis { count: pairs, step: l.tp() * width },
        heads: Axis { count: key_transforms, step: pairs * l.tp() * width },
        rows: Axis { count: positions, step: width },
        width,
    };
    let dk = Disjoint::new(dk, per_transform(l.dp)).blocks(key_transforms, &cuts.padded);
    let dv = Disjoint::new(dv, per_transform(l.ep)).blocks(key_transforms, &cuts.padded);
    let dkey_weights = by_position(dkey_weights, s, l.tp(), positions, &cuts.padded);
    let ddecay = by_position(ddecay, s, l.tp(), positions, &cuts.padded);
    let all = dk.par().zip(dv.par()).zip(dkey_weights.par()).zip(ddecay.par());
    all.map(|(((dk, dv), dkey_weights), ddecay)| KeyGrads { dk, dv, dkey_weights, ddecay })
}

/// The first `positions` of each head of a tensor [N, Tp], if there is one, in blocks of the heads of a kv head.
fn by_position<'a, T>(values: &'a mut [T], s: &Shape, tp: usize, positions: usize, cuts: &'a [usize]) -> Blocks<'a, T> {
    if values.is_empty() {
        return Blocks::empty(s.batch * s.kv_heads * (cuts.len() - 1));
    }
    let axes = Axes {
        batch: Axis { count: s.batch, step: s.heads * tp },
        heads: Axis { count: s.heads, step: tp },
        rows: Axis { count: positions, step: 1 },
        width: 1,
    };
    Disjoint::new(values, axes).blocks(s.group(), cuts)
}
