//! A smoke check of this build on this machine: every engine against the float64 reference, for every preset and some random variants.
//!
//! It is not the test suite. Random numbers are a function of the seed, the check and the variant, so a case that fails can be run again by itself.

mod case;
mod draw;
mod engines;
mod golden;

use std::ops::ControlFlow;
use std::path::PathBuf;

pub use case::{Case, Measure, Unit, Verification, VerifySummary};
pub use draw::random_variant;
pub use engines::{CHECKS, Check};

use termwise_attention::{Variant, presets};
use termwise_base::rng::Rng;
use termwise_base::threads;

use crate::Error;

/// The name of the check of reference files.
pub const GOLDEN: Check = Check {
    name: "golden",
    statement: "reference files: whole models and single operations, with every gradient",
    applies: |_| false,
    run: |_, _, _| Ok(()),
};

/// Options of [`run`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct VerifyOptions {
    /// Folders with reference files.
    pub golden: Vec<PathBuf>,
    /// Seed of the random cases.
    pub seed: u64,
    /// Random variants, in addition to the presets.
    pub cases: usize,
    /// Threads of the engines, except in the check of thread counts.
    pub threads: usize,
    /// Names of the checks to run; all if empty.
    pub only: Vec<String>,
}

impl Default for VerifyOptions {
    fn default() -> VerifyOptions {
        VerifyOptions { golden: Vec::new(), seed: 1, cases: 20, threads: 1, only: Vec::new() }
    }
}

/// Runs the checks. Each case is given to `sink` when it is done; `Break` ends the run early.
pub fn run(options: &VerifyOptions, sink: &mut (dyn FnMut(&Case) -> ControlFlow<()> + Send)) -> Result<Verification, Error> {
    let named = presets::all().iter().map(|preset| (preset.name.to_string(), preset.parts()));
    let drawn = (0..options.cases).map(|index| {
        let variant = random_variant(&mut Rng::named(options.seed, &format!("random {index}")));
        (variant.to_string(), variant)
    });
    let variants: Vec<(String, Variant)> = named.chain(drawn).collect();
    let wanted = |check: &Check| options.only.is_empty() || options.only.iter().any(|name| name == check.name);
    let mut cases: Vec<Case> = Vec::new();
    let mut done = |case: Case| {
        let next = sink(&case);
        cases.push(case);
        next
    };
    let _ = threads::pool(options.threads)?.install(|| -> ControlFlow<()> {
        for check in CHECKS.iter().filter(|check| wanted(check)) {
            for (name, variant) in variants.iter().filter(|(_, variant)| (check.applies)(variant)) {
                let mut rng = Rng::named(options.seed, &format!("{} {name}", check.name));
                done(Case::new(check, name).fill(|case| (check.run)(variant, &mut rng, case)))?;
            }
        }
        match wanted(&GOLDEN) {
            true => options.golden.iter().try_for_each(|folder| golden::check_folder(folder, &mut done)),
            false => ControlFlow::Continue(()),
        }
    });
    Ok(Verification::new(options.seed, cases))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cases(options: &VerifyOptions) -> Vec<Case> {
        run(options, &mut |_| ControlFlow::Continue(())).expect("threads").cases
    }

    /// `termwise verify` with seeds 1 to 5, and otherwise its defaults.
    #[test]
    fn every_check_passes_on_presets_and_random_variants() {
        for seed in 1..=5 {
            let cases = cases(&VerifyOptions { seed, threads: 2, ..VerifyOptions::default() });
            let failed: Vec<&Case> = cases.iter().filter(|case| !case.passed()).collect();
            assert!(failed.is_empty(), "seed {seed}: {failed:#?}");
            for check in CHECKS {
                assert!(cases.iter().filter(|case| case.identity == check.name).count() > 10, "{}", check.name);
            }
        }
    }

    #[test]
    fn a_run_ends_early_and_a_case_does_not_depend_on_others() {
        let options = |cases| VerifyOptions { seed: 3, cases, only: vec!["differences".into()], ..VerifyOptions::default() };
        let found = run(&options(0), &mut |_| ControlFlow::Break(())).expect("threads");
        assert_eq!(found.summary.cases, 1);
        let (few, more) = (cases(&options(1)), cases(&options(3)));
        assert_eq!(format!("{few:?}"), format!("{:?}", &more[..few.len()]));
    }

    #[test]
    fn reference_folders_pass() {
        for folder in ["golden-ops", "families"] {
            let Some(folder) = termwise_base::test_skip::shared(folder) else { return };
            let cases = cases(&VerifyOptions { golden: vec![folder], only: vec!["golden".into()], ..VerifyOptions::default() });
            assert!(cases.len() > 8 && cases.iter().all(Case::passed), "{cases:#?}");
            assert!(cases.iter().filter(|case| case.left_out.is_some()).count() <= 1);
        }
    }
}
