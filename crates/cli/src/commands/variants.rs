//! `termwise variants`.

use clap::Args;
use termwise_analysis::variants::{Described, Sizes, catalogue, describe};

use crate::args::{LARGE, size};
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};

/// List or compare attention variants
///
/// Without arguments: all presets, grouped by equal output, and all parts. With names or variant strings: cost and parts of each, and
/// whether it equals a preset or another argument.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise variants
  termwise variants gated_softmax
  termwise variants \"exp denominator=sum norm=l2\" \"exp denominator=length out norm=l2\"
  termwise variants --json | jq '.presets[].name'

A variant string is a list of words in any order: a kernel (exp, taylor=0..4, power=2, feature=elu) and parts such as denominator=length,
out, norm=rms, rope=off. A preset expands to its words; further words override them: \"gated_softmax norm=rms\".")]
pub struct VariantsArgs {
    /// Presets or variant strings
    #[arg(value_name = "VARIANT")]
    pub variants: Vec<String>,
    /// Head dimension, for the size of states and parameters
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = size(256))]
    pub head_dim: usize,
    /// Query heads per layer
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = size(4096))]
    pub heads: usize,
    /// Key-value heads per layer [default: same as heads]
    #[arg(long, value_name = "N", value_parser = size(4096))]
    pub kv_heads: Option<usize>,
    /// Hidden size, for the size of gate projections
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = size(LARGE))]
    pub hidden: usize,
    #[command(flatten)]
    pub output: Output,
}

impl VariantsArgs {
    pub fn sizes(&self) -> Sizes {
        Sizes { heads: self.heads, kv_heads: self.kv_heads.unwrap_or(self.heads), head_dim: self.head_dim, hidden: self.hidden }
    }
}

pub fn run(args: &VariantsArgs, context: &mut Context) -> Result<Exit, Failure> {
    let sizes = args.sizes();
    if args.variants.is_empty() {
        context.emit(&catalogue(sizes)?, &args.output)?;
    } else {
        let texts: Vec<&str> = args.variants.iter().map(String::as_str).collect();
        context.emit(&Described { sizes, variants: describe(&texts, sizes)? }, &args.output)?;
    }
    Ok(Exit::Success)
}
