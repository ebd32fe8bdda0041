//! Means of keys that move: μ_t of the keys that position t sees, or of those that are far from it.
//!
//! Forward a running sum over keys; backward, what each μ_t is felt by goes to all keys that it is the mean of: a running sum over later positions.

use rayon::prelude::*;

use crate::fused::plan::Layout;
use crate::parts::distance::Distance;
use crate::state::State;
use crate::state::memory::{GroupMemory, Store};
use crate::{Buffer, Inputs};

/// The key that joins the mean at position t, if one does, and how many it then has.
fn joining(distance: Distance, t: usize) -> (Option<usize>, usize) {
    if distance == Distance::ALL {
        return (Some(t), t + 1);
    }
    let far = distance.far(t);
    let new = (t >= distance.window).then(|| t - distance.window).filter(|key| far.contains(key));
    (new, far.len())
}

/// μ_t of every class with a moving mean [K, T, dp], from its transposed keys and what the call continues from.
pub fn forward(l: &Layout, inputs: &Inputs<f32>, kt: &[f32], state: Option<&State>, means: &mut Buffer) {
    let s = l.shape;
    means.par_chunks_exact_mut(s.time * l.dp).enumerate().for_each(|(kv, means)| {
        let (class, pair) = (kv / (s.batch * s.kv_heads), kv % (s.batch * s.kv_heads));
        let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
        let Some(distance) = l.classes[class].running else { return };
        let before = state.and_then(|state| Some((state.position(b)?, state.follower(b, g, class)?)));
        let first = before.map_or(0, |(position, _)| position);
        let (mut sum, mut key) = ([0.0f64; 512], [0.0f32; 528]);
        let sum = &mut sum[..l.classes[class].width - 1];
        if let Some((_, store)) = before {
            sum.copy_from_slice(&store.sum);
        }
        for (t, mean) in means.chunks_exact_mut(l.dp).take(inputs.length(b, &s)).enumerate() {
            let (new, count) = joining(distance, first + t);
            match (new.map(|at| at.checked_sub(first).ok_or(at)), before) {
                (Some(Ok(own)), _) => {
                    let tile = &kt[(kv * l.tiles + own / l.tile) * l.width * l.pitch..];
                    sum.iter_mut().enumerate().for_each(|(i, sum)| *sum += tile[i * l.pitch + own % l.tile] as f64);
                }
                (Some(Err(at)), Some((_, Store { memory: GroupMemory::Cache(cache), .. }))) => {
                    cache.far_key(at, &mut key[..l.classes[class].width]);
                    sum.iter_mut().zip(&key).for_each(|(sum, &k)| *sum += k as f64);
                }
                _ => {}
            }
            mean.iter_mut().zip(&*sum).for_each(|(mean, sum)| *mean = (sum / count.max(1) as f64) as f32);
        }
    });
}

/// Adds to the gradients of keys [K, Tp, dp] what the means give, whose gradients lie in the places of queries [passes, N, T, dp].
pub fn backward(l: &Layout, inputs: &Inputs<f32>, dmeans: &[f32], dk: &mut Buffer) {
    let s = l.shape;
    dk.par_chunks_exact_mut(l.tp() * l.dp).enumerate().for_each(|(kv, dk)| {
        let (class, pair) = (kv / (s.batch * s.kv_heads), kv % (s.batch * s.kv_heads));
        let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
        let Some(distance) = l.classes[class].running else { return };
        let places = || {
            let passes = (g * s.group()..(g + 1) * s.group()).flat_map(|h| l.passes_of(h).map(move |head| (h, head)));
            passes.filter(|(_, head)| head.class == class).map(|(h, head)| head.far as usize * l.head_count() + b * s.heads + h)
        };
        let mut sum = [0.0f64; 512];
        let sum = &mut sum[..l.classes[class].width - 1];
        for t in (0..inputs.length(b, &s)).rev() {
            let (new, count) = joining(distance, t);
            let share = 1.0 / count.max(1) as f64;
            for n in places() {
                let row = &dmeans[(n * s.time + t) * l.dp..];
                sum.iter_mut().zip(row).for_each(|(sum, &d)| *sum += d as f64 * share);
            }
            if let Some(key) = new {
                dk[key * l.dp..].iter_mut().zip(&*sum).for_each(|(dk, sum)| *dk += *sum as f32);
            }
        }
    });
}
