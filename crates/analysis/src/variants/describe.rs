//! Description of a variant.

use serde::{Deserialize, Serialize};
use termwise_attention::parts::write::Delta;
use termwise_attention::presets;
use termwise_attention::{AuxSource, Layer, Rope, Variant};

use super::classes::{Equal, Relation, of_presets};
use crate::Error;
use crate::plan::{self, count::Attention};

/// The sizes for which parameters and states are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Query heads, H.
    pub heads: usize,
    /// KV heads, G.
    pub kv_heads: usize,
    /// d, of q, k and v.
    pub head_dim: usize,
    /// Hidden size, from which gates are projected.
    pub hidden: usize,
}

impl Default for Sizes {
    fn default() -> Sizes {
        Sizes { heads: 16, kv_heads: 16, head_dim: 64, hidden: 1024 }
    }
}

/// A variant and its properties.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Description {
    /// The preset's name, if it was requested by name.
    pub name: Option<String>,
    /// Its parts.
    pub expression: String,
    /// Its formula in the symbols of the legend.
    pub formula: String,
    /// The simplest variant with the same output.
    pub canonical: String,
    /// The label of the presets with the same output, if there are any.
    pub class: Option<String>,
    /// Other presets, and other requested variants, with the same output.
    pub equal_to: Vec<Equal>,
    /// Tensors of one layer beyond those of a Llama.
    pub added: Vec<Added>,
    /// Number of values in them.
    pub added_count: usize,
    /// Recurrent state or KV cache.
    pub state: State,
    /// Warnings.
    pub warnings: Vec<String>,
    /// A note for readers of the paper; empty if there is none.
    pub note: String,
}

/// A tensor of one layer, by its name below `self_attn.`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Added {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Number of values.
    pub count: usize,
}

/// Recurrent state or KV cache of one head during decoding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum State {
    /// No finite feature map: the keys and values of all tokens, 2·d values each.
    KvCache,
    /// A state of constant size.
    Recurrent {
        /// float32 values of the formula, including the denominator.
        floats: u64,
        /// Bytes of the buffers; absent if the engine does not support the state.
        bytes: Option<u64>,
        /// Number of tokens at which a KV cache has the same size.
        break_even_tokens: u64,
    },
    /// A finite state with more than 2^64 values.
    BeyondMemory,
}

impl State {
    /// Number of values in a recurrent state, if it can be counted.
    pub fn floats(&self) -> Option<u64> {
        match self {
            State::Recurrent { floats, .. } => Some(*floats),
            State::KvCache | State::BeyondMemory => None,
        }
    }

    fn of(variant: &Variant, d: usize) -> State {
        let Some(floats) = variant.state_size(d, d) else { return State::KvCache };
        let Ok(floats) = u64::try_from(floats) else { return State::BeyondMemory };
        let counts = Attention::of_layer(std::slice::from_ref(variant), plan::count::Sizes { kv_heads: 1, d });
        let bytes = (counts.growth() == 0).then(|| counts.kept_bytes(0));
        let even = match (bytes, counts.cache_growth()) {
            (Some(bytes), growth @ 1..) => bytes as f64 / growth as f64,
            // A window alone is the complete memory.
            _ => floats as f64 / (2 * d) as f64,
        };
        State::Recurrent { floats, bytes, break_even_tokens: even.round() as u64 }
    }
}

/// Describes these names or variant strings, compared with all presets and with each other.
pub fn describe(texts: &[&str], sizes: Sizes) -> Result<Vec<Description>, Error> {
    let variants = texts.iter().map(|text| text.parse::<Variant>()).collect::<Result<Vec<_>, _>>()?;
    let classes = of_presets();
    texts
        .iter()
        .zip(&variants)
        .enumerate()
        .map(|(index, (text, variant))| {
            let preset = presets::find(text.trim());
            let mut description = one(variant, sizes)?;
            description.name = preset.map(|preset| preset.name.to_string());
            description.note = preset.map_or(String::new(), |preset| preset.note.to_string());
            let class = classes.iter().find(|class| class.canonical == description.canonical);
            description.class = class.map(|class| class.label.clone());
            let named = presets::all().iter().filter(|other| preset.is_none_or(|preset| preset.name != other.name));
            let mut equal = |name: &str, other: &Variant| {
                if let Some(relation) = Relation::between(variant, other) {
                    description.equal_to.push(Equal { name: name.to_string(), relation });
                }
            };
            named.for_each(|other| equal(other.name, &other.parts()));
            for (other, (text, variant)) in texts.iter().zip(&variants).enumerate() {
                if other != index && presets::find(text.trim()).is_none() {
                    equal(text, variant);
                }
            }
            Ok(description)
        })
        .collect()
}

fn one(variant: &Variant, sizes: Sizes) -> Result<Description, Error> {
    let Sizes { heads, kv_heads, head_dim: d, hidden } = sizes;
    let layer = Layer::new(heads, kv_heads, d).rope(Rope::new(d, 10_000.0, None)?).variant(variant)?;
    let mut added = Vec::new();
    let mut add = |name: String, shape: Vec<usize>| added.push(Added { name, count: shape.iter().product(), shape });
    for spec in layer.aux_specs() {
        match &spec.source {
            AuxSource::Projection { outputs, bias } => {
                add(format!("{}.weight", spec.name), vec![*outputs, hidden]);
                if *bias {
                    add(format!("{}.bias", spec.name), vec![*outputs]);
                }
            }
            AuxSource::Parameter { shape, .. } => add(spec.name.to_string(), shape.clone()),
        }
    }
    Ok(Description {
        name: None,
        expression: variant.to_string(),
        formula: match variant.write {
            Some(_) => format!("{}, {}", variant.formula(), Delta::INFO.formula),
            None => variant.formula(),
        },
        canonical: variant.canonical().to_string(),
        class: None,
        equal_to: Vec::new(),
        added_count: added.iter().map(|added| added.count).sum(),
        added,
        state: State::of(variant, d),
        warnings: variant.warnings(),
        note: String::new(),
    })
}
