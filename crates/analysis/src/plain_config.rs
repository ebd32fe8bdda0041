//! Configurations of models that are made here.

use termwise_attention::Variant;
use termwise_model::config::{AttentionMap, Config};

/// A Llama of one layer with this variant in every head; the caller changes other fields.
pub(crate) fn plain_config(vocab: usize, hidden: usize, heads: usize, context: usize, attention: Variant) -> Config {
    Config {
        family: Default::default(),
        vocab_size: vocab,
        hidden_size: hidden,
        intermediate_size: 2 * hidden,
        num_hidden_layers: 1,
        num_attention_heads: heads,
        num_key_value_heads: heads,
        head_dim: hidden / heads.max(1),
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        partial_rotary_factor: 1.0,
        tie_word_embeddings: false,
        max_position_embeddings: context,
        bos_token_id: None,
        eos_token_id: Vec::new(),
        initializer_range: 0.02,
        torch_dtype: None,
        attention: AttentionMap::from(attention),
        other: Default::default(),
    }
}
