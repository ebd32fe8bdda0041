//! The last step of the backward pass: gradients of prepared tensors become those of the inputs.

use rayon::prelude::*;

use crate::fused::gates;
use crate::fused::plan::Layout;
use crate::fused::prepare::{Sources, Which, add_channels_first};
use crate::fused::setup::sources;
use crate::fused::workspace::Workspace;
use crate::kernels::disjoint::Shared;
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::{Extra, Grads, Inputs};

/// Adds all gradients, from those in the workspace.
pub fn finish(l: &Layout, inputs: &Inputs<f32>, w: &mut Workspace, grads: &mut Grads<f32>) {
    let s = l.shape;
    for buffer in &mut w.dtaps {
        buffer.as_mut_slice().fill(0.0);
    }
    let Workspace { dq, dk, dv, dtaps: [tq, tk, tv], .. } = w;
    let dtaps = [tq, tk, tv].map(|buffer| Shared::new(buffer.as_mut_slice()));
    let from = [dq, dk, dv].map(|buffer| Shared::new(buffer.as_mut_slice()));
    let to = [&mut *grads.q, &mut *grads.k, &mut *grads.v].map(Shared::new);
    let sources = sources(inputs, w);
    let (heads, pairs) = (l.head_count(), s.batch * s.kv_heads);
    (0..heads + 2 * pairs).into_par_iter().with_max_len(1).for_each(|task| {
        let (which, b, head) = match task.checked_sub(heads) {
            None => (Which::Q, task / s.heads, task % s.heads),
            Some(rest) => (if rest % 2 == 0 { Which::K } else { Which::V }, rest / 2 / s.kv_heads, rest / 2 % s.kv_heads),
        };
        let i = which as usize;
        let len = inputs.lengths.map_or(s.time, |lengths| lengths[b]);
        dispatch(FinishHead { layout: l, sources: &sources, from: &from[i], to: &to[i], dtaps: &dtaps[i], which, b, head, len });
    });

    for (i, (extra, dim)) in [(Extra::ConvQ, s.d), (Extra::ConvK, s.d), (Extra::ConvV, s.e)].into_iter().enumerate() {
        if l.taps > 0 {
            let channels = l.channels()[i];
            for dtaps in w.dtaps[i].as_slice().chunks_exact(channels * l.taps) {
                add_channels_first(dtaps, dim, l.taps, grads.extra(extra));
            }
        }
    }
    gates::backward(l, inputs, w, grads);
    for n in 0..l.head_count() {
        let head = &l.heads[n % s.heads];
        let (dweight, dbias) = w.dnorm.as_slice()[n * 2 * s.e..(n + 1) * 2 * s.e].split_at(s.e);
        for (extra, from) in [(Extra::NormWeight, dweight), (Extra::NormBias, dbias)] {
            if head.variant.needs(extra) {
                grads.extra(extra).iter_mut().zip(from).for_each(|(d, &g)| *d += g);
            }
        }
    }
    let learned = l.learned();
    if learned > 0 {
        for h in (0..s.heads).filter(|&h| l.heads[h].learned > 0) {
            for (i, to) in grads.extra(Extra::Coefficients)[h * learned..(h + 1) * learned].iter_mut().enumerate() {
                *to += w.dlearned.iter().skip(h * learned + i).step_by(s.heads * learned).sum::<f64>() as f32;
            }
        }
    }
}

/// One head of one tensor in one batch row.
struct FinishHead<'a> {
    layout: &'a Layout,
    sources: &'a Sources<'a>,
    from: &'a Shared<f32>,
    to: &'a Shared<f32>,
    dtaps: &'a Shared<f32>,
    which: Which,
    b: usize,
    head: usize,
    len: usize,
}

impl Task for FinishHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let l = self.layout;
        let s = l.shape;
        let (count, dim, padded) = match self.which {
            Which::Q => (s.heads, s.d, l.dp),
            Which::K => (s.kv_heads, s.d, l.dp),
            Which::V => (s.kv_heads, s.e, l.ep),
        };
        let taps = dim * l.taps;
        // SAFETY: this task is the only one with this head of this tensor in this batch row. Other heads' rows lie between
        // its own in `to`, so that only single rows are ever borrowed.
        let (dtaps, to) = unsafe {
            let to = |t: usize| self.to.slice(((self.b * s.time + t) * count + self.head) * dim, dim);
            (self.dtaps.slice((self.b * count + self.head) * taps, taps), to)
        };
        // SAFETY: as above.
        let row = |first: usize, t: usize| unsafe { self.from.slice((first + t) * padded, dim) };
        if self.which == Which::Q {
            let side = self.sources.query(l, self.b, self.head);
            let first = (self.b * s.heads + self.head) * s.time;
            for t in 0..self.len {
                side.backward(simd, t, row(first, t), to, dtaps);
            }
            return;
        }
        let group = &l.heads[self.head * s.group()..(self.head + 1) * s.group()];
        for class in (0..l.classes.len()).filter(|&class| group.iter().any(|head| head.class == class)) {
            let side = self.sources.side(l, l.classes[class], self.which, self.b, self.head, 1.0);
            let first = l.kv_index(class, self.b, self.head) * l.tp();
            for t in 0..self.len {
                side.backward(simd, t, row(first, t), to, dtaps);
            }
        }
    }
}
