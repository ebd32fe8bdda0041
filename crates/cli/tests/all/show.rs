//! Rendering of saved results at the width of the terminal, and completions and man pages.

use std::fs;

use predicates::prelude::*;
use predicates::str::contains;

use crate::support::termwise;

/// Commands with reproducible results.
const RESULTS: [&[&str]; 5] = [
    &["variants"],
    &["variants", "taylor=0..3", "exp over=sum norm=l2"],
    &["plan", "paper-small", "--hardware", "a100", "--hardware", "rtx4090", "--memory", "2GiB"],
    &["separation", "--network", "taylor=1..3", "--n", "100,1e6", "--draws", "100"],
    &["verify", "--cases", "0", "--only", "decoder"],
];

fn printed(arguments: &[&str], columns: &str) -> String {
    let output = termwise(arguments).env("COLUMNS", columns).assert().success().get_output().stdout.clone();
    String::from_utf8(output).expect("text")
}

#[test]
fn saved_results_render_as_they_were_printed() {
    for arguments in RESULTS {
        let json = printed(&[arguments, &["--json"]].concat(), "80");
        for columns in ["80", "120"] {
            let shown = termwise(&["show", "-", "--details"]).env("COLUMNS", columns).write_stdin(json.clone()).assert().success();
            let shown = String::from_utf8_lossy(&shown.get_output().stdout).into_owned();
            // Followed by the provenance.
            let printed = printed(&[arguments, &["--details"]].concat(), columns);
            let reported = termwise(&["report", "-", "--details"]).env("COLUMNS", columns).write_stdin(json.clone()).assert().success();
            assert_eq!(String::from_utf8_lossy(&reported.get_output().stdout), shown, "{arguments:?}");
            let made_by = shown.strip_prefix(&printed).unwrap_or_else(|| panic!("{arguments:?}:\n{shown}\n{printed}"));
            let made_by = made_by.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(made_by.starts_with(concat!("Made by termwise ", env!("CARGO_PKG_VERSION"), " (")), "{made_by}");
            assert!(made_by.contains(&format!("{} ", arguments[0])) && made_by.contains("--json"), "{made_by}");
            for line in shown.lines().filter(|line| !line.starts_with("  ")) {
                let width = line.chars().count();
                assert!(width <= columns.parse().expect("a number"), "{arguments:?}, {width} of {columns}: {line}");
            }
        }
    }
}

#[test]
fn a_result_has_three_forms() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("plan").display().to_string();
    termwise(&["plan", "tiny", "--hardware", "h100", "--out", &out, "--quiet"]).assert().success().stderr("");
    let [html, markdown] = ["html", "markdown"].map(|format| printed(&["show", &out, "--format", format], "80"));
    assert!(html.starts_with("<!DOCTYPE html>") && html.contains("<svg") && !html.contains("figures/"));
    assert_eq!(markdown, fs::read_to_string(folder.path().join("plan/summary.md")).expect("a summary"));
    assert_eq!(printed(&["report", &out, "--format", "html"], "80"), html);
    let again = folder.path().join("again").display().to_string();
    termwise(&["report", &out, "--out", &again]).assert().success().stdout("");
    let read = |name: &str, file: &str| fs::read(folder.path().join(name).join(file)).expect("a file");
    for file in ["index.html", "figures/state-or-cache.svg", "tables/memory.csv"] {
        assert_eq!(read("plan", file), read("again", file), "{file}");
    }
}

#[test]
fn a_folder_is_shown_by_the_one_result_in_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let name = folder.path().display().to_string();
    let write = |file: &str, text: &str| fs::write(folder.path().join(file), text).expect("written");
    termwise(&["show", &name]).assert().code(2).stderr(contains("no result in"));
    write("metrics.jsonl", "");
    termwise(&["show", &name]).assert().code(2).stderr(contains("the folder of a run"));
    // Under any name, next to other files.
    write("settings.json", "{}");
    write("mine.json", &printed(&["plan", "tiny", "--json"], "80"));
    assert!(printed(&["show", &name], "80").contains("tiny"));
    write("other.json", &printed(&["variants", "softmax", "--json"], "80"));
    termwise(&["show", &name]).assert().code(2).stderr(contains("name one of").and(contains("mine.json")).and(contains("other.json")));
}

#[test]
fn color_follows_the_flag() {
    let colored = |arguments: &[&str]| printed(arguments, "80").contains('\u{1b}');
    assert!(!colored(&["variants"]) && !colored(&["variants", "--color", "never"]) && colored(&["variants", "--color", "always"]));
    termwise(&["variants", "--color", "sometimes"]).assert().code(2);
}

#[test]
fn invalid_result_files_are_rejected_in_one_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file.json").display().to_string();
    for (text, message) in [
        ("", "not JSON"),
        ("[1, 2]", "has no \"kind\""),
        ("{\"kind\": \"\\u001b[31mrecipe\"}", "of the kind"),
        ("{\"kind\": \"plan\"}", "version 0 of `plan`"),
        ("{\"kind\": \"plan\", \"version\": 99}", "version 99"),
        ("{\"kind\": \"plan\", \"version\": 1, \"context\": \"x\"}", "has the kind `plan` but is invalid:"),
    ] {
        fs::write(&file, text).expect("written");
        let run = termwise(&["show", &file]).assert().code(2).stdout("").stderr(contains(message).and(contains("file.json")));
        let text = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
        assert!(text.lines().count() == 1 && !text.contains('\u{1b}'), "{text:?}");
    }
    let typed = termwise(&["variants", "soft\u{1b}[31mmax", "--col\u{7}or"]).assert().code(2).get_output().stderr.clone();
    assert!(!typed.contains(&0x1b) && !typed.contains(&7), "{}", String::from_utf8_lossy(&typed));
    termwise(&["show", "absent.json"]).assert().code(2).stderr(contains("absent.json"));
}

#[test]
fn completions_and_manual_pages_contain_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        termwise(&["completions", shell]).assert().success().stdout(contains("spectrum").and(contains("train-tokens")));
    }
    termwise(&["completions", "man", "train"]).assert().success().stdout(contains(".TH").and(contains("beta1")));
    termwise(&["completions", "bash", "--out", "x"]).assert().code(2).stderr(contains("completions man"));
    termwise(&["man"]).assert().success().stdout(contains("termwise\\-spectrum").or(contains("spectrum")));
    termwise(&["man", "bench", "gemm"]).assert().success().stdout(contains(".TH").and(contains("repeat")));
    termwise(&["man", "trian"]).assert().code(2).stderr(contains("train"));
    let folder = tempfile::tempdir().expect("a folder");
    termwise(&["man", "--out", &folder.path().display().to_string()]).assert().success();
    for page in ["termwise.1", "termwise-train.1", "termwise-bench-gemm.1"] {
        assert!(folder.path().join(page).is_file(), "{page}");
    }
}

#[test]
fn a_settings_file_has_every_setting_and_reads_back() {
    let text = printed(&["config", "--learning-rate", "0.5", "--n-layer=3", "--block-size", "77", "--max-iters", "9"], "80");
    for line in ["lr = 0.5", "layers = 3", "length = 77", "steps = 9", "# Peak learning rate"] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("settings.toml");
    fs::write(&file, &text).expect("written");
    assert_eq!(printed(&["config", "--config", &file.display().to_string()], "80"), text);
    termwise(&["config", "--attention", "sofmax"]).assert().code(2).stderr(contains("softmax"));
}

#[test]
fn runs_are_listed() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("first");
    fs::create_dir(&run).expect("a folder");
    fs::write(run.join("settings.toml"), printed(&["config", "--steps", "9"], "80")).expect("written");
    let folder = folder.path().display().to_string();
    termwise(&["runs", &folder]).assert().success().stdout(contains("first").and(contains("stopped")));
    let found = crate::support::json(&["runs", &folder, "--json"]);
    assert_eq!((&found["kind"], &found["runs"][0]["steps"]), (&"runs".into(), &9.into()));
    termwise(&["runs", "absent"]).assert().code(2).stderr(contains("absent"));
}
