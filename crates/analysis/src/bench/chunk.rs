//! Chunk mode compared with parallel mode by length, and the crossover.

use serde::{Deserialize, Serialize};
use termwise_attention::{Attention, FusedOptions, Mode, Scratch, Shape, Variant, break_even};

use super::{DecodeCase, Job, Machine, best, measure, timed};
use crate::layer::{Layer, grads};
use termwise_base::rng::Rng;
use termwise_base::threads;

use crate::Error;

/// Options.
#[derive(Clone, Debug)]
pub struct ChunkOptions {
    /// Variants with their head dimensions.
    pub cases: Vec<DecodeCase>,
    /// H = G
    pub heads: usize,
    /// The first length; lengths double.
    pub shortest: usize,
    /// The largest length.
    pub longest: usize,
    /// Threads.
    pub threads: usize,
    /// Repetitions; the best counts; long lengths have fewer.
    pub repeat: usize,
}

/// Result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChunkBench {
    /// The program.
    pub engine: String,
    /// Peak performance of the machine.
    pub machine: Machine,
    /// One per case.
    pub cases: Vec<ChunkTable>,
}

/// One variant at all lengths.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChunkTable {
    /// The variant string.
    pub variant: String,
    /// d = e
    pub head_dim: usize,
    /// Query heads, H.
    pub heads: usize,
    /// The length from which `auto` selects chunks.
    pub predicted: Option<usize>,
    /// The interpolated length at which both modes take the same time with backward.
    pub measured: Option<usize>,
    /// By length.
    pub rows: Vec<ChunkRow>,
}

/// Both modes at one length; milliseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChunkRow {
    /// Positions, T.
    pub time: usize,
    /// Parallel, forward.
    pub parallel_forward_ms: f64,
    /// Parallel, with backward.
    pub parallel_ms: f64,
    /// Chunk, forward.
    pub chunk_forward_ms: f64,
    /// Chunk, with backward.
    pub chunk_ms: f64,
    /// Time of parallel mode divided by that of chunk mode, forward.
    pub forward_ratio: f64,
    /// With backward.
    pub ratio: f64,
    /// The mode that `auto` selects.
    pub auto: String,
}

/// Measures all cases. Both modes alternate at each length.
pub fn chunk(options: &ChunkOptions) -> Result<ChunkBench, Error> {
    let pool = threads::pool(options.threads)?;
    pool.install(|| {
        let machine = Machine::measure();
        let cases = options.cases.iter().map(|case| table(case, options)).collect::<Result<_, _>>()?;
        Ok(ChunkBench { engine: "termwise".into(), machine, cases })
    })
}

fn table(case: &DecodeCase, options: &ChunkOptions) -> Result<ChunkTable, Error> {
    let mut rows: Vec<ChunkRow> = Vec::new();
    let mut time = options.shortest.max(1);
    let shape = |time| Shape { batch: 1, time, heads: options.heads, kv_heads: options.heads, d: case.head_dim, e: case.head_dim };
    while time <= options.longest {
        rows.push(row(&case.variant, shape(time), options.repeat)?);
        time *= 2;
    }
    Ok(ChunkTable {
        variant: case.variant.to_string(),
        head_dim: case.head_dim,
        heads: options.heads,
        predicted: break_even(&case.variant, shape(1)),
        measured: crossing(&rows),
        rows,
    })
}

/// The length at which the ratio is 1, by linear interpolation of the logarithms of length and ratio.
fn crossing(rows: &[ChunkRow]) -> Option<usize> {
    let (before, after) = rows.iter().zip(rows.iter().skip(1)).find(|(before, after)| before.ratio < 1.0 && after.ratio >= 1.0)?;
    let share = -before.ratio.ln() / (after.ratio.ln() - before.ratio.ln());
    Some((before.time as f64 * (after.time as f64 / before.time as f64).powf(share)).round() as usize)
}

fn row(variant: &Variant, shape: Shape, repeat: usize) -> Result<ChunkRow, Error> {
    let layer = Layer::<f32>::uniform(variant, shape, 0.3, &mut Rng::new(1))?;
    let auto = layer.fused(FusedOptions::default().mode(Mode::Auto))?.mode_taken().to_string();
    let scratch = Scratch::default();
    // Long measurements are less noisy.
    let repeat = (repeat * 4096 / shape.time).clamp(1, repeat.max(1));
    let job = |mode: Mode| -> Result<Job<2>, Error> {
        let mut engine = layer.fused(FusedOptions::default().mode(mode).scratch(&scratch))?;
        let (mut y, mut gradients) = (vec![0.0; layer.dy.len()], layer.no_gradients());
        let layer = &layer;
        Ok(Box::new(move || {
            let (saved, forward) = timed(|| engine.forward(&layer.inputs(), &mut y));
            let saved = saved?;
            let (result, backward) = timed(|| engine.backward(&layer.inputs(), &saved, &layer.dy, &mut grads(&mut gradients)));
            result?;
            Ok([forward, forward + backward])
        }))
    };
    let times = measure(repeat, &mut [job(Mode::Parallel)?, job(Mode::Chunk(None))?])?;
    let [parallel_forward, parallel] = best(&times[0]).map(|time| time.as_secs_f64() * 1e3);
    let [chunk_forward, chunk] = best(&times[1]).map(|time| time.as_secs_f64() * 1e3);
    Ok(ChunkRow {
        time: shape.time,
        parallel_forward_ms: parallel_forward,
        parallel_ms: parallel,
        chunk_forward_ms: chunk_forward,
        chunk_ms: chunk,
        forward_ratio: parallel_forward / chunk_forward,
        ratio: parallel / chunk,
        auto,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crossing_lies_between_the_lengths_around_it() {
        let row = |time, ratio| ChunkRow {
            time,
            parallel_forward_ms: 0.0,
            parallel_ms: 0.0,
            chunk_forward_ms: 0.0,
            chunk_ms: 0.0,
            forward_ratio: 1.0,
            ratio,
            auto: String::new(),
        };
        assert_eq!(crossing(&[row(256, 0.5), row(512, 2.0), row(1024, 4.0)]), Some(362));
        assert_eq!(crossing(&[row(256, 1.5), row(512, 2.0)]), None);
    }
}
