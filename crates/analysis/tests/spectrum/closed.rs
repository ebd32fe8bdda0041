//! Models whose scores are known.

use termwise_analysis::Error;
use termwise_analysis::spectrum::{Magnitudes, measure};
use termwise_model::{Config, Model};

use crate::{all_rows, spectrum};

/// One layer in which every score of head h is `scores[h]`: all tokens are the same, nothing is turned.
fn constant(scores: &[f64]) -> Model {
    let heads = scores.len();
    let text = format!(
        r#"{{"vocab_size": 3, "hidden_size": {0}, "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": {heads},
            "num_key_value_heads": 1, "head_dim": 2, "rms_norm_eps": 0.0, "attention_variant": "exp scale=1 rope=off"}}"#,
        2 * heads
    );
    let mut model = Model::zeros(Config::from_json_str(&text, "test").expect("a configuration")).expect("a model");
    let mut set = |name: &str, values: &dyn Fn(usize) -> f32| {
        let tensor = model.params.get_mut(name).unwrap_or_else(|error| panic!("{error}"));
        tensor.iter_mut().enumerate().for_each(|(i, x)| *x = values(i));
    };
    let width = 2 * heads;
    set("model.embed_tokens.weight", &|_| 1.0);
    set("model.layers.0.input_layernorm.weight", &|_| 1.0);
    set("model.layers.0.post_attention_layernorm.weight", &|_| 1.0);
    set("model.norm.weight", &|_| 1.0);
    // Rows of a projection are coordinates: the first of each head has the score, the second nothing. The normed input is 1 everywhere.
    set("model.layers.0.self_attn.q_proj.weight", &|i| {
        let (row, column) = (i / width, i % width);
        if row % 2 == 0 && column == 0 { scores[row / 2] as f32 } else { 0.0 }
    });
    set("model.layers.0.self_attn.k_proj.weight", &|i| if i == 0 { 1.0 } else { 0.0 });
    set("model.layers.0.self_attn.v_proj.weight", &|i| (i % 3) as f32);
    model
}

fn check(found: &Magnitudes, x: f64) {
    let mut ln = 0.0;
    for (n, &log) in found.log10.iter().enumerate() {
        if n > 0 {
            ln += (x.abs() / n as f64).ln();
        }
        let expected = ln / std::f64::consts::LN_10;
        let log = log.expect("a number");
        assert!((log - expected).abs() < 1e-11 * (1.0 + expected.abs()), "order {n} at {x}: {log} for {expected}");
    }
    let dominant = found.dominant.expect("an order");
    let expected = (x.abs() as usize).min(99);
    assert!(dominant == expected || (x.fract() == 0.0 && dominant + 1 == expected), "{x}: {dominant}");
    assert_eq!(found.log10.len(), 100);
}

#[test]
fn equal_scores_have_the_terms_of_the_series() {
    // All exact in float32; the largest have terms beyond the range of float64.
    let scores = [3.5, -7.25, 0.625, 193.0, -1500.0, 262_144.0, -5.0, 1.0];
    let windows = vec![vec![0; 13], vec![1; 5]];
    let found = spectrum(&constant(&scores), &windows, &all_rows());
    let layer = &found.layers[0];
    for (head, x) in layer.heads.iter().zip(scores) {
        assert_eq!(head.pairs, 13 * 14 / 2 + 5 * 6 / 2);
        assert_eq!((head.scores.mean, head.scores.sd, head.scores.min, head.scores.max), (x, 0.0, x, x));
        let terms = head.terms.as_ref().expect("a series");
        let (own, other) = if x > 0.0 { (&terms.positive, &terms.negative) } else { (&terms.negative, &terms.positive) };
        check(&terms.all, x);
        check(own, x);
        assert!(other.log10.iter().all(Option::is_none) && other.dominant.is_none());
        assert_eq!(head.positive, Some(if x > 0.0 { 1.0 } else { 0.0 }));
        // All weights of a row are equal, however they are cut.
        let entropy = head.entropy.expect("positive weights");
        let mean = (1..=13).chain(1..=5).map(|keys| f64::from(keys).ln()).sum::<f64>() / 18.0;
        assert!((entropy.nats - mean).abs() < 1e-12 && (entropy.share.expect("a share") - 1.0).abs() < 1e-12);
        let cut = head.cut.as_ref().expect("a series");
        assert_eq!(cut.order_for.all(), [Some(0); 3], "{x}");
        assert!(cut.error.iter().flatten().all(|&error| error < 1e-12), "{x}: {:?}", cut.error);
        if x.abs() < 10.0 {
            for (&p, share) in found.orders.iter().zip(&cut.share) {
                let (mut term, mut sum) = (1.0, 1.0);
                for n in 1..=p {
                    term *= x / n as f64;
                    sum += term;
                }
                assert!((share.expect("a number") / (sum / x.exp()) - 1.0).abs() < 1e-9, "{x}, order {p}");
            }
        }
    }
    // The mean over heads is led by the largest score of each sign.
    let terms = layer.terms.as_ref().expect("terms");
    let of_head = |head: usize, n: usize| layer.heads[head].terms.as_ref().expect("terms").all.log10[n].expect("a number");
    assert!((terms.all.log10[99].expect("a number") - (of_head(5, 99) - 8f64.log10())).abs() < 1e-9);
    assert!((terms.positive.log10[99].expect("a number") - (of_head(5, 99) - 5f64.log10())).abs() < 1e-9);
    assert!((terms.negative.log10[99].expect("a number") - (of_head(4, 99) - 3f64.log10())).abs() < 1e-9);
    assert_eq!(terms.all.log10[0], Some(0.0));
}

#[test]
fn scores_that_are_not_finite_are_reported() {
    let mut model = constant(&[2.0, 3.0]);
    model.params.get_mut("model.layers.0.self_attn.q_proj.weight").expect("listed")[8] = f32::NAN;
    let error = measure(&model, &[vec![0, 1, 2]], &all_rows(), &mut |_| {}).expect_err("NaN");
    assert!(matches!(error, Error::Score { layer: 0, head: 1, window: 0, query: 0, key: 0 }), "{error}");
}

#[test]
fn invalid_options_are_rejected() {
    let model = constant(&[2.0]);
    let error = |windows: &[Vec<u32>], options| measure(&model, windows, &options, &mut |_| {}).expect_err("refused").to_string();
    assert!(error(&[], all_rows()).contains("no text"));
    assert!(error(&[vec![]], all_rows()).contains("no text"));
    assert!(error(&[vec![3]], all_rows()).contains("token 3"));
    for orders in [vec![1], vec![4, 2], vec![102]] {
        assert!(error(&[vec![0]], termwise_analysis::spectrum::Options { orders, ..all_rows() }).contains("even"));
    }
}
