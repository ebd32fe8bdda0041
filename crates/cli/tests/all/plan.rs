//! `termwise plan`: output, files and errors.

use predicates::prelude::*;
use predicates::str::contains;

use crate::support::{json, termwise};

#[test]
fn a_preset_is_planned_in_a_table() {
    let arguments =
        ["plan", "paper-small", "--hardware", "a100", "--hardware", "rtx4090", "--memory", "2GiB", "--train-tokens", "5B", "--details"];
    termwise(&arguments).assert().success().stdout(
        contains("275M (275,293,184)")
            .and(predicates::str::is_match(r"memory: state = cache +– +1,089 +24,327").expect("a pattern"))
            .and(contains("In 2 GiB: states of orders 0..2"))
            .and(contains("On 5B tokens"))
            .and(contains("NVIDIA's data sheet"))
            .and(contains("the highest order 3 is odd")),
    );
}

#[test]
fn this_machine_is_measured() {
    let found = json(&["plan", "tiny", "--attention", "power=2", "--context", "1k", "--threads", "1", "--json"]);
    assert_eq!((&found["context"], &found["hardware"][0]["name"]), (&1000.into(), &"here".into()));
    assert!(found["hardware"][0]["peak_flops"].as_f64().is_some_and(|x| x > 1e6));
    // Two layers of four heads with 136 monomials of order 2, 17 columns, four bytes.
    assert_eq!(found["columns"][0]["state_bytes"], 2 * 4 * 136 * 17 * 4);
    assert!(found["assumptions"].as_array().is_some_and(|list| list.len() > 5));
}

#[test]
fn a_page_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("plan");
    termwise(&["plan", "paper-small", "--hardware", "h100", "--out", &out.display().to_string()]).assert().success();
    let svg = std::fs::read_to_string(out.join("figures/state-or-cache.svg")).expect("the figure");
    assert!(svg.starts_with("<svg") && svg.contains("orders 0..4") && svg.contains("prefers-color-scheme"));
    let blocked = out.join("plan.json/below").display().to_string();
    termwise(&["plan", "tiny", "--hardware", "h100", "--out", &blocked]).assert().code(1).stderr(contains("plan.json"));
}

#[test]
fn mistakes_are_named() {
    for (arguments, message) in [
        (vec!["plan", "paper-smal"], "did you mean `paper-small`?"),
        (vec!["plan", "tiny", "--hardware", "h1000"], "did you mean `h100`?"),
        (vec!["plan", "tiny", "--memory", "much"], "2GiB"),
        (vec!["plan", "tiny", "--context", "0"], "positive"),
        (vec!["plan", "tiny", "--attention", "softmx"], "softmax"),
        (vec!["plan"], "MODEL"),
    ] {
        termwise(&arguments).assert().code(2).stderr(contains(message));
    }
}
