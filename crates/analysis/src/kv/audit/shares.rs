//! Contribution of each part of the memory to a head's output.
//!
//! ```text
//! y = (U_sinks + U_window + U_chosen)/D          one denominator; each U is linear in the values, and its weights do not depend on them
//! ```
//!
//! With all values but those of the sinks set to zero, the engine returns U_sinks/D; with all but those of one position's window, U_window/D. The rest is
//! the contribution of the heavy hitters.

use serde::{Deserialize, Serialize};
use termwise_attention::{Attention, FusedOptions, Inputs, Scratch, Variant};
use termwise_model::{Model, ObservedAttention, SessionOptions};

use super::{Check, MIN_KL};
use crate::kv::Error;

/// Number of evaluated positions, in the second half of the text.
const POSITIONS: usize = 6;
/// Tokens of the text.
const MAX_TOKENS: usize = 768;
/// A part with a smaller contribution is idle.
const IDLE_SHARE: f64 = 1e-3;

/// Shares of the sum of the norms of a head's parts, on average over positions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// From 0.
    pub layer: usize,
    /// From 0.
    pub head: usize,
    /// Of sinks; `None` if the head has no sinks.
    pub sinks: Option<f64>,
    /// Of the window.
    pub window: Option<f64>,
    /// Of heavy hitters.
    #[serde(alias = "chosen")]
    pub heavy_hitters: Option<f64>,
}

/// One layer with its inputs; the values are replaced.
struct Layered<'a> {
    seen: &'a ObservedAttention<'a>,
    scratch: &'a Scratch,
}

impl Layered<'_> {
    /// The layer's output with all values set to zero except those for which `keeps` returns true, given position and KV head.
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

/// The parts of one layer, per head.
fn of_layer(seen: &ObservedAttention, scratch: &Scratch) -> Result<Vec<Share>, Error> {
    let (shape, heads) = (seen.shape, seen.attention.heads());
    let (time, e, group) = (shape.time, shape.e, shape.group());
    let layered = Layered { seen, scratch };
    // Heads of one KV head have the same memory; otherwise the first head defines the window.
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
    // There are no keys beyond the window in a text that is not longer.
    let reached = |h: usize, part: usize| has(&heads[h], part) && (part < 2 || distance(h / group).window < time);
    let share = |h: usize, part: usize| reached(h, part).then_some(sums[h][part]);
    let found = (0..heads.len()).map(|head| Share {
        layer: seen.layer,
        head,
        sinks: share(head, 0),
        window: share(head, 1),
        heavy_hitters: share(head, 2),
    });
    Ok(found.collect())
}

/// Whether a head has sinks, a window, heavy hitters.
fn has(variant: &Variant, part: usize) -> bool {
    match part {
        0 => variant.sinks.is_some(),
        1 => variant.window.is_some(),
        _ => variant.heavy_hitters.is_some(),
    }
}

/// By layer and head, of the model's own inputs.
pub fn measure(model: &Model, ids: &[u32]) -> Result<Vec<Share>, Error> {
    let ids = &ids[..MAX_TOKENS.min(ids.len())];
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

/// Names of the parts, in the order of [`Share`]'s fields.
pub const PARTS: [&str; 3] = ["sinks", "windows", "heavy hitters"];

/// A part and the heads that take less than 0.1 % of their output from it.
pub struct Contribution {
    name: &'static str,
    mean: f64,
    heads: usize,
    /// Layers and heads.
    pub idle: Vec<(usize, usize)>,
}

/// Effect of removing a part from the heads that take less than 0.1 % of their output from it.
pub struct IdleRemoval {
    /// KL(original ‖ converted), nats per token.
    pub kl: f64,
    /// KL(original ‖ without the part in these heads).
    pub without: f64,
    /// KL(converted ‖ without the part in these heads).
    pub change: f64,
}

impl Contribution {
    /// One entry for each part that some head has.
    pub fn all(shares: &[Share]) -> Vec<Contribution> {
        let of = |part: usize| shares.iter().filter_map(move |share| Some((share, [share.sinks, share.window, share.heavy_hitters][part]?)));
        let parts = PARTS.into_iter().enumerate().filter(|(part, _)| of(*part).next().is_some());
        let one = |(part, name)| {
            let heads = of(part).count();
            let mean = of(part).map(|(_, share)| share).sum::<f64>() / heads as f64;
            let idle = of(part).filter(|(_, share)| *share < IDLE_SHARE).map(|(share, _)| (share.layer, share.head)).collect();
            Contribution { name, mean, heads, idle }
        };
        parts.map(one).collect()
    }

    /// The name of the part.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether most heads take less than 0.1 % of their output from it. Keys also act through the denominator of the softmax, which the share does not
    /// contain, so the removal decides.
    pub fn needs_removal(&self) -> bool {
        2 * self.idle.len() > self.heads
    }

    /// The verdict; the removal is measured only if most heads are idle.
    pub fn check(&self, removal: Option<&IdleRemoval>) -> Check {
        let Contribution { name, mean, heads, idle } = self;
        let mut found = format!("{:.1} % of the outputs of {heads} heads on average; below 0.1 % in {}", 100.0 * mean, idle.len());
        if let Some(removal) = removal {
            found += &format!("; without {name} in these, the KL to the original changes from {:.5} to {:.5}", removal.kl, removal.without);
        }
        let rule = "at least half of the heads that have them take 0.1 % or more of their output from them, or the KL to the original rises without them in the other heads";
        let effective = removal.is_some_and(|removal| removal.change > MIN_KL && removal.without > removal.kl);
        Check::new(&format!("contribution of {name}"), rule, found, Some(!self.needs_removal() || effective))
    }
}
