//! `termwise separation`: output, files and errors.

use predicates::prelude::*;
use predicates::str::contains;

use crate::support::{json, termwise};

#[test]
fn without_arguments_the_reference_figures_are_compared() {
    termwise(&["separation", "--draws", "1000", "--details"]).assert().success().stdout(
        contains("A reconstruction")
            .and(contains("checked by algebra and simulation,"))
            .and(predicates::str::is_match(r"linear +3(\.0)? +150 +15 +0\.48 +0\.4789").expect("a pattern"))
            .and(predicates::str::is_match(r"softmax +0\.7 +1,000 +15 +0\.98 +0\.9830").expect("a pattern"))
            .and(contains("21 / 19"))
            .and(contains("0 differ")),
    );
}

#[test]
fn a_sweep_is_the_same_for_any_number_of_threads() {
    let arguments =
        ["separation", "--network", "linear", "--network", "power=1..2", "--n", "150,1e6", "--a1", "3", "--draws", "2000", "--json"];
    let found = json(&arguments);
    let points = found["points"].as_array().expect("points");
    assert_eq!(points.len(), 6);
    assert_eq!((&points[0]["network"], &points[0]["n"], &points[1]["n"]), (&"linear".into(), &150.into(), &1_000_000.into()));
    // Linear attention is the power of order 1, on the same draws.
    assert_eq!(points[0]["success"], points[2]["success"]);
    let (low, exact, high) = (points[0]["low"].as_f64(), points[0]["exact"].as_f64(), points[0]["high"].as_f64());
    assert!(low < exact && exact < high, "{low:?} {exact:?} {high:?}");
    assert_eq!(found["points"], json(&[&arguments[..], &["--threads", "1"]].concat())["points"]);
    assert_ne!(found["points"], json(&[&arguments[..], &["--seed", "2"]].concat())["points"]);
}

#[test]
fn files_are_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("out").display().to_string();
    let read = |name: &str| std::fs::read_to_string(folder.path().join("out").join(name)).expect("a file");
    let arguments = ["separation", "--bridge", "--n", "100,1000", "--a1", "1,0.011", "--draws", "100", "--out", &out, "--details"];
    termwise(&arguments).assert().success().stdout(contains("Smallest order").and(contains("none")));
    let csv = read("tables/bridge.csv");
    assert!(csv.lines().count() == 5 && csv.lines().all(|line| line.split(',').count() == 10), "{csv}");
    assert!(read("figures/bridge.svg").contains("single power p") && read("index.html").contains("Smallest order"));
    termwise(&["separation", "--n", "10,100", "--cross", "--draws", "100", "--out", &out, "--details"])
        .assert()
        .success()
        .stdout(contains("cross-attention"));
    assert!(read("figures/success.svg").contains("Success against n"));
    let blocked = folder.path().join("out/index.html/a").display().to_string();
    termwise(&["separation", "--n", "10", "--draws", "9", "--out", &blocked]).assert().code(1).stderr(contains("index.html"));
}

#[test]
fn mistakes_are_named() {
    for (arguments, message) in [
        (vec!["--n", "0"], "n = 0 is invalid"),
        (vec!["--n", "1"], "2 or more"),
        (vec!["--n=-5"], "a whole number"),
        (vec!["--n", "100.5"], "a whole number"),
        (vec!["--n", "100", "--d", "2"], "d = 2 is invalid"),
        (vec!["--m", "0"], "m = 0 is invalid"),
        (vec!["--b", "0.2", "--c", "0.9"], "b + c = 1"),
        (vec!["--b", "-0.2"], "both must be nonnegative"),
        (vec!["--a0", "-1"], "a_0 = -1 is invalid"),
        (vec!["--a0", "0.5"], "below 0.1"),
        (vec!["--a1", "-1"], "a_1 = -1 is invalid"),
        (vec!["--a1", "nan"], "a_1 = NaN is invalid"),
        (vec!["--draws", "0"], "the number of draws is 0"),
        (vec!["--network", "sofmax"], "softmax, linear, power=P"),
        (vec!["--network", "power"], "power=4"),
        (vec!["--bridge", "--m", "1,2"], "give one m, not 2"),
        (vec!["--bridge", "--network", "linear"], "cannot be used with"),
    ] {
        let arguments: Vec<&str> = std::iter::once("separation").chain(arguments).collect();
        termwise(&arguments).assert().code(2).stderr(contains(message));
    }
}
