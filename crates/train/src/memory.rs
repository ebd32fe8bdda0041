//! Checks in advance whether a model and its batches fit into memory.

use termwise_model::decode::available_memory;
use termwise_model::{Config, ParamLayout};

use crate::error::{Error, Result};

/// Assumed memory of systems that do not report theirs: larger than any machine.
const ASSUMED_BYTES: u128 = 1 << 46;

/// Returns an error if memory is certainly insufficient for `copies` of all parameters and the activations of `layers` layers over B·T positions. This is
/// a lower bound, so nothing that fits is rejected.
pub(crate) fn check(config: &Config, batch: usize, length: usize, copies: u128, layers: usize) -> Result<()> {
    let available = available_memory().unwrap_or(ASSUMED_BYTES);
    let needed = least(config, batch, length, copies, layers)?;
    if needed <= available {
        return Ok(());
    }
    let narrow = |bytes: u128| u64::try_from(bytes).unwrap_or(u64::MAX);
    Err(Error::Memory { batch, length, needed: narrow(needed), available: narrow(available) })
}

/// 4 bytes for each of: parameters; queries, keys, values, output, gate, up and two residuals of each layer.
fn least(config: &Config, batch: usize, length: usize, copies: u128, layers: usize) -> Result<u128> {
    let wide = |n: usize| n as u128;
    let heads = wide(config.num_attention_heads).saturating_add(wide(config.num_key_value_heads)).saturating_mul(wide(config.head_dim));
    let width = heads.saturating_add(wide(config.intermediate_size)).saturating_add(wide(config.hidden_size)).saturating_mul(2);
    let positions = wide(batch).saturating_mul(wide(length));
    let parameters = wide(ParamLayout::new(config)?.len()).saturating_mul(copies);
    Ok(positions.saturating_mul(width).saturating_mul(wide(layers)).saturating_add(parameters).saturating_mul(4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_that_cannot_fit_are_rejected_in_one_line() {
        let text = r#"{"vocab_size": 29, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 8}"#;
        let config = Config::from_json_str(text, "test").expect("valid");
        check(&config, 2, 16, 4, 4).expect("a few kB");
        // 2·(2·64 + 40 + 64) values per position in each of 4 layers.
        let parameters = ParamLayout::new(&config).expect("a layout").len() as u128;
        assert_eq!(least(&config, 2, 16, 3, 4).expect("a count"), 4 * (3 * parameters + 4 * 32 * 2 * 232));
        for (batch, length) in [(1 << 30, 1 << 20), (usize::MAX, usize::MAX)] {
            let error = check(&config, batch, length, 4, 4).expect_err("no machine has it").to_string();
            assert!(error.contains("need at least") && error.contains("smaller") && error.lines().count() == 1, "{error}");
        }
    }
}
