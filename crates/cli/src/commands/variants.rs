//! `termwise variants`.

use clap::Args;
use termwise_lab::variants::{Described, Sizes, catalogue, describe};

use crate::args::{LARGE, size};
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};

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
