//! The model configuration given by settings.

use termwise_model::Config;

use super::{Settings, bad};
use crate::error::{Error, Result};

impl Settings {
    /// The model configuration for data with this vocabulary size. Values without a setting are taken from the model to start from, if there
    /// is one; it must exist and have the given sizes.
    pub fn config(&self, vocabulary: usize) -> Result<Config> {
        if self.from.is_empty() {
            return self.sized_config(vocabulary);
        }
        let config = Config { torch_dtype: Some("float32".into()), ..Config::read(crate::run::locate(&self.from))? };
        let sizes = [
            ("hidden", self.hidden, config.hidden_size),
            ("mlp", self.mlp, config.intermediate_size),
            ("heads", self.heads, config.num_attention_heads),
            ("kv_heads", self.kv_heads, config.num_key_value_heads),
            ("layers", self.layers, config.num_hidden_layers),
            ("head_dim", self.head_dim, config.head_dim),
            ("vocab", self.vocab_size(vocabulary)?, config.vocab_size),
        ];
        if let Some((key, requested, found)) = sizes.into_iter().find(|(_, requested, found)| requested != found) {
            return Err(bad(key, requested, format!("the model in {} has {found}; remove the key", self.from)));
        }
        self.with_attention(config)
    }

    /// The configuration with these sizes.
    pub(super) fn sized_config(&self, vocabulary: usize) -> Result<Config> {
        self.with_attention(Config {
            family: Default::default(),
            vocab_size: self.vocab_size(vocabulary)?,
            hidden_size: self.hidden,
            intermediate_size: self.mlp,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            head_dim: self.head_dim,
            rms_norm_eps: self.norm_eps,
            rope_theta: self.rope_theta,
            rope_scaling: None,
            partial_rotary_factor: 1.0,
            tie_word_embeddings: self.tie,
            max_position_embeddings: self.length,
            bos_token_id: None,
            eos_token_id: Vec::new(),
            initializer_range: self.init_std,
            torch_dtype: Some("float32".into()),
            attention: Default::default(),
            other: Default::default(),
        })
    }

    fn vocab_size(&self, vocabulary: usize) -> Result<usize> {
        let vocab_size = if self.vocab == 0 { vocabulary } else { self.vocab };
        if vocab_size < vocabulary {
            return Err(bad("vocab", vocab_size, format!("the tokenizer has {vocabulary} tokens; set it to 0 or to a larger value")));
        }
        Ok(vocab_size)
    }

    fn with_attention(&self, mut config: Config) -> Result<Config> {
        // Attention maps are expanded with these sizes.
        config.validate()?;
        let attention = serde_json::to_value(&self.attention).map_err(|_| Error::Internal("an attention map cannot be written as JSON"))?;
        config.set_attention_json(&attention).map_err(|error| match error {
            // The error names the key of config.json.
            termwise_model::Error::AttentionEntry { place, source } => {
                termwise_model::Error::AttentionEntry { place: place.replacen("attention_variant", "attention", 1), source }
            }
            error => error,
        })?;
        config.validate()?;
        Ok(config)
    }

    /// Whether any head has a gate.
    fn gated(&self) -> Result<bool> {
        let config = self.sized_config(self.vocab.max(1))?;
        let gated = |layer| config.heads(layer).iter().any(|v| v.in_gate.is_some() || v.out_gate.is_some() || v.post_gate.is_some());
        Ok((0..config.num_hidden_layers).any(gated))
    }

    /// The gradient clipping limit, if gradients of this model are clipped.
    pub fn clip_limit(&self) -> Result<Option<f64>> {
        let clips = self.clip > 0.0 && (!self.clip_gated_only || self.gated()?);
        Ok(clips.then_some(self.clip))
    }
}
