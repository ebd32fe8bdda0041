//! What each part of the memory gives to a head's output.
//!
//! ```text
//! y = (U_sinks + U_window + U_chosen)/D          one denominator; each U is linear in the values, and its weights do not depend on them
//! ```
//!
//! With all values but those of the sinks set to zero the engine gives U_sinks/D, with all but those of one position's window U_window/D. The rest is the
//! contribution of the chosen keys.

use serde::{Deserialize, Serialize};
use termwise_attention::{Attention, FusedOptions, Inputs, Scratch, Variant};
use termwise_model::{Model, ObservedAttention, SessionOptions};

use super::Check;
use crate::kv::Error;

/// Positions that are looked at, in the second half of the text.
const POSITIONS: usize = 6;
/// Tokens of the text.
const LONG: usize = 768;
/// A part that gives less is idle.
const IDLE: f64 = 1e-3;

/// Shares of the sum of the norms of a head's parts, on average over positions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// From 0.
    pub layer: usize,
    /// From 0.
    pub head: usize,
    /// Of the first keys; absent where the head keeps none apart.
    pub sinks: Option<f64>,
    /// Of the last keys.
    pub window: Option<f64>,
    /// Of chosen keys.
    pub chosen: Option<f64>,
}

/// One layer with its inputs, whose values are exchanged.
struct Layered<'a> {
    seen: &'a ObservedAttention<'a>,
    scratch: &'a Scratch,
}

impl Layered<'_> {
    /// The layer's output with all values set to zero but those for which `keeps` holds of the position and the KV head.
    fn run(&self, keeps: &dyn Fn(usize, usize) -> bool) -> Result<Vec<f32>, Error> {
        let (shape, own, layer) = (self.seen.shape, self.seen.inputs, self.seen.attention);
        let width = shape.kv_heads * shape.e;
        let (values, stride) = (own.v().values(), own.v().stride(width));
        let mut v = vec![0.0f32; shape.time * width];
        for (s, to) in v.chunks_exact_mut(width).enumerate() {
            for (g, to) in to.chunks_exact_mut(shape.e).enumerate().filter(|(g, _)| keeps(s, *g)) {
                to.copy_from_slice(&values[s * stride + g * shape.e..][..shape.e]);
            }
        }
        let mut inputs = Inputs::new(own.q(), own.k(), &v);
        for spec in layer.aux_specs() {
            if let Some(values) = own.get(spec.aux) {
                inputs = inputs.with(spec.aux, values);
            }
        }
        let mut y = vec![0.0f32; self.seen.y.len()];
        layer.fused_with(1, shape.time, FusedOptions::default().scratch(self.scratch))?.infer(&inputs, &mut y)?;
        Ok(y)
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The parts of one layer, by head.
fn of_layer(seen: &ObservedAttention, scratch: &Scratch) -> Result<Vec<Share>, Error> {
    let (shape, heads) = (seen.shape, seen.attention.heads());
    let (time, e, group) = (shape.time, shape.e, shape.group());
    let layered = Layered { seen, scratch };
    // The heads of a KV head have one memory; where they do not, the first says which keys are in the window.
    let distance = |g: usize| heads[g * group].distance();
    let sinks = |s: usize, g: usize| s < distance(g).sinks;
    let y_sinks = layered.run(&sinks)?;
    let row = |y: &[f32], t: usize, h: usize| -> Vec<f64> { y[(t * shape.heads + h) * e..][..e].iter().map(|x| f64::from(*x)).collect() };
    let mut sums = vec![[0.0f64; 3]; heads.len()];
    for i in 0..POSITIONS {
        let t = time / 2 + (2 * i + 1) * (time - time / 2) / (2 * POSITIONS);
        let window = |s: usize, g: usize| s >= distance(g).sinks && s <= t && t - s < distance(g).window;
        let y_window = layered.run(&window)?;
        for (h, sums) in sums.iter_mut().enumerate() {
            let (from_sinks, from_window, all) = (row(&y_sinks, t, h), row(&y_window, t, h), row(seen.y, t, h));
            let chosen: Vec<f64> = (0..e).map(|c| all[c] - from_sinks[c] - from_window[c]).collect();
            let parts = [norm(&from_sinks), norm(&from_window), norm(&chosen)];
            let total: f64 = (0..3).filter(|part| has(&heads[h], *part)).map(|part| parts[part]).sum();
            sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part / total.max(f64::MIN_POSITIVE) / POSITIONS as f64);
        }
    }
    // A text that is no longer than the window has nothing beyond it.
    let reached = |h: usize, part: usize| has(&heads[h], part) && (part < 2 || distance(h / group).window < time);
    let share = |h: usize, part: usize| reached(h, part).then_some(sums[h][part]);
    let found = (0..heads.len()).map(|head| Share {
        layer: seen.layer,
        head,
        sinks: share(head, 0),
        window: share(head, 1),
        chosen: share(head, 2),
    });
    Ok(found.collect())
}

/// Whether a head has sinks, a window, chosen keys.
fn has(variant: &Variant, part: usize) -> bool {
    match part {
        0 => variant.sinks.is_some(),
        1 => variant.window.is_some(),
        _ => variant.chosen.is_some(),
    }
}

/// By layer and head, of the model's own inputs.
pub fn measure(model: &Model, ids: &[u32]) -> Result<Vec<Share>, Error> {
    let ids = &ids[..LONG.min(ids.len())];
    let mut session = model.session(1, ids.len(), SessionOptions::default().forward_only(true))?;
    let (mut shares, mut failed, scratch) = (Vec::new(), Ok(()), Scratch::default());
    session.observe(&model.params, ids, None, &mut |seen: ObservedAttention| {
        let windowed = seen.attention.heads().iter().all(|head| head.window.is_some());
        if failed.is_ok() && windowed {
            match of_layer(&seen, &scratch) {
                Ok(found) => shares.extend(found),
                Err(error) => failed = Err(error),
            }
        }
    })?;
    failed.map(|()| shares)
}

/// A part that most of its heads make nothing of is there for nothing.
pub fn checks(shares: &[Share]) -> Vec<Check> {
    let of = |part: usize| shares.iter().filter_map(move |share| [share.sinks, share.window, share.chosen][part]);
    let mut checks = Vec::new();
    for (part, name) in ["sinks", "windows", "heavy hitters"].into_iter().enumerate() {
        let own: Vec<f64> = of(part).collect();
        if own.is_empty() {
            continue;
        }
        let idle = own.iter().filter(|share| **share < IDLE).count();
        let mean = own.iter().sum::<f64>() / own.len() as f64;
        let found = format!("{:.1} % of the outputs of {} heads on average; below 0.1 % in {idle}", 100.0 * mean, own.len());
        let rule = "at least half of the heads that have them take 0.1 % or more of their output from them";
        checks.push(Check::new(&format!("contribution of {name}"), rule, found, Some(2 * idle <= own.len())));
    }
    checks
}
