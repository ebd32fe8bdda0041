//! The near keys of each position under heavy-hitter eviction, in float64.
//!
//! A key that leaves the window joins the heavy hitters. If there are too many, the one with the least accumulated attention is evicted.

use crate::Real;
use crate::naive::branch::Branch;
use crate::parts::distance::Distance;
use crate::parts::heavy_hitters::HeavyHitters;

/// The near keys of each position in ascending order, for heads that share a cache.
pub(crate) fn near_keys<R: Real>(
    branches: &[Branch<R>],
    length: usize,
    distance: Distance,
    heavy_hitters: HeavyHitters,
) -> Vec<Vec<usize>> {
    let mut accumulated = vec![0.0f64; length];
    let (mut kept, mut all): (Vec<usize>, Vec<Vec<usize>>) = (Vec::new(), Vec::new());
    for t in 0..length {
        // The key that leaves the window at this position, unless it is a sink.
        if let Some(leaving) = t.checked_sub(distance.window).filter(|&s| s >= distance.sinks) {
            kept.push(leaving);
            if kept.len() > heavy_hitters.keys {
                // The evicted entry is replaced by the last one, as in the cache.
                let attention: Vec<f64> = kept.iter().map(|&s| accumulated[s]).collect();
                kept.swap_remove(HeavyHitters::evicted(&attention));
            }
        }
        let mut near: Vec<usize> = distance.near(t).chain(kept.iter().copied()).collect();
        near.sort_unstable();
        let fade = f64::from(heavy_hitters.factor());
        near.iter().for_each(|&s| accumulated[s] *= fade);
        for branch in branches {
            let scores: Vec<f64> = near.iter().map(|&s| branch.score(t, s, R::zero()).argument.wide()).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|x| (x - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            near.iter().zip(&weights).for_each(|(&s, w)| accumulated[s] += w / sum);
        }
        all.push(near);
    }
    all
}
