//! Conversions of a small model: unchanged outputs, equal results for whole texts and single tokens, bytes of the buffers, resumption.

use std::sync::atomic::AtomicBool;

use termwise_analysis::kv::Text;
use termwise_analysis::kv::assemble::{Bench, assemble};
use termwise_analysis::kv::convert::{Budget, Conversion, Granularity, Measured, Prepared, bytes_of, choose};
use termwise_analysis::kv::frontier::{self, ALL, Frontier, METHODS, Method, Options};
use termwise_analysis::kv::kinds::{Family, Kind, key_bytes};
use termwise_analysis::kv::meter::{Reference, whole};
use termwise_model::SessionOptions;
use termwise_model::decode::{Decoder, DecoderOptions};

use crate::support::{LENGTH, contexts, converted, families, model, prepared, promised, texts};

#[test]
fn a_memory_of_the_whole_context_equals_the_original() {
    let model = model();
    let reference = Reference::new(&model, &contexts(1, 2)[0]).expect("a reference");
    for family in families().into_iter().filter(|family| family.bits == [16, 16]) {
        let kind = family.of(2 * LENGTH);
        let all = whole(&reference.compare(&converted(&model, kind)).expect("a comparison"));
        // Up to the rounding to bfloat16.
        assert!(all.rise().abs() < 5e-3 && all.mean_kl().abs() < 1e-4, "{kind:?}: {} {}", all.rise(), all.mean_kl());
        // And a short one is not.
        let short = whole(&reference.compare(&converted(&model, family.of(4))).expect("a comparison"));
        assert!(short.mean_kl() > 1e-4, "{kind:?}: {}", short.mean_kl());
    }
    let untouched = assemble(&model, &[None; 4]).expect("a model");
    assert_eq!(whole(&reference.compare(&untouched).expect("a comparison")).rise(), 0.0);
}

#[test]
fn a_bench_keeps_nothing_of_the_previous_model() {
    let model = model();
    let all: Vec<Kind> = families().into_iter().map(|family| family.of(12)).collect();
    let mut bench = Bench::new(&model);
    for kind in all.iter().chain(all.iter().rev()) {
        let fresh = converted(&model, *kind);
        let found = bench.assemble(&[Some(*kind); 4]).expect("a model");
        assert_eq!((&found.config.attention, found.params.values()), (&fresh.config.attention, fresh.params.values()), "{kind:?}");
    }
}

#[test]
fn decoding_matches_full_sequences_within_the_stated_bytes() {
    let model = model();
    let ids = &contexts(1, 3)[0];
    let v = 61;
    for kind in families().into_iter().flat_map(|family| [family.of(7), family.of(40)]) {
        let converted = converted(&model, kind);
        let mut session = converted.session(1, LENGTH, SessionOptions::default().forward_only(true)).expect("a session");
        session.run(&converted.params, ids, None).expect("a pass");
        let mut logits = vec![0.0f32; LENGTH * v];
        session.logits(&converted.params, 0..LENGTH, &mut logits).expect("logits");
        let mut decoder = Decoder::new(converted, DecoderOptions::default().prefill_chunk(32)).expect("a decoder");
        let mut differences = Vec::new();
        let mut read = |decoder: &mut Decoder, from: usize, to: usize| {
            decoder.prefill(0, &ids[from..to]).expect("tokens");
            let found = decoder.logits(0).expect("logits");
            let expected = &logits[(to - 1) * v..to * v];
            let size = expected.iter().fold(0.0f32, |size, x| size.max(x.abs()));
            differences.push(found.iter().zip(expected).fold(0.0f32, |worst, (a, b)| worst.max((a - b).abs() / size)));
        };
        // A prompt in windows, then token by token.
        read(&mut decoder, 0, 75);
        let after_prompt = decoder.state_bytes(0).expect("a row");
        for t in 75..LENGTH {
            read(&mut decoder, t, t + 1);
        }
        differences.sort_by(f32::total_cmp);
        let (middle, worst) = (differences[differences.len() / 2], differences[differences.len() - 1]);
        // Rounding turns a code now and then into the next one; the others are the same.
        let bits = kind.key_bits.min(kind.value_bits).min(8);
        let (usual, most) = (1e-3, 8.0 / 2f32.powi(bits as i32));
        assert!(middle < usual && worst < most, "{kind:?}: {middle} {worst}");
        let bytes = decoder.state_bytes(0).expect("a row");
        let promised = promised(&model, kind) as usize;
        assert!(decoder.remaining_context(0).expect("a row").is_none(), "{kind:?} ends");
        // Memories of KV heads are counted in whole numbers of four bytes.
        assert!(bytes <= promised && promised - bytes < 16, "{kind:?}: {bytes} bytes, promised {promised}");
        assert_eq!(bytes, after_prompt, "{kind:?}");
    }
}

#[test]
fn budgets_are_met_and_work_resumes() {
    let model = model();
    let folder = tempfile::tempdir().expect("a folder");
    let stopped = AtomicBool::new(true);
    let first = Prepared::new(&model, &texts(Vec::new()), ALL, Some(folder.path()), &stopped, &mut |_, _, _| {});
    assert!(first.is_err_and(|error| error.to_string().contains("the same command resumes")));
    let first = prepared(&model, Some(folder.path()));
    let lines =
        || std::fs::read_to_string(folder.path().join("journal.jsonl")).expect("a journal").lines().filter(|line| !line.is_empty()).count();
    let known = lines();
    let again = prepared(&model, Some(folder.path()));
    assert_eq!((lines(), &again.errors.values, &again.removals), (known, &first.errors.values, &first.removals));
    assert_eq!(again.gathered, first.gathered);

    let never = AtomicBool::new(false);
    for keys in [8, 32, 100] {
        let kinds = choose(&model, &first, ALL, &texts(Vec::new()), (Budget::Keys(keys), Granularity::Head), &never, &mut |_, _, _| {})
            .expect("a choice");
        assert!(bytes_of(&kinds, 16, first.overhead) <= 4 * keys * key_bytes(16), "{keys}");
    }
    // To the byte, by the state of a decoder that has read more than all windows.
    for bytes in [4000, 6000, 8192, 10000] {
        let kinds = choose(&model, &first, ALL, &texts(Vec::new()), (Budget::Bytes(bytes), Granularity::Head), &never, &mut |_, _, _| {})
            .expect("a choice");
        let per_head: Vec<Option<Kind>> = kinds.iter().copied().map(Some).collect();
        let converted = assemble(&model, &per_head).expect("a model");
        let mut decoder = Decoder::new(converted, DecoderOptions::default()).expect("a decoder");
        decoder.prefill(0, &contexts(1, 3)[0]).expect("tokens");
        let kept = decoder.state_bytes(0).expect("a row") as u64;
        assert!(kept <= bytes && kept <= bytes_of(&kinds, 16, first.overhead), "{kept} of {bytes} bytes");
        assert!(4 * bytes_of(&kinds, 16, first.overhead) > 3 * bytes, "{bytes} bytes are hardly used");
    }
    let error = choose(&model, &first, ALL, &texts(Vec::new()), (Budget::Bytes(10), Granularity::Head), &never, &mut |_, _, _| {})
        .expect_err("too few")
        .to_string();
    assert!(error.contains("allow more"), "{error}");
}

#[test]
fn a_frontier_compares_all_methods_and_resumes() {
    let model = model();
    let prepared = prepared(&model, None);
    let folder = tempfile::tempdir().expect("a folder");
    let journal = folder.path().join("frontier.jsonl");
    let text = |name: &str, seed: u64| Text { name: name.into(), calibrated: seed == 7, contexts: contexts(2, seed) };
    let texts = texts(vec![text("one", 7), text("two", 8)]);
    let options = Options { keys: vec![24, 64], methods: Vec::new(), journal: Some(&journal) };
    let run = |stop: bool| {
        let stop = AtomicBool::new(stop);
        frontier::run(&model, &prepared, &texts, &options, Frontier::default(), &stop, &mut |_, _, _| {}, &mut |_| {}).expect("a frontier")
    };
    let nothing = run(true);
    assert!(!nothing.finished && nothing.points.iter().all(|point| point.contexts.is_empty()));
    let all = run(false);
    assert!(all.finished && all.points.len() == 2 * 2 * METHODS.len() && all.too_small.is_empty());
    assert!(all.best.len() == 2 && all.best.iter().all(|best| best.contexts == 4 && best.interval.is_some()));
    assert!(all.savings.iter().any(|saving| saving.a == "window per head" && saving.b == "window" && saving.interval.is_some()));
    for point in &all.points {
        assert!(point.bytes <= point.keys * key_bytes(16) * 4, "{} at {} keys takes {} bytes", point.method, point.keys, point.bytes);
        assert_eq!(point.contexts.len(), 2, "{}", point.method);
    }
    // Finished measurements are not repeated, so an interrupted run completes.
    let again = run(true);
    assert_eq!(again.points, all.points);
    assert!(all.comparisons.iter().all(|comparison| comparison.contexts == 4 && comparison.interval.is_some()));
    termwise_report::reads_again(&all);
    termwise_report::survives_edits(&all, 300);
    let atlas = prepared.atlas("m", vec!["t".into()], &model, LENGTH);
    assert!(atlas.heads.iter().all(|head| (0.0..=1.0).contains(&head.far_mass) && head.kl.is_some()));
    termwise_report::reads_again(&atlas);
    termwise_report::survives_edits(&atlas, 300);
}

#[test]
fn budgets_of_a_frontier_that_are_too_small_are_rejected() {
    let model = model();
    let prepared = prepared(&model, None);
    let texts = texts(vec![Text { name: "one".into(), calibrated: true, contexts: contexts(1, 7) }]);
    let never = AtomicBool::new(false);
    let run = |keys: Vec<u64>, methods: &[&str]| {
        let options = Options { keys, methods: methods.iter().map(ToString::to_string).collect(), journal: None };
        frontier::run(&model, &prepared, &texts, &options, Frontier::default(), &never, &mut |_, _, _| {}, &mut |_| {})
    };
    for methods in [&[][..], &["window"], &["8 bits + heavy hitters", "4 bits"]] {
        let named = Method::named(&methods.iter().map(ToString::to_string).collect::<Vec<_>>()).expect("methods");
        let least = Method::least_keys(&named, &model.config).expect("a minimum");
        for keys in [vec![0], vec![1], vec![2], vec![24, least - 1]] {
            let error = run(keys.clone(), methods).expect_err("too small").to_string();
            assert!(error.contains(&format!("use --keys {least} or more")), "{keys:?}: {error}");
        }
        // The minimum itself fits.
        let found = run(vec![least], methods).expect("a frontier");
        assert!(found.finished && !found.points.is_empty(), "{methods:?}");
        assert!(found.points.iter().all(|point| point.bytes <= least * key_bytes(16) * 4));
    }
    assert!(run(vec![], &[]).is_err() && run(vec![u64::MAX], &[]).is_err());
}

#[test]
fn edited_files_of_a_conversion_are_refused() {
    let model = model();
    let folder = tempfile::tempdir().expect("a folder");
    let never = AtomicBool::new(false);
    let prepare = || Prepared::new(&model, &texts(Vec::new()), &[Family::WINDOW], Some(folder.path()), &never, &mut |_, _, _| {});
    let first = prepare().expect("it can be prepared");
    let edit = |file: &str, change: &dyn Fn(&str) -> String| {
        let path = folder.path().join(file);
        let text = std::fs::read_to_string(&path).expect("text");
        std::fs::write(&path, change(&text)).expect("an edit");
        let error = prepare().err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(file) && error.contains("was edited"), "{file}: {error:?}");
        std::fs::write(&path, text).expect("as it was");
    };
    // A value for a KV head that does not exist, another number, and no checksum.
    edit("journal.jsonl", &|text| text.replacen("\"value\":[", "\"value\":[0.5,", 1));
    edit("journal.jsonl", &|text| text.replacen("\"count\":", "\"count\":1", 1));
    edit("calibration.json", &|text| text.replacen("\"contexts\":", "\"contexts\":1", 1));
    edit("calibration.json", &|text| format!("{{{}", text.split_once("\",").expect("a checksum").1));
    let again = prepare().expect("as it was");
    assert_eq!((again.errors.values, again.gathered), (first.errors.values, first.gathered));
}

#[test]
fn saved_conversions_are_validated() {
    let kind = Kind::window(8);
    let measured = Measured { text: "t".into(), length: 8, contexts: 1, original: 1.0, loss: 1.25, kl: 0.25 };
    let conversion = Conversion {
        model: "m".into(),
        data: vec!["t".into()],
        budget: Budget::Keys(8),
        bytes: 10,
        keys: 8.0,
        cache_bytes: 100,
        context: 64,
        layers: 2,
        kv_heads: 2,
        granularity: Granularity::Head,
        kinds: vec![kind, Kind { key_bits: 8, ..kind }, Kind { heavy_hitters: 4, ..kind }, Kind { key_bits: 4, value_bits: 4, ..kind }],
        calibration_tokens: 16,
        measured: vec![measured],
    };
    termwise_report::reads_again(&conversion);
    termwise_report::survives_edits(&conversion, usize::MAX);
    // Results of earlier builds are refused.
    let mut value: serde_json::Value = serde_json::from_str(&termwise_report::to_json(&conversion, None)).expect("JSON");
    value["kinds"][1]["bits"] = 8.into();
    let error = termwise_report::read::<Conversion>(value).expect_err("an earlier build").to_string();
    assert!(error.contains("earlier build") && error.contains("e9b2d07"), "{error}");
}

#[test]
fn a_plan_per_layer_has_one_kind_in_every_layer() {
    let model = model();
    let prepared = prepared(&model, None);
    let never = AtomicBool::new(false);
    let kinds = |granularity: Granularity| {
        choose(&model, &prepared, ALL, &texts(Vec::new()), (Budget::Keys(40), granularity), &never, &mut |_, _, _| {}).expect("a choice")
    };
    let (by_layer, by_head) = (kinds(Granularity::Layer), kinds(Granularity::Head));
    assert!(by_layer.chunks(2).all(|layer| layer[0] == layer[1]), "{by_layer:?}");
    assert!(bytes_of(&by_layer, 16, prepared.overhead) <= 4 * 40 * key_bytes(16));
    assert_eq!(by_head.len(), by_layer.len());
}
