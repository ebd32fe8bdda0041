//! `termwise bench`.

use clap::{Args, Subcommand};
use termwise_analysis::bench::{AttentionOptions, ChunkOptions, DecodeOptions, GemmOptions, StepOptions, parse_shapes};
use termwise_analysis::variants::split_list;
use termwise_analysis::{Error, bench};
use termwise_attention::simd::{self, Isa};
use termwise_model::Precision;

use crate::args::{LARGE, size};
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};

/// Measure speed
///
/// First measures the peak of the machine: float32 multiply-adds in registers, and memory reads. Times are the best of several repetitions.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Instruction set of attention: portable, avx2 or avx512 [default: the widest available]. Matrix products of linear layers select theirs
    /// separately
    #[arg(long, global = true, value_name = "NAME", value_parser = instruction_set)]
    pub isa: Option<Isa>,
    #[command(subcommand)]
    pub what: Bench,
}

#[derive(Debug, Subcommand)]
pub enum Bench {
    Attention(AttentionArgs),
    Chunk(ChunkArgs),
    Decode(DecodeArgs),
    Gemm(GemmArgs),
    Step(StepArgs),
}

/// Parses an instruction set that this machine supports.
fn instruction_set(text: &str) -> Result<Isa, String> {
    let word = |isa: &Isa| isa.name().to_lowercase().replace('-', "");
    let available = Isa::available();
    let known = available.iter().map(word).collect::<Vec<_>>().join(", ");
    available.into_iter().find(|isa| word(isa) == text).ok_or_else(|| format!("this machine supports {known}"))
}

pub fn run(args: &BenchArgs, context: &mut Context) -> Result<Exit, Failure> {
    if let Some(isa) = args.isa {
        simd::choose(isa);
    }
    let threads = context.threads;
    match &args.what {
        Bench::Attention(args) => context.emit(&bench::attention(&args.options(threads)?)?, &args.output),
        Bench::Chunk(args) => context.emit(&bench::chunk(&args.options(threads)?)?, &args.output),
        Bench::Decode(args) => context.emit(&bench::decode(&args.options(threads)?)?, &args.output),
        Bench::Gemm(args) => context.emit(&bench::gemm(&args.options(threads)?)?, &args.output),
        Bench::Step(args) => context.emit(&bench::step(&args.options(threads)?)?, &args.output),
    }
    .map(Exit::done)
}

/// Measure fused attention, forward and backward
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise bench attention
  termwise bench attention --shapes 1x8x2048 --variants \"softmax,norm,taylor=0..4 rope=off\"
  termwise bench attention --variants all --json

Softmax is always included for comparison. Operations are counted as 4·B·H·d·T(T+1)/2 forward and 3.5 times that with backward.")]
pub struct AttentionArgs {
    /// Shapes: batch x heads x length, separated by commas
    #[arg(long, default_value = "8x4x256,2x4x1024,1x8x2048", value_name = "BxHxT")]
    pub shapes: String,
    /// Head dimension d
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = size(256))]
    pub head_dim: usize,
    /// Key-value heads [default: same as heads]
    #[arg(long, value_name = "N", value_parser = size(4096))]
    pub kv_heads: Option<usize>,
    /// Presets or variant strings, separated by commas, or `all`
    #[arg(long, default_value = "softmax,norm,gate,taylor=0..4", value_name = "LIST")]
    pub variants: String,
    /// Repetitions; the fastest is reported
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = size(LARGE))]
    pub repeat: usize,
    #[command(flatten)]
    pub output: Output,
}

impl AttentionArgs {
    pub fn options(&self, threads: usize) -> Result<AttentionOptions, Error> {
        Ok(AttentionOptions {
            shapes: parse_shapes(&self.shapes)?,
            head_dim: self.head_dim,
            kv_heads: self.kv_heads,
            variants: split_list(&self.variants)?,
            threads,
            repeat: self.repeat,
        })
    }
}

/// Compare chunked and parallel attention by length
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise bench chunk
  termwise bench chunk --case taylor=0..2@16 --case \"feature=elu decay=softplus@64\" --longest 16384

Lengths double from one to the next. Mode `auto` switches at the predicted length. The measured crossover is interpolated between the two
lengths around it.")]
pub struct ChunkArgs {
    /// Variant and head dimension; may be repeated
    #[arg(long = "case", default_values = ["taylor=0..2@16", "taylor=0..2@64"], value_name = "VARIANT@D")]
    pub cases: Vec<String>,
    /// Heads
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = size(4096))]
    pub heads: usize,
    /// Shortest length
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = size(LARGE))]
    pub shortest: usize,
    /// Longest length
    #[arg(long, default_value_t = 65_536, value_name = "N", value_parser = size(LARGE))]
    pub longest: usize,
    /// Repetitions; the fastest is reported. Long sequences have fewer
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = size(LARGE))]
    pub repeat: usize,
    #[command(flatten)]
    pub output: Output,
}

impl ChunkArgs {
    pub fn options(&self, threads: usize) -> Result<ChunkOptions, Error> {
        let cases = self.cases.iter().map(|case| case.parse()).collect::<Result<_, _>>()?;
        let &ChunkArgs { heads, shortest, longest, repeat, .. } = self;
        Ok(ChunkOptions { cases, heads, shortest, longest, threads, repeat })
    }
}

/// Measure token-by-token decoding with a recurrent state
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise bench decode
  termwise bench decode --case taylor=0..2@16 --positions 1000000

Each step is compared with a loop of one thread that reads, changes and writes as many bytes as the state has. --positions also measures the
time per token by position, for the first case and for softmax, whose cache grows.")]
pub struct DecodeArgs {
    /// Variant and head dimension; may be repeated
    #[arg(long = "case", default_values = ["taylor=0..2@64", "taylor=0..3@32", "taylor=0..4@16"], value_name = "VARIANT@D")]
    pub cases: Vec<String>,
    /// Heads, each with its own state
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = size(4096))]
    pub heads: usize,
    /// Last position of the curve of time per token [default: no curve]
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "N")]
    pub positions: usize,
    /// Last position at which the softmax cache is measured; the time to reach it is quadratic
    #[arg(long, default_value_t = 20_000, value_name = "N")]
    pub cache_positions: usize,
    /// Repetitions; the fastest is reported
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = size(LARGE))]
    pub repeat: usize,
    #[command(flatten)]
    pub output: Output,
}

impl DecodeArgs {
    pub fn options(&self, threads: usize) -> Result<DecodeOptions, Error> {
        let cases = self.cases.iter().map(|case| case.parse()).collect::<Result<_, _>>()?;
        let &DecodeArgs { heads, positions, cache_positions, repeat, .. } = self;
        Ok(DecodeOptions { cases, heads, positions, cache_positions, threads, repeat })
    }
}

/// Measure the three matrix products of a linear layer
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise bench gemm
  termwise bench gemm --shapes 2048x256x512,1024x1024x1024 --repeat 50

A shape M x K x N is y [M, N] = x [M, K] · W [N, K]ᵀ; its two backward products are also measured. Each counts 2·M·K·N operations.")]
pub struct GemmArgs {
    /// Shapes: M x K x N, separated by commas
    #[arg(long, default_value = "2048x256x256,2048x256x512,2048x512x256,2048x256x4096,1024x1024x1024", value_name = "MxKxN")]
    pub shapes: String,
    /// Repetitions; the fastest is reported
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = size(LARGE))]
    pub repeat: usize,
    #[command(flatten)]
    pub output: Output,
}

impl GemmArgs {
    pub fn options(&self, threads: usize) -> Result<GemmOptions, Error> {
        Ok(GemmOptions { shapes: parse_shapes(&self.shapes)?, threads, repeat: self.repeat })
    }
}

/// Measure a training step of a model: loss, gradients and AdamW
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise bench step
  termwise bench step --attention \"taylor=0..4 norm=l2\" --length 1024 --batch 2

Operations are counted as 6·B·T·N plus those of attention. N is the number of parameters in matrices without the embedding.")]
pub struct StepArgs {
    /// Vocabulary size
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = size(LARGE))]
    pub vocab: usize,
    /// Hidden size
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = size(LARGE))]
    pub hidden: usize,
    /// Query heads per layer
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = size(4096))]
    pub heads: usize,
    /// Key-value heads [default: same as heads]
    #[arg(long, value_name = "N", value_parser = size(4096))]
    pub kv_heads: Option<usize>,
    /// Layers
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = size(4096))]
    pub layers: usize,
    /// Intermediate size of the MLP
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = size(LARGE))]
    pub mlp: usize,
    /// Rows per batch
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = size(LARGE))]
    pub batch: usize,
    /// Positions per row
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = size(LARGE))]
    pub length: usize,
    /// Preset or variant string of every head
    #[arg(long, default_value = "softmax", value_name = "VARIANT")]
    pub attention: String,
    /// Precision of linear layers and products of attention: f32 or bf16
    #[arg(long, default_value = "f32", value_name = "TYPE")]
    pub precision: Precision,
    /// Measured steps; the fastest is reported
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = size(LARGE))]
    pub repeat: usize,
    #[command(flatten)]
    pub output: Output,
}

impl StepArgs {
    pub fn options(&self, threads: usize) -> Result<bench::StepOptions, Error> {
        Ok(StepOptions {
            vocab: self.vocab,
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.kv_heads,
            layers: self.layers,
            mlp: self.mlp,
            batch: self.batch,
            length: self.length,
            attention: self.attention.parse::<termwise_attention::Variant>()?,
            precision: self.precision,
            threads,
            repeat: self.repeat,
        })
    }
}
