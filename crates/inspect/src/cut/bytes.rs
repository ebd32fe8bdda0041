//! Bytes that heads keep between tokens, as the buffers of [`termwise_attention::State`] hold them.
//!
//! Moments of orders 0..p take C(d+p, p) rows of e values, padded to whole vectors of 16, and one number more a row under a sum. A cache
//! takes d + e numbers a token, e padded likewise, in blocks of 128 tokens, and a number for each
//! gate and decay. What else a layer carries, some dozens of bytes a head, is left out on both sides.

use termwise_attention::MAX_ROWS;
use termwise_attention::combinatorics::binomial;
use termwise_attention::{Kernel, Variant};
use termwise_llama::Config;

const FLOAT: u64 = 4;
const PAD: u64 = 16;
const BLOCK: u64 = 128;

/// Sizes of a model's heads.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Layers.
    pub layers: usize,
    /// H
    pub heads: usize,
    /// G
    pub kv_heads: usize,
    /// d = e
    pub d: usize,
}

impl Heads {
    /// Of this configuration.
    pub fn of(config: &Config) -> Heads {
        let Config { num_hidden_layers: layers, num_attention_heads: heads, num_key_value_heads: kv_heads, head_dim: d, .. } = *config;
        Heads { layers, heads, kv_heads, d }
    }

    /// Query heads of a kv head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn padded(&self) -> u64 {
        (self.d as u64).next_multiple_of(PAD)
    }

    /// Keys and values of one kv head after that many tokens.
    pub fn cache(&self, context: u64) -> u64 {
        context.next_multiple_of(BLOCK).saturating_mul(FLOAT * (self.d as u64 + self.padded()))
    }

    /// The state of one kv head cut at order p; `None` where it is more than the engine would build.
    pub fn state(&self, order: usize, sums: bool) -> Option<u64> {
        let rows = binomial(self.d + order, order);
        if rows > MAX_ROWS as u128 {
            return None;
        }
        let rows = rows as u64;
        Some(FLOAT * rows * (self.padded() + u64::from(sums)))
    }

    /// What a unit of query heads keeps after that many tokens: one state for each different order, a cache if any head has none.
    pub fn unit(&self, heads: &[Variant], context: u64) -> u64 {
        let mut states: Vec<(usize, bool, Option<usize>)> = Vec::new();
        let (mut cache, mut columns) = (false, 0);
        for (head, variant) in heads.iter().enumerate() {
            let (decays, key_side) = (variant.decay.is_some(), variant.denominator.key_side());
            match &variant.kernel {
                Kernel::Taylor(series) if variant.clamp.is_none() && self.state(series.degree(), true).is_some() => {
                    // Heads that fade or weigh keys in their own way share with nobody.
                    let key = (series.degree(), variant.denominator.sums(), (decays || key_side).then_some(head));
                    if !states.contains(&key) {
                        states.push(key);
                    }
                }
                _ => {
                    cache = true;
                    columns += FLOAT * u64::from(variant.in_gate.is_some() || key_side) + 2 * FLOAT * u64::from(decays);
                }
            }
        }
        let states: u64 = states.into_iter().filter_map(|(order, sums, _)| self.state(order, sums)).sum();
        states + if cache { self.cache(context) + columns * context } else { 0 }
    }

    /// What a whole model keeps.
    pub fn model(&self, config: &Config, context: u64) -> u64 {
        (0..self.layers)
            .flat_map(|layer| config.heads(layer).chunks(self.group()).map(|unit| self.unit(unit, context)).collect::<Vec<_>>())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use termwise_attention::{Extra, Extras, Inputs, Layer, Memory, Rope, Shape};

    /// What the buffers hold, less what a layer without any memory of keys carries.
    fn real(heads: &[Variant], shape: Shape, tokens: usize) -> u64 {
        let sizes = Layer::new(shape.heads, shape.kv_heads, shape.d).rope(Rope::new(shape.d, 1e4, None).expect("a rope"));
        let mut state = sizes.clone().heads(heads).and_then(|layer| layer.state(1)).expect("a state");
        let (q, kv) = (vec![0.1; shape.heads * shape.d], vec![0.1; shape.kv_heads * shape.d]);
        let mut y = vec![0.0; shape.heads * shape.d];
        for _ in 0..tokens {
            let mut extras = Extras::default();
            let gates = vec![0.5; shape.heads];
            if heads.iter().any(|variant| variant.decay.is_some()) {
                extras.set(Extra::DecayGate, &gates[..]);
            }
            let inputs = Inputs::new(&q, &kv, &kv).extras(extras);
            state.step(&inputs, &mut y).expect("a step");
        }
        let empty = sizes.variant("softmax").and_then(|layer| layer.state_with(1, Memory::Cache)).expect("a state");
        (state.bytes() - empty.bytes()) as u64
    }

    #[test]
    fn bytes_are_those_of_real_buffers() {
        let parse = |text: &str| text.parse::<Variant>().expect("a variant");
        for d in [4, 8, 16, 20] {
            let sizes = Heads { layers: 1, heads: 4, kv_heads: 2, d };
            let shape = Shape { batch: 1, time: 1, heads: 4, kv_heads: 2, d, e: d };
            for texts in [
                ["softmax"; 4],
                ["taylor=0..2"; 4],
                ["taylor=0..3", "taylor=0..3,at=-2", "taylor=0..2,at=1,coef=1:2:3", "taylor=0..2"],
                ["taylor=0..2 over=length"; 4],
                ["taylor=0..1 over=sum decay=softplus"; 4],
                ["taylor=0..2", "softmax", "softmax", "softmax"],
                ["taylor=0..1", "taylor=0..2", "taylor=0..2", "taylor=0..2"],
            ] {
                let heads = texts.map(parse);
                for tokens in [1, 128, 129] {
                    let counted: u64 = heads.chunks(2).map(|unit| sizes.unit(unit, tokens)).sum();
                    assert_eq!(counted, real(&heads, shape, tokens as usize), "{texts:?} d = {d}, {tokens} tokens");
                }
            }
        }
    }

    #[test]
    fn too_many_rows_are_no_state() {
        let sizes = Heads { layers: 1, heads: 1, kv_heads: 1, d: 128 };
        assert!(sizes.state(2, true).is_some() && sizes.state(8, true).is_none() && sizes.state(150, true).is_none());
    }
}
