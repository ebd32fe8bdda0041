//! Validation of values.

use termwise_model::{Precision, SessionOptions};

use super::{Settings, bad};
use crate::error::Result;

impl Settings {
    /// Computation options of the model.
    pub fn options(&self) -> Result<SessionOptions> {
        let unknown = |error: termwise_attention::Error| bad("mode", &self.mode, error.to_string());
        Ok(SessionOptions::default().mode(self.mode.parse().map_err(unknown)?).precision(self.precision()?))
    }

    /// The precision of the products of linear layers.
    pub fn precision(&self) -> Result<Precision> {
        self.precision.parse().map_err(|expected| bad("precision", &self.precision, expected))
    }

    /// Checks every value. The model to start from is not opened.
    pub fn validate(&self) -> Result<()> {
        let positive = [
            ("batch", self.batch as u64, 1 << 24),
            ("length", self.length as u64, 1 << 24),
            ("eval_length", self.eval_length.unwrap_or(1) as u64, 1 << 24),
            ("accumulate", self.accumulate as u64, 1 << 20),
            ("steps", self.steps, 1 << 40),
            ("horizon", self.horizon, 1 << 40),
            ("log_every", self.log_every, u64::MAX),
            ("keep", self.keep as u64, u64::MAX),
        ];
        for (key, value, most) in positive {
            if value == 0 || value > most {
                return Err(bad(key, value, format!("it must be from 1 to {most}")));
            }
        }
        let sizes = [
            ("hidden", self.hidden, 1usize << 24),
            ("mlp", self.mlp, 1 << 28),
            ("heads", self.heads, 1 << 16),
            ("kv_heads", self.kv_heads, 1 << 16),
            ("head_dim", self.head_dim, 1 << 24),
            ("layers", self.layers, 1 << 16),
            ("vocab", self.vocab, 1 << 28),
        ];
        if let Some((key, value, most)) = sizes.into_iter().find(|(_, value, most)| value > most) {
            return Err(bad(key, value, format!("it must be at most {most}")));
        }
        if self.heads > 0 && self.head_dim.checked_mul(self.heads) != Some(self.hidden) && self.head_dim == self.hidden / self.heads {
            return Err(bad(
                "hidden",
                self.hidden,
                format!("it is not divisible by heads = {}; change one of them or set head_dim", self.heads),
            ));
        }
        if !self.cut().is_even() {
            let (batch, accumulate) = (self.batch, self.accumulate);
            let expected = format!(
                "it must split {accumulate} batches of {batch} rows evenly: a divisor of {accumulate}, or {accumulate} times a divisor of {batch}"
            );
            return Err(bad("micro_batches", self.micro_batches, expected));
        }
        if !["native", "torch"].contains(&self.engine.as_str()) {
            return Err(bad("engine", &self.engine, "it must be native or torch".into()));
        }
        if self.engine != "native" && self.precision()? != Precision::F32 {
            return Err(bad("precision", &self.precision, format!("engine {} computes in f32; bf16 needs --engine native", self.engine)));
        }
        if self.threads > 4096 {
            return Err(bad("threads", self.threads, "it must be at most 4096".into()));
        }
        self.options()?;
        let shares = [("beta1", self.beta1), ("beta2", self.beta2), ("held_out", self.held_out.unwrap_or(0.0))];
        for (key, value) in shares {
            if !(0.0..1.0).contains(&value) {
                return Err(bad(key, value, "it must be at least 0 and below 1".into()));
            }
        }
        for (key, value) in [("lr", self.lr), ("weight_decay", self.weight_decay), ("clip", self.clip), ("final_lr", self.final_lr)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(bad(key, value, "it must be zero or a positive number".into()));
            }
        }
        // Otherwise zero moments would give 0/0.
        if self.adam_eps.is_nan() || (self.adam_eps as f32) < f32::MIN_POSITIVE {
            return Err(bad("adam_eps", self.adam_eps, "it must be positive in float32".into()));
        }
        if self.data.is_empty() {
            return Err(bad("data", "[]", "it must name files, directories or builtin".into()));
        }
        let config = self.sized_config(self.vocab.max(1))?;
        let mut heads = (0..config.num_hidden_layers).flat_map(|layer| config.heads(layer));
        match heads.find_map(|variant| Some((variant.training_refusal()?, variant))) {
            Some((reason, variant)) => Err(bad("attention", variant, reason)),
            None => Ok(()),
        }
    }
}
