//! The choices of a conversion, in the folder of the converted model: an audit compares the model with them.

use std::path::Path;

use serde::{Deserialize, Serialize};
use termwise_base::files::write_whole;
use termwise_model::Model;

use crate::kv::Error;
use crate::kv::journal::digest;

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
    /// A digest of all other fields; absent in records of earlier builds, whose bytes leave out the overhead of layers.
    #[serde(default)]
    pub checksum: Option<String>,
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
        let mut record = Record { original: name.into(), heads: variants(model), bytes, tensors: added(model, original), checksum: None };
        record.checksum = Some(record.digest());
        record
    }

    /// Of all fields but the checksum.
    fn digest(&self) -> String {
        digest(&format!("{:?} {:?} {} {:?}", self.original, self.heads, self.bytes, self.tensors))
    }

    /// Writes it into the model's folder.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        Ok(write_whole(&folder.join(FILE), &serde_json::to_vec_pretty(self).unwrap_or_default())?)
    }

    /// The record in a model's folder; `None` if there is none. Refuses records of conversions with parts that were removed.
    pub fn read(folder: &Path) -> Result<Option<Record>, Error> {
        let path = folder.join(FILE);
        let bytes = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(termwise_base::files::Error::io("read", &path))?,
        };
        let record: Record = serde_json::from_slice(&bytes).map_err(|error| {
            Error::Asked(format!("{} is not a record of a conversion ({error}); convert again, or remove it", path.display()))
        })?;
        refuse_removed(&record.heads)?;
        if record.checksum.as_ref().is_some_and(|checksum| *checksum != record.digest()) {
            let path = path.display();
            return Err(Error::Asked(format!("{path} was edited: its checksum does not match; convert the original model again")));
        }
        Ok(Some(record))
    }

    /// Heads whose variant differs from the record's, and heads that only one of the two has: layer, head, the record's variant and the model's, empty if absent.
    pub fn other_heads(&self, model: &Model) -> Vec<(usize, usize, String, String)> {
        let own = variants(model);
        let mut other = Vec::new();
        for layer in 0..own.len().max(self.heads.len()) {
            let [model, record] = [&own, &self.heads].map(|heads| heads.get(layer).map(Vec::as_slice).unwrap_or_default());
            for head in 0..model.len().max(record.len()) {
                let of = |heads: &[String]| heads.get(head).cloned().unwrap_or_default();
                if of(model) != of(record) {
                    other.push((layer, head, of(record), of(model)));
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
