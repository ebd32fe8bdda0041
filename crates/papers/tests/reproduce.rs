//! Rules on made-up numbers, and declarations at every scale.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use termwise_papers::Error;
use termwise_papers::reproduce::{
    self, Decision, Declared, Id, Method, Metric, Options, Results, Rule, Scale, Schedule, Side, Verdict, declare,
};
use termwise_report::Documented;
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
        let found = numbers.iter().find(|entry| entry.0 == name);
        Side { numbers: found.map_or(Vec::new(), |entry| (1..).zip(entry.1.iter().copied()).collect()), failed: 0 }
    })
}

#[test]
fn lower_is_decided_all_three_ways() {
    for (a, b, expected) in [
        ([1.0, 1.1, 0.9], [2.0, 2.1, 1.9], Verdict::Reproduced),
        ([2.0, 2.1, 1.9], [1.0, 1.1, 0.9], Verdict::Contradicted),
        // The means differ by 0.5, one deviation is 1.
        ([1.0, 2.0, 3.0], [2.4, 2.5, 2.6], Verdict::NotVisible),
        // Far outside the spread and still below the least that counts.
        ([1.0, 1.0001, 0.9999], [1.03, 1.0301, 1.0299], Verdict::NotVisible),
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
    assert_eq!((decision.verdict, difference.method), (Verdict::NotVisible, Method::Paired));
    // scipy.stats.ttest_rel
    assert!((difference.half_interval - 3.776023604548606).abs() < 1e-9);
    // One seed is missing on one side: Welch's.
    let decision = decide(&lower(), &[("a", &gate[..2]), ("b", &relu)]);
    assert_eq!((decision.verdict, decision.difference.expect("one").method), (Verdict::NotVisible, Method::Welch));
}

#[test]
fn what_seeds_share_does_not_hide_a_difference() {
    // Seeds move both sides alike by far more than the sides differ; still the least that counts is above the deviations.
    let (a, b) = ([1.0, 1.1, 1.2], [1.3, 1.41, 1.49]);
    let difference = decide(&lower(), &[("a", &a), ("b", &b)]).difference.expect("one");
    assert!(difference.half_interval < 0.03 && difference.freedom == 2.0, "{difference:?}");
}

#[test]
fn a_difference_within_the_spread_never_counts() {
    // Many seeds make the doubt small, and the spread stays.
    let (a, b): (Vec<f64>, Vec<f64>) = (0..200).map(|i| (f64::from(i % 2), f64::from(i % 2) + 0.4)).unzip();
    let decision = decide(&lower(), &[("a", &a), ("b", &b)]);
    let difference = decision.difference.expect("one");
    assert!(difference.value > difference.half_interval && difference.value < difference.deviation);
    assert_eq!(decision.verdict, Verdict::NotVisible);
}

#[test]
fn equal_is_decided_all_three_ways() {
    let ends: [(&str, &[f64]); 2] = [("low", &[1.0, 1.01, 0.99]), ("high", &[3.0, 3.01, 2.99])];
    for (a, b, expected) in [
        ([1.0, 1.01, 0.99], [1.05, 1.06, 1.04], Verdict::Reproduced),
        ([1.0, 1.01, 0.99], [1.5, 1.51, 1.49], Verdict::Contradicted),
        ([1.5, 1.51, 1.49], [1.0, 1.01, 0.99], Verdict::Contradicted),
        ([1.0, 1.4, 0.6], [1.05, 1.06, 1.04], Verdict::NotVisible),
        // Within the margin of 0.2, but not with its interval.
        ([1.0, 1.04, 0.96], [1.17, 1.18, 1.16], Verdict::NotVisible),
    ] {
        let decision = decide(&equal(), &[("a", &a), ("b", &b), ends[0], ends[1]]);
        assert_eq!(decision.verdict, expected, "{a:?} {b:?}");
        assert!((decision.margin.expect("a margin") - 0.2).abs() < 1e-12);
    }
    let flat: [(&str, &[f64]); 2] = [("low", &[1.0, 2.0, 3.0]), ("high", &[2.0, 2.5, 2.2])];
    let decision = decide(&equal(), &[("a", &[1.0, 1.0]), ("b", &[1.0, 1.0]), flat[0], flat[1]]);
    assert_eq!((decision.verdict, decision.margin), (Verdict::NotVisible, None));
    assert!(decision.note.contains("does not itself count"));
}

#[test]
fn one_seed_or_none_is_no_verdict() {
    for (a, note) in [(&[1.0][..], "one seed of a"), (&[][..], "no finished run of a")] {
        let decision = decide(&lower(), &[("a", a), ("b", &[9.0, 9.0])]);
        assert_eq!((decision.verdict, decision.difference), (Verdict::NotVisible, None));
        assert!(decision.note.contains(note), "{}", decision.note);
    }
    let ends: [(&str, &[f64]); 3] = [("a", &[1.0, 1.0]), ("b", &[1.0, 1.0]), ("low", &[1.0, 1.0])];
    assert!(decide(&equal(), &ends).note.contains("no finished run of high"));
}

#[test]
fn a_failed_run_is_no_verdict() {
    let side = |name: &str| {
        let mean = if name == "a" { 1.0 } else { 9.0 };
        Side { numbers: vec![(1, mean), (2, mean)], failed: usize::from(name == "b") }
    };
    let decision = lower().decide(&side);
    assert_eq!((decision.verdict, decision.note.as_str()), (Verdict::NotVisible, "1 of 3 runs of b failed"));
}

fn declared(scale: Scale, words: &[&str], data: &[&str]) -> Declared {
    let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
    let data = data.iter().map(|file| file.to_string()).collect();
    let ids = Id::parse(&words).unwrap_or_else(|error| panic!("{error}"));
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
            assert_eq!(asked.len() + declared.theorems.len() + declared.left_out.len(), Id::ALL.len());
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
    // A command that is broken off has something of every variant.
    let seeds: Vec<_> = schedule.plan.jobs.iter().map(|job| job.settings["seed"].as_integer()).collect();
    assert!(seeds.is_sorted());
}

#[test]
fn text_comes_with_the_laptop_and_the_paper() {
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
    let error = Id::parse(&["e1".into(), "seperation".into()]).expect_err("a typo").to_string();
    assert!(error.contains("did you mean `separation`?"), "{error}");
    assert_eq!(Id::parse(&["e7".into(), "E1".into(), "e7".into()]).expect("names"), [Id::E1, Id::E7]);
    assert_eq!(Id::parse(&[]).expect("all"), Id::ALL);
}

/// Ends every run at once with a loss that the attention decides, and counts runs.
struct MadeUp {
    ran: Mutex<Vec<String>>,
    /// Runs until the command is asked to stop.
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
        let loss = loss + 0.001 * seed;
        Ok(Outcome::Finished(Metrics::from([("held_out.loss".into(), 1.0 + loss), ("held_out.recall.loss".into(), loss)])))
    }
}

fn run(options: &Options, most: usize) -> Result<(Results, Vec<String>), Error> {
    let runner = MadeUp { ran: Mutex::default(), most };
    let results = reproduce::run(options, &declare(options)?, &runner, &AtomicBool::new(false), &mut |_, _| ())?;
    Ok((results, runner.ran.into_inner().expect("no run panics")))
}

#[test]
fn a_command_that_is_broken_off_goes_on_and_decides_by_what_is_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("results");
    let options = Options { ids: vec![Id::E1], out: out.clone(), threads: 1, ..Options::new(Scale::Minute) };
    let (first, ran) = run(&options, 5).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((ran.len(), first.timing.finished, first.timing.runs), (5, 4, 16));
    assert!(first.claims().all(|(_, _, claim)| claim.decision.verdict == Verdict::NotVisible));
    let (second, again) = run(&options, usize::MAX).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(again.len(), 11);
    assert!(again.iter().all(|hash| !ran.contains(hash)));
    assert_eq!((second.timing.finished, second.timing.failed), (12, 4));
    let verdicts: Vec<(Verdict, &str)> =
        second.claims().map(|(_, _, claim)| (claim.decision.verdict, claim.decision.note.as_str())).collect();
    assert_eq!(verdicts[0], (Verdict::Reproduced, ""));
    assert_eq!(verdicts[1], (Verdict::NotVisible, "no finished run of Gate"));
    assert_eq!(verdicts[2], (Verdict::Reproduced, ""));
    assert_eq!(Results::read(&out).unwrap_or_else(|error| panic!("{error}")), second);
    let gate = &second.experiments[0].tasks[0].variants[2];
    assert_eq!((gate.variant.name.as_str(), gate.metric), ("Gate", None));
    assert!(gate.runs.iter().all(|&run| second.runs[run].status == "failed" && second.runs[run].note.contains("not finite")));

    let page = std::fs::read_to_string(out.join("index.html")).expect("a page");
    for text in [
        "Norm coincides with softmax",
        "no finished run of Gate",
        "Rule: the 95 % interval of Norm − softmax must lie within ±10 % of linear ELU − softmax",
        "(paired by seed, t(3))",
        &second.runs[0].folder,
    ] {
        assert!(page.contains(text), "the page lacks {text}");
    }
    assert!(out.join("figures/e1-dots.svg").is_file() && out.join("tables/e1-table.csv").is_file());
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
    let [reproduced, not_visible] = [Verdict::Reproduced, Verdict::NotVisible].map(count);
    assert!(reproduced > 0 && not_visible > 0 && top.contains(&format!("| E1 | {reproduced} | {not_visible} | 0 |")), "{top}");
    assert!(!top.contains("*reproduced*") && top.contains("*not visible at this scale*: **E1** (language) Gate"), "{top}");
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
    assert_eq!((results.claims().count(), results.distinct().len()), (19, 16));
    let counted: usize =
        [Verdict::Reproduced, Verdict::NotVisible, Verdict::Contradicted].map(|verdict| results.count(verdict)).iter().sum();
    assert_eq!(counted, 16);
}

#[test]
fn results_of_the_first_format_are_decided_anew() {
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
    let [results, second_half] = ["laptop", "second-half"].map(|name| {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results").join(name);
        let results = Results::read(&folder.join("results.json")).unwrap_or_else(|error| panic!("{error}"));
        let made = reproduce::page(&results, Some(&folder)).to_markdown_without_figures();
        let there = std::fs::read_to_string(folder.join("results.md")).expect("the page");
        assert!(made == there, "make it again: termwise report docs/results/{name}/results.json --markdown docs/results/{name}/results.md");
        results
    });
    // Nothing is left open, and nothing was run that the program does not declare.
    assert!(second_half.is_complete());
    let ids: Vec<Id> = second_half.experiments.iter().map(|outcome| outcome.id).collect();
    let declared = declare(&Options { ids, ..Options::new(Scale::Laptop) }).unwrap_or_else(|error| panic!("{error}"));
    let tuned = second_half.runs.iter().filter(|run| run.tuning).map(|run| (run.attention.as_str(), run.rate));
    let jobs =
        declared.schedule.plan.jobs.iter().map(|job| (job.settings["attention"].as_str().expect("a text"), job.settings["lr"].as_float()));
    assert_eq!(tuned.collect::<Vec<_>>(), jobs.collect::<Vec<_>>());
    // States are of one size, as nearly as whole dimensions and windows allow.
    for outcome in &second_half.experiments {
        let share = if outcome.id == Id::Distance { 1.02 } else { 1.17 };
        let variants = &outcome.tasks[0].variants;
        let numbers: Vec<u64> = variants.iter().filter(|one| one.constant_state).filter_map(|one| one.state_numbers).collect();
        let (least, most) = (numbers.iter().min().expect("a state"), numbers.iter().max().expect("a state"));
        assert!(numbers.len() + 1 == variants.len() && *most as f64 <= share * *least as f64, "{:?}: {numbers:?}", outcome.id);
    }
    // Of the verdicts that pooled variances gave, this one changes.
    let gate =
        results.distinct().into_iter().find(|(_, task, claim)| *task == Some("language") && claim.text.contains("under the same gate"));
    let (id, _, claim) = gate.expect("the claim");
    assert_eq!((id, &claim.also[..], claim.decision.verdict), (Id::E3, &[Id::E5][..], Verdict::NotVisible));
    assert_eq!((results.claims().count(), results.distinct().len()), (63, 57));
}

/// A loss that a variant has least of at a learning rate of its own. One rate is too high for one variant.
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
        let loss = (if attention.contains("delta") { 0.1 } else { 1.0 }) + 0.001 * seed + (rate - best).abs();
        Ok(Outcome::Finished(Metrics::from([("held_out.loss".into(), 1.0 + loss), ("held_out.recall.loss".into(), loss)])))
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
            // What is told is told of the plan that it belongs to.
            if let Event::Ended(index, record) = event {
                assert_eq!(plan.jobs[*index].hash, record.hash);
            }
        });
        (results.unwrap_or_else(|error| panic!("{error}")), runner.0.ran.into_inner().expect("no run panics").len())
    };
    // Broken off while rates are chosen: two variants have theirs, so that their three runs each are known; nothing is compared, and nobody says that
    // it is done.
    let (first, ran) = run(4);
    assert_eq!((ran, first.runs.len(), first.is_complete()), (4, 10 + 2 * 3, false));
    assert!(first.claims().all(|(_, _, claim)| claim.decision.note.contains("no finished run")));
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
    assert_eq!(verdicts, [Verdict::Reproduced, Verdict::NotVisible, Verdict::Reproduced]);
    let page = results.document().to_markdown();
    for text in ["how each learning rate was chosen", "| lr 0.0016 |", "head_dim = 18", "Known before: "] {
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
        ([0.01, 0.02, 0.2], Verdict::NotVisible, Verdict::NotVisible),
    ] {
        assert_eq!(decide(&below, &[("a", &numbers)]).verdict, of_below, "{numbers:?}");
        let decision = decide(&above, &[("a", &numbers)]);
        assert_eq!((decision.verdict, decision.margin), (of_above, Some(0.1)), "{numbers:?}");
        assert_eq!(decision.difference.map(|difference| difference.method), Some(Method::OneSample));
    }
    assert!(decide(&below, &[("a", &[0.01])]).note.contains("one seed of a"));
}
