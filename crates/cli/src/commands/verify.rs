//! `termwise verify`.

use std::ops::ControlFlow;
use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};
use termwise_analysis::verify::{self, Identity, Verification};

use crate::args::LARGE;
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};
use crate::progress::Bar;

/// Check this build against reference results
///
/// Checks algebraic identities on every preset and on random combinations of parts, and compares whole models with reference files. The
/// exit code is 1 if any case fails. --details prints one line per case.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise verify
  termwise verify --golden path/to/reference
  termwise verify --only fused --only threads --cases 200 --seed 7

A reference file is a .safetensors file with the weights of a small model, tokens, and the logits, loss and gradients to compare with;
its metadata states the sizes and the attention.")]
pub struct VerifyArgs {
    /// Folder with reference files; may be repeated
    #[arg(long, value_name = "DIR")]
    pub golden: Vec<PathBuf>,
    /// Seed of the random cases
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Random combinations of parts per check, in addition to all presets
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(..=LARGE))]
    pub cases: usize,
    /// Run only this check; may be repeated
    #[arg(long, value_name = "CHECK")]
    pub only: Vec<Check>,
    #[command(flatten)]
    pub output: Output,
}

/// A check by its name.
#[derive(Clone, Copy, Debug)]
pub struct Check(Identity);

impl ValueEnum for Check {
    fn value_variants<'a>() -> &'a [Check] {
        const ALL: [Check; Identity::ALL.len()] = {
            let mut all = [Check(Identity::Fused); Identity::ALL.len()];
            let mut i = 0;
            while i < all.len() {
                all[i] = Check(Identity::ALL[i]);
                i += 1;
            }
            all
        };
        &ALL
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        Some(clap::builder::PossibleValue::new(self.0.name()).help(self.0.statement()))
    }
}

impl VerifyArgs {
    pub fn options(&self, threads: usize) -> verify::Options {
        let only = self.only.iter().map(|check| check.0).collect();
        verify::Options { golden: self.golden.clone(), seed: self.seed, cases: self.cases, threads, only }
    }
}

pub fn run(args: &VerifyArgs, context: &mut Context) -> Result<Exit, Failure> {
    let options = args.options(context.threads);
    let (mut cases, bar) = (Vec::new(), Bar::new(args.output.quiet));
    let summary = verify::run(&options, &mut |case| {
        cases.push(case.clone());
        bar.count(cases.len() as u64, "cases");
        ControlFlow::Continue(())
    })?;
    drop(bar);
    context.emit(&Verification { seed: options.seed, summary, cases }, &args.output)?;
    Ok(Exit::passed(summary.missed == 0))
}
