//! The compared quantities, their errors, and the printed table.

use serde::{Deserialize, Serialize};
use termwise_report::{Block, Cell, Document, Documented, Section, Table, Tone, Unit as Amount};

use super::{CHECKS, Check, GOLDEN};

/// How an error is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// RMS(x − expected) / RMS(expected).
    RelativeRms,
    /// RMS(x − expected), if the expected value is zero up to rounding.
    Rms,
    /// The largest |x − expected|.
    Absolute,
    /// Number of wrong values.
    Count,
}

/// One comparison.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measure {
    /// The tensor.
    pub what: String,
    /// Its error; `null` in JSON if it is not finite.
    #[serde(deserialize_with = "termwise_report::nan")]
    pub error: f64,
    /// The largest error that passes.
    pub bound: f64,
    /// The unit of both.
    pub unit: Unit,
}

impl Measure {
    /// Whether the error is within its bound; NaN is not.
    pub fn passed(&self) -> bool {
        self.error <= self.bound
    }

    /// Error divided by bound; infinite for NaN.
    pub fn strain(&self) -> f64 {
        match self.error {
            error if error.is_nan() => f64::INFINITY,
            0.0 => 0.0,
            error => error / self.bound,
        }
    }
}

/// One case of a check.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Case {
    /// The name of the check.
    pub identity: String,
    /// A preset, a variant string or a file.
    pub subject: String,
    /// Sizes.
    pub detail: String,
    /// Whether it passed, as written to files; [`Case::passed`] computes it.
    #[serde(default)]
    passed: bool,
    /// Why it could not be compared.
    pub problem: Option<String>,
    /// Why there was nothing to compare with, which is not a failure.
    #[serde(default)]
    pub left_out: Option<String>,
    /// Every comparison.
    pub measures: Vec<Measure>,
}

impl Case {
    pub(super) fn new(check: &Check, subject: impl Into<String>) -> Case {
        let (identity, subject) = (check.name.to_string(), subject.into());
        Case { identity, subject, detail: String::new(), passed: false, problem: None, left_out: None, measures: Vec::new() }
    }

    /// Runs the comparisons; their error becomes the problem.
    pub(super) fn fill<E: std::fmt::Display>(mut self, check: impl FnOnce(&mut Case) -> Result<(), E>) -> Case {
        self.problem = check(&mut self).err().map(|error| error.to_string());
        self.passed = self.passed();
        self
    }

    pub(super) fn measure(&mut self, what: impl Into<String>, error: f64, bound: f64, unit: Unit) {
        self.measures.push(Measure { what: what.into(), error, bound, unit });
    }

    /// Whether every comparison passed. A case without comparisons does not pass unless it was left out.
    pub fn passed(&self) -> bool {
        self.left_out.is_some() || self.problem.is_none() && !self.measures.is_empty() && self.measures.iter().all(Measure::passed)
    }

    /// The comparison with the largest strain.
    pub fn worst(&self) -> Option<&Measure> {
        self.measures.iter().max_by(|a, b| a.strain().total_cmp(&b.strain()))
    }

    fn errors(&self) -> String {
        if let Some(reason) = self.left_out.as_ref().or(self.problem.as_ref()) {
            return reason.clone();
        }
        let text = |measure: &Measure| match measure.unit {
            Unit::Count => format!("{} {}", measure.what, measure.error),
            _ => format!("{} {:.1e} of {:.0e}", measure.what, measure.error, measure.bound),
        };
        match self.measures.iter().filter(|measure| !measure.passed()).map(text).collect::<Vec<_>>() {
            failed if failed.is_empty() => self.worst().map(text).unwrap_or_default(),
            failed if failed.len() > 4 => format!("{} and {} more", failed[..4].join(", "), failed.len() - 4),
            failed => failed.join(", "),
        }
    }
}

/// The cases of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Verification {
    /// Seed of the random cases.
    pub seed: u64,
    /// Counts.
    pub summary: VerifySummary,
    /// In the order in which they ran.
    pub cases: Vec<Case>,
}

/// Counts of cases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifySummary {
    /// All.
    pub cases: usize,
    /// Those that did not pass.
    pub missed: usize,
    /// Those with nothing to compare with.
    #[serde(default)]
    pub left_out: usize,
}

impl Verification {
    pub(super) fn new(seed: u64, cases: Vec<Case>) -> Verification {
        let count = |of: fn(&Case) -> bool| cases.iter().filter(|case| of(case)).count();
        let summary =
            VerifySummary { cases: cases.len(), missed: count(|case| !case.passed()), left_out: count(|case| case.left_out.is_some()) };
        Verification { seed, summary, cases }
    }
}

impl Documented for Verification {
    const KIND: &'static str = "verification";

    fn document(&self) -> Document {
        let VerifySummary { cases, missed, left_out } = self.summary;
        let omitted = if left_out > 0 { format!(", {left_out} left out") } else { String::new() };
        let (tone, label, of) = match missed {
            0 => (Tone::Good, "all pass".to_string(), ""),
            _ => (Tone::Bad, format!("{missed} missed"), "of "),
        };
        let all = Block::badge(tone, label, format!("{of}{cases} cases{omitted} (seed {})", self.seed));
        let mut table = Table::new("Largest: error divided by its bound", ["check", "cases", "missed", "largest", ""]);
        let (mut sections, mut details) = (Vec::new(), Vec::new());
        for group in self.cases.chunk_by(|a, b| a.identity == b.identity) {
            let name = &group[0].identity;
            let statement = CHECKS.iter().chain([&GOLDEN]).find(|check| check.name == name).map_or("", |check| check.statement);
            let failed: Vec<&Case> = group.iter().filter(|case| !case.passed()).collect();
            let worst = group.iter().filter_map(Case::worst).map(Measure::strain).fold(0.0, f64::max);
            table.rows.push(vec![
                Cell::code(name),
                Cell::count(group.len()),
                Cell::count(failed.len()),
                Cell::Amount(worst, Amount::Percent),
                Cell::text(statement),
            ]);
            let listed = |tone, label: &str, case: &Case| {
                let text = format!("{} {}", case.subject, case.detail);
                [Block::Badge { tone, label: label.into(), text }, Block::Code(case.errors())]
            };
            let mut blocks: Vec<Block> = failed.iter().flat_map(|case| listed(Tone::Bad, "MISS", case)).collect();
            blocks.extend(group.iter().filter(|case| case.left_out.is_some()).flat_map(|case| listed(Tone::Open, "left out", case)));
            if !blocks.is_empty() {
                sections.push(Section::new(format!("Failed or left out: {name}"), blocks));
            }
            let mut every = Table::new(statement, ["", "case", "sizes", "largest error"]);
            every.rows.extend(group.iter().map(|case| {
                let mark = if case.left_out.is_some() { "-" } else { ["MISS", "ok"][case.passed() as usize] };
                vec![Cell::text(mark), Cell::code(&case.subject), Cell::text(&case.detail), Cell::text(case.errors())]
            }));
            details.push(Block::Details {
                summary: format!("Every case of {name}"),
                blocks: vec![Block::table(format!("cases-{name}"), every)],
            });
        }
        sections.push(Section::new("All cases", details));
        Document { title: "Check of this build".into(), lead: vec![Block::table("checks", table), all], sections }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use termwise_report::Terminal;

    #[test]
    fn failures_and_skipped_cases_are_printed_and_read_back() {
        let case = |error: f64| {
            Case::new(&CHECKS[0], "softmax").fill(|case| {
                case.measure("y", error, 1e-5, Unit::RelativeRms);
                Ok::<(), String>(())
            })
        };
        let left_out = Case { left_out: Some("no engine computes it".into()), ..Case::new(&GOLDEN, "levels.safetensors") };
        let failed = Case::new(&GOLDEN, "a [b](c)\u{1b}.safetensors").fill(|_| Err("no file"));
        let found = Verification::new(3, vec![case(1e-7), case(f64::NAN), failed, left_out, Case::new(&CHECKS[1], "nothing was compared")]);
        assert_eq!(found.summary, VerifySummary { cases: 5, missed: 3, left_out: 1 });
        let text = found.document().to_terminal(&Terminal::default());
        for expected in ["✗ 3 missed: of 5 cases, 1 left out (seed 3)", "y NaN of 1e-5", "no file", "no engine computes it"] {
            assert!(text.contains(expected), "{expected} in {text}");
        }
        assert!(!text.contains("y 1.0e-7"), "{text}");
        assert!(found.document().to_terminal(&Terminal { details: true, ..Terminal::default() }).contains("y 1.0e-7 of 1e-5"));
        termwise_report::reads_again(&found);
    }
}
