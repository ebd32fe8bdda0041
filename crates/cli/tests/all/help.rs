//! Help of every command, and closed pipes.

use std::process::{Command, Stdio};

use predicates::prelude::*;
use predicates::str::contains;

use crate::support::{Place, termwise};

/// The subcommands that the help of a command lists.
fn listed(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| !line.starts_with("Usage:")).skip(1).take_while(|line| *line != "Options:");
    let names = lines.filter_map(|line| line.strip_prefix("  ")).filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()));
    names.filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).filter(|name| name != "help").collect()
}

/// The commands listed in the help of the program: one per line after the column of groups.
fn commands(help: &str) -> Vec<String> {
    let lines = help.lines().skip(3).take_while(|line| !line.starts_with("Options:"));
    lines.filter_map(|line| line.get(9..)?.split_whitespace().next().map(str::to_owned)).collect()
}

fn help(arguments: &[&str], columns: &str) -> String {
    let output = termwise(arguments).env("COLUMNS", columns).assert().success().get_output().stdout.clone();
    String::from_utf8(output).expect("text")
}

#[test]
fn help_of_the_program_fits_on_one_screen() {
    let text = help(&["--help"], "80");
    assert!(text.lines().count() <= 24, "{} lines:\n{text}", text.lines().count());
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(commands(&text).len() <= 20, "{text}");
    let all = help(&["--help-all"], "80");
    assert!(all.contains("Exit codes:") && all.contains("Examples:") && all.contains("--threads"), "{all}");
}

#[test]
fn help_of_train_lists_common_settings_with_defaults_and_help_all_lists_every_setting() {
    let flags = |text: &str| text.lines().filter(|line| line.trim_start().starts_with("--") || line.trim_start().starts_with("-q")).count();
    let (short, all) = (help(&["train", "--help"], "100"), help(&["train", "--help-all"], "100"));
    assert!((20..=32).contains(&flags(&short)), "{} flags:\n{short}", flags(&short));
    assert!(flags(&all) > 55, "{} flags", flags(&all));
    for text in ["[default: 1000; 800 without --data]", "[default: 16]", "--help-all"] {
        assert!(short.contains(text), "{text}:\n{short}");
    }
    assert!(!short.contains("--beta1") && all.contains("AdamW beta1") && all.contains("--final-lr-ratio"), "{all}");
    // Data settings of commands that read a model.
    assert!(!help(&["eval", "--help"], "100").contains("--split-seed") && help(&["eval", "--help-all"], "100").contains("--split-seed"));
}

#[test]
fn kv_commands_have_at_most_15_flags() {
    let own = |line: &&str| {
        let line = line.trim_start();
        let global = ["--threads", "--color", "--help-all"].iter().any(|flag| line.starts_with(flag));
        (line.starts_with("--") || line.starts_with("-q")) && !global
    };
    for command in ["convert", "frontier", "audit", "atlas"] {
        let text = help(&["kv", command, "--help"], "100");
        let flags = text.lines().take_while(|line| *line != "Examples:").filter(own).count();
        assert!((8..=15).contains(&flags), "{command}: {flags} flags:\n{text}");
    }
}

#[test]
fn earlier_names_of_commands_and_flags_are_accepted() {
    for command in
        [&["play"][..], &["config"], &["show"], &["cut"], &["convert"], &["frontier"], &["audit"], &["atlas"], &["separation"], &["man"]]
    {
        termwise(&[command, &["--help"]].concat()).assert().success().stdout(contains("Usage: termwise"));
        assert!(!commands(&help(&["--help"], "80")).contains(&command[0].to_owned()), "{command:?} is listed");
    }
    let printed = |flags: &[&str]| help(&[&["train", "--print-config"], flags].concat(), "80");
    assert_eq!(printed(&["--final-lr", "0.5"]), printed(&["--final-lr-ratio", "0.5"]));
    assert_ne!(printed(&["--final-lr", "0.5"]), printed(&[]));
    assert_eq!(printed(&["--language", "facts=3"]), printed(&["--builtin-options", "facts=3"]));
    assert_eq!(printed(&[]), help(&["config"], "80"));
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("settings.toml").display().to_string();
    std::fs::write(&file, "final_lr_ratio = 0.5\n").expect("written");
    assert_eq!(printed(&["--config", &file]), printed(&["--final-lr", "0.5"]));
    std::fs::write(&file, "final_lr_ratio = 0.5\nfinal_lr = 0.1\n").expect("written");
    termwise(&["train", "--config", &file]).assert().code(2).stderr(contains("set twice"));
}

#[test]
fn every_command_has_help_with_its_flags_and_examples() {
    let help = |path: &[String]| {
        let arguments: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
        let text = help(&arguments, "100");
        text.lines().for_each(|line| assert!(line.chars().count() <= 100, "{path:?}: {line}"));
        text
    };
    let mut waiting: Vec<Vec<String>> = commands(&help(&[])).into_iter().map(|name| vec![name]).collect();
    assert_eq!(waiting.len(), 20, "{waiting:?}");
    let mut leaves = 0;
    while let Some(path) = waiting.pop() {
        let text = help(&path);
        let below = listed(&text);
        assert!(text.contains(&format!("Usage: termwise {}", path.join(" "))), "{path:?}:\n{text}");
        if below.is_empty() {
            assert!(text.contains("Examples:\n"), "{path:?} has no examples");
            leaves += 1;
        }
        waiting.extend(below.into_iter().map(|name| [&path[..], &[name]].concat()));
    }
    assert!(leaves >= 22, "{leaves} commands");
}

#[test]
fn misspelled_names_get_suggestions() {
    termwise(&["trian"]).assert().code(2).stderr(contains("train"));
    termwise(&["train", "--stepps", "3"]).assert().code(2).stderr(contains("--steps"));
    for command in ["generate", "eval"] {
        termwise(&[command, "--order", "-1"])
            .assert()
            .code(2)
            .stderr(contains("'-1'").and(contains("from 0 to 150")).and(contains("-- -1").not()));
    }
    termwise(&["train", "--attention", "{\"default\": \"nrom\"}"])
        .assert()
        .code(2)
        .stderr(contains("did you mean `norm`?").and(contains("attention_variant").not()));
    termwise(&[]).assert().code(2).stderr(contains("Usage"));
    termwise(&["--version"]).assert().success().stdout(contains("termwise"));
    for count in ["18446744073709551615", "4294967296"] {
        termwise(&["verify", "--cases", count]).assert().code(2).stderr(contains("1048576"));
    }
}

#[test]
fn control_characters_in_arguments_are_escaped() {
    for arguments in [&["train", "--attention", "soft\u{1b}]0;pwned\u{7}max"][..], &["generate", "no\u{1b}[2Jmodel", "--prompt", "x"]] {
        let output = termwise(arguments).assert().failure().get_output().clone();
        let said = [output.stderr, output.stdout].concat();
        assert!(!said.contains(&0x1b) && !said.contains(&7), "{}", String::from_utf8_lossy(&said));
        assert!(String::from_utf8_lossy(&said).contains("\\u{1b}"));
    }
    let long = "x".repeat(100_000);
    let output = termwise(&["variants", &long]).assert().failure().get_output().clone();
    assert!(output.stderr.len() < 5000, "{} bytes", output.stderr.len());
    let output = termwise(&["train", "--attention", &long]).assert().failure().get_output().clone();
    assert!(output.stderr.len() < 5000, "{} bytes", output.stderr.len());
}

/// Runs with a standard output that is closed.
fn unread(place: &Place, arguments: &[&str]) -> (Option<i32>, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_termwise"))
        .args(["--threads", "1"])
        .args(arguments)
        .current_dir(place.path(""))
        .env("XDG_CACHE_HOME", place.path("cache"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("an end");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn every_command_ends_quietly_if_the_pipe_is_closed() {
    let place = Place::new();
    place.train(&["--name", "a", "--quiet"]).assert().success();
    let base = place.settings("steps = 1");
    std::fs::write(place.path("s.toml"), format!("[base]\n{base}\n[axes]\nseed = [1]\n")).expect("a file");
    let model = "runs/a/checkpoints/step-00000006";
    for arguments in [
        &["train", "--help"][..],
        &["train", "--resume", "runs/a", "--quiet"],
        &["train", "--resume", "runs/a", "--quiet", "--json"],
        &["eval", model],
        &["eval", model, "--json"],
        &["sweep", "s.toml", "--list"],
        &["sweep", "s.toml", "--out", "o"],
        &["sweep", "s.toml", "--out", "o", "--json"],
        &["data", "prepare", "text.txt"],
        &["data", "show", "text.txt", "--length", "16"],
        &["tokenizer", "encode", "bytes", "text"],
        &["tokenizer", "decode", "bytes", "70"],
        &["tokenizer", "train", "text.txt", "--vocab", "270"],
        &["generate", model, "--prompt", "Tom", "--max-tokens", "200", "--quiet"],
        &["spectrum", model, "--out", "spectrum"],
        &["truncate", model, "--orders", "2", "--no-map", "--no-plan", "--length", "8", "--batch", "2"],
        &["variants"],
        &["plan", model],
        &["verify", "--cases", "0", "--only", "decoder"],
        &["separation", "--help"],
    ] {
        let (code, said) = unread(&place, arguments);
        assert!(code == Some(0) && !said.contains("panicked") && !said.contains("Broken pipe"), "{arguments:?}: {code:?} {said}");
    }
}
