//! Truncation of softmax models to a finite order p: exp(x) becomes Σ_{n ≤ p} x^n/n!, which has a recurrent state of constant size.

use termwise_attention::{Kernel, Variant};

use crate::config::{AttentionMap, Config};
use crate::error::{Error, Result};

/// Truncates every exp kernel and keeps all other properties. Heads with a clamp keep it, and with it their KV cache.
pub(super) fn truncate_heads(heads: &[Variant], order: usize) -> Result<Vec<Variant>, termwise_attention::Error> {
    let cut = |variant: &Variant| match &variant.near.kernel {
        Kernel::Exp(_) => {
            let mut series = variant.clone().with_near(variant.near.clone().with_clamp(None)).truncated(order)?;
            series.near.clamp = variant.near.clamp;
            series.validate().map(|()| series)
        }
        _ => Ok(variant.clone()),
    };
    heads.iter().map(cut).collect()
}

/// The attention of a model with every exp kernel truncated to its Taylor series up to this order, with coefficients 1.
///
/// The parameters of the model do not change. Fails if no head has an exp kernel.
pub fn truncate_attention(config: &Config, order: usize) -> Result<AttentionMap> {
    let mut map = config.attention.clone();
    let mut any = false;
    for layer in 0..config.num_hidden_layers {
        let heads = config.heads(layer);
        any |= heads.iter().any(|variant| matches!(variant.near.kernel, Kernel::Exp(_)));
        let cut = truncate_heads(&heads, order).map_err(|source| Error::Layer { layer, source })?;
        match cut.split_first() {
            Some((first, rest)) if rest.iter().all(|variant| variant == first) => map.set_layer(layer, first.clone()),
            _ => cut.into_iter().enumerate().for_each(|(head, variant)| map.set_head(layer, head, variant)),
        }
    }
    if any { Ok(map) } else { Err(nothing_to_truncate(config, "no head has an exp kernel to truncate")) }
}

pub(super) fn nothing_to_truncate(config: &Config, problem: &'static str) -> Error {
    Error::NothingToTruncate { problem, variant: config.attention.head(0, 0).to_string() }
}

/// The warnings of these variants, without duplicates.
pub fn warnings<'a>(heads: impl IntoIterator<Item = &'a Variant>) -> Vec<String> {
    let mut all = Vec::new();
    for variant in heads {
        for warning in variant.warnings() {
            let text = format!("`{variant}`: {warning}");
            if !all.contains(&text) {
                all.push(text);
            }
        }
    }
    all
}
