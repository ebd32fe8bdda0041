use super::*;
use termwise_attention::parts::kernel::Sign;
use termwise_attention::parts::kernel::taylor::{Coefficients, Taylor};
use termwise_attention::{AuxKind, AuxTensors, Inputs, Kernel, Layer, ScaledSums, Variant, View};
use termwise_base::rng::Rng;

/// One head whose last query has these scores.
fn view(text: &str, scores: &[f64], values: &[f64]) -> View {
    let (time, e) = (scores.len(), values.len() / scores.len());
    let variant: Variant = text.parse().expect("a variant");
    let k: Vec<f32> = scores.iter().map(|&x| x as f32).collect();
    let v: Vec<f32> = values.iter().map(|&x| x as f32).collect();
    let q = vec![1.0f32; time];
    let (ones, zeros) = (vec![1.0f32; e], vec![0.0f32; e]);
    let mut extras = AuxTensors::default();
    if variant.needs(AuxKind::NormWeight) {
        extras.set(AuxKind::NormWeight, &ones[..]);
    }
    if variant.needs(AuxKind::NormBias) {
        extras.set(AuxKind::NormBias, &zeros[..]);
    }
    let layer = Layer::new(1, 1, 1).value_dim(e).variant(variant).expect("possible");
    View::new(&layer, 1, time, &Inputs::new(&q, &k, &v).with_aux(extras), 0, 0).expect("a view")
}

struct Trial {
    interval: Interval,
    fitting: Rows,
    checking: Rows,
}

/// Queries with i.i.d. Gaussian scores of this spread around a mean, 200 keys, 8 values each.
fn gaussian(text: &str, spread: f64, mean: f64, order: usize) -> Trial {
    let mut rng = Rng::new(11);
    let mut draw = |count: usize| {
        let view = |rng: &mut Rng| {
            let scores: Vec<f64> = (0..200).map(|_| mean + spread * rng.normal()).collect();
            let values: Vec<f64> = (0..200 * 8).map(|_| rng.normal()).collect();
            view(text, &scores, &values)
        };
        (0..count).map(|_| view(&mut rng)).collect::<Vec<_>>()
    };
    let (fitting, checking) = (draw(300), draw(100));
    let all = fitting.iter().flat_map(|view| view.k.iter().copied());
    let (low, high) = all.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    let interval = Interval::around(low, high);
    let kind = Kind::of(&text.parse().expect("a variant"));
    let collect = |views: &[View]| {
        let mut rows = Rows::new(kind, order);
        views.iter().for_each(|view| rows.add(view, view.length - 1, &interval));
        rows
    };
    Trial { fitting: collect(&fitting), checking: collect(&checking), interval }
}

/// The Taylor series around a score.
fn taylor(interval: &Interval, middle: f64, order: usize) -> Vec<f64> {
    let series = Kernel::Taylor(Taylor::up_to(order).expect("a series"));
    interval.interpolate(order, |x| series.value(x - middle))
}

const SOFTMAX: &str = "exp scale=1 rope=off";

/// The trial of the specification, and a spread at which an unconstrained fit becomes negative.
#[test]
fn gaussian_scores() {
    for (spread, order, taylors, fits) in [(1.0, 4, 0.137, 0.064), (1.0, 8, 0.0078, 0.0009), (2.0, 8, 0.155, 0.034), (4.0, 16, 0.50, 0.5)] {
        let trial = gaussian(SOFTMAX, spread, 0.0, order);
        let plain = taylor(&trial.interval, 0.0, order);
        let fitted = fit(&trial.fitting, order, std::slice::from_ref(&plain)).expect("rows");
        let (plain, error) = (trial.checking.error(&plain), trial.checking.error(&fitted));
        println!("spread {spread}, order {order}: Taylor {plain:.5}, fitted {error:.5}");
        assert!(plain > 0.4 * taylors && plain < 2.0 * taylors, "Taylor at spread {spread}, order {order}: {plain}");
        assert!(error < 1.3 * fits && error < plain, "fit at spread {spread}, order {order}: {error}");
        assert!(lowest(&trial.interval, &fitted) > 0.0);
        let series = Coefficients::Given(trial.interval.series(&fitted));
        let series = Taylor::new((0..=order).collect(), series).expect("a series");
        assert_eq!(Kernel::Taylor(series).sign(), Sign::Positive, "spread {spread}, order {order}");
    }
}

/// A head whose weights are already a polynomial: the fit is that polynomial, up to a factor.
#[test]
fn a_polynomial_is_recovered() {
    let text = "taylor=0..4,coef=2:1:1.5:0.5:1 scale=1 rope=off";
    let mut rng = Rng::new(5);
    let views: Vec<View> = (0..200)
        .map(|_| {
            let scores: Vec<f64> = (0..50).map(|_| rng.normal() * 1.5).collect();
            let values: Vec<f64> = (0..50 * 4).map(|_| rng.normal()).collect();
            view(text, &scores, &values)
        })
        .collect();
    let interval = Interval::around(-6.0, 6.0);
    let mut rows = Rows::new(Kind::Ratio, 6);
    views.iter().for_each(|view| rows.add_as(view, view.length - 1, &interval, |x| view.variant.near.kernel.value(x)));
    for order in [4, 6] {
        let fitted = fit(&rows, order, &[]).expect("rows");
        let error = rows.error(&fitted);
        assert!(error < 1e-5, "order {order}: {error}");
        let factor = interval.evaluate(&fitted, 0.5) / views[0].variant.near.kernel.value(0.5);
        for x in [-3.0, -1.0, 0.0, 2.0, 4.0] {
            let (found, expected) = (interval.evaluate(&fitted, x), factor * views[0].variant.near.kernel.value(x));
            assert!((found - expected).abs() < 1e-3 * expected.abs().max(0.1 * factor), "order {order} at {x}: {found} {expected}");
        }
    }
    let lower = fit(&rows, 2, &[]).expect("rows");
    assert!(rows.error(&lower) > 1e-3, "order 2 cannot be order 4");
}

/// A mean far from zero makes the Taylor series around zero inaccurate; the fit does not depend on it.
#[test]
fn a_mean_far_from_zero() {
    let trial = gaussian(SOFTMAX, 1.0, -6.0, 4);
    let plain = trial.checking.error(&taylor(&trial.interval, 0.0, 4));
    let centred = trial.checking.error(&taylor(&trial.interval, -6.0, 4));
    let fitted = trial.checking.error(&fit(&trial.fitting, 4, &[]).expect("rows"));
    assert!(centred < 0.25 && plain > 3.0 * centred, "{plain} {centred}");
    assert!(fitted < 0.1, "{fitted}");
}

/// Under a norm only the direction matters; otherwise the size does too.
#[test]
fn other_denominators() {
    for text in
        ["exp scale=1 rope=off over=none norm=l2", "exp scale=1 rope=off over=length norm=layer", "exp scale=1 rope=off over=length"]
    {
        let trial = gaussian(text, 1.0, 0.0, 6);
        let plain = taylor(&trial.interval, 0.0, 6);
        let fitted = fit(&trial.fitting, 6, std::slice::from_ref(&plain)).expect("rows");
        let (plain, error) = (trial.checking.error(&plain), trial.checking.error(&fitted));
        assert!(error < 0.7 * plain && error < 0.06, "{text}: {plain} {error}");
    }
    let doubled = |text: &str| {
        let trial = gaussian(text, 1.0, 0.0, 6);
        let twice: Vec<f64> = taylor(&trial.interval, 0.0, 6).iter().map(|c| 2.0 * c).collect();
        trial.checking.error(&twice)
    };
    assert!(doubled("exp scale=1 rope=off over=length") > 0.9, "twice the size is a relative error of 1");
    assert!(doubled(SOFTMAX) < 0.1, "and cancels under a sum");
}

/// Errors from the products equal those of the output.
#[test]
fn errors_match_those_of_the_output() {
    let mut rng = Rng::new(7);
    let scores: Vec<f64> = (0..30).map(|_| 2.0 * rng.normal()).collect();
    let values: Vec<f64> = (0..90).map(|_| rng.normal()).collect();
    let interval = Interval::around(-6.0, 6.0);
    let c = taylor(&interval, 0.5, 3);
    for text in [SOFTMAX, "exp scale=1 rope=off over=length", "exp scale=1 rope=off over=sum,eps=3"] {
        let view = view(text, &scores, &values);
        let output = |w: &dyn Fn(f64) -> f64| {
            let t = view.length - 1;
            let (mut u, mut z, mut y) = (vec![0.0; 3], 0.0, vec![0.0; 3]);
            for (s, x) in super::super::rows::scores(&view, t) {
                z += w(x);
                (0..3).for_each(|i| u[i] += w(x) * view.v[s * 3 + i]);
            }
            view.finish(&view.variant, t, ScaledSums { u: &u, z, rho: 0.0 }, &mut y);
            y
        };
        let (exact, cut) = (output(&f64::exp), output(&|x| interval.evaluate(&c, x)));
        let square = |y: &[f64]| y.iter().map(|y| y * y).sum::<f64>();
        let off: Vec<f64> = exact.iter().zip(&cut).map(|(a, b)| a - b).collect();
        let expected = (square(&off) / square(&exact)).sqrt();
        let mut rows = Rows::new(Kind::of(&view.variant), 5);
        rows.add(&view, view.length - 1, &interval);
        // With eps the denominator of the truncation differs, which is not modelled: the sums are compared.
        if text.contains("eps") {
            assert!(rows.kind == Kind::Size && rows.error(&c) > 0.0);
        } else {
            assert!((rows.error(&c) - expected).abs() < 1e-9 * expected, "{text}: {} {expected}", rows.error(&c));
        }
    }
}

/// Compares the gradient of a step with differences of the error, if sizes cancel and if they matter.
#[test]
fn gradients_match_differences_of_the_error() {
    for text in [SOFTMAX, "exp scale=1 rope=off over=none norm=l2", "exp scale=1 rope=off over=length"] {
        let trial = gaussian(text, 1.0, 0.0, 5);
        let c = taylor(&trial.interval, 0.5, 4);
        let (gradient, normal) = trial.fitting.model(&c);
        for k in 0..c.len() {
            let at = |step: f64| {
                let mut c = c.clone();
                c[k] += step;
                trial.fitting.squared(&c) / 2.0
            };
            let h = 1e-3 * c[k].abs();
            let expected = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * h);
            assert!((gradient[k] - expected).abs() < 1e-4 * expected.abs() + 1e-9, "{text} {k}: {} {expected}", gradient[k]);
            assert!(normal[k * c.len() + k] > 0.0);
        }
        if trial.fitting.kind == Kind::Ratio {
            let along: f64 = gradient.iter().zip(&c).map(|(g, c)| g * c).sum();
            assert!(along.abs() < 1e-9 * trial.fitting.squared(&c), "a common factor changes nothing");
        }
    }
}

/// (u² − ¼)² minus a small number, whose minima are between grid points; one far outside; and one whose end is the minimum.
#[test]
fn minima_are_found_between_grid_points() {
    let unit = Interval { middle: 0.0, half: 1.0 };
    let two = unit.interpolate(4, |u| (u * u - 0.25).powi(2) - 1e-7);
    let found = valleys(&two);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found.iter().all(|(u, value)| (u.abs() - 0.5).abs() < 1e-5 && (value + 1e-7).abs() < 1e-12), "{found:?}");
    let far = unit.interpolate(2, |u| (u - 7.3).powi(2));
    assert!(valleys(&far).iter().any(|(u, value)| (u - 7.3).abs() < 1e-4 && value.abs() < 1e-9));
    assert!(valleys(&[1.0, 1.0]).iter().any(|(u, value)| (u + 1.0 + MARGIN).abs() < 1e-9 && (value + MARGIN).abs() < 1e-9));
}
