//! y = x Wᵀ + b for few rows: x [M, C], W [N, C], b [N], y [M, N]. Decoding uses it; its time is that of reading W.
//!
//! Every value is one dot product, summed in an order that depends on C alone. A row has the same bits in a batch of any size and on any number of
//! threads. W is read from memory once, as float32 or as bfloat16, for any M.

use std::cell::RefCell;

use half::bf16;
use rayon::prelude::*;

use crate::bf16::WeightMatrix;
use crate::simd::{Simd, Task, dispatch};

/// Rows of W that are multiplied at once. This number of sums hides the latency of fma, and the rows are separate streams from memory.
const WEIGHT_ROWS: usize = 8;
/// Minimum bytes of W per parallel task: reading them takes much longer than waking a thread.
const MIN_TASK_BYTES: usize = 256 * 1024;
/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

thread_local! {
    /// [`WEIGHT_ROWS`] rows of W in float32. It fits into the second-level cache and grows to the widest matrix.
    static COPY: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Length of `columns` that [`forward`] needs for M rows and N outputs.
pub fn scratch_len(rows: usize, outputs: usize) -> usize {
    if rows == 1 { 0 } else { rows * outputs }
}

/// y [M, N] = x Wᵀ + b. `columns` is scratch memory of at least [`scratch_len`] values.
///
/// # Panics
/// If the lengths are not those of a product of rows of `width` values.
pub fn forward(x: &[f32], weight: WeightMatrix, bias: Option<&[f32]>, y: &mut [f32], width: usize, columns: &mut [f32]) {
    match weight {
        WeightMatrix::F32(weight) => run(x, weight, bias, y, width, columns),
        WeightMatrix::Bf16(weight) => run(x, weight, bias, y, width, columns),
    }
}

fn run<E: Element>(x: &[f32], weight: &[E], bias: Option<&[f32]>, y: &mut [f32], width: usize, columns: &mut [f32]) {
    let (m, n) = (x.len() / width, weight.len() / width);
    let fits = x.len() == m * width && weight.len() == n * width && y.len() == m * n;
    assert!(fits, "x, W and y are not [{m}, {width}], [{n}, {width}] and [{m}, {n}]");
    if m == 0 || n == 0 {
        return;
    }
    // The same number of tasks for every thread. The bits do not depend on the division of W.
    let tasks = (size_of_val(weight) / MIN_TASK_BYTES).max(1).next_multiple_of(rayon::current_num_threads());
    let smallest = MIN_TASK_BYTES / (4 * width * size_of::<E>());
    let rows = n.div_ceil(tasks).next_multiple_of(WEIGHT_ROWS).max(smallest.next_multiple_of(WEIGHT_ROWS));
    // Outputs of one row of W are contiguous, so tasks write to separate parts of memory.
    let out = if m == 1 { &mut *y } else { &mut columns[..m * n] };
    let task = |(weight, out): (&[E], &mut [f32])| {
        COPY.with_borrow_mut(|copy| {
            if m >= E::COPY_FROM {
                copy.resize(WEIGHT_ROWS * width, 0.0);
            }
            dispatch(GemvPart { x, weight, width, out, copy });
        });
    };
    if n <= rows {
        task((weight, out));
    } else {
        (weight.par_chunks(rows * width), out.par_chunks_mut(rows * m)).into_par_iter().for_each(task);
    }
    if m > 1 {
        for (row, y) in y.chunks_exact_mut(n).enumerate() {
            y.iter_mut().zip(columns.chunks_exact(m)).for_each(|(y, column)| *y = column[row]);
        }
    }
    if let Some(bias) = bias {
        for row in y.chunks_exact_mut(n) {
            row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
    }
}

/// bfloat16 is the upper half of a float32.
#[inline(always)]
pub(crate) fn to_f32(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Number type of weights.
trait Element: Copy + Send + Sync {
    /// Number of rows of x from which a float32 copy of the rows of W in the cache is faster.
    const COPY_FROM: usize;

    /// LANES values as float32.
    ///
    /// # Safety
    /// `p` must be valid for reads of LANES values.
    unsafe fn load<S: Simd>(simd: S, p: *const Self) -> S::V;

    /// The value in float32.
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    const COPY_FROM: usize = 6;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, p: *const f32) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { simd.load(p) }
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    const COPY_FROM: usize = 3;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, p: *const bf16) -> S::V {
        // Compiles to two instructions: zero-extend to 32 bits, shift.
        let mut lanes = [0.0; 16];
        for (i, lane) in lanes[..S::LANES].iter_mut().enumerate() {
            // SAFETY: the caller promises LANES values, and i < LANES.
            *lane = to_f32(unsafe { *p.add(i) });
        }
        // SAFETY: a vector has at most 16 lanes.
        unsafe { simd.load(lanes.as_ptr()) }
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        to_f32(self)
    }
}

/// Some rows of W times all rows of x.
struct GemvPart<'a, E> {
    x: &'a [f32],
    weight: &'a [E],
    width: usize,
    /// [rows of W, M]
    out: &'a mut [f32],
    /// [`WEIGHT_ROWS`] rows of W in float32; empty if they are not copied.
    copy: &'a mut [f32],
}

impl<E: Element> Task for GemvPart<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let GemvPart { x, weight, width, out, copy } = self;
        let m = x.len() / width;
        for (weight, out) in weight.chunks(WEIGHT_ROWS * width).zip(out.chunks_mut(WEIGHT_ROWS * m)) {
            if weight.len() < WEIGHT_ROWS * width {
                for (weight, out) in weight.chunks_exact(width).zip(out.chunks_exact_mut(m)) {
                    for row in 0..m {
                        DotBlock { x, weight, width, out, m }.run::<S, 1, 1, true>(simd, row);
                    }
                }
                continue;
            }
            if m >= E::COPY_FROM {
                let copy = &mut copy[..WEIGHT_ROWS * width];
                copy.iter_mut().zip(weight).for_each(|(copy, w)| *copy = w.to_f32());
                DotBlock { x, weight: copy, width, out, m }.dot_all_rows::<S, false>(simd);
            } else {
                DotBlock { x, weight, width, out, m }.dot_all_rows::<S, true>(simd);
            }
        }
    }
}

/// Dot products of consecutive rows of W with rows of x.
struct DotBlock<'a, E> {
    /// [M, width]
    x: &'a [f32],
    /// [N, width]
    weight: &'a [E],
    width: usize,
    /// [N, M]
    out: &'a mut [f32],
    /// M, the rows of x.
    m: usize,
}

impl<E: Element> DotBlock<'_, E> {
    /// [`WEIGHT_ROWS`] rows of W with all rows of x. The first rows of x prefetch the following rows of W if `PREFETCH`.
    #[inline(always)]
    fn dot_all_rows<S: Simd, const PREFETCH: bool>(mut self, simd: S) {
        let mut row = self.dot_rows::<S, PREFETCH>(simd, 0);
        while row < self.m {
            row = self.dot_rows::<S, false>(simd, row);
        }
    }

    /// Three rows of x, or one if fewer than three are left. W is processed in blocks whose sums, inputs and one weight fit into the registers. Returns the
    /// next row.
    #[inline(always)]
    fn dot_rows<S: Simd, const PREFETCH: bool>(&mut self, simd: S, row: usize) -> usize {
        if row + 3 > self.m {
            self.run::<S, WEIGHT_ROWS, 1, PREFETCH>(simd, row);
            return row + 1;
        }
        if S::REGISTERS >= 32 {
            self.run::<S, WEIGHT_ROWS, 3, PREFETCH>(simd, row);
        } else {
            const HALF: usize = WEIGHT_ROWS / 2;
            let DotBlock { x, weight, width, m, .. } = *self;
            let (first, second) = weight.split_at(HALF * width);
            let (first_out, second_out) = self.out.split_at_mut(HALF * m);
            DotBlock { x, weight: first, width, out: first_out, m }.run::<S, HALF, 3, PREFETCH>(simd, row);
            DotBlock { x, weight: second, width, out: second_out, m }.run::<S, HALF, 3, PREFETCH>(simd, row);
        }
        row + 3
    }

    /// The first N rows of W with M rows of x from `row` on.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "constant indices keep the sums in registers")]
    fn run<S: Simd, const N: usize, const M: usize, const PREFETCH: bool>(&mut self, simd: S, row: usize) {
        let width = self.width;
        let (x, weight) = (&self.x[row * width..][..M * width], &self.weight[..N * width]);
        let mut sums = [[simd.splat(0.0); M]; N];
        let whole = width - width % S::LANES;
        let next = weight.as_ptr_range().end;
        let mut i = 0;
        while i < whole {
            // Each block reads N short streams. The rows that follow in memory are prefetched in address order.
            for line in (0..if PREFETCH { N * S::LANES } else { 0 }).step_by(CACHE_LINE / size_of::<E>()) {
                prefetch(next.wrapping_add(N * i + line).cast());
            }
            let mut inputs = [simd.splat(0.0); M];
            for m in 0..M {
                // SAFETY: i + LANES ≤ width, and x has M rows of that width.
                inputs[m] = unsafe { simd.load(x.as_ptr().add(m * width + i)) };
            }
            for n in 0..N {
                // SAFETY: i + LANES ≤ width, and W has N rows of that width.
                let w = unsafe { E::load(simd, weight.as_ptr().add(n * width + i)) };
                for m in 0..M {
                    sums[n][m] = simd.fma(w, inputs[m], sums[n][m]);
                }
            }
            i += S::LANES;
        }
        if whole < width {
            for n in 0..N {
                let mut lanes = [0.0; 16];
                lanes.iter_mut().zip(&weight[n * width + whole..(n + 1) * width]).for_each(|(lane, w)| *lane = w.to_f32());
                let w = simd.load_part(&lanes);
                for m in 0..M {
                    sums[n][m] = simd.fma(w, simd.load_part(&x[m * width + whole..(m + 1) * width]), sums[n][m]);
                }
            }
        }
        // Stored in a separate loop, which is unrolled: an index that is not constant would keep the sums in memory throughout.
        let mut lanes = [[[0.0; 16]; M]; N];
        for n in 0..N {
            for m in 0..M {
                // SAFETY: a vector has at most 16 lanes.
                unsafe { simd.store(lanes[n][m].as_mut_ptr(), sums[n][m]) };
            }
        }
        for (n, lanes) in lanes.iter_mut().enumerate() {
            for (m, lanes) in lanes.iter_mut().enumerate() {
                self.out[n * self.m + row + m] = sum_lanes::<S>(lanes);
            }
        }
    }
}

/// Prefetches a cache line into the second-level cache. The first level tracks too few misses at once for the full bandwidth of memory.
#[inline(always)]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction. It is a hint and accepts any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Sum of the lanes in the order of [`Simd::sum`].
#[inline(always)]
fn sum_lanes<S: Simd>(lanes: &mut [f32; 16]) -> f32 {
    let mut width = S::LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use crate::simd::{Isa, dispatch_on};

    use super::*;
    use crate::testing::{assert_rows_close as assert_close, uniform as numbers, with_threads};

    fn multiply<E: Element>(x: &[f32], w: &[E], b: Option<&[f32]>, c: usize) -> Vec<f32> {
        let (m, n) = (x.len() / c, w.len() / c);
        let mut y = vec![f32::NAN; m * n];
        run(x, w, b, &mut y, c, &mut vec![f32::NAN; scratch_len(m, n)]);
        y
    }

    fn narrow(w: &[f32]) -> Vec<bf16> {
        w.iter().map(|&w| bf16::from_f32(w)).collect()
    }

    #[test]
    fn products_match_float64() {
        for (m, n, c) in
            [(1, 1, 1), (1, 9, 7), (1, 300, 20), (2, 8, 16), (3, 17, 33), (7, 40, 100), (5, 4100, 70), (1, 2, 3_000), (2, 9, 140_000)]
        {
            let (x, w, b) = (numbers(m * c, 1), numbers(n * c, 2), numbers(n, 3));
            let (half, tolerance) = (narrow(&w), if c > 10_000 { 1e-5 } else { 1e-6 });
            for bias in [None, Some(&b[..])] {
                let add = |j: usize| bias.map_or(0.0, |b| b[j] as f64);
                let expected = |w: &dyn Fn(usize) -> f64| -> Vec<f64> {
                    let dot = |x: &[f32], j: usize| x.iter().enumerate().map(|(i, &x)| x as f64 * w(j * c + i)).sum::<f64>();
                    x.chunks(c).flat_map(|x| (0..n).map(move |j| dot(x, j) + add(j)).collect::<Vec<_>>()).collect()
                };
                assert_close(&multiply(&x, &w, bias, c), &expected(&|i| w[i] as f64), tolerance, &format!("{m} {n} {c}"));
                assert_close(&multiply(&x, &half, bias, c), &expected(&|i| half[i].to_f64()), tolerance, &format!("bf16 {m} {n} {c}"));
            }
        }
    }

    #[test]
    fn bfloat16_weights_give_the_bits_of_their_float32_values() {
        for (m, n, c) in [(1, 37, 48), (4, 20, 70), (3, 5000, 33)] {
            let (x, half) = (numbers(m * c, 1), narrow(&numbers(n * c, 2)));
            let wide: Vec<f32> = half.iter().map(|w| w.to_f32()).collect();
            assert_eq!(multiply(&x, &half, None, c), multiply(&x, &wide, None, c), "{m} {n} {c}");
        }
        // Every bit pattern except NaN.
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).filter(|x| !x.is_nan()).collect();
        assert!(all.iter().all(|&x| to_f32(x).to_bits() == x.to_f32().to_bits()));
    }

    #[test]
    fn bits_of_a_row_do_not_depend_on_batch_or_threads() {
        for (n, c) in [(5, 3), (37, 48), (5000, 70), (1000, 257)] {
            let (x, w) = (numbers(9 * c, 1), numbers(n * c, 2));
            let half = narrow(&w);
            let bits = |y: Vec<f32>| y.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let alone: Vec<u32> = x.chunks(c).flat_map(|x| bits(multiply(x, &w, None, c))).collect();
            let alone_half: Vec<u32> = x.chunks(c).flat_map(|x| bits(multiply(x, &half, None, c))).collect();
            for m in 0..=9 {
                for threads in [1, 3] {
                    let (found, found_half) =
                        with_threads(threads, || (multiply(&x[..m * c], &w, None, c), multiply(&x[..m * c], &half, None, c)));
                    assert!(bits(found) == alone[..m * n], "{m} rows of {n} x {c}");
                    assert!(bits(found_half) == alone_half[..m * n], "bf16, {m} rows of {n} x {c}");
                }
            }
        }
    }

    /// The block sizes depend on the instruction set; the sums agree up to rounding.
    #[test]
    fn instruction_sets_agree() {
        let (m, n, c) = (7, 26, 61);
        let (x, w) = (numbers(m * c, 1), numbers(n * c, 2));
        let half = narrow(&w);
        let on = |isa: Isa| {
            let (mut full, mut short) = (vec![f32::NAN; m * n], vec![f32::NAN; m * n]);
            let mut copy = vec![f32::NAN; WEIGHT_ROWS * c];
            dispatch_on(isa, GemvPart { x: &x, weight: &w, width: c, out: &mut full, copy: &mut copy });
            dispatch_on(isa, GemvPart { x: &x, weight: &half, width: c, out: &mut short, copy: &mut copy });
            [full, short].concat()
        };
        let expected: Vec<f64> = on(Isa::Portable).iter().map(|&x| x as f64).collect();
        for isa in Isa::available() {
            assert_close(&on(isa), &expected, 1e-6, isa.name());
        }
    }
}
