//! Softmax models cut to a finite order: exp becomes Σ_{n ≤ p} x^n/n!, whose memory has constant size.

use termwise_attention::{Kernel, Variant};

use crate::config::{AttentionMap, Config};
use crate::error::{Error, Result};

/// Heads with every exp kernel cut; all else stays. A clamp stays too, and with it the cache of keys and values.
pub(super) fn cut_heads(heads: &[Variant], order: usize) -> Result<Vec<Variant>, termwise_attention::Error> {
    let cut = |variant: &Variant| match &variant.kernel {
        Kernel::Exp(_) => {
            let series = Variant { clamp: None, ..variant.clone() }.truncated(order)?;
            let variant = Variant { clamp: variant.clamp, ..series };
            variant.validate().map(|()| variant)
        }
        _ => Ok(variant.clone()),
    };
    heads.iter().map(cut).collect()
}

/// The attention of a model with every exp kernel cut to its series up to this order, coefficients 1.
///
/// The parameters of the model are the same. Refused where no head has an exp kernel.
pub fn cut(config: &Config, order: usize) -> Result<AttentionMap> {
    let mut map = config.attention.clone();
    let mut any = false;
    for layer in 0..config.num_hidden_layers {
        let heads = config.heads(layer);
        any |= heads.iter().any(|variant| matches!(variant.kernel, Kernel::Exp(_)));
        let cut = cut_heads(&heads, order).map_err(|source| Error::Layer { layer, source })?;
        match cut.split_first() {
            Some((first, rest)) if rest.iter().all(|variant| variant == first) => map.set_layer(layer, first.clone()),
            _ => cut.into_iter().enumerate().for_each(|(head, variant)| map.set_head(layer, head, variant)),
        }
    }
    if any { Ok(map) } else { Err(nothing_to_cut(config, "there is no exp kernel to cut")) }
}

pub(super) fn nothing_to_cut(config: &Config, problem: &'static str) -> Error {
    Error::NothingToCut { problem, variant: config.attention.head(0, 0).to_string() }
}

/// What the variants of a model warn of, each once.
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
