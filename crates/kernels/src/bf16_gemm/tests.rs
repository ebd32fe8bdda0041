use super::*;
use crate::testing::{uniform, with_threads};

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// Scalar reference of `vdpbf16ps`: one lane, for rounded inputs.
pub(crate) fn add_pair(sum: f32, [a0, a1]: [f32; 2], [b0, b1]: [f32; 2]) -> f32 {
    flush(a0.mul_add(b0, flush(a1.mul_add(b1, flush(sum)))))
}

fn at(matrix: Matrix, i: usize, j: usize) -> f32 {
    if i < matrix.rows && j < matrix.columns { round(matrix.values[i * matrix.row_step + j * matrix.column_step]) } else { 0.0 }
}

/// The product in plain loops, in the order of the module's description.
fn scalar_reference(out: &mut [f32], step: usize, write: Write, a: Matrix, b: Matrix) {
    for (i, j) in (0..a.rows).flat_map(|i| (0..b.columns).map(move |j| (i, j))) {
        let out = &mut out[i * step + j];
        if write == Write::Replace {
            *out = 0.0;
        }
        let pairs: Vec<usize> = (0..a.columns.div_ceil(2)).collect();
        for (block, pairs) in pairs.chunks(KC).enumerate() {
            let sum = pairs.iter().fold(0.0, |sum, p| {
                let (even, odd) = (2 * p, 2 * p + 1);
                add_pair(sum, [at(a, i, even), at(a, i, odd)], [at(b, even, j), at(b, odd, j)])
            });
            *out = if block == 0 && write == Write::Replace { sum } else { *out + sum };
        }
    }
}

/// Every transposition of both operands, rows with a stride, both ways to write.
fn each_layout(m: usize, n: usize, k: usize, mut check: impl FnMut(Matrix, Matrix, Write, &str)) {
    let (a, b) = (uniform((m + 3) * (k + 3), 1), uniform((k + 2) * (n + 2), 2));
    for (turn_a, turn_b) in [(false, false), (true, false), (false, true), (true, true)] {
        for write in [Write::Replace, Write::Add] {
            let view_a = if turn_a { Matrix::strided(&a, k, m, m + 3).transposed() } else { Matrix::strided(&a, m, k, k + 3) };
            let view_b = if turn_b { Matrix::strided(&b, n, k, k + 2).transposed() } else { Matrix::strided(&b, k, n, n + 2) };
            check(view_a, view_b, write, &format!("{m}x{n}x{k} {turn_a} {turn_b} {write:?}"));
        }
    }
}

const SHAPES: [[usize; 3]; 10] = [
    [1, 1, 1],
    [3, 1, 5],
    [1, 7, 4],
    [5, 3, 0],
    [12, 32, 64],
    [13, 33, 31],
    [50, 70, 33],
    [100, 300, 16],
    [24, 32, 2 * KC + 1],
    [7, 40, 4 * KC + 34],
];

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn products_equal_the_scalar_reference_bit_for_bit() {
    if !Bf16Isa::selected().is_native() {
        return;
    }
    let (mut workspace, mut packed) = (Bf16Workspace::default(), PackedBf16::default());
    for [m, n, k] in SHAPES {
        each_layout(m, n, k, |a, b, write, what| {
            let before = uniform(m * (n + 3), 3);
            let (mut expected, mut found, mut found_packed) = (before.clone(), before.clone(), before.clone());
            scalar_reference(&mut expected, n + 3, write, a, b);
            workspace.product(&mut found, n + 3, write, a, b).expect("memory");
            packed.pack(b).expect("memory");
            workspace.product_packed(&mut found_packed, n + 3, write, a, &packed).expect("memory");
            assert!(bits(&found) == bits(&expected), "{what}");
            assert!(bits(&found_packed) == bits(&expected), "{what}, packed");
        });
    }
}

/// Values near the smallest normal number, whose products and sums are subnormal, and values that overflow.
#[test]
fn subnormal_values_and_infinities_equal_the_scalar_reference() {
    if !Bf16Isa::selected().is_native() {
        return;
    }
    let (m, n, k) = (5, 40, 6);
    for exponent in [-149, -130, -126, -120, -66, -63, -60, 60, 63, 64, 127] {
        let scaled = |count, seed| uniform(count, seed).into_iter().map(|x| (x as f64 * 2f64.powi(exponent)) as f32).collect::<Vec<_>>();
        let (a, b) = (scaled(m * k, 1), scaled(k * n, 2));
        let (a, b) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n));
        let (mut expected, mut found) = (vec![0.0; m * n], vec![0.0; m * n]);
        scalar_reference(&mut expected, n, Write::Replace, a, b);
        Bf16Workspace::default().product(&mut found, n, Write::Replace, a, b).expect("memory");
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(), "2^{exponent}: {found:e}, {expected:e}");
        }
    }
}

/// Every upper half of a float32 with lower halves around ties. A product with one rounds and copies.
#[test]
fn rounding_is_to_nearest_even() {
    let lower = [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
    let values: Vec<f32> = (0..1u32 << 16).flat_map(|upper| lower.map(|lower| f32::from_bits(upper << 16 | lower))).collect();
    let mut found = vec![0.0; values.len()];
    let (a, one) = (Matrix::new(&values, values.len(), 1), [1.0]);
    Bf16Workspace::default().product(&mut found, 1, Write::Replace, a, Matrix::new(&one, 1, 1)).expect("memory");
    for (&x, &found) in values.iter().zip(&found) {
        let expected = if x.is_subnormal() { 0.0 } else { half::bf16::from_f32(x).to_f32() };
        let same = |y: f32| y == expected || y.is_nan() && expected.is_nan();
        assert!(same(found) && same(round(x)), "{x:e} ({:x}): {found:e} and {:e}, expected {expected:e}", x.to_bits(), round(x));
    }
}

/// Both implementations are within the rounding error of float32 of a float64 product of the rounded inputs.
#[test]
fn every_implementation_equals_a_float64_product_of_rounded_inputs() {
    for [m, n, k] in SHAPES {
        each_layout(m, n, k, |a, b, write, what| {
            let before = uniform(m * (n + 3), 3);
            let (mut rounded, mut found) = (before.clone(), before.clone());
            let mut packed = PackedBf16::default();
            packed.pack_rounded(b).expect("memory");
            let mut workspace = Bf16Workspace::default();
            workspace.product_packed(&mut rounded, n + 3, write, a, &packed).expect("memory");
            workspace.product(&mut found, n + 3, write, a, b).expect("memory");
            for (i, j) in (0..m).flat_map(|i| (0..n + 3).map(move |j| (i, j))) {
                let old = before[i * (n + 3) + j] as f64;
                let dot: f64 = (0..k).map(|l| if j < n { at(a, i, l) as f64 * at(b, l, j) as f64 } else { 0.0 }).sum();
                let expected = if j >= n || write == Write::Add { old + dot } else { dot };
                for (name, found) in [("selected", &found), ("rounded", &rounded)] {
                    let found = found[i * (n + 3) + j] as f64;
                    assert!((found - expected).abs() <= 2e-5, "{name} {what} at {i}, {j}: {found}, {expected}");
                }
            }
        });
    }
}

#[test]
fn results_are_bit_identical_for_any_number_of_threads() {
    for [m, n, k] in [[130, 300, 70], [257, 33, 600], [24, 1000, 64]] {
        each_layout(m, n, k, |a, b, write, what| {
            let run = || {
                let mut out = uniform(m * n, 3);
                Bf16Workspace::default().product(&mut out, n, write, a, b).expect("memory");
                bits(&out)
            };
            let one = with_threads(1, run);
            for threads in [2, 3, 8] {
                assert!(one == with_threads(threads, run), "{what} on {threads} threads");
            }
        });
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let refused = |rows: usize, inner: usize, len: usize, step: usize| {
        let run = || {
            let (a, b) = (vec![0.0; rows * inner], [0.0; 12]);
            let (a, b) = (Matrix::new(&a, rows, inner), Matrix::new(&b, 4, 3));
            Bf16Workspace::default().product(&mut vec![0.0; len], step, Write::Replace, a, b)
        };
        std::panic::catch_unwind(run).is_err()
    };
    assert!(!refused(3, 4, 9, 3) && refused(3, 4, 8, 3) && refused(3, 4, 9, 2) && refused(3, 5, 9, 3));
}
