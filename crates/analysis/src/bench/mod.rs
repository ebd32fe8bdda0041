//! Speed of attention, matrix products and training steps, next to the peak of the machine.
//!
//! Every measurement is a list of [`Job`]s that [`measure`] runs in turn. Times are the best of several rounds, since disturbances only make a round longer.
//! Everything runs in a pool of a stated number of threads. `bench/pytorch.py` prints the same JSON keys.

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

use crate::Error;

pub use attention::{AttentionBench, AttentionOptions, AttentionRow, attention, attention_flops};
pub use chunk::{ChunkBench, ChunkOptions, ChunkRow, ChunkTable, chunk};
pub use decode::{CurvePoint, DecodeBench, DecodeCase, DecodeOptions, DecodeRow, decode};
pub use gemm::{GemmBench, GemmOptions, GemmRow, gemm};
pub use machine::{Machine, peak_gflops};
pub use shapes::{AttentionShape, GemmShape, parse_shapes};
pub use step::{StageTime, StepBench, StepOptions, StepTimes, step};

/// A speed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Milliseconds, the best of all repetitions.
    pub ms: f64,
    /// GFLOP/s by the stated count.
    pub gflops: f64,
    /// Share of the peak of the machine.
    pub share_of_peak: f64,
    /// Tokens per second; `None` if there are no tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<f64>,
}

impl Speed {
    fn new(best: Duration, flops: f64, tokens: Option<usize>, machine: &Machine) -> Speed {
        // A coarse clock may measure zero.
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

/// Runs something once and returns the time of each of its stages.
type Job<'a, const N: usize> = Box<dyn FnMut() -> Result<[Duration; N], Error> + 'a>;

/// A round that takes longer is the last one, and counts even if it is the first.
const LAST_ROUND_TIME: Duration = Duration::from_secs(20);

/// Runs the jobs alternately, so a disturbance affects all of them, `repeat` times after a warmup round. Returns the times of each job.
fn measure<const N: usize>(repeat: usize, jobs: &mut [Job<N>]) -> Result<Vec<Vec<[Duration; N]>>, Error> {
    let mut times = vec![Vec::new(); jobs.len()];
    for round in 0..=repeat.max(1) {
        let start = Instant::now();
        for (job, times) in jobs.iter_mut().zip(&mut times) {
            times.push(job()?);
        }
        if start.elapsed() > LAST_ROUND_TIME {
            break;
        }
        if round == 0 {
            times.iter_mut().for_each(Vec::clear);
        }
    }
    Ok(times)
}

/// The shortest time of each stage.
fn best<const N: usize>(times: &[[Duration; N]]) -> [Duration; N] {
    std::array::from_fn(|stage| times.iter().map(|times| times[stage]).min().unwrap_or_default())
}

/// The result of some work, and its time.
fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_take_turns_and_the_first_round_is_not_counted() {
        let order = std::cell::RefCell::new(Vec::new());
        let job = |name: u64| -> Job<2> {
            let order = &order;
            let mut round = 0;
            Box::new(move || {
                round += 1;
                order.borrow_mut().push(name);
                Ok([Duration::from_secs(10 * name + round), Duration::from_secs(9 - round)])
            })
        };
        let times = measure(2, &mut [job(1), job(2)]).expect("no errors");
        assert_eq!(*order.borrow(), [1, 2, 1, 2, 1, 2]);
        assert_eq!(best(&times[1]), [22, 6].map(Duration::from_secs));
    }
}
