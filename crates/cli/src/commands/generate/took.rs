//! What writing took.

use std::fmt::Write as _;
use std::time::Duration;

use termwise_attention::Truncation;
use termwise_llama::generate::{Decoder, MemoryPolicy};

use crate::text::{thousands, three};

/// What it took.
#[derive(Default)]
pub struct Took {
    pub read: usize,
    pub reading: Duration,
    pub written: usize,
    pub writing: Duration,
    pub state_bytes: usize,
    pub switched: usize,
    pub position: usize,
    pub largest_score: f64,
}

impl Took {
    /// For standard error.
    pub fn summary(&self, decoder: &Decoder) -> String {
        let Took { read, reading, written, writing, state_bytes, switched, position, largest_score } = *self;
        let rate = |tokens: usize, time: Duration| three(tokens as f64 / time.as_secs_f64().max(1e-9));
        let layers = decoder.config().num_hidden_layers;
        let constant = decoder.is_constant() || switched == layers;
        let kind = if constant { "a state of constant size" } else { "keys and values" };
        let mut text = format!("{} tokens read, {} a second", thousands(read as u64), rate(read, reading));
        let _ = write!(text, "; {} written, {} a second", thousands(written as u64), rate(written, writing));
        let _ = writeln!(text, "; {} bytes of memory after {} tokens, {kind}", thousands(state_bytes as u64), thousands(position as u64));
        let memory = decoder.memory();
        if let MemoryPolicy::SwitchToState(order) = memory {
            let _ = writeln!(text, "{switched} of {} layers went on with the state of order {order}", layers);
        }
        if let MemoryPolicy::Truncate(order) | MemoryPolicy::SwitchToState(order) = memory
            && (switched > 0 || matches!(memory, MemoryPolicy::Truncate(_)))
            && let Ok(cut) = Truncation::new(order, largest_score)
        {
            let bound = cut.of_sum();
            let _ = writeln!(
                text,
                "no score exceeded {}: order {order} moves the output of a softmax head by at most {bound:.2e} of the largest value vector",
                three(largest_score)
            );
        }
        text
    }
}
