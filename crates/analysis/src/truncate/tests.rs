use std::sync::atomic::AtomicBool;

use super::text::Split;
use super::*;
use termwise_attention::{Kernel, Variant};
use termwise_base::rng::Rng;
use termwise_data::{Rows, Source};
use termwise_model::Config;
use termwise_train::eval::{Windows, evaluate, evaluate_with};

/// Batches of tokens with some structure.
#[derive(Debug)]
struct Words {
    batches: u64,
}

impl Source for Words {
    fn vocabulary(&self) -> usize {
        24
    }
    fn fingerprint(&self) -> String {
        format!("words {}", self.batches)
    }
    fn train(&self, _: u64, _: u64, _: usize, _: usize, _: &mut Rows) -> termwise_data::Result<()> {
        unreachable!("nothing is trained here")
    }
    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> termwise_data::Result<bool> {
        out.reset(rows, time);
        if index >= self.batches {
            return Ok(false);
        }
        for row in 0..rows {
            let mut rng = Rng::new(index * 1000 + row as u64);
            let mut token = rng.below(24);
            for t in 0..time {
                out.ids[row * time + t] = token as u32;
                token = if rng.chance(0.7) { (token * 5 + 1) % 24 } else { rng.below(24) };
                out.labels[row * time + t] = token as i32;
            }
        }
        out.bytes = (rows * time) as u64;
        Ok(true)
    }
}

const WINDOWS: Windows = Windows { batch: 2, length: 24, stride: 24 };

/// An untrained model with scores of this spread.
fn model(spread: f64) -> Model {
    let text = format!(
        r#"{{"model_type": "llama", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": false, "initializer_range": {spread}}}"#
    );
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("config.json"), text).expect("a file");
    Model::fresh(Config::read(folder.path()).expect("a config"), 3).expect("a model")
}

fn options() -> Options {
    Options {
        orders: vec![4, 2],
        coefficients: Choice::ALL.to_vec(),
        map: None,
        draw_map: true,
        budget: Some(Budget { share: 0.01 }),
        context: None,
        queries: 400,
        sequential: false,
        journal: None,
        collective: std::sync::Arc::new(termwise_train::collective::Alone),
    }
}

fn texts(words: &Words) -> Texts<'_> {
    Texts::split(words, None, WINDOWS, 0).expect("enough text")
}

fn go(model: Model, words: &Words, options: &Options) -> Outcome {
    run(model, &texts(words), options, &AtomicBool::new(false), Report::default(), &mut |_, _| {}).expect("an outcome")
}

#[test]
fn text_is_split_into_three_disjoint_parts() {
    for batches in [3, 4, 7, 16, 33] {
        let words = Words { batches };
        let texts = texts(&words);
        let counts = [&texts.calibration, &texts.tuning, &texts.evaluation].map(Split::batches);
        assert_eq!(counts.iter().sum::<u64>(), batches);
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
        let (mut whole, mut part) = (Rows::default(), Rows::default());
        words.held_out(counts[0] + counts[1], 2, 24, &mut whole).expect("a batch");
        assert!(texts.evaluation.held_out(0, 2, 24, &mut part).expect("a batch"));
        assert_eq!(whole, part);
        assert!(!texts.calibration.held_out(counts[0], 2, 24, &mut part).expect("no batch"));
        let limited = Texts::split(&words, None, WINDOWS, 3).expect("enough text");
        assert_eq!(limited.evaluation.batches(), 1);
        let other = Words { batches: 5 };
        let own = Texts::split(&words, Some(&other), WINDOWS, 0).expect("enough text");
        assert_eq!((own.evaluation.batches(), own.calibration.batches() + own.tuning.batches()), (batches, 5));
    }
    assert!(Texts::split(&Words { batches: 2 }, None, WINDOWS, 0).is_err_and(|error| error.to_string().contains("at least 3")));
}

/// Every loss equals that of `eval` for the same model on the same text.
#[test]
fn losses_match_eval() {
    let words = Words { batches: 12 };
    let texts = texts(&words);
    let plain = model(0.4);
    let outcome = go(plain.clone(), &words, &options());
    let eval = |model: &Model| evaluate(model, &texts.evaluation, WINDOWS, 0).expect("a loss").loss;
    assert_eq!(outcome.report.uncut_loss(), Some(eval(&plain)));
    for curve in &outcome.report.curves {
        assert_eq!(curve.points.iter().map(|point| point.order).collect::<Vec<_>>(), [2, 4]);
        for point in &curve.points {
            let map = outcome.calibration.cut_layers(&plain.config, 0..2, point.order, curve.coefficients).expect("a map");
            let cut = plain.with_attention(map).expect("a model");
            assert_eq!(point.measured.loss, Some(eval(&cut)), "{} {}", curve.coefficients, point.order);
            assert!(cut.config.heads(1).iter().all(|variant| matches!(variant.near.kernel, Kernel::Taylor(_))));
        }
    }
    let taylor = termwise_model::decode::truncate_attention(&plain.config, 4).expect("a map");
    let expected = eval(&plain.with_attention(taylor).expect("a model"));
    assert_eq!(outcome.report.curve(Choice::Taylor).and_then(|curve| curve.points[1].measured.loss), Some(expected));
    let map = outcome.report.map.as_ref().expect("a map");
    let one = outcome.calibration.cut_layers(&plain.config, [1], 2, map.coefficients).expect("a map");
    assert_eq!(map.layers[1][0].loss, Some(eval(&plain.with_attention(one).expect("a model"))));
    assert_eq!(outcome.model.config.attention, plain.config.attention, "the model is unchanged");
    assert!(outcome.report.finished);
}

#[test]
fn a_plan_meets_its_budget_and_counts_its_bytes() {
    let words = Words { batches: 12 };
    let texts = texts(&words);
    for share in [0.0, 0.002, 0.05] {
        let outcome = go(model(0.5), &words, &Options { budget: Some(Budget { share }), draw_map: false, ..options() });
        let plan = outcome.report.plan.as_ref().expect("a plan");
        assert!(plan.tuning_loss <= plan.tuning_uncut * plan.budget, "{plan:?}");
        assert_eq!(plan.bytes_before - plan.bytes_after, plan.cuts.iter().map(|cut| cut.saved).sum::<u64>());
        let Some(map) = &outcome.planned else {
            assert!(plan.cuts.is_empty());
            continue;
        };
        let cut = outcome.model.with_attention(map.clone()).expect("a model");
        assert_eq!(plan.tuning_loss, evaluate(&cut, &texts.tuning, WINDOWS, 0).expect("a loss").loss);
        let held_out = evaluate(&cut, &texts.evaluation, WINDOWS, 0).expect("a loss").loss;
        assert_eq!(plan.measured.as_ref().and_then(|found| found.loss), Some(held_out));
        assert_eq!(plan.bytes_after, Heads::of(&cut.config).model(&cut.config, outcome.report.context));
        let units: usize = (0..2)
            .flat_map(|layer| cut.config.heads(layer).chunks(2).map(|unit| unit.to_vec()).collect::<Vec<_>>())
            .filter(|unit| is_cut(unit))
            .count();
        assert_eq!(units, plan.cuts.len(), "whole KV heads are truncated");
    }
    // The state of order 8 has 495 rows of 17 numbers padded to 17, a cache 128 tokens of 20: it is not proposed, and order 2 is.
    let wide = Options { orders: vec![2, 8], context: Some(8), budget: Some(Budget { share: 10.0 }), draw_map: false, ..options() };
    let outcome = go(model(0.5), &words, &wide);
    let plan = outcome.report.plan.as_ref().expect("a plan");
    assert_eq!((plan.too_large, plan.cuts.len(), plan.units), (4, 4, 4));
    assert!(plan.cuts.iter().all(|cut| cut.order == 2 && cut.saved == 128 * 20 * 4 - 15 * 17 * 4));
    let outcome = go(model(0.5), &words, &Options { orders: vec![8], ..wide });
    assert!(outcome.planned.is_none() && outcome.report.plan.is_some_and(|plan| plan.cuts.is_empty() && plan.too_large == 4));
}

fn is_cut(unit: &[Variant]) -> bool {
    let cut = unit.iter().filter(|variant| matches!(variant.near.kernel, Kernel::Taylor(_))).count();
    assert!(cut == 0 || cut == unit.len());
    cut > 0
}

/// For widely spread scores a fit is far better than the Taylor series, per head and overall.
#[test]
fn calibration_is_never_worse_on_validation_text() {
    let words = Words { batches: 16 };
    let outcome = go(model(1.0), &words, &Options { orders: vec![2, 4, 8], draw_map: false, budget: None, ..options() });
    for head in outcome.calibration.heads.iter().flatten() {
        for fit in &head.orders {
            assert!(fit.errors.iter().all(|error| fit.error() <= *error) && fit.error().is_finite(), "{fit:?}");
            // Weights are positive, so outputs are means of values, and no error can be far above 1.
            assert!(fit.errors.iter().all(|error| *error < 10.0), "{fit:?}");
        }
    }
    for kept in &outcome.report.kept {
        assert_eq!(kept.fitted + kept.taylor, 8);
        assert!(kept.kept_error < kept.taylor_error, "{kept:?}");
    }
    let sequential = go(model(1.0), &words, &Options { orders: vec![2, 4], sequential: true, draw_map: false, budget: None, ..options() });
    assert_eq!(sequential.calibration.cuttable(), 8);
    assert!(sequential.calibration.heads.iter().flatten().all(|head| head.orders.len() == 2));
}

#[test]
fn a_nan_or_infinite_loss_is_a_point() {
    let words = Words { batches: 6 };
    let wild = Options { orders: vec![2, 60], coefficients: vec![Choice::Taylor], draw_map: false, budget: None, ..options() };
    // Scores of ten million, whose powers overflow even float64.
    let outcome = go(model(1000.0), &words, &wild);
    let points = &outcome.report.curves[0].points;
    assert!(points[0].measured.loss.is_some());
    assert!(points[1].measured.loss.is_none() && points[1].measured.problem.is_some(), "{:?}", points[1]);
}

#[test]
fn an_interrupted_run_resumes_from_its_journal() {
    let folder = tempfile::tempdir().expect("a folder");
    let journal = folder.path().join("losses.jsonl");
    let lines = || std::fs::read_to_string(&journal).expect("a journal").lines().count();
    let words = Words { batches: 8 };
    let options = Options { journal: Some(journal.clone()), ..options() };
    let stop = AtomicBool::new(false);
    let mut reports = 0;
    let outcome = run(model(0.5), &texts(&words), &options, &stop, Report::default(), &mut |report, _| {
        reports += 1;
        stop.store(report.curves.iter().any(|curve| curve.points.len() == 1), std::sync::atomic::Ordering::Relaxed);
    });
    let partial = outcome.expect("a partial result").report;
    assert!(!partial.finished && partial.uncut.is_some() && reports > 3);
    assert!(partial.curves.iter().map(|curve| curve.points.len()).sum::<usize>() < 6);
    let before = lines();
    let whole = go(model(0.5), &words, &options).report;
    let after = lines();
    assert!(whole.finished && after > before && before >= 2);
    assert_eq!(go(model(0.5), &words, &options).report, whole, "the third run measures nothing");
    assert_eq!(lines(), after);
    let other = go(model(0.6), &words, &options).report;
    let expected = evaluate(&model(0.6), &texts(&words).evaluation, WINDOWS, 0).expect("a loss").loss;
    assert_eq!(other.uncut_loss(), Some(expected), "another model is another measurement");
}

#[test]
fn a_saved_model_has_the_same_loss() {
    let words = Words { batches: 8 };
    let texts = texts(&words);
    let mut outcome = go(model(0.6), &words, &Options { draw_map: false, budget: None, ..options() });
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    std::fs::create_dir(&from).expect("a folder");
    std::fs::write(from.join("tokenizer.json"), "{}").expect("a file");
    let map = outcome.calibration.cut_layers(&outcome.model.config, 0..2, 4, Choice::Calibrated).expect("a map");
    save(&mut outcome.model, &map, &from, &to, false).expect("saved");
    let read = Model::read(&to).expect("a model");
    assert_eq!(read.config.attention.heads(1, 4), map.heads(1, 4));
    let loss = evaluate(&read, &texts.evaluation, WINDOWS, 0).expect("a loss").loss;
    assert_eq!(outcome.report.curve(Choice::Calibrated).and_then(|curve| curve.points[1].measured.loss), Some(loss));
    assert!(to.join("tokenizer.json").is_file());
    assert!(save(&mut outcome.model, &map, &to, &to, true).is_err());
    // Another model is replaced only on request.
    let held = save(&mut outcome.model, &map, &from, &to, false).expect_err("a model is there").to_string();
    assert!(held.contains("contains a model") && held.contains("--overwrite"), "{held}");
    std::fs::write(to.join("conversion.json"), "{}").expect("a record of a model that is replaced");
    save(&mut outcome.model, &map, &from, &to, true).expect("replaced");
    assert!(!to.join("conversion.json").exists());
    // The training settings are next to the weights of a saved model: it is not a run.
    std::fs::write(to.join("settings.toml"), "").expect("a file");
    save(&mut outcome.model, &map, &from, &to, true).expect("replaced");
    // Directories of runs and checkpoints are never written to, other non-empty directories only on request.
    for (name, file, always) in [
        ("a", "settings.toml", true),
        ("b", "checkpoints/x", true),
        ("c", "metrics.jsonl", true),
        ("d", "manifest.json", true),
        ("e", "notes", false),
    ] {
        let place = folder.path().join(name);
        std::fs::create_dir_all(place.join(file).parent().expect("a folder")).expect("a folder");
        std::fs::write(place.join(file), "kept").expect("a file");
        let refused = |overwrite: bool| super::check_place(&from, &place, overwrite).err().map(|error| error.to_string());
        assert!(
            refused(false).is_some_and(|error| error.contains("--overwrite") != always && error.contains(name)),
            "{file}: {:?}",
            refused(false)
        );
        assert_eq!(refused(true).is_some(), always, "{file}");
    }
    let chunked = termwise_model::SessionOptions::default().mode(termwise_attention::Mode::Chunk(Some(8)));
    let (in_chunks, _) = evaluate_with(&read, &texts.evaluation, WINDOWS, 0, chunked, &termwise_train::collective::Alone).expect("a loss");
    assert!((in_chunks.loss - loss).abs() < 1e-3, "{} {loss}", in_chunks.loss);
}

/// Ranks, here threads, share the evaluation; the result does not depend on their number.
#[test]
fn results_do_not_depend_on_the_number_of_ranks() {
    use termwise_train::collective::threads::team;
    let words = Words { batches: 9 };
    let folder = tempfile::tempdir().expect("a folder");
    let journal = |name: &str| Some(folder.path().join(name));
    let alone = go(model(0.6), &words, &Options { journal: journal("alone"), ..options() });
    let report = |outcome: &Outcome| serde_json::to_string(&outcome.report).expect("JSON");
    for ranks in [2, 3] {
        let team: Vec<_> = team(ranks).into_iter().map(std::sync::Arc::new).collect();
        let found: Vec<String> = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for rank in &team {
                let own = Options { collective: rank.clone(), journal: journal("shared"), ..options() };
                let words = &words;
                threads.push(scope.spawn(move || report(&go(model(0.6), words, &own))));
            }
            threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
        });
        assert!(found.iter().all(|found| *found == report(&alone)), "{ranks} ranks");
    }
    let lines = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect("a journal").lines().count();
    assert_eq!(lines("shared"), lines("alone"), "only rank 0 writes, and all ranks read it");
}
