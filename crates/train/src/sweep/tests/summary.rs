use super::*;

#[test]
fn statistics_match_hand_computed_values() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan("[axes]\nattention = [\"softmax\", \"norm\", \"gate\"]\nlr = [0.001, 0.003, 0.01]\nseed = [1, 2, 3]");
    // softmax: 2, 4, 9 at the first rate (mean 5, deviation √13), 1, 2, 3 at the second; one seed diverges at the third.
    let runner = fake(|job, _| {
        let (seed, lr) = (number(job, "seed"), number(job, "optimizer.lr"));
        match (job.settings["model"]["attention"].as_str(), lr) {
            (Some("softmax"), 0.001) => loss([2.0, 4.0, 9.0][seed as usize - 1]),
            (Some("softmax"), 0.003) => loss(seed),
            (Some("softmax"), _) => loss(if seed == 2.0 { f64::NAN } else { 0.5 }),
            (Some("norm"), _) => loss(10.0 - 100.0 * lr + seed),
            _ => Outcome::Failed("always".into()),
        }
    });
    let states = go(&plan, folder.path(), &runner, ONE);
    let summary = Summary::new(&plan, &states);
    let first = summary.groups[0].metrics["loss"];
    assert!((first.mean - 5.0).abs() < 1e-12 && (first.deviation.expect("of three") - 13f64.sqrt()).abs() < 1e-12, "{first:?}");
    assert_eq!(first.to_string(), "5.0000 ± 3.6056");
    assert_eq!((summary.groups[2].finished, summary.groups[2].failed, summary.groups[2].metrics["loss"].count), (2, 1, 2));
    let diverged = &summary.runs[7];
    assert_eq!((diverged.status.as_str(), diverged.note.as_str()), ("failed", "no finite loss at its end"), "{diverged:?}");
    assert_eq!(summary.groups[8].metrics.len(), 0);

    // The gate never finished. The third rate of softmax has a lower mean, but one failure.
    assert_eq!(summary.best.len(), 2);
    let [softmax, norm] = &summary.best[..] else { panic!("{:?}", summary.best) };
    assert_eq!((softmax.learning_rate.as_deref(), softmax.at_edge, softmax.metric.mean, softmax.behind), (Some("0.003"), false, 2.0, 0.0));
    assert_eq!((norm.learning_rate.as_deref(), norm.at_edge, norm.metric.mean), (Some("0.01"), true, 11.0));
    assert_eq!((norm.behind, norm.beyond_deviation, softmax.beyond_deviation), (9.0, Some(true), Some(false)));

    summary.write(folder.path(), &Default::default()).expect("files");
    let text = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect("a file");
    let best = text("best.csv");
    assert_eq!(
        best.lines().next(),
        Some("model.attention,learning_rate,at_edge,runs,failed,loss mean,loss deviation,behind,beyond_deviation")
    );
    assert_eq!(best.lines().nth(1), Some("softmax,0.003,false,3,0,2,1,0,false"));
    assert_eq!(text("summary.csv").lines().count(), 10);
    assert_eq!(text("runs.csv").lines().count(), 28);
    let json: serde_json::Value = serde_json::from_str(&text("summary.json")).expect("JSON");
    assert_eq!(json["best"][0]["metric"]["mean"], 2.0);
}

#[test]
fn strings_with_commas_and_quotes_are_one_csv_cell() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan("[axes]\nattention = [\"exp over=sum,eps=1\"]");
    let states = go(&plan, folder.path(), &fake(|_, _| Outcome::Failed("a \"bad\"\nend".into())), ONE);
    Summary::new(&plan, &states).write(folder.path(), &Default::default()).expect("files");
    let text = std::fs::read_to_string(folder.path().join("runs.csv")).expect("a file");
    assert!(text.contains("\"exp over=sum,eps=1\"") && text.contains("\"a \"\"bad\"\"\nend\""), "{text}");
}

#[test]
fn equal_variants_are_reported_and_skipped_on_request() {
    let text = "[axes]\nattention = [\"norm\", \"exp over=length out norm=l2\", \"softmax\", \"exp over=sum\", \"gate\"]\nseed = [1, 2]";
    let plan = plan(text);
    let found: Vec<String> = equalities(&plan).iter().map(ToString::to_string).collect();
    assert_eq!(
        found,
        [
            "model.attention: `norm` and `exp over=length out norm=l2` have the same output up to rounding and eps",
            "model.attention: `softmax` and `exp over=sum` are the same attention",
        ]
    );
    let folder = tempfile::tempdir().expect("a folder");
    let runner = fake(|job, _| loss(number(job, "seed")));
    let options = Options { skip_equal: true, ..ONE };
    let states = go(&plan, folder.path(), &runner, options);
    assert_eq!(runner.count(), 6);
    assert_eq!(states[2..4], [State::Equal(0), State::Equal(1)]);
    let summary = Summary::new(&plan, &states);
    assert_eq!(summary.groups[1].metrics, summary.groups[0].metrics, "it has the metrics of its equal");
    assert_eq!((summary.runs[2].status.as_str(), &summary.runs[2].note), ("equal", &plan.jobs[0].hash));
    go(&plan, folder.path(), &runner, ONE);
    assert_eq!(runner.count(), 10, "by default all are run");
}
