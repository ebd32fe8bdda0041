//! Record of a conversion in the folder of the converted model. The audit compares the model with it, and other engines can read it.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use termwise_base::files::write_whole;
use termwise_model::Model;

use crate::kv::Error;
use crate::kv::convert::Granularity;
use crate::kv::journal::digest;
use crate::kv::kinds::Kind;

/// File name in the folder of a converted model.
pub const FILE: &str = "kv_memory.json";
/// The record of earlier builds.
const EARLIER_FILE: &str = "conversion.json";
/// Why conversions of earlier builds are refused.
pub const EARLIER_BUILD: &str = "it was converted by an earlier build, with calibrated key ranges (last supported by commit e9b2d07) or far states (by commit \
                                 12bd7e8); convert the original model again";

/// Memory of each KV head of a converted model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Name of the original, as given.
    pub original: String,
    /// Whether every KV head has its own kind, or every layer.
    pub granularity: Granularity,
    /// The memory of each KV head, by layer.
    pub kinds: Vec<Vec<Kind>>,
    /// The variant of each head, by layer.
    pub heads: Vec<Vec<String>>,
    /// Bytes of the state of one sequence.
    pub bytes: u64,
    /// A digest of all other fields.
    pub checksum: String,
}

pub(crate) fn variants(model: &Model) -> Vec<Vec<String>> {
    (0..model.config.num_hidden_layers).map(|layer| model.config.heads(layer).iter().map(ToString::to_string).collect()).collect()
}

impl Record {
    /// The record of a converted model with these kinds per KV head.
    pub fn new(name: &str, model: &Model, kinds: &[Kind], granularity: Granularity, bytes: u64) -> Record {
        let kinds = kinds.chunks(model.config.num_key_value_heads).map(<[Kind]>::to_vec).collect();
        let mut record = Record { original: name.into(), granularity, kinds, heads: variants(model), bytes, checksum: String::new() };
        record.checksum = record.digest();
        record
    }

    /// Checksum of all other fields.
    fn digest(&self) -> String {
        digest(&format!("{:?} {:?} {:?} {:?} {}", self.original, self.granularity, self.kinds, self.heads, self.bytes))
    }

    /// Writes it into the model's folder.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        Ok(write_whole(&folder.join(FILE), &serde_json::to_vec_pretty(self).unwrap_or_default())?)
    }

    /// The record in a model's folder; `None` if there is none. Refuses records of earlier builds.
    pub fn read(folder: &Path) -> Result<Option<Record>, Error> {
        let path = folder.join(FILE);
        let bytes = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                // A report has the same name, and no digest of tensors.
                let earlier = folder.join(EARLIER_FILE);
                let record: Option<Value> = std::fs::read(&earlier).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
                return match record.is_some_and(|record| record.get("tensors").is_some()) {
                    true => Err(Error::Request(format!("{}: {EARLIER_BUILD}", earlier.display()))),
                    false => Ok(None),
                };
            }
            read => read.map_err(termwise_base::files::Error::io("read", &path))?,
        };
        let record: Record = serde_json::from_slice(&bytes).map_err(|error| {
            Error::Request(format!("{} is not a record of a conversion ({error}); convert again, or remove it", path.display()))
        })?;
        if record.checksum != record.digest() {
            let path = path.display();
            return Err(Error::Request(format!("{path} was edited: its checksum does not match; convert the original model again")));
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
}
