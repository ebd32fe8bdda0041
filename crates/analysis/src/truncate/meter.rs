//! Losses of one model with different attentions, by [`termwise_train::eval::evaluate_with`], cached in a journal.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use termwise_data::Source;
use termwise_model::config::AttentionMap;
use termwise_model::{Model, SessionOptions};
use termwise_train::Error as TrainError;
use termwise_train::collective::Collective;
use termwise_train::eval::{Windows, evaluate_with};

use super::report::Measured;
use super::text::Split;
use crate::Error;

/// A model whose losses are measured.
pub struct Meter {
    model: Model,
    own: AttentionMap,
    windows: Windows,
    /// Hash of the weights and of the configuration without its attention.
    identity: String,
    known: HashMap<String, Measured>,
    journal: Option<File>,
    collective: Arc<dyn Collective>,
}

/// A line of the journal.
#[derive(Serialize, Deserialize)]
struct Entry {
    key: String,
    #[serde(flatten)]
    measured: Measured,
}

impl Meter {
    /// Measures this model in these windows, shared by ranks. Losses are read from the journal if present; rank 0 adds new ones.
    pub fn new(model: Model, windows: Windows, journal: Option<&Path>, collective: Arc<dyn Collective>) -> Result<Meter, Error> {
        let mut hasher = blake3::Hasher::new();
        for values in model.params.values().chunks(1 << 14) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            hasher.update(&bytes);
        }
        let mut config = model.config.clone();
        let own = std::mem::take(&mut config.attention);
        hasher.update(format!("{config:?} {windows:?}").as_bytes());
        let mut meter = Meter {
            model,
            own,
            windows,
            identity: hasher.finalize().to_hex().to_string(),
            known: HashMap::new(),
            journal: None,
            collective,
        };
        let Some(path) = journal else { return Ok(meter) };
        let mut lines = Vec::new();
        if meter.collective.rank() == 0 {
            lines = std::fs::read(path).unwrap_or_default();
            let failed = termwise_model::Error::io("write", path);
            meter.journal = Some(OpenOptions::new().create(true).append(true).open(path).map_err(failed)?);
        }
        // All ranks have the same journal, so all measure the same.
        meter.collective.broadcast(&mut lines)?;
        for line in lines.split(|&byte| byte == b'\n') {
            // A line that was truncated when the program ended is measured again.
            if let Ok(Entry { key, measured }) = serde_json::from_slice(line) {
                meter.known.insert(key, measured);
            }
        }
        Ok(meter)
    }

    /// The ranks that share the text.
    pub fn collective(&self) -> &dyn Collective {
        &*self.collective
    }

    /// The model with its own attention.
    pub fn model(&mut self) -> &mut Model {
        &mut self.model
    }

    /// Returns the model.
    pub fn into_model(self) -> Model {
        self.model
    }

    /// The loss on this text with this attention, which must not need additional weights. A NaN or infinite loss is a
    /// measurement, not an error.
    pub fn measure(&mut self, attention: &AttentionMap, text: &Split) -> Result<Measured, Error> {
        self.model.config.set_attention(attention.clone())?;
        let key = format!("{} {:?} {}", self.identity, self.texts(), text.fingerprint());
        let key = blake3::hash(key.as_bytes()).to_hex()[..32].to_owned();
        let known = self.known.get(&key).cloned();
        let measured = match known {
            Some(known) => Ok(known),
            None => self.evaluate(text),
        };
        self.model.config.set_attention(self.own.clone())?;
        let measured = measured?;
        if self.known.insert(key.clone(), measured.clone()).is_none()
            && let Some(journal) = &mut self.journal
        {
            let line = serde_json::to_string(&Entry { key, measured: measured.clone() }).unwrap_or_default();
            // If the journal cannot be written, a second run measures again.
            let _ = writeln!(journal, "{line}");
        }
        Ok(measured)
    }

    fn texts(&self) -> Vec<String> {
        let config = &self.model.config;
        (0..config.num_hidden_layers).flat_map(|layer| config.heads(layer)).map(|variant| variant.to_string()).collect()
    }

    fn evaluate(&self, text: &Split) -> Result<Measured, Error> {
        let options = SessionOptions::default().forward_only(true);
        match evaluate_with(&self.model, text, self.windows, 0, options, &*self.collective) {
            Ok((evaluation, nonpositive)) => Ok(Measured {
                loss: Some(evaluation.loss),
                bits_per_byte: evaluation.bits_per_byte,
                problem: nonpositive.map(|at| format!("{at}, the first nonpositive one")),
            }),
            Err(error @ TrainError::EvaluationNotFinite { .. }) => {
                Ok(Measured { loss: None, bits_per_byte: None, problem: Some(error.to_string()) })
            }
            Err(error) => Err(error.into()),
        }
    }
}
