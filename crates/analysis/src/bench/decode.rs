//! Token-by-token decoding: a step of the recurrent state compared with a loop over the same number of bytes, and time by position.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use termwise_attention::simd::{Simd, Task, dispatch};
use termwise_attention::{Buffer, Shape, Variant};

use super::{Job, Machine, best, measure, timed};
use crate::layer::Layer;
use termwise_base::rng::Rng;
use termwise_base::threads;

use crate::Error;

/// Minimum bytes read and written per repetition. Short steps are repeated to hide the resolution of the clock.
const BYTES: usize = 64 << 20;
/// Tokens per point of the curve.
const TOKENS: usize = 64;

/// A variant at a head dimension, as in `taylor=0..2@64`.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeCase {
    /// The variant of every head.
    pub variant: Variant,
    /// d = e
    pub head_dim: usize,
}

impl FromStr for DecodeCase {
    type Err = Error;

    fn from_str(text: &str) -> Result<DecodeCase, Error> {
        let (variant, dim) = text.rsplit_once('@').unwrap_or((text, "64"));
        let bad =
            || Error::Sizes(format!("`{text}` ends in `@{dim}`, but a head dimension is a number from 1 to 256, as in taylor=0..2@64"));
        let head_dim = dim.trim().parse().ok().filter(|d| (1..=256).contains(d)).ok_or_else(bad)?;
        Ok(DecodeCase { variant: variant.trim().parse()?, head_dim })
    }
}

/// Options.
#[derive(Clone, Debug)]
pub struct DecodeOptions {
    /// Variants with their head dimensions.
    pub cases: Vec<DecodeCase>,
    /// Heads, each with its own state.
    pub heads: usize,
    /// Last position of the curve of time per token; 0: no curve.
    pub positions: usize,
    /// Last position at which the softmax cache is measured; the time to reach it is quadratic.
    pub cache_positions: usize,
    /// Threads.
    pub threads: usize,
    /// Repetitions; the best counts.
    pub repeat: usize,
}

/// Result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DecodeBench {
    /// The program.
    pub engine: String,
    /// Peak performance of the machine.
    pub machine: Machine,
    /// One per case.
    pub rows: Vec<DecodeRow>,
    /// Time per token by position, for the first case and for a KV cache.
    pub curve: Vec<CurvePoint>,
}

/// One step of one case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DecodeRow {
    /// The variant string.
    pub variant: String,
    /// d = e
    pub head_dim: usize,
    /// Query heads, H.
    pub heads: usize,
    /// Bytes of the state buffers.
    pub state_bytes: usize,
    /// Microseconds per token.
    pub us: f64,
    /// Microseconds of one thread that reads, changes and writes the same number of bytes.
    pub sweep_us: f64,
    /// GB/s, read and written.
    pub gb_per_s: f64,
    /// GB/s of the loop.
    pub sweep_gb_per_s: f64,
    /// Time of the loop divided by that of the step.
    pub share_of_sweep: f64,
}

/// Time per token at a position.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CurvePoint {
    /// The variant.
    pub variant: String,
    /// Position.
    pub position: usize,
    /// Microseconds per token.
    pub us: f64,
    /// Bytes of state or cache at this position.
    pub bytes: usize,
}

/// Measures every case, then the curve.
pub fn decode(options: &DecodeOptions) -> Result<DecodeBench, Error> {
    let pool = threads::pool(options.threads)?;
    pool.install(|| {
        let machine = Machine::measure();
        let rows = options.cases.iter().map(|case| row(case, options)).collect::<Result<_, _>>()?;
        let mut curve = Vec::new();
        if let Some(first) = options.cases.first().filter(|_| options.positions > 0) {
            curve.extend(by_position(&first.variant, first.head_dim, options.heads, options.positions)?);
            curve.extend(by_position(&Variant::default(), first.head_dim, options.heads, options.positions.min(options.cache_positions))?);
        }
        Ok(DecodeBench { engine: "termwise".into(), machine, rows, curve })
    })
}

fn shape(heads: usize, d: usize) -> Shape {
    Shape { batch: 1, time: 1, heads, kv_heads: heads, d, e: d }
}

/// Small inputs, for finite sums over a million tokens.
fn token(variant: &Variant, shape: Shape) -> Result<Layer<f32>, Error> {
    Ok(Layer::uniform(variant, shape, 0.1, &mut Rng::new(1))?)
}

fn row(case: &DecodeCase, options: &DecodeOptions) -> Result<DecodeRow, Error> {
    let shape = shape(options.heads, case.head_dim);
    let layer = token(&case.variant, shape)?;
    let mut state = layer.state()?;
    let state_bytes = state.bytes();
    if !state.is_constant() {
        return Err(Error::Sizes(format!(
            "`{}` has no finite state, so the time of a step depends on the position; use --positions",
            case.variant
        )));
    }
    let mut plain = Buffer::zeros(state_bytes.div_ceil(size_of::<f32>())).map_err(termwise_attention::Error::from)?;
    let mut y = vec![0.0; layer.dy.len()];
    let inputs = layer.inputs();
    let steps = (BYTES / state_bytes).max(1);
    let job: Job<2> = Box::new(|| {
        state.clear();
        let (result, step) = timed(|| (0..steps).try_for_each(|_| state.step(&inputs, &mut y).map(drop)));
        result?;
        let ((), sweep) = timed(|| (0..steps).for_each(|_| dispatch(ReadModifyWrite(&mut plain))));
        Ok([step, sweep])
    });
    let [step, sweep] = best(&measure(options.repeat, &mut [job])?[0]).map(|time| time.as_secs_f64() / steps as f64);
    let speed = |seconds: f64| 2.0 * state_bytes as f64 / seconds.max(1e-12) / 1e9;
    Ok(DecodeRow {
        variant: case.variant.to_string(),
        head_dim: case.head_dim,
        heads: options.heads,
        state_bytes,
        us: step * 1e6,
        sweep_us: sweep * 1e6,
        gb_per_s: speed(step),
        sweep_gb_per_s: speed(sweep),
        share_of_sweep: sweep / step,
    })
}

/// At 1, 10, 100, … and the last position.
fn by_position(variant: &Variant, d: usize, heads: usize, last: usize) -> Result<Vec<CurvePoint>, Error> {
    let shape = shape(heads, d);
    let layer = token(variant, shape)?;
    let mut state = layer.state()?;
    let (inputs, mut y) = (layer.inputs(), vec![0.0; layer.dy.len()]);
    let mut positions: Vec<usize> = (0..).map_while(|n| 10usize.checked_pow(n)).take_while(|&position| position < last).collect();
    positions.push(last);
    let mut points = Vec::new();
    for position in positions {
        while state.position(0) < Some(position) {
            state.step(&inputs, &mut y)?;
        }
        let bytes = state.bytes();
        let mut least = f64::INFINITY;
        for _ in 0..TOKENS {
            let (result, time) = timed(|| state.step(&inputs, &mut y).map(drop));
            result?;
            least = least.min(time.as_secs_f64());
        }
        points.push(CurvePoint { variant: variant.to_string(), position, us: least * 1e6, bytes });
    }
    Ok(points)
}

/// Reads, changes and writes every value.
struct ReadModifyWrite<'a>(&'a mut [f32]);

impl Task for ReadModifyWrite<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let add = simd.splat(1e-3);
        let whole = self.0.len() / (4 * S::LANES) * (4 * S::LANES);
        let (values, rest) = self.0.split_at_mut(whole);
        for at in (0..whole).step_by(4 * S::LANES) {
            for part in 0..4 {
                let i = at + part * S::LANES;
                simd.store_at(values, i, simd.add(simd.load_at(values, i), add));
            }
        }
        rest.iter_mut().for_each(|value| *value += 1e-3);
    }
}
