//! Losses and gradients that are not finite: no update, a diagnosis, and a step that can be repeated.

mod common;

use std::fs;
use std::path::Path;

use common::{Walk, options, run, settings, timeless, weights};
use termwise_llama::Model;
use termwise_llama::weights::WriteOptions;
use termwise_train::nonfinite::{Diagnosis, Origin, replay};
use termwise_train::{Error, Settings, Start, train};

fn stopped(settings: &Settings, folder: &Path) -> (Diagnosis, std::path::PathBuf) {
    match train(settings, &Walk::default(), &options(folder, Start::Fresh)) {
        Err(Error::NonFinite { diagnosis, folder }) => (*diagnosis, folder.expect("a saved step")),
        other => panic!("expected a run that stops, found {other:?}"),
    }
}

/// Settings of a run that starts from a fresh model with one parameter multiplied.
fn with_factor(folder: &Path, name: &str, factor: f32, more: &str) -> Settings {
    let config = settings(more).config(common::VOCABULARY).expect("a configuration");
    let mut model = Model::fresh(config, 1).expect("a model");
    model.params.get_mut(name).expect("a parameter").iter_mut().for_each(|x| *x *= factor);
    let place = folder.join("start");
    fs::create_dir_all(&place).expect("a folder");
    model.write(&place, &WriteOptions::default()).expect("a model");
    settings(&format!("{more}\nfrom = '{}'", place.display()))
}

#[test]
fn a_loss_that_is_not_finite_stops_before_the_update_and_can_be_repeated() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = with_factor(folder.path(), "model.layers.1.mlp.up_proj.weight", 1e38, "");
    let run = folder.path().join("run");
    let (diagnosis, saved) = stopped(&settings, &run);
    assert_eq!(diagnosis.step, 1);
    assert_eq!(diagnosis.forward, Some(Origin::Mlp(1)), "{diagnosis}");
    assert!(diagnosis.weight.is_none() && diagnosis.gradient.is_some());
    assert_eq!(saved, run.join("nonfinite-step-1"));
    let [before, after] = [folder.path().join("start"), saved.clone()].map(|f| fs::read(f.join("model.safetensors")).expect("weights"));
    assert!(before == after, "the weights are those before the update");
    let again = replay(&saved).expect("a replay");
    assert!(again.same(), "{again:?}");
    assert!(fs::read_to_string(run.join("warnings.log")).expect("warnings").contains("the MLP of layer 1"));
}

#[test]
fn the_layer_is_found_in_attention_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = with_factor(folder.path(), "model.layers.0.self_attn.v_proj.weight", 1e38, "attention = \"softmax\"");
    let (diagnosis, _) = stopped(&settings, &folder.path().join("run"));
    assert_eq!(diagnosis.forward, Some(Origin::Attention(0)), "{diagnosis}");
    let settings = with_factor(folder.path(), "lm_head.weight", 3e38, "attention = \"softmax\"");
    let (diagnosis, _) = stopped(&settings, &folder.path().join("second"));
    assert_eq!(diagnosis.forward, Some(Origin::Ends), "{diagnosis}");
}

#[test]
fn a_gradient_that_is_not_finite_is_named_with_layer_and_head() {
    let folder = tempfile::tempdir().expect("a folder");
    // The loss stays finite since the norm before the head takes the size away, but gradients of the first layers overflow.
    let settings = with_factor(folder.path(), "model.embed_tokens.weight", 1e-30, "attention = \"softmax\"\nnorm_eps = 0");
    let (diagnosis, saved) = stopped(&settings, &folder.path().join("run"));
    assert!(diagnosis.forward.is_none() && diagnosis.loss.parse::<f64>().is_ok_and(f64::is_finite), "{diagnosis}");
    assert!(replay(saved).expect("a replay").same());
}

#[test]
fn skipped_updates_are_counted_and_change_nothing_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let broken = with_factor(folder.path(), "model.layers.1.mlp.up_proj.weight", 1e38, "skip_nonfinite = 3");
    let place = folder.path().join("run");
    let (diagnosis, saved) = stopped(&broken, &place);
    assert_eq!(diagnosis.step, 4, "three steps are skipped, the fourth is not");
    let [before, after] = [folder.path().join("start"), saved].map(|f| fs::read(f.join("model.safetensors")).expect("weights"));
    assert!(before == after);
    // The checkpoint of step 3 carries the count: a resumed run skips no more.
    match train(&broken, &Walk::default(), &options(&place, Start::Resume)) {
        Err(Error::NonFinite { diagnosis, .. }) => assert_eq!(diagnosis.step, 4),
        other => panic!("expected a run that stops, found {other:?}"),
    }
}

#[test]
fn a_run_without_trouble_is_the_same_whether_skipping_is_allowed_or_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let [a, b] = [0, 5].map(|skip| {
        let place = folder.path().join(skip.to_string());
        let outcome = run(&settings(&format!("steps = 4\nskip_nonfinite = {skip}")), &place, Start::Fresh);
        (weights(&outcome), timeless(&place))
    });
    assert!(a == b);
}
