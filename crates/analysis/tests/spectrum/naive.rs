//! Everything once more with plain loops over pairs.

use termwise_analysis::spectrum::{HeadSpectrum, Options, RowChoice, Spectrum, sample};
use termwise_attention::combinatorics::factorial;
use termwise_attention::parts::kernel::taylor::Taylor;
use termwise_attention::{Attention, Kernel, ScaledSums, Variant, View};
use termwise_model::{Model, ObservedAttention, SessionOptions};

use crate::{all_rows, model, quoted, spectrum, texts};

/// Sums of one head.
#[derive(Default)]
struct Plain {
    x: Vec<f64>,
    entropies: Vec<f64>,
    entropy_shares: Vec<f64>,
    shares: Vec<Vec<f64>>,
    errors: Vec<f64>,
    centered_errors: Vec<f64>,
    outputs: f64,
    /// The largest relative change of an output when all scores of a row are shifted.
    shifted: f64,
}

/// a_n, where the kernel is a series.
fn coefficient(kernel: &Kernel, n: usize) -> Option<f64> {
    match kernel {
        Kernel::Exp(_) => Some(1.0),
        Kernel::Taylor(_) => Some(kernel.polynomial()?.iter().find(|(order, _)| *order == n).map_or(0.0, |(_, a)| *a)),
        _ => None,
    }
}

fn plain(view: &View, rows: &[usize], orders: &[usize], y: &dyn Fn(usize, usize) -> f64, into: &mut Plain) {
    let View { variant, d, e, q, k, v, log_decay, .. } = view;
    let kernel = &variant.near.kernel;
    into.shares.resize(orders.len(), Vec::new());
    into.errors.resize(orders.len(), 0.0);
    into.centered_errors.resize(orders.len(), 0.0);
    for &t in rows {
        let mut x = Vec::new();
        for s in 0..=t {
            let near = variant.window.is_none_or(|window| t - s < window) || s < variant.sinks.unwrap_or(0);
            if !near {
                continue;
            }
            let mut dot = 0.0;
            for i in 0..*d {
                dot += q[t * d + i] * k[s * d + i];
            }
            let dot = variant.near.cap.map_or(dot, |cap| cap * (dot / cap).tanh());
            x.push((s, if variant.near.clamp.is_some_and(|clamp| dot > clamp) { variant.near.clamp.expect("a clamp") } else { dot }));
        }
        let attend = |w: &dyn Fn(f64) -> f64| {
            let (mut u, mut z, mut out) = (vec![0.0; *e], 0.0, vec![0.0; *e]);
            for &(s, x) in &x {
                let weight = (log_decay[t] - log_decay[s]).exp() * w(x);
                z += weight;
                for i in 0..*e {
                    u[i] += weight * v[s * e + i];
                }
            }
            view.finish(variant, t, ScaledSums { u: &u, z, rho: 0.0 }, &mut out);
            (z, out)
        };
        let whole = |x: f64| if matches!(kernel, Kernel::Exp(_)) { x.exp() } else { kernel.value(x) };
        let (z, expected) = attend(&whole);
        for (i, &expected) in expected.iter().enumerate() {
            let found = y(t, i);
            assert!(
                (found - expected).abs() < 1e-3 * (1.0 + expected.abs()),
                "{variant}, row {t}: the model has {found}, loops {expected}"
            );
        }
        let size = expected.iter().map(|y| y.abs()).fold(1e-30, f64::max);
        for shift in [-3.0, 3.0] {
            let (_, shifted) = attend(&|x: f64| whole(x + shift));
            let change = shifted.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            into.shifted = into.shifted.max(change / size);
        }
        if x.iter().all(|&(_, x)| whole(x) >= 0.0) && z > 0.0 {
            let mut entropy = 0.0;
            for &(s, x) in &x {
                let p = (log_decay[t] - log_decay[s]).exp() * whole(x) / z;
                entropy -= if p > 0.0 { p * p.ln() } else { 0.0 };
            }
            into.entropies.push(entropy);
            if x.len() > 1 {
                into.entropy_shares.push(entropy / (x.len() as f64).ln());
            }
        }
        if coefficient(kernel, 0).is_some() {
            into.outputs += expected.iter().map(|y| y * y).sum::<f64>();
            for (at, &p) in orders.iter().enumerate() {
                let cut = |x: f64| (0..=p).rev().map(|n| coefficient(kernel, n).expect("a series") * x.powi(n as i32) / factorial(n)).sum();
                let (cut_z, out) = attend(&cut);
                into.shares[at].push(cut_z / z);
                into.errors[at] += out.iter().zip(&expected).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
                let mean = x.iter().map(|(_, x)| x).sum::<f64>() / x.len() as f64;
                let (_, out) = attend(&|x: f64| cut(x - mean));
                into.centered_errors[at] += out.iter().zip(&expected).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
            }
        }
        into.x.extend(x.iter().map(|(_, x)| x));
    }
}

/// Plain sums of every head of every layer.
fn plainly(model: &Model, windows: &[Vec<u32>], options: &Options) -> Vec<Vec<Plain>> {
    let heads = model.config.num_attention_heads;
    let mut all: Vec<Vec<Plain>> = (0..model.config.num_hidden_layers).map(|_| (0..heads).map(|_| Plain::default()).collect()).collect();
    // One batch, as the measurement runs it: float32 products of another height may round otherwise.
    let length = windows.iter().map(Vec::len).max().expect("a window");
    let lengths: Vec<usize> = windows.iter().map(Vec::len).collect();
    let mut ids = vec![0; windows.len() * length];
    windows.iter().enumerate().for_each(|(row, window)| ids[row * length..][..window.len()].copy_from_slice(window));
    let mut session = model.session(windows.len(), length, SessionOptions::default()).expect("a session");
    let watch = &mut |ObservedAttention { layer, attention, shape, inputs, y, .. }: ObservedAttention| {
        for (row, &own) in lengths.iter().enumerate() {
            let rows = sample(options.rows, own, row, options.seed);
            for (head, into) in all[layer].iter_mut().enumerate() {
                let view = View::new(attention, shape.batch, shape.time, inputs, row, head).expect("a view");
                let place = |t: usize, i: usize| ((row * length + t) * shape.heads + head) * shape.e + i;
                plain(&view, &rows, &options.orders, &|t, i| f64::from(y[place(t, i)]), into);
            }
        }
    };
    session.observe(&model.params, &ids, Some(&lengths), watch).expect("a pass");
    all
}

fn close(found: f64, expected: f64, bound: f64, what: &str) {
    assert!((found - expected).abs() <= bound * (1.0 + expected.abs()), "{what}: {found} for {expected}");
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn compare(found: &HeadSpectrum, plain: &Plain, variant: &Variant, orders: &[usize], name: &str) {
    let x = &plain.x;
    assert_eq!(found.pairs, x.len() as u64, "{name}");
    let average = mean(x);
    close(found.scores.mean, average, 1e-10, name);
    close(found.scores.sd, mean(&x.iter().map(|x| (x - average).powi(2)).collect::<Vec<_>>()).sqrt(), 1e-10, name);
    close(found.scores.min, x.iter().copied().fold(f64::INFINITY, f64::min), 1e-10, name);
    close(found.scores.max, x.iter().copied().fold(f64::NEG_INFINITY, f64::max), 1e-10, name);
    let rows = found.entropy.map(|entropy| (entropy.nats, entropy.share.expect("more than one key")));
    // Weights of both signs are not probabilities.
    if variant.near.kernel.sign() == termwise_attention::parts::kernel::Sign::Mixed {
        assert!(rows.is_none(), "{name}");
    } else {
        let (nats, share) = rows.unwrap_or_else(|| panic!("{name}: no entropy"));
        close(nats, mean(&plain.entropies), 1e-9, name);
        close(share, mean(&plain.entropy_shares), 1e-9, name);
    }
    if coefficient(&variant.near.kernel, 0).is_none() {
        assert!(found.terms.is_none() && found.cut.is_none() && found.positive.is_none(), "{name}");
        return;
    }
    let (terms, cut) = (found.terms.as_ref().expect("a series"), found.cut.as_ref().expect("a series"));
    let kinds: [(&termwise_analysis::spectrum::Magnitudes, &dyn Fn(f64) -> bool); 3] =
        [(&terms.all, &|_| true), (&terms.positive, &|x| x >= 0.0), (&terms.negative, &|x| x < 0.0)];
    for (magnitudes, is_meant) in kinds {
        let own: Vec<f64> = x.iter().copied().filter(|&x| is_meant(x)).collect();
        let mut largest = (0.0, None);
        for (n, found) in magnitudes.log10.iter().enumerate() {
            let a = coefficient(&variant.near.kernel, n).expect("a series").abs();
            let expected = own.iter().map(|x| a * x.abs().powi(n as i32) / factorial(n)).sum::<f64>() / own.len().max(1) as f64;
            close(found.map_or(0.0, |log| 10f64.powf(log)) / expected.max(1e-300), f64::from(u8::from(expected > 0.0)), 1e-9, name);
            if expected > largest.0 * (1.0 + 1e-9) {
                largest = (expected, Some(n));
            }
        }
        assert_eq!(magnitudes.dominant, largest.1, "{name}");
    }
    for (at, p) in orders.iter().enumerate() {
        let name = format!("{name}, order {p}");
        close(cut.share[at].expect("a number"), mean(&plain.shares[at]), 1e-8, &name);
        close(cut.error[at].expect("a number"), (plain.errors[at] / plain.outputs).sqrt(), 1e-8, &name);
        if let Some(centered) = &cut.centered {
            close(centered.error[at].expect("a number"), (plain.centered_errors[at] / plain.outputs).sqrt(), 1e-8, &name);
        }
    }
    // The expansion around the mean score is measured where the weights are divided by their sum and a shift of the scores changes no output.
    let divided = matches!(variant.denominator, termwise_attention::Denominator::Sum(_));
    assert_eq!(cut.centered.is_some(), divided && plain.shifted < 1e-9, "{name}: a shift changes outputs by {}", plain.shifted);
    for (bound, order) in [0.1, 0.01, 0.001].into_iter().zip(cut.order_for.all()) {
        let good = |at: &usize| (plain.errors[*at] / plain.outputs).sqrt() <= bound;
        assert_eq!(order, (0..orders.len()).find(good).map(|at| orders[at]), "{name}, {bound}");
    }
}

fn check(attention: &str, kv_heads: usize, deviation: f64, windows: &[Vec<u32>], options: &Options) -> Spectrum {
    let model = model(attention, kv_heads, deviation);
    let found = spectrum(&model, windows, options);
    for (layer, (found, plain)) in found.layers.iter().zip(plainly(&model, windows, options)).enumerate() {
        for (head, (found, plain)) in found.heads.iter().zip(&plain).enumerate() {
            let variant = &model.config.heads(layer)[head];
            // Learned coefficients start at 1 and are moved by the test: the bound kernel is what the view has, not the configuration.
            if !variant.to_string().contains("learned") {
                compare(found, plain, variant, &options.orders, &format!("{attention}, layer {layer}, head {head}"));
            }
        }
    }
    found
}

#[test]
fn every_kind_of_attention_agrees_with_plain_loops() {
    let windows = texts(&[37, 21, 1]);
    for attention in [
        "softmax",
        "softmax_clamp_denom",
        "gated_softmax",
        "gated_softmax_decay",
        "gated_softmax_cumgate",
        "gated_softmax_post_out_gate_L2norm_nodivS_noclamp",
        "norm",
        "gate",
        "exp over=none norm=rms decay=softplus",
        "exp over=sum,eps=0.5 clamp=1 in post conv=3",
        "taylor=0..6",
        "taylor=0..3 over=length out",
        "taylor=0,1,3,coef=2.0:0.5:0.25 over=length norm=layer",
        "taylor=0..4 decay=softplus",
        "softmax window=5",
        "softmax window=4 sinks=2 cap=0.7",
        "exp over=sum,sink window=9 qk_norm=rms",
        "exp window=12 sinks=20 decay=softplus post=silu,channel",
        "taylor=0..4 window=6 sinks=1 decay=softplus",
    ] {
        // Orders up to 24: beyond, plain sums of negative scores would cancel in the loops themselves.
        let options = Options { orders: (0..=24).step_by(2).collect(), ..all_rows() };
        check(&quoted(attention), 2, 0.25, &windows, &options);
    }
    // Next to a head with a series, the others are measured as well.
    for attention in ["linear_elu", "linear_relu", "linear_cosine", "power=2", "power=3 over=length", "linear_elu window=7"] {
        let map = format!(r#"{{"default": "{attention}", "layers": {{"0": {{"heads": {{"3": "softmax"}}}}}}}}"#);
        let options = Options { orders: (0..=24).step_by(2).collect(), ..all_rows() };
        check(&map, 4, 0.25, &windows, &options);
    }
}

/// A floor, an epsilon or a sink in the denominator makes outputs depend on a shift of the scores; the loops find that by shifting them.
#[test]
fn the_series_around_the_mean_score_needs_invariance_to_shifts() {
    for (attention, expected) in [
        ("softmax", true),
        ("softmax window=5", true),
        ("softmax_clamp_denom", false),
        ("exp over=sum,eps=0.5", false),
        ("exp over=sum,floor=0.5", false),
        ("exp over=sum,sink", false),
        ("norm", false),
        ("taylor=0..4", false),
    ] {
        let options = Options { orders: vec![0, 2, 8], ..all_rows() };
        let found = check(&quoted(attention), 2, 0.25, &texts(&[12, 7]), &options);
        let cuts = found.layers.iter().flat_map(|layer| &layer.heads).filter_map(|head| head.cut.as_ref());
        assert!(cuts.clone().count() > 0 && cuts.into_iter().all(|cut| cut.centered.is_some() == expected), "{attention}");
    }
}

#[test]
fn a_model_without_a_series_is_refused() {
    for attention in ["linear_elu", "power=2"] {
        let error = termwise_analysis::spectrum::measure(&model(&quoted(attention), 2, 0.25), &texts(&[9]), &all_rows(), &mut |_| {})
            .expect_err("no series")
            .to_string();
        assert!(error.contains("needs an `exp` or `taylor` kernel"), "{error}");
    }
}

#[test]
fn heads_of_one_layer_may_differ() {
    let map =
        r#"{"default": "softmax", "layers": {"1": {"heads": {"1": "linear_elu", "2": "taylor=0..2", "3": "exp clamp=1 over=length"}}}}"#;
    let found = check(map, 4, 0.25, &texts(&[30]), &all_rows());
    assert_eq!(found.layers[1].heads[0].attention, "exp over=sum");
    assert!(found.layers[1].heads[1].cut.is_none() && found.layers[1].heads[1].entropy.is_some());
    assert_eq!(found.layers[1].order_for().map(|over| over[0].worst.is_some()), Some(true), "over the heads that can be cut");
}

#[test]
fn sampled_rows_are_those_that_were_drawn() {
    let options = Options { rows: RowChoice::Sampled(5), seed: 7, orders: vec![0, 2, 4, 8], ..Options::default() };
    let found = check(&quoted("softmax"), 2, 0.25, &texts(&[33, 40, 3]), &options);
    assert_eq!((found.rows.sampled, found.rows.of, found.rows.seed), (13, 76, 7));
}

#[test]
fn learned_coefficients_are_taken_in() {
    let model = model(&quoted("taylor=0..2,coef=learned over=length"), 2, 0.25);
    let found = spectrum(&model, &texts(&[20]), &all_rows());
    let learned = model.params.iter().find(|(entry, _)| entry.spec.name.contains("layers.0") && entry.spec.name.contains("coef"));
    let (_, learned) = learned.expect("learned numbers");
    for (head, found) in found.layers[0].heads.iter().enumerate() {
        let log = found.terms.as_ref().expect("terms").all.log10[0].expect("order 0");
        assert!((10f64.powf(log) - f64::from(learned[head * 3]).abs()).abs() < 1e-12);
        assert_eq!(found.cut.as_ref().expect("a series").error[1], Some(0.0), "the whole polynomial");
    }
}

/// Another engine with the truncated kernel, over whole windows with padding.
#[test]
fn errors_are_those_of_the_truncated_variant() {
    let windows = texts(&[24, 17]);
    let model = model(&quoted("exp over=sum out norm=rms"), 2, 0.3);
    let options = Options { orders: vec![2, 4], ..all_rows() };
    let found = spectrum(&model, &windows, &options);
    let mut session = model.session(2, 24, SessionOptions::default()).expect("a session");
    let mut ids = [windows[0].clone(), windows[1].clone()].concat();
    ids.resize(48, 0);
    let lengths = [24, 17];
    session
        .observe(&model.params, &ids, Some(&lengths), &mut |ObservedAttention { layer, attention, shape, inputs, y, .. }| {
            for (at, &p) in options.orders.iter().enumerate() {
                let cut = |variant: Variant| variant.with_kernel(Kernel::Taylor(Taylor::up_to(p).expect("an order")));
                let heads: Vec<Variant> = model.config.heads(layer).into_iter().map(cut).collect();
                let mut out = vec![0.0f32; y.len()];
                let cut = attention.with_heads(heads).expect("a layer");
                cut.naive::<f32>(shape.batch, shape.time).expect("an engine").infer(inputs, &mut out).expect("a pass");
                for head in 0..shape.heads {
                    let own = |values: &[f32]| -> Vec<f64> {
                        values.chunks(shape.e).skip(head).step_by(shape.heads).flatten().map(|&x| f64::from(x)).collect()
                    };
                    let (cut, whole) = (own(&out), own(y));
                    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
                    let error = squares(&mut cut.iter().zip(&whole).map(|(a, b)| a - b)) / squares(&mut whole.iter().copied());
                    let found = found.layers[layer].heads[head].cut.as_ref().expect("a series").error[at].expect("a number");
                    assert!((found - error.sqrt()).abs() < 1e-5, "layer {layer}, head {head}, order {p}: {found} {}", error.sqrt());
                }
            }
        })
        .expect("a pass");
}
