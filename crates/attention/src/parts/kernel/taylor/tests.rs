use super::*;
use crate::parts::slot::Part;
use crate::parts::testing::{assert_close, check_kernel, check_scaled, check_vectors};

/// An unevaluated sum of two float64, about 32 digits.
#[derive(Clone, Copy)]
struct Double(f64, f64);

impl Double {
    fn add(self, other: Double) -> Double {
        let sum = self.0 + other.0;
        let part = sum - self.0;
        let rest = (self.0 - (sum - part)) + (other.0 - part) + self.1 + other.1;
        Double(sum + rest, rest - ((sum + rest) - sum))
    }

    fn times(self, x: f64) -> Double {
        let product = self.0 * x;
        let rest = self.0.mul_add(x, -product) + self.1 * x;
        Double(product + rest, rest - ((product + rest) - product))
    }

    fn over(self, x: f64) -> Double {
        let first = self.0 / x;
        let rest = (-first).mul_add(x, self.0) + self.1;
        let second = rest / x;
        Double(first + second, second - ((first + second) - first))
    }
}

/// Σ_{n≤p} x^n/n! and Σ |x|^n/n!, term by term in double float64.
fn precise_prefix(p: usize, x: f64) -> (f64, f64) {
    let (mut term, mut sum, mut magnitude) = (Double(1.0, 0.0), Double(1.0, 0.0), 1.0);
    for n in 1..=p {
        term = term.times(x).over(n as f64);
        sum = sum.add(term);
        magnitude += term.0.abs();
    }
    (sum.0, magnitude)
}

fn scores() -> Vec<f32> {
    (-960..=960).map(|i| i as f32 / 32.0).collect()
}

#[test]
fn any_set_of_orders() {
    check_kernel(&Taylor::up_to(0).expect("valid"), |_| 1.0);
    check_kernel(&Taylor::up_to(2).expect("valid"), |x| 1.0 + x + x * x / 2.0);
    check_kernel(&Taylor::new(vec![5], Coefficients::Ones).expect("valid"), |x| x.powi(5) / 120.0);
    check_kernel(&Taylor::new(vec![4, 0, 4, 1], Coefficients::Ones).expect("valid"), |x| 1.0 + x + x.powi(4) / 24.0);
    let given = Coefficients::Given(vec![2.0, -0.5]);
    check_kernel(&Taylor::new(vec![1, 3], given).expect("valid"), |x| 2.0 * x - 0.5 * x.powi(3) / 6.0);
}

#[test]
fn learned_coefficients() {
    let mut taylor = Taylor::new(vec![0, 2, 3], Coefficients::Learned).expect("valid");
    check_kernel(&taylor, |x| 1.0 + x * x / 2.0 + x.powi(3) / 6.0);
    taylor.bind(&[0.5, 3.0, -2.0]);
    check_kernel(&taylor, |x| 0.5 + 3.0 * x * x / 2.0 - 2.0 * x.powi(3) / 6.0);
    let mut slopes = [f64::NAN; 3];
    taylor.learned_slopes(-1.5, &mut slopes);
    for (slope, expected) in slopes.iter().zip([1.0, 1.125, -0.5625]) {
        assert_close(*slope, expected, 1e-15);
    }
}

#[test]
fn condition_numbers_measure_cancellation() {
    let given = Taylor::new(vec![0, 1, 2], Coefficients::Given(vec![3.0, -2.0, 10.0])).expect("valid");
    // At x = 1: 3 + 2 + 5 over 3 − 2 + 5.
    assert_close(given.condition(1.0), 10.0 / 6.0, 1e-15);
    let series = Taylor::up_to(20).expect("valid");
    assert_close(series.condition(2.0), 1.0, 1e-15);
    // e^3.5 over e^−3.5.
    assert!(series.condition(-3.5) > 500.0, "terms of either sign cancel");
}

#[test]
fn given_vectors_agree_with_float64() {
    for text in ["0..2,coef=7.125:-2.5:1", "0..4,coef=1:0.9:0.5:0.3:0.2", "0..4,coef=1225.5:-140:-132:24:24", "0,3,coef=1:-0.4"] {
        let taylor = Taylor::parse(text).expect("valid");
        let slopes = |y: f64| {
            let term = |(n, c): (usize, &f64)| n as f64 * c.abs() * y.abs().powi(n as i32 - 1);
            taylor.dense.iter().enumerate().skip(1).map(term).sum::<f64>()
        };
        check_vectors(&taylor, &scores(), |x| 1e-6 * taylor.horner_magnitude(x), |x| 1e-6 * slopes(x));
    }
}

#[test]
fn signs_of_given_coefficients() {
    let sign = |text: &str| Taylor::parse(text).expect("valid").sign();
    assert_eq!(sign("0..4"), Sign::Positive);
    assert_eq!(sign("0..5,coef=1:1:1:1:1:1"), Sign::Mixed);
    assert_eq!(sign("2"), Sign::Nonnegative);
    // y² + 2by + c is positive for b² < c: 0.999² and 1.001² around 1.
    assert_eq!(sign("0..2,coef=1:1.998:2"), Sign::Positive);
    assert_eq!(sign("0..2,coef=1:2.002:2"), Sign::Mixed);
    // (y − 5)²(y + 7)² ± a small number, far from zero and of very different size.
    let quartic = |shift: f64| format!("0..4,coef={}:{}:{}:24:24", 1225.0 + shift, -140.0, -132.0);
    assert_eq!(sign(&quartic(1e-3)), Sign::Positive);
    assert_eq!(sign(&quartic(-1e-3)), Sign::Mixed);
    assert_eq!(sign("0..2,coef=1:0:-1"), Sign::Mixed);
    assert_eq!(sign("0..2,coef=learned"), Sign::Mixed);
}

#[test]
fn invalid_sets_of_orders_are_rejected() {
    assert!(Taylor::new(vec![], Coefficients::Ones).is_err());
    assert!(Taylor::new(vec![151], Coefficients::Ones).is_err());
    assert!(Taylor::new(vec![1, 2], Coefficients::Given(vec![1.0])).is_err());
    assert!(Taylor::new(vec![2, 1], Coefficients::Given(vec![1.0, 2.0])).is_err());
    for text in ["", "4..2", "-1", "1.5", "a", "0..2,coef=", "0..2,coef=1:2", "0..1,coef=1:nan", "0..999999999999"] {
        assert!(Taylor::parse(text).is_err(), "{text}");
    }
    assert_eq!(Taylor::parse("3,0..1,2,7").map(|taylor| taylor.args()), Ok("0..3,7".into()));
}

#[test]
fn signs() {
    let sign = |orders: Vec<usize>| Taylor::new(orders, Coefficients::Ones).expect("valid").sign();
    assert_eq!(sign((0..=4).collect()), Sign::Positive);
    assert_eq!(sign((0..=5).collect()), Sign::Mixed);
    assert_eq!(sign(vec![0, 2]), Sign::Positive);
    assert_eq!(sign(vec![2, 4]), Sign::Nonnegative);
    assert_eq!(sign(vec![0, 1, 4]), Sign::Mixed);
    for p in (0..=40).step_by(2) {
        let taylor = Taylor::up_to(p).expect("valid");
        assert!(scores().iter().all(|&x| taylor.value(x as f64) > 0.0), "order {p} is even and must stay positive");
    }
}

/// e^x minus its remainder has no cancellation for even p. For odd p there is one root, near which only the
/// magnitude of the subtracted terms bounds the error.
#[test]
fn prefixes_are_accurate_for_negative_scores() {
    for p in [0, 1, 2, 3, 4, 7, 8, 12, 20, 31, 40, 60, 79] {
        for x in scores().into_iter().map(f64::from) {
            let (expected, magnitude) = precise_prefix(p, x);
            let below = if p % 2 == 1 { x.exp() } else { 0.0 };
            let bound = 2e-14 * (expected.abs() + below) + 1e-30 * magnitude;
            let found = prefix(p, x);
            assert!((found - expected).abs() <= bound, "p = {p}, x = {x}: {found:e}, expected {expected:e}");
        }
    }
}

#[test]
fn a_long_prefix_is_the_exponential() {
    let taylor = Taylor::up_to(79).expect("valid");
    for x in scores().into_iter().map(f64::from).filter(|x| *x > -15.0 && *x < 25.0) {
        assert!((taylor.value(x) / x.exp() - 1.0).abs() < 1e-10, "{x}");
    }
}

/// A prefix in float32 on every instruction set: 1e-6 relative to |w| if exp or float64 is used. A short series is summed in
/// float32, where rounding is relative to the largest terms, not to their sum: 4e-7 of Σ|terms|, the only bound near
/// the root of an odd series.
#[test]
fn vectors_agree_with_float64() {
    for p in [1, 2, 4, 8, 12, 20, 40, 79] {
        let taylor = Taylor::up_to(p).expect("valid");
        let narrow = taylor.method == Method::Narrow;
        let bound = |p: usize, x: f64| {
            let (w, magnitude) = precise_prefix(p, x);
            if narrow { 4e-7 * magnitude } else { 1e-6 * w.abs() }
        };
        check_vectors(&taylor, &scores(), |x| bound(p, x), |x| bound(p - 1, x));
    }
}

#[test]
fn vectors_of_other_orders_agree_with_float64() {
    for text in ["1", "0,2,5", "3..9", "0..20,coef=learned", "0..8,coef=learned", "0..2,coef=1.0:0.9:0.5", "30", "40", "0..5,40"] {
        let taylor = Taylor::parse(text).expect("valid");
        let slopes =
            |x: f64| taylor.dense.iter().enumerate().skip(1).map(|(n, c)| n as f64 * c.abs() * x.abs().powi(n as i32 - 1)).sum::<f64>();
        // Subnormal float32 results have fewer digits.
        let smallest = f32::MIN_POSITIVE as f64;
        check_vectors(&taylor, &scores(), |x| 1e-6 * taylor.horner_magnitude(x) + smallest, |x| 1e-6 * slopes(x) + smallest);
    }
}

#[test]
fn nan_propagates() {
    for p in [2, 20, 79] {
        let taylor = Taylor::up_to(p).expect("valid");
        assert!(taylor.value(f64::NAN).is_nan());
        for isa in termwise_kernels::simd::Isa::available() {
            let vectors = crate::parts::testing::Vectors { kernel: &taylor, x: &[f32::NAN, 1.0] };
            let outputs = termwise_kernels::simd::dispatch_on(isa, vectors);
            assert!(outputs.iter().all(|out| out[0].is_nan() && out[1].is_finite()), "order {p} on {}", isa.name());
        }
    }
}

#[test]
fn long_series_with_a_log_scale() {
    let series = |text: &str| Taylor::parse(text).unwrap_or_else(|error| panic!("{error}"));
    for text in ["0..80", "0..24", "0..9", "0,2,11", "0..9,coef=1:1:1:1:1:1:1:1:-2:1"] {
        check_scaled(&series(text), 700.0);
    }
    assert_eq!(["0..7", "0..8"].map(|text| series(text).rescale()), [Rescale::None, Rescale::Multiply]);
}
