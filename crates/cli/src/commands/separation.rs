//! `termwise separation`.

use clap::Args;
use termwise_experiments::Error;
use termwise_experiments::separation::{self, DRAWS, SeparationRequest};

use crate::context::{Context, Output};
use crate::error::{Exit, Failure};
use crate::progress::Bar;

/// Reproduce the softmax/linear separation theorem
///
/// A reconstruction of the separation theorem of "Why Softmax Attention Outperforms Linear Attention" (arXiv 2310.11685), checked by algebra
/// and simulation. Success is the share of random readouts y and positions j3 with F = 0 on D_0 (spike a_0) and F > 0 on D_1 (spike a_1),
/// with a 95 % Wilson interval, next to the probability in closed form.
///
/// Without arguments: the reference figures next to the computed ones. With any of --network, --n, --d, --m, --a1: every combination of
/// these. With --bridge: the lowest order of the exponential that succeeds, as a function of n.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise separation
  termwise separation --network softmax --network linear --n 100,1000,1e6 --a1 1,3
  termwise separation --network taylor=0..12 --n 1000 --a1 0.7 --out orders
  termwise separation --bridge --n 100,1e4,1e6,1e8 --a1 0.7,1,3
  termwise separation --n 100,1000 --cross --json

The data have n rows of d numbers, L = √ln n: column 1 is a·L at row j3 and 0 elsewhere, columns 2 to d − 1 are b·L times a stacked identity,
column d is c·L. All scores are products of row sums. The readout is F = relu(Σ_j Σ_i relu(⟨c_j, y_i⟩ − (c + 0.1)·L)), i up to m.
The theorem is about a_0 < 0.1 and a_1 ≥ 0.7; smaller a_1 can be tried.")]
pub struct SeparationArgs {
    /// softmax, linear, power=P or taylor=P, or orders as in taylor=2..8; may be repeated [default: softmax and linear]
    #[arg(long, value_name = "NETWORK")]
    pub network: Vec<String>,
    /// Rows, such as 100,1e6 [default: 1000; with --bridge 1e2 to 1e6]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = whole)]
    pub n: Vec<u64>,
    /// Columns [default: 12]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = whole)]
    pub d: Vec<u64>,
    /// Vectors y of the readout [default: max(⌈ln(n/0.01)⌉, 15)]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = whole)]
    pub m: Vec<u64>,
    /// The spike of D_1 [default: 0.7; with --bridge 0.7,1,3]
    #[arg(long, value_name = "LIST", value_delimiter = ',', allow_negative_numbers = true)]
    pub a1: Vec<f64>,
    /// The spike of D_0 [default: 0.01]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub a0: Option<f64>,
    /// Size of the identity [default: 1 − c, or 0.1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub b: Option<f64>,
    /// Size of the constant column [default: 1 − b]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub c: Option<f64>,
    /// Cross-attention: the queries' row sums are all √ln n
    #[arg(long)]
    pub cross: bool,
    /// Find the lowest Taylor order and the lowest power with a success of at least 0.9
    #[arg(long, conflicts_with = "network")]
    pub bridge: bool,
    /// Draws of y and j3 per point
    #[arg(long, default_value_t = DRAWS, value_name = "N", value_parser = whole)]
    pub draws: u64,
    /// Seed of the draws
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    #[command(flatten)]
    pub output: Output,
}

/// 100 or 1e6.
fn whole(text: &str) -> Result<u64, Error> {
    let value = text.trim().parse::<f64>().ok().filter(|x| x.fract() == 0.0 && (0.0..=2f64.powi(53)).contains(x));
    value.map(|x| x as u64).ok_or_else(|| Error::Size { text: text.into(), expected: "a whole number such as 1000 or 1e6" })
}

impl SeparationArgs {
    fn request(&self) -> SeparationRequest {
        // `whole` returns at most 2^53.
        let sizes = |list: &[u64]| list.iter().map(|&size| size as usize).collect();
        let mut request = SeparationRequest::new();
        request.networks = self.network.clone();
        request.n = self.n.clone();
        (request.d, request.m) = (sizes(&self.d), sizes(&self.m));
        request.a1 = self.a1.clone();
        (request.a0, request.b, request.c) = (self.a0, self.b, self.c);
        (request.cross, request.bridge) = (self.cross, self.bridge);
        (request.draws, request.seed) = (self.draws, self.seed);
        request.figures = self.output.out.is_some();
        request
    }
}

/// Computes in the global pool.
pub fn run(args: &SeparationArgs, context: &mut Context) -> Result<Exit, Failure> {
    let bar = Bar::new(args.output.print.quiet);
    let found = separation::run(&args.request(), &mut |done, of| bar.at(done, of, "points"))?;
    drop(bar);
    context.emit(&found, &args.output).map(Exit::done)
}
