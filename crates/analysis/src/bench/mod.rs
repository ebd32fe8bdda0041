//! Speed of attention, matrix products and training steps, beside what the machine can do.
//!
//! Times are the best of several, since what disturbs a measurement only ever makes it longer. Everything runs in a pool of a stated
//! number of threads. Keys of the JSON form are those that `bench/pytorch.py` prints.

mod attention;
mod chunk;
mod decode;
mod document;
mod gemm;
mod machine;
mod shapes;
mod step;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use attention::{AttentionBench, AttentionOptions, AttentionRow, attention, attention_flops};
pub use chunk::{ChunkBench, ChunkOptions, ChunkRow, ChunkTable, chunk};
pub use decode::{CurvePoint, DecodeBench, DecodeCase, DecodeOptions, DecodeRow, decode};
pub use gemm::{GemmBench, GemmOptions, GemmRow, gemm};
pub use machine::{Machine, peak_gflops};
pub use shapes::{AttentionShape, GemmShape, parse_shapes};
pub use step::{StageTime, StepBench, StepOptions, StepTimes, step};

/// How fast something was.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Milliseconds, the best of all repetitions.
    pub ms: f64,
    /// 10⁹ floating-point operations a second, by the stated count.
    pub gflops: f64,
    /// Of the machine's peak.
    pub share_of_peak: f64,
    /// Tokens a second; absent where there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<f64>,
}

impl Speed {
    fn new(best: Duration, flops: f64, tokens: Option<usize>, machine: &Machine) -> Speed {
        // A clock too coarse for the work must not divide by zero.
        let seconds = best.as_secs_f64().max(1e-9);
        let gflops = flops / seconds / 1e9;
        Speed {
            ms: seconds * 1e3,
            gflops,
            share_of_peak: gflops / machine.peak_gflops,
            tokens_per_s: tokens.map(|tokens| tokens as f64 / seconds),
        }
    }
}

/// How long it took.
fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}
