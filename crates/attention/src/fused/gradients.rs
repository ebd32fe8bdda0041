//! The gradients that tasks of the backward pass write to, divided among them: by kv head and by parts of time.

use rayon::prelude::*;

use crate::fused::by_head;
use crate::fused::plan::{Cuts, Layout};
use crate::fused::scratch::CallScratch;
use crate::kernels::disjoint::{Axes, Axis, Block, Blocks, Disjoint};
use crate::{Buffer, Shape};

/// Those of prepared tensors, c, key weights and learned coefficients, of a whole call; shapes as in [`CallScratch`].
#[derive(Default)]
pub struct Gradients {
    dq: Buffer,
    dk: Buffer,
    dv: Buffer,
    dkey_weights: Buffer,
    ddecay_queries: Vec<f64>,
    ddecay_keys: Vec<f64>,
    dlearned: [Vec<f64>; 2],
}

/// Gradients of the queries of one part of time, of the heads of one kv head.
pub struct QueryGrads<'a> {
    /// [heads, positions, dp], as they meet near and far keys; the second is empty where no head sees far keys.
    pub dq: [Block<'a, f32>; 2],
    /// What queries give to that of c [heads, positions]; empty without decay.
    pub ddecay: Block<'a, f64>,
    /// [heads, 1, orders] of near and of far keys.
    pub dlearned: [Block<'a, f64>; 2],
}

/// Gradients of the keys of one part of time, in whole tiles, of one kv head.
pub struct KeyGrads<'a> {
    /// [classes, positions, dp] and [classes, positions, ep]
    pub dk: Block<'a, f32>,
    pub dv: Block<'a, f32>,
    /// [heads, positions]; empty without gates.
    pub dkey_weights: Block<'a, f32>,
    /// What keys give to that of c [heads, positions]; empty without decay.
    pub ddecay: Block<'a, f64>,
}

impl Gradients {
    /// Takes the buffers of a call, sums of float64 at zero; [`Gradients::put_back`] returns them.
    pub fn take(w: &mut CallScratch) -> Gradients {
        let mut all = Gradients::default();
        all.put_back(w);
        let [near, far] = &mut all.dlearned;
        for sums in [&mut all.ddecay_queries, &mut all.ddecay_keys, near, far] {
            sums.fill(0.0);
        }
        all
    }

    pub fn put_back(&mut self, w: &mut CallScratch) {
        let own = [&mut self.dq, &mut self.dk, &mut self.dv, &mut self.dkey_weights];
        own.into_iter().zip([&mut w.dq, &mut w.dk, &mut w.dv, &mut w.dkey_weights]).for_each(|(a, b)| std::mem::swap(a, b));
        let own = [&mut self.ddecay_queries, &mut self.ddecay_keys];
        let those = [&mut w.ddecay_queries, &mut w.ddecay_keys];
        own.into_iter().zip(those).for_each(|(a, b)| std::mem::swap(a, b));
        std::mem::swap(&mut self.dlearned, &mut w.dlearned);
    }

    /// Of queries and keys, in the order [B, G, parts]; the parts of queries are turned: that of the first keys is part `turn`.
    pub fn places<'a>(
        &'a mut self,
        l: &Layout,
        cuts: &'a Cuts,
        turn: usize,
    ) -> impl IndexedParallelIterator<Item = (QueryGrads<'a>, KeyGrads<'a>)> {
        let Gradients { dq, dk, dv, dkey_weights, ddecay_queries, ddecay_keys, dlearned } = self;
        queries(l, cuts, turn, dq, ddecay_queries, dlearned).zip(keys(l, cuts, dk, dv, dkey_weights, ddecay_keys))
    }

    /// Of queries alone.
    pub fn queries<'a>(&'a mut self, l: &Layout, cuts: &'a Cuts) -> impl IndexedParallelIterator<Item = QueryGrads<'a>> {
        queries(l, cuts, 0, &mut self.dq, &mut self.ddecay_queries, &mut self.dlearned)
    }

    /// Of keys alone.
    pub fn keys<'a>(&'a mut self, l: &Layout, cuts: &'a Cuts) -> impl IndexedParallelIterator<Item = KeyGrads<'a>> {
        keys(l, cuts, &mut self.dk, &mut self.dv, &mut self.dkey_weights, &mut self.ddecay_keys)
    }
}

fn queries<'a>(
    l: &Layout,
    cuts: &'a Cuts,
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
    let mut kinds = [false, true].into_iter();
    let dlearned = dlearned.each_mut().map(|dlearned| {
        let orders = l.learned(kinds.next().expect("near and far"));
        let axes = Axes {
            batch: Axis { count: s.batch, step: s.heads * orders },
            heads: Axis { count: s.heads, step: orders },
            rows: Axis { count: cuts.count(), step: l.head_count() * orders },
            width: orders,
        };
        Disjoint::new(dlearned, axes).blocks(group, &cuts.numbers)
    });
    let [near_q, far_q] = dq.map(|blocks| blocks.turned(turn).par());
    let [near_learned, far_learned] = dlearned.map(|blocks| blocks.turned(turn).par());
    let all = near_q.zip(far_q).zip(ddecay.turned(turn).par()).zip(near_learned.zip(far_learned));
    all.map(|(((near, far), ddecay), (near_learned, far_learned))| QueryGrads {
        dq: [near, far],
        ddecay,
        dlearned: [near_learned, far_learned],
    })
}

fn keys<'a>(
    l: &Layout,
    cuts: &'a Cuts,
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    dkey_weights: &'a mut [f32],
    ddecay: &'a mut [f64],
) -> impl IndexedParallelIterator<Item = KeyGrads<'a>> + use<'a> {
    let (s, pairs, positions, classes) = (&l.shape, l.shape.batch * l.shape.kv_heads, l.tiles * l.tile, l.classes.len());
    let by_class = |width: usize| Axes {
        batch: Axis { count: pairs, step: l.tp() * width },
        heads: Axis { count: classes, step: pairs * l.tp() * width },
        rows: Axis { count: positions, step: width },
        width,
    };
    let dk = Disjoint::new(dk, by_class(l.dp)).blocks(classes, &cuts.padded);
    let dv = Disjoint::new(dv, by_class(l.ep)).blocks(classes, &cuts.padded);
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
