//! Every command prints its answer in at most 25 lines.

use crate::support::{Place, termwise};

/// Lines that a command prints at most.
const MOST: usize = 25;

fn lines(output: &[u8]) -> (usize, String) {
    let text = String::from_utf8_lossy(output).into_owned();
    (text.lines().count(), text)
}

#[test]
fn commands_print_at_most_25_lines_and_details_print_everything() {
    let place = Place::new();
    place.train(&["--name", "a", "--quiet"]).assert().success();
    let model = "runs/a";
    let cases: [&[&str]; 14] = [
        &["variants"],
        &["variants", "softmax", "taylor=0..4 norm=l2"],
        &["plan", "tiny", "--hardware", "a100"],
        &["plan", "paper-small", "--hardware", "all", "--memory", "2GiB"],
        &["verify", "--cases", "0", "--only", "decoder"],
        &["runs"],
        &["eval", model],
        &["spectrum", model],
        &["truncate", model, "--orders", "2,4,6,8,10,12,16", "--no-map", "--length", "8", "--batch", "2"],
        &["data", "prepare", "text.txt"],
        &["train", "--resume", "a", "--quiet"],
        &["separation", "--n", "100,1000,10000", "--a1", "0.7,1,3", "--network", "taylor=2..12", "--draws", "50"],
        &["tokenizer", "train", "text.txt", "--vocab", "270", "--out", "tokenizer.json"],
        &["generate", model, "--prompt", "Tom", "--max-tokens", "5"],
    ];
    for arguments in cases {
        let output = place.command(arguments).env("COLUMNS", "100").assert().success().get_output().clone();
        let (count, text) = lines(&output.stdout);
        assert!(count <= MOST, "{arguments:?} printed {count} lines:\n{text}");
        if let Some((left_out, _)) = text.lines().last().and_then(|line| line.strip_prefix('(')?.split_once(" more lines: --details)")) {
            let whole = place.command(&[arguments, &["--details"]].concat()).env("COLUMNS", "100").assert().success().get_output().clone();
            let (all, _) = lines(&whole.stdout);
            assert!(left_out.parse::<usize>().is_ok_and(|left_out| left_out > 0) && all > MOST, "{arguments:?}: {all} lines in all");
        }
    }
    // Details are needed for these, so the test would notice if they were always printed.
    assert!(lines(&termwise(&["variants", "--details"]).assert().success().get_output().stdout).0 > 100);
}

#[test]
fn training_begins_with_its_model_data_tokens_and_folder() {
    let place = Place::new();
    let output = place.train(&["--name", "a"]).assert().success().get_output().stderr.clone();
    let text = String::from_utf8_lossy(&output);
    for (line, start) in text.lines().zip(["model ", "attention ", "data ", "training ", "directory "]) {
        assert!(line.starts_with(start), "{line:?} instead of {start}:\n{text}");
    }
    assert!(text.contains("parameters") && text.contains("6 steps of 32 tokens, 192 tokens"), "{text}");
}
