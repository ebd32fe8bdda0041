//! Claims and the rules that decide them. [`super::declaration`] writes them to a file before the first run.
//!
//! Every rule compares means over seeds, with each other or with a fixed number. A difference counts only if its 95 % confidence interval
//! ([`Difference`]: paired by seed, or Welch's) is above 0 and it is larger than both standard deviations and than a stated minimum.
//!
//! A verdict needs every declared seed of every side: the seeds that remain after a failure would be a selection. It also needs two seeds,
//! for a standard deviation. Otherwise the claim is undecided, and the reason names the runs.
//!
//! Claims of one experiment are one family: [`correct`] applies Holm's correction to them.

use serde::{Deserialize, Serialize};

use termwise_base::statistics::holm;

use super::interval::{Difference, Numbers};

/// The level of every test.
const LEVEL: f64 = 0.05;

/// The outcome of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The rule holds.
    Reproduced,
    /// The numbers decide neither way.
    #[serde(alias = "not_visible")]
    Inconclusive,
    /// The opposite holds.
    Contradicted,
    /// Runs that the rule needs failed or have not finished; the note of the decision gives the reason.
    Undecided,
}

impl Verdict {
    /// In the order in which they are counted.
    pub const ALL: [Verdict; 4] = [Verdict::Reproduced, Verdict::Inconclusive, Verdict::Contradicted, Verdict::Undecided];

    /// The printed name.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Reproduced => "reproduced",
            Verdict::Inconclusive => "inconclusive",
            Verdict::Contradicted => "contradicted",
            Verdict::Undecided => "undecided",
        }
    }
}

/// A rule that decides a claim from numbers. Sides are names of variants of the experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Rule {
    /// The first is lower than the second. Reproduced if `high` − `low` counts, contradicted if `low` − `high` does.
    Lower {
        /// Expected to be lower.
        low: String,
        /// Expected to be higher.
        high: String,
        /// The smallest difference that counts, in nats.
        least: f64,
    },
    /// The two differ by at most a share of the gap between two others, the margin. Reproduced if the whole interval of the difference is within the
    /// margin that the lower end of the gap's interval gives. Contradicted if the whole interval is beyond the margin that its upper end gives, and
    /// the difference is larger than both standard deviations. Inconclusive if the gap itself does not count.
    Equal {
        /// One of two.
        one: String,
        /// The other.
        other: String,
        /// The lower end of the gap.
        low: String,
        /// The upper end of the gap.
        high: String,
        /// The margin as a share of the gap.
        share: f64,
    },
    /// One is below a fixed number. Reproduced if its whole interval is, contradicted if its whole interval is above.
    Below {
        /// The variant.
        one: String,
        /// The number, in nats.
        bound: f64,
    },
    /// One is above a fixed number, in the same way.
    Above {
        /// The variant.
        one: String,
        /// The number, in nats.
        bound: f64,
    },
    /// More seeds of one solve a task than of the other, by Fisher's exact two-sided test. Numbers are shares of wrong answers.
    Solves {
        /// Expected to solve it more often.
        one: String,
        /// The other.
        other: String,
        /// Accuracy from which on a run has solved it.
        accuracy: f64,
    },
}

/// The two-sided p-value of Fisher's exact test for `a` of n and `b` of m successes: the sum over all tables with these margins that are no more likely.
pub fn fisher(a: usize, n: usize, b: usize, m: usize) -> f64 {
    let ln_factorial = |k: usize| (2..=k).map(|i| (i as f64).ln()).sum::<f64>();
    let ln_choose = |n: usize, k: usize| ln_factorial(n) - ln_factorial(k) - ln_factorial(n - k);
    let solved = a + b;
    let probability = |a: usize| (ln_choose(n, a) + ln_choose(m, solved - a) - ln_choose(n + m, solved)).exp();
    let own = probability(a);
    let tables = solved.saturating_sub(m)..=solved.min(n);
    // Equal up to rounding counts as no more likely.
    tables.map(probability).filter(|&p| p <= own * (1.0 + 1e-9)).sum::<f64>().min(1.0)
}

/// The runs of a variant.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Side {
    /// Declared runs, one per seed.
    pub declared: usize,
    /// The metric of the runs that finished.
    pub numbers: Numbers,
    /// Seeds of the runs that failed, and why.
    pub failed: Vec<(u64, String)>,
}

impl Side {
    /// The reason why this variant allows no verdict, if any.
    fn undecided(&self, name: &str) -> Option<String> {
        let open = self.declared.saturating_sub(self.numbers.len() + self.failed.len());
        let failed = self.failed.iter().map(|(seed, reason)| format!("seed {seed} of {name} failed ({reason})"));
        let open = (open > 0).then(|| format!("{open} of {} runs of {name} have not finished", self.declared));
        let reasons: Vec<String> = failed.chain(open).collect();
        match self.declared {
            0 => Some(format!("no run of {name} has been started")),
            _ if !reasons.is_empty() => Some(reasons.join("; ")),
            1 => Some(format!("one seed of {name}, so no standard deviation to compare with")),
            _ => None,
        }
    }
}

/// A claim and the rule that decides it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// The claim.
    pub text: String,
    /// The rule.
    pub rule: Rule,
}

impl Rule {
    /// The rule in words, with its numbers. It is part of the hash of the claims.
    pub fn describe(&self) -> String {
        match self {
            Rule::Lower { low, high, least } => format!(
                "{high} − {low} must be above {least} nats and above both standard deviations, and its 95 % interval above 0; the same the other way round contradicts"
            ),
            Rule::Equal { one, other, low, high, share } => format!(
                "the 95 % interval of {one} − {other} must lie within ±{share:.0} % of {high} − {low}, taken at the lower end of its own 95 % interval; an interval that lies beyond {share:.0} % of the upper end, with a difference above both standard deviations, contradicts",
                share = 100.0 * share
            ),
            Rule::Below { one, bound } => {
                format!("the 95 % interval of {one} must lie below {bound} nats; one that lies above contradicts")
            }
            Rule::Solves { one, other, accuracy } => format!(
                "more seeds of {one} than of {other} must reach an accuracy of {accuracy}, and Fisher's exact two-sided test must have p ≤ {LEVEL}; \
                 the same the other way round contradicts"
            ),
            Rule::Above { one, bound } => {
                format!("the 95 % interval of {one} must lie above {bound} nats; one that lies below contradicts")
            }
        }
    }

    /// The difference that decides.
    pub fn compared(&self) -> String {
        match self {
            Rule::Lower { low, high, .. } => format!("{high} − {low}"),
            Rule::Equal { one, other, .. } | Rule::Solves { one, other, .. } => format!("{one} − {other}"),
            Rule::Below { one, bound } | Rule::Above { one, bound } => format!("{one} − {bound}"),
        }
    }

    /// The variants of the rule.
    pub fn sides(&self) -> Vec<&str> {
        match self {
            Rule::Lower { low, high, .. } => vec![low, high],
            Rule::Equal { one, other, low, high, .. } => vec![one, other, low, high],
            Rule::Solves { one, other, .. } => vec![one, other],
            Rule::Below { one, .. } | Rule::Above { one, .. } => vec![one],
        }
    }

    /// Decides the claim from the runs of each variant.
    pub fn decide(&self, side: &dyn Fn(&str) -> Side) -> Decision {
        let found: Vec<(&str, Side)> = self.sides().into_iter().map(|name| (name, side(name))).collect();
        let mut reasons: Vec<String> = found.iter().filter_map(|(name, side)| side.undecided(name)).collect();
        reasons.dedup();
        if !reasons.is_empty() {
            return Decision::undecided(reasons.join("; "));
        }
        let sides: Vec<Numbers> = found.into_iter().map(|(_, side)| side.numbers).collect();
        match *self {
            Rule::Lower { least, .. } => {
                let gap = Difference::of(&sides[1], &sides[0]);
                let verdict = match () {
                    () if gap.counts(least) => Verdict::Reproduced,
                    () if gap.reversed().counts(least) => Verdict::Contradicted,
                    () => Verdict::Inconclusive,
                };
                Decision { difference: Some(gap), margin: Some(least), p: Some(gap.p_value()), ..Decision::new(verdict) }
            }
            Rule::Equal { share, .. } => {
                let difference = Difference::of(&sides[0], &sides[1]);
                let gap = Difference::of(&sides[3], &sides[2]);
                let decision = Decision { difference: Some(difference), gap: Some(gap), ..Decision::new(Verdict::Inconclusive) };
                if !gap.counts(0.0) {
                    let note = format!("the gap to compare with, {gap}, does not itself count");
                    return Decision { note, p: Some(1.0), ..decision };
                }
                let [least, most] = [-gap.half_interval, gap.half_interval].map(|end| share * (gap.value + end));
                let size = difference.value.abs();
                let verdict = match () {
                    () if size + difference.half_interval <= least => Verdict::Reproduced,
                    () if size - difference.half_interval > most && size > difference.deviation => Verdict::Contradicted,
                    () => Verdict::Inconclusive,
                };
                let p = difference.p_against(share, gap, verdict != Verdict::Contradicted);
                Decision { verdict, margin: Some(least), p: Some(p), ..decision }
            }
            Rule::Solves { accuracy, .. } => {
                let solved = |side: &Numbers| side.iter().filter(|(_, error)| 1.0 - error >= accuracy).count();
                let [(a, n), (b, m)] = [0, 1].map(|side| (solved(&sides[side]), sides[side].len()));
                let p = fisher(a, n, b, m);
                let verdict = match (a * m).cmp(&(b * n)) {
                    std::cmp::Ordering::Greater if p <= LEVEL => Verdict::Reproduced,
                    std::cmp::Ordering::Less if p <= LEVEL => Verdict::Contradicted,
                    _ => Verdict::Inconclusive,
                };
                let note = format!("{a} of {n} and {b} of {m} seeds solve it");
                Decision { note, p: Some(p), ..Decision::new(verdict) }
            }
            Rule::Below { bound, .. } | Rule::Above { bound, .. } => {
                let above = Difference::from(bound, &sides[0]);
                let expected = if matches!(self, Rule::Above { .. }) { above } else { above.reversed() };
                let verdict = match () {
                    () if expected.value > expected.half_interval => Verdict::Reproduced,
                    () if -expected.value > expected.half_interval => Verdict::Contradicted,
                    () => Verdict::Inconclusive,
                };
                Decision { difference: Some(above), margin: Some(bound), p: Some(above.p_value()), ..Decision::new(verdict) }
            }
        }
    }
}

/// A verdict and the numbers behind it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// The verdict of this claim alone.
    pub verdict: Verdict,
    /// The verdict after Holm's correction over the claims of the experiment; absent if the claim is not tested over seeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub corrected: Option<Verdict>,
    /// The smallest level at which the difference would decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p: Option<f64>,
    /// The reason why there is no verdict, or the numbers of a claim in closed form.
    pub note: String,
    /// The difference that decides: upper less lower, or one less the other.
    pub difference: Option<Difference>,
    /// The gap of which the margin is a share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gap: Option<Difference>,
    /// The bound of the difference, in nats.
    pub margin: Option<f64>,
}

impl Decision {
    /// A verdict without numbers.
    pub fn new(verdict: Verdict) -> Decision {
        Decision { verdict, corrected: None, p: None, note: String::new(), difference: None, gap: None, margin: None }
    }

    /// No verdict, and the reason.
    pub fn undecided(note: String) -> Decision {
        Decision { note, ..Decision::new(Verdict::Undecided) }
    }
}

/// Holm's correction over the claims of one experiment that are tested over seeds. Claims without a verdict count as tested, so that a failure
/// never makes the correction of the others weaker.
pub fn correct(family: &mut [&mut Decision]) {
    let decides = |decision: &Decision| matches!(decision.verdict, Verdict::Reproduced | Verdict::Contradicted);
    let p: Vec<f64> = family.iter().map(|decision| decision.p.filter(|_| decides(decision)).unwrap_or(1.0)).collect();
    for (decision, adjusted) in family.iter_mut().zip(holm(&p)) {
        let kept = !decides(decision) || adjusted <= LEVEL;
        decision.corrected = Some(if kept { decision.verdict } else { Verdict::Inconclusive });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `scipy.stats.fisher_exact([[a, n − a], [b, m − b]])`; 5 of 5 and 0 of 5 is 2/252 by hand.
    #[test]
    fn fishers_test_is_exact() {
        for (a, n, b, m, expected) in [
            (5, 5, 0, 5, 2.0 / 252.0),
            (5, 5, 1, 5, 12.0 / 252.0),
            (3, 5, 3, 5, 1.0),
            (0, 5, 0, 5, 1.0),
            (8, 10, 1, 6, 0.034_965_034_965_034_96),
        ] {
            assert!((fisher(a, n, b, m) - expected).abs() < 1e-12, "{a} {n} {b} {m}: {}", fisher(a, n, b, m));
        }
        let rule = Rule::Solves { one: "a".into(), other: "b".into(), accuracy: 0.9 };
        let decide = |a: [f64; 5], b: [f64; 5]| {
            let side = |name: &str| {
                let numbers: Numbers = (1..).zip(if name == "a" { a } else { b }).collect();
                Side { declared: 5, numbers, failed: Vec::new() }
            };
            rule.decide(&side).verdict
        };
        let (good, bad) = ([0.0, 0.01, 0.05, 0.0, 0.099], [0.9, 0.5, 0.2, 0.7, 0.11]);
        assert_eq!(decide(good, bad), Verdict::Reproduced);
        assert_eq!(decide(bad, good), Verdict::Contradicted);
        assert_eq!(decide(good, [0.0, 0.0, 0.9, 0.9, 0.9]), Verdict::Inconclusive);
    }

    #[test]
    fn holm_counts_every_claim_of_the_family() {
        let decision = |verdict, p| Decision { p, ..Decision::new(verdict) };
        let mut family = [
            decision(Verdict::Reproduced, Some(0.02)),
            decision(Verdict::Contradicted, Some(0.001)),
            decision(Verdict::Undecided, None),
            // Its difference is small, so it is inconclusive whatever its p-value.
            decision(Verdict::Inconclusive, Some(1e-9)),
        ];
        correct(&mut family.iter_mut().collect::<Vec<_>>());
        let corrected: Vec<Verdict> = family.iter().filter_map(|decision| decision.corrected).collect();
        // 3 · 0.02 is above 0.05; with two claims in the family it would not be.
        assert_eq!(corrected, [Verdict::Inconclusive, Verdict::Contradicted, Verdict::Undecided, Verdict::Inconclusive]);
        assert_eq!(family[0].verdict, Verdict::Reproduced, "the verdict of the claim alone stays");
        let mut two = [decision(Verdict::Reproduced, Some(0.02)), decision(Verdict::Contradicted, Some(0.001))];
        correct(&mut two.iter_mut().collect::<Vec<_>>());
        assert_eq!(two[0].corrected, Some(Verdict::Reproduced));
    }
}
