//! Gradients of the reference against central differences of an independent forward pass in float64.

use std::collections::BTreeSet;

use termwise_attention::presets;
use termwise_attention::variant::string::KEYS;
use termwise_attention::{Kernel, Shape, relative_rms};

use crate::support::combos::{random_naive_case, small_shape};
use crate::support::oracle::{self, loss};
use crate::support::{Case, Name, Rng, layer, shape};

/// Counts for one case.
#[derive(Default)]
struct Tally {
    entries: usize,
    /// Entries whose first step crossed a kink.
    finer: usize,
}

/// dL/dx by the four-point rule, whose error is h⁴/30 · L⁽⁵⁾.
fn difference(case: &mut Case<f64>, tensor: usize, i: usize, h: f64, frozen: &[f64]) -> f64 {
    let x = case.tensors[tensor].1[i];
    let mut at = |step: f64| {
        case.tensors[tensor].1[i] = x + step * h;
        loss(case, Some(frozen))
    };
    let slope = (8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / (12.0 * h);
    case.tensors[tensor].1[i] = x;
    slope
}

/// Compares forward and every entry of every gradient. Clamp, relu, elu, floors and the cumulative gate have kinks; a step that
/// crosses one does not approximate the slope, so such an entry is repeated with smaller steps, which rarely reach it.
/// A wrong gradient agrees with none of them.
fn check(mut case: Case<f64>) -> Tally {
    let label = case.to_string();
    let mut engine = case.naive();
    let expected = oracle::forward(&case, None);
    let (y, _) = case.forward(&mut engine);
    let error = relative_rms(&y, &expected.y);
    assert!(error < 1e-11, "{label}: forward differs by {error:e}");
    let gradients = case.backward(&mut engine);
    let mut tally = Tally::default();
    for (tensor, (name, gradient)) in gradients.iter().enumerate() {
        for (i, &found) in gradient.iter().enumerate() {
            let mut seen = Vec::new();
            for h in [1e-3, 1e-4, 1e-5] {
                let slope = difference(&mut case, tensor, i, h, &expected.denominators);
                seen.push(slope);
                if (found - slope).abs() <= 1e-7 + 1e-5 * slope.abs() {
                    break;
                }
                assert!(h > 1e-5, "{label}: gradient of {name:?}[{i}] is {found}, differences {seen:?}");
            }
            tally.entries += 1;
            tally.finer += (seen.len() > 1) as usize;
        }
    }
    tally
}

fn check_all(cases: impl Iterator<Item = Case<f64>>) {
    let mut total = Tally::default();
    for case in cases {
        let tally = check(case);
        total.entries += tally.entries;
        total.finer += tally.finer;
    }
    let share = total.finer as f64 / total.entries as f64;
    assert!(share < 0.02, "{share} of {} entries needed a finer step: kinks should be rare", total.entries);
}

#[test]
fn gradients_of_every_preset_match_differences() {
    let mut rng = Rng(1);
    check_all(presets::all().iter().flat_map(|preset| {
        // The larger standard deviation gives scores beyond the clamp of 5.
        let shapes = [(shape(2, 5, 4, 2, 4, 3), 3.0, Some(vec![5, 3])), (shape(1, 1, 1, 1, 2, 2), 1.0, None)];
        shapes.map(|(shape, spread, lengths)| steady(preset.text, shape, lengths, spread, &mut rng))
    }));
}

/// A case whose denominators stay away from zero; see [`random_naive_case`].
fn steady(text: &str, shape: Shape, lengths: Option<Vec<usize>>, spread: f64, rng: &mut Rng) -> Case<f64> {
    loop {
        let case = Case::random(&layer(text, &shape), shape, lengths.clone(), spread, rng);
        if oracle::forward(&case, None).steadiness > 1e-3 {
            return case;
        }
    }
}

/// 400 layers in four tests, which run in parallel. The hundred layers of each test must have every part.
fn random_quarter(seed: u64) {
    let mut rng = Rng(seed);
    let mut words = BTreeSet::new();
    let mut mixed = 0;
    check_all((0..100).map(|_| {
        let shape = small_shape(&mut rng);
        let case = random_naive_case(shape, 0.05, &mut rng);
        words.extend(case.heads.iter().flat_map(|v| v.to_string().split([' ', '=', ',', '(', ')']).map(String::from).collect::<Vec<_>>()));
        mixed += case.heads.iter().any(|variant| *variant != case.heads[0]) as usize;
        case
    }));
    assert!(mixed >= 5, "only {mixed} layers mix their heads");
    let parts = KEYS.iter().flat_map(|key| key.parts).chain(Kernel::PARTS).map(|info| info.word);
    // Bare words mean the sigmoid, and no word means no norm. Heavy hitters and quantization are tested in `ring`.
    let left_out = ["sigmoid", "chosen", "bits", "whole"];
    for word in KEYS.iter().map(|key| key.word).chain(parts).filter(|word| !left_out.contains(word)) {
        assert!(words.contains(word), "no random layer has `{word}`");
    }
}

#[test]
fn gradients_of_random_layers_match_differences_1() {
    random_quarter(100);
}

#[test]
fn gradients_of_random_layers_match_differences_2() {
    random_quarter(200);
}

#[test]
fn gradients_of_random_layers_match_differences_3() {
    random_quarter(300);
}

#[test]
fn gradients_of_random_layers_match_differences_4() {
    random_quarter(400);
}

#[test]
fn gradients_accumulate_and_ignore_padding() {
    let mut rng = Rng(5);
    let shape = shape(2, 6, 4, 2, 4, 3);
    let heads = layer("exp clamp=1 over=sum in out post decay=softplus norm=layer conv=3", &shape);
    let mut case = Case::<f64>::random(&heads, shape, Some(vec![4, 6]), 1.0, &mut rng);
    let mut engine = case.naive();
    let (y, _) = case.forward(&mut engine);
    let gradients = case.backward(&mut engine);
    let shifted = case.backward_onto(&mut engine, 3.0);
    for ((name, gradient), (_, shifted)) in gradients.iter().zip(&shifted) {
        for (a, b) in gradient.iter().zip(shifted) {
            assert!((a + 3.0 - b).abs() < 1e-12, "{name:?} is set, not added to");
        }
    }
    let (row, from) = (shape.heads * shape.e, 4 * shape.heads * shape.e);
    assert!(y[from..6 * row].iter().all(|&y| y == 0.0), "outputs of padding are zero");
    // Padding is not read: NaN there changes nothing.
    for (name, per_row) in [(Name::Q, 16), (Name::K, 8), (Name::V, 6)] {
        case.get_mut(name)[4 * per_row..6 * per_row].fill(f64::NAN);
    }
    case.dy[from..6 * row].fill(f64::NAN);
    assert_eq!(case.forward(&mut engine).0, y);
    assert_eq!(case.backward(&mut engine), gradients);
}
