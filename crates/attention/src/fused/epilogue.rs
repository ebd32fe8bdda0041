//! From the sums of a head's rows to y, and back: the epilogue of every row.

use rayon::prelude::*;

use crate::epilogue::{self, Post, Row, RowGrads};
use crate::fused::call::Call;
use crate::fused::heap_bytes::scratch_memory;
use crate::fused::plan::{CallPlan, HeadPlan};
use crate::fused::prepare::gates::{GateFactors, GateGrads};
use crate::parts::norm::NormGrads;
use crate::{AuxKind, Buffer, Error, Grads, Report, Shape};
use termwise_kernels::disjoint::{Block, Blocks};
use termwise_kernels::simd::{Simd, Task, dispatch};

scratch_memory! {
    /// Sums over keys of heads evaluated sequentially.
    SumBuffers {
        /// U [N, T, ep]
        u: Buffer,
        /// z and ρ [N, T]
        z: Buffer,
        rho: Buffer,
    }
}

scratch_memory! {
    /// Gradients of the sums over keys, and of the parameters of the norm.
    EpilogueGrads {
        /// dU [branches, N, T, ep]
        du: Buffer,
        /// dz [branches, N, T]
        dz: Buffer,
        /// Of γ, β and the sink b per head [N, 2e + 1].
        dnorm: Buffer,
    }
}

impl SumBuffers {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        let rows = l.head_count() * l.shape.time;
        self.u.ensure(rows * l.ep)?;
        self.z.ensure(rows)?;
        Ok(self.rho.ensure(rows)?)
    }
}

impl EpilogueGrads {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        let (n, s) = (l.head_count(), &l.shape);
        self.du.ensure(l.branches() * n * s.time * l.ep)?;
        self.dz.ensure(l.branches() * n * s.time)?;
        Ok(self.dnorm.ensure(n * (2 * s.e + 1))?)
    }

    /// Adds the gradients of sinks and of the norms' parameters to those of the call.
    pub fn add_parameters(&self, l: &CallPlan, grads: &mut Grads<f32>) {
        let s = l.shape;
        for (n, dnorm) in self.dnorm.chunks_exact(2 * s.e + 1).enumerate() {
            let variant = &l.heads[n % s.heads].variant;
            let (dweight, rest) = dnorm.split_at(s.e);
            let (dbias, dsink) = rest.split_at(s.e);
            if variant.needs(AuxKind::Sink) {
                grads.aux(AuxKind::Sink)[n % s.heads] += dsink[0];
            }
            for (aux, from) in [(AuxKind::NormWeight, dweight), (AuxKind::NormBias, dbias)] {
                if variant.needs(aux) {
                    grads.aux(aux).iter_mut().zip(from).for_each(|(d, &g)| *d += g);
                }
            }
        }
    }
}

/// The sums of some consecutive rows: U [rows, ep], z and ρ [rows].
pub struct RowSums<'a> {
    pub u: &'a mut [f32],
    pub z: &'a mut [f32],
    pub rho: &'a mut [f32],
}

/// Destination of the outputs of a task's rows.
pub struct Outputs<'a, 'b> {
    /// [heads of the task, rows of the task, e]
    pub y: &'a mut Block<'b, f32>,
    /// The head and the first row within it.
    pub head: usize,
    pub row: usize,
}

impl<'a> GateFactors<'a> {
    /// The parameters of the epilogue in row t of head n = (b, h).
    #[inline(always)]
    fn row(&self, plan: &CallPlan, n: usize, t: usize, z: f32, rho: f32) -> Row<'a, f32> {
        let h = n % plan.shape.heads;
        let HeadPlan { variant, norm_reads_scale, .. } = &plan.heads[h];
        let at = n * plan.shape.time + t;
        Row {
            z,
            count: variant.visible(self.positions[n / plan.shape.heads] + t) as f32,
            rho,
            out: if variant.out_gate.is_some() { self.out[at] } else { 1.0 },
            post: match &variant.post_gate {
                Some(gate) if gate.by_channel() => {
                    let Shape { time, heads, e, .. } = plan.shape;
                    Post::Each(&self.post_channels[((n / heads * time + t) * heads + h) * e..][..e])
                }
                Some(_) => Post::One(self.post[at]),
                None => Post::One(1.0),
            },
            sink: self.scaled_sink(variant, h, rho),
            weight: if variant.norm.has_weight() { self.norm_weight } else { &[] },
            bias: if variant.norm.has_bias() { self.norm_bias } else { &[] },
            norm_reads_scale: *norm_reads_scale,
        }
    }
}

/// y of the rows from position `first` on, of which those up to `counted` count.
#[inline(always)]
pub fn forward(l: &CallPlan, gates: &GateFactors, (b, h): (usize, usize), positions: [usize; 3], sums: &RowSums, to: Outputs) -> Report {
    let ([first, counted, last], s, variant) = (positions, l.shape, &l.heads[h].variant);
    let mut report = Report::default();
    for (i, t) in (first..last).enumerate() {
        let y = to.y.row(to.head, to.row + i);
        if t >= counted {
            y.fill(0.0);
            continue;
        }
        let row = gates.row(l, b * s.heads + h, t, sums.z[i], sums.rho[i]);
        let denominator = epilogue::forward(variant, row, &sums.u[i * l.ep..][..s.e], y);
        if variant.denominator.sums() {
            report.see((b, h, t), denominator, sums.rho[i]);
        }
    }
    report
}

/// dU, dz and the gradients of gates and norm, from dy and the saved sums U, z and ρ.
pub fn backward(call: &Call, gates: &GateFactors, saved: [&[f32]; 3], dy: &[f32], to: &mut EpilogueGrads, to_gates: &mut GateGrads) {
    let (l, s, n) = (call.plan, call.plan.shape, call.plan.head_count());
    let EpilogueGrads { du, dz, dnorm } = to;
    let GateGrads { dout, dpost, dpost_channels, .. } = to_gates;
    let (du, dz) = (&mut du[..n * s.time * l.ep], &mut dz[..n * s.time]);
    let rows = du.par_chunks_exact_mut(s.time * l.ep).zip(dz.par_chunks_exact_mut(s.time)).zip(dnorm.par_chunks_exact_mut(2 * s.e + 1));
    let rows = rows.zip(Blocks::pieces(dout, n).par()).zip(Blocks::pieces(dpost, n).par());
    let rows = rows.zip(Blocks::pieces(dpost_channels, n).par());
    rows.enumerate().with_max_len(1).for_each(|(n, (((((du, dz), dnorm), mut dout), mut dpost), mut channels))| {
        let len = call.length(n / s.heads);
        dispatch(BackwardHead {
            plan: l,
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
}

/// One head of one batch row.
struct BackwardHead<'a> {
    plan: &'a CallPlan,
    gates: &'a GateFactors<'a>,
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
        let (l, s, n) = (self.plan, self.plan.shape, self.n);
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
                let input = self.gates.row(l, n, t, z[at], rho[at]);
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
