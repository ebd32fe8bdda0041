//! The table of settings: key, flag, type, default, help, and the effect of a change.

use serde::{Deserialize, Serialize};
use toml::Value;

use crate::schedule::Decay;

/// Type of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole number, zero or more.
    Count,
    /// A finite number.
    Number,
    /// true or false.
    Switch,
    /// A string.
    Text,
    /// A list of strings; a single one needs no brackets.
    List,
    /// A variant string, or a map per layer and head.
    Attention,
}

impl Kind {
    /// The accepted values, for messages.
    pub fn expected(self) -> &'static str {
        match self {
            Kind::Count => "a whole number, zero or more",
            Kind::Number => "a finite number",
            Kind::Switch => "true or false",
            Kind::Text => "a string",
            Kind::List => "a string or a list of strings",
            Kind::Attention => "a variant string, or a map per layer and head",
        }
    }

    /// The value as stored in settings; `None` if it has another type.
    pub(super) fn accept(self, value: &Value) -> Option<Value> {
        match (self, value) {
            (Kind::Count, Value::Integer(n)) if *n >= 0 => Some(value.clone()),
            (Kind::Number, Value::Integer(n)) => Some(Value::Float(*n as f64)),
            (Kind::Number, Value::Float(x)) if x.is_finite() => Some(value.clone()),
            (Kind::Switch, Value::Boolean(_)) | (Kind::Text, Value::String(_)) => Some(value.clone()),
            (Kind::Attention, Value::String(_) | Value::Table(_)) => Some(value.clone()),
            (Kind::List, Value::String(_)) => Some(Value::Array(vec![value.clone()])),
            (Kind::List, Value::Array(items)) if items.iter().all(Value::is_str) => Some(value.clone()),
            _ => None,
        }
    }

    /// Parses the value of a flag; `None` if it has another type.
    pub fn parse(self, text: &str) -> Option<Value> {
        let value = match self {
            Kind::Count => Value::Integer(text.replace('_', "").parse().ok()?),
            Kind::Number => Value::Float(text.parse().ok()?),
            Kind::Switch => Value::Boolean(text.parse().ok()?),
            Kind::Text | Kind::List => Value::String(text.into()),
            Kind::Attention if text.trim_start().starts_with('{') => serde_json::from_str(text).ok()?,
            Kind::Attention => Value::String(text.into()),
        };
        self.accept(&value)
    }
}

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Its key in a file; the flag has dashes.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Its heading in help.
    pub group: &'static str,
    /// Its help.
    pub help: &'static str,
    /// What another value changes.
    pub effect: Effect,
}

/// Effect of changing a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Changes the computation: a run cannot be resumed with another value.
    Computation,
    /// Changes where data come from: a run can be resumed if the data have the same fingerprint.
    Data,
    /// Changes the number of steps: a resumed run may train longer.
    Duration,
    /// Changes the arithmetic: a run can be resumed with another value and is the same up to rounding.
    Rounding,
    /// Changes what is evaluated or tolerated. The weights are the same.
    Evaluation,
    /// Changes nothing in the results of a run, or only through other settings.
    None,
}

impl Effect {
    /// Whether runs with different values compute something different from the first step on.
    pub fn is_computed(self) -> bool {
        matches!(self, Effect::Computation | Effect::Data)
    }

    /// Whether the weights at the end of a run may depend on it.
    pub fn on_weights(self) -> bool {
        self.is_computed() || matches!(self, Effect::Duration | Effect::Rounding)
    }
}

/// The setting with this key or alias.
pub fn find(name: &str) -> Option<&'static Key> {
    let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, key)| key);
    KEYS.iter().find(|key| key.name == name)
}

/// All keys and aliases.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    KEYS.iter().map(|key| key.name).chain(ALIASES.iter().map(|(alias, _)| *alias))
}

/// Clearer names of keys. Files and flags accept both. Files are written with the key, because hashes that identify runs contain it.
pub const ALIASES: [(&str, &str); 2] = [("final_lr_ratio", "final_lr"), ("builtin_options", "language")];

/// Settings that `--help` lists; `--help-all` lists all of them.
pub const COMMON: [&str; 20] = [
    "recipe",
    "model",
    "from",
    "hidden",
    "heads",
    "layers",
    "attention",
    "data",
    "tokenizer",
    "held_out",
    "batch",
    "length",
    "steps",
    "seed",
    "lr",
    "warmup",
    "weight_decay",
    "eval_every",
    "checkpoint_every",
    "engine",
];

impl Key {
    /// The name that help shows: the alias if there is one.
    pub fn shown(&self) -> &'static str {
        ALIASES.iter().find(|(_, key)| *key == self.name).map_or(self.name, |(alias, _)| alias)
    }

    /// Whether `--help` lists it.
    pub fn is_common(&self) -> bool {
        COMMON.contains(&self.name)
    }
}

/// Heading of the settings of data.
pub const DATA: &str = "Data";

/// Types of settings.
trait Typed {
    const KIND: Kind;
}

macro_rules! kinds {
    ($($type:ty: $kind:ident),*) => {$(
        impl Typed for $type {
            const KIND: Kind = Kind::$kind;
        }
    )*};
}

kinds! { usize: Count, u64: Count, f64: Number, bool: Switch, String: Text, Decay: Text, Vec<String>: List, Value: Attention }

/// If absent, the value is derived from the data.
impl<T: Typed> Typed for Option<T> {
    const KIND: Kind = T::KIND;
}

/// Settings that were added later are omitted from files at their defaults, so files and hashes of earlier runs stay the same.
fn is_one(n: &usize) -> bool {
    *n == 1
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

fn is_f32(precision: &str) -> bool {
    precision == "f32"
}

fn is_native(engine: &str) -> bool {
    engine == "native"
}

/// A line of TOML with the default; empty if the default depends on the model, or if there is none.
macro_rules! usual {
    ($name:ident _) => {
        ""
    };
    ($name:ident $value:tt) => {
        concat!(stringify!($name), " = ", stringify!($value), "\n")
    };
}

macro_rules! settings {
    ($($group:literal {$($(#[$attribute:meta])? $effect:ident $name:ident: $type:ty = $usual:tt, $help:literal;)*})*) => {
        /// All settings of a run.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        pub struct Settings {
            $($(#[doc = $help] $(#[$attribute])? pub $name: $type,)*)*
        }

        /// All settings, in the order of help and of `settings.toml`.
        pub const KEYS: &[Key] = &[
            $($(Key { name: stringify!($name), kind: <$type as Typed>::KIND, group: $group, help: $help, effect: Effect::$effect },)*)*
        ];

        /// Defaults of all settings, as TOML.
        pub(super) const DEFAULT: &str = concat!($($(usual!($name $usual)),*),*);
    };
}

settings! {
    "Training" {
        None recipe: String = _, "Named settings to start from: default, language or paper";
    }
    "Model" {
        None model: String = "tiny", "Model sizes by name: tiny, small-test, medium-test, paper-small, paper-large or paper-deep";
        Computation from: String = "", "Model folder to start from: its weights, sizes and attention";
        Computation hidden: usize = _, "Hidden size";
        Computation mlp: usize = _, "Intermediate size of the MLP";
        Computation heads: usize = _, "Query heads per layer";
        Computation kv_heads: usize = _, "Key-value heads per layer; 0: same as heads";
        Computation layers: usize = _, "Layers";
        Computation head_dim: usize = _, "Head dimension; 0: hidden / heads";
        Computation vocab: usize = 0, "Vocabulary size; 0: that of the data";
        Computation tie: bool = false, "Tie the embedding and the output projection";
        Computation rope_theta: f64 = 10000.0, "Base of the rotary frequencies";
        Computation norm_eps: f64 = 1e-5, "Epsilon of RMSNorm";
        Computation init_std: f64 = 0.02, "Standard deviation of initial weights";
        Computation attention: Value = "softmax", "Attention of every head: preset, variant string, or JSON map per layer and head";
    }
    "Data" {
        Data data: Vec<String> = ["builtin"], "Files, folders, globs, hf://datasets/…, or a synthetic task: builtin (associative recall), parity, mqar, mqar-mini or s5; may be repeated";
        Data language: String = "", "Options of a synthetic task, such as \"facts=20 keys=128\"";
        Data tokenizer: String = "bytes", "bytes, a tokenizer.json, or a folder that contains one";
        #[serde(skip_serializing_if = "Option::is_none")]
        Data end_of_document: Option<String> = _, "Token that ends a document; default: the tokenizer's own";
        Data special_tokens: bool = true, "Add the special tokens of the tokenizer's template to each document";
        Data field: String = "text", "Field of JSON lines or column of Parquet files that contains the text";
        Data documents: String = "file", "How text files are split into documents: file, line, blank-line or separator:TEXT";
        #[serde(skip_serializing_if = "Option::is_none")]
        Data held_out: Option<f64> = _, "Fraction of documents held out; default: 0.001, or 0.1 if there are few documents";
        Data split_seed: u64 = 0, "Seed of the held-out split";
        #[serde(skip_serializing_if = "Vec::is_empty", default)]
        Data valid_data: Vec<String> = [], "Text that is held out entirely, instead of a fraction of data; may be repeated";
        #[serde(skip_serializing_if = "String::is_empty", default)]
        Data valid_range: String = "", "Part of the held-out tokens to use, as fractions: 0.25..1";
        #[serde(skip_serializing_if = "is_zero", default)]
        Data valid_tokens: u64 = 0, "Largest number of held-out tokens to use, in evenly spaced blocks; 0: all";
        Data layout: String = "packed", "packed: documents are joined and split into rows; padded: one document per row";
    }
    "Training" {
        Computation batch: usize = 16, "Rows per batch";
        Computation length: usize = 256, "Positions per row";
        Computation accumulate: usize = 1, "Batches per update (gradient accumulation)";
        #[serde(skip_serializing_if = "is_one")]
        Computation micro_batches: usize = 1, "Parts of a step whose gradients are added in a tree; up to that many processes can share it";
        Duration steps: u64 = 1000, "Updates";
        Computation seed: u64 = 1, "Seed of initial weights and data order";
        Computation lr: f64 = 3e-3, "Peak learning rate";
        Computation warmup: u64 = 100, "Warmup steps";
        Computation decay: Decay = "cosine", "Learning-rate decay after warmup: linear, cosine or constant";
        Computation horizon: u64 = 0, "Step at which the decay ends; 0: steps";
        Computation final_lr: f64 = 0.1, "Final learning rate as a fraction of the peak";
        Computation beta1: f64 = 0.9, "AdamW beta1";
        Computation beta2: f64 = 0.95, "AdamW beta2";
        Computation adam_eps: f64 = 1e-8, "AdamW epsilon";
        Computation weight_decay: f64 = 0.1, "AdamW weight decay";
        Computation decay_matrices_only: bool = true, "Exclude norms, biases and scalars from weight decay";
        Computation clip: f64 = 1.0, "Largest gradient norm; 0: no clipping";
        Computation clip_gated_only: bool = false, "Clip only models with a gate, as in the paper";
    }
    "Run" {
        Evaluation eval_every: u64 = 100, "Steps between evaluations on held-out data; 0: never";
        Evaluation eval_batches: u64 = 16, "Batches per evaluation; 0: all held-out data";
        #[serde(skip_serializing_if = "Option::is_none")]
        Evaluation eval_length: Option<usize> = _, "Positions per row in evaluations; default: the length";
        None checkpoint_every: u64 = 500, "Steps between checkpoints; 0: only at the end";
        None keep: usize = 2, "Newest checkpoints to keep, in addition to the best one";
        None log_every: u64 = 10, "Steps between lines of metrics.jsonl";
        #[serde(skip_serializing_if = "is_native")]
        Rounding engine: String = "native", "native, or torch, which needs Python with PyTorch; the same up to rounding";
        #[serde(skip_serializing_if = "is_f32")]
        Computation precision: String = "f32", "Precision of linear layers and products of attention: f32, or bf16 with float32 sums and weights";
        Computation mode: String = "parallel", "How attention is computed: parallel, chunk, chunk=LENGTH or auto; the same up to rounding";
        None threads: usize = 0, "Threads; 0: all cores. Results do not depend on the number";
        Evaluation skip_nonfinite: u64 = 0, "Updates that may be skipped because the loss or gradient is not finite";
    }
}
