//! Decoding token by token, compared with a plain float64 Llama that recomputes everything, across splits, batches, files and memory policies.

use crate::common;

use common::plain::{self, argmax};
use common::{TOLERANCE, greedy, tiny, tokens};
use termwise_attention::{Mode, relative_rms};
use termwise_model::decode::{Decoder, DecoderOptions, MemoryPolicy, SavedSequence};
use termwise_model::weights::FloatType;
use termwise_model::{AttentionEngine, Config, Error, Model};

/// Kernels with a recurrent state of constant size.
const FINITE: [&str; 10] = [
    "taylor=0..2",
    "taylor=0..4 norm=l2",
    "taylor=1,3 over=length",
    "power=2",
    "linear_elu",
    "linear_cosine",
    "taylor=0..2,coef=learned decay=softplus conv=3",
    "taylor=0..2 in out post norm=rms",
    "taylor=0..2 over=position norm=layer rope=off",
    "feature=elu scale=1 decay=linear",
];
/// Kernels with a KV cache.
const CACHED: [&str; 6] = [
    "softmax",
    "gated_softmax",
    "gated_softmax_decay",
    "softmax conv=4",
    "gated_softmax_post_out_gate_L2norm_nodivS_noclamp",
    "taylor=0..2 clamp=5",
];

fn options() -> DecoderOptions {
    DecoderOptions::default()
}

/// Logits after every token; the first `read` tokens are a prompt.
fn all_logits(decoder: &mut Decoder, ids: &[u32], read: usize) -> Vec<f32> {
    decoder.clear(0).expect("cleared");
    decoder.prefill(0, &ids[..read]).expect("a prompt");
    let mut all = decoder.logits(0).expect("a row").to_vec();
    for &id in &ids[read..] {
        decoder.step(&[Some(id)]).expect("a step");
        all.extend_from_slice(decoder.logits(0).expect("a row"));
    }
    all
}

#[test]
fn float32_decoding_matches_float64() {
    for attention in FINITE.into_iter().chain(CACHED) {
        let model = tiny(attention, 2, attention.len() % 2 == 0);
        let heads = |layer| model.config.heads(layer);
        let prompt = tokens(7, 29, 1);
        let expected = plain::greedy(&model, heads, &prompt, 50);
        let mut decoder = Decoder::new(model.clone(), options()).expect("a decoder");
        assert_eq!(greedy(&mut decoder, &prompt, 50), expected, "{attention}");
        let wide = plain::logits(&model, heads, &expected);
        for read in [1, 7, 50] {
            let found = all_logits(&mut decoder, &expected, read);
            let error = relative_rms(&found, &wide[(read - 1) * 29..]);
            assert!(error < TOLERANCE, "{attention}, {read} tokens read at once: relative RMS {error:.1e}");
        }
    }
}

#[test]
fn a_prompt_may_be_split_anywhere() {
    let ids = tokens(45, 29, 3);
    for attention in ["taylor=0..2", "softmax", "gated_softmax_decay", "taylor=0..2,coef=learned decay=softplus conv=3"] {
        let model = tiny(attention, 2, true);
        for mode in ["parallel", "auto", "chunk=7"] {
            if mode.starts_with("chunk") && !attention.starts_with("taylor") {
                continue;
            }
            let options = options().mode(mode.parse().expect("a mode")).prefill_chunk(16);
            let mut decoder = Decoder::new(model.clone(), options.prefill_chunk(256)).expect("a decoder");
            decoder.prefill(0, &ids).expect("a prompt");
            let whole = decoder.logits(0).expect("a row").iter().map(|&x| x as f64).collect::<Vec<_>>();
            let mut decoder = Decoder::new(model.clone(), options).expect("a decoder");
            for first in [1, 2, 15, 16, 17, 31, 44] {
                decoder.clear(0).expect("cleared");
                decoder.prefill(0, &ids[..first]).expect("the first part");
                decoder.prefill(0, &ids[first..]).expect("the second part");
                let error = relative_rms(decoder.logits(0).expect("a row"), &whole);
                assert!(error < TOLERANCE, "{attention}, {mode}, split at {first}: {error:.1e}");
                assert_eq!(decoder.position(0).expect("a row"), 45);
            }
        }
    }
}

#[test]
fn rows_of_a_batch_are_independent() {
    for attention in ["taylor=0..2 out norm=rms", "softmax", "linear_elu"] {
        let model = tiny(attention, 2, true);
        let (time, lengths, ends) = (20, [20, 1, 0, 13], [9, 30, 20, 17]);
        let ids: Vec<u32> = (0..4).flat_map(|row| tokens(time, 29, row + 1)).collect();
        let mut batch = Decoder::new(model.clone(), options().rows(4)).expect("a decoder");
        batch.prefill_rows(&ids, &lengths).expect("prompts");
        let mut written: Vec<Vec<u32>> = vec![Vec::new(); 4];
        // One row starts late, and each ends at a different time.
        for step in 0..30 {
            if step == 5 {
                batch.prefill(2, &ids[40..47]).expect("a late prompt");
            }
            let mut next = [None; 4];
            for row in 0..4 {
                let running = step < ends[row] && (row != 2 || step >= 5);
                if running {
                    let token = argmax(batch.logits(row).expect("a row"));
                    written[row].push(token);
                    next[row] = Some(token);
                }
            }
            batch.step(&next).expect("a step");
        }
        for row in 0..4 {
            let mut alone = Decoder::new(model.clone(), options()).expect("a decoder");
            let prompt = &ids[row * time..][..if row == 2 { 7 } else { lengths[row] }];
            alone.prefill(0, prompt).expect("a prompt");
            for &token in &written[row] {
                assert_eq!(argmax(alone.logits(0).expect("a row")), token, "{attention}, row {row}");
                alone.step(&[Some(token)]).expect("a step");
            }
            assert_eq!(alone.logits(0).expect("a row"), batch.logits(row).expect("a row"), "{attention}, row {row}: bits");
            assert_eq!(
                (alone.position(0).expect("a row"), alone.state_bytes(0).expect("a row")),
                (batch.position(row).expect("a row"), batch.state_bytes(row).expect("a row"))
            );
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let text = r#"{"vocab_size": 600, "hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "attention_variant": "taylor=0..2"}"#;
    let model = Model::fresh(Config::from_json_str(text, "wide").expect("valid"), 3).expect("a model");
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        pool.install(|| {
            let mut decoder = Decoder::new(model.clone(), options().rows(3)).expect("a decoder");
            decoder.prefill_rows(&tokens(90, 600, 1), &[30, 12, 1]).expect("prompts");
            for step in 0..5 {
                decoder.step(&[Some(step), Some(step + 7), Some(3)]).expect("a step");
            }
            (0..3).flat_map(|row| decoder.logits(row).expect("a row").iter().map(|x| x.to_bits()).collect::<Vec<_>>()).collect::<Vec<_>>()
        })
    };
    let one = run(1);
    assert!(one == run(2) && one == run(5));
}

#[test]
fn a_saved_and_loaded_state_continues_bit_identically() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("state.safetensors");
    let ids = tokens(40, 29, 1);
    for attention in FINITE.into_iter().chain(CACHED) {
        let model = tiny(attention, 2, true);
        let mut decoder = Decoder::new(model.clone(), options()).expect("a decoder");
        decoder.prefill(0, &ids[..20]).expect("a prompt");
        let saved = SavedSequence::new(ids[..20].to_vec(), 7);
        decoder.save(0, &saved, &file).expect("saved");
        let mut later = Decoder::new(model.clone(), options().rows(2)).expect("a decoder");
        later.prefill(1, &[3, 3, 3]).expect("other tokens");
        assert_eq!(later.load(1, &file).expect("loaded"), saved);
        assert_eq!(later.position(1).expect("a row"), 20);
        for &id in &ids[20..] {
            decoder.step(&[Some(id)]).expect("a step");
            later.step(&[None, Some(id)]).expect("a step");
            assert_eq!(decoder.logits(0).expect("a row"), later.logits(1).expect("a row"), "{attention}");
        }
    }
}

#[test]
fn files_of_another_model_are_rejected_and_both_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("state.safetensors");
    let model = tiny("softmax", 2, true);
    let mut decoder = Decoder::new(model.clone(), options()).expect("a decoder");
    decoder.prefill(0, &[1, 2, 3]).expect("a prompt");
    let saved = SavedSequence::new(vec![1, 2, 3], 0);
    assert!(matches!(decoder.save(0, &SavedSequence::default(), &file), Err(Error::BatchLength { .. })), "too few tokens");
    decoder.save(0, &saved, &file).expect("saved");

    let refuse = |model: &Model, memory: MemoryPolicy, words: &[&str]| {
        let mut other = Decoder::new(model.clone(), options().memory(memory)).expect("a decoder");
        other.prefill(0, &[4]).expect("a token");
        let before = other.logits(0).expect("a row").to_vec();
        let error = other.load(0, &file).expect_err("refused").to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert_eq!((other.position(0).expect("a row"), other.logits(0).expect("a row")), (1, &before[..]), "the row is unchanged");
    };
    let mut other = model.clone();
    other.params.get_mut("model.norm.weight").expect("listed")[3] += 1.0;
    refuse(&other, MemoryPolicy::Auto, &["saved from the model `2 layers, width 24", "this model is `2 layers, width 24"]);
    refuse(&tiny("softmax", 4, true), MemoryPolicy::Auto, &["over 2", "over 4"]);
    refuse(&model, MemoryPolicy::Truncate(2), &["exp over=sum", "taylor=0..2 over=sum"]);

    // Every key that affects the computation is compared.
    let changed = |key: &str, value: serde_json::Value| {
        let mut json: serde_json::Value = serde_json::from_str(&model.config.to_json_string()).expect("JSON");
        json[key] = value;
        Model { config: Config::from_json_str(&json.to_string(), "changed").expect("valid"), params: model.params.clone() }
    };
    for (key, value, word) in [
        ("rope_theta", serde_json::json!(500000.0), "`rope_theta` was 10000.0 and is 500000.0"),
        ("rope_scaling", serde_json::json!({"rope_type": "linear", "factor": 4.0}), "`rope_scaling` was null and is {"),
        ("rms_norm_eps", serde_json::json!(0.5), "`rms_norm_eps` was 0.00001 and is 0.5"),
    ] {
        refuse(&changed(key, value), MemoryPolicy::Auto, &["saved with another configuration", word]);
    }
    // Other keys are not compared.
    for (key, value) in
        [("initializer_range", serde_json::json!(0.5)), ("eos_token_id", serde_json::json!(3)), ("note", serde_json::json!("x"))]
    {
        let mut other = Decoder::new(changed(key, value), options()).expect("a decoder");
        assert_eq!(other.load(0, &file).expect(key), saved);
    }
    let good = std::fs::read(&file).expect("bytes");
    for (at, what) in [(0, "empty"), (good.len() / 2, "half"), (good.len() - 1, "one byte short")] {
        std::fs::write(&file, &good[..at]).expect("written");
        assert!(decoder.load(0, &file).is_err(), "{what}");
    }
    std::fs::write(&file, &good).expect("written");
    assert_eq!(decoder.load(0, &file).expect("loaded"), saved);
    assert!(matches!(decoder.load(1, &file), Err(Error::BatchValue { what: "row", .. })));
    let absent = decoder.load(0, folder.path().join("absent")).expect_err("absent").to_string();
    assert!(absent.contains("absent") && absent.contains("no such file"), "{absent}");
    // Any changed value is detected, even if it is a valid number.
    let good = std::fs::read(&file).expect("a file");
    let header = 8 + u64::from_le_bytes(good[..8].try_into().expect("eight bytes")) as usize;
    for at in (header..good.len()).step_by(((good.len() - header) / 40).max(1)) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        std::fs::write(&file, &bad).expect("a file");
        let error = decoder.load(0, &file).expect_err("a changed value").to_string();
        assert!(error.contains("damaged"), "byte {at}: {error}");
    }
    std::fs::write(&file, &good).expect("a file");
    assert_eq!(decoder.load(0, &file).expect("loaded"), saved);
}

/// Logits of `exact` up to the switch, of `cut` from there on.
/// Oracle for the switch: the exact model's keys and values, scored by the truncated kernel from some position on.
#[test]
fn invalid_input_is_rejected() {
    let model = tiny("softmax", 2, true);
    let mut decoder = Decoder::new(model.clone(), options().rows(2)).expect("a decoder");
    assert!(matches!(decoder.prefill(0, &[]), Err(Error::EmptyPrompt)));
    assert!(decoder.prefill(0, &[29]).is_err() && decoder.prefill(2, &[1]).is_err() && decoder.clear(2).is_err());
    assert!(decoder.step(&[Some(1)]).is_err() && decoder.step(&[Some(29), None]).is_err());
    assert!(
        decoder.prefill_rows(&[1, 2, 3], &[1, 1]).is_err()
            && decoder.prefill_rows(&[1, 2], &[1]).is_err()
            && decoder.prefill_rows(&[1, 2], &[2, 1]).is_err()
    );
    assert_eq!((decoder.position(0).expect("a row"), decoder.position(1).expect("a row")), (0, 0));
    assert!(Decoder::new(model.clone(), options().rows(0)).is_err());
    let chunk = options().mode(Mode::Chunk(None));
    assert!(Decoder::new(model.clone(), chunk).is_err_and(|error| error.to_string().contains("finite state")));
}

#[test]
fn float32_sessions_and_decoders_agree() {
    let model = tiny("gated_softmax", 4, false);
    let ids = tokens(30, 29, 1);
    let all = common::logits(&model, &ids, None, 1, AttentionEngine::Fused);
    let mut decoder = Decoder::new(model.clone(), options()).expect("a decoder");
    let wide: Vec<f64> = all.iter().map(|&x| x as f64).collect();
    assert!(relative_rms(&all_logits(&mut decoder, &ids, 1), &wide) < TOLERANCE);
}

#[test]
fn rows_that_do_not_exist_are_errors() {
    let mut decoder = Decoder::new(tiny("softmax", 2, true), options().rows(2)).expect("a decoder");
    for row in [2, 7, usize::MAX] {
        assert!(decoder.logits(row).is_err() && decoder.position(row).is_err() && decoder.remaining_context(row).is_err());
        assert!(decoder.states(row).is_err() && decoder.state_bytes(row).is_err() && decoder.switched_layers(row).is_err());
        assert!(decoder.prefill(row, &[1]).is_err() && decoder.clear(row).is_err());
    }
    let message = decoder.logits(2).expect_err("refused").to_string();
    assert!(message.contains("row 2") && message.contains("below 2"), "{message}");
    for window in [0, usize::MAX, 1 << 50] {
        assert!(Decoder::new(tiny("softmax", 2, true), options().prefill_chunk(window)).is_err(), "{window}");
    }
    assert!(Decoder::new(tiny("softmax", 2, true), options().rows(1 << 50)).is_err());
}

/// The model with matrices rounded to bfloat16.
fn rounded(model: &Model) -> Model {
    let mut rounded = model.clone();
    let layout = model.params.layout().clone();
    let multiplied = |name: &str| name.ends_with("_proj.weight") || name.contains("embed_tokens") || name.contains("lm_head");
    for entry in layout.entries().iter().filter(|entry| multiplied(&entry.spec.name)) {
        rounded.params.values_mut()[entry.range()].iter_mut().for_each(|w| *w = half::bf16::from_f32(*w).to_f32());
    }
    rounded
}

#[test]
fn bfloat16_weights_match_their_rounded_values_in_float32() {
    let half = options().weights(FloatType::Bf16);
    let folder = tempfile::tempdir().expect("a folder");
    for attention in ["softmax", "taylor=0..2,coef=learned decay=softplus conv=3", "taylor=0..2 in out post norm=rms"] {
        for tied in [true, false] {
            let model = tiny(attention, 2, tied);
            model.write(folder.path(), &Default::default()).expect("written");
            let mut expected = Decoder::new(rounded(&model), options()).expect("a decoder");
            let mut exact = Decoder::new(model.clone(), options()).expect("a decoder");
            let mut copied = Decoder::new(model, half).expect("a decoder");
            let mut opened = Decoder::open(folder.path(), half).expect("a decoder");
            // One token, few and many at once: each has a separate matrix product.
            for read in [1, 20, 50] {
                let ids = tokens(60, 29, read as u32);
                let found = all_logits(&mut copied, &ids, read);
                assert_eq!(found, all_logits(&mut expected, &ids, read), "{attention}, {read} tokens read at once");
                assert_eq!(found, all_logits(&mut opened, &ids, read), "{attention}: from its files");
                assert_ne!(found, all_logits(&mut exact, &ids, read), "{attention}: nothing was rounded");
            }
            let file = folder.path().join("state.safetensors");
            copied.clear(0).expect("cleared");
            copied.prefill(0, &[1, 2]).expect("a prompt");
            copied.save(0, &SavedSequence::new(vec![1, 2], 0), &file).expect("saved");
            opened.load(0, &file).expect("the same weights");
            let error = exact.load(0, &file).expect_err("other weights").to_string();
            assert!(error.contains("bfloat16"), "{error}");
        }
    }
    let f16 = options().weights(FloatType::F16);
    let error = Decoder::new(tiny("softmax", 2, true), f16).err().expect("refused").to_string();
    assert!(error.contains("float16") && error.contains("bfloat16"), "{error}");
    let mut model = tiny("softmax", 2, true);
    model.params.get_mut("model.layers.1.mlp.up_proj.weight").expect("listed")[5] = f32::MAX;
    let error = Decoder::new(model, half).err().expect("beyond the range").to_string();
    assert!(error.contains("model.layers.1.mlp.up_proj.weight") && error.contains("bfloat16"), "{error}");
}
