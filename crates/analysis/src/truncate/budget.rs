//! The choice of KV heads and truncation orders under a loss budget.
//!
//! A cache can be dropped only if all query heads of a KV head are truncated, so a KV head with its query heads is one unit. Coefficients are not part
//! of the state, so each query head has its own. A truncation whose state is not smaller than the cache is not proposed. Each truncation is
//! measured separately. They are then combined in the order of loss per byte saved, in groups that double while the budget is met and
//! halve otherwise.

use std::str::FromStr;

use serde::Serialize;
use termwise_model::config::AttentionMap;

use super::bytes::Heads;
use super::choice::{Calibration, Choice};
use super::report::PlannedCut;
use crate::Error;

/// The maximum loss increase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Budget {
    /// Relative to the loss of the original model: 0.01 is 1 %.
    pub share: f64,
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Budget, String> {
        let text = text.trim();
        let (number, unit) = text.strip_suffix('%').map_or((text, 1.0), |number| (number.trim(), 0.01));
        match number.parse::<f64>() {
            Ok(x) if x >= 1.0 && unit == 1.0 => {
                Err(format!("`{text}` would let the loss double; write {text}%, or a fraction below 1 such as 0.01"))
            }
            Ok(x) if x.is_finite() && x >= 0.0 => Ok(Budget { share: x * unit }),
            _ => Err(format!("a budget is a fraction of the loss such as 1% or 0.01, found `{text}`")),
        }
    }
}

/// The truncations that save bytes at a context, not yet measured (their increase is NaN), and the number of those that do not.
pub fn candidates(
    attention: &AttentionMap,
    calibration: &Calibration,
    sizes: Heads,
    orders: &[usize],
    context: u64,
) -> Result<(Vec<PlannedCut>, usize), Error> {
    let (mut cuts, mut too_large) = (Vec::new(), 0);
    for layer in 0..sizes.layers {
        for kv_head in 0..sizes.kv_heads {
            let heads = kv_head * sizes.group()..(kv_head + 1) * sizes.group();
            if heads.clone().any(|head| calibration.head(layer, head).is_none()) {
                continue;
            }
            let before: Vec<_> = heads.clone().map(|head| attention.head(layer, head).clone()).collect();
            let before = sizes.unit(&before, context);
            for &order in orders {
                let mut map = attention.clone();
                apply(&mut map, calibration, sizes, &PlannedCut { layer, kv_head, order, increase: 0.0, saved: 0 })?;
                let after: Vec<_> = heads.clone().map(|head| map.head(layer, head).clone()).collect();
                match before.checked_sub(sizes.unit(&after, context)).filter(|saved| *saved > 0) {
                    Some(saved) => cuts.push(PlannedCut { layer, kv_head, order, increase: f64::NAN, saved }),
                    None => too_large += 1,
                }
            }
        }
    }
    Ok((cuts, too_large))
}

/// Applies a truncation to a map.
pub fn apply(map: &mut AttentionMap, calibration: &Calibration, sizes: Heads, cut: &PlannedCut) -> Result<(), Error> {
    let group = sizes.group();
    (cut.kv_head * group..(cut.kv_head + 1) * group)
        .try_for_each(|head| calibration.cut(map, cut.layer, head, cut.order, Choice::Calibrated))
}

/// A map with all these truncations.
pub fn applied(attention: &AttentionMap, calibration: &Calibration, sizes: Heads, cuts: &[PlannedCut]) -> Result<AttentionMap, Error> {
    let mut map = attention.clone();
    cuts.iter().try_for_each(|cut| apply(&mut map, calibration, sizes, cut))?;
    Ok(map)
}

/// The truncations within a budget, and their loss. `loss` measures truncations together; `None` means that the loss is NaN or
/// infinite. `uncut` is the loss without truncation.
///
/// The budget is relative to the lowest loss seen: a truncation that lowers the loss does not increase the budget of others, since it may
/// not lower the loss on other text.
pub fn choose(
    mut candidates: Vec<PlannedCut>,
    uncut: f64,
    budget: Budget,
    mut loss: impl FnMut(&[PlannedCut]) -> Result<Option<f64>, Error>,
) -> Result<(Vec<PlannedCut>, f64), Error> {
    candidates.retain(|cut| cut.increase.is_finite());
    // Truncations that lower the loss come first; among equal ones the one that saves more.
    let price = |cut: &PlannedCut| cut.increase.max(0.0) / cut.saved as f64;
    candidates.sort_by(|a, b| price(a).total_cmp(&price(b)).then(b.saved.cmp(&a.saved)));
    let mut chosen: Vec<PlannedCut> = Vec::new();
    let mut reached = uncut;
    let mut lowest = candidates.iter().map(|cut| uncut + cut.increase).fold(uncut, f64::min);
    let (mut at, mut run) = (0, candidates.len().max(1));
    while at < candidates.len() {
        let next = &candidates[at..(at + run).min(candidates.len())];
        let tried = with(&chosen, next);
        let unchanged = tried == chosen;
        let found = if unchanged { Some(reached) } else { loss(&tried)? };
        lowest = lowest.min(found.unwrap_or(f64::INFINITY));
        match found.filter(|found| *found <= lowest * (1.0 + budget.share)) {
            Some(found) => {
                (chosen, reached) = (tried, found);
                at += next.len();
                run *= 2;
            }
            None if run == 1 => at += 1,
            None => run = next.len().div_ceil(2),
        }
        run = run.max(1);
    }
    chosen.sort_by_key(|cut| (cut.layer, cut.kv_head));
    Ok((chosen, reached))
}

/// Adds truncations; if a KV head occurs twice, the truncation that saves more is kept.
fn with(chosen: &[PlannedCut], more: &[PlannedCut]) -> Vec<PlannedCut> {
    let mut all = chosen.to_vec();
    for cut in more {
        match all.iter_mut().find(|other| (other.layer, other.kv_head) == (cut.layer, cut.kv_head)) {
            Some(other) if cut.saved > other.saved => *other = cut.clone(),
            Some(_) => {}
            None => all.push(cut.clone()),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(layer: usize, order: usize, increase: f64, saved: u64) -> PlannedCut {
        PlannedCut { layer, kv_head: 0, order, increase, saved }
    }

    #[test]
    fn budgets() {
        assert_eq!("1%".parse(), Ok(Budget { share: 0.01 }));
        assert_eq!("0.02".parse(), Ok(Budget { share: 0.02 }));
        assert_eq!("150%".parse(), Ok(Budget { share: 1.5 }));
        assert!("1".parse::<Budget>().is_err_and(|error| error.contains("write 1%")));
        assert!(["", "%", "-1%", "nan", "one", "1", "2.5", "inf"].iter().all(|text| text.parse::<Budget>().is_err()));
    }

    /// Additive losses: the plan meets the limit, and no remaining truncation would fit.
    #[test]
    fn the_limit_is_met_and_used() {
        let candidates: Vec<PlannedCut> = (0..40).map(|i| cut(i, 2, 0.001 * ((i * 7) % 40) as f64, 100 + (i as u64 * 13) % 50)).collect();
        let mut calls = 0;
        for share in [0.0, 0.01, 0.1, 0.5, 2.0] {
            let limit = 1.0 + share;
            let sum = |cuts: &[PlannedCut]| 1.0 + cuts.iter().map(|cut| cut.increase).sum::<f64>();
            let (chosen, reached) = choose(candidates.clone(), 1.0, Budget { share }, |cuts| {
                calls += 1;
                Ok(Some(sum(cuts)))
            })
            .expect("no errors here");
            assert!((sum(&chosen) - reached).abs() < 1e-12 && reached <= limit, "{reached} {limit}");
            for other in candidates.iter().filter(|other| chosen.iter().all(|cut| cut.layer != other.layer)) {
                assert!(reached + other.increase > limit, "{other:?} would fit below {limit}");
            }
        }
        assert!(calls < 5 * 40, "{calls}");
    }

    #[test]
    fn gains_of_one_truncation_do_not_increase_the_budget() {
        let candidates = vec![cut(0, 2, -0.1, 50), cut(1, 2, 0.05, 50), cut(2, 2, 0.005, 50)];
        let sum = |cuts: &[PlannedCut]| 1.0 + cuts.iter().map(|cut| cut.increase).sum::<f64>();
        let (chosen, reached) = choose(candidates, 1.0, Budget { share: 0.01 }, |cuts| Ok(Some(sum(cuts)))).expect("no errors here");
        assert_eq!(chosen.iter().map(|cut| cut.layer).collect::<Vec<_>>(), [0, 2]);
        assert!((reached - 0.905).abs() < 1e-12);
    }

    #[test]
    fn a_head_has_one_order_and_infinite_losses_are_rejected() {
        let candidates = vec![cut(0, 4, 0.001, 10), cut(0, 2, 0.002, 50), cut(1, 2, f64::NAN, 90), cut(2, 2, 0.5, 60)];
        let (chosen, _) = choose(candidates.clone(), 1.0, Budget { share: 1.0 }, |_| Ok(Some(1.5))).expect("no errors here");
        assert_eq!(chosen.iter().map(|cut| (cut.layer, cut.order)).collect::<Vec<_>>(), [(0, 2), (2, 2)]);
        let (none, reached) = choose(candidates, 1.0, Budget { share: 1.0 }, |_| Ok(None)).expect("no errors here");
        assert!(none.is_empty() && reached == 1.0);
    }
}
