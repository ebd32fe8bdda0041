//! y = x Wᵀ + b for few rows x [M, C], W [N, C], b [N], y [M, N]: what decoding needs, where reading W takes all the time.
//!
//! Every value is one dot product, summed in an order that depends on C alone: a row has the same bits in a batch of any size and
//! on any number of threads. W is read once from memory, whatever M, as float32 or as bfloat16.

use std::cell::RefCell;

use half::bf16;
use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};

use super::Stored;

/// Rows of W that meet a row of x at once: so many sums keep both multipliers busy, and their rows are so many streams from memory.
const ROWS: usize = 8;
/// Bytes of W in a piece of work, at least: reading them is long beside the time to wake a thread.
const PIECE: usize = 256 * 1024;

/// Bytes of a cache line.
const LINE: usize = 64;

thread_local! {
    /// ROWS rows of a matrix in float32: small enough for the second cache, and as large as the widest matrix needs.
    static COPY: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Values of `columns` that [`forward`] needs for M rows and N outputs.
pub fn scratch_len(rows: usize, outputs: usize) -> usize {
    if rows == 1 { 0 } else { rows * outputs }
}

/// y [M, N] = x Wᵀ + b; `columns` has at least [`scratch_len`] values.
pub fn forward(x: &[f32], weight: Stored, bias: Option<&[f32]>, y: &mut [f32], width: usize, columns: &mut [f32]) {
    match weight {
        Stored::F32(weight) => run(x, weight, bias, y, width, columns),
        Stored::Bf16(weight) => run(x, weight, bias, y, width, columns),
    }
}

fn run<E: Element>(x: &[f32], weight: &[E], bias: Option<&[f32]>, y: &mut [f32], width: usize, columns: &mut [f32]) {
    let (m, n) = (x.len() / width, weight.len() / width);
    assert!(x.len() == m * width && weight.len() == n * width && y.len() == m * n, "sizes of a product");
    if m == 0 || n == 0 {
        return;
    }
    // As many pieces for every thread; bits do not depend on how W is cut.
    let pieces = (size_of_val(weight) / PIECE).max(1).next_multiple_of(rayon::current_num_threads());
    let rows = n.div_ceil(pieces).next_multiple_of(ROWS).max((PIECE / (4 * width * size_of::<E>())).next_multiple_of(ROWS));
    // Outputs of one row of W lie together, so that pieces of W write pieces of memory.
    let out = if m == 1 { &mut *y } else { &mut columns[..m * n] };
    let piece = |(weight, out): (&[E], &mut [f32])| {
        COPY.with_borrow_mut(|copy| {
            if m >= E::COPY_FROM {
                copy.resize(ROWS * width, 0.0);
            }
            dispatch(Piece { x, weight, width, out, copy });
        });
    };
    if n <= rows {
        piece((weight, out));
    } else {
        (weight.par_chunks(rows * width), out.par_chunks_mut(rows * m)).into_par_iter().for_each(piece);
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

/// The upper half of the float32.
#[inline(always)]
pub(super) fn to_f32(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// A type of weights.
trait Element: Copy + Send + Sync {
    /// Rows of x from which on a copy of the rows of W, in float32 and near, is worth its while.
    const COPY_FROM: usize;

    /// LANES values as float32.
    ///
    /// # Safety
    /// `p` must be valid for reads of LANES values.
    unsafe fn load<S: Simd>(simd: S, p: *const Self) -> S::V;

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
        // The compiler makes two instructions of this: the values as 32 bits each, shifted.
        let mut lanes = [0.0; 16];
        for (i, lane) in lanes[..S::LANES].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *lane = to_f32(unsafe { *p.add(i) });
        }
        // SAFETY: no vector has more than 16 lanes.
        unsafe { simd.load(lanes.as_ptr()) }
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        to_f32(self)
    }
}

/// out [rows of W, M] of some rows of W.
struct Piece<'a, E> {
    x: &'a [f32],
    weight: &'a [E],
    width: usize,
    out: &'a mut [f32],
    /// Room for ROWS rows of W in float32, where they are copied.
    copy: &'a mut [f32],
}

impl<E: Element> Task for Piece<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Piece { x, weight, width, out, .. } = self;
        let m = x.len() / width;
        for (weight, out) in weight.chunks(ROWS * width).zip(out.chunks_mut(ROWS * m)) {
            if weight.len() < ROWS * width {
                for (weight, out) in weight.chunks_exact(width).zip(out.chunks_exact_mut(m)) {
                    for row in 0..m {
                        block::<S, E, 1, 1, true>(simd, &x[row * width..], weight, width, out, m, row);
                    }
                }
                continue;
            }
            if m >= E::COPY_FROM {
                let copy = &mut self.copy[..ROWS * width];
                copy.iter_mut().zip(weight).for_each(|(copy, w)| *copy = w.to_f32());
                meet::<S, f32, false>(simd, x, copy, width, out, m);
            } else {
                meet::<S, E, true>(simd, x, weight, width, out, m);
            }
        }
    }
}

/// ROWS rows of W with all rows of x; the first of these ask for what follows in memory.
#[inline(always)]
fn meet<S: Simd, E: Element, const AHEAD: bool>(simd: S, x: &[f32], weight: &[E], width: usize, out: &mut [f32], m: usize) {
    let mut row = some::<S, E, AHEAD>(simd, x, weight, width, out, m, 0);
    while row < m {
        row = some::<S, E, false>(simd, x, weight, width, out, m, row);
    }
}

/// Three rows of x at once, with as many rows of W as leave sums, inputs and a weight in registers, or one; the row that follows.
#[inline(always)]
fn some<S: Simd, E: Element, const AHEAD: bool>(
    simd: S,
    x: &[f32],
    weight: &[E],
    width: usize,
    out: &mut [f32],
    m: usize,
    row: usize,
) -> usize {
    let x = &x[row * width..];
    if row + 3 > m {
        block::<S, E, ROWS, 1, AHEAD>(simd, x, weight, width, out, m, row);
        return row + 1;
    }
    if S::REGISTERS >= 32 {
        block::<S, E, ROWS, 3, AHEAD>(simd, x, weight, width, out, m, row);
    } else {
        let half = ROWS / 2;
        block::<S, E, { ROWS / 2 }, 3, AHEAD>(simd, x, &weight[..half * width], width, &mut out[..half * m], m, row);
        block::<S, E, { ROWS / 2 }, 3, AHEAD>(simd, x, &weight[half * width..], width, &mut out[half * m..], m, row);
    }
    row + 3
}

/// Dot products of N rows of W with M rows of x, into out [N, `step`] from column `row` on.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "constant indices, so that sums stay in registers")]
fn block<S: Simd, E: Element, const N: usize, const M: usize, const AHEAD: bool>(
    simd: S,
    x: &[f32],
    weight: &[E],
    width: usize,
    out: &mut [f32],
    step: usize,
    row: usize,
) {
    let (x, weight) = (&x[..M * width], &weight[..N * width]);
    let mut sums = [[simd.splat(0.0); M]; N];
    let whole = width - width % S::LANES;
    let next = weight.as_ptr_range().end;
    let mut i = 0;
    while i < whole {
        // The rows are short streams that begin anew with every block: what follows them is asked for in the order of memory.
        for line in (0..if AHEAD { N * S::LANES } else { 0 }).step_by(LINE / size_of::<E>()) {
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
    // To memory in a loop of its own, which is unrolled: an index that is not constant would keep the sums there all the time.
    let mut lanes = [[[0.0; 16]; M]; N];
    for n in 0..N {
        for m in 0..M {
            // SAFETY: no vector has more than 16 lanes.
            unsafe { simd.store(lanes[n][m].as_mut_ptr(), sums[n][m]) };
        }
    }
    for (n, lanes) in lanes.iter_mut().enumerate() {
        for (m, lanes) in lanes.iter_mut().enumerate() {
            out[n * step + row + m] = in_halves::<S>(lanes);
        }
    }
}

/// Asks for a cache line that the next block reads, into the second cache: misses of the first are too few at once for memory's full speed.
#[inline(always)]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: part of every x86-64, and any address will do: nothing is read.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Σ of the lanes in the order of [`Simd::sum`].
#[inline(always)]
fn in_halves<S: Simd>(lanes: &mut [f32; 16]) -> f32 {
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
    use termwise_attention::simd::{Isa, dispatch_on};

    use super::*;
    use crate::ops::testing::{assert_close, numbers, with_threads};

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
    fn bfloat16_has_the_bits_of_its_values_in_float32() {
        for (m, n, c) in [(1, 37, 48), (4, 20, 70), (3, 5000, 33)] {
            let (x, half) = (numbers(m * c, 1), narrow(&numbers(n * c, 2)));
            let wide: Vec<f32> = half.iter().map(|w| w.to_f32()).collect();
            assert_eq!(multiply(&x, &half, None, c), multiply(&x, &wide, None, c), "{m} {n} {c}");
        }
        // Every bit pattern but those that are no number.
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).filter(|x| !x.is_nan()).collect();
        assert!(all.iter().all(|&x| to_f32(x).to_bits() == x.to_f32().to_bits()));
    }

    #[test]
    fn a_row_has_the_same_bits_in_every_batch_and_on_any_number_of_threads() {
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

    /// Blocks differ by instruction set; sums of 8 lanes have the same order in both sets that have so many, up to the rounding of fma.
    #[test]
    fn instruction_sets_agree() {
        let (m, n, c) = (7, 26, 61);
        let (x, w) = (numbers(m * c, 1), numbers(n * c, 2));
        let half = narrow(&w);
        let on = |isa: Isa| {
            let (mut full, mut short) = (vec![f32::NAN; m * n], vec![f32::NAN; m * n]);
            let mut copy = vec![f32::NAN; ROWS * c];
            dispatch_on(isa, Piece { x: &x, weight: &w, width: c, out: &mut full, copy: &mut copy });
            dispatch_on(isa, Piece { x: &x, weight: &half, width: c, out: &mut short, copy: &mut copy });
            [full, short].concat()
        };
        let expected: Vec<f64> = on(Isa::Portable).iter().map(|&x| x as f64).collect();
        for isa in Isa::available() {
            assert_close(&on(isa), &expected, 1e-6, isa.name());
        }
    }
}
