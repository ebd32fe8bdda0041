//! Failing rows of a batch, and the rows next to them.

use crate::common;

use common::plain::argmax;
use common::{tiny, tokens};
use termwise_model::decode::{Decoder, DecoderOptions, MemoryPolicy, SavedSequence};
use termwise_model::{Error, Model};

fn decoder(model: &Model, rows: usize) -> Decoder {
    Decoder::new(model.clone(), DecoderOptions::default().rows(rows)).expect("a decoder")
}

/// A model whose second layer has denominators that become negative for some tokens, more often with a larger factor of its queries.
fn fragile(factor: f32) -> Model {
    let mut config = tiny("softmax", 2, true).config;
    config.set_attention_json(&serde_json::json!({"layers": {"1": "taylor=0,1"}})).expect("a map");
    let mut model = tiny("softmax", 2, true).with_attention(config.attention).expect("no further weights");
    let layer = "model.layers.1.self_attn.q_proj.weight";
    model.params.get_mut(layer).expect("listed").iter_mut().for_each(|w| *w *= factor);
    model
}

/// A model that computes NaN from token 7 on, without a denominator that would report it.
fn poisoned() -> Model {
    let mut model = tiny("taylor=0..2 over=length", 2, false);
    model.params.get_mut("model.embed_tokens.weight").expect("listed")[7 * 24..8 * 24].fill(f32::NAN);
    model
}

/// Four sequences with the position at which each fails; the first and the third never do.
fn texts(model: &Model) -> Option<Vec<(Vec<u32>, Option<usize>)>> {
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    for seed in 1..150u64 {
        let mut rng = seed;
        let mut next = || {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (rng >> 33) as u32 % 29
        };
        let ids: Vec<u32> = (0..40).map(|_| next()).collect();
        let mut alone = decoder(model, 1);
        match ids.iter().position(|&id| alone.step(&[Some(id)]).is_err()) {
            None => good.push((ids, None)),
            Some(at) if at > 0 && bad.iter().all(|(_, other)| *other != Some(at)) => bad.push((ids, Some(at))),
            Some(_) => {}
        }
    }
    let enough = good.len() > 1 && bad.len() > 1;
    enough.then(|| vec![good[0].clone(), bad[0].clone(), good[1].clone(), bad[1].clone()])
}

#[test]
fn rows_next_to_a_failed_row_are_unaffected() {
    let found = [1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0, 20.0].into_iter().find_map(|factor| Some((fragile(factor), texts(&fragile(factor))?)));
    let (model, texts) = found.expect("a factor for which some texts fail and some do not");
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        pool.install(|| {
            let (mut batch, mut alone) = (decoder(&model, 4), (0..4).map(|_| decoder(&model, 1)).collect::<Vec<_>>());
            let mut failures = Vec::new();
            for t in 0..40 {
                let next: Vec<Option<u32>> =
                    texts.iter().enumerate().map(|(row, (ids, _))| (!batch.failed(row).expect("a row")).then(|| ids[t])).collect();
                for failed in batch.step_rows(&next).expect("a call") {
                    assert_eq!(texts[failed.row].1, Some(t), "row {}", failed.row);
                    assert!(matches!(&failed.error, Error::Denominator { at, .. } if at.row == failed.row && at.layer == 1), "{failed:?}");
                    assert!(batch.failed(failed.row).expect("a row"));
                    failures.push((t, failed.row, failed.error.to_string()));
                }
                for (row, token) in next.iter().enumerate() {
                    let alone = &mut alone[row];
                    let stepped = alone.step(&[*token]);
                    assert_eq!(stepped.is_err(), failures.iter().any(|(at, failed, _)| (*at, *failed) == (t, row)));
                    if !batch.failed(row).expect("a row") {
                        assert_eq!(alone.logits(0).expect("a row"), batch.logits(row).expect("a row"), "row {row} at {t}");
                        assert_eq!(alone.position(0).expect("a row"), batch.position(row).expect("a row"));
                    }
                }
            }
            let failed: Vec<usize> = (0..4).filter(|&row| texts[row].1.is_some()).collect();
            assert_eq!(failed.len(), failures.len());
            // A failed row is rejected until it is cleared; then it is like new.
            for &row in &failed {
                let mut next = [None; 4];
                next[row] = Some(1);
                assert!(matches!(batch.step_rows(&next), Err(Error::FailedRow { row: found }) if found == row));
                assert!(matches!(batch.prefill(row, &[1, 2]), Err(Error::FailedRow { .. })));
                assert!(matches!(batch.logits(row), Err(Error::FailedRow { .. })));
                let path = std::env::temp_dir().join("never-written.safetensors");
                assert!(matches!(batch.save(row, &SavedSequence::default(), path), Err(Error::FailedRow { .. })));
                batch.clear(row).expect("cleared");
                let mut fresh = decoder(&model, 1);
                for &id in &texts[row].0[..1] {
                    let mut next = [None; 4];
                    next[row] = Some(id);
                    batch.step(&next).expect("a step");
                    fresh.step(&[Some(id)]).expect("a step");
                }
                assert_eq!(fresh.logits(0).expect("a row"), batch.logits(row).expect("a row"));
            }
            failures
        })
    };
    let one = run(1);
    assert!(one == run(2) && one == run(5), "failures depend on the number of threads");
}

#[test]
fn logits_after_a_nan_row_are_fresh() {
    let model = poisoned();
    let mut batch = decoder(&model, 3);
    batch.prefill_rows(&[1, 2, 3, 4, 5, 6], &[2, 2, 2]).expect("prompts");
    for step in 0..4u32 {
        let bad = (step == 1).then_some(7).or((step == 0).then_some(3));
        let failed = batch.step_rows(&[Some(step + 9), bad, Some(step + 12)]).expect("a call");
        assert_eq!(failed.iter().map(|failed| failed.row).collect::<Vec<_>>(), if step == 1 { vec![1] } else { vec![] });
        for (row, (prompt, first)) in [([1, 2], 9), ([0, 0], 0), ([5, 6], 12)].into_iter().enumerate().filter(|(row, _)| *row != 1) {
            let mut alone = decoder(&model, 1);
            alone.prefill(0, &prompt).expect("a prompt");
            (0..=step).for_each(|i| alone.step(&[Some(first + i)]).expect("a step"));
            assert_eq!(alone.logits(0).expect("a row"), batch.logits(row).expect("a row"), "row {row} after step {step}");
        }
    }
    // A call with an invalid token changes nothing.
    let before = [batch.position(0).expect("a row"), batch.position(2).expect("a row")];
    assert!(batch.step_rows(&[Some(1), None, Some(29)]).is_err());
    assert_eq!(before, [batch.position(0).expect("a row"), batch.position(2).expect("a row")]);
    assert!(!batch.failed(0).expect("a row") && !batch.failed(2).expect("a row"));
}

#[test]
fn prompts_next_to_a_failed_prompt_are_read() {
    let model = poisoned();
    let mut batch = decoder(&model, 3);
    let error = batch.prefill_rows(&[1, 2, 7, 4, 5, 6], &[2, 2, 2]).expect_err("the second prompt");
    assert!(matches!(error, Error::Logit { row: 1, .. }), "{error}");
    assert_eq!([0, 1, 2].map(|row| batch.failed(row).expect("a row")), [false, true, false]);
    let mut alone = decoder(&model, 1);
    alone.prefill(0, &[5, 6]).expect("a prompt");
    assert_eq!(alone.logits(0).expect("a row"), batch.logits(2).expect("a row"));
    let next = argmax(batch.logits(0).expect("a row"));
    batch.step(&[Some(if next == 7 { 8 } else { next }), None, None]).expect("a step");
}

#[test]
fn a_switch_that_no_layer_supports_is_rejected_at_construction() {
    let memory = MemoryPolicy::SwitchToState(2);
    for attention in ["softmax window=8", "softmax window=8 sinks=2"] {
        let error = Decoder::new(tiny(attention, 2, true), DecoderOptions::default().memory(memory)).err();
        let error = error.expect("refused").to_string();
        assert!(error.contains("window"), "{attention}: {error}");
    }
    // Of two layers, the one without a window switches, and the other keeps its ring.
    let mut config = tiny("softmax", 2, true).config;
    config.set_attention_json(&serde_json::json!({"layers": {"1": "softmax window=8"}})).expect("a map");
    let mixed = tiny("softmax", 2, true).with_attention(config.attention).expect("no further weights");
    let mut decoder = Decoder::new(mixed, DecoderOptions::default().memory(memory).beyond_context(true)).expect("one layer switches");
    decoder.prefill(0, &tokens(300, 29, 1)).expect("a prompt");
    assert_eq!(decoder.switched_layers(0).expect("a row"), 1);
    assert_eq!(decoder.states(0).expect("a row")[1].heads()[0].to_string(), "exp window=8 over=sum");
}
