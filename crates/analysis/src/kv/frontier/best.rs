//! The best combination against the best single method at each budget, and the bytes that a method saves at equal loss.
//!
//! The best method of a context is selected on all other contexts (leave-one-out), so the comparison is not biased by selection. Bytes at equal loss: the
//! other method's curve of mean rise against log bytes, made monotone, is interpolated. Intervals are percentiles of 1,000 bootstrap draws of contexts, the
//! same for both sides; the best methods are selected in each draw.

use serde::{Deserialize, Serialize};
use termwise_base::rng::Rng;

use super::{Frontier, METHODS, Method, Verdict, interval, mean_and_error};

/// Number of bootstrap draws.
const DRAWS: usize = 1000;
/// The selected method of a side.
const SINGLE: &str = "best single method";
const COMBINED: &str = "best combination";
/// Pairs of methods whose bytes are compared.
const SAVINGS: [(&str, &str); 3] = [(COMBINED, SINGLE), (COMBINED, "window"), ("window per head", "window")];

/// The best combination against the best single method at one budget.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The budget.
    pub keys: u64,
    /// Combinations that were best on all contexts but one, and for how many of these.
    pub combinations: Vec<(String, usize)>,
    /// The same for single methods.
    pub singles: Vec<(String, usize)>,
    /// Contexts.
    pub contexts: usize,
    /// Mean of loss(combination) − loss(single).
    pub difference: f64,
    /// Its 95 % interval (Student's t).
    pub interval: Option<(f64, f64)>,
    /// By the rule.
    pub verdict: Verdict,
}

/// Bytes that one method needs less than another for the same loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saving {
    /// The method with fewer bytes.
    pub a: String,
    /// The other method.
    pub b: String,
    /// The budget of a.
    pub keys: u64,
    /// 1 − bytes of a / bytes at which b has the same loss.
    pub share: f64,
    /// Set if the equal loss is outside the measured range of b. The share is then a lower or an upper bound.
    pub bound: Option<Bound>,
    /// 2.5 and 97.5 % points over draws of contexts.
    pub interval: Option<(f64, f64)>,
}

/// Equal loss outside the measured range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// b needs more than its largest budget.
    AtLeast,
    /// b needs less than its smallest.
    AtMost,
}

/// Mean over the contexts that are listed.
fn mean(values: &[f64], contexts: &[usize]) -> f64 {
    contexts.iter().map(|&i| values[i]).sum::<f64>() / contexts.len().max(1) as f64
}

/// A method at a budget: its name, bytes and rises by context.
struct Measured {
    name: &'static str,
    keys: u64,
    bytes: u64,
    rises: Vec<f64>,
}

/// All methods of one side at all budgets that have as many contexts as the first.
fn measured(frontier: &Frontier, wanted: impl Fn(&Method) -> bool) -> Vec<Measured> {
    let mut all = Vec::new();
    for method in METHODS.iter().filter(|method| wanted(method)) {
        for keys in frontier.budgets() {
            let point = frontier.points.iter().find(|point| point.method == method.name && point.keys == keys);
            if let (Some(point), Some(rises)) = (point, frontier.rises(method.name, keys))
                // A method with a loss that is not finite has failed.
                && rises.iter().all(|rise| rise.is_finite())
            {
                all.push(Measured { name: method.name, keys, bytes: point.bytes, rises });
            }
        }
    }
    all
}

/// The candidate with the smallest mean over contexts.
fn least<'a>(of: &[&'a Measured], contexts: &[usize]) -> Option<&'a Measured> {
    of.iter().copied().min_by(|a, b| mean(&a.rises, contexts).total_cmp(&mean(&b.rises, contexts)))
}

pub fn best(frontier: &Frontier) -> Vec<Best> {
    let (combined, single) = (measured(frontier, |method| method.combined), measured(frontier, |method| !method.combined));
    let mut found = Vec::new();
    for keys in frontier.budgets() {
        let at = |side: &'_ [Measured]| -> Vec<usize> { (0..side.len()).filter(|&i| side[i].keys == keys).collect() };
        let (ours, theirs) = (at(&combined), at(&single));
        let ours: Vec<&Measured> = ours.iter().map(|&i| &combined[i]).collect();
        let theirs: Vec<&Measured> = theirs.iter().map(|&i| &single[i]).collect();
        let count = ours.iter().chain(&theirs).map(|side| side.rises.len()).min().unwrap_or(0);
        // Leave-one-out needs at least two contexts.
        if count < 2 || ours.is_empty() || theirs.is_empty() {
            continue;
        }
        let (mut combinations, mut singles, mut differences) = (Vec::new(), Vec::new(), Vec::new());
        for context in 0..count {
            let others: Vec<usize> = (0..count).filter(|&i| i != context).collect();
            let (Some(a), Some(b)) = (least(&ours, &others), least(&theirs, &others)) else { continue };
            differences.push(a.rises[context] - b.rises[context]);
            count_name(&mut combinations, a.name);
            count_name(&mut singles, b.name);
        }
        let (difference, error) = mean_and_error(&differences);
        let interval = interval(difference, error, differences.len());
        let verdict = Verdict::of(interval);
        found.push(Best { keys, combinations, singles, contexts: count, difference, interval, verdict });
    }
    found
}

fn count_name(list: &mut Vec<(String, usize)>, name: &str) {
    match list.iter_mut().find(|(known, _)| known == name) {
        Some((_, count)) => *count += 1,
        None => list.push((name.into(), 1)),
    }
}

/// Bytes at which a falling curve of (bytes, rise), ascending in bytes, has this rise.
fn bytes_at(curve: &[(f64, f64)], rise: f64) -> Option<(f64, Option<Bound>)> {
    let (first, last) = (curve.first()?, curve.last()?);
    if rise >= first.1 {
        return Some((first.0, (rise > first.1).then_some(Bound::AtMost)));
    }
    if rise < last.1 {
        return Some((last.0, Some(Bound::AtLeast)));
    }
    let (a, b) = curve.iter().zip(&curve[1..]).find(|(_, b)| b.1 <= rise)?;
    let part = (a.1 - rise) / (a.1 - b.1).max(f64::MIN_POSITIVE);
    Some(((a.0.ln() + part * (b.0.ln() - a.0.ln())).exp(), None))
}

/// The smallest mean rise at each budget, made monotone.
fn curve(side: &[Measured], budgets: &[u64], contexts: &[usize]) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = Vec::new();
    for &keys in budgets {
        let own: Vec<&Measured> = side.iter().filter(|measured| measured.keys == keys).collect();
        if let Some(best) = least(&own, contexts) {
            points.push((best.bytes as f64, mean(&best.rises, contexts)));
        }
    }
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut lowest = f64::INFINITY;
    for point in &mut points {
        lowest = lowest.min(point.1);
        point.1 = lowest;
    }
    points
}

pub fn savings(frontier: &Frontier) -> Vec<Saving> {
    let budgets = frontier.budgets();
    let side = |name: &str| match name {
        COMBINED => measured(frontier, |method| method.combined),
        SINGLE => measured(frontier, |method| !method.combined),
        name => measured(frontier, |method| method.name == name),
    };
    let mut found = Vec::new();
    for (a, b) in SAVINGS {
        let (ours, theirs) = (side(a), side(b));
        let count = ours.iter().chain(&theirs).map(|side| side.rises.len()).min().unwrap_or(0);
        if count == 0 || ours.is_empty() || theirs.is_empty() {
            continue;
        }
        let share = |keys: u64, contexts: &[usize]| -> Option<(f64, Option<Bound>)> {
            let own: Vec<&Measured> = ours.iter().filter(|measured| measured.keys == keys).collect();
            let own = least(&own, contexts)?;
            let (bytes, bound) = bytes_at(&curve(&theirs, &budgets, contexts), mean(&own.rises, contexts))?;
            Some((1.0 - own.bytes as f64 / bytes, bound))
        };
        let all: Vec<usize> = (0..count).collect();
        for &keys in &budgets {
            let Some((value, bound)) = share(keys, &all) else { continue };
            let mut rng = Rng::new(keys);
            let mut draws: Vec<f64> = (0..if count >= 3 { DRAWS } else { 0 })
                .filter_map(|_| share(keys, &(0..count).map(|_| rng.below(count)).collect::<Vec<usize>>()))
                .map(|(share, _)| share)
                .collect();
            draws.sort_by(f64::total_cmp);
            let point = |share: f64| draws[((draws.len() - 1) as f64 * share).round() as usize];
            let interval = (!draws.is_empty()).then(|| (point(0.025), point(0.975)));
            found.push(Saving { a: a.into(), b: b.into(), keys, share: value, bound, interval });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::Point;
    use super::*;
    use crate::kv::meter::Sums;
    use termwise_report::Documented;

    fn frontier(of: &[(&str, u64, &[f64])]) -> Frontier {
        let points = of.iter().map(|(method, keys, rises)| {
            let contexts = rises.iter().map(|&loss| vec![Sums { count: 1, loss, original: 0.0, kl: 0.0 }]).collect();
            Point { method: (*method).into(), keys: *keys, bytes: 100 * keys, text: "t".into(), contexts }
        });
        Frontier { texts: vec![("t".into(), 9, true)], points: points.collect(), ..Frontier::default() }
    }

    #[test]
    fn the_best_are_chosen_by_other_contexts() {
        // One single method is best on the first context only, by a margin that would decide a mean that includes it.
        let found = best(&frontier(&[
            ("window", 64, &[0.5, 0.1, 0.1, 0.1]),
            ("heavy hitters", 64, &[-9.0, 0.2, 0.2, 0.2]),
            ("heavy hitters per head", 64, &[0.4, 0.05, 0.05, 0.05]),
        ]));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].singles, [("window".to_owned(), 1), ("heavy hitters".to_owned(), 3)]);
        assert!((found[0].difference - (-0.1 - 3.0 * 0.15) / 4.0).abs() < 1e-12, "{:?}", found[0]);
        assert!(best(&frontier(&[("window", 64, &[0.5]), ("heavy hitters per head", 64, &[0.4])])).is_empty());
    }

    #[test]
    fn bytes_at_equal_loss_are_read_from_the_curve() {
        let measured = frontier(&[
            ("window", 64, &[0.4, 0.4, 0.4]),
            ("window", 256, &[0.2, 0.2, 0.2]),
            ("window per head", 64, &[0.3, 0.3, 0.3]),
            ("window per head", 256, &[0.1, 0.1, 0.1]),
        ]);
        let found = savings(&measured);
        let of = |keys: u64| found.iter().find(|saving| saving.a == "window per head" && saving.b == "window" && saving.keys == keys);
        // 128 is the midpoint of 64 and 256 in log bytes.
        let first = of(64).expect("a saving");
        assert!(
            (first.share - 0.5).abs() < 1e-9 && first.bound.is_none() && first.interval.is_some_and(|(low, _)| (low - 0.5).abs() < 1e-9)
        );
        let last = of(256).expect("a saving");
        assert_eq!((last.share, last.bound), (0.0, Some(Bound::AtLeast)));
        // At the largest budget the other method would need more than was measured: neither a share nor an interval is printed.
        let page = Frontier { savings: found.clone(), ..measured }.document().to_markdown_without_figures();
        assert!(page.contains("| window per head | window | 256 | not measured: needs larger budgets |"), "{page}");
        assert_eq!(bytes_at(&[(64.0, 0.4), (256.0, 0.2)], 0.5), Some((64.0, Some(Bound::AtMost))));
    }
}
