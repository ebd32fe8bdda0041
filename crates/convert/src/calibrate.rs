//! What each kv head sees in text: the moments of its keys and queries, the range of its keys, how far it looks back. One pass, context by context; what
//! was gathered can be kept in a file between contexts.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use termwise_attention::{Rope, View};
use termwise_base::files::write_whole;
use termwise_base::rng::Rng;
use termwise_llama::{Model, Observed, Options};

use crate::atlas::HeadSums;
use crate::journal::digest;
use crate::kinds::{SINKS, is_convertible};
use crate::{Error, Tell};

/// Keys that are near in the calibration: where far keys begin.
pub const NEAR: usize = 64;
/// Sampled queries of each head and context.
pub const QUERIES: usize = 128;

/// Sums over the keys and queries of one kv head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moments {
    /// Keys.
    pub keys: f64,
    /// Their spread around the mean of their context, [d, d].
    pub key_spread: Vec<f64>,
    /// Scaled queries by the square of their far mass, [d, d].
    pub queries: Vec<f64>,
    /// The least of keys after RoPE by channel, sinks aside.
    pub low: Vec<f32>,
    /// The largest.
    pub high: Vec<f32>,
    /// The least of keys before RoPE by channel, sinks aside.
    pub low_before_rope: Vec<f32>,
    /// The largest.
    pub high_before_rope: Vec<f32>,
    /// The greatest length of each pair of channels that RoPE rotates, [d/2]; empty without RoPE.
    pub radius: Vec<f32>,
}

/// All that one pass over the text gathers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gathered {
    /// Of the model and the contexts.
    pub identity: String,
    /// Contexts that are in it.
    pub contexts: usize,
    /// By layer and kv head.
    pub moments: Vec<Moments>,
    /// By layer and head.
    pub heads: Vec<HeadSums>,
}

/// The queries of a context that are looked at: the same ones in every pass and head, one of each part of the context.
pub fn sampled(context: usize, length: usize, count: usize) -> Vec<usize> {
    let mut rng = Rng::new(0x5eed ^ (context as u64) << 20);
    let count = count.min(length);
    let bound = |i: usize| i * length / count.max(1);
    (0..count).map(|i| bound(i) + rng.below((bound(i + 1) - bound(i)).max(1))).collect()
}

/// A model by its weights and configuration.
pub fn identity(model: &Model) -> String {
    let mut hasher = blake3::Hasher::new();
    for values in model.params.values().chunks(1 << 14) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        hasher.update(&bytes);
    }
    hasher.update(format!("{:?}", model.config).as_bytes());
    hasher.finalize().to_hex()[..24].to_owned()
}

/// Runs the model over the contexts and shows every layer to `look`; stops between contexts once that is asked for.
pub fn pass(
    model: &Model,
    contexts: &[Vec<u32>],
    stop: &AtomicBool,
    tell: Tell,
    what: &str,
    look: &mut dyn FnMut(usize, &Observed) -> Result<(), Error>,
) -> Result<(), Error> {
    let layers = model.config.num_hidden_layers as u64;
    for (index, ids) in contexts.iter().enumerate() {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Stopped);
        }
        let mut session = model.session(1, ids.len(), Options { forward_only: true, ..Options::default() })?;
        let mut failed = Ok(());
        session.observe(&model.params, ids, None, &mut |seen: Observed| {
            if failed.is_ok() {
                failed = look(index, &seen);
                tell(index as u64 * layers + seen.layer as u64 + 1, contexts.len() as u64 * layers, what);
            }
        })?;
        failed?;
    }
    Ok(())
}

/// One head of the only batch row.
pub fn view(seen: &Observed, head: usize) -> Result<View, Error> {
    Ok(View::new(seen.attention, seen.shape.batch, seen.shape.time, seen.inputs, 0, head)?)
}

/// Gathers over all contexts; goes on from what the file holds of the same model and text.
pub fn gather(model: &Model, contexts: &[Vec<u32>], file: Option<&Path>, stop: &AtomicBool, tell: Tell) -> Result<Gathered, Error> {
    let config = &model.config;
    let (layers, h, g, d) = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim);
    if let Some((layer, variant)) =
        (0..layers).find_map(|layer| Some((layer, config.heads(layer).into_iter().find(|own| !is_convertible(own))?)))
    {
        return Err(Error::Asked(format!(
            "layer {layer} has `{variant}`, and only heads that are softmax over all keys can be converted: convert the original model"
        )));
    }
    let identity = digest(&format!("{} {contexts:?} {NEAR} {QUERIES} {SINKS}", identity(model)));
    let known = file.and_then(|path| serde_json::from_slice::<Gathered>(&std::fs::read(path).ok()?).ok());
    let mut all = known.filter(|known| known.identity == identity).unwrap_or_else(|| Gathered {
        identity,
        contexts: 0,
        moments: vec![Moments::new(d); layers * g],
        heads: vec![HeadSums::default(); layers * h],
    });
    let begun = all.contexts;
    for index in begun..contexts.len() {
        let mut told = |done: u64, of: u64, what: &str| tell(index as u64 * of + done, contexts.len() as u64 * of, what);
        pass(model, &contexts[index..=index], stop, &mut told, "looking at heads", &mut |_, seen| {
            let rows = sampled(index, contexts[index].len(), QUERIES);
            let found: Result<Vec<_>, Error> = (0..g)
                .into_par_iter()
                .map(|kv_head| -> Result<_, Error> {
                    let mut moments = all.moments[seen.layer * g + kv_head].clone();
                    let mut sums = Vec::new();
                    for head in kv_head * (h / g)..(kv_head + 1) * (h / g) {
                        let view = view(seen, head)?;
                        if sums.is_empty() {
                            moments.add_keys(&view, seen.attention.rope().filter(|_| view.variant.rope));
                        }
                        let mut own = all.heads[seen.layer * h + head].clone();
                        for &t in &rows {
                            let far = own.add(&view, t);
                            moments.add_query(&view.q[t * d..][..d], far);
                        }
                        sums.push(own);
                    }
                    Ok((kv_head, moments, sums))
                })
                .collect();
            for (kv_head, moments, sums) in found? {
                all.moments[seen.layer * g + kv_head] = moments;
                let first = seen.layer * h + kv_head * (h / g);
                all.heads[first..first + sums.len()].clone_from_slice(&sums);
            }
            Ok(())
        })?;
        all.contexts = index + 1;
        if let Some(path) = file {
            write_whole(path, &serde_json::to_vec(&all).unwrap_or_default())?;
        }
    }
    Ok(all)
}

impl Moments {
    fn new(d: usize) -> Moments {
        let (least, most) = (vec![f32::INFINITY; d], vec![f32::NEG_INFINITY; d]);
        Moments {
            keys: 0.0,
            key_spread: vec![0.0; d * d],
            queries: vec![0.0; d * d],
            low: least.clone(),
            high: most.clone(),
            low_before_rope: least,
            high_before_rope: most,
            radius: Vec::new(),
        }
    }

    /// The range of each channel of keys after RoPE, up to a position. Where no context of the calibration was so long, slow pairs of channels are rotated further than any
    /// that was seen: the range is then that of all keys before RoPE rotated by all angles up to there, within the greatest length of a pair.
    pub fn ranges(&self, frequencies: &[f64], positions: usize) -> Vec<(f32, f32)> {
        /// Radians between the angles that are tried.
        const STEP: f64 = 0.02;
        let half = self.low.len() / 2;
        let mut ranges: Vec<(f32, f32)> = self.low.iter().copied().zip(self.high.iter().copied()).collect();
        for (i, (frequency, &radius)) in frequencies.iter().zip(&self.radius).enumerate() {
            let last = (frequency * positions.saturating_sub(1) as f64).min(std::f64::consts::TAU);
            let extent = |channel: usize| (f64::from(self.low_before_rope[channel]), f64::from(self.high_before_rope[channel]));
            let of = |factor: f64, (low, high): (f64, f64)| (factor * low).max(factor * high);
            for step in 0..=(last / STEP).ceil() as usize {
                let (sin, cos) = (step as f64 * STEP).min(last).sin_cos();
                let (a, b) = (extent(i), extent(i + half));
                // Of a·cos − b·sin and b·cos + a·sin; the least is the largest of the opposite, with its sign.
                for (channel, (own, x), (other, y)) in [(i, (cos, a), (-sin, b)), (i + half, (cos, b), (sin, a))] {
                    let (low, high) = &mut ranges[channel];
                    *high = high.max(((of(own, x) + of(other, y)) as f32).min(radius));
                    *low = low.min((-(of(-own, x) + of(-other, y)) as f32).max(-radius));
                }
            }
        }
        ranges
    }

    fn add_keys(&mut self, view: &View, rope: Option<&Rope>) {
        let d = view.d;
        let first = SINKS.min(view.length);
        let keys = &view.k[first * d..];
        self.add_ranges(first, keys, d, rope.map_or(&[], Rope::frequencies));
        let count = (keys.len() / d).max(1) as f64;
        let mut mean = vec![0.0; d];
        keys.chunks_exact(d).for_each(|k| mean.iter_mut().zip(k).for_each(|(mean, k)| *mean += k / count));
        for k in keys.chunks_exact(d) {
            let centred: Vec<f64> = k.iter().zip(&mean).map(|(k, mean)| k - mean).collect();
            for (row, x) in self.key_spread.chunks_exact_mut(d).zip(&centred) {
                row.iter_mut().zip(&centred).for_each(|(to, y)| *to += x * y);
            }
        }
        self.keys += count;
    }

    /// The ranges of keys after and before RoPE, the first of which has this position.
    fn add_ranges(&mut self, first: usize, keys: &[f64], d: usize, frequencies: &[f64]) {
        self.radius.resize(frequencies.len(), 0.0);
        for (position, k) in (first..).zip(keys.chunks_exact(d)) {
            for ((low, high), &k) in self.low.iter_mut().zip(&mut self.high).zip(k) {
                (*low, *high) = (low.min(k as f32), high.max(k as f32));
            }
            let mut before = k.to_vec();
            for (i, frequency) in frequencies.iter().enumerate() {
                let ((sin, cos), (a, b)) = ((position as f64 * frequency).sin_cos(), (k[i], k[i + d / 2]));
                (before[i], before[i + d / 2]) = (a * cos + b * sin, b * cos - a * sin);
                self.radius[i] = self.radius[i].max(a.hypot(b) as f32);
            }
            for ((low, high), &k) in self.low_before_rope.iter_mut().zip(&mut self.high_before_rope).zip(&before) {
                (*low, *high) = (low.min(k as f32), high.max(k as f32));
            }
        }
    }

    fn add_query(&mut self, q: &[f64], far_mass: f64) {
        let weight = far_mass * far_mass;
        for (row, x) in self.queries.chunks_exact_mut(q.len()).zip(q) {
            row.iter_mut().zip(q).for_each(|(to, y)| *to += weight * x * y);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys whose slow pair is long and hardly rotated within what is seen: beyond it the ranges that were seen do not hold, and those up to there do.
    #[test]
    fn ranges_hold_keys_that_are_rotated_further_than_any_that_was_seen() {
        let (frequencies, seen, beyond) = ([0.9, 0.002], 200, 1000);
        let mut rng = Rng::new(5);
        let mut key = |position: usize| -> Vec<f64> {
            let plain: Vec<f64> = [0.0, 4.0, 0.0, 1.0].iter().map(|middle| middle + 2.0 * rng.unit() - 1.0).collect();
            let rotated = |i: usize| {
                let (sin, cos) = (position as f64 * frequencies[i]).sin_cos();
                (plain[i] * cos - plain[i + 2] * sin, plain[i + 2] * cos + plain[i] * sin)
            };
            let ((a, c), (b, d)) = (rotated(0), rotated(1));
            vec![a, b, c, d]
        };
        let mut moments = Moments::new(4);
        let keys: Vec<f64> = (0..seen).flat_map(&mut key).collect();
        moments.add_ranges(0, &keys, 4, &frequencies);
        let outside = |ranges: &[(f32, f32)], key: &[f64], by: f32| {
            key.iter().zip(ranges).any(|(&x, (low, high))| (x as f32) < low - by * (high - low) || (x as f32) > high + by * (high - low))
        };
        let [short, long] = [seen, beyond].map(|positions| moments.ranges(&frequencies, positions));
        let later: Vec<Vec<f64>> = (seen..beyond).map(&mut key).collect();
        let count = |ranges: &[(f32, f32)]| later.iter().filter(|key| outside(ranges, key, 0.025)).count();
        assert!(count(&short) > 400, "{} of 800 keys leave the range of what was seen", count(&short));
        assert!(count(&long) < 8, "{} of 800 keys leave the range that was made for them", count(&long));
        // No wider than it must be: a pair is never longer than the longest, and the fast one went through all angles already.
        for (i, &(low, high)) in long.iter().enumerate() {
            assert!(high <= moments.radius[i % 2] && low >= -moments.radius[i % 2], "{i}: {low} to {high}");
        }
        assert!((long[0].1 - short[0].1).abs() < 0.2 && (long[0].0 - short[0].0).abs() < 0.2, "{:?} {:?}", short[0], long[0]);
    }
}
