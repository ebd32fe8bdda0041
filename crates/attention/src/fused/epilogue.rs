//! From the sums of a head's rows to y, and back: the epilogue of every row.

use rayon::prelude::*;

use crate::epilogue::{self, RowGrads};
use crate::fused::gates::Gates;
use crate::fused::plan::Layout;
use crate::fused::scratch::CallScratch;
use crate::kernels::disjoint::{Block, Blocks};
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::parts::norm::NormGrads;
use crate::{Inputs, Report};

/// The sums of some consecutive rows: U [rows, ep], z and ρ [rows].
pub struct RowSums<'a> {
    pub u: &'a mut [f32],
    pub z: &'a mut [f32],
    pub rho: &'a mut [f32],
}

/// Where the outputs of a task's rows go.
pub struct Outputs<'a, 'b> {
    /// [heads of the task, rows of the task, e]
    pub y: &'a mut Block<'b, f32>,
    /// The head and the first row within it.
    pub head: usize,
    pub row: usize,
}

/// y of the rows from position `first` on, of which those up to `counted` count.
#[inline(always)]
pub fn forward(l: &Layout, gates: &Gates, (b, h): (usize, usize), positions: [usize; 3], sums: &RowSums, to: Outputs) -> Report {
    let ([first, counted, last], s, variant) = (positions, l.shape, &l.heads[h].variant);
    let mut report = Report::default();
    for (i, t) in (first..last).enumerate() {
        let y = to.y.row(to.head, to.row + i);
        if t >= counted {
            y.fill(0.0);
            continue;
        }
        let row = gates.row(l, h, b * s.heads + h, t, sums.z[i], sums.rho[i]);
        let denominator = epilogue::forward(variant, row, &sums.u[i * l.ep..][..s.e], y);
        if variant.denominator.sums() {
            report.see((b, h, t), denominator, sums.rho[i]);
        }
    }
    report
}

/// dU, dz and the gradients of gates and norm, from dy.
pub fn backward(l: &Layout, inputs: &Inputs<f32>, saved: [&[f32]; 3], dy: &[f32], w: &mut CallScratch) {
    let (s, n) = (l.shape, l.head_count());
    let [mut du, mut dz, mut dnorm, mut dout, mut dpost, mut dpost_channels] =
        [&mut w.du, &mut w.dz, &mut w.dnorm, &mut w.dout, &mut w.dpost, &mut w.dpost_channels].map(std::mem::take);
    let gates = &Gates::new(inputs, w);
    let own = (&mut du[..n * s.time * l.ep], &mut dz[..n * s.time]);
    let rows =
        own.0.par_chunks_exact_mut(s.time * l.ep).zip(own.1.par_chunks_exact_mut(s.time)).zip(dnorm.par_chunks_exact_mut(2 * s.e + 1));
    let rows = rows.zip(Blocks::pieces(&mut dout, n).par()).zip(Blocks::pieces(&mut dpost, n).par());
    let rows = rows.zip(Blocks::pieces(&mut dpost_channels, n).par());
    rows.enumerate().with_max_len(1).for_each(|(n, (((((du, dz), dnorm), mut dout), mut dpost), mut channels))| {
        let len = inputs.length(n / s.heads, &s);
        dispatch(BackwardHead {
            layout: l,
            gates,
            saved,
            dy,
            n,
            len,
            du,
            dz,
            dnorm,
            dout: dout.piece(),
            dpost: dpost.piece(),
            dpost_channels: channels.piece(),
        });
    });
    (w.du, w.dz, w.dnorm, w.dout, w.dpost, w.dpost_channels) = (du, dz, dnorm, dout, dpost, dpost_channels);
}

/// One head of one batch row.
struct BackwardHead<'a> {
    layout: &'a Layout,
    gates: &'a Gates<'a>,
    /// U, z and ρ.
    saved: [&'a [f32]; 3],
    dy: &'a [f32],
    n: usize,
    len: usize,
    du: &'a mut [f32],
    dz: &'a mut [f32],
    dnorm: &'a mut [f32],
    /// Empty without gates.
    dout: &'a mut [f32],
    dpost: &'a mut [f32],
    dpost_channels: &'a mut [f32],
}

impl Task for BackwardHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (l, s, n) = (self.layout, self.layout.shape, self.n);
        let (b, h, [u, z, rho]) = (n / s.heads, n % s.heads, self.saved);
        let variant = &l.heads[h].variant;
        let mut scratch = [0.0f32; 512];
        self.dnorm.fill(0.0);
        let (dweight, rest) = self.dnorm.split_at_mut(s.e);
        let (dbias, dsink) = rest.split_at_mut(s.e);
        let mut sink_grad = 0.0f64;
        for (t, du) in self.du.chunks_exact_mut(l.ep).enumerate() {
            let at = n * s.time + t;
            let (row, padding) = du.split_at_mut(s.e);
            padding.fill(0.0);
            let mut grads = RowGrads { z: 0.0, out: 0.0, post: 0.0 };
            if t < self.len {
                row.copy_from_slice(&self.dy[((b * s.time + t) * s.heads + h) * s.e..][..s.e]);
                let input = self.gates.row(l, h, n, t, z[at], rho[at]);
                let norm = NormGrads {
                    weight: if variant.norm.has_weight() { &mut *dweight } else { &mut [] },
                    bias: if variant.norm.has_bias() { &mut *dbias } else { &mut [] },
                };
                grads = epilogue::backward(variant, input, &u[at * l.ep..][..s.e], row, &mut scratch[..2 * s.e], norm);
                sink_grad += (grads.z * input.sink) as f64;
            } else {
                row.fill(0.0);
                scratch.fill(0.0);
            }
            self.dz[t] = grads.z;
            if let Some(dpost) = self.dpost_channels.get_mut(t * s.e..(t + 1) * s.e) {
                dpost.copy_from_slice(&scratch[s.e..2 * s.e]);
            }
            if let (Some(dout), Some(dpost)) = (self.dout.get_mut(t), self.dpost.get_mut(t)) {
                (*dout, *dpost) = (grads.out, grads.post);
            }
        }
        dsink[0] = sink_grad as f32;
    }
}
