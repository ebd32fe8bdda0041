//! Healing: the KL falls, what does not learn stays as it is, and a run that was stopped goes on as if it had not been.

use std::sync::atomic::AtomicBool;

use termwise_base::rng::Rng;
use termwise_convert::Error;
use termwise_convert::assemble::assemble;
use termwise_convert::convert::Prepared;
use termwise_convert::frontier::{ALL, Method};
use termwise_convert::kinds::{Far, Kind};
use termwise_convert::meter::{Reference, whole};
use termwise_convert::tune::{Settings, Tuning, tune};
use termwise_llama::{Config, Model};

const LENGTH: usize = 96;

fn model() -> Model {
    let text = r#"{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.25}"#;
    Model::fresh(Config::from_json_str(text, "test").expect("a configuration"), 5).expect("a model")
}

fn contexts(count: usize, seed: u64) -> Vec<Vec<u32>> {
    let mut rng = Rng::new(seed);
    (0..count).map(|_| (0..LENGTH).map(|_| rng.below(61) as u32).collect()).collect()
}

/// A far state everywhere, chosen keys beside it in some heads, codes in others.
fn converted(model: &Model) -> Model {
    let never = AtomicBool::new(false);
    let families = Method::families(&Method::named(&[]).expect("all methods"));
    let families = if families.is_empty() { ALL.to_vec() } else { families };
    let prepared = Prepared::new(model, (&contexts(2, 1), 0), &families[..1], None, &never, &mut |_, _, _| {}).expect("it can be prepared");
    let kind = |window, chosen, bits| Some(Kind { far: Far::State, chosen, bits, ..Kind::window(window) });
    assemble(model, &prepared.fits, &[kind(8, 0, 32), kind(6, 4, 32), kind(12, 0, 8), kind(8, 0, 32)]).expect("a model")
}

fn kl(model: &Model, student: &Model, contexts: &[Vec<u32>]) -> f64 {
    let mean = |ids: &Vec<u32>| whole(&Reference::new(model, ids).expect("a reference").compare(student).expect("a comparison")).mean_kl();
    contexts.iter().map(mean).sum::<f64>() / contexts.len() as f64
}

fn heal(
    model: &Model,
    student: &mut Model,
    settings: Settings,
    folder: Option<&std::path::Path>,
    stop_after: usize,
) -> Result<(Vec<f64>, u64), Error> {
    let stop = AtomicBool::new(stop_after == 0);
    let mut tell = |done: u64, _: u64, _: &str| {
        if done as usize >= stop_after {
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    };
    tune(model, student, &contexts(3, 2), settings, folder, &stop, &mut tell)
}

const ADDED: Settings = Settings { tokens: 40 * LENGTH as u64, all: false, rate: 1e-2, weight_rate: 1e-3 };

#[test]
fn healing_lowers_the_divergence_and_leaves_other_weights_alone() {
    let model = model();
    let before = converted(&model);
    for settings in [ADDED, Settings { all: true, ..ADDED }] {
        let mut student = before.clone();
        let (curve, trained) = heal(&model, &mut student, settings, None, usize::MAX).expect("it heals");
        assert_eq!(curve.len(), 40);
        let (was, is) = (kl(&model, &before, &contexts(3, 2)), kl(&model, &student, &contexts(3, 2)));
        assert!(is < 0.9 * was, "KL was {was} and is {is}");
        // The loss of a step is what the meter measures, but for the last position.
        assert!((curve[0] / kl(&model, &before, &contexts(3, 2)) - 1.0).abs() < 0.5, "{} {was}", curve[0]);
        let mut learned = 0;
        for (entry, values) in student.params.iter() {
            let name = &entry.spec.name;
            let same = values.iter().zip(before.params.get(name).expect("the same tensors")).all(|(a, b)| a.to_bits() == b.to_bits());
            let added = model.params.get(name).is_err();
            let fixed = name.contains(".codes.") || (!added && !settings.all);
            assert!(!fixed || same, "{name} has changed");
            // The coefficients of a head that keeps no far keys, and rows of tokens that never come, have no gradient.
            assert!(fixed || !same, "{name} has learned nothing");
            learned += if fixed { 0 } else { values.len() as u64 };
        }
        assert_eq!(trained, learned);
    }
}

#[test]
fn what_was_stopped_goes_on_to_the_same_bits() {
    let model = model();
    let before = converted(&model);
    for all in [false, true] {
        let settings = Settings { all, tokens: 11 * LENGTH as u64, ..ADDED };
        let mut whole = before.clone();
        let (curve, _) = heal(&model, &mut whole, settings, None, usize::MAX).expect("it heals");
        let folder = tempfile::tempdir().expect("a folder");
        for stop_after in [0, 1, 4, 9] {
            let error = heal(&model, &mut before.clone(), settings, Some(folder.path()), stop_after).expect_err("it was stopped");
            assert!(matches!(error, Error::Stopped), "{error}");
        }
        let mut student = before.clone();
        let (again, _) = heal(&model, &mut student, settings, Some(folder.path()), usize::MAX).expect("it heals");
        assert_eq!(again, curve, "all weights: {all}");
        assert!(student.params.values().iter().zip(whole.params.values()).all(|(a, b)| a.to_bits() == b.to_bits()), "all weights: {all}");
        // One checkpoint is left, which a finished run finds whole.
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 2);
        let mut finished = before.clone();
        let (known, _) = heal(&model, &mut finished, settings, Some(folder.path()), 0).expect("nothing is left to do");
        assert_eq!((known, finished.params.values()), (curve, whole.params.values()));
        // Another healing does not take it up.
        let other = Settings { rate: 2e-2, ..settings };
        assert!(heal(&model, &mut before.clone(), other, Some(folder.path()), 0).is_err());
    }
}

#[test]
fn the_original_is_at_rest_and_windows_have_nothing_to_learn() {
    let model = model();
    let mut control = model.clone();
    let (curve, _) = heal(&model, &mut control, Settings { all: true, ..ADDED }, None, usize::MAX).expect("it runs");
    assert!(curve.iter().all(|kl| kl.abs() < 1e-6), "{curve:?}");
    assert_eq!(control.params.values(), model.params.values());
    let error = heal(&model, &mut model.clone(), ADDED, None, usize::MAX).expect_err("nothing was added").to_string();
    assert!(error.contains("--tune-all"), "{error}");
    let tuning = Tuning {
        settings: ADDED,
        length: 4,
        contexts: 1,
        trained: 1,
        kl: (0..25).map(f64::from).collect(),
        measured: Vec::new(),
        control: None,
    };
    assert_eq!(tuning.ends(), [1.0, 23.0]);
}
