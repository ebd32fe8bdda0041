use super::*;

struct ExpSlice<'a>(&'a mut [f32]);

impl Task for ExpSlice<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for i in (0..self.0.len()).step_by(S::LANES) {
            simd.store_at(self.0, i, simd.exp(simd.load_at(self.0, i)));
        }
    }
}

#[test]
fn exp_is_within_two_units_on_every_instruction_set() {
    let xs: Vec<f32> = (0..200_001).map(|i| -87.3 + i as f32 * 0.00088).collect();
    for isa in Isa::available() {
        let mut ys = xs.clone();
        dispatch_on(isa, ExpSlice(&mut ys));
        for (&x, &y) in xs.iter().zip(&ys) {
            let expected = (x as f64).exp();
            let error = ((y as f64 - expected) / expected).abs();
            assert!(error < 2.0 * f32::EPSILON as f64, "{}: exp({x}) = {y}, expected {expected}", isa.name());
        }
    }
}

#[test]
fn exp_at_the_edges() {
    for isa in Isa::available() {
        let mut y = [0.0, -0.0, -100.0, f32::NEG_INFINITY, 89.0, f32::INFINITY, f32::NAN, 88.7];
        dispatch_on(isa, ExpSlice(&mut y));
        assert_eq!(&y[..6], &[1.0, 1.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY], "{}", isa.name());
        assert!(y[6].is_nan() && y[7].is_finite(), "{}: {y:?}", isa.name());
    }
}

struct Algebra;

impl Task for Algebra {
    type Output = Vec<f32>;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<f32> {
        let ramp: Vec<f32> = (0..S::LANES).map(|i| i as f32 - 2.5).collect();
        // SAFETY: ramp has LANES values.
        let x = unsafe { s.load(ramp.as_ptr()) };
        let one = s.splat(1.0);
        let results = [
            s.add(x, one),
            s.sub(x, one),
            s.mul(x, x),
            s.div(x, s.splat(4.0)),
            s.sqrt(s.mul(x, x)),
            s.fma(x, x, one),
            s.max(x, one),
            s.min(x, one),
            s.select(s.gt(x, one), x, one),
            s.select(s.first(3), x, one),
            s.load_part(&ramp[..3]),
        ];
        let mut out: Vec<f32> = results.iter().flat_map(|&v| s.to_array(v)[..8].to_vec()).collect();
        let eight = s.select(s.first(8), x, s.splat(0.0));
        // The result depends on the order of summation.
        let uneven = s.load_part(&[3.0e7, 1.0, -3.0e7, 1.5, 0.25, -7.0, 2.0e7, 0.125]);
        out.extend([s.sum(uneven), s.maximum(uneven), s.maximum(s.sub(s.splat(-9.0), s.abs(x)))]);
        out.extend([s.sum(eight), s.maximum(eight), s.any(s.gt(x, s.splat(99.0))) as u8 as f32, s.any(s.gt(one, x)) as u8 as f32]);
        out
    }
}

#[test]
fn instruction_sets_agree_with_plain_rust() {
    let plain = dispatch_on(Isa::Portable, Algebra);
    assert_eq!(&plain[..8], &[-1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5]);
    for isa in Isa::available() {
        assert_eq!(dispatch_on(isa, Algebra), plain, "{}", isa.name());
    }
}

struct TransposeTile<'a>(&'a [f32], &'a mut [f32]);

impl Task for TransposeTile<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the test passes 16 rows of 20 and of 24 values.
        unsafe { s.transpose_16(self.0.as_ptr(), 20, self.1.as_mut_ptr(), 24) };
    }
}

#[test]
fn transposition_on_every_instruction_set() {
    let from: Vec<f32> = (0..16 * 20).map(|i| i as f32).collect();
    for isa in Isa::available() {
        let mut to = vec![-1.0; 16 * 24];
        dispatch_on(isa, TransposeTile(&from, &mut to));
        for i in 0..16 {
            for j in 0..24 {
                let expected = if j < 16 { from[j * 20 + i] } else { -1.0 };
                assert_eq!(to[i * 24 + j], expected, "{} {i} {j}", isa.name());
            }
        }
    }
}
