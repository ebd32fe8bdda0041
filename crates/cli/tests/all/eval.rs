//! `termwise eval`: the data of a run, other data, and errors.

use predicates::prelude::*;
use predicates::str::contains;

use crate::support::Place;

#[test]
fn a_checkpoint_is_evaluated_on_its_own_and_on_other_data() {
    let place = Place::new();
    place.train(&["--name", "a", "--eval-batches", "0", "--quiet"]).assert().success();
    let model = "runs/a/checkpoints/step-00000006";
    let own = place.command(&["eval", model, "--batch", "2", "--json"]).assert().success().get_output().stdout.clone();
    let own: serde_json::Value = serde_json::from_slice(&own).expect("JSON");
    let last = place.metrics("runs/a").into_iter().rfind(|line| line["kind"] == "held_out").expect("an evaluation");
    assert_eq!((&own["loss"], &own["tokens"]), (&last["loss"], &last["tokens"]), "as in training");
    assert_eq!(own["held_out_only"].as_bool(), Some(true));

    std::fs::write(place.path("other.txt"), "Ann met Tom on the way to town. ".repeat(8)).expect("a file");
    let text = place.command(&["eval", model, "--data", "other.txt"]).assert().success().get_output().stdout.clone();
    let text = String::from_utf8(text).expect("text");
    // 8 · 32 bytes and the end of the document.
    assert!(text.contains("257 tokens of other.txt in windows of 16, stride 16"), "{text}");
    assert!(text.contains("perplexity") && text.contains("bits per byte"), "{text}");
    place.command(&["eval", model, "--data", "other.txt", "--stride", "4", "--order", "6"]).assert().success().stdout(contains("stride 4"));
    place.command(&["eval", model, "--data", "other.txt", "--attention", "norm"]).assert().success();
}

/// Every document is a separate row, and all of its tokens count.
#[test]
fn padded_layout_reads_one_document_per_row() {
    let place = Place::new();
    place.train(&["--name", "a", "--quiet"]).assert().success();
    let read = |command: &str, layout: &str, more: &[&str]| {
        let words = [command, "a", "--data", "text.txt", "--documents", "line", "--layout", layout, "--length", "64", "--json"];
        let assert = place.command(&[&words[..], more].concat()).assert().success();
        let warned = assert.stderr(contains("windows have").and(contains("trained on at most 16")));
        serde_json::from_slice::<serde_json::Value>(&warned.get_output().stdout).expect("JSON")
    };
    let text = std::fs::read_to_string(place.path("text.txt")).expect("a file");
    let (packed, padded) = (read("eval", "packed", &[]), read("eval", "padded", &[]));
    // The bytes of each line and the end of its document.
    assert_eq!((&packed["tokens"], &padded["tokens"]), (&text.len().into(), &text.len().into()));
    assert_ne!(packed["loss"], padded["loss"]);
    let longest = text.lines().map(|line| line.len() + 1).max().expect("lines");
    let (packed, padded) = (read("spectrum", "packed", &["--tokens", "9999"]), read("spectrum", "padded", &["--tokens", "9999"]));
    assert_eq!(padded["text"]["windows"], text.lines().count());
    assert_eq!(padded["text"]["length"], longest);
    assert_ne!(packed["layers"], padded["layers"]);
}

#[test]
fn invalid_evaluations_are_reported() {
    let place = Place::new();
    place.train(&["--name", "a", "--quiet"]).assert().success();
    let model = "runs/a/checkpoints/step-00000006";
    for (arguments, code, said) in [
        (&["eval", "absent", "--data", "text.txt"][..], 2, "absent"),
        (&["eval", model, "--stride", "17"], 2, "`stride` is 17"),
        (&["eval", model, "--order", "18446744073709551615"], 2, "150"),
        (&["eval", model, "--order", "300000000"], 2, "150"),
        (&["eval", model, "--batch", "65536", "--length", "1048576"], 1, "need at least"),
        (&["eval", model, "--attention", "{\"0\": \"softmax\"}"], 2, "one variant for all heads"),
        (&["eval", model, "--data", "absent.txt"], 2, "no such file"),
        (&["eval", model, "--data", "text.txt", "--layout", "padded"], 2, "single document"),
        (&["eval", "text.txt", "--data", "text.txt"], 2, "it is a file"),
    ] {
        place.command(arguments).assert().code(code).stderr(contains(said));
    }
}
