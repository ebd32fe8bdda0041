//! One attention row of one head: its weights, the weights of a truncated series, its term spectrum, and its memory.

use serde::Serialize;
use termwise_attention::{Kernel, ScaledSums, Variant, View};
use termwise_model::{Model, ObservedAttention, SessionOptions};

use crate::Error;
use crate::spectrum::{self, HeadSpectrum, RowChoice};

/// Options of [`look`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Layer, from 0.
    pub layer: usize,
    /// Head, from 0.
    pub head: usize,
    /// Position of the row.
    pub query: usize,
    /// Highest order of the truncated series.
    pub order: usize,
}

/// One row of a head.
#[derive(Clone, Debug, Serialize)]
pub struct HeadLook {
    /// The variant of the head.
    pub attention: String,
    /// The truncated variant; `None` if the kernel has no series.
    pub cut: Option<String>,
    /// Position.
    pub query: usize,
    /// Scores of the keys up to this position; `None` for keys between sinks and window, which are not visible.
    pub scores: Vec<Option<f64>>,
    /// Weights M·w/D of these keys.
    pub weights: Vec<Option<f64>>,
    /// Weights with the truncated series.
    pub cut_weights: Option<Vec<Option<f64>>>,
    /// The spectrum over all rows of the text.
    pub spectrum: HeadSpectrum,
    /// Even orders of its `share` and `error`.
    pub orders: Vec<usize>,
    /// Largest number of visible keys: window and sinks; `None` without a window.
    pub window: Option<usize>,
    /// Bytes of the KV cache after the text: of all keys, or of window and sinks.
    pub cache_bytes: u64,
    /// Bytes of the recurrent state of the truncated series, or of a full window; `None` if there is none.
    pub state_bytes: Option<u64>,
}

/// Computes one attention row of a model on a text.
pub fn look(model: &Model, ids: &[u32], request: Request) -> Result<HeadLook, Error> {
    let config = &model.config;
    let Request { layer, head, query, order } = request;
    if layer >= config.num_hidden_layers || head >= config.num_attention_heads || query >= ids.len() {
        return Err(Error::Sizes(format!(
            "there is no layer {layer}, head {head}, position {query}: the model has {} layers of {} heads, the text {} tokens",
            config.num_hidden_layers,
            config.num_attention_heads,
            ids.len()
        )));
    }
    let options = spectrum::Options { rows: RowChoice::All, ..spectrum::Options::default() };
    let orders = options.orders.clone();
    let mut measured = spectrum::measure(model, &[ids.to_vec()], &options, &mut |_| {})?;
    let own = config.heads(layer)[head].clone();
    let shorter = match own.near.kernel {
        Kernel::Exp(_) => {
            let mut series = own.clone().with_near(own.near.clone().with_clamp(None)).truncated(order)?;
            series.near.clamp = own.near.clamp;
            Some(series)
        }
        _ => None,
    };

    let mut session = model.session(1, ids.len(), SessionOptions::default().forward_only(true))?;
    let mut view = None;
    session.observe(&model.params, ids, None, &mut |seen: ObservedAttention| {
        if seen.layer == layer {
            view = Some(View::new(seen.attention, 1, ids.len(), seen.inputs, 0, head));
        }
    })?;
    let view = view.ok_or_else(|| Error::Sizes(format!("layer {layer} was not run")))??;
    let dot = |s: usize| (0..view.d).map(|i| view.q[query * view.d + i] * view.k[s * view.d + i]).sum::<f64>();
    let mut scores = vec![None; query + 1];
    view.seen(query).for_each(|s| scores[s] = Some(view.score(dot(s))));
    let weights = weights(&view, &view.variant, query, &scores);
    let cut_weights = shorter.as_ref().map(|variant| self::weights(&view, variant, query, &scores));
    let state = shorter.as_ref().unwrap_or(&own).state_size(view.d, view.e);
    let window = own.window.map(|window| window.saturating_add(own.sinks.unwrap_or(0)));
    Ok(HeadLook {
        attention: own.to_string(),
        cut: shorter.map(|variant| variant.to_string()),
        query,
        scores,
        weights,
        cut_weights,
        spectrum: measured.layers.swap_remove(layer).heads.swap_remove(head),
        orders,
        window,
        cache_bytes: 4 * (window.map_or(ids.len(), |most| most.min(ids.len())) * (view.d + view.e)) as u64,
        state_bytes: state.and_then(|numbers| u64::try_from(4 * numbers).ok()),
    })
}

/// Weights M·w/D of a row, for the visible keys.
fn weights(view: &View, variant: &Variant, t: usize, scores: &[Option<f64>]) -> Vec<Option<f64>> {
    let log = |s: usize| view.log_decay[t] - view.log_decay[s];
    let exp = matches!(variant.near.kernel, Kernel::Exp(_));
    let exponents = || scores.iter().enumerate().filter_map(|(s, x)| Some((*x)? + log(s)));
    let rho = if variant.shifts() && exp { exponents().fold(f64::NEG_INFINITY, f64::max) } else { 0.0 };
    let weight = |s: usize, x: f64| if exp { (x + log(s) - rho).exp() } else { log(s).exp() * variant.near.kernel.value(x) };
    let mut weights: Vec<Option<f64>> = scores.iter().enumerate().map(|(s, x)| x.map(|x| weight(s, x))).collect();
    let (mut z, mut u, mut y) = (0.0, vec![0.0; view.e], vec![0.0; view.e]);
    for (s, weight) in weights.iter().enumerate().filter_map(|(s, weight)| Some((s, (*weight)?))) {
        z += weight;
        u.iter_mut().zip(&view.v[s * view.e..][..view.e]).for_each(|(u, v)| *u += weight * v);
    }
    let denominator = view.finish(variant, t, ScaledSums { u: &u, z, rho }, &mut y);
    weights.iter_mut().flatten().for_each(|weight| *weight /= denominator);
    weights
}

#[cfg(test)]
mod tests {
    use termwise_model::Config;

    use super::*;

    fn model(attention: &str) -> Model {
        let text = format!(
            r#"{{"model_type": "llama", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
                "initializer_range": 0.5, "attention_variant": "{attention}"}}"#
        );
        Model::fresh(Config::from_json_str(&text, "test").expect("a config"), 3).expect("a model")
    }

    /// Keys before the window have neither score nor weight. The visible keys have the weights of a softmax over them.
    #[test]
    fn a_window_is_looked_at_as_it_is() {
        let ids: Vec<u32> = (0..12).map(|i| (7 * i + 3) % 24).collect();
        let request = Request { layer: 1, head: 2, query: 10, order: 2 };
        let whole = look(&model("softmax"), &ids, request).expect("a look");
        assert!(whole.window.is_none() && whole.weights.iter().all(Option::is_some));
        for (text, hidden, kept) in
            [("softmax window=4 sinks=2", 2..7, 6), ("softmax window=3 cap=0.5", 0..8, 3), ("softmax window=64", 0..0, 64)]
        {
            let found = look(&model(text), &ids, request).expect("a look");
            let cut = found.cut_weights.as_ref().expect("a series");
            assert_eq!(cut.len(), 11);
            for (s, ((score, weight), cut)) in found.scores.iter().zip(&found.weights).zip(cut).enumerate() {
                let seen = [score, weight, cut].map(|x| x.is_some());
                assert_eq!(seen, [!hidden.contains(&s); 3], "{text}, key {s}");
            }
            let z: f64 = found.scores.iter().flatten().map(|x| x.exp()).sum();
            for (x, weight) in found.scores.iter().zip(&found.weights).filter_map(|(x, weight)| Some(((*x)?, (*weight)?))) {
                assert!((weight - x.exp() / z).abs() < 1e-12, "{text}");
                assert!(!text.contains("cap") || x.abs() <= 0.5, "{text}: {x}");
            }
            assert_eq!(found.window, Some(kept));
            assert_eq!(found.cache_bytes, 4 * (kept.min(12) * 8) as u64, "{text}");
            assert_eq!(found.state_bytes, Some(4 * (kept * 8) as u64), "{text}: a full window");
        }
    }
}
