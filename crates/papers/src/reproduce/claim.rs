//! Claims and the rules that decide them. The rules are stated before anything is run.
//!
//! Every rule compares means over seeds, with each other or with a fixed number. A difference counts only where its 95 % confidence interval ([`Difference`]: paired by seed, or
//! Welch's) is above 0 and it is larger than both standard deviations and than a stated minimum. With fewer than two seeds on a side there
//! is no standard deviation, and so no verdict; nor is there one where a run of a side failed, since those that are left would be a choice.

use serde::{Deserialize, Serialize};

use super::interval::{Difference, Numbers};

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
    /// The two differ by at most a share of the gap between two others. Reproduced where the whole interval of the difference is within that
    /// margin, contradicted where the difference is above the margin and counts; not visible where the gap itself does not count.
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
    /// One is below a fixed number. Reproduced where its whole interval is, contradicted where its whole interval is above.
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
}

/// What a variant came to over its seeds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Side {
    /// Of the runs that finished.
    pub numbers: Numbers,
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
                "{high} − {low} must be above {least} nats and above both standard deviations, and its 95 % interval above 0; the same the other way round contradicts"
            ),
            Rule::Equal { one, other, low, high, share } => format!(
                "the 95 % interval of {one} − {other} must lie within ±{:.0} % of {high} − {low}; a difference that is above that margin, its own interval and both standard deviations contradicts",
                100.0 * share
            ),
            Rule::Below { one, bound } => {
                format!("the 95 % interval of {one} must lie below {bound} nats; one that lies above contradicts")
            }
            Rule::Above { one, bound } => {
                format!("the 95 % interval of {one} must lie above {bound} nats; one that lies below contradicts")
            }
        }
    }

    /// The difference that decides, in words.
    pub fn compared(&self) -> String {
        match self {
            Rule::Lower { low, high, .. } => format!("{high} − {low}"),
            Rule::Equal { one, other, .. } => format!("{one} − {other}"),
            Rule::Below { one, bound } | Rule::Above { one, bound } => format!("{one} − {bound}"),
        }
    }

    /// The variants that it needs.
    pub fn sides(&self) -> Vec<&str> {
        match self {
            Rule::Lower { low, high, .. } => vec![low, high],
            Rule::Equal { one, other, low, high, .. } => vec![one, other, low, high],
            Rule::Below { one, .. } | Rule::Above { one, .. } => vec![one],
        }
    }

    /// Decides by what each variant came to over its seeds.
    pub fn decide(&self, numbers: &dyn Fn(&str) -> Side) -> Decision {
        let mut sides = Vec::new();
        for name in self.sides() {
            let Side { numbers, failed } = numbers(name);
            match numbers.len() {
                0 => return Decision::open(format!("no finished run of {name}")),
                count if failed > 0 => return Decision::open(format!("{failed} of {} runs of {name} failed", failed + count)),
                1 => return Decision::open(format!("one seed of {name}, so no standard deviation to compare with")),
                _ => sides.push(numbers),
            }
        }
        match *self {
            Rule::Lower { least, .. } => {
                let gap = Difference::of(&sides[1], &sides[0]);
                let verdict = match () {
                    () if gap.counts(least) => Verdict::Reproduced,
                    () if gap.reversed().counts(least) => Verdict::Contradicted,
                    () => Verdict::NotVisible,
                };
                Decision { verdict, note: String::new(), difference: Some(gap), margin: Some(least) }
            }
            Rule::Equal { share, .. } => {
                let difference = Difference::of(&sides[0], &sides[1]);
                let gap = Difference::of(&sides[3], &sides[2]);
                if !gap.counts(0.0) {
                    let note = format!("the gap to compare with, {gap}, does not itself count");
                    return Decision { verdict: Verdict::NotVisible, note, difference: Some(difference), margin: None };
                }
                let margin = share * gap.value;
                let size = Difference { value: difference.value.abs(), ..difference };
                let verdict = match () {
                    () if size.value + size.half_interval <= margin => Verdict::Reproduced,
                    () if size.counts(margin) => Verdict::Contradicted,
                    () => Verdict::NotVisible,
                };
                Decision { verdict, note: String::new(), difference: Some(difference), margin: Some(margin) }
            }
            Rule::Below { bound, .. } | Rule::Above { bound, .. } => {
                let above = Difference::from(bound, &sides[0]);
                let expected = if matches!(self, Rule::Above { .. }) { above } else { above.reversed() };
                let verdict = match () {
                    () if expected.value > expected.half_interval => Verdict::Reproduced,
                    () if -expected.value > expected.half_interval => Verdict::Contradicted,
                    () => Verdict::NotVisible,
                };
                Decision { verdict, note: String::new(), difference: Some(above), margin: Some(bound) }
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
