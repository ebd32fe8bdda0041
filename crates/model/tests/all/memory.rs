//! Memory during decoding: truncated series, caches that switch to states, the end of a context, constant memory, and
//! NaN and infinity.

use crate::common;

use common::plain::{self, argmax};
use common::{TOLERANCE, greedy, tiny, tokens};
use termwise_attention::{Variant, relative_rms};
use termwise_model::decode::{Decoder, DecoderOptions, MemoryPolicy, truncate_attention};
use termwise_model::{Config, Error, Model};

fn options() -> DecoderOptions {
    DecoderOptions::default()
}

#[test]
fn a_truncated_model_equals_the_model_with_that_attention() {
    let model = tiny("softmax", 2, true);
    for order in [0, 2, 4] {
        let mut config = model.config.clone();
        config.set_attention(truncate_attention(&model.config, order).expect("a cut")).expect("possible");
        assert_eq!(
            config.uniform_attention().map(Variant::to_string),
            Some(format!("taylor=0{} over=sum", if order == 0 { String::new() } else { format!("..{order}") }))
        );
        let heads = |layer| config.heads(layer);
        let prompt = tokens(6, 29, 1);
        let expected = plain::greedy(&model, heads, &prompt, 30);
        let mut decoder = Decoder::new(model.clone(), options().memory(MemoryPolicy::Truncate(order))).expect("a decoder");
        assert_eq!(greedy(&mut decoder, &prompt, 30), expected, "order {order}");
    }
    // Heads without an exp kernel are unchanged.
    let mut mixed = model.config.clone();
    let map = serde_json::json!({"default": "softmax", "layers": {"1": {"heads": {"2": "linear_elu", "3": "exp clamp=5"}}}});
    mixed.set_attention_json(&map).expect("a map");
    let cut = truncate_attention(&mixed, 2).expect("a cut");
    let texts: Vec<String> = (0..4).map(|head| cut.head(1, head).to_string()).collect();
    assert_eq!(
        texts,
        [
            "taylor=0..2 over=sum",
            "taylor=0..2 over=sum",
            &"linear_elu".parse::<Variant>().expect("a preset").to_string(),
            "taylor=0..2 clamp=5 over=sum"
        ]
    );
    let error = |attention, memory| {
        let model = tiny(attention, 2, true);
        Decoder::new(model.clone(), options().memory(memory)).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(error("taylor=0..2", MemoryPolicy::Truncate(4)).contains("no head has an exp kernel"));
    assert!(error("gated_softmax", MemoryPolicy::SwitchToState(2)).contains("clamp"));
    assert!(error("softmax", MemoryPolicy::Truncate(151)).contains("150"));
}

#[test]
fn each_order_is_closer_to_the_exact_model() {
    let model = tiny("softmax", 2, true);
    let ids = tokens(40, 29, 1);
    let mut exact = Decoder::new(model.clone(), options()).expect("a decoder");
    exact.prefill(0, &ids).expect("a text");
    let wide: Vec<f64> = exact.logits(0).expect("a row").iter().map(|&x| x as f64).collect();
    let mut last = f64::INFINITY;
    for order in [0, 2, 4, 8, 12] {
        let mut decoder = Decoder::new(model.clone(), options().memory(MemoryPolicy::Truncate(order))).expect("a decoder");
        decoder.prefill(0, &ids).expect("a text");
        let error = relative_rms(decoder.logits(0).expect("a row"), &wide);
        assert!(error < last, "order {order}: {error:.1e} after {last:.1e}");
        last = error;
    }
    assert!(last < 1e-4, "{last:.1e}");
}

#[test]
fn a_cache_switches_to_a_state_when_that_is_smaller() {
    let model = tiny("softmax", 2, true);
    let ids = tokens(400, 29, 1);
    let memory = MemoryPolicy::SwitchToState(4);
    let mut decoder = Decoder::new(model.clone(), options().memory(memory).beyond_context(true)).expect("a decoder");
    let mut cut_decoder = Decoder::new(model.clone(), options().memory(MemoryPolicy::Truncate(4))).expect("a decoder");
    let mut exact = Decoder::new(model.clone(), options().beyond_context(true)).expect("a decoder");
    let state = cut_decoder.state_bytes(0).expect("a row");
    let mut turned_at = None;
    for (position, &id) in ids.iter().enumerate() {
        let before = decoder.state_bytes(0).expect("a row");
        for decoder in [&mut decoder, &mut exact, &mut cut_decoder] {
            decoder.step(&[Some(id)]).expect("a step");
        }
        if turned_at.is_none() {
            assert_eq!(decoder.logits(0).expect("a row"), exact.logits(0).expect("a row"), "exact until the switch, position {position}");
            if decoder.switched_layers(0).expect("a row") == 2 {
                turned_at = Some(position);
                assert!(
                    before <= state && exact.state_bytes(0).expect("a row") > state,
                    "switched when the cache became larger, position {position}"
                );
            } else {
                assert!(exact.state_bytes(0).expect("a row") <= state, "a cache larger than the state, position {position}");
            }
        } else {
            assert_eq!(
                (decoder.switched_layers(0).expect("a row"), decoder.state_bytes(0).expect("a row")),
                (2, state),
                "constant from then on"
            );
        }
    }
    let turned_at = turned_at.expect("a cache that grows must become larger than a state");
    assert!(exact.state_bytes(0).expect("a row") > state && turned_at < 399);
    // The inputs of the second layer before the switch differ, so its state does; that of the first layer is the same.
    let mut plainly = Decoder::new(model.clone(), options().memory(MemoryPolicy::Truncate(4))).expect("a decoder");
    plainly.prefill(0, &ids).expect("a text");
    let wide: Vec<f64> = plainly.logits(0).expect("a row").iter().map(|&x| x as f64).collect();
    assert!(relative_rms(cut_decoder.logits(0).expect("a row"), &wide) < TOLERANCE, "stepped and prefilled");
    assert!(relative_rms(decoder.logits(0).expect("a row"), &wide) < 0.05, "truncation of small scores is close to the exact model");
    assert_eq!(decoder.remaining_context(0).expect("a row"), None);
}

#[test]
fn after_a_switch_attention_has_the_truncated_kernel_over_exact_keys() {
    // One layer: its keys and values do not depend on the kernel, so the recomputed truncated model is the oracle.
    let text = r#"{"vocab_size": 29, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 4096}"#;
    let model = Model::fresh(Config::from_json_str(text, "one").expect("valid"), 5).expect("a model");
    let ids = tokens(600, 29, 1);
    let mut decoder = Decoder::new(model.clone(), options().memory(MemoryPolicy::SwitchToState(2))).expect("a decoder");
    decoder.prefill(0, &ids[..500]).expect("a prompt");
    assert_eq!(decoder.switched_layers(0).expect("a row"), 1);
    for &id in &ids[500..] {
        decoder.step(&[Some(id)]).expect("a step");
    }
    let heads = |_| termwise_model::decode::truncate_attention(&model.config, 2).expect("a cut").heads(0, 4);
    let wide = plain::logits(&model, heads, &ids);
    let error = relative_rms(decoder.logits(0).expect("a row"), &wide[599 * 29..]);
    assert!(error < TOLERANCE, "{error:.1e}");
}

#[test]
fn the_context_limit_applies_to_kv_caches() {
    let model = tiny("softmax", 2, true);
    let ids = tokens(70, 29, 1);
    let mut decoder = Decoder::new(model.clone(), options()).expect("a decoder");
    assert_eq!(decoder.remaining_context(0).expect("a row"), Some(64));
    let error = decoder.prefill(0, &ids[..65]).expect_err("too long").to_string();
    assert!(error.contains("65") && error.contains("64") && error.contains("--beyond-context"), "{error}");
    assert_eq!(decoder.position(0).expect("a row"), 0, "nothing was read");
    decoder.prefill(0, &ids[..64]).expect("just as long as the context");
    assert!(matches!(decoder.step(&[Some(1)]), Err(Error::Context { requested: 65, context: 64, .. })));
    let mut beyond = Decoder::new(model.clone(), options().beyond_context(true)).expect("a decoder");
    beyond.prefill(0, &ids).expect("beyond");
    let mut constant = Decoder::new(model.clone(), options().memory(MemoryPolicy::Truncate(2))).expect("a decoder");
    constant.prefill(0, &ids).expect("no end");
    assert_eq!(constant.remaining_context(0).expect("a row"), None);
}

#[test]
fn memory_of_windows_grows_as_they_fill() {
    let ids = tokens(40, 29, 1);
    let mut exact = Decoder::new(tiny("softmax", 2, true), options()).expect("a decoder");
    exact.prefill(0, &ids).expect("a prompt");
    let expected: Vec<f64> = exact.logits(0).expect("a row").iter().map(|&x| x as f64).collect();
    for attention in [
        "softmax window=262144",
        "softmax window=100000000000",
        "softmax window=100000000000 chosen=8",
        "softmax window=30 chosen=18446744073709551615",
    ] {
        let model = tiny(attention, 2, true);
        let mut decoder = Decoder::new(model.clone(), options().rows(3)).expect(attention);
        decoder.prefill(1, &ids[..30]).expect("a prompt");
        ids[30..].iter().for_each(|&id| decoder.step(&[None, Some(id), None]).expect("a step"));
        let error = relative_rms(decoder.logits(1).expect("a row"), &expected);
        assert!(error < TOLERANCE, "{attention}: {error:.1e}");
        assert!(decoder.state_bytes(1).expect("a row") < 1 << 17, "{attention}");
        // The same for a session, which training and evaluation use.
        let all = crate::common::logits(&model, &ids, None, 1, termwise_model::AttentionEngine::Fused);
        assert!(relative_rms(&all[39 * 29..], &expected) < TOLERANCE, "{attention}");
    }
}

#[test]
fn long_sequences_take_constant_memory() {
    let model = tiny("taylor=0..2", 2, true);
    let mut decoder = Decoder::new(model.clone(), options().prefill_chunk(32)).expect("a decoder");
    decoder.prefill(0, &tokens(100, 29, 1)).expect("a prompt");
    let bytes = decoder.state_bytes(0).expect("a row");
    // 4 heads over 2 kv heads, d = 6: 28 monomials, values padded to 16.
    assert!((2 * 2 * 28 * (16 + 1) * 4..2 * 2 * 28 * 17 * 4 + 4000).contains(&bytes), "{bytes}");
    for position in 100..20_000u32 {
        decoder.step(&[Some(argmax(decoder.logits(0).expect("a row")).max(position % 29))]).expect("a step");
        assert_eq!(decoder.state_bytes(0).expect("a row"), bytes);
    }
}

#[test]
fn a_nonpositive_denominator_is_reported() {
    // The sum of 1 + x over keys reaches zero if scores are negative enough, which large weights cause.
    let mut config = tiny("softmax", 2, true).config;
    config.set_attention_json(&serde_json::json!({"layers": {"1": "taylor=0,1"}})).expect("a map");
    let mut model = tiny("softmax", 2, true).with_attention(config.attention).expect("no further weights");
    let layer = "model.layers.1.self_attn.q_proj.weight";
    model.params.get_mut(layer).expect("listed").iter_mut().for_each(|w| *w *= 40.0);
    let ids = tokens(60, 29, 1);
    let mut stepping = Decoder::new(model.clone(), options()).expect("a decoder");
    let stepped = ids.iter().find_map(|&id| stepping.step(&[Some(id)]).err()).expect("some denominator");
    let mut reading = Decoder::new(model.clone(), options()).expect("a decoder");
    let read = reading.prefill(0, &ids).expect_err("some denominator");
    let (Error::Denominator { at: a, variant, .. }, Error::Denominator { at: b, .. }) = (&stepped, &read) else {
        panic!("{stepped}\n{read}")
    };
    assert_eq!((a.layer, b.layer), (1, 1));
    assert_eq!(variant, "taylor=0..1 over=sum");
    // Prefill reports the first head, stepping the first position.
    assert!(a.position <= b.position && a.value <= 0.0, "{stepped}\n{read}");
    let text = stepped.to_string();
    assert!(text.contains(&format!("layer 1, head {}", a.head)) && text.contains(&format!("position {}", a.position)), "{text}");
}

#[test]
fn a_nan_logit_is_reported() {
    let mut model = tiny("taylor=0..2 over=length", 2, true);
    model.params.get_mut("model.norm.weight").expect("listed")[0] = f32::INFINITY;
    let mut decoder = Decoder::new(model.clone(), options()).expect("a decoder");
    decoder.prefill(0, &[1, 2, 3]).expect_err("read");
    decoder.clear(0).expect("cleared");
    let error = decoder.step(&[Some(1)]).expect_err("stepped");
    assert!(matches!(error, Error::Logit { row: 0, position: 0, .. }), "{error}");
}
