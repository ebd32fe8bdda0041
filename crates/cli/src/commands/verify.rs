//! `termwise verify`.

use std::ops::ControlFlow;
use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, RangedU64ValueParser};
use termwise_analysis::verify::{self, CHECKS, GOLDEN, VerifyOptions};

use crate::args::LARGE;
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};
use crate::progress::Bar;

/// Check this build against the float64 reference
///
/// Compares every engine with the float64 reference, for every preset and for random variants, and whole models with reference files. The exit
/// code is 1 if any case fails. --details prints one line per case.
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
    /// Random variants, in addition to all presets
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(..=LARGE))]
    pub cases: usize,
    /// Run only this check; may be repeated
    #[arg(long, value_name = "CHECK", value_parser = check_names())]
    pub only: Vec<String>,
    #[command(flatten)]
    pub output: Output,
}

fn check_names() -> PossibleValuesParser {
    PossibleValuesParser::new(CHECKS.iter().chain([&GOLDEN]).map(|check| PossibleValue::new(check.name).help(check.statement)))
}

pub fn run(args: &VerifyArgs, context: &mut Context) -> Result<Exit, Failure> {
    let mut options = VerifyOptions::default();
    (options.golden, options.only) = (args.golden.clone(), args.only.clone());
    (options.seed, options.cases, options.threads) = (args.seed, args.cases, context.threads);
    let (mut count, bar) = (0, Bar::new(args.output.print.quiet));
    let found = verify::run(&options, &mut |_| {
        count += 1;
        bar.count(count, "cases");
        ControlFlow::Continue(())
    })?;
    drop(bar);
    context.emit(&found, &args.output)?;
    Ok(Exit::passed(found.summary.missed == 0))
}
