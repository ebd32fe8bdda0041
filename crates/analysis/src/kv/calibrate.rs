//! Statistics of each KV head on text: the ranges of its keys, and how far back its queries look. One pass, context by context; the
//! sums can be kept in a file between contexts.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use termwise_attention::{Rope, View};
use termwise_base::files::write_whole;
use termwise_base::rng::Rng;
use termwise_model::{Model, ObservedAttention, SessionOptions};

use crate::kv::atlas::HeadSums;
use crate::kv::journal::{Sealed, digest, seal, unseal};
use crate::kv::kinds::{SINKS, is_convertible};
use crate::kv::{Error, Tell};

/// Keys that are near in the calibration: where far keys begin.
pub const NEAR: usize = 64;
/// Sampled queries of each head and context.
pub const QUERIES: usize = 128;

/// Ranges of the keys of one KV head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeyRanges {
    /// The least key after RoPE by channel, sinks excluded.
    pub low: Vec<f32>,
    /// The largest.
    pub high: Vec<f32>,
    /// The least key before RoPE by channel, sinks excluded.
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
    /// By layer and KV head.
    pub keys: Vec<KeyRanges>,
    /// By layer and head.
    pub heads: Vec<HeadSums>,
}

impl Gathered {
    /// The statistics in a file; `None` if there is no such file, or another build wrote it.
    fn read(path: &Path) -> Result<Option<Gathered>, Error> {
        let Ok(text) = std::fs::read_to_string(path) else { return Ok(None) };
        match unseal(&text) {
            Sealed::Whole(object) => Ok(serde_json::from_str(&object).ok()),
            Sealed::Broken => Err(Error::Asked(format!(
                "{} was edited: its checksum is missing or does not match; remove the file to calibrate again",
                path.display()
            ))),
        }
    }
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
    look: &mut dyn FnMut(usize, &ObservedAttention) -> Result<(), Error>,
) -> Result<(), Error> {
    let layers = model.config.num_hidden_layers as u64;
    for (index, ids) in contexts.iter().enumerate() {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Stopped);
        }
        let mut session = model.session(1, ids.len(), SessionOptions::default().forward_only(true))?;
        let mut failed = Ok(());
        session.observe(&model.params, ids, None, &mut |seen: ObservedAttention| {
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
pub fn view(seen: &ObservedAttention, head: usize) -> Result<View, Error> {
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
    let fits = |known: &Gathered| {
        known.identity == identity
            && known.contexts <= contexts.len()
            && (known.keys.len(), known.heads.len()) == (layers * g, layers * h)
            && known.keys.iter().all(|keys| keys.low.len() == d && keys.high.len() == d)
    };
    let known = file.map(Gathered::read).transpose()?.flatten().filter(fits);
    let mut all = known.unwrap_or_else(|| Gathered {
        identity: identity.clone(),
        contexts: 0,
        keys: vec![KeyRanges::new(d); layers * g],
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
                    let mut keys = all.keys[seen.layer * g + kv_head].clone();
                    let mut sums = Vec::new();
                    for head in kv_head * (h / g)..(kv_head + 1) * (h / g) {
                        let view = view(seen, head)?;
                        if sums.is_empty() {
                            keys.add_view(&view, seen.attention.rope().filter(|_| view.variant.rope));
                        }
                        let mut own = all.heads[seen.layer * h + head].clone();
                        rows.iter().for_each(|&t| own.add(&view, t));
                        sums.push(own);
                    }
                    Ok((kv_head, keys, sums))
                })
                .collect();
            for (kv_head, keys, sums) in found? {
                all.keys[seen.layer * g + kv_head] = keys;
                let first = seen.layer * h + kv_head * (h / g);
                all.heads[first..first + sums.len()].clone_from_slice(&sums);
            }
            Ok(())
        })?;
        all.contexts = index + 1;
        if let Some(path) = file {
            write_whole(path, seal(&serde_json::to_string(&all).unwrap_or_default()).as_bytes())?;
        }
    }
    Ok(all)
}

impl KeyRanges {
    fn new(d: usize) -> KeyRanges {
        let (least, most) = (vec![f32::INFINITY; d], vec![f32::NEG_INFINITY; d]);
        KeyRanges { low: least.clone(), high: most.clone(), low_before_rope: least, high_before_rope: most, radius: Vec::new() }
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

    fn add_view(&mut self, view: &View, rope: Option<&Rope>) {
        let (d, first) = (view.d, SINKS.min(view.length));
        self.add(first, &view.k[first * d..], d, rope.map_or(&[], Rope::frequencies));
    }

    /// The ranges of keys after and before RoPE, the first of which has this position.
    fn add(&mut self, first: usize, keys: &[f64], d: usize, frequencies: &[f64]) {
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
        let mut observed = KeyRanges::new(4);
        let keys: Vec<f64> = (0..seen).flat_map(&mut key).collect();
        observed.add(0, &keys, 4, &frequencies);
        let outside = |ranges: &[(f32, f32)], key: &[f64], by: f32| {
            key.iter().zip(ranges).any(|(&x, (low, high))| (x as f32) < low - by * (high - low) || (x as f32) > high + by * (high - low))
        };
        let [short, long] = [seen, beyond].map(|positions| observed.ranges(&frequencies, positions));
        let later: Vec<Vec<f64>> = (seen..beyond).map(&mut key).collect();
        let count = |ranges: &[(f32, f32)]| later.iter().filter(|key| outside(ranges, key, 0.025)).count();
        assert!(count(&short) > 400, "{} of 800 keys leave the range of what was seen", count(&short));
        assert!(count(&long) < 8, "{} of 800 keys leave the range that was made for them", count(&long));
        // No wider than it must be: a pair is never longer than the longest, and the fast one went through all angles already.
        for (i, &(low, high)) in long.iter().enumerate() {
            assert!(high <= observed.radius[i % 2] && low >= -observed.radius[i % 2], "{i}: {low} to {high}");
        }
        assert!((long[0].1 - short[0].1).abs() < 0.2 && (long[0].0 - short[0].0).abs() < 0.2, "{:?} {:?}", short[0], long[0]);
    }
}
