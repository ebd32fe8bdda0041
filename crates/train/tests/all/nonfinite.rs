//! NaN and infinite losses and gradients: no update, and a diagnosis.

use crate::common;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Walk, options, run, settings, timeless, weights};
use termwise_data::{Rows, Source};
use termwise_model::weights::WriteOptions;
use termwise_model::{Model, SessionOptions};
use termwise_train::metrics::Line;
use termwise_train::nonfinite::{Diagnosis, Origin, diagnose};
use termwise_train::runs::{Runs, Status};
use termwise_train::step::Gradients;
use termwise_train::{Error, Settings, Start, train};

/// The diagnosis of a run that stops, which is also in its directory.
fn stopped(settings: &Settings, folder: &Path) -> Diagnosis {
    match train(settings, &Walk::default(), &options(folder, Start::Fresh)) {
        Err(Error::NonFinite { diagnosis, file }) => {
            let file = file.expect("a file");
            assert_eq!(file, folder.join(format!("nonfinite-step-{}", diagnosis.step)).join("diagnosis.json"));
            let saved: Diagnosis = serde_json::from_slice(&fs::read(file).expect("a diagnosis")).expect("JSON");
            assert_eq!(saved, *diagnosis);
            saved
        }
        other => panic!("expected a run that stops, found {other:?}"),
    }
}

/// A tensor's name, and a function that modifies its values.
type Change<'a> = (&'a str, fn(f32) -> f32);

/// Settings of a run that starts from a new model with some parameters changed.
fn changed(folder: &Path, more: &str, changes: &[Change]) -> Settings {
    let config = settings(more).config(common::VOCABULARY).expect("a configuration");
    let mut model = Model::fresh(config, 1).expect("a model");
    for (name, change) in changes {
        model.params.get_mut(name).expect("a parameter").iter_mut().for_each(|x| *x = change(*x));
    }
    let place = folder.join("start");
    fs::create_dir_all(&place).expect("a folder");
    model.write(&place, &WriteOptions::default()).expect("a model");
    settings(&format!("{more}\nfrom = '{}'", place.display()))
}

/// So large that any product with it overflows.
fn huge(_: f32) -> f32 {
    3e38
}

#[test]
fn a_nan_or_infinite_loss_stops_before_the_update() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = changed(folder.path(), "", &[("model.layers.1.mlp.up_proj.weight", huge)]);
    let run = folder.path().join("run");
    let diagnosis = stopped(&settings, &run);
    assert_eq!(diagnosis.step, 1);
    assert_eq!(diagnosis.forward, Some(Origin::Mlp(1)), "{diagnosis}");
    assert!(diagnosis.weight.is_none() && diagnosis.gradient.is_some());
    assert!(!run.join("checkpoints/step-00000001").exists());
    assert!(fs::read_to_string(run.join("warnings.log")).expect("warnings").contains("the MLP of layer 1"));
}

#[test]
fn the_origin_is_also_found_in_attention() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = changed(folder.path(), "attention = \"softmax\"", &[("model.layers.0.self_attn.v_proj.weight", huge)]);
    let diagnosis = stopped(&settings, &folder.path().join("run"));
    assert_eq!(diagnosis.forward, Some(Origin::Attention(0)), "{diagnosis}");
    let settings = changed(folder.path(), "attention = \"softmax\"", &[("lm_head.weight", huge)]);
    let diagnosis = stopped(&settings, &folder.path().join("second"));
    assert_eq!(diagnosis.forward, Some(Origin::Ends), "{diagnosis}");
}

#[test]
fn an_unbounded_state_is_reported_with_step_layer_and_head() {
    // Keys of head 1 in layer 1 are too long for the delta rule: the correction grows from token to token.
    let more = "attention = \"power=1 write=delta,2 over=none norm=rms rope=off\"";
    let config = settings(more).config(common::VOCABULARY).expect("a configuration");
    let mut model = Model::fresh(config, 1).expect("a model");
    let keys = model.params.get_mut("model.layers.1.self_attn.k_proj.weight").expect("a parameter");
    keys[8 * 24..][..8 * 24].iter_mut().for_each(|x| *x *= 1e4);
    let folder = tempfile::tempdir().expect("a folder");
    let start = folder.path().join("start");
    fs::create_dir_all(&start).expect("a folder");
    model.write(&start, &WriteOptions::default()).expect("a model");
    let diagnosis = stopped(&settings(&format!("{more}\nfrom = '{}'", start.display())), &folder.path().join("run"));
    assert_eq!((diagnosis.step, diagnosis.forward, diagnosis.head), (1, Some(Origin::Attention(1)), Some(1)), "{diagnosis}");
    assert!(diagnosis.to_string().contains("the attention of layer 1 is the first with NaN or infinity, in head 1"), "{diagnosis}");
}

#[test]
fn an_overflowing_gradient_norm_stops_the_run_despite_a_finite_loss() {
    let folder = tempfile::tempdir().expect("a folder");
    // The same logits, but the gradient of the final norm is 10²² times larger.
    let changes: [Change; 2] = [("lm_head.weight", |x| x * 1e22), ("model.norm.weight", |x| x * 1e-22)];
    let diagnosis = stopped(&changed(folder.path(), "", &changes), &folder.path().join("run"));
    assert!(diagnosis.loss.parse::<f64>().is_ok_and(f64::is_finite) && diagnosis.norm == "inf", "{diagnosis}");
    assert!(diagnosis.forward.is_none() && diagnosis.gradient.is_none() && diagnosis.to_string().contains("overflows"), "{diagnosis}");
}

#[test]
fn the_first_nan_or_infinite_gradient_is_reported_with_layer_and_head() {
    let settings = settings("");
    let model = Model::fresh(settings.config(common::VOCABULARY).expect("a configuration"), 1).expect("a model");
    let mut gradients = Gradients::new(&model, settings.cut(), SessionOptions::default(), (0, 1)).expect("room");
    let mut rows = Rows::default();
    Walk::default().train(1, 0, 4, 16, &mut rows).expect("a batch");
    let mut computed = gradients.whole(&model.params, std::slice::from_ref(&rows)).expect("a gradient");
    // Head 2 of three, of width 8: rows 16 to 23 of the query projection, columns of the output projection.
    gradients.gradient_mut().get_mut("model.layers.0.self_attn.q_proj.weight").expect("a gradient")[17 * 24 + 5] = f32::NAN;
    computed.norm = f64::NAN;
    let place = diagnose(&model, Some(&gradients), &computed, &[rows.clone()], 7).gradient.expect("a place");
    assert_eq!((place.layer, place.head, place.index), (Some(0), Some(2), 17 * 24 + 5));
    gradients.gradient_mut().get_mut("model.layers.1.self_attn.o_proj.weight").expect("a gradient")[3 * 24 + 9] = f32::INFINITY;
    let place = diagnose(&model, Some(&gradients), &computed, &[rows], 7).gradient.expect("a place");
    assert_eq!((place.layer, place.head), (Some(1), Some(1)), "the backward pass reaches layer 1 first");
    assert!(place.to_string().contains("layer 1, head 1"), "{place}");
}

#[test]
fn a_nonpositive_denominator_is_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    // Odd orders make weights negative; with scores of this size, their sums cross zero.
    let odd = "attention = \"taylor=1 over=sum\"\nlr = 0.0";
    let outcome = train(&settings(odd), &Walk::default(), &options(&folder.path().join("run"), Start::Fresh));
    let text = match outcome {
        Ok(_) => fs::read_to_string(folder.path().join("run/warnings.log")).expect("warnings"),
        Err(error) => error.to_string(),
    };
    assert!(text.contains("the denominator of layer 0, head ") && text.contains("of row "), "{text}");
}

#[test]
fn warnings_of_a_variant_are_printed_at_the_start_of_a_run() {
    let folder = tempfile::tempdir().expect("a folder");
    for (text, expected) in
        [("taylor=0..2 write=delta,2 over=none qk_norm=l2 norm=rms", Some("the write rule grows without bound")), ("softmax", None)]
    {
        let place = folder.path().join(if expected.is_some() { "unstable" } else { "stable" });
        let outcome = run(&settings(&format!("attention = \"{text}\"\nsteps = 1\nwarmup = 0")), &place, Start::Fresh);
        let told = fs::read_to_string(place.join("warnings.log")).unwrap_or_default();
        assert_eq!(
            (outcome.warnings, told.contains(expected.unwrap_or("warning"))),
            (expected.iter().count(), expected.is_some()),
            "{told}"
        );
    }
}

#[test]
fn skipped_updates_are_counted_and_have_no_other_effect() {
    let folder = tempfile::tempdir().expect("a folder");
    let broken = changed(folder.path(), "skip_nonfinite = 3", &[("model.layers.1.mlp.up_proj.weight", huge)]);
    let place = folder.path().join("run");
    let diagnosis = stopped(&broken, &place);
    assert_eq!(diagnosis.step, 4, "three steps are skipped, the fourth is not");
    let checkpoint = place.join("checkpoints/step-00000003");
    let [before, after] = [folder.path().join("start"), checkpoint].map(|f| fs::read(f.join("model.safetensors")).expect("weights"));
    assert!(before == after);
    // The checkpoint of step 3 contains the count: a resumed run skips no more.
    match train(&broken, &Walk::default(), &options(&place, Start::Resume)) {
        Err(Error::NonFinite { diagnosis, .. }) => assert_eq!(diagnosis.step, 4),
        other => panic!("expected a run that stops, found {other:?}"),
    }
}

/// [`Walk`] with a token that occurs only in batch 1.
#[derive(Debug)]
struct Poisoned;

const POISON: u32 = 5;

impl Source for Poisoned {
    fn vocabulary(&self) -> usize {
        common::VOCABULARY
    }

    fn fingerprint(&self) -> String {
        "poisoned".into()
    }

    fn train(&self, seed: u64, index: u64, rows: usize, time: usize, out: &mut Rows) -> termwise_data::Result<()> {
        Walk::default().train(seed, index, rows, time, out)?;
        let other = |id: &mut u32| *id = if *id == POISON { POISON + 1 } else { *id };
        if index == 1 {
            out.ids[0] = POISON
        } else {
            out.ids.iter_mut().for_each(other)
        }
        Ok(())
    }

    fn held_out(&self, _: u64, _: usize, _: usize, _: &mut Rows) -> termwise_data::Result<bool> {
        Ok(false)
    }
}

/// Settings of a run that starts from a model whose loss is infinite or NaN for rows with [`POISON`], and finite for all others.
fn overflows_on_poison(folder: &Path, more: &str) -> Settings {
    let start = folder.join("start");
    fs::create_dir_all(&start).expect("a folder");
    let small = format!("attention = \"softmax\"\nsteps = 4\nlr = 0.0\n{more}");
    let mut model = Model::fresh(settings(&small).config(common::VOCABULARY).expect("a configuration"), 1).expect("a model");
    // Component 0 is nonzero only for that token, also after the attention of layer 0, and the MLP after it overflows.
    let mut change = |name: &str, change: &dyn Fn(usize, &mut [f32])| {
        let values = model.params.get_mut(name).expect("a parameter");
        values.chunks_mut(24).enumerate().for_each(|(row, values)| change(row, values));
    };
    change("model.embed_tokens.weight", &|row, values| values[0] = if row == POISON as usize { 1.0 } else { 0.0 });
    change("model.layers.0.self_attn.o_proj.weight", &|row, values| {
        if row == 0 {
            values.fill(0.0)
        }
    });
    for name in ["gate_proj", "up_proj"] {
        change(&format!("model.layers.0.mlp.{name}.weight"), &|_, values| values[0] = 5e18);
    }
    model.write(&start, &WriteOptions::default()).expect("a model");
    settings(&format!("{small}\nfrom = '{}'", start.display()))
}

/// [`Poisoned`], with held-out data that contain the token in the second evaluation.
#[derive(Debug, Default)]
struct SecondEvaluation(AtomicUsize);

impl Source for SecondEvaluation {
    fn vocabulary(&self) -> usize {
        common::VOCABULARY
    }

    fn fingerprint(&self) -> String {
        "second evaluation".into()
    }

    fn train(&self, seed: u64, _: u64, rows: usize, time: usize, out: &mut Rows) -> termwise_data::Result<()> {
        Poisoned.train(seed, 0, rows, time, out)
    }

    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> termwise_data::Result<bool> {
        let earlier = if index == 0 { self.0.fetch_add(1, Ordering::SeqCst) } else { 0 };
        Poisoned.train(9, if earlier == 1 { 1 } else { 0 }, rows, time, out)?;
        Ok(index < 1)
    }
}

#[test]
fn a_nan_or_infinite_evaluation_is_recorded_and_replaces_the_previous_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("run");
    let settings = overflows_on_poison(folder.path(), "eval_every = 2");
    let outcome = train(&settings, &SecondEvaluation::default(), &options(&place, Start::Fresh)).expect("a run");
    assert!(outcome.finished && outcome.diverged && outcome.held_out.is_none(), "{outcome:?}");
    assert_eq!(outcome.best.map(|best| best.step), Some(2));
    let losses: Vec<(u64, bool)> = timeless(&place)
        .into_iter()
        .filter_map(|line| if let Line::HeldOut { step, evaluation, .. } = line { Some((step, evaluation.is_some())) } else { None })
        .collect();
    assert_eq!(losses, [(2, true), (4, false)]);
    let text = fs::read_to_string(place.join("metrics.jsonl")).expect("metrics");
    assert!(text.trim_end().ends_with(r#""loss":null,"finite":false}"#), "{text}");
    assert_eq!(Runs::list(&[place]).expect("a run").runs[0].status, Status::Diverged);
}

#[test]
fn a_skipped_step_has_no_gradient_norm_in_the_metrics() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("run");
    let settings = overflows_on_poison(folder.path(), "skip_nonfinite = 1\nlog_every = 2");
    let outcome = train(&settings, &Poisoned, &options(&place, Start::Fresh)).expect("a run");
    assert_eq!((outcome.step, outcome.skipped), (4, 1));
    let lines = timeless(&place);
    let norms: Vec<Option<f64>> = lines.iter().map(|line| if let Line::Train(train) = line { train.grad_norm } else { None }).collect();
    assert!(matches!(norms[..], [None, Some(norm)] if norm > 0.0), "{lines:?}");
    let text = fs::read_to_string(place.join("metrics.jsonl")).expect("metrics");
    assert!(!text.lines().next().expect("a line").contains("grad_norm") && text.lines().count() == 2, "{text}");
    // The same in the TensorBoard file: four tags, one of them with a single point.
    let events = fs::read_dir(&place).expect("a list").map(|entry| entry.expect("an entry").path());
    let events =
        fs::read(events.into_iter().find(|path| path.display().to_string().contains("tfevents")).expect("events")).expect("events");
    let count = |tag: &str| events.windows(tag.len()).filter(|window| *window == tag.as_bytes()).count();
    assert_eq!(["loss/train", "learning_rate", "tokens_per_second", "gradient_norm"].map(count), [2, 2, 2, 1]);
}

#[test]
fn skip_nonfinite_does_not_change_a_finite_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let [a, b] = [0, 5].map(|skip| {
        let place = folder.path().join(skip.to_string());
        let outcome = run(&settings(&format!("steps = 4\nskip_nonfinite = {skip}")), &place, Start::Fresh);
        (weights(&outcome), timeless(&place))
    });
    assert!(a == b);
}
