//! Bytes of state or KV cache per KV head, with the counter of `termwise plan`.

use crate::plan::count::{Attention, Sizes};
use termwise_attention::Variant;
use termwise_model::Config;

/// Sizes of a model's heads.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Layers.
    pub layers: usize,
    /// Query heads, H.
    pub heads: usize,
    /// KV heads, G.
    pub kv_heads: usize,
    /// d = e
    pub d: usize,
}

impl Heads {
    /// From a configuration.
    pub fn of(config: &Config) -> Heads {
        let Config { num_hidden_layers: layers, num_attention_heads: heads, num_key_value_heads: kv_heads, head_dim: d, .. } = *config;
        Heads { layers, heads, kv_heads, d }
    }

    /// Number of query heads per KV head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Bytes of keys and values of one KV head after this many tokens.
    pub fn cache(&self, context: u64) -> u64 {
        self.count(&[Variant::default()]).cache_bytes(context)
    }

    /// Bytes of the state of one KV head truncated at order p; `None` if the engine does not support it.
    pub fn state(&self, order: usize, sums: bool) -> Option<u64> {
        let over = if sums { "sum" } else { "length" };
        let variant: Variant = format!("taylor=0..{order} over={over}").parse().ok()?;
        Some(self.count(&[variant])).filter(Attention::has_state).map(|counts| counts.kept_bytes(0))
    }

    /// Bytes of a group of query heads after this many tokens: one state per distinct order, and a cache if any head has no state.
    pub fn unit(&self, heads: &[Variant], context: u64) -> u64 {
        self.count(heads).kept_bytes(context)
    }

    /// Query heads of one KV head.
    fn count(&self, heads: &[Variant]) -> Attention {
        Attention::of_layer(heads, Sizes { kv_heads: 1, d: self.d })
    }

    /// Bytes of a whole model.
    pub fn model(&self, config: &Config, context: u64) -> u64 {
        (0..self.layers)
            .flat_map(|layer| config.heads(layer).chunks(self.group()).map(|unit| self.unit(unit, context)).collect::<Vec<_>>())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use termwise_attention::{AuxKind, AuxTensors, Inputs, Layer, Rope, Shape, StateKind};

    /// Bytes of the buffers, minus those of a layer without any memory of keys.
    fn real(heads: &[Variant], shape: Shape, tokens: usize) -> u64 {
        let sizes = Layer::new(shape.heads, shape.kv_heads, shape.d).rope(Rope::new(shape.d, 1e4, None).expect("a rope"));
        let mut state = sizes.clone().heads(heads).and_then(|layer| layer.state(1)).expect("a state");
        let (q, kv) = (vec![0.1; shape.heads * shape.d], vec![0.1; shape.kv_heads * shape.d]);
        let mut y = vec![0.0; shape.heads * shape.d];
        for _ in 0..tokens {
            let mut extras = AuxTensors::default();
            let gates = vec![0.5; shape.heads];
            if heads.iter().any(|variant| variant.decay.is_some()) {
                extras.set(AuxKind::DecayGate, &gates[..]);
            }
            let inputs = Inputs::new(&q, &kv, &kv).with_aux(extras);
            state.step(&inputs, &mut y).expect("a step");
        }
        let empty = sizes.variant("softmax").and_then(|layer| layer.state_with(1, StateKind::Cache)).expect("a state");
        (state.bytes() - empty.bytes()) as u64
    }

    #[test]
    fn bytes_match_actual_buffers() {
        let parse = |text: &str| text.parse::<Variant>().expect("a variant");
        for d in [4, 8, 16, 20] {
            let sizes = Heads { layers: 1, heads: 4, kv_heads: 2, d };
            let shape = Shape { batch: 1, time: 1, heads: 4, kv_heads: 2, d, e: d };
            for texts in [
                ["softmax"; 4],
                ["taylor=0..2"; 4],
                ["taylor=0..3", "taylor=0..3,coef=1:2:3:4", "taylor=0..2,coef=1:2:3", "taylor=0..2"],
                ["taylor=0..2 over=length"; 4],
                ["taylor=0..1 over=sum decay=softplus"; 4],
                ["taylor=0..2", "softmax", "softmax", "softmax"],
                ["taylor=0..1", "taylor=0..2", "taylor=0..2", "taylor=0..2"],
                ["feature=elu"; 4],
                ["power=2"; 4],
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
    fn states_with_too_many_rows_are_not_supported() {
        let sizes = Heads { layers: 1, heads: 1, kv_heads: 1, d: 128 };
        assert!(sizes.state(2, true).is_some() && sizes.state(8, true).is_none() && sizes.state(150, true).is_none());
    }
}
