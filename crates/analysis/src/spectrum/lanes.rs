//! Vectors of eight float64 values: arrays, which compile to vector code inside [`vectorized`].
//!
//! Multiplications are not fused with additions, so every instruction set gives the same bits.

/// Values per vector.
pub const LANES: usize = 8;

/// A vector of [`LANES`] values.
pub type Lane = [f64; LANES];

/// A vector of equal values.
#[inline(always)]
pub fn splat(x: f64) -> Lane {
    [x; LANES]
}

// Plain loops: `array::from_fn` is not always inlined, and a call prevents vectorization.

/// f of each value.
#[inline(always)]
pub fn map(a: Lane, f: impl Fn(f64) -> f64) -> Lane {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i]);
    }
    out
}

/// f of each pair.
#[inline(always)]
pub fn zip(a: Lane, b: Lane, f: impl Fn(f64, f64) -> f64) -> Lane {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

/// f of each triple.
#[inline(always)]
pub fn zip_three(a: Lane, b: Lane, c: Lane, f: impl Fn(f64, f64, f64) -> f64) -> Lane {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i], c[i]);
    }
    out
}

/// The sum, in a fixed order.
#[inline(always)]
pub fn sum(a: Lane) -> f64 {
    ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
}

/// A piece of a slice, padded to a vector.
#[inline(always)]
pub fn load(x: &[f64], fill: f64) -> Lane {
    match x.first_chunk::<LANES>() {
        Some(whole) => *whole,
        None => {
            let mut lane = splat(fill);
            lane[..x.len()].copy_from_slice(x);
            lane
        }
    }
}

/// Runs work compiled for the widest instruction set that this machine has. Callees must be inlined to benefit.
pub fn vectorized<W: pulp::NullaryFnOnce>(work: W) -> W::Output {
    pulp::Arch::new().dispatch(work)
}

/// 1/n! for n = 0..=13.
const INVERSE_FACTORIALS: [f64; 14] = [
    1.0,
    1.0,
    1.0 / 2.0,
    1.0 / 6.0,
    1.0 / 24.0,
    1.0 / 120.0,
    1.0 / 720.0,
    1.0 / 5040.0,
    1.0 / 40320.0,
    1.0 / 362_880.0,
    1.0 / 3_628_800.0,
    1.0 / 39_916_800.0,
    1.0 / 479_001_600.0,
    1.0 / 6_227_020_800.0,
];
/// ln 2 in two parts. The first has trailing zeros, so its multiples are exact.
const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
/// Adding this rounds to an integer, which is then in the lowest bits.
const ROUNDING_OFFSET: f64 = 6_755_399_441_055_744.0;
/// Below this e^x is no longer normal, and 0 here.
const EXP_MIN: f64 = -708.0;
/// Above this e^x is infinite here.
const EXP_MAX: f64 = 709.0;

/// e^x within two units in the last place; 0 below −708, infinite above 709.
#[inline(always)]
pub fn exp(x: Lane) -> Lane {
    map(x, |x| {
        let inside = x.clamp(EXP_MIN, EXP_MAX);
        let shifted = inside * std::f64::consts::LOG2_E + ROUNDING_OFFSET;
        let n = shifted - ROUNDING_OFFSET;
        let r = (inside - n * LN_2_HIGH) - n * LN_2_LOW;
        // Estrin's scheme: short chains.
        let c = &INVERSE_FACTORIALS;
        let (r2, pair) = (r * r, |n: usize| c[n] + c[n + 1] * r);
        let r4 = r2 * r2;
        let low = (pair(2) + pair(4) * r2) + (pair(6) + pair(8) * r2) * r4;
        let high = pair(10) + pair(12) * r2;
        let polynomial = 1.0 + (r + r2 * (low + high * (r4 * r4)));
        let power = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
        let value = polynomial * power;
        if x < EXP_MIN {
            0.0
        } else if x > EXP_MAX {
            f64::INFINITY
        } else {
            value
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_that_of_the_standard_library() {
        let mut worst = 0.0f64;
        for i in 0..400_000 {
            let x = -707.9 + 1416.0 * i as f64 / 400_000.0 + 1e-4 * (i % 97) as f64;
            let (found, expected) = (vectorized(|| exp(splat(x)))[3], x.exp());
            worst = worst.max((found / expected - 1.0).abs());
        }
        assert!(worst < 2.0 * f64::EPSILON, "{worst:e}");
        let special = exp([0.0, -0.0, -709.0, 710.0, f64::NEG_INFINITY, f64::INFINITY, 1e-300, -1e300]);
        assert_eq!(special, [1.0, 1.0, 0.0, f64::INFINITY, 0.0, f64::INFINITY, 1.0, 0.0]);
        assert!(exp(splat(f64::NAN))[0].is_nan());
    }

    #[test]
    fn vectors_of_any_instruction_set_give_the_same_bits() {
        let x: Lane = std::array::from_fn(|i| (i as f64 - 3.7) * 11.3);
        assert_eq!(vectorized(|| exp(x)).map(f64::to_bits), exp(x).map(f64::to_bits));
        assert_eq!(load(&[1.0, 2.0], 7.0), [1.0, 2.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0]);
        assert_eq!(sum(load(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 0.0)), 36.0);
    }
}
