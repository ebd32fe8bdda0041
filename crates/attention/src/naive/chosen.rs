//! Which keys each position sees with the near kernel where some are chosen by what they received: the policy as sets of positions, in float64.

use crate::Real;
use crate::naive::class::Class;
use crate::parts::chosen::Chosen;
use crate::parts::distance::Distance;

/// The near keys of each position, ascending, for heads that share them.
pub(crate) fn held<R: Real>(heads: &[Class<R>], length: usize, distance: Distance, chosen: Chosen) -> Vec<Vec<usize>> {
    let mut received = vec![0.0f64; length];
    let (mut kept, mut all): (Vec<usize>, Vec<Vec<usize>>) = (Vec::new(), Vec::new());
    for t in 0..length {
        // The key that leaves the window at this position, unless it is a sink.
        if let Some(leaving) = t.checked_sub(distance.window).filter(|&s| s >= distance.sinks) {
            kept.push(leaving);
            if kept.len() > chosen.keys {
                // Places are taken in the order in which keys came, and kept by those who stay.
                let r: Vec<f64> = kept.iter().map(|&s| received[s]).collect();
                let loser = Chosen::loser(&r);
                kept.swap_remove(loser);
            }
        }
        let mut near: Vec<usize> = distance.near(t).chain(kept.iter().copied()).collect();
        near.sort_unstable();
        let fade = f64::from(chosen.factor());
        near.iter().for_each(|&s| received[s] *= fade);
        for class in heads {
            let scores: Vec<f64> = near.iter().map(|&s| class.score(t, s, R::zero()).argument.wide()).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|x| (x - most).exp()).collect();
            let sum: f64 = weights.iter().sum();
            near.iter().zip(&weights).for_each(|(&s, w)| received[s] += w / sum);
        }
        all.push(near);
    }
    all
}
