//! Fused attention, forward and with the backward pass.

use std::cell::RefCell;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use termwise_attention::{
    Attention, AuxTensor, AuxTensors, Error as AttentionError, Fused, FusedOptions, Grads, Inputs, Layer, Rope, Scratch, Shape, Variant,
};

use super::{AttentionShape, Job, Machine, Speed, best, measure, timed};
use termwise_base::rng::Rng;
use termwise_base::threads;

use crate::Error;

/// Options.
#[derive(Clone, Debug)]
pub struct AttentionOptions {
    /// Shapes.
    pub shapes: Vec<AttentionShape>,
    /// Head dimension d of q, k and v.
    pub head_dim: usize,
    /// Key-value heads G; default: same as heads.
    pub kv_heads: Option<usize>,
    /// Variants with their names. Softmax is always included for comparison.
    pub variants: Vec<(String, Variant)>,
    /// Threads.
    pub threads: usize,
    /// Repetitions; the best counts.
    pub repeat: usize,
}

/// Result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AttentionBench {
    /// The program.
    pub engine: String,
    /// Peak performance of the machine.
    pub machine: Machine,
    /// Formula of the operation count.
    pub flop_count: String,
    /// One per shape and variant.
    pub rows: Vec<AttentionRow>,
}

/// One variant at one shape.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AttentionRow {
    /// The requested name.
    pub variant: String,
    /// Batch rows, B.
    pub batch: usize,
    /// Query heads, H.
    pub heads: usize,
    /// KV heads, G.
    pub kv_heads: usize,
    /// Positions, T.
    pub time: usize,
    /// Head dimension, d.
    pub head_dim: usize,
    /// The forward pass.
    pub forward: Speed,
    /// Forward and backward pass.
    pub forward_backward: Speed,
    /// Forward time relative to softmax.
    pub forward_against_softmax: f64,
    /// Forward and backward time relative to softmax.
    pub forward_backward_against_softmax: f64,
}

/// Multiplications and additions of the two products of causal attention, without kernels, gates and norms.
pub fn attention_flops(batch: usize, heads: usize, time: usize, head_dim: usize) -> f64 {
    4.0 * (batch * heads * head_dim) as f64 * (time as f64 * (time + 1) as f64 / 2.0)
}

/// With the backward pass: two products forward, five backward, one of which recomputes the scores.
pub const WITH_BACKWARD: f64 = 3.5;

/// Measures all variants at all shapes. At one shape they alternate, so a disturbance affects all of them.
pub fn attention(options: &AttentionOptions) -> Result<AttentionBench, Error> {
    let pool = threads::pool(options.threads)?;
    pool.install(|| {
        let shapes = options.shapes.iter().map(|&AttentionShape { batch, heads, time }| {
            let kv_heads = options.kv_heads.unwrap_or(heads);
            Shape { batch, time, heads, kv_heads, d: options.head_dim, e: options.head_dim }
        });
        let mut variants = options.variants.clone();
        if !variants.iter().any(|(_, variant)| *variant == Variant::default()) {
            variants.insert(0, ("softmax".into(), Variant::default()));
        }
        // All variants run once before the first is measured, to report errors early.
        for shape in shapes.clone() {
            variants.iter().try_for_each(|(_, variant)| planned(variant, &shape).map(drop))?;
        }
        let machine = Machine::measure();
        let mut rows = Vec::new();
        for shape in shapes {
            rows.extend(at_shape(shape, &variants, options.repeat, &machine)?);
        }
        let flop_count = "4·B·H·d·T(T+1)/2 forward, 3.5 times that with backward".into();
        Ok(AttentionBench { engine: "termwise".into(), machine, flop_count, rows })
    })
}

/// Tensors shared by all variants of a shape.
struct Common {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dy: Vec<f32>,
    y: Vec<f32>,
    grads: [Vec<f32>; 3],
}

/// The same variant in every head.
fn planned(variant: &Variant, shape: &Shape) -> Result<Layer, AttentionError> {
    Layer::new(shape.heads, shape.kv_heads, shape.d).rope(Rope::new(shape.d, 10_000.0, None)?).variant(variant)
}

struct Runner {
    engine: Fused,
    extras: Vec<(AuxTensor, Vec<f32>)>,
    gradients: Vec<(AuxTensor, Vec<f32>)>,
}

fn at_shape(shape: Shape, variants: &[(String, Variant)], repeat: usize, machine: &Machine) -> Result<Vec<AttentionRow>, Error> {
    let Shape { batch, time, heads, kv_heads, d, .. } = shape;
    let rows = batch * time;
    let mut rng = Rng::new(1);
    let mut normals = |n: usize| (0..n).map(|_| rng.normal() as f32).collect::<Vec<f32>>();
    let (queries, keys) = (rows * heads * d, rows * kv_heads * d);
    let mut common = Common {
        q: normals(queries),
        k: normals(keys),
        v: normals(keys),
        dy: normals(queries),
        y: vec![0.0; queries],
        grads: [vec![0.0; queries], vec![0.0; keys], vec![0.0; keys]],
    };
    let scratch = Scratch::default();
    let make = |(_, variant): &(String, Variant)| Runner::new(variant, shape, &scratch, &mut rng);
    let runners = variants.iter().map(make).collect::<Result<Vec<Runner>, AttentionError>>()?;
    let common = RefCell::new(&mut common);
    let job = |mut runner: Runner| -> Job<2> {
        let common = &common;
        Box::new(move || runner.run(&mut common.borrow_mut()))
    };
    let times = measure(repeat, &mut runners.into_iter().map(job).collect::<Vec<_>>())?;
    let times: Vec<[Duration; 2]> = times.iter().map(|times| best(times)).collect();
    let softmax = variants.iter().position(|(_, variant)| *variant == Variant::default()).map_or([Duration::MAX; 2], |i| times[i]);
    let flops = attention_flops(batch, heads, time, d);
    let against = |times: &[Duration; 2], pass: usize| times[pass].as_secs_f64() / softmax[pass].as_secs_f64();
    let row = |((name, _), times): (&(String, Variant), &[Duration; 2])| AttentionRow {
        variant: name.clone(),
        batch,
        heads,
        kv_heads,
        time,
        head_dim: d,
        forward: Speed::new(times[0], flops, Some(rows), machine),
        forward_backward: Speed::new(times[1], WITH_BACKWARD * flops, Some(rows), machine),
        forward_against_softmax: against(times, 0),
        forward_backward_against_softmax: against(times, 1),
    };
    Ok(variants.iter().zip(&times).map(row).collect())
}

impl Runner {
    fn new(variant: &Variant, shape: Shape, scratch: &Scratch, rng: &mut Rng) -> Result<Runner, AttentionError> {
        let layer = planned(variant, &shape)?;
        let mut extras = Vec::new();
        for spec in layer.aux_specs() {
            let n = spec.values(shape.batch * shape.time);
            extras.push((spec.aux, (0..n).map(|_| rng.normal() as f32).collect::<Vec<f32>>()));
        }
        let gradients = extras.iter().map(|(extra, values)| (*extra, vec![0.0; values.len()])).collect();
        let engine = layer.fused_with(shape.batch, shape.time, FusedOptions::default().scratch(scratch))?;
        Ok(Runner { engine, extras, gradients })
    }

    fn run(&mut self, common: &mut Common) -> Result<[Duration; 2], Error> {
        let Common { q, k, v, dy, y, grads: [dq, dk, dv] } = common;
        let mut extras = AuxTensors::default();
        self.extras.iter().for_each(|(extra, values)| extras.set(*extra, &values[..]));
        let inputs = Inputs::new(&*q, &*k, &*v).with_aux(extras);
        let mut dextras = AuxTensors::default();
        self.gradients.iter_mut().for_each(|(extra, values)| dextras.set(*extra, &mut values[..]));
        let mut grads = Grads::new(dq, dk, dv).with_aux(dextras);
        let (result, infer) = timed(|| self.engine.infer(&inputs, y).map(drop));
        result?;
        let (saved, forward) = timed(|| self.engine.forward(&inputs, y));
        let saved = saved?;
        let (result, backward) = timed(|| self.engine.backward(&inputs, &saved, dy, &mut grads));
        result?;
        Ok([infer.min(forward), forward + backward])
    }
}
