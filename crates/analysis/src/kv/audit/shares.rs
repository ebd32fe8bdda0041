//! Contribution of each part of the memory to a head's output.
//!
//! ```text
//! y = (U_sinks + U_window + U_rest)/D            one denominator; each U is linear in the values, and its weights do not depend on them
//! ```
//!
//! With all values but those of the sinks set to zero, the engine returns U_sinks/D. With all but those of one position's window, it returns U_window/D.
//! The rest is the contribution of the heavy hitters, and in the original that of all other keys.
//!
//! Many heads of a trained model have no use for some keys: a small share is a fault only if the original has a large one.

use serde::{Deserialize, Serialize};
use termwise_attention::{Attention, FusedOptions, Inputs, Scratch, Variant};
use termwise_model::{Config, Model, ObservedAttention, SessionOptions};

use super::Check;
use crate::kv::Error;

/// Number of evaluated positions, in the second half of the text.
const POSITIONS: usize = 6;
/// Tokens of the text.
const MAX_TOKENS: usize = 768;
/// A part with a smaller share of the output is idle.
const IDLE_SHARE: f64 = 1e-3;
/// Keys with at least this share of the original's output are used by it.
const USED_SHARE: f64 = 1e-2;

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

/// The parts of one layer, per head, divided as the memory of these heads divides the keys.
fn of_layer(seen: &ObservedAttention, heads: &[Variant], scratch: &Scratch) -> Result<Vec<Share>, Error> {
    let shape = seen.shape;
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
            let rest: Vec<f64> = (0..e).map(|c| all[c] - from_sinks[c] - from_window[c]).collect();
            let parts = [norm(&from_sinks), norm(&from_window), norm(&rest)];
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

/// By layer and head, of the model's own inputs. `memory` is the configuration whose heads divide the keys: the model's own, or for the original that of the
/// converted model.
pub fn measure(model: &Model, memory: &Config, ids: &[u32]) -> Result<Vec<Share>, Error> {
    let ids = &ids[..MAX_TOKENS.min(ids.len())];
    let mut session = model.session(1, ids.len(), SessionOptions::default().forward_only(true))?;
    let (mut shares, mut failed, scratch) = (Vec::new(), Ok(()), Scratch::default());
    session.observe(&model.params, ids, None, &mut |seen: ObservedAttention| {
        let heads = if seen.layer < memory.num_hidden_layers { memory.heads(seen.layer) } else { Vec::new() };
        let windowed = heads.len() == seen.shape.heads && heads.iter().all(|head| head.window.is_some());
        if failed.is_ok() && windowed {
            match of_layer(&seen, &heads, &scratch) {
                Ok(found) => shares.extend(found),
                Err(error) => failed = Err(error),
            }
        }
    })?;
    failed.map(|()| shares)
}

/// Names of the parts, in the order of [`Share`]'s fields.
pub const PARTS: [&str; 3] = ["sinks", "windows", "heavy hitters"];

/// A part of the memory in the heads that have it.
pub struct Contribution {
    name: &'static str,
    mean: f64,
    heads: usize,
    /// Heads whose original takes at least 1 % of its output from these keys.
    used: usize,
    /// Those of them that take less than 0.1 %.
    idle: usize,
}

impl Contribution {
    /// One entry for each part that some head has.
    pub fn all(shares: &[Share], original: &[Share]) -> Vec<Contribution> {
        let parts = |share: &Share| [share.sinks, share.window, share.heavy_hitters];
        let one = |(part, name): (usize, &'static str)| {
            let of = |share: &Share| parts(share)[part];
            let own: Vec<(&Share, f64)> = shares.iter().filter_map(|share| Some((share, of(share)?))).collect();
            let used = |share: &Share| {
                let same = original.iter().find(|other| (other.layer, other.head) == (share.layer, share.head));
                same.and_then(of).is_some_and(|share| share >= USED_SHARE)
            };
            let in_use: Vec<f64> = own.iter().filter(|(share, _)| used(share)).map(|(_, share)| *share).collect();
            let idle = in_use.iter().filter(|share| **share < IDLE_SHARE).count();
            let mean = own.iter().map(|(_, share)| share).sum::<f64>() / own.len().max(1) as f64;
            Contribution { name, mean, heads: own.len(), used: in_use.len(), idle }
        };
        PARTS.into_iter().enumerate().map(one).filter(|part| part.heads > 0).collect()
    }

    /// The verdict; `None` if the original does not use these keys.
    pub fn check(&self) -> Check {
        let Contribution { name, mean, heads, used, idle } = self;
        let found = format!(
            "{:.1} % of the outputs of {heads} heads on average; of {used} heads whose original uses these keys, {idle} take less than 0.1 %",
            100.0 * mean
        );
        // The original also attends to evicted keys, so few heavy hitters may have a small share in some heads.
        let (rule, least) = if *name == PARTS[2] {
            (
                "of the heads whose original takes 1 % or more of its output from keys outside the window, at least one takes 0.1 % or more from them",
                1,
            )
        } else {
            let rule =
                "of the heads whose original takes 1 % or more of its output from these keys, at least half take 0.1 % or more from them";
            (rule, used.div_ceil(2))
        };
        Check::new(&format!("contribution of {name}"), rule, found, (*used > 0).then_some(used - idle >= least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_only_the_original_uses_fail() {
        let share = |head: usize, parts: [f64; 3]| {
            let [sinks, window, heavy_hitters] = parts.map(Some);
            Share { layer: 0, head, sinks, window, heavy_hitters }
        };
        let of = |heads: [[f64; 3]; 4]| -> Vec<Share> { heads.into_iter().enumerate().map(|(head, parts)| share(head, parts)).collect() };
        let used = of([[0.3, 0.4, 0.3]; 4]);
        let verdicts = |own: &[Share], original: &[Share]| -> Vec<Option<bool>> {
            Contribution::all(own, original).iter().map(|part| part.check().passed).collect()
        };
        assert_eq!(verdicts(&used, &used), [Some(true); 3]);
        for part in 0..3 {
            let least = if part == 2 { 4 } else { 3 };
            let mut faulty = [[0.3, 0.4, 0.3]; 4];
            faulty[..least - 1].iter_mut().for_each(|parts| parts[part] = 1e-5);
            assert_eq!(verdicts(&of(faulty), &used), [Some(true); 3]);
            faulty[least - 1][part] = 1e-5;
            let mut expected = [Some(true); 3];
            expected[part] = Some(false);
            assert_eq!(verdicts(&of(faulty), &used), expected);
            // The original does not use these keys either.
            faulty[3][part] = 1e-5;
            expected[part] = None;
            assert_eq!(verdicts(&of(faulty), &of(faulty)), expected);
        }
    }
}
