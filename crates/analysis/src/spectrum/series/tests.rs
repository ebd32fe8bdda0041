use super::*;
use crate::spectrum::lanes::vectorized;
use termwise_attention::Variant;

fn kernel(text: &str) -> Kernel {
    text.parse::<Variant>().expect("a variant").near.kernel
}

fn values(cuts: &Cuts, x: f64) -> Vec<f64> {
    // The result does not depend on other scores in the vector.
    let lane = [x, 3.0, -0.2, x, -7.9, 250.0, 0.0, -250.0];
    let (mut out, mut pairs) = (Vec::new(), Pairs::default());
    vectorized(|| {
        cuts.values(lane, &mut pairs, &mut |index, values: Lane| {
            assert_eq!(index, out.len(), "in order");
            assert_eq!(values[0].to_bits(), values[3].to_bits());
            out.push(values[0]);
        })
    });
    out
}

/// Taylor's formula: for negative x and even p both parts of e^x + |x|^{p+1}/p! ∫ (1−s)^p e^{sx} ds are positive; Simpson's rule.
fn integral(p: usize, x: f64) -> f64 {
    let n = 200_000;
    let f = |i: usize| {
        let s = i as f64 / n as f64;
        (1.0 - s).powi(p as i32) * (s * x).exp() * [1.0, if i % 2 == 1 { 4.0 } else { 2.0 }][usize::from(i > 0 && i < n)]
    };
    let area = (0..=n).map(f).sum::<f64>() / (3 * n) as f64;
    let factor = (1..=p).fold(-x, |factor, i| factor * -x / i as f64);
    x.exp() + factor * area
}

fn close(found: f64, expected: f64, what: &str) {
    assert!((found / expected - 1.0).abs() < 1e-12, "{what}: {found:e} for {expected:e}");
}

#[test]
fn every_order_of_every_score_is_accurate() {
    let orders: Vec<usize> = (0..=64).step_by(2).collect();
    let cuts = Cuts::new(&kernel("exp"), &orders).expect("a series");
    for x in [-0.0, -0.3, -1.0, -1.5, -4.0, -9.99, -10.0, -18.5, -25.0, -36.0, -47.3, -63.9, -64.0, -64.5, -100.0, -193.0] {
        for (&p, found) in orders.iter().zip(values(&cuts, x)) {
            close(found, integral(p, x), &format!("order {p} at {x}"));
        }
    }
    for x in [0.0, 1e-9, 0.7, 5.0, 36.0, 120.0] {
        let (mut term, mut sum) = (1.0, 1.0);
        for (n, found) in (0..=64usize).zip(values(&cuts, x).into_iter().flat_map(|w| [w, w])) {
            if n > 0 {
                term *= x / n as f64;
                sum += term;
            }
            if n % 2 == 0 {
                close(found, sum, &format!("order {n} at {x}"));
            }
        }
    }
}

#[test]
fn polynomials_end_with_themselves() {
    for (text, degree) in [("taylor=0..6", 6), ("taylor=0..7", 7), ("taylor=0..1", 1), ("taylor=0", 0), ("taylor=0..80", 80)] {
        let cuts = Cuts::new(&kernel(text), &[0, 2, 4, 6, 8]).expect("a series");
        assert_eq!(cuts.orders(), [0, 2, 4, 6, 8].into_iter().filter(|&p| p < degree).collect::<Vec<usize>>());
        for x in [-30.0, -3.0, -0.5, 0.0, 2.0, 11.0] {
            let found = values(&cuts, x);
            assert_eq!(found.len(), cuts.orders().len() + 1);
            let expected = kernel(text).value(x);
            assert!((found[found.len() - 1] - expected).abs() < 1e-11 * expected.abs().max(1e-9), "{text} at {x}: {found:?} {expected}");
        }
    }
    let cuts = Cuts::new(&kernel("taylor=0,1,3,coef=2.0:0.5:-1.0"), &[0, 2, 4]).expect("a series");
    assert_eq!(values(&cuts, 2.0), [2.0, 2.0 + 0.5 * 2.0, 2.0 + 0.5 * 2.0 - 8.0 / 6.0]);
    assert_eq!([0, 1, 2, 3, 4].map(|n| cuts.coefficient(n)), [2.0, 0.5, 0.0, -1.0, 0.0]);
    assert!(Cuts::new(&kernel("power=2"), &[0]).is_none() && Cuts::new(&kernel("feature=relu"), &[0]).is_none());
}

#[test]
fn the_tail_is_long_enough_and_within_its_buffer() {
    for top in [0, 2, 32, 100, 150] {
        for x in 0..=top {
            let steps = steps(top, x);
            assert!(2 * steps >= top && steps < MAX_STEPS, "{top} {x}: {steps}");
        }
    }
}
