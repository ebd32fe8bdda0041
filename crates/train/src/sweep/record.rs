//! Records of ended runs, on disk.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::plan::Job;
use crate::error::{Error, Result};
use crate::provenance::{self, Provenance};
use termwise_base::files::{read_text, write_whole};

/// Final metrics of a run by name, without NaN and infinity.
pub type Metrics = BTreeMap<String, f64>;

/// The result of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case", deny_unknown_fields)]
pub enum Status {
    /// All steps were completed.
    Finished {
        /// The metrics.
        metrics: Metrics,
    },
    /// The run failed.
    Failed {
        /// The reason.
        reason: String,
    },
}

/// The record of a run that has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Hash of its complete settings.
    pub hash: String,
    /// Seconds in the session that ended it.
    pub seconds: f64,
    /// The builds that worked on it; empty if unknown.
    #[serde(default)]
    pub provenance: Vec<Provenance>,
    /// Fingerprint of its training data; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// The result.
    #[serde(flatten)]
    pub status: Status,
}

impl Record {
    /// Whether it is finished and another build than this one worked on it.
    pub fn is_of_another(&self, build: &Provenance) -> bool {
        let own = !self.provenance.is_empty() && self.provenance.iter().all(|made_by| made_by.agrees(build));
        matches!(self.status, Status::Finished { .. }) && !own
    }

    /// The builds that worked on it, as a string.
    pub fn made_by(&self) -> String {
        provenance::names(&self.provenance)
    }

    /// The record of a job, if it has ended.
    pub(super) fn read(folder: &Path, job: &Job) -> Result<Option<Record>> {
        let path = job.path(folder, "json");
        let text = match read_text(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io("read", path)(error)),
        };
        let refuse = |problem: String| Error::Sweep { path: path.clone(), problem };
        let again = "delete the file to rerun it";
        let record: Record =
            serde_json::from_str(&text).map_err(|error| refuse(format!("is not a valid record of a run ({error}); {again}")))?;
        if record.hash != job.hash {
            return Err(refuse(format!("is the record of run {}; {again}", record.hash)));
        }
        Ok(Some(record))
    }

    pub(super) fn write(&self, folder: &Path, job: &Job) -> Result<()> {
        let text = serde_json::to_string_pretty(self).expect("a record contains only numbers and strings");
        Ok(write_whole(&job.path(folder, "json"), text.as_bytes())?)
    }
}
