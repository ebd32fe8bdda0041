//! Every command prints its answer in at most 25 lines.

use crate::support::{Place, termwise};

/// Lines that a command prints at most.
const MAX_LINES: usize = 25;

fn lines(output: &[u8]) -> (usize, String) {
    let text = String::from_utf8_lossy(output).into_owned();
    (text.lines().count(), text)
}

/// Commands that print a file or a text of any length, or that do not end.
const OTHERS: [&str; 5] = ["completions", "demo", "serve", "tokenizer decode", "tokenizer encode"];

/// All commands without subcommands, such as `kv audit`.
fn leaves(prefix: &str) -> Vec<String> {
    let words: Vec<&str> = prefix.split_whitespace().chain(["--help"]).collect();
    let help = lines(&termwise(&words).assert().success().get_output().stdout).1;
    let listed = |line: &str| line.starts_with("  ") && !line.starts_with("   ");
    let names: Vec<&str> = match prefix {
        "" => help
            .lines()
            .skip(3)
            .filter_map(|line| line.get(9..)?.split_whitespace().next())
            .take_while(|name| !name.starts_with('-'))
            .collect(),
        _ => {
            let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| listed(line));
            commands.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").collect()
        }
    };
    match names.is_empty() {
        true => vec![prefix.to_owned()],
        false => names.into_iter().flat_map(|name| leaves(format!("{prefix} {name}").trim())).collect(),
    }
}

#[test]
fn every_command_prints_at_most_25_lines() {
    let place = Place::new();
    place.train(&["--name", "a", "--quiet"]).assert().success();
    std::fs::write(place.path("s.toml"), format!("[base]\n{}\n[axes]\nseed = [1, 2]\n", place.settings("steps = 1"))).expect("a file");
    let model = "runs/a";
    let kv = ["--data", "text.txt", "--calibration-length", "16", "--calibration-contexts", "2", "--length", "16"];
    let convert = [&["kv", "convert", model, "--keys", "8", "--contexts", "1", "--save", "small"], &kv[..]].concat();
    let frontier = [&["kv", "frontier", model, "--keys", "8", "--contexts", "2", "--methods", "window,chosen"], &kv[..]].concat();
    let atlas = [&["kv", "atlas", model], &kv[..]].concat();
    let cases: [&[&str]; 29] = [
        &["variants"],
        &["variants", "softmax", "taylor=0..4 norm=l2"],
        &["plan", "tiny", "--hardware", "a100"],
        &["plan", "paper-small", "--hardware", "all", "--memory", "2GiB"],
        &["verify", "--cases", "0", "--only", "decoder"],
        &["runs"],
        &["eval", model],
        &["eval", model, "--slices"],
        &["spectrum", model],
        &["truncate", model, "--orders", "2,4,6,8,10,12,16", "--length", "8", "--batch", "2"],
        &["data", "prepare", "text.txt"],
        &["data", "show", "text.txt", "--length", "100"],
        &["train", "--resume", "a", "--quiet"],
        &["separation", "--n", "100,1000,10000", "--a1", "0.7,1,3", "--network", "taylor=2..12", "--draws", "50"],
        &["tokenizer", "train", "text.txt", "--vocab", "270", "--out", "tokenizer.json"],
        &["generate", model, "--prompt", "Tom", "--max-tokens", "5"],
        &["report", "runs"],
        &["sweep", "s.toml", "--list"],
        &["sweep", "s.toml"],
        &["reproduce", "e1", "--scale", "test", "--seeds", "1"],
        &["export", "torch", "gated_deltanet"],
        &["bench", "attention", "--shapes", "1x1x4,1x1x8,1x1x9", "--head-dim", "2", "--repeat", "1"],
        &["bench", "chunk", "--case", "taylor=0..2@4", "--shortest", "128", "--longest", "256", "--repeat", "1"],
        &["bench", "decode", "--case", "taylor=0..2@4", "--repeat", "1", "--positions", "100", "--cache-positions", "100"],
        &["bench", "gemm", "--repeat", "1", "--shapes", "8x8x8,8x8x16,8x16x8,16x8x8,16x16x8"],
        &[
            "bench", "step", "--vocab", "9", "--hidden", "8", "--heads", "2", "--layers", "1", "--mlp", "8", "--length", "8", "--repeat",
            "1",
        ],
        &convert,
        &frontier,
        &atlas,
    ];
    let audit = [
        "kv",
        "audit",
        "small",
        "--against",
        model,
        "--data",
        "text.txt",
        "--length",
        "16",
        "--contexts",
        "1",
        "--facts",
        "1",
        "--tokens",
        "4",
    ];
    let tried: Vec<String> = cases.into_iter().chain([&audit[..]]).map(|arguments| arguments.join(" ")).collect();
    let missing: Vec<String> = leaves("")
        .into_iter()
        .filter(|name| !OTHERS.contains(&name.as_str()) && !tried.iter().any(|tried| tried.starts_with(name)))
        .collect();
    assert!(missing.is_empty() && leaves("").len() >= 27, "not tried: {missing:?}");
    for arguments in cases.into_iter().chain([&audit[..]]) {
        let output = place.command(arguments).env("COLUMNS", "100").output().expect("it runs");
        let (count, text) = lines(&output.stdout);
        // A failed check of an audit is a result.
        assert!(output.status.success() || arguments[1] == "audit", "{arguments:?}: {}", lines(&output.stderr).1);
        assert!(count <= MAX_LINES, "{arguments:?} printed {count} lines:\n{text}");
        if let Some((left_out, _)) = text.lines().last().and_then(|line| line.strip_prefix('(')?.split_once(" more lines: --details)")) {
            // Not cut between a heading and its table. A collapsed section has one line.
            let rule = |line: &str| !line.is_empty() && line.chars().all(|c| c == '─');
            assert!(!text.lines().rev().take(4).any(rule) || text.contains('▸'), "{arguments:?}:\n{text}");
            let whole = place.command(&[arguments, &["--details"]].concat()).env("COLUMNS", "100").output().expect("it runs");
            let all = lines(&whole.stdout).0;
            // Times change the number of lines of a second run.
            let is_more = left_out.parse::<usize>().is_ok_and(|left_out| left_out > 0) && all > count - 1;
            assert!(is_more, "{arguments:?}: {all} lines in all\n{text}");
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
