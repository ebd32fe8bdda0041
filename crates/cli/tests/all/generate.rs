//! `termwise generate`, and `termwise eval` of truncated models.

use std::path::{Path, PathBuf};

use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use termwise_model::{Config, Model};

use crate::support::{json, termwise};

/// A folder with a small model of bytes.
fn byte_model(attention: &str) -> tempfile::TempDir {
    let text = format!(
        r#"{{"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "initializer_range": 0.4, "max_position_embeddings": 64, "tie_word_embeddings": true,
            "attention_variant": "{attention}"}}"#
    );
    let model = Model::fresh(Config::from_json_str(&text, "bytes").expect("valid"), 3).expect("a model");
    let folder = tempfile::tempdir().expect("a folder");
    model.write(folder.path(), &Default::default()).expect("written");
    folder
}

fn text_of(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

fn stories() -> Option<PathBuf> {
    termwise_base::test_skip::shared("data/stories260K")
}

/// Standard output of a run that must succeed.
fn output(arguments: &[&str]) -> String {
    String::from_utf8(termwise(arguments).assert().success().get_output().stdout.clone()).expect("UTF-8")
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn stories260k_generates_its_reference_text() {
    let Some(folder) = stories() else { return };
    let story = std::fs::read_to_string(folder.join("greedy_256.txt")).expect("the story");
    let model = text_of(&folder);
    let written = output(&["generate", model, "--max-tokens", "150"]);
    assert!(story.starts_with(written.trim_end_matches('\n')) && written.len() > 300, "{written}");
    let after = output(&["generate", model, "--max-tokens", "150", "--prompt", "Once upon a time", "--echo"]);
    assert!(story.starts_with(after.trim_end_matches('\n')) && after.len() > 300, "{after}");
    // A cache larger than the state switches, and the text before stays the same.
    let switched = output(&["generate", model, "--max-tokens", "150", "--order", "2", "--switch"]);
    assert!(switched.starts_with("Once upon a time, there was a little girl"), "{switched}");
    termwise(&["generate", model, "--max-tokens", "60", "--order", "2"])
        .assert()
        .success()
        .stderr(contains("a state of constant size").and(contains("largest score")));
    let story_start = "Once upon a time, there was a little girl named Lily.";
    let stopped = output(&["generate", model, "--stop", " She", "--max-tokens", "100"]);
    assert_eq!(stopped, format!("{story_start}\n"));
}

#[test]
fn one_bad_prompt_of_forty_costs_one_text() {
    let folder = byte_model("softmax");
    let (model, file) = (text_of(folder.path()), folder.path().join("prompts.txt"));
    let mut prompts: Vec<String> = (0..40).map(|n| format!("prompt {n}")).collect();
    let arguments = ["generate", model, "--prompts", text_of(&file), "--max-tokens", "5", "--json", "--quiet"];
    std::fs::write(&file, prompts.join("\n")).expect("written");
    let mut expected = lines(&output(&arguments));
    // Longer than the context of 64 bytes.
    prompts[17] = "x".repeat(100);
    std::fs::write(&file, prompts.join("\n")).expect("written");
    let run = termwise(&arguments).assert().code(3).stderr(contains("error: prompt 18: ").and(contains("error:").count(1)));
    expected.remove(17);
    assert_eq!(lines(&String::from_utf8(run.get_output().stdout.clone()).expect("UTF-8")), expected);
    // All prompts failed, so the result is not partial.
    std::fs::write(&file, [prompts[17].as_str(); 2].join("\n")).expect("written");
    termwise(&arguments).assert().code(1).stdout("").stderr(contains("error: prompt 2: "));
    termwise(&["generate", model, "--prompt", &prompts[17]])
        .assert()
        .code(1)
        .stdout("")
        .stderr(contains("error: the KV cache of row 0 would contain"));
}

#[test]
fn batches_and_single_prompts_generate_the_same() {
    for attention in ["softmax", "taylor=0..2"] {
        let folder = byte_model(attention);
        let model = text_of(folder.path());
        let file = folder.path().join("prompts.jsonl");
        let prompts = ["a", "another prompt", "é", "of some length, longer than others", "b"];
        let content: String = prompts.iter().map(|prompt| format!("{}\n\n", serde_json::json!({"prompt": prompt, "id": 3}))).collect();
        std::fs::write(&file, content).expect("written");
        let sampling = ["--temperature", "1", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.001", "--repetition-penalty", "1.1"];
        let common = [&["--max-tokens", "20", "--json", "--quiet"][..], &sampling].concat();
        let batch = |rows: &str| {
            let arguments = ["generate", model, "--prompts", text_of(&file), "--seed", "7", "--batch", rows];
            lines(&output(&[&arguments[..], &common].concat()))
        };
        let all = batch("3");
        assert_eq!(all, batch("1"), "{attention}");
        assert_eq!(all.iter().map(|line| line["prompt"].as_str().expect("a prompt")).collect::<Vec<_>>(), prompts);
        for (n, prompt) in prompts.iter().enumerate() {
            let seed = (7 + n).to_string();
            let mut alone = lines(&output(&[&["generate", model, "--prompt", prompt, "--seed", &seed][..], &common].concat())).remove(0);
            alone["index"] = n.into();
            assert_eq!(alone, all[n], "{attention}, prompt {n}");
        }
        assert!(all.iter().all(|line| line["finish"] == "length" || line["finish"] == "end"));
        // Plain text: in order, the same as in JSON.
        let plain_file = folder.path().join("prompts.txt");
        std::fs::write(&plain_file, prompts.join("\n")).expect("written");
        let arguments = ["generate", model, "--prompts", text_of(&plain_file), "--seed", "7", "--max-tokens", "20", "--no-echo"];
        let text = output(&[&arguments[..], &sampling].concat());
        let expected: Vec<String> = all.iter().map(|line| format!("{}\n", line["text"].as_str().expect("a text"))).collect();
        assert_eq!(text, expected.join("\n"));
    }
}

#[test]
fn generation_resumes_exactly_from_a_saved_state() {
    let folder = byte_model("softmax");
    let model = text_of(folder.path());
    let state = folder.path().join("state.safetensors");
    let (state, common) =
        (text_of(&state), ["--prompt", "begin", "--temperature", "1", "--seed", "3", "--json", "--quiet", "--ignore-end"]);
    let written = |arguments: &[&str]| {
        lines(&output(&[&["generate", model][..], arguments].concat()))[0]["text"].as_str().expect("a text").to_owned()
    };
    for memory in [&[][..], &["--order", "2"], &["--order", "0", "--switch"]] {
        let whole = written(&[&common[..], &["--max-tokens", "40"], memory].concat());
        let first = written(&[&common[..], &["--max-tokens", "15", "--save-state", state], memory].concat());
        let again = ["--temperature", "1", "--seed", "3", "--json", "--quiet", "--ignore-end", "--load-state", state];
        let second = written(&[&again[..], &["--max-tokens", "25"], memory].concat());
        // A character split by the pause is a replacement character on both sides.
        let (whole, both) = (whole.replace('\u{fffd}', ""), (first + &second).replace('\u{fffd}', ""));
        assert_eq!(both, whole, "{memory:?}");
        // Prefill alone, then generation. The position of the split determines when a cache switches.
        if memory.contains(&"--switch") {
            continue;
        }
        output(&[&["generate", model], &common[..], &["--max-tokens", "0", "--save-state", state], memory].concat());
        let after = written(&[&again[..], &["--max-tokens", "40"], memory].concat());
        assert_eq!(after.replace('\u{fffd}', ""), whole, "{memory:?}");
    }
    termwise(&["generate", model, "--load-state", state, "--order", "4"])
        .assert()
        .failure()
        .stderr(contains("exp over=sum").or(contains("taylor=0 over=sum")).and(contains("taylor=0..4 over=sum")));
    let other = byte_model("taylor=0..2");
    termwise(&["generate", text_of(other.path()), "--load-state", state]).assert().failure().stderr(contains("expected `"));
}

#[test]
fn bad_input_is_one_clear_sentence() {
    let folder = byte_model("softmax");
    let model = text_of(folder.path());
    let long = "x".repeat(65);
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).expect("written");
        text_of(&path).to_owned()
    };
    let (broken, textless, empty) =
        (file("broken.jsonl", "{\"prompt\": \"a\"}\n{"), file("textless.jsonl", "{\"text\": 1}"), file("empty.txt", "\n\n"));
    let second_long = file("long.txt", &format!("short\n{long}"));
    let cases: &[(&[&str], &[&str])] = &[
        (&["--prompt", &long], &["65", "64", "--beyond-context"]),
        (&["--prompts", &broken], &["line 2", "not valid JSON"]),
        (&["--prompts", &textless], &["line 1", "prompt"]),
        (&["--prompts", &empty], &["no prompt"]),
        (&["--prompts", "/nowhere/prompts.txt"], &["cannot read the prompts"]),
        (&["--temperature", "-1"], &["temperature", "-1"]),
        (&["--top-p", "0"], &["top-p"]),
        (&["--order", "151"], &["150"]),
        (&["--order", "120"], &["lower order"]),
        (&["--mode", "chunk"], &["finite state"]),
        (&["--attention", "gated_softmax"], &["missing", "self_attn"]),
        (&["--attention", "taylor=0..2", "--order", "2"], &["exp kernel"]),
        (&["--tokenizer", "/nowhere"], &["tokenizer"]),
        (&["--load-state", "/nowhere/state"], &["/nowhere/state"]),
        (&["--save-state", "/nowhere/state", "--max-tokens", "2"], &["/nowhere/state"]),
    ];
    for (arguments, words) in cases {
        let assert = termwise(&[&["generate", model][..], arguments].concat()).assert().failure().stdout("");
        let text = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
        let error = text.lines().find(|line| line.starts_with("error: ")).unwrap_or_else(|| panic!("{arguments:?}: {text}"));
        assert!(words.iter().all(|word| error.contains(word)), "{arguments:?}: {error}");
    }
    // One of two prompts fails; the other is complete.
    let partial = termwise(&["generate", model, "--prompts", &second_long]).assert().code(3).stdout(contains("short"));
    partial.stderr(contains("error: prompt 2").and(contains("--beyond-context")).and(contains("1 prompt failed")));
    for arguments in [&["--switch"][..], &["--prompt", "a", "--prompts", "b"], &["--mode", "chunks"], &["--order", "x"]] {
        termwise(&[&["generate", model][..], arguments].concat()).assert().code(2).stderr(contains("error:"));
    }
    termwise(&["generate", "/nowhere"]).assert().failure().stderr(contains("/nowhere"));
    termwise(&["generate", model, "--prompt", &long, "--beyond-context", "--max-tokens", "3"]).assert().success();
    // A cache ends with its context; a state does not.
    let end = json(&["generate", model, "--prompt", "x", "--max-tokens", "200", "--json", "--ignore-end"]);
    assert_eq!((&end["finish"], &end["tokens"]), (&"context".into(), &64.into()));
    let state = json(&["generate", model, "--prompt", "x", "--max-tokens", "200", "--json", "--ignore-end", "--order", "2"]);
    assert_eq!((&state["finish"], &state["tokens"]), (&"length".into(), &200.into()));
}

#[test]
fn an_odd_order_causes_a_warning_and_a_named_error() {
    let folder = byte_model("softmax");
    let model = text_of(folder.path());
    let text: String = ('a'..='z').cycle().take(60).collect();
    let assert =
        termwise(&["generate", model, "--order", "1", "--prompt", &text, "--max-tokens", "2000", "--ignore-end"]).assert().failure();
    let stderr = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    for word in ["warning: `taylor=0..1 over=sum`", "odd", "the denominator of layer", "head", "position", "even order"] {
        assert!(stderr.contains(word), "no `{word}`: {stderr}");
    }
    assert!(!String::from_utf8_lossy(&assert.get_output().stdout).contains("NaN"));
}

#[test]
fn evaluation_of_truncated_models() {
    let folder = byte_model("softmax");
    let (model, data) = (text_of(folder.path()), folder.path().join("text.txt"));
    std::fs::write(&data, "some text that is read again and again. ".repeat(20)).expect("written");
    let cache = folder.path().join("cache");
    let loss = |more: &[&str]| {
        let arguments = ["eval", model, "--data", text_of(&data), "--cache", text_of(&cache), "--length", "50", "--json"];
        json(&[&arguments[..], more].concat())["loss"].as_f64().expect("a loss")
    };
    let uncut = loss(&[]);
    let [cut, same, chunked] = [&["--order", "2"][..], &["--attention", "taylor=0..2"], &["--order", "2", "--mode", "chunk=16"]].map(loss);
    assert_eq!(cut, same);
    assert!((chunked - cut).abs() < 1e-4 * cut, "{chunked} {cut}");
    assert!(cut != uncut && (loss(&["--order", "60"]) - uncut).abs() < 1e-3 * uncut.max((cut - uncut).abs()));
    let gated = ["eval", model, "--data", text_of(&data), "--cache", text_of(&cache), "--attention", "gated_softmax"];
    termwise(&gated).assert().failure().stderr(contains("missing"));
}

#[test]
fn help_has_examples() {
    termwise(&["generate", "--help"]).assert().success().stdout(contains("Examples:").and(contains("--save-state")));
}
