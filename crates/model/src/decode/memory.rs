//! Checks that recurrent states fit into the available memory, before they are allocated.

use termwise_attention::Variant;

use super::options::{DecoderOptions, MemoryPolicy};
use super::truncate::truncate_heads;
use crate::config::Config;
use crate::error::{Error, Result};

/// Fails if the states are larger than the available memory. Succeeds if that is unknown.
pub(super) fn check(config: &Config, options: DecoderOptions) -> Result<()> {
    let Some(available) = available() else { return Ok(()) };
    let (mut bytes, mut variant) = (0u128, String::new());
    for layer in 0..config.num_hidden_layers {
        let heads = config.heads(layer);
        let heads = match options.memory {
            MemoryPolicy::Auto => heads,
            MemoryPolicy::Truncate(order) | MemoryPolicy::SwitchToState(order) => {
                truncate_heads(&heads, order).map_err(|source| Error::Layer { layer, source })?
            }
        };
        bytes = bytes.saturating_add(state_bytes(&heads, config));
        variant = heads.first().map(Variant::to_string).unwrap_or(variant);
    }
    bytes = bytes.saturating_mul(options.rows as u128);
    if bytes > available {
        let narrow = |bytes: u128| u64::try_from(bytes).unwrap_or(u64::MAX);
        Err(Error::Memory { variant, bytes: narrow(bytes), available: narrow(available) })
    } else {
        Ok(())
    }
}

/// Bytes of a layer's states, one per key-value head. Keys of a window are not counted, since their memory grows with the text.
fn state_bytes(heads: &[Variant], config: &Config) -> u128 {
    let (d, group) = (config.head_dim, (heads.len() / config.num_key_value_heads).max(1));
    let largest = |heads: &[Variant]| heads.iter().filter_map(|variant| size(variant, d)).max().unwrap_or(0);
    fn size(variant: &Variant, d: usize) -> Option<u128> {
        Some(variant.state_rows(d)?.saturating_mul(d as u128 + u128::from(variant.denominator.sums())))
    }
    heads.chunks(group).map(largest).fold(0u128, |sum, size| sum.saturating_add(size.saturating_mul(4)))
}

/// Bytes of memory that this process can still allocate; `None` if the system does not report it.
pub fn available() -> Option<u128> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let find =
        |text: String, word: &str| Some(text.lines().find_map(|line| line.strip_prefix(word))?.split_whitespace().next()?.to_owned());
    let number = |word: Option<String>| word?.parse::<u128>().ok();
    let free = number(find(read("/proc/meminfo"), "MemAvailable:")).map(|kilobytes| 1024 * kilobytes);
    // Limits of the process (`ulimit -v`) and of its container. Values such as `unlimited` do not parse.
    let own = number(find(read("/proc/self/limits"), "Max address space"));
    let container = number(Some(read("/sys/fs/cgroup/memory.max").trim().to_owned()));
    [free, own, container].into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_larger_than_the_available_memory_are_rejected() {
        let text = r#"{"vocab_size": 29, "hidden_size": 512, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 8}"#;
        let config = Config::from_json_str(text, "test").expect("valid");
        let options = DecoderOptions::default().memory(MemoryPolicy::Truncate(2));
        check(&config, options).expect("17 MB");
        if available().is_some() {
            let error = check(&config, options.memory(MemoryPolicy::Truncate(30))).expect_err("far too large").to_string();
            assert!(error.contains("lower order"), "{error}");
            assert!(check(&config, options.rows(1 << 40)).is_err());
        }
        // 8 units of 2145 rows, 64 + 1 columns: the numbers of the specification.
        assert_eq!(state_bytes(&truncate_heads(&config.heads(0), 2).expect("a cut"), &config), 8 * 139_425 * 4);
    }
}
