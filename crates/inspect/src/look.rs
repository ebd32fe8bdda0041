//! One row of one head: the weights that it has, those that the first orders of the series would give, its spectrum, and what it keeps.

use serde::Serialize;
use termwise_attention::{Kernel, Variant, View};
use termwise_llama::{Model, Observed, Options as SessionOptions};

use crate::Error;
use crate::spectrum::{self, HeadSpectrum, RowChoice};

/// What to look at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// From 0.
    pub layer: usize,
    /// From 0.
    pub head: usize,
    /// The position whose row is shown.
    pub query: usize,
    /// The highest order that is kept.
    pub order: usize,
}

/// A head at one position.
#[derive(Clone, Debug, Serialize)]
pub struct HeadLook {
    /// Its attention.
    pub attention: String,
    /// The same with the series cut; absent where its kernel is no series.
    pub cut: Option<String>,
    /// Which position.
    pub query: usize,
    /// Scores of the keys that it sees.
    pub scores: Vec<f64>,
    /// M·w/D of these keys.
    pub weights: Vec<f64>,
    /// The same with the series cut.
    pub cut_weights: Option<Vec<f64>>,
    /// Over all rows of the text.
    pub spectrum: HeadSpectrum,
    /// Even orders of its `share` and `error`.
    pub orders: Vec<usize>,
    /// Bytes of this head's keys and values for the text.
    pub cache_bytes: u64,
    /// Bytes of a state of the orders that are kept, at any length; absent where there is none.
    pub state_bytes: Option<u64>,
}

/// Looks at one head of a model on a text.
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
    let shorter = match matches!(own.kernel, Kernel::Exp(_)) {
        true => Some(Variant { clamp: own.clamp, ..Variant { clamp: None, ..own.clone() }.truncated(order)? }),
        false => None,
    };

    let mut session = model.session(1, ids.len(), SessionOptions { forward_only: true, ..SessionOptions::default() })?;
    let mut view = None;
    session.observe(&model.params, ids, None, &mut |seen: Observed| {
        if seen.layer == layer {
            view = Some(View::new(seen.attention, 1, ids.len(), seen.inputs, 0, head));
        }
    })?;
    let view = view.ok_or_else(|| Error::Sizes(format!("layer {layer} was not run")))??;
    let clamp = view.variant.clamp.unwrap_or(f64::INFINITY);
    let dot = |s: usize| (0..view.d).map(|i| view.q[query * view.d + i] * view.k[s * view.d + i]).sum::<f64>();
    let scores: Vec<f64> = (0..=query).map(|s| dot(s).min(clamp)).collect();
    let weights = weights(&view, &view.variant, query, &scores);
    let cut_weights = shorter.as_ref().map(|variant| self::weights(&view, variant, query, &scores));
    let state = |variant: &Variant| Some(variant.state_rows(view.d)? * (view.e as u128 + u128::from(variant.denominator.sums())) * 4);
    let state_bytes = shorter.as_ref().or(Some(&own)).and_then(state).and_then(|bytes| u64::try_from(bytes).ok());
    Ok(HeadLook {
        attention: own.to_string(),
        cut: shorter.map(|variant| variant.to_string()),
        query,
        scores,
        weights,
        cut_weights,
        spectrum: measured.layers.swap_remove(layer).heads.swap_remove(head),
        orders,
        cache_bytes: 4 * (ids.len() * (view.d + view.e)) as u64,
        state_bytes,
    })
}

/// M·w/D of a row.
fn weights(view: &View, variant: &Variant, t: usize, scores: &[f64]) -> Vec<f64> {
    let log = |s: usize| view.log_decay[t] - view.log_decay[s];
    let exp = matches!(variant.kernel, Kernel::Exp(_));
    let rho = if variant.shifts() && exp { (0..=t).map(|s| scores[s] + log(s)).fold(f64::NEG_INFINITY, f64::max) } else { 0.0 };
    let weight = |s: usize| if exp { (scores[s] + log(s) - rho).exp() } else { log(s).exp() * variant.kernel.value(scores[s]) };
    let weights: Vec<f64> = (0..=t).map(weight).collect();
    let z: f64 = weights.iter().sum();
    let mut u = vec![0.0; view.e];
    for (s, weight) in weights.iter().enumerate() {
        u.iter_mut().zip(&view.v[s * view.e..][..view.e]).for_each(|(u, v)| *u += weight * v);
    }
    let mut y = vec![0.0; view.e];
    let denominator = view.finish(variant, t, z, rho, &u, &mut y);
    weights.into_iter().map(|weight| weight / denominator).collect()
}
