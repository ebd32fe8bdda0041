//! `termwise eval`: a run's own data, other data, and what is refused.

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

#[test]
fn what_cannot_be_evaluated_is_said() {
    let place = Place::new();
    place.train(&["--name", "a", "--quiet"]).assert().success();
    let model = "runs/a/checkpoints/step-00000006";
    for (arguments, code, said) in [
        (&["eval", "absent", "--data", "text.txt"][..], 2, "absent"),
        (&["eval", model, "--stride", "17"], 2, "`stride` is 17"),
        (&["eval", model, "--order", "18446744073709551615"], 2, "150"),
        (&["eval", model, "--order", "300000000"], 2, "150"),
        (&["eval", model, "--batch", "65536", "--length", "1048576"], 1, "need at least"),
        (&["eval", model, "--attention", "{\"0\": \"softmax\"}"], 2, "one attention for all heads"),
        (&["eval", model, "--data", "absent.txt"], 1, "no such file"),
    ] {
        place.command(arguments).assert().code(code).stderr(contains(said));
    }
}
