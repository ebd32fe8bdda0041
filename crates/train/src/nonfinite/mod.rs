//! Diagnosis of a NaN or infinite loss or gradient, saved as `nonfinite-step-N/diagnosis.json` in the run's directory.

mod probe;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use termwise_attention::Mode;
use termwise_model::{Model, Params, SessionOptions};

use crate::error::{Error, Result};
use crate::step::{Computed, Gradients};
use termwise_base::files::write_whole;
use termwise_data::Rows;

pub use probe::Origin;

/// The diagnosis of a step without an update. Values are strings because JSON has no NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Diagnosis {
    /// The step, counted from 1.
    pub step: u64,
    /// The computation mode of attention.
    #[serde(default = "parallel")]
    pub mode: String,
    /// The loss.
    pub loss: String,
    /// The gradient norm.
    pub norm: String,
    /// The first batch of the step whose loss is NaN or infinite.
    pub batch: Option<usize>,
    /// The first attention denominator that was not positive.
    pub denominator: Option<Denominator>,
    /// The origin of the first NaN or infinity in the forward pass.
    pub forward: Option<Origin>,
    /// If the origin is attention: its first head with NaN or infinity, for instance if a state grows without bound.
    #[serde(default)]
    pub head: Option<usize>,
    /// A weight that is NaN or infinite.
    pub weight: Option<Place>,
    /// The first gradient, in the order of the backward pass, that is NaN or infinite.
    pub gradient: Option<Place>,
}

/// The mode of files from earlier builds, which did not record it.
fn parallel() -> String {
    Mode::Parallel.to_string()
}

/// A denominator that is zero, negative or NaN.
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
    /// The denominator.
    pub value: String,
}

/// An element of a parameter or its gradient.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The parameter's name.
    pub tensor: String,
    /// Index of the value, row-major.
    pub index: usize,
    /// Layer, for parameters of layers.
    pub layer: Option<usize>,
    /// Head, for parameters whose rows or columns belong to a head; the KV head for keys and values.
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
        write!(f, "step {}: the loss is {}, the gradient norm is {}", self.step, self.loss, self.norm)?;
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
            write!(f, "; in the forward pass, {origin} is the first with NaN or infinity")?;
        }
        if let Some(head) = self.head {
            write!(f, ", in head {head}")?;
        }
        match &self.gradient {
            Some(place) => write!(f, "; in the backward pass, the gradient of {place}"),
            None if self.batch.is_none() => write!(f, "; every gradient is finite, but the sum of squares overflows"),
            None => Ok(()),
        }
    }
}

/// Diagnoses a NaN or infinity. `computed` is the result of [`Gradients`] for these batches.
pub fn diagnose(model: &Model, gradients: Option<&Gradients>, computed: &Computed, parts: &[Rows], step: u64) -> Diagnosis {
    let options = gradients.map_or(SessionOptions::default(), Gradients::options);
    let denominator = computed.nonpositive.map(|n| Denominator {
        layer: n.layer,
        head: n.head,
        row: n.row,
        position: n.position,
        value: n.value.to_string(),
    });
    let bad = computed.bad_batch.and_then(|batch| parts.get(batch));
    let forward = bad.and_then(|rows| probe::origin(model, rows, options).ok().flatten());
    let head = match (bad, forward) {
        (Some(rows), Some(Origin::Attention(layer))) => probe::head(model, rows, options, layer).ok().flatten(),
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
        head,
        weight: first_bad(model, &model.params, false),
        gradient: gradients.and_then(|gradients| first_bad(model, gradients.gradient(), true)),
    }
}

fn first_bad(model: &Model, values: &Params, backward: bool) -> Option<Place> {
    let entries: Vec<_> = values.iter().collect();
    let bad = |&(entry, data): &(_, &[f32])| data.iter().position(|x| !x.is_finite()).map(|index| (entry, index, data[index]));
    let found = if backward { entries.iter().rev().find_map(bad) } else { entries.iter().find_map(bad) };
    let (entry, index, value): (&termwise_model::params::ParamEntry, usize, f32) = found?;
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

/// Writes the diagnosis of step N to `nonfinite-step-N/diagnosis.json` in a run's directory and returns the path. Replaces an earlier one.
pub fn save(folder: &Path, diagnosis: &Diagnosis) -> Result<PathBuf> {
    let place = folder.join(format!("nonfinite-step-{}", diagnosis.step));
    let path = place.join("diagnosis.json");
    std::fs::create_dir_all(&place).map_err(Error::io("create", &place))?;
    let text = serde_json::to_vec_pretty(diagnosis).map_err(Error::json(&path))?;
    write_whole(&path, &text)?;
    Ok(path)
}
