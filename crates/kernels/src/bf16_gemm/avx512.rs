//! Packing and tiles with AVX512-BF16.

use std::arch::x86_64::*;

use rayon::prelude::*;

use super::{KC, MR, NR};
use crate::gemm::{Matrix, Write};
use crate::simd::{Avx512, Simd};
use crate::{Buffer, Error};

/// Distance of two rows of a panel of A, in pairs. The padding avoids cache set conflicts between rows.
const ROW: usize = KC + 16;
/// Rows and columns of the output per task, at most. The panels of B of a block (256 KB) stay in the second-level cache.
const TASK: [usize; 2] = [8 * MR, 8 * NR];

/// Rows that [`interleave`] prefetches ahead: the hardware does not prefetch columns of a matrix.
const AHEAD: usize = 16;

/// Rounds and packs B [k, n] into panels of NR columns: [n / NR, k / 2, NR] pairs.
///
/// # Safety
/// The machine must support AVX-512 F, BW, DQ, VL, BF16, AVX2 and FMA.
pub(super) unsafe fn pack_b(b: Matrix, values: &mut Buffer) -> Result<(), Error> {
    let panel = b.rows.div_ceil(2) * NR;
    values.ensure(b.columns.div_ceil(NR) * panel)?;
    // Two panels per task: their columns are four cache lines.
    values.par_chunks_mut((2 * panel).max(1)).enumerate().for_each(|(task, panels)| {
        // SAFETY: the caller's promise.
        unsafe {
            match b.column_step == 1 {
                true => interleave::<NR>(b, 2 * task * NR, panels),
                false => transpose(b, 2 * task * NR, panels),
            }
        }
    });
    Ok(())
}

/// out [m, n] = a·b or out += a·b, with rows of the output `step` apart, for b [k, n] from [`pack_b`]. `packed` is the memory for A.
///
/// # Safety
/// As [`pack_b`]; the output must contain m rows of n values, and n ≤ step.
pub(super) unsafe fn multiply(
    packed: &mut Buffer,
    (out, step): (&mut [f32], usize),
    write: Write,
    a: Matrix,
    (b, n): (&[f32], usize),
) -> Result<(), Error> {
    let (m, pairs) = (a.rows, a.columns.div_ceil(2));
    let by_rows = a.column_step == 1;
    let a_panel = if by_rows { pairs.div_ceil(KC) * MR * ROW } else { pairs * MR };
    packed.ensure(m.div_ceil(MR) * a_panel)?;
    // Four panels per task if panels are columns of the memory: together three cache lines.
    let group = if by_rows { 1 } else { 4 };
    packed.par_chunks_mut((group * a_panel).max(1)).enumerate().for_each(|(task, panels)| {
        // SAFETY: the caller's promise.
        unsafe {
            match by_rows {
                true => round_rows(a, task * MR, panels),
                false => interleave::<MR>(a.transposed(), task * group * MR, panels),
            }
        }
    });
    let call = PanelProduct { a: packed, by_rows, a_panel, b, sizes: [m, n, pairs], out: out.as_mut_ptr(), step, write };
    let [rows, columns] = call.task_size(rayon::current_num_threads());
    let count = m.div_ceil(rows);
    (0..count * n.div_ceil(columns)).into_par_iter().for_each(|task| {
        // Consecutive tasks have the same columns of B.
        // SAFETY: the caller's promise; tasks have disjoint rows or columns.
        unsafe { call.run([task % count * rows, task / count * columns], [rows, columns]) };
    });
    Ok(())
}

/// The first lanes of a vector of 16.
fn first(lanes: usize) -> __mmask16 {
    ((1u32 << lanes.min(16)) - 1) as u16
}

/// 32 float32 values in order, rounded to bfloat16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn round_pair(low: __m512, high: __m512) -> __m512i {
    // SAFETY: both types are 64 bytes of plain data.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// The order that [`interleave_pair`] takes: element i of the low half next to element i of the high half.
///
/// # Safety
/// The machine must support the feature.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn interleave_order() -> __m512i {
    let mut order = [0u16; 32];
    for (i, order) in order.iter_mut().enumerate() {
        *order = (i / 2 + i % 2 * 16) as u16;
    }
    // SAFETY: an array of 64 bytes.
    unsafe { _mm512_loadu_si512(order.as_ptr().cast()) }
}

/// 16 pairs of a value of each vector, rounded to bfloat16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(crate) fn interleave_pair(order: __m512i, even: __m512, odd: __m512) -> __m512i {
    _mm512_permutexvar_epi16(order, round_pair(even, odd))
}

/// The first `count` of 32 values, then zeros.
///
/// # Safety
/// `from` must be valid for reads of min(count, 32) values.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) unsafe fn round_32(from: *const f32, count: usize) -> __m512i {
    // SAFETY: masked lanes are not read. The second address is formed only if it is read.
    unsafe {
        let low = _mm512_maskz_loadu_ps(first(count), from);
        let high = if count > 16 { _mm512_maskz_loadu_ps(first(count - 16), from.add(16)) } else { _mm512_setzero_ps() };
        round_pair(low, high)
    }
}

/// Packs columns from `first_column` on of a matrix [k, columns] with contiguous rows into panels of W columns: [k / 2, W] pairs each.
/// Columns and rows past the end are zero.
///
/// # Safety
/// As [`pack_b`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn interleave<const W: usize>(matrix: Matrix, first_column: usize, panels: &mut [f32]) {
    let (k, columns) = (matrix.rows, matrix.columns);
    let pairs = k.div_ceil(2);
    // SAFETY: the caller's promise.
    let order = unsafe { interleave_order() };
    assert!(panels.len().is_multiple_of(pairs * W) && matrix.column_step == 1);
    for p in 0..pairs {
        let rows = [0, 1].map(|odd| (2 * p + odd < k).then(|| &matrix.values[(2 * p + odd) * matrix.row_step..][..columns]));
        for at in 0..panels.len() / (pairs * W) {
            for v in (0..W).step_by(16) {
                let column = first_column + at * W + v;
                let mask = first(columns.saturating_sub(column).min(W - v));
                let mut halves = [_mm512_setzero_ps(); 2];
                for (half, row) in halves.iter_mut().zip(rows) {
                    if let Some(row) = row
                        && mask != 0
                    {
                        // SAFETY: the mask selects columns that exist. Any address may be prefetched.
                        unsafe {
                            *half = _mm512_maskz_loadu_ps(mask, row.as_ptr().add(column));
                            _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().wrapping_add(column + AHEAD * matrix.row_step).cast());
                        }
                    }
                }
                let values = interleave_pair(order, halves[0], halves[1]);
                let to = &mut panels[at * pairs * W + p * W + v..];
                // Masked stores are slow. A whole vector may overwrite the next pair, which is written later, but not the next panel.
                let mask = if p + 1 < pairs { u16::MAX } else { first(W - v) };
                assert!(to.len() >= 16 || mask != u16::MAX && to.len() >= W - v);
                // SAFETY: by the assertion the mask selects values of the slice.
                unsafe {
                    match mask {
                        u16::MAX => _mm512_storeu_si512(to.as_mut_ptr().cast(), values),
                        _ => _mm512_mask_storeu_epi32(to.as_mut_ptr().cast(), mask, values),
                    }
                }
            }
        }
    }
}

/// Packs columns from `first_column` on of a matrix [k, columns] with contiguous columns into panels of NR columns: [k / 2, NR] pairs each.
/// Columns and rows past the end are zero.
///
/// # Safety
/// As [`pack_b`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
unsafe fn transpose(matrix: Matrix, first_column: usize, panels: &mut [f32]) {
    let (k, columns) = (matrix.rows, matrix.columns);
    let pairs = k.div_ceil(2);
    let mut block = [0.0f32; 256];
    let mut turned = [0.0f32; 256];
    for (v, panel) in (0..).step_by(NR).zip(panels.chunks_mut(pairs * NR)) {
        for half in [0, 16] {
            for p in (0..pairs).step_by(16) {
                for (i, row) in block.chunks_exact_mut(16).enumerate() {
                    let column = first_column + v + half + i;
                    // SAFETY: the values exist, and a row of the block is a vector.
                    unsafe {
                        let values = match column < columns {
                            true => {
                                let from = &matrix.values[column * matrix.column_step..][2 * p..k];
                                round_32(from.as_ptr(), from.len())
                            }
                            false => _mm512_setzero_si512(),
                        };
                        _mm512_storeu_si512(row.as_mut_ptr().cast(), values);
                    }
                }
                // SAFETY: both blocks are 16 rows of 16 values.
                unsafe { Avx512::assume().transpose_16(block.as_ptr(), 16, turned.as_mut_ptr(), 16) };
                for (i, row) in turned.chunks_exact(16).take(pairs - p).enumerate() {
                    panel[(p + i) * NR + half..][..16].copy_from_slice(row);
                }
            }
        }
    }
}

/// Packs MR rows from `first_row` on of a matrix [rows, k] with contiguous rows into a panel: [k / 2 / KC, MR, ROW] pairs. Rows and
/// columns past the end are zero.
///
/// # Safety
/// As [`pack_b`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn round_rows(matrix: Matrix, first_row: usize, panel: &mut [f32]) {
    let k = matrix.columns;
    for (from, block) in (0..k).step_by(2 * KC).zip(panel.chunks_exact_mut(MR * ROW)) {
        for (i, to) in block.chunks_exact_mut(ROW).enumerate() {
            let values = match first_row + i < matrix.rows {
                true => &matrix.values[(first_row + i) * matrix.row_step..][from..k.min(from + 2 * KC)],
                false => {
                    to.fill(0.0);
                    continue;
                }
            };
            for (from, to) in values.chunks(32).zip(to.chunks_exact_mut(16)) {
                // SAFETY: `from` has its length of values, and `to` is a vector.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), round_32(from.as_ptr(), from.len())) };
            }
        }
    }
}

/// A product of packed operands.
struct PanelProduct<'a> {
    /// Panels of A: [k / KC, MR, ROW] pairs if `by_rows`, else [k / 2, MR] pairs.
    a: &'a [f32],
    by_rows: bool,
    /// Length of a panel of A.
    a_panel: usize,
    b: &'a [f32],
    /// Rows, columns, pairs along k.
    sizes: [usize; 3],
    out: *mut f32,
    step: usize,
    write: Write,
}

// SAFETY: tasks write disjoint tiles of the output, which `multiply` borrows mutably while they run.
unsafe impl Sync for PanelProduct<'_> {}

/// A tile of MR rows and NR columns of the output, of which the first `rows` and `columns` exist.
struct Tile {
    a: *const f32,
    b: *const f32,
    pairs: usize,
    out: *mut f32,
    step: usize,
    rows: usize,
    columns: usize,
    add: bool,
}

impl PanelProduct<'_> {
    /// Rows and columns per task: at least four tasks per thread if the output is large enough. Results do not depend on it.
    fn task_size(&self, threads: usize) -> [usize; 2] {
        let [m, n, _] = self.sizes;
        let [mut rows, columns] = TASK;
        while rows > 2 * MR && m.div_ceil(rows) * n.div_ceil(columns) < 4 * threads {
            rows = (rows / 2).next_multiple_of(MR);
        }
        [rows, columns]
    }

    /// Computes the tiles of at most `size` rows and columns from `start` on.
    ///
    /// # Safety
    /// As [`multiply`]; no other thread accesses these tiles.
    unsafe fn run(&self, start: [usize; 2], size: [usize; 2]) {
        let [m, n, pairs] = self.sizes;
        let end = [(start[0] + size[0]).min(m), (start[1] + size[1]).min(n)];
        for block in 0..pairs.div_ceil(KC).max(1) {
            let from = block * KC;
            let length = KC.min(pairs - from);
            for i in (start[0]..end[0]).step_by(MR) {
                let panel = &self.a[i / MR * self.a_panel..][..self.a_panel];
                let a = match self.by_rows {
                    true => panel.get(block * MR * ROW..(block + 1) * MR * ROW).unwrap_or(&[]),
                    false => &panel[from * MR..(from + length) * MR],
                };
                for j in (start[1]..end[1]).step_by(NR) {
                    let b = &self.b[(j / NR * pairs + from) * NR..][..length * NR];
                    let (rows, columns) = (MR.min(m - i), NR.min(n - j));
                    let add = block > 0 || self.write == Write::Add;
                    // SAFETY: i < m and j < n, so the tile is in the output. The slices contain `length` pairs of MR rows and NR columns.
                    unsafe {
                        let out = self.out.add(i * self.step + j);
                        let tile = Tile { a: a.as_ptr(), b: b.as_ptr(), pairs: length, out, step: self.step, rows, columns, add };
                        match self.by_rows {
                            true => tile.run::<ROW, 1>(),
                            false => tile.run::<1, MR>(),
                        }
                    }
                }
            }
        }
    }
}

impl Tile {
    /// Computes the tile. Pair p of row i of A is at i·ROW_STEP + p·PAIR_STEP.
    ///
    /// # Safety
    /// The machine must support the features, and the pointers must be valid for the tile.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn run<const ROW_STEP: usize, const PAIR_STEP: usize>(self) {
        let Tile { a, b, pairs, out, step, rows, columns, add } = self;
        let mut sums = [[_mm512_setzero_ps(); 2]; MR];
        // SAFETY: p < pairs and i < MR, so every pair is in its panel. A pair and a vector of pairs are plain data. Any address may be prefetched.
        unsafe {
            // The lines that the end of this function writes.
            for i in 0..2 * MR {
                _mm_prefetch::<_MM_HINT_ET0>(out.wrapping_add(i / 2 * step + i % 2 * 16).cast());
            }
            for p in 0..pairs {
                let (a, b) = (a.cast::<i32>().add(p * PAIR_STEP), b.add(p * NR).cast::<i32>());
                let low = std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(b.cast()));
                let high = std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(b.add(16).cast()));
                for (i, [sum, sum_high]) in sums.iter_mut().enumerate() {
                    let x = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*a.add(i * ROW_STEP)));
                    *sum = _mm512_dpbf16_ps(*sum, x, low);
                    *sum_high = _mm512_dpbf16_ps(*sum_high, x, high);
                }
            }
        }
        // SAFETY: the tile is in the output or in `part`; the first `rows` and `columns` are in both.
        unsafe {
            if rows == MR && columns == NR {
                return store(out, step, &sums, add);
            }
            let mut part = [0.0; MR * NR];
            store(part.as_mut_ptr(), NR, &sums, false);
            for (i, part) in part.chunks_exact(NR).take(rows).enumerate() {
                let out = std::slice::from_raw_parts_mut(out.add(i * step), columns);
                out.iter_mut().zip(part).for_each(|(out, sum)| *out = if add { *out + sum } else { *sum });
            }
        }
    }
}

/// Writes or adds a whole tile.
///
/// # Safety
/// The machine must support the feature, and `out` must be valid for MR rows of NR values.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn store(out: *mut f32, step: usize, sums: &[[__m512; 2]; MR], add: bool) {
    for (i, sums) in sums.iter().enumerate() {
        for (v, &sum) in sums.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let at = out.add(i * step + 16 * v);
                _mm512_storeu_ps(at, if add { _mm512_add_ps(_mm512_loadu_ps(at), sum) } else { sum });
            }
        }
    }
}
