//! Rules on made-up numbers, and declarations at every scale.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use termwise_experiments::Error;
use termwise_experiments::reproduce::{
    self, Decision, Declared, Id, Method, Metric, Options, Results, Rule, Scale, Schedule, Side, Verdict, declare,
};
use termwise_report::{Block, Documented, Layer};
use termwise_train::eval::{Evaluation, Part};
use termwise_train::metrics::{Line, METRICS};
use termwise_train::settings::{self, Settings};
use termwise_train::sweep::{Control, Event, Job, Metrics, Outcome, Runner};

fn lower() -> Rule {
    Rule::Lower { low: "a".into(), high: "b".into(), least: 0.04 }
}

fn equal() -> Rule {
    Rule::Equal { one: "a".into(), other: "b".into(), low: "low".into(), high: "high".into(), share: 0.1 }
}

/// Decides with these numbers of runs for each variant, seeds counted from 1 on every side.
fn decide(rule: &Rule, numbers: &[(&str, &[f64])]) -> Decision {
    rule.decide(&|name| {
        let numbers = numbers.iter().find(|entry| entry.0 == name).map_or(&[][..], |entry| entry.1);
        Side { declared: numbers.len(), numbers: (1..).zip(numbers.iter().copied()).collect(), failed: Vec::new() }
    })
}

#[test]
fn lower_is_decided_all_three_ways() {
    for (a, b, expected) in [
        ([1.0, 1.1, 0.9], [2.0, 2.1, 1.9], Verdict::Reproduced),
        ([2.0, 2.1, 1.9], [1.0, 1.1, 0.9], Verdict::Contradicted),
        // The means differ by 0.5, one deviation is 1.
        ([1.0, 2.0, 3.0], [2.4, 2.5, 2.6], Verdict::Inconclusive),
        // Far outside the spread and still below the least that counts.
        ([1.0, 1.0001, 0.9999], [1.03, 1.0301, 1.0299], Verdict::Inconclusive),
    ] {
        let decision = decide(&lower(), &[("a", &a), ("b", &b)]);
        assert_eq!(decision.verdict, expected, "{a:?} {b:?}");
        assert!(decision.note.is_empty());
    }
}

#[test]
fn variances_are_not_pooled() {
    // Deviations 0.059 and 1.477: with pooled variances and t(4) the interval was ±2.369, and 2.384 counted.
    let (gate, relu) = ([0.052, 0.023, 0.137], [1.657, 4.159, 1.549]);
    let decision = decide(&lower(), &[("a", &gate), ("b", &relu)]);
    let difference = decision.difference.expect("one");
    assert_eq!((decision.verdict, difference.method), (Verdict::Inconclusive, Method::Paired));
    // scipy.stats.ttest_rel
    assert!((difference.half_interval - 3.776023604548606).abs() < 1e-9);
    // One seed is missing on one side: Welch's.
    let decision = decide(&lower(), &[("a", &gate[..2]), ("b", &relu)]);
    assert_eq!((decision.verdict, decision.difference.expect("one").method), (Verdict::Inconclusive, Method::Welch));
}

#[test]
fn variance_shared_by_seeds_does_not_hide_a_difference() {
    // Seeds move both sides alike by 0.2, as much as the sides differ.
    let (a, b) = ([1.0, 1.1, 1.2], [1.2, 1.31, 1.39]);
    let paired = decide(&lower(), &[("a", &a), ("b", &b)]);
    let difference = paired.difference.expect("one");
    assert_eq!((paired.verdict, difference.method, difference.freedom), (Verdict::Reproduced, Method::Paired, 2.0));
    assert!(difference.half_interval < 0.03, "{difference:?}");
    // The same numbers of other seeds: variance between seeds is then part of the error.
    let welch = lower().decide(&|name| {
        let (first, numbers) = if name == "a" { (1, a) } else { (11, b) };
        Side { declared: 3, numbers: (first..).zip(numbers).collect(), failed: Vec::new() }
    });
    let difference = welch.difference.expect("one");
    assert_eq!((welch.verdict, difference.method), (Verdict::Inconclusive, Method::Welch));
    assert!(difference.half_interval > 0.2, "{difference:?}");
}

#[test]
fn a_difference_within_the_spread_never_counts() {
    // Many seeds make the interval small; the spread remains.
    let (a, b): (Vec<f64>, Vec<f64>) = (0..200).map(|i| (f64::from(i % 2), f64::from(i % 2) + 0.4)).unzip();
    let decision = decide(&lower(), &[("a", &a), ("b", &b)]);
    let difference = decision.difference.expect("one");
    assert!(difference.value > difference.half_interval && difference.value < difference.deviation);
    assert_eq!(decision.verdict, Verdict::Inconclusive);
}

#[test]
fn equal_is_decided_all_three_ways() {
    let ends: [(&str, &[f64]); 2] = [("low", &[1.0, 1.01, 0.99]), ("high", &[3.0, 3.01, 2.99])];
    for (a, b, expected) in [
        ([1.0, 1.01, 0.99], [1.05, 1.06, 1.04], Verdict::Reproduced),
        ([1.0, 1.01, 0.99], [1.5, 1.51, 1.49], Verdict::Contradicted),
        ([1.5, 1.51, 1.49], [1.0, 1.01, 0.99], Verdict::Contradicted),
        ([1.0, 1.4, 0.6], [1.05, 1.06, 1.04], Verdict::Inconclusive),
        // Within the margin of 0.2, but not with its interval.
        ([1.0, 1.04, 0.96], [1.17, 1.18, 1.16], Verdict::Inconclusive),
    ] {
        let decision = decide(&equal(), &[("a", &a), ("b", &b), ends[0], ends[1]]);
        assert_eq!(decision.verdict, expected, "{a:?} {b:?}");
        assert!((decision.margin.expect("a margin") - 0.2).abs() < 1e-12);
    }
    let flat: [(&str, &[f64]); 2] = [("low", &[1.0, 2.0, 3.0]), ("high", &[2.0, 2.5, 2.2])];
    let decision = decide(&equal(), &[("a", &[1.0, 1.0]), ("b", &[1.0, 1.0]), flat[0], flat[1]]);
    assert_eq!((decision.verdict, decision.margin), (Verdict::Inconclusive, None));
    assert!(decision.note.contains("does not itself count"));
}

#[test]
fn the_margin_of_equal_takes_part_of_the_error_of_the_gap() {
    // A gap of 2.79 whose 95 % interval is 0.82 to 4.77: the margin is 0.082, not 0.279, and only 0.477 is beyond it for certain.
    let ends: [(&str, &[f64]); 2] = [("low", &[0.0, 0.0, 0.021]), ("high", &[1.99, 3.578, 2.83])];
    for (distance, spread, expected) in [
        (0.05, 0.001, Verdict::Reproduced),
        (0.25, 0.001, Verdict::Inconclusive),
        (0.45, 0.001, Verdict::Inconclusive),
        (0.55, 0.001, Verdict::Contradicted),
        // Beyond with its estimate, and not with its whole interval.
        (0.55, 0.1, Verdict::Inconclusive),
    ] {
        let b = [1.0 + distance - spread, 1.0 + distance, 1.0 + distance + spread];
        let decision = decide(&equal(), &[("a", &[1.0, 1.0, 1.0]), ("b", &b), ends[0], ends[1]]);
        assert_eq!(decision.verdict, expected, "{distance} ± {spread}");
        assert!(decision.margin.is_some_and(|margin| (margin - 0.08196).abs() < 1e-4), "{decision:?}");
        // The p-value agrees with the interval: paired differences have the same degrees of freedom.
        assert_eq!(decision.p.is_some_and(|p| p <= 0.05), expected != Verdict::Inconclusive, "{decision:?}");
    }
}

#[test]
fn one_seed_or_none_is_no_verdict() {
    for (a, note) in [(&[1.0][..], "one seed of a"), (&[][..], "no run of a has been started")] {
        let decision = decide(&lower(), &[("a", a), ("b", &[9.0, 9.0])]);
        assert_eq!((decision.verdict, decision.difference), (Verdict::Undecided, None));
        assert!(decision.note.contains(note), "{}", decision.note);
    }
    let ends: [(&str, &[f64]); 3] = [("a", &[1.0, 1.0]), ("b", &[1.0, 1.0]), ("low", &[1.0, 1.0])];
    assert!(decide(&equal(), &ends).note.contains("no run of high has been started"));
}

#[test]
fn a_verdict_needs_every_declared_seed() {
    for (declared, failed, note) in [
        (3, vec![(2, "diverged".to_owned())], "seed 2 of b failed (diverged)"),
        (4, vec![], "2 of 4 runs of b have not finished"),
        (4, vec![(2, "diverged".to_owned())], "seed 2 of b failed (diverged); 1 of 4 runs of b have not finished"),
    ] {
        let side = |name: &str| match name {
            "a" => Side { declared, numbers: (1..).zip(vec![1.0; declared]).collect(), failed: Vec::new() },
            _ => Side { declared, numbers: vec![(1, 9.0), (4, 9.0)], failed: failed.clone() },
        };
        let decision = lower().decide(&side);
        assert_eq!((decision.verdict, decision.note.as_str(), decision.difference), (Verdict::Undecided, note, None));
    }
}

fn declared(scale: Scale, words: &[&str], data: &[&str]) -> Declared {
    let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
    let data = data.iter().map(|file| file.to_string()).collect();
    let ids = Id::parse(&words, scale).unwrap_or_else(|error| panic!("{error}"));
    declare(&Options { ids, data, ..Options::new(scale) }).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn every_experiment_is_possible_at_every_scale() {
    for scale in [Scale::Test, Scale::Minute, Scale::Laptop, Scale::Paper] {
        for data in [&[][..], &["corpus.txt"]] {
            let declared = declared(scale, &["all"], data);
            assert!(declared.experiments.len() >= 5, "{scale:?}");
            for experiment in &declared.experiments {
                let names: HashSet<&str> = experiment.variants.iter().map(|variant| variant.name.as_str()).collect();
                assert_eq!(names.len(), experiment.variants.len(), "{scale:?} {:?}", experiment.id);
                for side in experiment.claims.iter().flat_map(|claim| claim.rule.sides()) {
                    assert!(names.contains(side), "{scale:?} {:?}: no variant {side}", experiment.id);
                }
                for task in &experiment.tasks {
                    let text = task.base.contains_key("data");
                    assert_eq!(task.metric == Metric::Recall, !text, "{scale:?} {}", task.name);
                }
            }
            let asked: HashSet<Id> = declared.experiments.iter().map(|experiment| experiment.id).collect();
            assert!(declared.left_out.iter().all(|(id, why)| !asked.contains(id) && !why.is_empty()));
            assert_eq!(asked.len() + declared.theorems.len() + declared.left_out.len(), Id::of_scale(scale).len());
        }
    }
}

#[test]
fn a_variant_has_one_name_for_one_attention() {
    for scale in [Scale::Minute, Scale::Laptop, Scale::Paper] {
        let mut names = HashMap::new();
        for variant in declared(scale, &[], &[]).experiments.iter().flat_map(|experiment| experiment.variants.clone()) {
            let parts: termwise_attention::Variant = variant.attention.parse().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(names.entry(parts.to_string()).or_insert(variant.name.clone()), &variant.name);
        }
    }
}

#[test]
fn shared_runs_are_run_once() {
    let [one, two, both] = [&["e1"][..], &["e4"], &["e1", "e4"]].map(|ids| declared(Scale::Minute, ids, &[]).schedule);
    let hashes = |schedule: &Schedule| schedule.plan.jobs.iter().map(|job| job.hash.clone()).collect::<HashSet<_>>();
    let shared = hashes(&one).intersection(&hashes(&two)).count();
    // Softmax and linear attention, four seeds.
    assert_eq!(shared, 8);
    assert_eq!(both.plan.jobs.len(), one.plan.jobs.len() + two.plan.jobs.len() - shared);
    assert_eq!(hashes(&both).len(), both.plan.jobs.len());
    assert_eq!(both.places.len(), one.places.len() + two.places.len());
}

#[test]
fn runs_differ_by_attention_and_seed_alone() {
    let schedule = declared(Scale::Minute, &["e1", "e3", "e4", "e5", "e7"], &[]).schedule;
    let rest = |job: &Job| {
        let mut settings = job.settings.clone();
        assert!(settings.remove("attention").is_some_and(|text| text.as_str().is_some_and(|text| text.contains("conv="))));
        assert!(settings.remove("seed").is_some());
        settings
    };
    let first = rest(&schedule.plan.jobs[0]);
    assert!(schedule.plan.jobs.iter().all(|job| rest(job) == first));
    // An interrupted command has runs of every variant.
    let seeds: Vec<_> = schedule.plan.jobs.iter().map(|job| job.settings["seed"].as_integer()).collect();
    assert!(seeds.is_sorted());
}

#[test]
fn text_tasks_are_at_the_laptop_and_paper_scales() {
    let tasks = |scale, data: &[&str]| {
        let declared = declared(scale, &["e1", "e5"], data);
        declared
            .experiments
            .iter()
            .map(|experiment| experiment.tasks.iter().map(|task| task.name.clone()).collect())
            .collect::<Vec<Vec<_>>>()
    };
    assert_eq!(tasks(Scale::Minute, &["x.txt"]), [["language"], ["language"]]);
    assert_eq!(tasks(Scale::Laptop, &["a/x.txt", "y.txt"]), [vec!["language", "x.txt", "y.txt"], vec!["language"]]);
    assert_eq!(tasks(Scale::Laptop, &[]), [["language"], ["language"]]);
    assert_eq!(tasks(Scale::Paper, &[]), [["text"], ["text"]]);
}

#[test]
fn unknown_experiments_are_named() {
    let error = Id::parse(&["e1".into(), "seperation".into()], Scale::Minute).expect_err("a typo").to_string();
    assert!(error.contains("did you mean `separation`?"), "{error}");
    assert_eq!(Id::parse(&["e7".into(), "E1".into(), "e7".into()], Scale::Minute).expect("names"), [Id::E1, Id::E7]);
    assert_eq!(Id::parse(&[], Scale::Laptop).expect("all"), Id::ALL[..12]);
    assert_eq!(Id::parse(&["all".into()], Scale::Mini).expect("all"), [Id::Mqar]);
    assert_eq!(Id::parse(&[], Scale::Text).expect("all").len(), 9);
}

/// Finishes every run immediately with a loss that depends on the attention, and counts runs.
struct MadeUp {
    ran: Mutex<Vec<String>>,
    /// Runs until a stop is requested.
    most: usize,
}

impl Runner for MadeUp {
    fn run(&self, job: &Job, control: &Control) -> termwise_train::Result<Outcome> {
        let mut ran = self.ran.lock().expect("no run panics");
        if ran.len() >= self.most {
            control.stop.store(true, Ordering::Relaxed);
            return Ok(Outcome::Stopped);
        }
        ran.push(job.hash.clone());
        let attention = job.settings["attention"].as_str().expect("a text");
        let seed = job.settings["seed"].as_integer().expect("a number") as f64;
        let loss = match attention {
            "linear_elu conv=3" => 3.0,
            "gate conv=3" => return Ok(Outcome::Failed("the loss is not finite".into())),
            _ => 0.1,
        };
        Ok(finished(job, control, Some(loss + 0.001 * seed)))
    }
}

/// Writes the metrics of a run: an evaluation before the last step, and one at the last step, whose loss may be not finite. The record has other
/// numbers, which must not decide anything.
fn finished(job: &Job, control: &Control, recall: Option<f64>) -> Outcome {
    let steps = job.settings["steps"].as_integer().expect("a number") as u64;
    let line = |step: u64, recall: Option<f64>| {
        let evaluation = recall.map(|recall| {
            let recall = Part { tokens: 1, loss: recall };
            Evaluation { tokens: 9, loss: 1.0 + recall.loss, perplexity: 3.0, recall: Some(recall), ..Evaluation::default() }
        });
        serde_json::to_string(&Line::HeldOut { step, time: 0.0, evaluation }).expect("JSON") + "\n"
    };
    std::fs::create_dir_all(control.folder).expect("a folder");
    std::fs::write(control.folder.join(METRICS), line(steps / 2, Some(77.0)) + &line(steps, recall)).expect("a file");
    Outcome::Finished(Metrics::from([("held_out.loss".into(), 55.0), ("held_out.recall.loss".into(), 55.0)]))
}

fn run(options: &Options, most: usize) -> Result<(Results, Vec<String>), Error> {
    let runner = MadeUp { ran: Mutex::default(), most };
    let results = reproduce::run(options, &declare(options)?, &runner, &AtomicBool::new(false), &mut |_, _| ())?;
    Ok((results, runner.ran.into_inner().expect("no run panics")))
}

#[test]
fn an_interrupted_command_resumes() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("results");
    let options = Options { ids: vec![Id::E1], out: out.clone(), threads: 1, ..Options::new(Scale::Minute) };
    let (first, ran) = run(&options, 5).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((ran.len(), first.timing.finished, first.timing.runs), (5, 4, 16));
    assert!(first.claims().all(|(_, _, claim)| claim.decision.verdict == Verdict::Undecided));
    assert!(first.document().to_markdown().contains("3 claims: 0 reproduced, 0 inconclusive, 0 contradicted, 3 undecided."));
    let (second, again) = run(&options, usize::MAX).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(again.len(), 11);
    assert!(again.iter().all(|hash| !ran.contains(hash)));
    assert_eq!((second.timing.finished, second.timing.failed), (12, 4));
    let verdicts: Vec<(Verdict, &str)> =
        second.claims().map(|(_, _, claim)| (claim.decision.verdict, claim.decision.note.as_str())).collect();
    assert_eq!(verdicts[0], (Verdict::Reproduced, ""));
    assert!(
        verdicts[1].0 == Verdict::Undecided && verdicts[1].1.starts_with("seed 1 of Gate failed (the loss is not finite); seed 2"),
        "{verdicts:?}"
    );
    assert_eq!(verdicts[2], (Verdict::Reproduced, ""));
    assert_eq!(Results::read(&out).unwrap_or_else(|error| panic!("{error}")), second);
    let gate = &second.experiments[0].tasks[0].variants[2];
    assert_eq!((gate.variant.name.as_str(), gate.metric), ("Gate", None));
    assert!(gate.runs.iter().all(|&run| second.runs[run].status == "failed" && second.runs[run].note.contains("not finite")));

    let page = std::fs::read_to_string(out.join("index.html")).expect("a page");
    for text in [
        "Norm coincides with softmax",
        "seed 4 of Gate failed (the loss is not finite)",
        "correction within each experiment",
        "Rule: the 95 % interval of Norm − softmax must lie within ±10 % of linear ELU − softmax",
        "(paired by seed, t(3))",
        // The chance level, the state and how the settings were chosen.
        "uniform predictions have 3.47",
        "linear ELU, ",
        "were chosen so that the effect is visible",
        &second.runs[0].folder,
    ] {
        assert!(page.contains(text), "the page lacks {text}");
    }
    assert!(out.join("figures/e1-dots.svg").is_file() && out.join("tables/e1-table.csv").is_file());
}

#[test]
fn an_interrupted_reproduction_has_no_verdicts_for_unfinished_claims() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = Options { ids: vec![Id::E4], out: folder.path().into(), threads: 1, ..Options::new(Scale::Minute) };
    // The last run is seed 4 of orders 0..10.
    let (results, ran) = run(&options, 31).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((ran.len(), results.timing.finished, results.is_complete()), (31, 31, false));
    let terminal = termwise_report::Terminal { width: 1000, ..Default::default() };
    let printed = results.summary().to_terminal(&terminal);
    let page = results.document().to_markdown();
    let (mut open, mut decided) = (0, 0);
    for (_, _, claim) in results.claims() {
        let needs_it = claim.rule.as_ref().is_some_and(|rule| rule.sides().contains(&"orders 0..10"));
        *(if needs_it { &mut open } else { &mut decided }) += 1;
        assert_eq!(claim.decision.verdict == Verdict::Undecided, needs_it, "{}: {:?}", claim.text, claim.decision);
        if !needs_it {
            continue;
        }
        let unfinished = "1 of 4 runs of orders 0..10 have not finished";
        assert_eq!(claim.decision, Decision { corrected: Some(Verdict::Undecided), ..Decision::undecided(unfinished.into()) });
        let lines: Vec<&str> = page.lines().chain(printed.lines()).filter(|line| line.contains(&claim.text)).collect();
        assert!(printed.contains(&claim.text) && lines.len() >= 3, "{page}");
        for line in lines.iter().filter(|line| !line.contains("Rule: ")) {
            assert!(line.contains("undecided") && line.contains(unfinished), "{line}");
        }
    }
    assert_eq!((open, decided), (2, 4));
}

#[test]
fn the_theorem_is_computed_without_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = Options { ids: vec![Id::Separation, Id::Bridge], out: folder.path().into(), ..Options::new(Scale::Test) };
    let (results, ran) = run(&options, 0).unwrap_or_else(|error| panic!("{error}"));
    assert!(ran.is_empty() && results.runs.is_empty() && results.left_out.is_empty());
    let ids: Vec<Id> = results.theorems.iter().map(|theorem| theorem.id).collect();
    assert_eq!(ids, [Id::Separation, Id::Bridge]);
    let softmax = &results.theorems[0].claims[0];
    assert_eq!((softmax.decision.verdict, &softmax.rule), (Verdict::Reproduced, &None));
    assert!(results.claims().all(|(_, _, claim)| !claim.stated.is_empty() && !claim.decision.note.is_empty()));
}

#[test]
fn many_claims_are_counted_at_the_top() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = vec!["a.txt".into(), "b.txt".into()];
    let options = Options { ids: vec![Id::E1, Id::E3, Id::E4], data, out: folder.path().into(), threads: 1, ..Options::new(Scale::Laptop) };
    let (results, _) = run(&options, usize::MAX).unwrap_or_else(|error| panic!("{error}"));
    let page = results.document().to_markdown();
    let (top, rest) = page.split_once("\n## ").expect("sections");
    assert_eq!(results.distinct().len() + 3, results.claims().count(), "softmax against linear attention is shared on three tasks");
    assert!(top.contains("| each once |") && rest.contains("Also a claim of E3, counted once"), "{top}");
    let count = |verdict| results.claims().filter(|(id, _, claim)| *id == Id::E1 && claim.decision.verdict == verdict).count();
    let [reproduced, inconclusive, contradicted, undecided] = Verdict::ALL.map(count);
    let row = format!("| E1 | 9 | {reproduced} | {inconclusive} | {contradicted} | {undecided} |");
    assert!(reproduced > 0 && inconclusive > 0 && undecided == 1 && top.contains(&row), "{row}: {top}");
    assert!(!top.contains("*reproduced*") && top.contains("*undecided*: **E1** (language) Gate"), "{top}");
    assert!(rest.contains("*reproduced*: Norm coincides with softmax"));
}

#[test]
fn a_claim_that_experiments_share_is_counted_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let ids = vec![Id::E1, Id::E3, Id::E4, Id::E5, Id::E7];
    let options = Options { ids, out: folder.path().into(), threads: 1, ..Options::new(Scale::Minute) };
    let (results, _) = run(&options, usize::MAX).unwrap_or_else(|error| panic!("{error}"));
    let shared: Vec<(Id, &str, &[Id])> = results
        .distinct()
        .into_iter()
        .filter(|(_, _, claim)| !claim.also.is_empty())
        .map(|(id, _, claim)| (id, claim.text.as_str(), &claim.also[..]))
        .collect();
    assert_eq!(
        shared,
        [
            (Id::E1, "Norm coincides with softmax", &[Id::E5][..]),
            (Id::E1, "softmax is better than linear attention", &[Id::E3]),
            (Id::E3, "under the same norm exp is better than ReLU", &[Id::E5]),
        ]
    );
    assert_eq!((results.claims().count(), results.distinct().len()), (20, 17));
    assert_eq!(Verdict::ALL.map(|verdict| results.count(verdict)).iter().sum::<usize>(), 17);
    assert_eq!(Verdict::ALL.map(|verdict| results.count_corrected(verdict)).iter().sum::<usize>(), 17);
}

#[test]
fn results_of_the_first_format_are_decided_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = Options { ids: vec![Id::E1], out: folder.path().into(), threads: 1, ..Options::new(Scale::Minute) };
    let (results, _) = run(&options, usize::MAX).unwrap_or_else(|error| panic!("{error}"));
    let mut value = serde_json::to_value(&results).expect("numbers and text");
    value["format"] = 1.into();
    let task = &mut value["experiments"][0]["tasks"][0];
    let pooled = serde_json::json!({"value": 9.0, "doubt": 1.0, "spread": 1.0});
    task["claims"].as_array_mut().expect("claims").iter_mut().for_each(|claim| claim["difference"] = pooled.clone());
    let path = folder.path().join("old.json");
    std::fs::write(&path, value.to_string()).expect("a file");
    assert_eq!(Results::read(&path).unwrap_or_else(|error| panic!("{error}")), results);
    // Numbers by seed were not there either: they are those of the runs.
    value["experiments"][0]["tasks"][0]["variants"].as_array_mut().expect("variants").iter_mut().for_each(|variant| {
        variant.as_object_mut().expect("an object").remove("numbers");
    });
    for (run, seed) in value["runs"].as_array_mut().expect("runs").iter_mut().zip(0..) {
        let evaluation = serde_json::json!({"tokens": 1, "loss": 1.0, "perplexity": 1.0, "recall": {"tokens": 1, "loss": f64::from(seed)}});
        run["held_out"] = evaluation;
    }
    std::fs::write(&path, value.to_string()).expect("a file");
    let again = Results::read(&path).unwrap_or_else(|error| panic!("{error}"));
    let softmax = &again.experiments[0].tasks[0].variants[0];
    assert_eq!(softmax.numbers.len(), 4);
    assert_eq!(softmax.numbers[1], (2, again.runs[softmax.runs[1]].number(Metric::Recall).expect("finished").1));
    value["format"] = 99.into();
    std::fs::write(&path, value.to_string()).expect("a file");
    assert!(Results::read(&path).expect_err("too new").to_string().contains("format 99"));
}

#[test]
fn tables_in_the_documentation_are_made_by_the_program() {
    let [results, second_half, ..] = ["laptop", "second-half", "text", "text-delta", "tokenization", "mqar"].map(|name| {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results").join(name);
        let results = Results::read(&folder.join("results.json")).unwrap_or_else(|error| panic!("{error}"));
        let made = reproduce::page(&results, Some(&folder)).to_markdown_without_figures();
        let there = std::fs::read_to_string(folder.join("results.md")).expect("the page");
        assert!(
            made == there,
            "regenerate it with: termwise report docs/results/{name}/results.json --markdown docs/results/{name}/results.md"
        );
        results
    });
    // All runs have finished, and the program declares all of them.
    assert!(second_half.is_complete());
    let ids: Vec<Id> = second_half.experiments.iter().map(|outcome| outcome.id).collect();
    let declared = declare(&Options { ids, ..Options::new(Scale::Laptop) }).unwrap_or_else(|error| panic!("{error}"));
    // Centered keys were measured, and removed afterwards.
    let kept = second_half.runs.iter().filter(|run| run.tuning && !run.attention.contains("centre="));
    let tuned = kept.map(|run| (run.attention.as_str(), run.rate));
    let jobs =
        declared.schedule.plan.jobs.iter().map(|job| (job.settings["attention"].as_str().expect("a text"), job.settings["lr"].as_float()));
    assert_eq!(tuned.collect::<Vec<_>>(), jobs.collect::<Vec<_>>());
    // States are of one size, as nearly as whole dimensions and windows allow.
    for outcome in &second_half.experiments {
        let share = if outcome.id == Id::Distance { 1.03 } else { 1.17 };
        let variants = &outcome.tasks[0].variants;
        let numbers: Vec<u64> = variants.iter().filter(|one| one.constant_state).filter_map(|one| one.state_numbers).collect();
        let (least, most) = (numbers.iter().min().expect("a state"), numbers.iter().max().expect("a state"));
        assert!(numbers.len() + 1 == variants.len() && *most as f64 <= share * *least as f64, "{:?}: {numbers:?}", outcome.id);
    }
    // Of the verdicts that pooled variances gave, this one changes.
    let gate =
        results.distinct().into_iter().find(|(_, task, claim)| *task == Some("language") && claim.text.contains("under the same gate"));
    let (id, _, claim) = gate.expect("the claim");
    assert_eq!((id, &claim.also[..], claim.decision.verdict), (Id::E3, &[Id::E5][..], Verdict::Inconclusive));
    assert_eq!((results.claims().count(), results.distinct().len()), (63, 57));
}

/// A loss with a different optimal learning rate per variant. One rate is too high for one variant.
struct Tuned(MadeUp);

const TOO_HIGH: &str = "the loss is not finite";

impl Runner for Tuned {
    fn run(&self, job: &Job, control: &Control) -> termwise_train::Result<Outcome> {
        if let Outcome::Stopped = self.0.run(job, control)? {
            return Ok(Outcome::Stopped);
        }
        let attention = job.settings["attention"].as_str().expect("a text");
        let rate = job.settings["lr"].as_float().expect("a number");
        let best = if attention.contains("delta") { 1.6e-3 } else { 4e-3 };
        if attention.starts_with("softmax") && rate < 2e-3 {
            return Ok(Outcome::Failed(TOO_HIGH.into()));
        }
        let seed = job.settings["seed"].as_integer().expect("a number") as f64;
        // Learning rates are not chosen on the documents that decide.
        let language = job.settings["language"].as_str().expect("a text");
        assert_eq!(language.contains("held_out_from=1048576"), seed == 0.0, "{language}");
        Ok(finished(job, control, Some((if attention.contains("delta") { 0.1 } else { 1.0 }) + 0.001 * seed + (rate - best).abs())))
    }
}

#[test]
fn each_variant_is_compared_at_its_own_learning_rate() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = Options { ids: vec![Id::Overwrite], seeds: Some(3), out: folder.path().into(), threads: 1, ..Options::new(Scale::Test) };
    let declared = declare(&options).unwrap_or_else(|error| panic!("{error}"));
    // Softmax, and order 1 with and without the write rule and decay; two rates, then three seeds.
    assert_eq!((declared.schedule.plan.jobs.len(), declared.schedule.waiting), (10, 15));
    let run = |most: usize| {
        let runner = Tuned(MadeUp { ran: Mutex::default(), most });
        let results = reproduce::run(&options, &declared, &runner, &AtomicBool::new(false), &mut |plan, event| {
            // Events refer to the plan that they come with.
            if let Event::Ended(index, record) = event {
                assert_eq!(plan.jobs[*index].hash, record.hash);
            }
        });
        (results.unwrap_or_else(|error| panic!("{error}")), runner.0.ran.into_inner().expect("no run panics").len())
    };
    // Interrupted during tuning: two variants have a learning rate, so their three runs are known. No claim is decided, and the results are incomplete.
    let (first, ran) = run(4);
    assert_eq!((ran, first.runs.len(), first.is_complete()), (4, 10 + 2 * 3, false));
    assert!(first.claims().all(|(_, _, claim)| claim.decision.verdict == Verdict::Undecided));
    let (results, ran) = run(usize::MAX);
    assert_eq!((ran, results.runs.len()), (21, 25));
    assert!(results.is_complete(), "a rate that is too high for a variant is a result");
    let task = &results.experiments[0].tasks[0];
    for outcome in &task.variants {
        let rate = if outcome.variant.attention.contains("delta") { 1.6e-3 } else { 4e-3 };
        assert_eq!((outcome.rate, outcome.tuning.len(), outcome.failed), (Some(rate), 2, 0), "{}", outcome.variant.name);
        let seeds: Vec<u64> = outcome.numbers.iter().map(|(seed, _)| *seed).collect();
        assert_eq!(seeds, [1, 2, 3], "the seed that chose the rate is not compared");
        assert!(outcome.runs.iter().all(|&run| results.runs[run].rate == Some(rate) && !results.runs[run].tuning));
        assert!(outcome.tuning.iter().all(|&run| results.runs[run].tuning && results.runs[run].seed == 0));
    }
    let verdicts: Vec<Verdict> = task.claims.iter().map(|claim| claim.decision.verdict).collect();
    assert_eq!(verdicts, [Verdict::Reproduced, Verdict::Inconclusive, Verdict::Reproduced]);
    let page = results.document().to_markdown();
    for text in [
        "choice of learning rates by loss on recall tokens of one run with another seed, on other held-out documents",
        "| lr 0.0016 |",
        "head_dim = 18",
        "Known results: ",
    ] {
        assert!(page.contains(text), "the page lacks {text}: {page}");
    }
    assert_eq!(Results::read(folder.path()).unwrap_or_else(|error| panic!("{error}")), results);
}

#[test]
fn a_fixed_number_is_compared_with_the_whole_interval() {
    let below = Rule::Below { one: "a".into(), bound: 0.1 };
    let above = Rule::Above { one: "a".into(), bound: 0.1 };
    for (numbers, of_below, of_above) in [
        ([0.01, 0.02, 0.015], Verdict::Reproduced, Verdict::Contradicted),
        ([0.69, 0.70, 0.695], Verdict::Contradicted, Verdict::Reproduced),
        // The mean is below, and one seed is not.
        ([0.01, 0.02, 0.2], Verdict::Inconclusive, Verdict::Inconclusive),
    ] {
        assert_eq!(decide(&below, &[("a", &numbers)]).verdict, of_below, "{numbers:?}");
        let decision = decide(&above, &[("a", &numbers)]);
        assert_eq!((decision.verdict, decision.margin), (of_above, Some(0.1)), "{numbers:?}");
        assert_eq!(decision.difference.map(|difference| difference.method), Some(Method::OneSample));
    }
    assert!(decide(&below, &[("a", &[0.01])]).note.contains("one seed of a"));
}

/// One seed of Norm has the given outcome; all other runs finish.
struct OneSeed<F>(F);

impl<F: Fn(&Job, &Control) -> Outcome + Sync> Runner for OneSeed<F> {
    fn run(&self, job: &Job, control: &Control) -> termwise_train::Result<Outcome> {
        let (attention, seed) = (job.settings["attention"].as_str().expect("a text"), job.settings["seed"].as_integer());
        Ok(match attention.starts_with("norm") && seed == Some(3) {
            true => (self.0)(job, control),
            false => {
                finished(job, control, Some(if attention.starts_with("linear") { 3.0 } else { 0.1 } + 0.001 * seed.unwrap_or(0) as f64))
            }
        })
    }
}

#[test]
fn a_seed_without_a_finite_metric_at_its_last_step_is_named_and_nothing_is_decided_without_it() {
    let go = |runner: &dyn Runner| {
        let folder = tempfile::tempdir().expect("a folder");
        let options = Options { ids: vec![Id::E1], out: folder.path().into(), threads: 1, ..Options::new(Scale::Minute) };
        let declared = declare(&options).unwrap_or_else(|error| panic!("{error}"));
        reproduce::run(&options, &declared, runner, &AtomicBool::new(false), &mut |_, _| ()).unwrap_or_else(|error| panic!("{error}"))
    };
    let truncated = |job: &Job, control: &Control| {
        let outcome = finished(job, control, Some(0.1));
        let text = std::fs::read_to_string(control.folder.join(METRICS)).expect("metrics");
        std::fs::write(control.folder.join(METRICS), text.lines().next().expect("a line").to_owned() + "\n").expect("a file");
        outcome
    };
    let cases: [(&dyn Runner, &str); 3] = [
        (&OneSeed(|job: &Job, control: &Control| finished(job, control, None)), "diverged: the held-out loss at step 1200 is not finite"),
        (&OneSeed(truncated), "no finite held-out loss at step 1200; the last evaluation was at step 600"),
        // A record without metrics.
        (
            &OneSeed(|_: &Job, _: &Control| Outcome::Finished(Metrics::new())),
            "no finite held-out loss at step 1200; there was no evaluation",
        ),
    ];
    for (runner, reason) in cases {
        let results = go(runner);
        let claims: Vec<_> = results.claims().map(|(_, _, claim)| (claim.decision.verdict, claim.decision.note.as_str())).collect();
        assert_eq!(claims[0], (Verdict::Undecided, &*format!("seed 3 of Norm failed ({reason})")));
        assert_eq!((claims[2].0, claims[2].1), (Verdict::Reproduced, ""), "claims without Norm are decided");
        assert_eq!((results.timing.finished, results.timing.failed, results.is_complete()), (15, 1, false));
        let norm = &results.experiments[0].tasks[0].variants[1];
        assert_eq!((norm.numbers.len(), norm.failed, norm.metric.map(|metric| metric.count)), (3, 1, Some(3)));
        let page = results.document().to_markdown();
        assert!(page.contains(&format!("`norm conv=3` on language, seed 3: {reason}")), "{page}");
    }
}

#[test]
fn claims_are_written_before_the_first_run_and_changes_are_stated() {
    struct Looks<'a>(&'a std::path::Path);
    impl Runner for Looks<'_> {
        fn run(&self, job: &Job, control: &Control) -> termwise_train::Result<Outcome> {
            assert!(self.0.join("claims.json").is_file(), "claims are written first");
            Ok(finished(job, control, Some(0.1)))
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let go = |seeds: usize| {
        let options =
            Options { ids: vec![Id::E1], seeds: Some(seeds), out: folder.path().into(), threads: 1, ..Options::new(Scale::Minute) };
        reproduce::run(&options, &declare(&options)?, &Looks(folder.path()), &AtomicBool::new(false), &mut |_, _| ())
    };
    let file = folder.path().join("claims.json");
    let first = go(2).unwrap_or_else(|error| panic!("{error}"));
    let text = std::fs::read_to_string(&file).expect("claims");
    assert!(first.declarations.len() == 1 && first.declarations[0].is_in_advance() && !first.declarations[0].changed);
    for part in ["Norm coincides with softmax", "\"seeds\"", "\"steps\": 1200", "must lie within", &first.declarations[0].hash] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(
        first.document().to_markdown().contains("were written to claims.json before the first run had ended and have not changed since")
    );
    let again = go(2).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((&again.declarations, std::fs::read_to_string(&file).expect("claims")), (&first.declarations, text));
    // More seeds after the first results: that is another rule.
    let more = go(3).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((more.declarations[0].ended_before, more.declarations[0].changed), (8, true));
    assert!(more.document().to_markdown().contains("were changed after 8 runs in this folder had ended"));
    let edited = std::fs::read_to_string(&file).expect("claims").replace("\"steps\": 1200", "\"steps\": 1100");
    std::fs::write(&file, edited).expect("a file");
    let error = go(3).expect_err("it was edited").to_string();
    assert!(error.contains("claims.json") && error.contains("does not match"), "{error}");
}

#[test]
fn verdicts_of_earlier_versions_are_read() {
    assert_eq!(serde_json::from_str::<Verdict>("\"not_visible\"").expect("a verdict"), Verdict::Inconclusive);
    assert_eq!(serde_json::to_string(&Verdict::Inconclusive).expect("JSON"), "\"inconclusive\"");
}

#[test]
fn a_report_on_run_folders_shows_a_run_that_diverged() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = |step: u64, loss: Option<f64>| {
        let evaluation = loss.map(|loss| Evaluation { tokens: 9, loss, perplexity: 3.0, ..Evaluation::default() });
        serde_json::to_string(&Line::HeldOut { step, time: 0.0, evaluation }).expect("JSON") + "\n"
    };
    for (seed, last) in [(1, Some(1.25)), (2, None)] {
        let run = folder.path().join(seed.to_string());
        std::fs::create_dir(&run).expect("a folder");
        std::fs::write(run.join("settings.toml"), format!("attention = \"softmax\"\nseed = {seed}\nsteps = 10\n")).expect("a file");
        let train = r#"{"kind":"train","step":5,"time":0,"loss":1.75,"lr":0.1,"tokens":1,"tokens_per_second":9.0}"#;
        std::fs::write(run.join(METRICS), format!("{train}\n") + &line(5, Some(1.5)) + &line(10, last)).expect("a file");
    }
    let document = reproduce::of_folders(&[folder.path().into()], folder.path()).unwrap_or_else(|error| panic!("{error}"));
    let page = document.to_markdown();
    let row = page.lines().find(|line| line.starts_with("| softmax |")).unwrap_or_else(|| panic!("{page}"));
    assert!(row.contains("1.250") && row.contains("diverged") && !row.contains("1.500") && !row.contains("1.375"), "{row}");
    // The training loss of the finished run.
    let blocks = document.sections.iter().flat_map(|section| &section.blocks);
    let figures: Vec<_> = blocks
        .filter_map(|block| if let Block::Figure { name, figure, .. } = block { Some((name.as_str(), figure)) } else { None })
        .collect();
    let (_, figure) = figures.iter().find(|(name, _)| *name == "training-loss").expect("a figure of the training loss");
    let lines = figure
        .charts()
        .flat_map(|chart| &chart.layers)
        .filter_map(|layer| if let Layer::Line(line) = layer { Some(&line.points) } else { None });
    assert_eq!(lines.flatten().copied().collect::<Vec<_>>(), [(5.0, 1.75)]);
}

#[test]
fn labels_of_runs_on_different_data_leave_out_the_defaults_of_the_data() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in [("recall", "attention = \"norm conv=3\""), ("text", "data = [\"book.txt\"]\nsteps = 60"), ("fast", "lr = 0.02")] {
        let run = folder.path().join(name);
        std::fs::create_dir(&run).expect("a folder");
        let layer = settings::Layer::new(text.parse().expect("TOML"), "a test").expect("settings");
        std::fs::write(run.join("settings.toml"), Settings::resolve(&[layer]).expect("settings").to_toml()).expect("a file");
        let line = Line::HeldOut {
            step: 10,
            time: 0.0,
            evaluation: Some(Evaluation { tokens: 9, loss: 1.5, perplexity: 3.0, ..Evaluation::default() }),
        };
        std::fs::write(run.join(METRICS), serde_json::to_string(&line).expect("JSON") + "\n").expect("a file");
    }
    let label = |runs: &[&str]| {
        let folders: Vec<_> = runs.iter().map(|run| folder.path().join(run)).collect();
        let page = reproduce::of_folders(&folders, folder.path()).unwrap_or_else(|error| panic!("{error}")).to_markdown();
        let cells = page.lines().filter(|line| line.contains("1.500")).filter_map(|line| line.split('|').nth(1));
        cells.map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()
    };
    // The learning rate, warmup and others follow from the data; the steps of the text were given.
    assert_eq!(label(&["recall", "text"]), ["norm conv=3, data=builtin, steps=800", "softmax, data=book.txt, steps=60"]);
    assert_eq!(label(&["recall", "fast"]), ["norm conv=3, lr=0.01", "softmax conv=3, lr=0.02"]);
}

/// Finishes every run of an experiment on text immediately, with a loss that depends on attention and seed.
struct OnText(Mutex<Vec<(bool, bool)>>);

impl Runner for OnText {
    fn run(&self, job: &Job, control: &Control) -> termwise_train::Result<Outcome> {
        let text = |key: &str| job.settings[key].as_str().expect("a text").to_owned();
        let number = |key: &str| job.settings[key].as_integer().expect("a number");
        let (attention, tuning) = (text("attention"), number("seed") == 0);
        // A third of the steps, on another part of the held-out text.
        assert_eq!((text("valid_range").as_str(), number("steps")), if tuning { ("0..0.3", 10) } else { ("0.3..1", 30) });
        self.0.lock().expect("no run panics").push((attention.contains("conv=4"), tuning));
        let loss = match () {
            () if attention.starts_with("softmax") => 1.0,
            () if attention.contains("0..10") || attention.starts_with("norm") => 1.001,
            () if attention.starts_with("linear") => 2.0,
            () => 1.5,
        };
        let evaluation = Evaluation { tokens: 9, loss: loss + 0.001 * number("seed") as f64, perplexity: 3.0, ..Evaluation::default() };
        let line = Line::HeldOut { step: number("steps") as u64, time: 0.0, evaluation: Some(evaluation) };
        std::fs::create_dir_all(control.folder).expect("a folder");
        std::fs::write(control.folder.join(METRICS), serde_json::to_string(&line).expect("JSON") + "\n").expect("a file");
        Ok(Outcome::Finished(Metrics::from([("held_out.loss".into(), 1.0)])))
    }
}

#[test]
fn experiments_on_text_are_tuned_separately_and_finished_in_order() {
    let folder = tempfile::tempdir().expect("a folder");
    let (data, tokens, out) = (vec!["corpus.txt".to_owned()], Some(30 * 64), folder.path().to_owned());
    let ids = vec![Id::Orders, Id::OrdersConv];
    let options = Options { ids, data, tokens, out, threads: 1, seeds: Some(3), ..Options::new(Scale::Test) };
    let declared = declare(&options).unwrap_or_else(|error| panic!("{error}"));
    let runner = OnText(Mutex::default());
    let results = reproduce::run(&options, &declared, &runner, &AtomicBool::new(false), &mut |_, _| ());
    let results = results.unwrap_or_else(|error| panic!("{error}"));
    // Eight variants of claims: two rates, then three seeds, first without a convolution.
    let order: Vec<(bool, bool)> = runner.0.into_inner().expect("no run panics");
    let expected = [false, true].into_iter().flat_map(|conv| [(true, 16), (false, 24)].map(|(tuning, runs)| vec![(conv, tuning); runs]));
    assert_eq!(order, expected.flatten().collect::<Vec<_>>());
    let verdicts: Vec<Verdict> = results.experiments[0].tasks[0].claims.iter().map(|claim| claim.decision.verdict).collect();
    let [yes, open] = [Verdict::Reproduced, Verdict::Inconclusive];
    assert_eq!(verdicts, [yes, yes, open, open, yes, yes, yes]);
    assert!(results.declarations.iter().all(|declaration| declaration.is_in_advance() && !declaration.changed));
    let page = results.document().to_markdown();
    for text in ["linear attention is 1.000 nats per byte above softmax", "orders 0..10 close 100 %", "Pareto front"] {
        assert!(page.contains(text), "the page lacks {text}");
    }
    assert!(folder.path().join("figures/loss-by-order.svg").is_file() && folder.path().join("figures/loss-by-order-conv.png").is_file());
    assert!(folder.path().join("figures/column/loss-by-order.pdf").is_file());
    // The summary: two sentences and one figure.
    let [Block::Text(answer), Block::Figure { name, figure, .. }, ..] = &results.document().lead[..] else { panic!("{page}") };
    assert_eq!((answer.matches(". ").count(), name.as_str()), (1, "loss-by-order"), "{answer}");
    let chart = figure.charts().next().expect("a chart");
    let lines = chart.layers.iter().filter_map(|layer| if let Layer::Line(line) = layer { Some(&line.points) } else { None });
    assert!(lines.flatten().any(|point| point.0 == 1.0), "order 1 is in the figure");
}

#[test]
fn every_experiment_on_text_is_possible_and_compares_states_of_the_stated_size() {
    let declared = declared(Scale::Text, &[], &["corpus.txt"]);
    assert!(declared.left_out.is_empty());
    let ids: Vec<Id> = declared.experiments.iter().map(|experiment| experiment.id).collect();
    assert_eq!(ids, Id::ALL[12..21]);
    let mut bytes: HashMap<(bool, String), u64> = HashMap::new();
    for experiment in &declared.experiments {
        let names: HashSet<&str> = experiment.variants.iter().map(|variant| variant.name.as_str()).collect();
        assert_eq!(names.len(), experiment.variants.len(), "{:?}", experiment.id);
        for side in experiment.claims.iter().flat_map(|claim| claim.rule.sides()) {
            let variant = experiment.variants.iter().find(|variant| variant.name == side);
            assert!(variant.is_some_and(|variant| variant.seeds.is_none()), "{:?}: {side} has every seed", experiment.id);
        }
        assert!(experiment.tasks.iter().all(|task| task.rates.len() >= 4 && task.metric == Metric::Loss));
    }
    for job in &declared.schedule.plan.jobs {
        let settings = termwise_train::Settings::from_toml(&job.settings.to_string(), "a run").expect("settings");
        let kept = termwise_analysis::plan::kept(&settings.config(257).expect("a model"), 512);
        let conv = job.settings["attention"].as_str().is_some_and(|text| text.contains("conv=4"));
        let name = job.point[1].as_str().expect("a name").to_owned();
        bytes.insert((conv, name), kept.bytes);
    }
    for conv in [false, true] {
        let of = |name: &str| bytes[&(conv, name.to_owned())];
        // Figure 2 has no state that is larger than the cache.
        let state = |experiment: &&reproduce::Experiment| matches!(experiment.id, Id::State | Id::Delta | Id::Families);
        for variant in declared.experiments.iter().filter(state).flat_map(|experiment| &experiment.variants) {
            assert!(of(&variant.name) <= of("softmax"), "{}: {} bytes", variant.name, of(&variant.name));
        }
        assert!(of("window 64") <= of("orders 0..2"), "a window of no more bytes");
        let ratio = of("DeltaNet, d 32") as f64 / of("window 16") as f64;
        assert!((0.8..1.25).contains(&ratio), "about as many bytes: {ratio}");
    }
}

#[test]
fn mqar_is_decided_by_the_seeds_that_solve_it() {
    let declared = declared(Scale::Mini, &["mqar"], &[]);
    let experiment = &declared.experiments[0];
    assert_eq!((experiment.tasks[0].metric, experiment.tasks[0].rates.len()), (Metric::Error, 4));
    assert!(experiment.claims.iter().all(|claim| matches!(claim.rule, Rule::Solves { .. })));
    assert_eq!(declared.schedule.waiting, 5 * experiment.variants.len(), "five seeds of every variant");
    for job in &declared.schedule.plan.jobs {
        assert!(job.settings["language"].as_str().is_some_and(|text| text.contains("held_out_from=1048576")));
    }
    // The protocol of Zoology: one seed, 32 epochs.
    let zoology = all(Scale::Zoology);
    assert_eq!(zoology.schedule.plan.jobs[0].settings["steps"].as_integer(), Some(22_500));
}

/// Finishes every run immediately with two evaluations: the given one at the last step, and a worse one before.
struct Evaluated<F>(F);

impl<F: Fn(&str, u64) -> Evaluation + Sync> Runner for Evaluated<F> {
    fn run(&self, job: &Job, control: &Control) -> termwise_train::Result<Outcome> {
        let number = |key: &str| job.settings[key].as_integer().expect("a number") as u64;
        let last = (self.0)(job.settings["attention"].as_str().expect("a text"), number("seed"));
        let line = |step: u64, evaluation: Evaluation| {
            serde_json::to_string(&Line::HeldOut { step, time: 0.0, evaluation: Some(evaluation) }).expect("JSON") + "\n"
        };
        let lines = line(number("steps") / 2, Evaluation { loss: last.loss + 1.0, ..last }) + &line(number("steps"), last);
        std::fs::create_dir_all(control.folder).expect("a folder");
        std::fs::write(control.folder.join(METRICS), lines).expect("a file");
        Ok(Outcome::Finished(Metrics::from([("held_out.loss".into(), last.loss)])))
    }
}

/// The text and the figure that the report of made-up runs starts with.
fn first_screen(
    options: Options,
    evaluation: impl Fn(&str, u64) -> Evaluation + Sync,
) -> (String, String, termwise_report::Figure, String) {
    let declared = declare(&options).unwrap_or_else(|error| panic!("{error}"));
    let results = reproduce::run(&options, &declared, &Evaluated(evaluation), &AtomicBool::new(false), &mut |_, _| ());
    let document = results.unwrap_or_else(|error| panic!("{error}")).document();
    let [Block::Text(answer), Block::Figure { name, figure, caption }, ..] = &document.lead[..] else {
        panic!("{}", document.to_markdown())
    };
    let elsewhere = document.sections.iter().flat_map(|section| &section.blocks);
    assert!(!elsewhere.into_iter().any(|block| matches!(block, Block::Figure { name: other, .. } if other == name)), "{name} is repeated");
    (answer.clone(), name.clone(), figure.clone(), caption.clone())
}

/// A loss per token of bytes, or of a tokenizer with two bytes per token.
fn loss_on_text(attention: &str, seed: u64) -> Evaluation {
    let loss = match () {
        () if attention.contains("window=16") => 0.9,
        () if attention.starts_with("softmax") => 1.0,
        () if attention.starts_with("linear") => 2.0,
        () => 1.5,
    };
    let loss = loss + 0.001 * seed as f64;
    Evaluation { tokens: 9, loss, perplexity: 3.0, bits_per_byte: Some(loss / 2.0 / std::f64::consts::LN_2), ..Evaluation::default() }
}

#[test]
fn a_report_on_text_starts_with_two_sentences_and_a_figure_whichever_experiment_was_run() {
    let start = |id: Id| {
        let folder = tempfile::tempdir().expect("a folder");
        // The tokenizer is trained on it.
        let corpus = folder.path().join("corpus.txt");
        std::fs::write(&corpus, "The cat sat on the mat. ".repeat(50)).expect("a file");
        let (ids, data, out) = (vec![id], vec![corpus.display().to_string()], folder.path().to_owned());
        let options = Options { ids, data, tokens: Some(30 * 64), out, threads: 1, seeds: Some(3), ..Options::new(Scale::Test) };
        first_screen(options, loss_on_text)
    };
    let (answer, name, ..) = start(Id::StateConv);
    assert_eq!(name, "loss-by-state-conv");
    assert!(answer.contains("window 16 (0.902 nats per byte, ") && answer.contains("against softmax (1.002 nats per byte, "), "{answer}");
    assert!(answer.ends_with("No Taylor state is on the Pareto front of loss and bytes."), "{answer}");
    let (answer, name, figure, caption) = start(Id::Tokenization);
    assert_eq!((name.as_str(), figure.charts().count()), ("gap", 2));
    // A gap of one nat per token of two bytes.
    assert!(answer.contains("minus that of softmax is 0.500 (bytes), 0.500 (BPE-260) nats per byte."), "{answer}");
    assert!(answer.contains("That of orders 0..2 minus that of softmax is 0.250 (bytes), 0.250 (BPE-260) nats per byte."), "{answer}");
    for chart in figure.charts() {
        assert!(chart.y.label.ends_with("nats per byte") && chart.title.ends_with("2.00 bytes per token"), "{chart:?}");
        let lines = chart.layers.iter().filter_map(|layer| if let Layer::Line(line) = layer { Some(line) } else { None });
        let linear = lines.into_iter().find(|line| line.name == "linear ELU").expect("a line");
        assert!(linear.points.len() == 2 && (linear.points[1].1 - 0.5).abs() < 1e-9 && linear.points[1].0 == 1920.0, "{linear:?}");
    }
    assert!(caption.contains("over 3 seeds") && caption.contains("only the last has the final learning rate"), "{caption}");
}

#[test]
fn a_report_on_mqar_starts_with_the_seeds_that_solve_it_and_errors_by_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = Options { ids: vec![Id::Mqar], out: folder.path().into(), threads: 1, ..Options::new(Scale::Mini) };
    let (answer, name, figure, caption) = first_screen(options, |attention, seed| {
        let solves = attention.starts_with("softmax conv") || attention.starts_with("deltanet") && seed % 2 == 1;
        Evaluation { tokens: 9, loss: 1.0, perplexity: 3.0, accuracy: Some(if solves { 0.99 } else { 0.2 }), ..Evaluation::default() }
    });
    assert!(
        answer.contains("is solved by every seed of 1 of 9 variants: softmax. None of them has less state than the KV cache"),
        "{answer}"
    );
    assert_eq!((name.as_str(), figure.charts().count()), ("errors-by-state", 2));
    assert!(caption.contains("over 5 seeds") && caption.contains("Fisher's exact two-sided test"), "{caption}");
    let solved = figure.charts().nth(1).expect("a chart");
    let points = solved.layers.iter().filter_map(|layer| if let Layer::Points(points) = layer { Some(points) } else { None });
    let shares: Vec<(&str, f64)> = points.flat_map(|points| points.points.iter().map(|point| (points.name.as_str(), point.y))).collect();
    assert!(shares.contains(&("softmax, full cache", 1.0)) && shares.contains(&("DeltaNet", 0.6)), "{shares:?}");
    assert!(shares.contains(&("Taylor orders 0..p", 0.0)), "{shares:?}");
}

#[test]
fn holm_corrects_within_each_experiment() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results/text/results.json");
    let results = Results::read(&file).unwrap_or_else(|error| panic!("{error}"));
    let tested = results.distinct().len() as f64;
    let (_, _, claim) = results.claims().find(|(_, _, claim)| claim.text.starts_with("full softmax is better")).expect("a claim");
    // It has the largest p-value of its experiment, so the correction leaves it as it is; over both experiments it would not.
    let p = claim.decision.p.expect("a p-value");
    assert_eq!((claim.decision.verdict, claim.decision.corrected), (Verdict::Contradicted, Some(Verdict::Contradicted)));
    let smaller = results.claims().filter(|(_, _, other)| other.decision.p.is_some_and(|other| other < p)).count() as f64;
    assert!(p <= 0.05 && p * (tested - smaller) > 0.05, "p = {p}, {smaller} of {tested} are smaller");
}

fn all(scale: Scale) -> Declared {
    declared(scale, &[], &[])
}
