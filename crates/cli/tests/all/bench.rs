//! `termwise bench` at tiny sizes: the content of its results, not the speed.

use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;

use crate::support::{json, termwise};

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("no {key} in {value}"))
}

fn close(found: f64, expected: f64) -> bool {
    (found / expected - 1.0).abs() < 1e-9
}

/// Checks that time and rates agree; returns 10⁶ operations.
fn operations(speed: &Value, machine: &Value) -> f64 {
    let (ms, gflops) = (number(speed, "ms"), number(speed, "gflops"));
    assert!(ms > 0.0 && close(number(speed, "share_of_peak"), gflops / number(machine, "peak_gflops")), "{speed}");
    gflops * ms
}

fn is_machine(machine: &Value, threads: u64) {
    assert_eq!(machine["threads"], threads);
    assert!(machine["peak_gflops"].as_f64().is_some_and(|x| x > 0.0) && machine["read_gb_per_s"].as_f64().is_some_and(|x| x > 0.0));
}

#[test]
fn attention_measures_every_variant_and_softmax() {
    let list = "norm,exp over=sum,floor=1 rope=off";
    let arguments = ["bench", "attention", "--shapes", "1x2x20,2x2x9", "--head-dim", "8", "--kv-heads", "1", "--variants", list];
    let found = json(&[&arguments[..], &["--repeat", "1", "--threads", "2", "--json"]].concat());
    is_machine(&found["machine"], 2);
    let rows = found["rows"].as_array().expect("rows");
    let variants: Vec<&str> = rows.iter().filter_map(|row| row["variant"].as_str()).collect();
    assert_eq!(variants, ["softmax", "norm", "exp over=sum,floor=1 rope=off"].repeat(2));
    for (at, row) in rows.iter().enumerate() {
        let [forward, both] = ["forward", "forward_backward"].map(|pass| operations(&row[pass], &found["machine"]));
        assert!(both > 1.5 * forward, "a backward pass costs more than half a forward pass: {row}");
        // Softmax comes first at each shape.
        let against = number(&row["forward"], "ms") / number(&rows[at / 3 * 3]["forward"], "ms");
        assert!(close(number(row, "forward_against_softmax"), against), "{row}");
        assert_eq!((&row["kv_heads"], &row["head_dim"]), (&Value::from(1), &Value::from(8)));
    }
    assert_eq!(rows[0]["forward_against_softmax"], 1.0);
    termwise(&["bench", "attention", "--shapes", "1x1x4", "--head-dim", "2", "--repeat", "1"])
        .assert()
        .success()
        .stdout(contains("GFLOP/s").and(contains("taylor=0..4")));
}

#[test]
fn gemm_measures_three_products() {
    let found = json(&["bench", "gemm", "--shapes", "9x5x7", "--repeat", "1", "--threads", "1", "--json"]);
    is_machine(&found["machine"], 1);
    let rows = found["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert!(close(operations(row, &found["machine"]), 2.0 * 9.0 * 5.0 * 7.0 / 1e6), "{row}");
    }
}

#[test]
fn the_instruction_set_can_be_chosen() {
    for place in [&["--isa", "portable", "decode"][..], &["decode", "--isa", "portable"]] {
        let found = json(&[&["bench"], place, &["--case", "taylor=0..1@4", "--repeat", "1", "--json"]].concat());
        assert_eq!(found["machine"]["instructions"], "portable");
    }
    termwise(&["bench", "decode", "--isa", "mmx"]).assert().code(2).stderr(contains("mmx").and(contains("this machine supports portable")));
}

#[test]
fn step_measures_a_whole_model() {
    let sizes = ["--vocab", "17", "--hidden", "8", "--heads", "2", "--layers", "1", "--mlp", "12", "--batch", "2", "--length", "5"];
    let arguments = [&["bench", "step"], &sizes[..], &["--repeat", "2", "--attention", "gate"]].concat();
    let found = json(&[&arguments[..], &["--json"]].concat());
    operations(&found, &found["machine"]);
    assert!(close(number(&found, "tokens_per_s") * number(&found, "ms"), 1e3 * 2.0 * 5.0), "{found}");
    let gate: termwise_attention::Variant = "gate".parse().expect("a preset");
    assert_eq!(found["attention"], gate.to_string());
    // Matrices: q, k, v, o 8×8, gate 2×8, MLP 3·8·12, head 17×8.
    assert_eq!(found["matrix_parameters"], 4 * 64 + 16 + 288 + 136);
    assert!(found["times"]["stages"].as_array().is_some_and(|stages| stages.len() > 5));
    termwise(&[&arguments[..], &["--details"]].concat()).assert().success().stdout(contains("tokens/s").and(contains("AdamW")));
}
