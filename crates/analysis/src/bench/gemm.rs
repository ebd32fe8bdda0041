//! The matrix products of a linear layer, as in models.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use termwise_model::ops::linear::{self, Write};

use super::{GemmShape, Job, Machine, Speed, best, measure, timed};
use termwise_base::rng::Rng;
use termwise_base::threads;

use crate::Error;

/// Options.
#[derive(Clone, Debug)]
pub struct GemmOptions {
    /// Shapes.
    pub shapes: Vec<GemmShape>,
    /// Threads.
    pub threads: usize,
    /// Repetitions; the best counts.
    pub repeat: usize,
}

/// Result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GemmBench {
    /// The program.
    pub engine: String,
    /// Peak performance of the machine.
    pub machine: Machine,
    /// Formula of the operation count.
    pub flop_count: String,
    /// One per shape and product.
    pub rows: Vec<GemmRow>,
}

/// One product at one shape.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GemmRow {
    /// `y = x·Wᵀ`, `dx = dy·W` or `dW = dyᵀ·x`.
    pub product: String,
    /// Rows of x.
    pub m: usize,
    /// Inner dimension of the first product.
    pub k: usize,
    /// Rows of W.
    pub n: usize,
    /// Its speed.
    #[serde(flatten)]
    pub speed: Speed,
}

const PRODUCTS: [&str; 3] = ["y = x·Wᵀ", "dx = dy·W", "dW = dyᵀ·x"];

/// Measures the three products of every shape.
pub fn gemm(options: &GemmOptions) -> Result<GemmBench, Error> {
    let pool = threads::pool(options.threads)?;
    pool.install(|| {
        let machine = Machine::measure();
        let rows = options.shapes.iter().map(|&shape| at_shape(shape, options.repeat, &machine)).collect::<Result<Vec<_>, _>>()?.concat();
        Ok(GemmBench { engine: "termwise".into(), machine, flop_count: "2·M·K·N".into(), rows })
    })
}

fn at_shape(GemmShape { m, k, n }: GemmShape, repeat: usize, machine: &Machine) -> Result<Vec<GemmRow>, Error> {
    let mut rng = Rng::new(1);
    let mut normals = |n: usize| (0..n).map(|_| rng.normal() as f32).collect::<Vec<f32>>();
    let (x, w, dy) = (normals(m * k), normals(n * k), normals(m * n));
    let (mut y, mut dx, mut dw) = (vec![0.0; m * n], vec![0.0; m * k], vec![0.0; n * k]);
    let job: Job<3> = Box::new(|| {
        let ((), forward) = timed(|| linear::forward(&x, &w, None, &mut y, k));
        let ((), input) = timed(|| linear::backward_input(&dy, &w, &mut dx, k, Write::Replace));
        let ((), weight) = timed(|| linear::backward_weight(&dy, &x, &mut dw, k));
        Ok([forward, input, weight])
    });
    let best = best(&measure(repeat, &mut [job])?[0]);
    let flops = 2.0 * m as f64 * k as f64 * n as f64;
    let row =
        |(product, best): (&str, Duration)| GemmRow { product: product.into(), m, k, n, speed: Speed::new(best, flops, None, machine) };
    Ok(PRODUCTS.into_iter().zip(best).map(row).collect())
}
