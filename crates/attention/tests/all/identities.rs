//! Identities between variants for any inputs: causality, cancellation under norms, convergence of the orders to softmax.

use termwise_attention::combinatorics::factorial;
use termwise_attention::combinatorics::monomials;
use termwise_attention::presets;
use termwise_attention::{Attention, AuxKind, AuxTensor, Mode, Real, Reference, Scratch, Shape, StateKind, Variant, relative_rms};

use crate::support::combos::{random_case, random_case_of, random_naive_case};
use crate::support::{Case, Name, Rng, layer, oracle, same_isa, shape, stepped};

fn reference(case: &Case<f64>) -> Reference<f64> {
    case.naive()
}

fn output(case: &Case<f64>) -> Vec<f64> {
    case.forward(&mut reference(case)).0
}

fn max_difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |max, x| if x <= max { max } else { x })
}

/// New values from position t on in every tensor that has a time axis.
fn change_from<R: Real>(case: &mut Case<R>, t: usize, rng: &mut Rng) {
    let (batch, time) = (case.shape.batch, case.shape.time);
    for (name, values) in &mut case.tensors {
        if !matches!(name, Name::AuxTensor(aux) if !aux.is_gate_logits()) {
            let width = values.len() / (batch * time);
            for row in values.chunks_exact_mut(time * width) {
                row[t * width..].iter_mut().for_each(|x| *x = R::of(3.0 * rng.normal()));
            }
        }
    }
}

fn check_causality<R: Real>(mut case: Case<R>, engine: &mut impl Attention<R>, rng: &mut Rng) {
    let Shape { batch, time, heads, e, .. } = case.shape;
    let before = case.forward(engine).0;
    let t = 1 + rng.below(time - 1);
    change_from(&mut case, t, rng);
    let after = case.forward(engine).0;
    let width = heads * e;
    let mut later = false;
    for b in 0..batch {
        let rows = b * time * width..(b * time + t) * width;
        assert_eq!(before[rows.clone()], after[rows.clone()], "{case}: tokens from {t} on change earlier outputs");
        later |= before[rows.end..(b + 1) * time * width] != after[rows.end..(b + 1) * time * width];
    }
    // Nothing is read after the end of a row.
    assert!(later || case.lengths.is_some(), "{case}: later tokens change nothing at all");
}

#[test]
fn later_tokens_do_not_change_earlier_outputs() {
    let _isa = same_isa();
    let mut rng = Rng(21);
    for preset in presets::all() {
        let small = shape(2, 9, 2, 1, 4, 3);
        let case = Case::<f64>::random(&layer(preset.text, &small), small, None, 1.0, &mut rng);
        check_causality(case.clone(), &mut reference(&case), &mut rng);
        let large = shape(1, 140, 2, 1, 8, 6);
        let case = Case::<f32>::random(&layer(preset.text, &large), large, None, 2.0, &mut rng);
        let mut fused = case.fused(Mode::Parallel, &Scratch::default()).unwrap_or_else(|error| panic!("{error}"));
        check_causality(case, &mut fused, &mut rng);
    }
    for _ in 0..60 {
        let case = random_naive_case::<f64>(shape(2, 9, 4, 2, 6, 5), 0.0, &mut rng);
        check_causality(case.clone(), &mut reference(&case), &mut rng);
        let case = random_case::<f32>(shape(2, 70, 4, 2, 6, 5), 0.01, &mut rng);
        check_causality(case.cast::<f64>(), &mut reference(&case.cast()), &mut rng);
        let mut fused = case.fused(Mode::Parallel, &Scratch::default()).unwrap_or_else(|error| panic!("{error}"));
        check_causality(case, &mut fused, &mut rng);
    }
}

/// A case of another variant with the same values in the tensors that both have.
fn like(case: &Case<f64>, text: &str, rng: &mut Rng) -> Case<f64> {
    let mut other = Case::random(&layer(text, &case.shape), case.shape, case.lengths.clone(), 1.0, rng);
    for (name, values) in &mut other.tensors {
        if let Some((_, shared)) = case.tensors.iter().find(|(known, _)| known == name) {
            values.clone_from(shared);
        }
    }
    other.dy.clone_from(&case.dy);
    other
}

/// Values so large that the eps of a norm is negligible.
fn large_values(text: &str, shape: Shape, rng: &mut Rng) -> Case<f64> {
    let mut case = Case::random(&layer(text, &shape), shape, None, 1.0, rng);
    case.get_mut(Name::V).iter_mut().for_each(|v| *v *= 1e6);
    case
}

#[test]
fn scale_free_norms_cancel_denominators_and_output_gates() {
    let mut rng = Rng(22);
    let shape = shape(2, 7, 4, 2, 6, 5);
    for norm in ["l2", "scaled_l2", "rms", "layer"] {
        for kernel in ["exp", "exp clamp=1", "taylor=0..4", "feature=elu", "exp decay=softplus in"] {
            let plain = format!("{kernel} over=none norm={norm}");
            let case = large_values(&plain, shape, &mut rng);
            let expected = output(&case);
            for changed in [
                "over=sum",
                "over=length",
                "over=sum,floor=1",
                "over=sum,detached",
                "over=sum out",
                "over=none out",
                "over=length out=cumulative",
            ] {
                let text = format!("{kernel} {changed} norm={norm}");
                let other = like(&case, &text, &mut rng);
                let error = relative_rms(&output(&other), &expected);
                assert!(error < 1e-9, "{text} against {plain}: {error:e}");
                let (a, b) = (layer(&text, &shape)[0].canonical(), layer(&plain, &shape)[0].canonical());
                assert_eq!(a, b, "{text} and {plain} are one class");
                if changed.contains("out") {
                    let gradients = other.backward(&mut reference(&other));
                    let gate = &gradients.iter().find(|(name, _)| *name == Name::aux(AuxKind::OutGate)).expect("has a gate").1;
                    assert!(gate.iter().all(|g| g.abs() < 1e-8), "{text}: a gate that cancels has a gradient");
                }
            }
        }
    }
}

/// Equal canonical forms give equal outputs and the other way round, over random pairs that share their parameters.
/// The parts are chosen such that each changes the output unless it cancels: small clamps, large eps and floors.
#[test]
fn canonical_forms_are_equal_exactly_for_equal_outputs() {
    let _isa = same_isa();
    let mut rng = Rng(23);
    let shape = shape(1, 6, 2, 1, 4, 5);
    let mut equal = 0;
    let draw = |rng: &mut Rng| {
        let kernel = rng.pick(&[
            "exp",
            "taylor=0..4",
            "taylor=1",
            "taylor=2",
            "taylor=3",
            "power=1",
            "power=2",
            "power=3",
            "feature=identity",
            "feature=elu",
        ]);
        let over = rng.pick(&["sum", "sum,eps=3.0", "length", "none", "position"]);
        let mut text = format!("{kernel} over={over} norm={}", rng.pick(&["none", "l2", "l2", "rms"]));
        let words =
            [" clamp=0.2", " in", " out", " out=cumulative post=out", " decay=softplus", " cap=0.3", " window=3", " window=2 far(exp)"];
        for word in words {
            let twice = |key: &str| word.contains(key) && text.contains(key);
            if rng.chance(0.15) && !twice("out") && !twice("window") {
                text.push_str(word);
            }
        }
        text
    };
    for _ in 0..15_000 {
        let (a, b) = (draw(&mut rng), draw(&mut rng));
        let (va, vb): (Variant, Variant) = (layer(&a, &shape)[0].clone(), layer(&b, &shape)[0].clone());
        let same = va.canonical() == vb.canonical();
        // Most pairs are unequal; a fraction of them is enough.
        if !same && !rng.chance(0.1) {
            continue;
        }
        // A sum of either sign can have one sign in all rows of a case, and a clamp can apply everywhere: several cases decide.
        let error = (0..8)
            .map(|_| {
                let case = large_values(&a, shape, &mut rng);
                relative_rms(&output(&like(&case, &b, &mut rng)), &output(&case))
            })
            .find(|&error| error > 1e-6 || same)
            .unwrap_or(0.0);
        assert_eq!(error < 1e-6, same, "`{a}` and `{b}` differ by {error:e}; canonical `{}` and `{}`", va.canonical(), vb.canonical());
        equal += (same && va != vb) as usize;
    }
    assert!(equal > 30, "only {equal} pairs were equal without being the same");
}

#[test]
fn normalized_feature_attention_is_invariant_to_the_scale_of_q() {
    let mut rng = Rng(24);
    let shape = shape(1, 8, 2, 1, 16, 4);
    for text in ["feature=relu over=sum", "feature=identity over=sum", "power=2 over=sum", "feature=relu over=none norm=l2"] {
        let mut case = Case::<f64>::random(&layer(text, &shape), shape, None, 1.0, &mut rng);
        let before = output(&case);
        case.get_mut(Name::Q).iter_mut().for_each(|q| *q *= 3.7);
        let error = relative_rms(&output(&case), &before);
        assert!(error < 1e-10, "{text}: {error:e}");
    }
    let mut case = Case::<f64>::random(&layer("softmax", &shape), shape, None, 1.0, &mut rng);
    let before = output(&case);
    case.get_mut(Name::Q).iter_mut().for_each(|q| *q *= 3.7);
    assert!(relative_rms(&output(&case), &before) > 0.1, "softmax does change");
}

/// With scores |x| ≤ r, orders 0..p leave a remainder of at most e^r·r^{p+1}/(p+1)! in every weight.
#[test]
fn taylor_polynomials_converge_to_softmax_at_the_rate_of_the_remainder() {
    let mut rng = Rng(25);
    let shape = shape(1, 24, 2, 1, 8, 6);
    let case = Case::<f64>::random(&layer("softmax", &shape), shape, None, 1.0, &mut rng);
    let rows =
        |name: Name, dim: usize| case.get(name).chunks_exact(dim).map(|x| x.iter().map(|x| x * x).sum::<f64>().sqrt()).fold(0.0, f64::max);
    let reach = rows(Name::Q, 8) * rows(Name::K, 8) / 8f64.sqrt();
    let largest_value = case.get(Name::V).iter().fold(0f64, |max, v| max.max(v.abs()));
    let expected = output(&case);
    let mut before = f64::INFINITY;
    for p in (2..=78).step_by(4) {
        let error = max_difference(&output(&like(&case, &format!("taylor=0..{p}"), &mut rng)), &expected);
        // A weight is at least e^−r, and numerator and denominator each carry the remainder.
        let remainder = reach.exp() * reach.powi(p + 1) / factorial(p as usize + 1);
        let bound = 2.0 * largest_value * remainder * reach.exp() + 1e-13;
        assert!(error <= bound, "order {p}: {error:e} above the remainder {bound:e}");
        assert!(error < before || error < 1e-12, "order {p}: {error:e} after {before:e}");
        before = error;
    }
    assert!(before < 1e-13, "order 78 is softmax to rounding, found {before:e}");
}

/// q^{⊗n}: all products of n coordinates.
fn tensor_power(x: &[f64], n: usize) -> Vec<f64> {
    (0..n).fold(vec![1.0], |power, _| power.iter().flat_map(|a| x.iter().map(move |b| a * b)).collect())
}

/// Φ_n: each distinct monomial once, weighted by √(n!/α!).
fn packed_power(x: &[f64], n: usize) -> Vec<f64> {
    fn walk(x: &[f64], n: usize, product: f64, out: &mut Vec<f64>) {
        match x {
            [] if n == 0 => out.push(product),
            [] => {}
            [first, rest @ ..] => (0..=n).for_each(|a| walk(rest, n - a, product * first.powi(a as i32) / factorial(a).sqrt(), out)),
        }
    }
    let mut out = Vec::new();
    walk(x, n, factorial(n).sqrt(), &mut out);
    out
}

#[test]
fn powers_are_products_of_tensor_powers() {
    let mut rng = Rng(26);
    for n in 0..=4 {
        let shape = shape(1, 5, 1, 1, 4, 3);
        let case = Case::<f64>::random(&layer(&format!("power={n} scale=1 over=none rope=off"), &shape), shape, None, 1.0, &mut rng);
        let y = output(&case);
        for power in [tensor_power, packed_power] {
            let features = |name: Name| case.get(name).chunks_exact(4).map(|x| power(x, n)).collect::<Vec<_>>();
            let (q, k) = (features(Name::Q), features(Name::K));
            for t in 0..5 {
                for i in 0..3 {
                    let weight = |s: usize| q[t].iter().zip(&k[s]).map(|(q, k)| q * k).sum::<f64>();
                    let expected: f64 = (0..=t).map(|s| weight(s) * case.get(Name::V)[s * 3 + i]).sum();
                    assert!((y[t * 3 + i] - expected).abs() < 1e-12 * expected.abs().max(1.0), "order {n} at {t}, {i}");
                }
            }
        }
        assert_eq!(tensor_power(&[1.0; 4], n).len(), 4usize.pow(n as u32));
        for d in 1..=6 {
            assert_eq!(packed_power(&vec![1.0; d], n).len() as u128, monomials(d, n), "monomials of order {n} in {d} variables");
        }
    }
}

/// Every auxiliary tensor affects the loss in every head and position where it can; the exceptions are exact zeros.
#[test]
fn every_parameter_that_can_have_a_gradient_has_one() {
    let mut rng = Rng(27);
    let shape = shape(2, 6, 4, 2, 4, 3);
    for preset in presets::all() {
        let case = Case::<f64>::random(&layer(preset.text, &shape), shape, None, 1.0, &mut rng);
        for (name, gradient) in case.backward(&mut reference(&case)) {
            let alive = gradient.iter().filter(|g| g.abs() > 1e-14).count() as f64 / gradient.len() as f64;
            // The last decay signal is shifted out, the first row of a softmax has one weight, relu and the floor of
            // the cumulative gate switch entries off.
            let least = match name {
                Name::AuxTensor(AuxTensor { kind: AuxKind::OutGate, .. })
                    if preset.text.contains("norm=l2 ") || preset.text.ends_with("norm=l2") =>
                {
                    0.0
                }
                Name::Q | Name::K | Name::AuxTensor(_) => 0.3,
                Name::V => 0.6,
            };
            assert!(alive >= least, "{}: only {alive} of the gradient of {name:?} is not zero", preset.name);
        }
    }
}

#[test]
fn nonpositive_denominators_are_reported() {
    let mut rng = Rng(28);
    let shape = shape(2, 12, 2, 1, 4, 3);
    let case = Case::<f64>::random(&layer("feature=identity over=sum rope=off", &shape), shape, None, 1.0, &mut rng);
    let found = case.forward(&mut reference(&case)).1.nonpositive.expect("a sum of products changes sign");
    // The first by batch row, head and position, determined from the sum of weights.
    let sum = |b: usize, h: usize, t: usize| {
        let q = &case.get(Name::Q)[((b * 12 + t) * 2 + h) * 4..][..4];
        let k = |s: usize| &case.get(Name::K)[(b * 12 + s) * 4..][..4];
        (0..=t).map(|s| q.iter().zip(k(s)).map(|(q, k)| q * k / 2.0).sum::<f64>()).sum::<f64>()
    };
    let places = (0..2).flat_map(|b| (0..2).flat_map(move |h| (0..12).map(move |t| (b, h, t))));
    let first = places.clone().find(|&(b, h, t)| sum(b, h, t) <= 0.0).expect("one is negative");
    assert_eq!((found.row, found.head, found.position), first);
    assert!((found.value - sum(first.0, first.1, first.2)).abs() < 1e-12);
    for text in ["softmax", "linear_elu", "feature=identity over=none", "exp over=length"] {
        let other = Case::<f64>::random(&layer(text, &shape), shape, None, 1.0, &mut rng);
        assert_eq!(other.forward(&mut reference(&other)).1.nonpositive, None, "{text}");
    }
}

/// The same tensors in a layer of other variants; missing tensors of the far branch are those of the near branch.
fn with_heads(case: &Case<f64>, change: impl Fn(&mut Variant)) -> Case<f64> {
    let mut other = case.clone();
    other.heads.iter_mut().for_each(change);
    let known = |name: &Name| case.tensors.iter().find(|(other, _)| other == name);
    other.tensors = case.tensors[..3].to_vec();
    for spec in other.layer().aux_specs() {
        let name = Name::AuxTensor(spec.aux);
        let (_, values) = known(&name).or(known(&Name::AuxTensor(AuxTensor::from(spec.aux.kind)))).expect("a tensor of the case");
        other.tensors.push((name, values.clone()));
    }
    other
}

#[test]
fn windows_or_sinks_that_cover_all_keys_are_bit_identical_to_none() {
    let _isa = same_isa();
    let mut rng = Rng(29);
    for _ in 0..80 {
        let shape = shape(2, 9, 4, 2, 4, 3);
        let case = random_case_of::<f64>(shape, 0.01, |variant| variant.window.is_none() && variant.write.is_none(), &mut rng);
        let expected = (output(&case), case.backward(&mut reference(&case)));
        for (window, sinks) in [(9, None), (1 << 40, Some(2)), (1, Some(9)), (3, Some(7))] {
            let other = with_heads(&case, |variant| (variant.window, variant.sinks) = (Some(window), sinks));
            assert_eq!(output(&other), expected.0, "{other}");
            assert_eq!(other.backward(&mut reference(&other)), expected.1, "{other}");
        }
        let other = with_heads(&case, |variant| variant.window = Some(8));
        let full = case.lengths.as_ref().is_some_and(|lengths| lengths.iter().all(|&length| length < 9));
        assert!(full || output(&other) != expected.0, "{other}: a window of one key less changes something");
    }
}

#[test]
fn equal_near_and_far_kernels_give_full_attention_and_its_gradients() {
    let mut rng = Rng(30);
    for _ in 0..80 {
        let per_channel = |variant: &Variant| variant.decay.as_ref().is_some_and(|decay| decay.by_channel());
        let fits = |variant: &Variant| variant.window.is_none() && variant.write.is_none() && !per_channel(variant);
        let case = random_case_of::<f64>(shape(2, 9, 4, 2, 4, 3), 0.05, fits, &mut rng);
        let expected = (output(&case), case.backward(&mut reference(&case)));
        for (window, sinks) in [(1, None), (3, Some(2)), (2, Some(1)), (12, None)] {
            let other = with_heads(&case, |variant| {
                (variant.window, variant.sinks, variant.far) = (Some(window), sinks, Some(variant.near.clone()));
            });
            assert!(relative_rms(&output(&other), &expected.0) < 1e-12, "{other}");
            // The gradient is split between the tensors of both branches.
            let gradients = other.backward(&mut reference(&other));
            for (name, expected) in &expected.1 {
                let mut sum = vec![0.0; expected.len()];
                for (other, gradient) in &gradients {
                    if other == name
                        || matches!((other, name), (Name::AuxTensor(far), Name::AuxTensor(near)) if far.range.is_far() && near == &AuxTensor::from(far.kind))
                    {
                        sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
                    }
                }
                assert!(max_difference(&sum, expected) < 1e-9 * expected.iter().fold(1.0, |max, g| g.abs().max(max)), "{other}: {name:?}");
            }
        }
    }
}

/// A case of the write rule with β as given, and keys of unit length.
fn written(text: &str, time: usize, d: usize, logit: f64, rng: &mut Rng) -> Case<f64> {
    let shape = shape(1, time, 1, 1, d, 3);
    let mut case = Case::<f64>::random(&layer(text, &shape), shape, None, 1.0, rng);
    case.get_mut(Name::aux(AuxKind::Beta)).fill(logit);
    for key in case.get_mut(Name::K).chunks_exact_mut(d) {
        let norm = key.iter().map(|k| k * k).sum::<f64>().sqrt();
        key.iter_mut().for_each(|k| *k /= norm);
    }
    case
}

/// Outputs of the float32 engines: parallel, in chunks if there is a finite state, and token by token.
fn outputs_in_float32(case: &Case<f64>) -> Vec<Vec<f64>> {
    let case = case.cast::<f32>();
    let finite = case.heads[0].state_rows(case.shape.d).is_some();
    let modes = [Mode::Parallel].into_iter().chain(finite.then_some(Mode::Chunk(Some(2))));
    let fused = modes.map(|mode| case.forward(&mut case.fused(mode, &Scratch::default()).expect("possible")).0);
    let steps = [StateKind::Auto, StateKind::Cache].map(|memory| stepped(&case, &mut case.state(memory)).0);
    fused.chain(steps).map(|y| y.into_iter().map(f64::from).collect()).collect()
}

/// σ of this is 1.
const ONE: f64 = 1e4;

#[test]
fn delta_rule_with_zero_beta_writes_nothing() {
    let _isa = same_isa();
    let mut rng = Rng(31);
    for text in ["power=1", "power=2 decay=mamba", "taylor=0..2", "exp", "feature=elu decay=given,channel"] {
        let case = written(&format!("{text} write=delta over=none rope=off"), 7, 4, -ONE, &mut rng);
        assert!(output(&case).iter().all(|&y| y == 0.0), "{text}");
        assert!(outputs_in_float32(&case).iter().flatten().all(|&y| y == 0.0), "{text}");
        assert!(oracle::recurrent(&case).iter().flat_map(|found| &found.y).all(|&y| y == 0.0), "{text}");
    }
}

#[test]
fn delta_rule_with_orthonormal_keys_is_plain_attention() {
    let _isa = same_isa();
    let mut rng = Rng(32);
    for text in ["power=1", "power=2", "power=3", "feature=identity decay=softplus", "power=2 decay=sigmoid,channel", "power=1 over=length"]
    {
        let over = if text.contains("over") { "" } else { " over=none" };
        let mut case = written(&format!("{text}{over} write=delta rope=off"), 6, 6, ONE, &mut rng);
        case.get_mut(Name::K).iter_mut().enumerate().for_each(|(i, k)| *k = ((i % 6 + 6 - i / 6) % 6 == 2) as usize as f64);
        let plain = like(&case, &format!("{text}{over} rope=off"), &mut rng);
        assert_eq!(output(&case), output(&plain), "{text}");
        for (found, expected) in outputs_in_float32(&case).iter().zip(outputs_in_float32(&plain)) {
            assert!(max_difference(found, &expected) < 1e-6, "{text}");
        }
        case.get_mut(Name::K)[..6].fill(0.5);
        let plain = like(&case, &format!("{text}{over} rope=off"), &mut rng);
        assert_ne!(output(&case), output(&plain), "{text}: other keys are not");
    }
}

#[test]
fn delta_rule_replaces_the_value_of_a_repeated_key() {
    let mut rng = Rng(33);
    let mut case = written("feature=identity scale=1 over=none write=delta rope=off", 5, 4, ONE, &mut rng);
    // Unit vectors of powers of two, so nothing is rounded; position 3 repeats the key of position 0.
    let keys = [0, 1, 2, 0, 3].map(|axis| (0..4).map(|i| (i == axis) as usize as f64).collect::<Vec<f64>>()).concat();
    case.get_mut(Name::K).copy_from_slice(&keys);
    case.get_mut(Name::Q).copy_from_slice(&keys[..4].repeat(5));
    let values = case.get(Name::V).to_vec();
    // In float32 only the values are rounded.
    let narrow = |y: Vec<f64>| (y, 1e-7);
    let recurrent = oracle::recurrent(&case).expect("a polynomial kernel").y;
    let all = [output(&case), recurrent].map(|y| (y, 1e-15));
    for (y, bound) in all.into_iter().chain(outputs_in_float32(&case).into_iter().map(narrow)) {
        for (t, y) in y.chunks_exact(3).enumerate() {
            let last = if t < 3 { 0 } else { 3 };
            let error = max_difference(y, &values[last * 3..][..3]);
            assert!(error <= bound, "at {t}: off by {error:e}");
        }
    }
    // Without the delta rule both values are added.
    let plain = like(&case, "feature=identity scale=1 over=none rope=off", &mut rng);
    let sums: Vec<f64> = (0..3).map(|i| values[i] + values[9 + i]).collect();
    assert!(max_difference(&output(&plain)[9..12], &sums) < 1e-15);
}
