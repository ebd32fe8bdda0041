//! The summary of a generation: token counts, speed, memory, truncation bound.

use std::fmt::Write as _;
use std::time::Duration;

use termwise_attention::Truncation;
use termwise_model::Config;
use termwise_model::decode::MemoryPolicy;
use termwise_model::generate::GenerationStats;

use termwise_report::{counted, thousands, three};

/// For standard error.
pub fn summary(stats: GenerationStats, config: &Config, constant: bool, memory: MemoryPolicy) -> String {
    let GenerationStats { failed, state_bytes, switched_layers: switched, position, largest_score, .. } = stats;
    // A rate of one token is noise.
    let rate = |tokens: usize, time: Duration| match tokens {
        0 | 1 => String::new(),
        _ => format!(" at {} tokens/s", thousands((tokens as f64 / time.as_secs_f64().max(1e-9)).round() as u64)),
    };
    let constant = constant || switched == config.num_hidden_layers;
    let windowed = (0..config.num_hidden_layers).any(|layer| config.heads(layer).iter().any(|variant| variant.window.is_some()));
    let kind = match (constant, windowed) {
        (true, true) => "which grows until windows are full",
        (true, false) => "a state of constant size",
        (false, _) => "keys and values",
    };
    let mut text = if failed > 0 { format!("{} failed; ", counted(failed, "prompt")) } else { String::new() };
    let _ = write!(text, "{} read{}", counted(stats.prompt_tokens, "token"), rate(stats.prompt_tokens, stats.prefill_time));
    let _ = write!(text, "; {} written{}", thousands(stats.generated_tokens), rate(stats.generated_tokens, stats.decode_time));
    let _ = writeln!(text, "; {} bytes of memory after {} tokens, {kind}", thousands(state_bytes), thousands(position));
    if let MemoryPolicy::SwitchToState(order) = memory {
        let _ = writeln!(text, "{switched} of {} layers switched to the state of order {order}", config.num_hidden_layers);
        if switched == 0 {
            text += "the cache stayed smaller than that state; write a longer text or use a lower --order\n";
        }
    }
    if let MemoryPolicy::Truncate(order) | MemoryPolicy::SwitchToState(order) = memory
        && (switched > 0 || matches!(memory, MemoryPolicy::Truncate(_)))
        && let Ok(cut) = Truncation::new(order, largest_score)
    {
        let (score, bound) = (three(largest_score), cut.of_sum());
        // An output and its truncation are both means of value vectors: 2 bounds any error.
        let _ = match bound < 2.0 {
            true => writeln!(
                text,
                "largest score {score}: truncation at order {order} changes the output of a softmax head by at most {bound:.2e} times the largest value vector"
            ),
            false => writeln!(text, "largest score {score}: too large for a useful bound on the truncation error at order {order}"),
        };
    }
    text
}
