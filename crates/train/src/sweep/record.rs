//! How runs ended, on disk.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::plan::Job;
use crate::error::{Error, Result};
use crate::provenance::{self, Provenance};
use termwise_base::files::{read_text, write_whole};

/// What was measured at the end of a run, by name. Numbers that are not finite are left out.
pub type Metrics = BTreeMap<String, f64>;

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case", deny_unknown_fields)]
pub enum Status {
    /// To its end.
    Finished {
        /// What was measured.
        metrics: Metrics,
    },
    /// Before its end, by itself.
    Failed {
        /// Why.
        reason: String,
    },
}

/// The end of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Of its complete settings.
    pub hash: String,
    /// What it took in the session that ended it.
    pub seconds: f64,
    /// Which builds made it; empty where that is not known.
    #[serde(default)]
    pub provenance: Vec<Provenance>,
    /// Fingerprint of the data that it was trained on; absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// How.
    #[serde(flatten)]
    pub status: Status,
}

impl Record {
    /// Whether it is finished and was made by anything but this build alone.
    pub fn is_of_another(&self, build: &Provenance) -> bool {
        let own = !self.provenance.is_empty() && self.provenance.iter().all(|made_by| made_by.agrees(build));
        matches!(self.status, Status::Finished { .. }) && !own
    }

    /// Which builds made it, in words.
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
        let again = "delete the file to run it again";
        let record: Record = serde_json::from_str(&text).map_err(|error| refuse(format!("is no record of a run ({error}); {again}")))?;
        if record.hash != job.hash {
            return Err(refuse(format!("is the record of run {}; {again}", record.hash)));
        }
        Ok(Some(record))
    }

    pub(super) fn write(&self, folder: &Path, job: &Job) -> Result<()> {
        let text = serde_json::to_string_pretty(self).expect("a record is numbers and text");
        Ok(write_whole(&job.path(folder, "json"), text.as_bytes())?)
    }
}
