//! Peak performance of the machine, to which other speeds are compared.

use std::hint::black_box;
use std::time::Duration;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use termwise_attention::simd::{Simd, Task, dispatch, isa};

use super::timed;

/// Bytes read to measure the bandwidth, far more than any cache.
const BANDWIDTH_BYTES: usize = 256 << 20;
/// Independent sums: two units with a latency of four need eight, and twelve fit into sixteen registers.
const CHAINS: usize = 12;
const REPETITIONS: usize = 5;

/// Measured peaks of a pool of threads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Threads of the pool.
    pub threads: usize,
    /// The instruction set in use.
    pub instructions: String,
    /// float32 multiply-adds in registers, counted as two operations, in GFLOP/s.
    pub peak_gflops: f64,
    /// Memory reads in GB/s.
    pub read_gb_per_s: f64,
}

impl Machine {
    /// Measures the current thread pool; takes about half a second.
    pub fn measure() -> Machine {
        let threads = rayon::current_num_threads();
        Machine { threads, instructions: isa().name().into(), peak_gflops: peak_gflops(), read_gb_per_s: bandwidth(threads) }
    }
}

/// Peak float32 GFLOP/s of the current thread pool; takes about a tenth of a second.
pub fn peak_gflops() -> f64 {
    let threads = rayon::current_num_threads();
    let run = |rounds: usize| timed(|| drop(rayon::broadcast(|_| dispatch(Multiply { rounds })))).1;
    let mut rounds = 10_000;
    // Long enough to hide the start of the threads.
    while run(rounds) < Duration::from_millis(15) {
        rounds *= 2;
    }
    let best = (0..REPETITIONS).map(|_| run(rounds)).min().unwrap_or_default();
    let operations = 2 * CHAINS * dispatch(Lanes) * rounds * threads;
    operations as f64 / best.as_secs_f64().max(1e-9) / 1e9
}

struct Lanes;

impl Task for Lanes {
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::LANES
    }
}

struct Multiply {
    rounds: usize,
}

impl Task for Multiply {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        // x ← 0.5·x + 0.5 stays at 1: neither overflow nor denormals.
        let (a, b) = (simd.splat(black_box(0.5)), simd.splat(black_box(0.5)));
        let mut chains = [simd.splat(black_box(1.0)); CHAINS];
        for _ in 0..self.rounds {
            for x in &mut chains {
                *x = simd.fma(*x, a, b);
            }
        }
        black_box(chains.into_iter().map(|x| simd.sum(x)).sum())
    }
}

fn bandwidth(threads: usize) -> f64 {
    let values = vec![1f32; BANDWIDTH_BYTES / size_of::<f32>()];
    let share = values.len().div_ceil(threads);
    let run = || timed(|| drop(black_box(values.par_chunks(share).map(|part| dispatch(Sum(part))).collect::<Vec<f32>>()))).1;
    let best = (0..REPETITIONS).map(|_| run()).min().unwrap_or_default();
    BANDWIDTH_BYTES as f64 / best.as_secs_f64().max(1e-9) / 1e9
}

struct Sum<'a>(&'a [f32]);

impl Task for Sum<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let mut sums = [simd.splat(0.0); 8];
        for block in self.0.chunks_exact(8 * S::LANES) {
            for (sum, part) in sums.iter_mut().zip(block.chunks_exact(S::LANES)) {
                *sum = simd.add(*sum, simd.load_at(part, 0));
            }
        }
        sums.into_iter().map(|sum| simd.sum(sum)).sum()
    }
}
