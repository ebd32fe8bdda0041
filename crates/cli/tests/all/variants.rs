//! Help, versions, `termwise variants` and errors in variant strings.

use std::process::{Command, Stdio};

use predicates::prelude::*;
use predicates::str::contains;

use crate::support::{json, termwise};

#[test]
fn every_command_has_help_with_examples() {
    for command in [&["variants"][..], &["verify"], &["bench", "attention"], &["bench", "gemm"], &["bench", "step"], &["report"], &["runs"]]
    {
        for arguments in [[command, &["--help"]].concat(), [&["help"], command].concat()] {
            termwise(&arguments).assert().success().stdout(contains("Examples:").and(contains("Usage: termwise")));
        }
    }
    let help = termwise(&["--help"]).env("COLUMNS", "80").assert().success().get_output().stdout.clone();
    let help = String::from_utf8(help).expect("text");
    let place = |words: &str| help.find(words).unwrap_or_else(|| panic!("no {words} in {help}"));
    assert!(place("Learn ") < place("  variants ") && place("Train ") < place("  runs ") && place("  runs ") < place("Inspect "));
    termwise(&["bench", "--help"]).assert().success().stdout(contains("attention").and(contains("gemm")).and(contains("step")));
    termwise(&["--version"]).assert().success().stdout(contains(env!("CARGO_PKG_VERSION")));
}

#[test]
fn every_preset_and_part_is_listed() {
    let all = json(&["variants", "--json"]);
    let presets = all["presets"].as_array().expect("presets");
    let names: Vec<&str> = presets.iter().map(|preset| preset["name"].as_str().expect("a name")).collect();
    let expected: Vec<&str> = termwise_attention::variant::presets::all().iter().map(|preset| preset.name).collect();
    assert_eq!(names, expected);
    for preset in presets {
        for key in ["expression", "formula", "canonical", "class", "equal_to", "added", "added_count", "state", "warnings", "note"] {
            assert!(preset.get(key).is_some(), "{}: no {key}", preset["name"]);
        }
    }
    let parts: usize = all["slots"].as_array().expect("slots").iter().map(|slot| slot["parts"].as_array().map_or(0, Vec::len)).sum();
    let known = termwise_attention::variant::string::KEYS.iter().map(|key| key.parts.len()).sum::<usize>();
    assert_eq!(parts, known + termwise_attention::Kernel::PARTS.len());

    let brief = termwise(&["variants"]).env("COLUMNS", "100").assert().success();
    let brief = String::from_utf8_lossy(&brief.get_output().stdout).into_owned();
    let words: Vec<&str> = brief.split([' ', ',', '\n']).collect();
    assert!(expected.iter().all(|name| words.contains(name)), "{brief}");
    let text = termwise(&["variants", "--details"]).assert().success();
    let text = String::from_utf8_lossy(&text.get_output().stdout).into_owned();
    for name in expected {
        let listed = |line: &str| line.trim_start() == name || line.trim_start().starts_with(&format!("{name} "));
        assert!(text.lines().any(listed), "`{name}` is not listed");
    }
    for word in ["taylor=ORDERS", "over=sum[,floor=X]", "norm=scaled_l2", "decay=softplus"] {
        assert!(text.contains(word), "{word}");
    }
}

#[test]
fn variants_are_described_and_compared() {
    let found = json(&["variants", "--json", "taylor=0..2", "exp over=sum norm=l2"]);
    assert_eq!(found["variants"][0]["state"]["floats"], 139_425);
    assert_eq!(found["variants"][0]["state"]["break_even_tokens"], 1_089);
    let equal = found["variants"][1]["equal_to"].as_array().expect("a list");
    assert!(equal.iter().any(|equal| equal["name"] == "norm" && equal["relation"] == "up_to_eps"));
    termwise(&["variants", "taylor=0..3", "--head-dim", "16"])
        .assert()
        .success()
        .stdout(contains("16,473 floats").and(contains("515 tokens")).and(contains("warning")));
}

#[test]
fn two_variants_are_equal_or_not() {
    let printed = |a: &str, b: &str| {
        let output = termwise(&["variants", a, b]).env("COLUMNS", "160").assert().success().get_output().stdout.clone();
        String::from_utf8(output).expect("text")
    };
    assert!(printed("softmax", "exp over=sum").contains("are equal: identical variants"));
    assert!(printed("exp over=sum norm=l2", "norm").contains("are equal: equal up to eps"));
    assert!(printed("softmax", "norm").contains("are not equal"));
}

/// A variant string next to the name of a preset is that preset.
#[test]
fn names_in_the_readme_are_those_of_presets() {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md")).expect("the README");
    let mut count = 0;
    for line in readme.lines().filter(|line| line.starts_with("| `") && line.contains("`, or `")) {
        let texts: Vec<&str> = line.split('`').skip(1).step_by(2).take(2).collect();
        let parsed: Vec<termwise_attention::Variant> = texts.iter().map(|text| text.parse().expect("a variant")).collect();
        assert_eq!(parsed[0], parsed[1], "{line}");
        count += 1;
    }
    assert!(count >= 3, "{count} rows");
}

#[test]
fn mistakes_give_one_message_and_code_2() {
    termwise(&["variants", "taylor=0..2 softmax"])
        .assert()
        .code(2)
        .stderr(contains("`taylor=0..2` contradicts the preset `softmax`").and(contains("`taylor=0..2 over=sum`")));
    termwise(&["variants", "exp out sofmax"])
        .assert()
        .code(2)
        .stdout("")
        .stderr("error: `sofmax` is not a part, key or preset\n  exp out sofmax\n          ^^^^^^ did you mean `softmax`?\n");
    termwise(&["bench", "attention", "--variants", "softmax,nrom"]).assert().code(2).stderr(contains("did you mean `norm`?"));
    termwise(&["bench", "attention", "--shapes", "8x4"]).assert().code(2).stderr(contains("`8x4` is not a shape"));
    termwise(&["bench", "step", "--hidden", "30", "--heads", "4"]).assert().code(2).stderr(contains("cannot be shared by 4 heads"));
    termwise(&["bench", "step", "--attention", "exp over=sun"]).assert().code(2).stderr(contains("did you mean `over=sum`?"));
    termwise(&["variants", "--heads", "4", "--kv-heads", "3"]).assert().code(2).stderr(contains("multiple"));
    termwise(&["variant"]).assert().code(2).stderr(contains("variants"));
    termwise(&["--threads", "0", "variants"]).assert().code(2);
    termwise(&["verify", "--only", "fusde"]).assert().code(2).stderr(contains("fused"));
}

#[test]
fn a_closed_pipe_causes_no_panic() {
    for arguments in [&["variants"][..], &["variants", "--json"], &["verify", "--only", "differences"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_termwise"))
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("the program ends");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
        assert!(output.status.success(), "{arguments:?}: {}", output.status);
    }
}

#[test]
fn a_variant_is_exported_as_a_module() {
    let exported = termwise(&["export", "torch", "taylor=0..2 out", "--out", "-"]).assert().success().get_output().stdout.clone();
    let exported = String::from_utf8(exported).expect("text");
    assert!(exported.contains("class Attention(nn.Module):") && exported.contains("termwise export torch \"taylor=0..2 over=sum out\""));
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("attention.py");
    let arguments = ["export", "torch", "taylor=0..2 out", "--out", file.to_str().expect("a plain path")];
    termwise(&arguments).assert().success().stdout("").stderr(contains("written: "));
    assert_eq!(std::fs::read_to_string(&file).expect("a file"), exported);
    // Without --out, a file of this name in the current folder is not replaced.
    let mut again = termwise(&arguments[..3]);
    again.current_dir(folder.path()).assert().code(2).stderr(contains("attention.py exists"));
    std::fs::remove_file(&file).expect("removed");
    termwise(&arguments[..3]).current_dir(folder.path()).assert().success().stdout("");
    assert_eq!(std::fs::read_to_string(&file).expect("a file"), exported);
    termwise(&["export", "torch", "sofmax"]).assert().code(2).stdout("").stderr(contains("softmax"));
    termwise(&["export", "torch"]).assert().code(2);
}
