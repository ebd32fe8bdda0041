//! One kind of memory per KV head under a byte budget: a Lagrange multiplier over the cost of each head and kind.

use crate::kv::kinds::Kind;

/// Candidate kinds of memory of a KV head, with their costs in the order of `kinds`.
pub struct Offer<'a> {
    /// The kinds.
    pub kinds: &'a [Kind],
    /// Their bytes for one KV head.
    pub bytes: &'a [u64],
    /// Costs of each KV head, [units, kinds].
    pub costs: &'a [f64],
}

/// Index of the kind of each KV head. A multiplier minimizes the sum of costs within the bytes, and remaining bytes go to the head with the largest
/// gain per byte. `None` if the smallest kinds do not fit.
pub fn allocate(offer: &Offer, bytes: u64) -> Option<Vec<usize>> {
    let Offer { kinds, bytes: sizes, costs } = offer;
    let n = kinds.len();
    let units = costs.len() / n.max(1);
    let choose = |price: f64| -> Vec<usize> {
        let value = |unit: usize, kind: usize| costs[unit * n + kind] + price * sizes[kind] as f64;
        // Ties: the smallest memory.
        let best = |unit: usize| (0..n).min_by(|&a, &b| value(unit, a).total_cmp(&value(unit, b)).then(sizes[a].cmp(&sizes[b])));
        (0..units).filter_map(best).collect()
    };
    let total = |choice: &[usize]| choice.iter().map(|&kind| sizes[kind]).sum::<u64>();
    let smallest = *sizes.iter().min()?;
    if smallest * units as u64 > bytes {
        return None;
    }
    let (mut low, mut high) = (0.0, 1.0);
    if total(&choose(0.0)) <= bytes {
        return Some(choose(0.0));
    }
    while total(&choose(high)) > bytes && high < 1e30 {
        high *= 4.0;
    }
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        if total(&choose(middle)) <= bytes { high = middle } else { low = middle }
    }
    let mut choice = choose(high);
    if total(&choice) > bytes {
        choice = vec![(0..n).min_by_key(|&kind| sizes[kind])?; units];
    }
    // Between two vertices of the convex hull, a multiplier leaves bytes unused.
    loop {
        let left = bytes - total(&choice);
        let mut best: Option<(f64, usize, usize)> = None;
        for unit in 0..units {
            let own = choice[unit];
            for kind in 0..n {
                let (more, gain) = (sizes[kind].saturating_sub(sizes[own]), costs[unit * n + own] - costs[unit * n + kind]);
                if gain > 0.0 && sizes[kind] <= sizes[own] + left {
                    let rate = gain / more.max(1) as f64;
                    if best.is_none_or(|(known, ..)| rate > known) {
                        best = Some((rate, unit, kind));
                    }
                }
            }
        }
        match best {
            Some((_, unit, kind)) => choice[unit] = kind,
            None => return Some(choice),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use termwise_base::rng::Rng;

    /// Exhaustive search, for few heads.
    fn exhaustive(offer: &Offer, bytes: u64) -> f64 {
        let n = offer.kinds.len();
        let units = offer.costs.len() / n;
        let mut best = f64::INFINITY;
        for code in 0..n.pow(units as u32) {
            let choice: Vec<usize> = (0..units).map(|unit| code / n.pow(unit as u32) % n).collect();
            let size: u64 = choice.iter().map(|&kind| offer.bytes[kind]).sum();
            if size <= bytes {
                best = best.min(choice.iter().enumerate().map(|(unit, kind)| offer.costs[unit * n + kind]).sum());
            }
        }
        best
    }

    #[test]
    fn choices_are_within_bytes_and_near_the_best() {
        let kinds: Vec<Kind> = [8, 16, 32, 64].map(Kind::window).to_vec();
        let bytes: Vec<u64> = kinds.iter().map(|kind| kind.bytes(64)).collect();
        let mut rng = Rng::new(1);
        for round in 0..30 {
            let units = 5;
            let costs: Vec<f64> = (0..units)
                .flat_map(|_| {
                    let scale = rng.unit() * 10.0;
                    [8.0, 16.0, 32.0, 64.0].map(|w: f64| scale / w.powf(0.5 + rng.unit()))
                })
                .collect();
            let offer = Offer { kinds: &kinds, bytes: &bytes, costs: &costs };
            let budget = bytes[0] * units as u64 + rng.below((bytes[3] * units as u64) as usize) as u64;
            let choice = allocate(&offer, budget).expect("the smallest fit");
            let size: u64 = choice.iter().map(|&kind| bytes[kind]).sum();
            let cost: f64 = choice.iter().enumerate().map(|(unit, kind)| costs[unit * 4 + kind]).sum();
            let best = exhaustive(&offer, budget);
            assert!(size <= budget, "{round}");
            assert!(cost <= best * 1.25 + 1e-9, "{round}: {cost} {best}");
        }
        let offer = Offer { kinds: &kinds, bytes: &bytes, costs: &[1.0; 8] };
        assert!(allocate(&offer, bytes[0]).is_none());
        assert_eq!(allocate(&offer, u64::MAX / 2), Some(vec![0, 0]));
    }
}
