//! What can be written on the command line.

use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use termwise_lab::variants::Sizes;
use termwise_lab::verify::{self, Identity};

use crate::commands::bench::BenchArgs;
use crate::commands::cut::CutArgs;
use crate::commands::data::DataCommand;
use crate::commands::eval::EvalArgs;
use crate::commands::generate::GenerateArgs;
use crate::commands::plan::PlanArgs;
use crate::commands::report::ReportArgs;
use crate::commands::reproduce::ReproduceArgs;
use crate::commands::separation::SeparationArgs;
use crate::commands::spectrum::SpectrumArgs;
use crate::commands::sweep::SweepArgs;
use crate::commands::tokenizer::TokenizerCommand;
use crate::commands::train::TrainArgs;

const EXAMPLES: &str = "\
Examples:
  termwise reproduce                              why softmax attention is more expressive, within five minutes
  termwise variants                               every preset and every part to build variants from
  termwise variants \"taylor=0..4 norm=l2\" norm    what these two are, what they cost, whether they are equal
  termwise verify                                 check that this build computes what it says
  termwise bench attention --variants softmax,norm,\"taylor=0..4\"
  termwise plan paper-small                       what a model will cost, and when a state beats a cache
  termwise train --attention \"norm conv=3\"        train a small model on the built-in language
  termwise train --data corpus.txt --model tiny   or on text of your own
  termwise generate path/to/model --prompt Once   write text with a model
  termwise spectrum path/to/model --data book.txt how many terms of the series its heads need

`termwise COMMAND --help` says more about each.";

/// Softmax attention taken apart, term by term.
#[derive(Debug, Parser)]
#[command(version = crate::build::version(), long_version = crate::build::long_version(), after_help = EXAMPLES, disable_help_subcommand = true)]
pub struct Cli {
    /// Threads to compute on [default: all cores]
    #[arg(long, global = true, value_name = "N", value_parser = size(1024))]
    pub threads: Option<usize>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Reproduce(ReproduceArgs),
    Variants(VariantsArgs),
    Verify(VerifyArgs),
    Bench(BenchArgs),
    Plan(Box<PlanArgs>),
    Train(Box<TrainArgs>),
    Eval(Box<EvalArgs>),
    Cut(Box<CutArgs>),
    Generate(Box<GenerateArgs>),
    Spectrum(Box<SpectrumArgs>),
    Sweep(SweepArgs),
    Report(ReportArgs),
    Separation(Box<SeparationArgs>),
    #[command(subcommand)]
    Tokenizer(TokenizerCommand),
    #[command(subcommand)]
    Data(DataCommand),
}

/// From 1 to that many.
pub(crate) fn size(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

pub const LARGE: u64 = 1 << 20;

/// List attention variants: presets, the parts they are made of, costs, and which are equal
///
/// Without arguments: all presets by class of equal outputs, and all parts. With names or expressions: each in detail, compared with all
/// presets and with each other.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise variants
  termwise variants gated_softmax
  termwise variants \"exp over=sum norm=l2\" \"exp over=length out norm=l2\"
  termwise variants --json | jq '.presets[].name'

An expression is a list of words in any order: a kernel (exp, taylor=0..4, power=2, feature=elu) and settings such as over=length,
out, norm=rms, rope=off. A preset's name stands for its words, and further words change it: \"gated_softmax norm=rms\".")]
pub struct VariantsArgs {
    /// Presets or expressions to describe
    #[arg(value_name = "NAME_OR_EXPRESSION")]
    pub variants: Vec<String>,
    /// Head dimension d for which states and parameters are counted
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = size(256))]
    pub head_dim: usize,
    /// Heads H of a layer
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = size(4096))]
    pub heads: usize,
    /// Key-value heads G of a layer [default: as many as heads]
    #[arg(long, value_name = "N", value_parser = size(4096))]
    pub kv_heads: Option<usize>,
    /// Width of the hidden state, from which gates are projected
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = size(LARGE))]
    pub hidden: usize,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl VariantsArgs {
    pub fn sizes(&self) -> Sizes {
        Sizes { heads: self.heads, kv_heads: self.kv_heads.unwrap_or(self.heads), head_dim: self.head_dim, hidden: self.hidden }
    }
}

/// Check that this build computes what it says
///
/// Runs the identities of the algebra on every preset and on random combinations of parts, and compares whole models with reference files.
/// Prints a line for each case; the exit code is 1 if any misses.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise verify
  termwise verify --golden ../shared/golden
  termwise verify --only fused --only threads --cases 200 --seed 7

A reference file is a .safetensors file with the weights of a small model, tokens, and the logits, loss and gradients to compare with;
its metadata states the sizes and the attention.")]
pub struct VerifyArgs {
    /// Folder with reference files; may be given several times
    #[arg(long, value_name = "DIR")]
    pub golden: Vec<PathBuf>,
    /// Seed of the random cases
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Random combinations of parts for each check, besides all presets
    #[arg(long, default_value_t = 20, value_name = "N")]
    pub cases: usize,
    /// Run this check alone; may be given several times
    #[arg(long, value_name = "CHECK")]
    pub only: Vec<Check>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
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
