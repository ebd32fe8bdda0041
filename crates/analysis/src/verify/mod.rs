//! Does this build compute what it says? Identities of the algebra on random cases, and comparison with reference files.
//!
//! Every check returns [`Case`]s: what was compared, how far apart it was, how far it may be. Random numbers are a function of
//! the seed and the name of the case, so a case that misses can be run again by itself.

mod bounds;
mod differences;
mod document;
mod draw;
mod engines;
mod families;
mod golden;
mod identities;
mod operations;
mod outcome;

use std::ops::ControlFlow;
use std::path::PathBuf;

pub use draw::random_variant;
pub use golden::{check_file, check_folder};
pub use outcome::{Case, Identity, Measure, Summary, Unit, Verification};

use termwise_base::threads;

use crate::Error;

/// What to verify.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folders with reference files.
    pub golden: Vec<PathBuf>,
    /// Seed of the random cases.
    pub seed: u64,
    /// Random combinations of parts, besides the presets.
    pub cases: usize,
    /// Threads on which the engines run, except where the number is the subject.
    pub threads: usize,
    /// Only these; all where empty.
    pub only: Vec<Identity>,
}

/// Runs every check that was asked for and hands each case to `sink` as soon as it is known; `Break` ends the run early.
pub fn run(options: &Options, sink: &mut (dyn FnMut(&Case) -> ControlFlow<()> + Send)) -> Result<Summary, Error> {
    let subjects = engines::subjects(options.seed, options.cases);
    let pool = threads::pool(options.threads)?;
    let mut summary = Summary::default();
    let mut tell = |case: Case| {
        summary.count(&case);
        sink(&case)
    };
    let _ = pool.install(|| -> ControlFlow<()> {
        for identity in Identity::ALL {
            if !(options.only.is_empty() || options.only.contains(&identity)) {
                continue;
            }
            match identity {
                Identity::Fused => {
                    let lengths = |subject| engines::LENGTHS.iter().map(move |lengths| (subject, lengths));
                    let mut cases = subjects.iter().flat_map(lengths);
                    cases.try_for_each(|(subject, lengths)| tell(engines::fused(subject, lengths, options.seed)))?;
                }
                Identity::InstructionSets => {
                    subjects.iter().try_for_each(|subject| tell(engines::instruction_sets(subject, options.seed)))?;
                }
                Identity::Threads => subjects.iter().try_for_each(|subject| tell(engines::threads(subject, options.seed)))?,
                Identity::Causality => subjects.iter().try_for_each(|subject| tell(identities::causality(subject, options.seed)))?,
                Identity::Differences => {
                    subjects.iter().try_for_each(|subject| tell(differences::central(subject, options.seed)))?;
                }
                Identity::TaylorLimit => tell(identities::taylor_limit(options.seed))?,
                Identity::NormCancels => identities::norm_cancels(options.seed, &mut tell)?,
                Identity::QueryScale => identities::query_scale(options.seed, &mut tell)?,
                Identity::Golden => options.golden.iter().try_for_each(|folder| check_folder(folder, &mut tell))?,
            }
        }
        ControlFlow::Continue(())
    });
    Ok(summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `termwise verify` with seeds 1 to 5, and otherwise its defaults.
    #[test]
    fn every_identity_holds_on_presets_and_random_combinations() {
        for seed in 1..=5 {
            let (mut seen, mut missed) = (Vec::new(), Vec::new());
            let options = Options { golden: vec![], seed, cases: 20, threads: 2, only: vec![] };
            let summary = run(&options, &mut |case| {
                if !case.passed() {
                    missed.push(format!("{case:#?}"));
                }
                seen.push(case.identity);
                ControlFlow::Continue(())
            })
            .expect("threads");
            assert!(missed.is_empty(), "seed {seed}: {}", missed.join("\n"));
            assert_eq!((summary.cases, summary.missed), (seen.len(), 0));
            for identity in Identity::ALL.into_iter().filter(|identity| *identity != Identity::Golden) {
                assert!(seen.contains(&identity), "no case of {identity:?}");
            }
        }
    }

    #[test]
    fn a_run_ends_when_it_is_told_to() {
        let options = Options { golden: vec![], seed: 7, cases: 0, threads: 1, only: vec![Identity::Differences] };
        let summary = run(&options, &mut |_| ControlFlow::Break(())).expect("threads");
        assert_eq!(summary.cases, 1);
    }

    #[test]
    fn a_case_is_the_same_whatever_runs_before_it() {
        let collect = |cases: usize| {
            let mut found = Vec::new();
            let options = Options { golden: vec![], seed: 3, cases, threads: 1, only: vec![Identity::Differences] };
            let _ = run(&options, &mut |case| {
                found.push(format!("{case:?}"));
                ControlFlow::Continue(())
            });
            found
        };
        let (few, more) = (collect(1), collect(3));
        assert_eq!(few, more[..few.len()]);
    }
}
