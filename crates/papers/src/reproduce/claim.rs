//! Claims and the rules that decide them. The rules are stated before anything is run.
//!
//! Every rule compares means over seeds with their spread. With n_a and n_b seeds, means m_a and m_b and standard deviations s_a and s_b,
//!
//! ```text
//! s²    = ((n_a − 1)·s_a² + (n_b − 1)·s_b²) / (n_a + n_b − 2)          pooled variance
//! doubt = t(n_a + n_b − 2) · s · √(1/n_a + 1/n_b)                      half a 95 % interval, t being Student's 0.975 quantile
//! ```
//!
//! A difference counts only where it is larger than its doubt, than both standard deviations, and than a stated minimum. With fewer than
//! two seeds on a side there is no spread, and so no verdict; nor is there one where a run of a side failed, since those that are left
//! would be a choice.

use serde::{Deserialize, Serialize};
use termwise_train::sweep::Statistic;

/// What a claim comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The rule holds.
    Reproduced,
    /// The numbers decide neither way.
    NotVisible,
    /// The opposite holds.
    Contradicted,
}

impl Verdict {
    /// As it is printed.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Reproduced => "reproduced",
            Verdict::NotVisible => "not visible at this scale",
            Verdict::Contradicted => "contradicted",
        }
    }
}

/// How numbers decide a claim. Sides are names of variants of the experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Rule {
    /// The first is lower than the second. Reproduced where `high` − `low` counts, contradicted where `low` − `high` does.
    Lower {
        /// Expected to be lower.
        low: String,
        /// Expected to be higher.
        high: String,
        /// The smallest difference that counts, in nats.
        least: f64,
    },
    /// The two differ by at most a share of the gap between two others. Reproduced where the difference and its doubt are within that
    /// margin together, contradicted where the difference is above the margin and counts; not visible where the gap itself does not count.
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
}

/// What a variant came to over its seeds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Side {
    /// Of the runs that finished; `None` where there is none.
    pub statistic: Option<Statistic>,
    /// Runs that failed.
    pub failed: usize,
}

/// Something that the paper found, as a rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// In words.
    pub text: String,
    /// How it is decided.
    pub rule: Rule,
}

impl Rule {
    /// The rule in words, with its numbers.
    pub fn describe(&self) -> String {
        match self {
            Rule::Lower { low, high, least } => format!(
                "{high} − {low} must be above {least} nats, above both standard deviations and above its 95 % doubt; the same the other way round contradicts"
            ),
            Rule::Equal { one, other, low, high, share } => format!(
                "|{one} − {other}| and its 95 % doubt together must be at most {:.0} % of {high} − {low}; a difference above both contradicts",
                100.0 * share
            ),
        }
    }

    /// The variants that it needs.
    pub fn sides(&self) -> Vec<&str> {
        match self {
            Rule::Lower { low, high, .. } => vec![low, high],
            Rule::Equal { one, other, low, high, .. } => vec![one, other, low, high],
        }
    }

    /// Decides by what each variant came to over its seeds.
    pub fn decide(&self, numbers: &dyn Fn(&str) -> Side) -> Decision {
        let mut sides = Vec::new();
        for name in self.sides() {
            let Side { statistic, failed } = numbers(name);
            let Some(statistic) = statistic else { return Decision::open(format!("no finished run of {name}")) };
            if failed > 0 {
                return Decision::open(format!("{failed} of {} runs of {name} failed", failed + statistic.count));
            }
            if statistic.count < 2 {
                return Decision::open(format!("one seed of {name}, so no spread to compare with"));
            }
            sides.push(statistic);
        }
        match *self {
            Rule::Lower { least, .. } => {
                let gap = Difference::of(sides[1], sides[0]);
                let verdict = match () {
                    () if gap.counts(least) => Verdict::Reproduced,
                    () if gap.reversed().counts(least) => Verdict::Contradicted,
                    () => Verdict::NotVisible,
                };
                Decision { verdict, note: String::new(), difference: Some(gap), margin: Some(least) }
            }
            Rule::Equal { share, .. } => {
                let difference = Difference::of(sides[0], sides[1]);
                let gap = Difference::of(sides[3], sides[2]);
                if !gap.counts(0.0) {
                    let note = format!("the gap to compare with, {gap}, is itself within the spread");
                    return Decision { verdict: Verdict::NotVisible, note, difference: Some(difference), margin: None };
                }
                let margin = share * gap.value;
                let size = Difference { value: difference.value.abs(), ..difference };
                let verdict = match () {
                    () if size.value + size.doubt <= margin => Verdict::Reproduced,
                    () if size.counts(margin) => Verdict::Contradicted,
                    () => Verdict::NotVisible,
                };
                Decision { verdict, note: String::new(), difference: Some(difference), margin: Some(margin) }
            }
        }
    }
}

/// A verdict and the numbers behind it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// What it comes to.
    pub verdict: Verdict,
    /// Why there is none, where the rule had nothing to compare.
    pub note: String,
    /// The difference that decides: upper less lower, or one less the other.
    pub difference: Option<Difference>,
    /// What it was compared with, in nats.
    pub margin: Option<f64>,
}

impl Decision {
    /// No verdict, and why.
    pub fn open(note: String) -> Decision {
        Decision { verdict: Verdict::NotVisible, note, difference: None, margin: None }
    }
}

/// Of two means.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// First less second.
    pub value: f64,
    /// Half its 95 % interval.
    pub doubt: f64,
    /// The larger of the two standard deviations.
    pub spread: f64,
}

impl Difference {
    /// Both have at least two seeds.
    fn of(a: Statistic, b: Statistic) -> Difference {
        let (s_a, s_b) = (a.deviation.unwrap_or(0.0), b.deviation.unwrap_or(0.0));
        let (n_a, n_b) = (a.count as f64, b.count as f64);
        let freedom = a.count + b.count - 2;
        let pooled = ((n_a - 1.0) * s_a * s_a + (n_b - 1.0) * s_b * s_b) / freedom as f64;
        let doubt = student(freedom) * (pooled * (1.0 / n_a + 1.0 / n_b)).sqrt();
        Difference { value: a.mean - b.mean, doubt, spread: s_a.max(s_b) }
    }

    fn reversed(self) -> Difference {
        Difference { value: -self.value, ..self }
    }

    fn counts(self, least: f64) -> bool {
        self.value > least && self.value > self.doubt && self.value > self.spread
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // What rounds to zero has no sign; zero is added to take that of −0.
        let value = (self.value * 1000.0).round() / 1000.0 + 0.0;
        write!(f, "{value:+.3} (95 %: ±{:.3})", self.doubt)
    }
}

/// The 0.975 quantile of Student's distribution; from the next smaller number in the table, which is the careful side.
fn student(freedom: usize) -> f64 {
    const TABLE: [(usize, f64); 16] = [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (5, 2.571),
        (6, 2.447),
        (7, 2.365),
        (8, 2.306),
        (9, 2.262),
        (10, 2.228),
        (12, 2.179),
        (15, 2.131),
        (20, 2.086),
        (30, 2.042),
        (60, 2.000),
        (120, 1.980),
    ];
    TABLE.iter().rev().find(|(n, _)| *n <= freedom).map_or(TABLE[0].1, |&(_, t)| t)
}
