//! A recorded loss curve: 30 steps on associative recall for three variants. Detects numerical changes between commits.
//!
//! On one machine the curve is bit-identical for any number of threads. Other caches and instruction sets change the order of sums in matrix
//! products; their effect on the loss within 30 steps is far below the tolerance.

use std::collections::BTreeMap;

use crate::support::termwise;

/// Relative. Another order of sums (chunks instead of all pairs) moves these losses by 3e-8, a wrong coefficient by more than 1e-3.
const TOLERANCE: f64 = 1e-4;

#[test]
fn thirty_steps_have_the_recorded_losses() {
    let recorded: BTreeMap<String, Vec<f64>> = serde_json::from_str(include_str!("golden_curve.json")).expect("a recorded curve");
    assert_eq!(recorded.len(), 3);
    for (variant, expected) in &recorded {
        let folder = tempfile::tempdir().expect("a folder");
        let runs = folder.path().to_str().expect("a path of plain characters");
        let settings = ["--steps", "30", "--batch", "8", "--length", "128", "--log-every", "1", "--eval-every", "0"];
        let place = ["train", "--quiet", "--runs", runs, "--name", "golden", "--attention", variant];
        termwise(&[&place[..], &settings[..]].concat()).assert().success();
        let metrics = std::fs::read_to_string(folder.path().join("golden/metrics.jsonl")).expect("metrics");
        let lines = metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a line of JSON"));
        let losses: Vec<f64> = lines.filter(|line| line["kind"] == "train").map(|line| line["loss"].as_f64().expect("a loss")).collect();
        assert_eq!(losses.len(), expected.len(), "{variant}");
        for (step, (loss, expected)) in losses.iter().zip(expected).enumerate() {
            let off = (loss - expected).abs() / expected;
            assert!(off <= TOLERANCE, "{variant}: the loss of step {} is {loss}, recorded was {expected}", step + 1);
        }
    }
}
