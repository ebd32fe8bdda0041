//! `termwise data` and `termwise tokenizer`.

use std::fs;

use predicates::prelude::*;
use predicates::str::contains;

use crate::support::Place;

#[test]
fn text_is_tokenized_once_and_printed_in_training_rows() {
    let place = Place::new();
    let prepare = ["data", "prepare", "text.txt", "--documents", "line", "--held-out", "0.2", "--json"];
    let report = place.command(&prepare).assert().success().get_output().stdout.clone();
    let report: serde_json::Value = serde_json::from_slice(&report).expect("JSON");
    assert_eq!((report["documents"].as_u64(), report["vocabulary"].as_u64()), (Some(60), Some(257)));
    assert_eq!(report["held_out_documents"].as_u64(), Some(12));
    let entries = || fs::read_dir(place.path("cache/termwise")).expect("a cache").count();
    let before = entries();
    place.command(&prepare[..7]).assert().success().stdout(contains("60 documents in 1 file,"));
    assert_eq!(entries(), before, "found again");
    let show = ["data", "show", "text.txt", "--documents", "line", "--held-out", "0.2", "--batch", "1", "--length", "40"];
    place
        .command(&show)
        .assert()
        .success()
        .stdout(contains("60 documents in 1 file").and(contains("tokens")).and(contains("batch 0, row 0")).and(contains("walked")));
    let rows = place.command(&[&show[..], &["--json"]].concat()).assert().success().get_output().stdout.clone();
    let rows: serde_json::Value = serde_json::from_slice(&rows).expect("JSON");
    assert_eq!(rows["ids"][0].as_array().map(Vec::len), Some(40));
}

#[test]
fn separators_inside_a_document_cause_a_warning() {
    let place = Place::new();
    let document = |number: usize| format!("Once there were {number} cats.\n<|endoftext|>\n");
    fs::write(place.path("stories.txt"), (0..30).map(document).collect::<String>()).expect("a file");
    // No text follows the last separator. Cached tokens have the same warning.
    for _ in 0..2 {
        let warned = place.command(&["data", "prepare", "stories.txt"]).assert().success();
        warned.stderr(contains("`<|endoftext|>` 29 times").and(contains("--documents \"separator:<|endoftext|>\"")));
    }
    let split = ["data", "prepare", "stories.txt", "--documents", "separator:<|endoftext|>"];
    place.command(&split).assert().success().stderr(contains("warning").not());
    place.command(&["data", "prepare", "stories.txt", "--quiet"]).assert().success().stderr("");
    fs::write(place.path("one.txt"), document(1)).expect("a file");
    place.command(&["data", "prepare", "one.txt"]).assert().success().stderr(contains("warning").not());
    place.train(&["--name", "a", "--data", "stories.txt"]).assert().success().stderr(contains("29 times"));
    place.command(&["eval", "a", "--data", "stories.txt"]).assert().success().stderr(contains("29 times"));
    place.command(&["spectrum", "a", "--data", "stories.txt"]).assert().success().stderr(contains("29 times"));
}

#[test]
fn invalid_data_is_reported() {
    let place = Place::new();
    fs::write(place.path("equal.txt"), "the same line\n".repeat(50)).expect("a file");
    fs::write(place.path("text.bin"), "x").expect("a file");
    for (code, arguments, said) in [
        (2, &["absent.txt"][..], "no such file or directory"),
        (2, &["text.bin"], "its file extension is unknown"),
        (2, &["text.txt", "--held-out", "1.5"], "held_out"),
        (2, &["equal.txt", "--documents", "line", "--held-out", "0.1"], "equal documents are held out together"),
        (2, &["text.txt", "--tokenizer", "absent.json"], "absent.json"),
        (2, &["text.txt", "--tokenizer", "gpt2"], "hf://OWNER/NAME"),
        (
            2,
            &["hf://datasets/../x/*"],
            if cfg!(feature = "hub") { "write it as hf://datasets/" } else { "which this build does not include" },
        ),
    ] {
        place.command(&[&["data", "prepare"], arguments].concat()).assert().code(code).stderr(contains(said));
    }
    #[cfg(unix)]
    {
        assert!(std::process::Command::new("mkfifo").arg(place.path("pipe.txt")).status().expect("mkfifo").success());
        place.command(&["data", "prepare", "pipe.txt"]).assert().code(2).stderr(contains("neither a regular file nor a directory"));
        std::os::unix::fs::symlink("loop.txt", place.path("loop.txt")).expect("a link");
        place.command(&["data", "prepare", "loop.txt"]).assert().code(2).stderr(contains("it cannot be read"));
    }
}

#[test]
fn a_tokenizer_is_learned_and_used() {
    let place = Place::new();
    let train = ["tokenizer", "train", "text.txt", "--vocab", "280", "--out", "t.json"];
    place.command(&train).assert().success().stdout(contains("280").and(contains("1 document,"))).stderr(contains("written: t.json"));
    let ids = place.command(&["tokenizer", "encode", "t.json", "Tom walked"]).assert().success().get_output().stdout.clone();
    let ids = String::from_utf8(ids).expect("text");
    let ids: Vec<&str> = ids.split_whitespace().collect();
    assert!(ids.len() < "Tom walked".len(), "{ids:?}");
    place.command(&[&["tokenizer", "decode", "t.json"], &ids[..]].concat()).assert().success().stdout("Tom walked\n");
    place.command(&["tokenizer", "encode", "bytes"]).write_stdin("Hi").assert().success().stdout("72 105\n");
    place.command(&["tokenizer", "decode", "bytes"]).write_stdin("72 105\n").assert().success().stdout("Hi\n");
    place.command(&["tokenizer", "decode", "bytes"]).write_stdin("72 Hi").assert().code(2).stderr(contains("`Hi` on standard input"));
    place.train(&["--name", "a", "--tokenizer", "t.json", "--quiet"]).assert().success();
    assert!(place.path("runs/a/checkpoints/step-00000006/tokenizer.json").is_file());
}

#[test]
fn invalid_tokenizer_arguments_are_reported() {
    let place = Place::new();
    let huge = ["4294967296", "1000000000000000000"];
    for count in huge {
        place.command(&["tokenizer", "train", "text.txt", "--vocab", count]).assert().code(2).stderr(contains("16777216"));
    }
    place.command(&["tokenizer", "train", "text.txt", "--vocab", "100"]).assert().code(2).stderr(contains("too small"));
    let text = place.command(&["tokenizer", "encode", "bytes"]).write_stdin([0xff]).assert().code(1);
    text.stderr(contains("cannot read standard input").and(contains("write").not()));
    place.command(&["tokenizer", "decode", "bytes", "300"]).assert().code(1).stderr(contains("cannot decode 300"));
    place.command(&["tokenizer", "train", "text.txt", "--vocab", "280", "--out", "t.json"]).assert().success();
    let good = fs::read(place.path("t.json")).expect("a tokenizer");
    // A truncated file is an error in one sentence.
    for part in 1..20 {
        fs::write(place.path("bad.json"), &good[..good.len() * part / 20]).expect("a file");
        let output = place.command(&["tokenizer", "encode", "bad.json", "hi"]).assert().code(1).get_output().clone();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("not a tokenizer.json") && !text.contains("panicked"), "{text}");
    }
    fs::create_dir_all(place.path("folder/tokenizer.json")).expect("a folder");
    place.command(&["tokenizer", "encode", "folder", "hi"]).assert().code(1).stderr(contains("it is a directory"));
}

#[test]
fn built_in_data_are_shown_with_their_options() {
    let place = Place::new();
    let show = |more: &[&str]| place.command(&[&["data", "show", "--batch", "1"][..], more].concat()).assert();
    let dials = "facts=2 keys=3 updates=2 gap=3 words=2 branching=1 values=9 fact_rate=1 question_rate=1 length=17";
    let text = show(&["--language", dials]).success().get_output().stdout.clone();
    let text = String::from_utf8(text).expect("text");
    let words: Vec<&str> = text.lines().last().expect("a document").split(' ').collect();
    // Two facts, the same two again, three words, two questions whose answers are the later values.
    assert!(words[9..12].iter().all(|word| word.starts_with('w')), "{text}");
    for question in words[12..].chunks(3).filter(|question| question.len() == 3) {
        assert_eq!(question[0], "?");
        assert!(words[5..9].chunks(2).any(|fact| fact == &question[1..]), "{text}");
    }
    show(&["--data", "builtin:parity", "--length", "9"]).success().stdout(contains("labels, including the end marker:\n0 "));
    // Rows are whole documents: as long as one, or a multiple of it.
    show(&["--language", "length=32", "--length", "64"]).success();
    for (length, advice) in [("48", "--builtin-options length=48"), ("16", "--builtin-options length=16")] {
        let wrong = show(&["--language", "length=32", "--length", length]).failure();
        wrong.stderr(contains("make rows 32 positions long or a multiple of it").and(contains(advice)));
    }
    show(&["--data", "builtin:party"]).failure().stderr(contains("built-in data are builtin, parity, mqar, mqar-mini, s5"));
    show(&["--data", "builtin:parity", "--language", "facts=3"]).failure().stderr(contains("`builtin_options` has no option `facts`"));
}

#[test]
fn a_batch_beyond_the_end_is_an_error_but_fewer_batches_are_not() {
    let place = Place::new();
    let show =
        |more: &[&str]| place.command(&[&["data", "show", "text.txt", "--held-out-batch", "--batch", "1"][..], more].concat()).assert();
    show(&["--length", "40", "--index", "1000"])
        .code(2)
        .stderr(contains("there is no held-out batch 1000; of 1 × 40 tokens each, the last is"));
    show(&["--length", "40", "--index", "1000", "--json"]).code(2).stdout("");
    show(&["--held-out", "0"]).code(2).stderr(contains("nothing is held out"));
    let all = show(&["--length", "40", "--count", "1000"]).success().get_output().stdout.clone();
    let last = String::from_utf8(all).expect("text").matches("── batch").count() - 1;
    let said = show(&["--length", "40", "--index", &(last + 1).to_string()]).code(2).get_output().stderr.clone();
    assert!(String::from_utf8_lossy(&said).contains(&format!("the last is {last}")), "{}", String::from_utf8_lossy(&said));
    show(&["--length", "40", "--index", "18446744073709551615"]).code(2);
}
