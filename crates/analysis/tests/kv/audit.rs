//! Audits of unmodified conversions pass, and each injected fault is detected. Faults are injected into the weights, into the folder of the model, and into
//! the memory of a decoder between two tokens.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use termwise_analysis::kv::Error;
use termwise_analysis::kv::audit::{Audit, Options, audit};
use termwise_analysis::kv::convert::Granularity;
use termwise_analysis::kv::kinds::Kind;
use termwise_analysis::kv::record::Record;
use termwise_model::decode::{Decoder, SavedSequence};
use termwise_model::weights::WriteOptions;
use termwise_model::{Config, Model};

use crate::support::{LENGTH, contexts, converted, model, promised};

const HEAVY: Kind = Kind { window: 12, sinks: 4, heavy_hitters: 12, fade: false, key_bits: 16, value_bits: 16 };

fn record_of(model: &Model, converted: &Model, kind: Kind) -> Record {
    Record::new("m", converted, &[kind; 4], Granularity::Head, promised(model, kind))
}

/// The kind with other bits of keys and values.
fn coded(kind: Kind, bits: u32) -> Kind {
    Kind { key_bits: bits, value_bits: bits, ..kind }
}

fn check(
    original: &Model,
    converted: &Model,
    record: Option<&Record>,
    between: &mut dyn FnMut(usize, &mut Decoder) -> Result<(), Error>,
) -> Audit {
    check_on(&contexts(2, 9), original, converted, record, between)
}

fn check_on(
    contexts: &[Vec<u32>],
    original: &Model,
    converted: &Model,
    record: Option<&Record>,
    between: &mut dyn FnMut(usize, &mut Decoder) -> Result<(), Error>,
) -> Audit {
    let never = AtomicBool::new(false);
    let options = Options { record, tokenizer: None, facts: 0, tokens: 12, between };
    let (converted, original) = (Arc::new(converted.clone()), Arc::new(original.clone()));
    audit(&converted, &original, contexts, options, &never, &mut |_, _, _| {}).expect("an audit")
}

/// Names of the checks that fail.
fn failed(audit: &Audit) -> Vec<&str> {
    audit.checks.iter().filter(|check| check.passed == Some(false)).map(|check| check.name.as_str()).collect()
}

fn nothing(_: usize, _: &mut Decoder) -> Result<(), Error> {
    Ok(())
}

#[test]
fn healthy_models_pass() {
    let model = model();
    let window = Kind::window(24);
    for kind in [HEAVY, coded(HEAVY, 8), coded(HEAVY, 4), window, coded(window, 8)] {
        let healthy = converted(&model, kind);
        let record = record_of(&model, &healthy, kind);
        let found = check(&model, &healthy, Some(&record), &mut nothing);
        assert!(found.passed(), "{kind:?}: {:#?}", found.checks);
        assert_eq!(found.shares.len(), 8);
        for share in &found.shares {
            let parts = [share.sinks, share.window, share.heavy_hitters];
            assert!((parts.iter().flatten().sum::<f64>() - 1.0).abs() < 1e-6, "{share:?}");
            assert_eq!(share.heavy_hitters.is_some(), kind.heavy_hitters > 0);
        }
        termwise_report::reads_again(&found);
        termwise_report::survives_edits(&found, 300);
    }
    // A window that is longer than the text still fills at its end, and no further than it may.
    let filling = converted(&model, Kind::window(2 * LENGTH));
    let found = check(&model, &filling, None, &mut nothing);
    assert_eq!(failed(&found), [""; 0], "{:#?}", found.checks);
    let memory = found.checks.iter().find(|check| check.name == "memory is constant").expect("a check of the memory");
    assert!(memory.found.contains("once all windows are full"), "{}", memory.found);
    // The original is not converted, and its memory grows.
    let found = check(&model, &model, None, &mut nothing);
    assert_eq!(failed(&found), ["memory is constant"]);
}

#[test]
fn faults_in_the_folder_are_found() {
    let model = model();
    let healthy = converted(&model, HEAVY);
    let folder = tempfile::tempdir().expect("a folder");
    let audited = |faulty: &Model| {
        let record = record_of(&model, &healthy, HEAVY);
        record.write(folder.path()).expect("a record");
        faulty.write(folder.path(), &WriteOptions::default()).expect("a model");
        let (read, record) = (Model::read(folder.path()).expect("a model"), Record::read(folder.path()).expect("a record"));
        check(&model, &read, record.as_ref(), &mut nothing)
    };
    assert!(audited(&healthy).passed());

    // A window that is one key short: all evaluations agree, and predictions hardly differ.
    let short = converted(&model, Kind { window: 11, ..HEAVY });
    assert_eq!(failed(&audited(&short)), ["memory is the recorded one"]);

    // One weight of the original that was changed.
    let mut changed = healthy.clone();
    changed.params.get_mut("model.layers.1.mlp.down_proj.weight").expect("a weight")[3] += 0.01;
    let found = audited(&changed);
    assert_eq!(failed(&found), ["weights"]);
    assert!(
        found.checks.iter().any(|check| check.found.contains("1 tensors") && check.found.contains("`model.layers.1.mlp.down_proj.weight`"))
    );
}

#[test]
fn records_are_compared_head_by_head_and_byte_by_byte() {
    let model = model();
    let eight = coded(HEAVY, 8);
    let healthy = converted(&model, eight);
    let record = record_of(&model, &healthy, eight);
    let failed_with = |record: &Record, model: &Model, original: &Model| {
        failed(&check(original, model, Some(record), &mut nothing)).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(failed_with(&record, &healthy, &model), [""; 0]);
    // A layer and a head that only the record has.
    let mut longer = record.clone();
    longer.heads.push(vec!["softmax window=4".into()]);
    assert_eq!(failed_with(&longer, &healthy, &model), ["memory is the recorded one"]);
    let mut wider = record.clone();
    wider.heads[1].push("softmax window=4".into());
    assert_eq!(failed_with(&wider, &healthy, &model), ["memory is the recorded one"]);
    // One byte less than it takes: there is no slack.
    assert_eq!(failed_with(&Record { bytes: record.bytes - 1, ..record.clone() }, &healthy, &model), ["bytes are those of the record"]);
}

#[test]
fn edited_records_and_removed_parts_are_refused() {
    let model = model();
    let healthy = converted(&model, HEAVY);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("kv_memory.json");
    let record = record_of(&model, &healthy, HEAVY);
    record.write(folder.path()).expect("a record");
    assert_eq!(Record::read(folder.path()).expect("a record"), Some(record.clone()));
    let text = std::fs::read_to_string(&path).expect("text");
    let refused = |text: String| {
        std::fs::write(&path, text).expect("an edit");
        Record::read(folder.path()).expect_err("it is refused").to_string()
    };
    for (from, to) in [(record.bytes.to_string(), (record.bytes + 8).to_string()), ("window=12".into(), "window=13".into())] {
        let error = refused(text.replace(&from, &to));
        assert!(error.contains("kv_memory.json was edited"), "{error}");
    }
    // The field names of earlier builds, with the same checksum.
    assert!(text.contains("\"heavy_hitters\""));
    std::fs::write(&path, text.replace("\"heavy_hitters\"", "\"chosen\"")).expect("a file");
    assert_eq!(Record::read(folder.path()).expect("a record"), Some(record));
    std::fs::remove_file(&path).expect("removed");
    assert_eq!(Record::read(folder.path()).expect("no record"), None);
    // The record of an earlier build.
    std::fs::write(folder.path().join("conversion.json"), r#"{"tensors": "0"}"#).expect("a file");
    let error = Record::read(folder.path()).expect_err("an earlier build").to_string();
    assert!(error.contains("earlier build") && error.contains("e9b2d07"), "{error}");
}

/// Changes the tensors of a saved memory whose names have this suffix, and updates the checksum.
fn forge(path: &Path, end: &str, change: impl Fn(&mut [u8])) -> usize {
    let bytes = std::fs::read(path).expect("a file");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("a header");
    let mut metadata: HashMap<String, String> = header.metadata().clone().expect("metadata");
    let tensors = SafeTensors::deserialize(&bytes).expect("tensors");
    let mut all: Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)> =
        tensors.iter().map(|(name, tensor)| (name.to_owned(), tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec())).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    let mut count = 0;
    for (_, _, _, data) in all.iter_mut().filter(|(name, ..)| name.ends_with(end)) {
        change(data);
        count += 1;
    }
    // The hash as the decoder makes it.
    let mut hasher = blake3::Hasher::new();
    let mut add = |part: &[u8]| {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    };
    metadata.remove("blake3");
    let mut entries: Vec<_> = metadata.iter().collect();
    entries.sort();
    entries.iter().for_each(|(key, value)| [key, value].iter().for_each(|text| add(text.as_bytes())));
    for (name, dtype, shape, data) in &all {
        add(name.as_bytes());
        add(format!("{dtype:?} {shape:?}").as_bytes());
        add(data);
    }
    metadata.insert("blake3".into(), hasher.finalize().to_hex().to_string());
    let views: Vec<(&str, TensorView)> = all
        .iter()
        .map(|(name, dtype, shape, data)| (name.as_str(), TensorView::new(*dtype, shape.clone(), data).expect("a tensor")))
        .collect();
    std::fs::write(path, safetensors::serialize(views, Some(metadata)).expect("a file")).expect("a file");
    count
}

/// Saves the memory at a position, changes the file and resumes from it.
fn tampered(model: &Model, converted: &Model, record: &Record, end: &str, change: impl Fn(&mut [u8])) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state.safetensors");
    let text = &contexts(2, 9)[0];
    let found = check(model, converted, Some(record), &mut |t, decoder| {
        if t == LENGTH * 5 / 8 {
            decoder.save(0, &SavedSequence::new(text[..t].to_vec(), 0), &path)?;
            assert!(forge(&path, end, &change) > 0, "no tensor ends in {end}");
            decoder.load(0, &path)?;
        }
        Ok(())
    });
    failed(&found).into_iter().map(str::to_owned).collect()
}

#[test]
fn faults_of_the_memory_are_found() {
    let model = model();
    let kind = HEAVY;
    let healthy = converted(&model, kind);
    let record = record_of(&model, &healthy, kind);
    // An unchanged file with a new checksum passes.
    assert!(tampered(&model, &healthy, &record, ".received", |_| {}).is_empty());

    // Resumes from an outdated state. Also with a quantized cache, which has a larger tolerance.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state.safetensors");
    let text = &contexts(2, 9)[0];
    for kind in [kind, coded(kind, 8), coded(kind, 4)] {
        let healthy = converted(&model, kind);
        let record = record_of(&model, &healthy, kind);
        let found = check(&model, &healthy, Some(&record), &mut |t, decoder| {
            if t == LENGTH / 2 + 8 {
                decoder.save(0, &SavedSequence::new(text[..t].to_vec(), 0), &path)?;
            }
            if t == LENGTH / 2 + 24 {
                decoder.load(0, &path)?;
            }
            Ok(())
        });
        assert_eq!(failed(&found), ["token by token"], "{kind:?}: {:#?}", found.checks);
    }

    // Keys evicted in the wrong order: accumulated attention is inverted, so the best keys are evicted first.
    let upside_down = |data: &mut [u8]| {
        data.as_chunks_mut::<4>().0.iter_mut().for_each(|bytes| *bytes = (1.0 / (1e-3 + f32::from_le_bytes(*bytes))).to_le_bytes());
    };
    assert_eq!(tampered(&model, &healthy, &record, ".received", upside_down), ["token by token"]);
}

#[test]
fn faults_of_chunked_prefill_are_found() {
    let model = model();
    let healthy = converted(&model, HEAVY);
    // The memory of the first 64 tokens is lost between two chunks.
    let found = check(&model, &healthy, Some(&record_of(&model, &healthy, HEAVY)), &mut |t, decoder| {
        if t == 64 {
            decoder.clear(0)?;
        }
        Ok(())
    });
    assert_eq!(failed(&found), ["prefill in chunks of [16, 64, 144]"], "{:#?}", found.checks);
}

#[test]
fn invalid_logits_are_found() {
    let model = model();
    let mut faulty = converted(&model, HEAVY);
    faulty.params.get_mut("model.layers.1.mlp.down_proj.weight").expect("a weight")[3] = f32::NAN;
    let found = check(&model, &faulty, Some(&record_of(&model, &faulty, HEAVY)), &mut nothing);
    assert!(failed(&found).contains(&"predictions are finite"), "{:#?}", found.checks);
}

/// One layer with a KV head per head. Token 60 has its own component of the hidden state, from which no other token has anything. In the first `blind` heads
/// its key is zero, and queries are multiplied by `sharp`. Its values are multiplied by `value`.
fn with_sink_token(blind: usize, sharp: f32, value: f32) -> (Model, Vec<Vec<u32>>) {
    let text = r#"{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.25}"#;
    let mut model = Model::fresh(Config::from_json_str(text, "test").expect("a configuration"), 5).expect("a model");
    let mut edit = |name: &str, change: &dyn Fn(usize, usize, &mut f32)| {
        let weight = model.params.get_mut(name).expect("a weight");
        weight.iter_mut().enumerate().for_each(|(i, x)| change(i / 32, i % 32, x));
    };
    edit("model.embed_tokens.weight", &|token, c, x| match (token == 60, c == 31) {
        (true, true) => *x = 1.0,
        (true, false) | (false, true) => *x = 0.0,
        _ => {}
    });
    edit("model.layers.0.self_attn.q_proj.weight", &|row, _, x| *x *= if row < 8 * blind { sharp } else { 1.0 });
    edit("model.layers.0.self_attn.k_proj.weight", &|row, c, x| *x *= if row < 8 * blind && c == 31 { 0.0 } else { 1.0 });
    edit("model.layers.0.self_attn.v_proj.weight", &|_, c, x| *x *= if c == 31 { value } else { 1.0 });
    let mut contexts = contexts(2, 9);
    for ids in &mut contexts {
        ids.iter_mut().for_each(|id| *id %= 60);
        ids[..4].fill(60);
    }
    (model, contexts)
}

/// Failed checks and shares of sinks per head, of a conversion of `faulty` against `original`.
fn with_window(original: &Model, faulty: &Model, contexts: &[Vec<u32>]) -> (Vec<String>, Vec<f64>, String) {
    let kind = Kind::window(24);
    let converted = converted(faulty, kind);
    let found = check_on(contexts, original, &converted, Some(&record_of(faulty, &converted, kind)), &mut nothing);
    let shares = found.shares.iter().filter_map(|share| share.sinks).collect();
    (failed(&found).into_iter().map(str::to_owned).collect(), shares, format!("{:#?}", found.checks))
}

#[test]
fn sinks_without_contribution_are_found() {
    let (original, contexts) = with_sink_token(0, 1.0, 8.0);
    let (failed, shares, checks) = with_window(&original, &original, &contexts);
    assert!(failed.is_empty() && shares.iter().all(|share| *share > 1e-2), "{shares:?} {checks}");
    // In three of four heads, and in all heads, scores are so large that sinks get no attention.
    for blind in [3, 4] {
        let (faulty, _) = with_sink_token(blind, 40.0, 8.0);
        let (failed, shares, checks) = with_window(&original, &faulty, &contexts);
        assert!(shares[..blind].iter().all(|share| *share < 1e-3), "{shares:?}");
        let found = |name: &str| failed.iter().any(|failed| failed == name);
        assert!(found("contribution of sinks") && found("effect of sinks") == (blind == 4), "{checks}");
    }
}

#[test]
fn keys_that_the_original_ignores_need_no_contribution() {
    // Three of four heads of the original ignore its sinks. The fourth uses them.
    let (model, contexts) = with_sink_token(3, 40.0, 8.0);
    let (failed, shares, checks) = with_window(&model, &model, &contexts);
    assert!(shares[..3].iter().all(|share| *share < 1e-3) && shares[3] > 1e-2, "{shares:?}");
    assert_eq!(failed, [""; 0], "{checks}");
    // No head uses them: they are a waste of memory.
    let (model, contexts) = with_sink_token(4, 40.0, 8.0);
    let (failed, _, checks) = with_window(&model, &model, &contexts);
    assert_eq!(failed, ["effect of sinks"], "{checks}");
    // Sinks without values act through the denominator only, in all heads: their share is zero and their effect is not.
    let (model, contexts) = with_sink_token(4, 1.0, 0.0);
    let (failed, shares, checks) = with_window(&model, &model, &contexts);
    assert!(shares.iter().all(|share| *share < 1e-3), "{shares:?}");
    assert_eq!(failed, [""; 0], "{checks}");
}

#[test]
fn quantization_without_effect_is_found() {
    // Keys and values are zero, which every number of bits represents exactly.
    let mut model = model();
    for layer in 0..2 {
        for name in ["k_proj", "v_proj"] {
            model.params.get_mut(&format!("model.layers.{layer}.self_attn.{name}.weight")).expect("a weight").fill(0.0);
        }
    }
    let kind = coded(HEAVY, 8);
    let converted = converted(&model, kind);
    let found = check(&model, &converted, Some(&record_of(&model, &converted, kind)), &mut nothing);
    for part in ["sinks", "windows", "heavy hitters", "quantization"] {
        let name = format!("effect of {part}");
        assert!(failed(&found).contains(&name.as_str()), "{name}: {:#?}", found.checks);
    }
}
