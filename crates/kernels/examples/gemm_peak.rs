//! Throughput of matrix products in float32 and bfloat16, as a share of the peak of `vdpbf16ps` in registers.
//!
//! ```text
//! cargo run --release -p termwise-kernels --example gemm_peak [THREADS [MxNxK ...]]
//! ```
//!
//! For a linear layer of M rows, N outputs and K inputs it prints GFLOP/s of y = x Wᵀ, dx = dy W and dW += dyᵀ x. Packing of activations is included,
//! packing of the weights is not: it happens once per step. Each number is the best of 20 calls.
#![allow(missing_docs, reason = "a program")]

use std::time::Instant;

use termwise_kernels::Buffer;
use termwise_kernels::bf16_gemm::{Bf16Isa, Bf16Workspace, PackedBf16};
use termwise_kernels::gemm::{Matrix, Write, product};

/// The linear layers of a model with width 512, MLP 1408, vocabulary 8192 and 2048 tokens, then of one with width 256, MLP 512, vocabulary 4096.
const SHAPES: [[usize; 3]; 10] = [
    [2048, 1536, 512],
    [2048, 512, 512],
    [2048, 2816, 512],
    [2048, 512, 1408],
    [256, 8192, 512],
    [2048, 768, 256],
    [2048, 256, 256],
    [2048, 1024, 256],
    [2048, 256, 512],
    [256, 4096, 256],
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().map_or(Ok(0), |text| text.parse())?;
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
    let given = arguments.map(|text| shape(&text)).collect::<Result<Vec<_>, _>>()?;
    let shapes = if given.is_empty() { SHAPES.to_vec() } else { given };

    let peak = peak();
    println!("{:?}, {} threads", Bf16Isa::selected(), rayon::current_num_threads());
    println!("peak of vdpbf16ps in registers: {}", peak.map_or("-".into(), |peak| format!("{peak:.0} GFLOP/s")));
    println!("{:>16}  {:>24}  {:>24}  share of peak", "M x N x K", "float32: y, dx, dW", "bfloat16: y, dx, dW");
    for [m, n, k] in shapes {
        let [float32, bfloat16] = measure(m, n, k)?;
        let text = |all: [f64; 3]| all.map(|x| format!("{x:>7.0}")).join(" ");
        let share = peak.map_or("-".into(), |peak| bfloat16.map(|x| format!("{:>4.0} %", 100.0 * x / peak)).join(" "));
        println!("{:>16}  {:>24}  {:>24}  {share}", format!("{m} x {n} x {k}"), text(float32), text(bfloat16));
    }
    Ok(())
}

fn shape(text: &str) -> Result<[usize; 3], String> {
    let sizes: Option<Vec<usize>> = text.split('x').map(|size| size.parse().ok().filter(|&size| size > 0)).collect();
    sizes.and_then(|sizes| sizes.try_into().ok()).ok_or_else(|| format!("`{text}` is not a shape; expected MxNxK, such as 2048x1536x512"))
}

/// GFLOP/s in float32 and in bfloat16 of y, dx and dW.
fn measure(m: usize, n: usize, k: usize) -> Result<[[f64; 3]; 2], termwise_kernels::Error> {
    let numbers = |len: usize| -> Result<Buffer, termwise_kernels::Error> {
        let mut values = Buffer::zeros(len)?;
        values.iter_mut().enumerate().for_each(|(i, x)| *x = (i * 7919 % 101) as f32 / 50.0 - 1.0);
        Ok(values)
    };
    let (x, w, dy) = (numbers(m * k)?, numbers(n * k)?, numbers(m * n)?);
    let (mut y, mut dx, mut dw) = (numbers(m * n)?, numbers(m * k)?, numbers(n * k)?);
    let (x, w, dy) = (Matrix::new(&x, m, k), Matrix::new(&w, n, k), Matrix::new(&dy, m, n));
    let flops = 2.0 * m as f64 * n as f64 * k as f64 / 1e9;
    let float32 = [
        flops / best(|| product(&mut y, n, Write::Replace, x, w.transposed())),
        flops / best(|| product(&mut dx, k, Write::Replace, dy, w)),
        flops / best(|| product(&mut dw, k, Write::Add, dy.transposed(), x)),
    ];
    let (mut forward, mut backward) = (PackedBf16::default(), PackedBf16::default());
    forward.pack(w.transposed())?;
    backward.pack(w)?;
    let mut workspace = Bf16Workspace::default();
    let mut result = Ok(());
    let bfloat16 = [
        flops / best(|| result = workspace.product_packed(&mut y, n, Write::Replace, x, &forward)),
        flops / best(|| result = workspace.product_packed(&mut dx, k, Write::Replace, dy, &backward)),
        flops / best(|| result = workspace.product(&mut dw, k, Write::Add, dy.transposed(), x)),
    ];
    result.map(|()| [float32, bfloat16])
}

/// Seconds of the fastest of 20 calls.
fn best(mut run: impl FnMut()) -> f64 {
    (0..20).fold(f64::INFINITY, |best, _| {
        let start = Instant::now();
        run();
        best.min(start.elapsed().as_secs_f64())
    })
}

/// GFLOP/s of `vdpbf16ps` on registers, on all threads of the pool at once.
#[cfg(target_arch = "x86_64")]
fn peak() -> Option<f64> {
    use std::arch::x86_64::*;
    const STEPS: usize = 200_000;
    /// Independent sums, enough to hide the latency.
    const SUMS: usize = 12;

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn registers() -> f32 {
        // SAFETY: both types are 64 bytes of plain data.
        let one = unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(0x3f80_3f80)) };
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..STEPS {
            // As one value, so that the sums stay in registers.
            let [a, b, c, d, e, f, g, h, i, j, k, l] = sums;
            let add = |sum: __m512| _mm512_dpbf16_ps(sum, one, one);
            sums = [add(a), add(b), add(c), add(d), add(e), add(f), add(g), add(h), add(i), add(j), add(k), add(l)];
        }
        sums.into_iter().map(|sum| _mm512_reduce_add_ps(sum)).sum()
    }

    let native = Bf16Isa::selected() == Bf16Isa::Avx512Bf16;
    let flops = (rayon::current_num_threads() * STEPS * SUMS * 64) as f64 / 1e9;
    native.then(|| {
        flops
            / best(|| {
                // SAFETY: `selected` detected the features.
                rayon::broadcast(|_| std::hint::black_box(unsafe { registers() }));
            })
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn peak() -> Option<f64> {
    None
}
