//! What was compared and what came out.

use serde::{Deserialize, Serialize};

/// Something that must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Identity {
    /// The fused engine computes what the reference computes in float64.
    Fused,
    /// So does every instruction set.
    InstructionSets,
    /// Bits do not depend on the number of threads.
    Threads,
    /// Later tokens change no bit of an earlier output.
    Causality,
    /// Gradients are the slopes that differences show.
    Differences,
    /// Orders 0..p approach softmax as fast as the remainder says.
    TaylorLimit,
    /// Scale-free norms cancel denominators and output gates.
    NormCancels,
    /// Sum-normalised products do not see the size of q.
    QueryScale,
    /// Reference files of whole models, of single operations and of families.
    Golden,
}

impl Identity {
    /// All, in the order in which they are checked.
    pub const ALL: [Identity; 9] = [
        Identity::Fused,
        Identity::InstructionSets,
        Identity::Threads,
        Identity::Causality,
        Identity::Differences,
        Identity::TaylorLimit,
        Identity::NormCancels,
        Identity::QueryScale,
        Identity::Golden,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Identity::Fused => "fused",
            Identity::InstructionSets => "instruction-sets",
            Identity::Threads => "threads",
            Identity::Causality => "causality",
            Identity::Differences => "differences",
            Identity::TaylorLimit => "taylor-limit",
            Identity::NormCancels => "norm-cancels",
            Identity::QueryScale => "query-scale",
            Identity::Golden => "golden",
        }
    }

    /// What must hold, in a line.
    pub fn statement(self) -> &'static str {
        match self {
            Identity::Fused => "fused float32 engine = float64 reference: outputs and every gradient",
            Identity::InstructionSets => "every instruction set of this machine = float64 reference",
            Identity::Threads => "1, 2, 3 and 7 threads give the same bits",
            Identity::Causality => "changing tokens from t on changes no bit of an earlier output",
            Identity::Differences => "gradients of the reference = central differences, float64, every entry",
            Identity::TaylorLimit => "orders 0..p approach softmax at the rate of the remainder",
            Identity::NormCancels => "scale-free norms cancel denominators and output gates",
            Identity::QueryScale => "sum-normalised products do not change when q is scaled",
            Identity::Golden => "reference files: whole models, single operations and families, with every gradient",
        }
    }
}

/// How an error is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// RMS(x − expected) / RMS(expected).
    RelativeRms,
    /// RMS(x − expected), where what is expected is zero but for rounding.
    Rms,
    /// The largest |x − expected|.
    Absolute,
    /// Values that are not as they must be.
    Count,
}

/// One comparison.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measure {
    /// The tensor, or what else was compared.
    pub what: String,
    /// How far off it is; `null` in JSON where that is no finite number.
    #[serde(deserialize_with = "termwise_report::nan")]
    pub error: f64,
    /// How far it may be.
    pub bound: f64,
    /// How both are measured.
    pub unit: Unit,
}

impl Measure {
    /// Whether it is within its bound; NaN is not.
    pub fn passed(&self) -> bool {
        self.error <= self.bound
    }

    /// The share of the bound that is used, to say which comparison was worst. NaN counts as the worst of all.
    pub fn strain(&self) -> f64 {
        match (self.error, self.bound) {
            (error, _) if error.is_nan() => f64::INFINITY,
            (0.0, _) => 0.0,
            (error, bound) => error / bound,
        }
    }
}

/// One case and what came out of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(into = "Written", from = "Written")]
pub struct Case {
    /// What must hold.
    pub identity: Identity,
    /// A preset, an expression or a file.
    pub subject: String,
    /// Sizes and the like.
    pub detail: String,
    /// Every comparison.
    pub measures: Vec<Measure>,
    /// Why it could not be compared, or what is wrong besides numbers.
    pub problem: Option<String>,
    /// Why there was nothing to compare it with, which is no miss.
    pub left_out: Option<String>,
}

impl Case {
    pub(super) fn new(identity: Identity, subject: impl Into<String>) -> Case {
        Case { identity, subject: subject.into(), detail: String::new(), measures: Vec::new(), problem: None, left_out: None }
    }

    /// Fills in what `check` finds; its error becomes the problem.
    pub(super) fn fill<E: std::fmt::Display>(mut self, check: impl FnOnce(&mut Case) -> Result<(), E>) -> Case {
        if let Err(error) = check(&mut self) {
            self.problem = Some(error.to_string());
        }
        self
    }

    pub(super) fn measure(&mut self, what: impl Into<String>, error: f64, bound: f64, unit: Unit) {
        self.measures.push(Measure { what: what.into(), error, bound, unit });
    }

    /// Whether everything holds, or nothing was asked. A case without any comparison has shown nothing and does not pass.
    pub fn passed(&self) -> bool {
        self.left_out.is_some() || self.problem.is_none() && !self.measures.is_empty() && self.measures.iter().all(Measure::passed)
    }

    /// The comparison that came closest to its bound or went furthest beyond.
    pub fn worst(&self) -> Option<&Measure> {
        self.measures.iter().max_by(|a, b| a.strain().total_cmp(&b.strain()))
    }
}

/// A case as it is written: whether it passed stands beside what it is made of.
#[derive(Serialize, Deserialize)]
struct Written {
    identity: Identity,
    subject: String,
    detail: String,
    passed: bool,
    problem: Option<String>,
    #[serde(default)]
    left_out: Option<String>,
    measures: Vec<Measure>,
}

impl From<Case> for Written {
    fn from(case: Case) -> Written {
        let passed = case.passed();
        let Case { identity, subject, detail, measures, problem, left_out } = case;
        Written { identity, subject, detail, passed, problem, left_out, measures }
    }
}

impl From<Written> for Case {
    fn from(Written { identity, subject, detail, problem, left_out, measures, .. }: Written) -> Case {
        Case { identity, subject, detail, measures, problem, left_out }
    }
}

/// All cases of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Verification {
    /// Of the random cases.
    pub seed: u64,
    /// All and missed.
    pub summary: Summary,
    /// In the order in which they were run.
    pub cases: Vec<Case>,
}

/// How many cases there were and how many missed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// All.
    pub cases: usize,
    /// Those that did not pass.
    pub missed: usize,
    /// Those for which there was nothing to compare.
    #[serde(default)]
    pub left_out: usize,
}

impl Summary {
    pub(super) fn count(&mut self, case: &Case) {
        self.cases += 1;
        self.missed += !case.passed() as usize;
        self.left_out += case.left_out.is_some() as usize;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_and_nothing_do_not_pass() {
        let mut case = Case::new(Identity::Fused, "x");
        assert!(!case.passed(), "nothing was compared");
        case.measure("y", 1e-7, 1e-5, Unit::RelativeRms);
        assert!(case.passed());
        case.measure("q", f64::NAN, 1e-4, Unit::RelativeRms);
        assert!(!case.passed());
        assert_eq!(case.worst().map(|measure| measure.what.as_str()), Some("q"));
        let failed = Case::new(Identity::Fused, "x").fill(|_| Err::<(), _>("no file"));
        assert_eq!(failed.problem.as_deref(), Some("no file"));
    }

    #[test]
    fn zero_of_zero_is_no_strain() {
        let measure = |error, bound| Measure { what: String::new(), error, bound, unit: Unit::Count };
        assert_eq!(measure(0.0, 0.0).strain(), 0.0);
        assert_eq!(measure(1.0, 0.0).strain(), f64::INFINITY);
        assert!(measure(0.0, 0.0).passed() && !measure(1.0, 0.0).passed());
    }
}
