//! Every setting once: its key in a file and its flag, its type, its default, what it means, and what another value changes.

use serde::{Deserialize, Serialize};
use toml::Value;

use crate::schedule::Decay;

/// What a setting's value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole number, zero or more.
    Count,
    /// A finite number.
    Number,
    /// true or false.
    Switch,
    /// A text.
    Text,
    /// Texts; a single one may stand without brackets.
    List,
    /// The text of an attention variant, or a map by layer and head.
    Attention,
}

impl Kind {
    /// What belongs there, for messages.
    pub fn expected(self) -> &'static str {
        match self {
            Kind::Count => "a whole number, zero or more",
            Kind::Number => "a finite number",
            Kind::Switch => "true or false",
            Kind::Text => "a text",
            Kind::List => "a text or a list of texts",
            Kind::Attention => "the text of an attention variant, or a map by layer and head",
        }
    }

    /// The value in the form in which settings hold it; `None` where it is of another kind.
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

    /// The value of a flag's text; `None` where it is of another kind.
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
    /// Its name in a file; as a flag with dashes.
    pub name: &'static str,
    /// What its value is.
    pub kind: Kind,
    /// Heading under which it stands.
    pub group: &'static str,
    /// What it means.
    pub help: &'static str,
    /// What another value changes.
    pub effect: Effect,
}

/// What another value of a setting changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// What is computed: a run cannot be resumed with such a change.
    Mathematics,
    /// Where data come from: a run can be resumed if the data are the same, by their fingerprint.
    Data,
    /// How far a run goes: one that is resumed may go further.
    Extent,
    /// By which arithmetic: a run can be resumed with another, and is the same up to rounding.
    Rounding,
    /// What is measured or put up with on the way. The weights are the same, what is known about them is not.
    Watching,
    /// Nothing that a run leaves behind, or only what the settings that it stands for change.
    Nothing,
}

impl Effect {
    /// Whether runs with different values compute something different from the first step on.
    pub fn is_computed(self) -> bool {
        matches!(self, Effect::Mathematics | Effect::Data)
    }

    /// Whether the weights at the end of a run may depend on it.
    pub fn on_weights(self) -> bool {
        self.is_computed() || matches!(self, Effect::Extent | Effect::Rounding)
    }
}

/// The setting of this name.
pub fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
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

/// Where absent, another value follows from the data.
impl<T: Typed> Typed for Option<T> {
    const KIND: Kind = T::KIND;
}

/// What is left out of files where it is as it was before there was a choice: files and hashes of earlier runs stay as they are.
fn is_one(n: &usize) -> bool {
    *n == 1
}

fn is_native(engine: &str) -> bool {
    engine == "native"
}

/// A line of TOML, or nothing where the sizes of a model say the value or none is usual.
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
        /// Everything that decides a run.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        pub struct Settings {
            $($(#[doc = $help] $(#[$attribute])? pub $name: $type,)*)*
        }

        /// All settings, in the order of help and of `settings.toml`.
        pub const KEYS: &[Key] = &[
            $($(Key { name: stringify!($name), kind: <$type as Typed>::KIND, group: $group, help: $help, effect: Effect::$effect },)*)*
        ];

        /// What every run begins with, as TOML.
        pub(super) const DEFAULT: &str = concat!($($(usual!($name $usual)),*),*);
    };
}

settings! {
    "Training" {
        Nothing recipe: String = _, "Named settings to begin with: default, language or paper; other keys change them";
    }
    "Model" {
        Nothing model: String = "tiny", "Sizes by name: tiny, small-test, medium-test, paper-small, paper-large or paper-deep";
        Mathematics from: String = "", "Folder of a model to start from; its sizes hold, and its attention unless another is given";
        Mathematics hidden: usize = _, "Width of the hidden state";
        Mathematics mlp: usize = _, "Width inside the MLP";
        Mathematics heads: usize = _, "Query heads of a layer";
        Mathematics kv_heads: usize = _, "Key-value heads of a layer; 0: as many as heads";
        Mathematics layers: usize = _, "Layers";
        Mathematics head_dim: usize = _, "Width of a head; 0: hidden / heads";
        Mathematics vocab: usize = 0, "Tokens in the vocabulary; 0: as many as the data has";
        Mathematics tie: bool = false, "Use the embedding as output projection too";
        Mathematics rope_theta: f64 = 10000.0, "Base of the rotary frequencies";
        Mathematics norm_eps: f64 = 1e-5, "eps of the RMSNorms";
        Mathematics init_std: f64 = 0.02, "Standard deviation of fresh weights";
        Mathematics attention: Value = "softmax", "Attention of every head: a preset, an expression, or a map by layer and head in JSON";
    }
    "Data" {
        Data data: Vec<String> = ["builtin"], "Files, folders, globs and hf://datasets/…; or builtin, the language with known entropy, or builtin:parity; may be repeated";
        Data language: String = "", "Dials of built-in data, such as \"facts=20 keys=128\"";
        Data tokenizer: String = "bytes", "bytes, a tokenizer.json, or a folder that holds one";
        #[serde(skip_serializing_if = "Option::is_none")]
        Data end_of_document: Option<String> = _, "Token that ends a document; where absent the tokenizer's own";
        Data special_tokens: bool = true, "Let the tokenizer add what its template says to each document";
        Data field: String = "text", "Field of JSON lines or column of parquet files that holds the text";
        Data documents: String = "file", "How text files are cut: file, line, blank-line or separator:<text>";
        #[serde(skip_serializing_if = "Option::is_none")]
        Data held_out: Option<f64> = _, "Share of documents held out; where absent 0.001, or 0.1 of few documents";
        Data split_seed: u64 = 0, "Seed that decides what is held out";
        Data layout: String = "packed", "packed: documents joined and cut into rows; padded: one document a row";
    }
    "Training" {
        Mathematics batch: usize = 16, "Rows computed at once";
        Mathematics length: usize = 256, "Positions of a row";
        Mathematics accumulate: usize = 1, "Batches whose gradients make one update";
        #[serde(skip_serializing_if = "is_one")]
        Mathematics micro_batches: usize = 1, "Parts of a step's rows whose gradients are added in a tree: as many processes can share it";
        Extent steps: u64 = 1000, "Updates in all";
        Mathematics seed: u64 = 1, "Seed of fresh weights and of the order of data";
        Mathematics lr: f64 = 3e-3, "Peak learning rate";
        Mathematics warmup: u64 = 100, "Steps over which the learning rate rises from zero";
        Mathematics decay: Decay = "cosine", "How it falls afterwards: linear, cosine or constant";
        Mathematics horizon: u64 = 0, "Step at which the fall ends, beyond the last one if it should stop earlier; 0: steps";
        Mathematics final_lr: f64 = 0.1, "Share of the peak at which the fall ends";
        Mathematics beta1: f64 = 0.9, "AdamW's memory of the first moment";
        Mathematics beta2: f64 = 0.95, "AdamW's memory of the second moment";
        Mathematics adam_eps: f64 = 1e-8, "AdamW's eps";
        Mathematics weight_decay: f64 = 0.1, "AdamW's weight decay";
        Mathematics decay_matrices_only: bool = true, "Leave norms, biases and constants without weight decay";
        Mathematics clip: f64 = 1.0, "Largest norm of the gradient; 0: not clipped";
        Mathematics clip_gated_only: bool = false, "Clip only where some head has a gate, as the paper did";
    }
    "Run" {
        Watching eval_every: u64 = 100, "Steps between evaluations on held-out data; 0: never";
        Watching eval_batches: u64 = 16, "Batches of an evaluation; 0: all held-out data";
        #[serde(skip_serializing_if = "Option::is_none")]
        Watching eval_length: Option<usize> = _, "Positions of a row in evaluations, beyond those of training; where absent the length";
        Nothing checkpoint_every: u64 = 500, "Steps between checkpoints; 0: only at the end";
        Nothing keep: usize = 2, "Newest checkpoints to keep, besides the one with the best held-out loss";
        Nothing log_every: u64 = 10, "Steps between lines of metrics.jsonl";
        #[serde(skip_serializing_if = "is_native")]
        Rounding engine: String = "native", "What computes: native, or torch, which needs Python with PyTorch; the same up to rounding";
        Mathematics mode: String = "parallel", "How attention is computed: parallel, chunk, chunk=LENGTH or auto; the same up to rounding";
        Nothing threads: usize = 0, "Threads to compute on; 0: all cores. Results are the same for any number";
        Watching skip_nonfinite: u64 = 0, "Updates that may be skipped for a loss or gradient that is not finite";
    }
}
