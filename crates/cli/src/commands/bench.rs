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
    /// Instruction set of our own vector code: portable, avx2 or avx512 [default: the widest that the machine has]. Matrix products of
    /// linear layers choose for themselves
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

/// One that this machine can run.
fn instruction_set(text: &str) -> Result<Isa, String> {
    let word = |isa: &Isa| isa.name().to_lowercase().replace('-', "");
    let available = Isa::available();
    let known = available.iter().map(word).collect::<Vec<_>>().join(", ");
    available.into_iter().find(|isa| word(isa) == text).ok_or_else(|| format!("this machine can run {known}"))
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

/// The fused attention, forward and with its backward pass
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise bench attention
  termwise bench attention --shapes 1x8x2048 --variants \"softmax,norm,taylor=0..4 rope=off\"
  termwise bench attention --variants all --json

Softmax is always measured too, to compare with. Operations are counted as 4·B·H·d·T(T+1)/2 forward and 3.5 times that with backward.")]
pub struct AttentionArgs {
    /// Sizes, batch x heads x time, separated by commas
    #[arg(long, default_value = "8x4x256,2x4x1024,1x8x2048", value_name = "BxHxT")]
    pub shapes: String,
    /// Head dimension d
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = size(256))]
    pub head_dim: usize,
    /// Key-value heads [default: as many as heads]
    #[arg(long, value_name = "N", value_parser = size(4096))]
    pub kv_heads: Option<usize>,
    /// Presets or expressions, separated by commas, or `all`
    #[arg(long, default_value = "softmax,norm,gate,taylor=0..4", value_name = "LIST")]
    pub variants: String,
    /// Repetitions, of which the best counts
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

/// Chunk mode against parallel mode, by length
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise bench chunk
  termwise bench chunk --case taylor=0..2@16 --case \"feature=elu decay=softplus@64\" --longest 16384

Measured are lengths that double from one to the next. `auto` changes at the predicted length; where the times really cross is found
between the two lengths around it.")]
pub struct ChunkArgs {
    /// Variant and head dimension; may be given several times
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
    /// Repetitions, of which the best counts; long lengths have fewer
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

/// One token at a time with a constant state
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise bench decode
  termwise bench decode --case taylor=0..2@16 --positions 1000000

Beside each step stands a plain sweep of one thread that reads, changes and writes as many bytes as the state has. With --positions
follows the time of a token by position, for the first case and for softmax, whose cache grows.")]
pub struct DecodeArgs {
    /// Variant and head dimension; may be given several times
    #[arg(long = "case", default_values = ["taylor=0..2@64", "taylor=0..3@32", "taylor=0..4@16"], value_name = "VARIANT@D")]
    pub cases: Vec<String>,
    /// Heads, each with a state of its own
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = size(4096))]
    pub heads: usize,
    /// Last position of the curve of time by position [default: none]
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "N")]
    pub positions: usize,
    /// Last position at which a cache is measured: to get there takes time that grows with its square
    #[arg(long, default_value_t = 20_000, value_name = "N")]
    pub cache_positions: usize,
    /// Repetitions, of which the best counts
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

/// The three matrix products of a linear layer
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise bench gemm
  termwise bench gemm --shapes 2048x256x512,1024x1024x1024 --repeat 50

A shape M x K x N is y [M, N] = x [M, K] · W [N, K]ᵀ; its backward products are measured as well. Each counts 2·M·K·N operations.")]
pub struct GemmArgs {
    /// Sizes, M x K x N, separated by commas
    #[arg(long, default_value = "2048x256x256,2048x256x512,2048x512x256,2048x256x4096,1024x1024x1024", value_name = "MxKxN")]
    pub shapes: String,
    /// Repetitions, of which the best counts
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

/// A training step of a whole model: loss, gradient and AdamW
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise bench step
  termwise bench step --attention \"taylor=0..4 norm=l2\" --length 1024 --batch 2

Operations are counted as 6·B·T·N, N the numbers in matrices without the embedding, plus those of attention.")]
pub struct StepArgs {
    /// Tokens in the vocabulary
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = size(LARGE))]
    pub vocab: usize,
    /// Width of the hidden state
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = size(LARGE))]
    pub hidden: usize,
    /// Heads of a layer
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = size(4096))]
    pub heads: usize,
    /// Key-value heads [default: as many as heads]
    #[arg(long, value_name = "N", value_parser = size(4096))]
    pub kv_heads: Option<usize>,
    /// Layers
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = size(4096))]
    pub layers: usize,
    /// Width inside the MLP
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = size(LARGE))]
    pub mlp: usize,
    /// Rows of a batch
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = size(LARGE))]
    pub batch: usize,
    /// Positions of a row
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = size(LARGE))]
    pub length: usize,
    /// Preset or expression of every head
    #[arg(long, default_value = "softmax", value_name = "VARIANT")]
    pub attention: String,
    /// Precision of linear layers and products of attention: f32 or bf16
    #[arg(long, default_value = "f32", value_name = "TYPE")]
    pub precision: Precision,
    /// Steps that are measured, of which the best counts
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
