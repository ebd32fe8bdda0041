//! What a conversion chose, beside the model that it wrote: an audit compares the model with it.

use std::path::Path;

use serde::{Deserialize, Serialize};
use termwise_base::files::write_whole;
use termwise_llama::Model;

use crate::Error;
use crate::journal::digest;

/// In the folder of a converted model.
pub const FILE: &str = "conversion.json";

/// What was chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The original, as it was asked for.
    pub original: String,
    /// The variant of each head, by layer.
    pub heads: Vec<Vec<String>>,
    /// Bytes that one text keeps between tokens.
    pub bytes: u64,
    /// A digest of the tensors that were added.
    pub tensors: String,
}

/// A digest of the tensors that a model has and its original has not.
fn added(model: &Model, original: &Model) -> String {
    let mut hasher = blake3::Hasher::new();
    for (entry, values) in model.params.iter().filter(|(entry, _)| original.params.get(&entry.spec.name).is_err()) {
        hasher.update(entry.spec.name.as_bytes());
        values.iter().for_each(|value| {
            hasher.update(&value.to_le_bytes());
        });
    }
    digest(hasher.finalize().to_hex().as_str())
}

/// The last commit that could make and use far states.
pub const LAST_WITH_FAR_STATES: &str = "12bd7e8";

/// Refuses variants of conversions by earlier builds that use parts which were removed.
pub fn refuse_removed(heads: &[Vec<String>]) -> Result<(), Error> {
    let all =
        heads.iter().enumerate().flat_map(|(layer, heads)| heads.iter().enumerate().map(move |(head, variant)| (layer, head, variant)));
    match all.into_iter().find(|(_, _, variant)| variant.contains("far(")) {
        Some((layer, head, variant)) => Err(Error::Asked(format!(
            "layer {layer}, head {head} has `{variant}`: far states of converted models were removed, and the last commit that supports them is \
             {LAST_WITH_FAR_STATES}; convert the original model again, or use that commit"
        ))),
        None => Ok(()),
    }
}

pub(crate) fn variants(model: &Model) -> Vec<Vec<String>> {
    (0..model.config.num_hidden_layers).map(|layer| model.config.heads(layer).iter().map(ToString::to_string).collect()).collect()
}

impl Record {
    /// Of a model as it is written.
    pub fn new(name: &str, model: &Model, original: &Model, bytes: u64) -> Record {
        Record { original: name.into(), heads: variants(model), bytes, tensors: added(model, original) }
    }

    /// Writes it into the model's folder.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        Ok(write_whole(&folder.join(FILE), &serde_json::to_vec_pretty(self).unwrap_or_default())?)
    }

    /// The record in a model's folder; `None` if there is none. Refuses records of conversions with parts that were removed.
    pub fn read(folder: &Path) -> Result<Option<Record>, Error> {
        let path = folder.join(FILE);
        let Ok(bytes) = std::fs::read(&path) else { return Ok(None) };
        let record: Record = serde_json::from_slice(&bytes).map_err(|error| {
            Error::Asked(format!("{} is not a record of a conversion ({error}); convert again, or remove it", path.display()))
        })?;
        refuse_removed(&record.heads)?;
        Ok(Some(record))
    }

    /// Heads whose variant is another than the record's: layer, head, what the record says and what the model has.
    pub fn other_heads(&self, model: &Model) -> Vec<(usize, usize, String, String)> {
        let mut other = Vec::new();
        for (layer, own) in variants(model).into_iter().enumerate() {
            for (head, own) in own.into_iter().enumerate() {
                let said = self.heads.get(layer).and_then(|heads| heads.get(head)).cloned().unwrap_or_default();
                if said != own {
                    other.push((layer, head, said, own));
                }
            }
        }
        other
    }

    /// Whether the tensors that were added are as they were.
    pub fn same_tensors(&self, model: &Model, original: &Model) -> bool {
        self.tensors == added(model, original)
    }
}
