//! Prompts that fail among others.

use termwise_data::Tokenizer;
use termwise_model::decode::{Decoder, DecoderOptions, SamplingOptions};
use termwise_model::generate::{GenerationEvent, GenerationOptions, GenerationStats, TextGenerator};
use termwise_model::{Config, Model};

/// A byte-level model that computes NaN from the byte `z` on.
fn model() -> Model {
    let text = r#"{"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.4, "max_position_embeddings": 64, "attention_variant": "taylor=0..2"}"#;
    let mut model = Model::fresh(Config::from_json_str(text, "bytes").expect("valid"), 3).expect("a model");
    let z = usize::from(b'z');
    model.params.get_mut("model.embed_tokens.weight").expect("listed")[z * 32..(z + 1) * 32].fill(f32::NAN);
    model
}

/// The text or the error of each prompt, in the order in which they are reported.
fn write(model: &Model, prompts: &[String], rows: usize) -> (Vec<Result<String, String>>, GenerationStats) {
    let tokenizer = Tokenizer::open("bytes", None).expect("a tokenizer");
    let decoder = Decoder::new(model.clone(), DecoderOptions::default().rows(rows)).expect("a decoder");
    let sampling = SamplingOptions::default().temperature(1.0);
    let options = GenerationOptions::default().sampling(sampling).max_tokens(20);
    let (mut all, mut shown) = (Vec::new(), String::new());
    let stats = TextGenerator::new(&model.config, decoder, &tokenizer, options, prompts).run(&mut |event| {
        match event {
            GenerationEvent::Text(text) => shown += text,
            GenerationEvent::Finished(written) => {
                assert_eq!((written.index, written.text, written.tokens), (all.len(), &*shown, 20));
                all.push(Ok(std::mem::take(&mut shown)));
            }
            GenerationEvent::Failed(failed) => {
                assert_eq!((failed.index, failed.prompt), (all.len(), &*prompts[all.len()]));
                all.push(Err(format!("{}|{}", std::mem::take(&mut shown), failed.error)));
            }
        }
        true
    });
    (all, stats.expect("no error of the whole call"))
}

#[test]
fn one_failing_prompt_of_forty_loses_one_completion() {
    let mut model = model();
    // No completion generates the byte by itself.
    let z = usize::from(b'z');
    model.params.get_mut("lm_head.weight").expect("listed")[z * 32..(z + 1) * 32].fill(0.0);
    let mut prompts: Vec<String> = (0..40).map(|n| format!("prompt number {n}")).collect();
    let (good, _) = write(&model, &prompts, 8);
    // Some completions may still sample the byte: they fail equally in all batches.
    let before = good.iter().filter(|text| text.is_err()).count();
    assert!(before < 20, "{good:?}");
    prompts[17] = "a zebra".into();
    for rows in [1, 3, 8, 40] {
        let (found, stats) = write(&model, &prompts, rows);
        assert_eq!(found.len(), 40);
        let error = found[17].as_ref().expect_err("the bad prompt");
        assert!(error.starts_with("|prompt 18: "), "{error}");
        assert_eq!(stats.failed, before + usize::from(good[17].is_ok()));
        for index in (0..40).filter(|&index| index != 17) {
            match (&found[index], &good[index]) {
                (Ok(found), Ok(good)) => assert_eq!(found, good, "{rows} rows, prompt {index}"),
                // Rows are numbered by their index in the batch.
                (Err(found), Err(good)) => assert_eq!(found.split('|').next(), good.split('|').next()),
                other => panic!("{rows} rows, prompt {index}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_single_prompt_that_fails_is_not_numbered() {
    let (found, stats) = write(&model(), &["a zebra".into()], 1);
    assert_eq!(stats.failed, 1);
    let error = found[0].as_ref().expect_err("it fails");
    assert!(error.starts_with('|') && !error.contains("prompt 1"), "{error}");
}
