//! A loss or gradient that is not finite: where it came from, and a folder from which the step can be repeated.
//!
//! ```text
//! nonfinite-step-N/
//!     config.json  model.safetensors    the model before the step
//!     batch.json                        the batches of the step
//!     settings.toml                     the settings of the run
//!     diagnosis.json                    what was found
//! ```

mod probe;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use termwise_attention::Mode;
use termwise_llama::{Model, Options, Params};

use crate::error::{Error, Result};
use crate::learner::Learner;
use crate::settings::Settings;
use crate::step::{Computed, Cut, Gradients};
use termwise_base::files::{beside, create_folder, sync_folder, write_synced};
use termwise_data::Rows;

pub use probe::Origin;

/// What was found at a step that could not be made. Numbers are texts, since JSON has no NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Diagnosis {
    /// The step, counted from 1.
    pub step: u64,
    /// How attention was computed.
    #[serde(default = "parallel")]
    pub mode: String,
    /// Its loss.
    pub loss: String,
    /// Norm of its gradient.
    pub norm: String,
    /// The first batch of the step whose loss is not finite.
    pub batch: Option<usize>,
    /// The first denominator of an attention that was not positive.
    pub denominator: Option<Denominator>,
    /// Where going forward the first value that is not finite appears.
    pub forward: Option<Origin>,
    /// Where that is an attention: its first output that is not finite.
    #[serde(default)]
    pub output: Option<Output>,
    /// A weight that is not finite.
    pub weight: Option<Place>,
    /// The first gradient, in the order of the backward pass, that is not finite.
    pub gradient: Option<Place>,
}

/// The only mode when folders did not yet say one.
fn parallel() -> String {
    Mode::Parallel.to_string()
}

/// A denominator that was zero, negative or NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Denominator {
    /// Layer.
    pub layer: usize,
    /// Head.
    pub head: usize,
    /// Batch row.
    pub row: usize,
    /// Position.
    pub position: usize,
    /// Its value.
    pub value: String,
}

/// An output of an attention that is not finite, as when a state grows without bound.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Output {
    /// Head.
    pub head: usize,
    /// Batch row.
    pub row: usize,
    /// Position.
    pub position: usize,
}

/// A value in a parameter or its gradient.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The parameter's name.
    pub tensor: String,
    /// Index of the value, row-major.
    pub index: usize,
    /// Layer, for parameters of layers.
    pub layer: Option<usize>,
    /// Head, for parameters whose rows or columns belong to one; key-value head for keys and values.
    pub head: Option<usize>,
    /// The value.
    pub value: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.tensor)?;
        if let Some(layer) = self.layer {
            write!(f, " (layer {layer}")?;
            if let Some(head) = self.head {
                write!(f, ", head {head}")?;
            }
            write!(f, ")")?;
        }
        write!(f, " is {} at value {}", self.value, self.index)
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}: the loss is {}, the norm of the gradient {}", self.step, self.loss, self.norm)?;
        if let Some(batch) = self.batch.filter(|&batch| batch > 0) {
            write!(f, "; first in batch {batch} of the step")?;
        }
        if let Some(Denominator { layer, head, row, position, value }) = &self.denominator {
            write!(f, "; the denominator of layer {layer}, head {head} is {value} at position {position} of row {row}")?;
        }
        if let Some(place) = &self.weight {
            write!(f, "; the weight {place}")?;
        }
        if let Some(origin) = &self.forward {
            write!(f, "; going forward, {origin} is the first that is not finite")?;
        }
        if let Some(Output { head, row, position }) = &self.output {
            write!(f, ", in head {head} from position {position} of row {row} on")?;
        }
        match &self.gradient {
            Some(place) => write!(f, "; going backward, the gradient of {place}"),
            None if self.batch.is_none() => write!(f, "; every gradient is finite, but the sum of their squares overflows"),
            None => Ok(()),
        }
    }
}

/// Finds out what was not finite. `computed` is what [`Gradients`] have just said of these batches.
pub fn diagnose(model: &Model, gradients: Option<&Gradients>, computed: &Computed, parts: &[Rows], step: u64) -> Diagnosis {
    let options = gradients.map_or(Options::default(), Gradients::options);
    let denominator = computed.nonpositive.map(|n| Denominator {
        layer: n.layer,
        head: n.head,
        row: n.row,
        position: n.position,
        value: n.value.to_string(),
    });
    let bad = computed.bad_batch.and_then(|batch| parts.get(batch));
    let forward = bad.and_then(|rows| probe::origin(model, rows, options).ok().flatten());
    let output = match (bad, forward) {
        (Some(rows), Some(Origin::Attention(layer))) => probe::output(model, rows, options, layer).ok().flatten(),
        _ => None,
    };
    Diagnosis {
        step,
        mode: options.mode.to_string(),
        loss: computed.loss.to_string(),
        norm: computed.norm.to_string(),
        batch: computed.bad_batch,
        denominator,
        forward,
        output,
        weight: first_bad(model, &model.params, false),
        gradient: gradients.and_then(|gradients| first_bad(model, gradients.gradient(), true)),
    }
}

fn first_bad(model: &Model, values: &Params, backward: bool) -> Option<Place> {
    let entries: Vec<_> = values.iter().collect();
    let bad = |&(entry, data): &(_, &[f32])| data.iter().position(|x| !x.is_finite()).map(|index| (entry, index, data[index]));
    let found = if backward { entries.iter().rev().find_map(bad) } else { entries.iter().find_map(bad) };
    let (entry, index, value): (&termwise_llama::params::Entry, usize, f32) = found?;
    let name = &entry.spec.name;
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
    let columns = entry.spec.shape.get(1).copied().unwrap_or(1).max(1);
    let (row, column) = (index / columns, index % columns);
    let part = name.rsplit('.').nth(1).unwrap_or_default();
    let head = match part {
        "q_proj" | "k_proj" | "v_proj" => Some(row / model.config.head_dim),
        "o_proj" => Some(column / model.config.head_dim),
        _ => None,
    };
    Some(Place { tensor: name.clone(), index, layer, head, value: value.to_string() })
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedRows {
    rows: usize,
    time: usize,
    ids: Vec<u32>,
    labels: Vec<i32>,
    lengths: Vec<usize>,
}

/// Saves a step that could not be made into `nonfinite-step-N` of a run's folder; what an earlier attempt left there is replaced.
pub fn save(folder: &Path, learner: &dyn Learner, parts: &[Rows], settings: &Settings, diagnosis: &Diagnosis) -> Result<PathBuf> {
    let place = folder.join(format!("nonfinite-step-{}", diagnosis.step));
    let part = beside(&place, "part");
    for old in [&part, &place] {
        match std::fs::remove_dir_all(old) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove the older", old)(error)),
            _ => {}
        }
    }
    create_folder(&part)?;
    let rows: Vec<SavedRows> = parts
        .iter()
        .map(|r| SavedRows { rows: r.rows, time: r.time, ids: r.ids.clone(), labels: r.labels.clone(), lengths: r.lengths.clone() })
        .collect();
    let json = |name: &str, bytes: serde_json::Result<Vec<u8>>| -> Result<()> {
        let path = part.join(name);
        Ok(write_synced(&path, &bytes.map_err(Error::json(&path))?)?)
    };
    json("batch.json", serde_json::to_vec(&rows))?;
    json("diagnosis.json", serde_json::to_vec_pretty(diagnosis))?;
    write_synced(&part.join("settings.toml"), settings.to_toml().as_bytes())?;
    // Weights that are no numbers cannot be written as weights; the diagnosis says which.
    learner.write_model(&part, diagnosis.weight.is_none())?;
    sync_folder(&part)?;
    std::fs::rename(&part, &place).map_err(Error::io("put in place", &place))?;
    sync_folder(folder)?;
    Ok(place)
}

/// A step that was repeated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Replay {
    /// What was found when the run stopped.
    pub before: Diagnosis,
    /// What was found now; `None` where everything was finite.
    pub now: Option<Diagnosis>,
}

impl Replay {
    /// Whether both are the same in every detail.
    pub fn same(&self) -> bool {
        self.now.as_ref() == Some(&self.before)
    }
}

/// Repeats a step that [`save`] has written, up to the update that was not made.
pub fn replay(folder: impl AsRef<Path>) -> Result<Replay> {
    let folder = folder.as_ref();
    let read = |name: &str| {
        let path = folder.join(name);
        std::fs::read(&path).map_err(Error::io("read", path))
    };
    let before: Diagnosis = serde_json::from_slice(&read("diagnosis.json")?).map_err(Error::json(folder.join("diagnosis.json")))?;
    let saved: Vec<SavedRows> = serde_json::from_slice(&read("batch.json")?).map_err(Error::json(folder.join("batch.json")))?;
    if let Some(place) = &before.weight {
        let problem = format!("the weight {place}, so the step was saved without weights; resume from the checkpoint before it");
        return Err(Error::NoCheckpoint { folder: folder.into(), problem });
    }
    let model = Model::read(folder)?;
    let parts: Vec<Rows> = saved
        .into_iter()
        .map(|SavedRows { rows, time, ids, labels, lengths }| Rows { rows, time, ids, labels, lengths, ..Rows::default() })
        .collect();
    let Some(first) = parts.first() else {
        return Err(Error::NoCheckpoint { folder: folder.into(), problem: "batch.json holds no batch".into() });
    };
    let options = Options { mode: before.mode.parse()?, ..Options::default() };
    let text = std::fs::read_to_string(folder.join("settings.toml")).unwrap_or_default();
    // Folders of earlier builds, and of settings that cannot be read any more, are of one micro-batch.
    let micro_batches = Settings::from_checkpoint(&text, "").map_or(1, |settings| settings.micro_batches);
    let cut = Cut { batch: first.rows, length: first.time, accumulate: parts.len(), micro_batches };
    let cut = if cut.is_even() { cut } else { Cut { micro_batches: 1, ..cut } };
    let mut gradients = Gradients::new(&model, cut, options, (0, 1))?;
    let computed = gradients.whole(&model.params, &parts)?;
    let now = (!computed.is_finite()).then(|| diagnose(&model, Some(&gradients), &computed, &parts, before.step));
    Ok(Replay { before, now })
}
