//! Every setting once: its key in a file, its flag, what it means, and whether it changes what is computed.

use toml::Value;

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
    /// Neither.
    Nothing,
}

/// The setting of this name.
pub fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

const fn math(group: &'static str, name: &'static str, kind: Kind, help: &'static str) -> Key {
    Key { name, kind, group, help, effect: Effect::Mathematics }
}

const fn data(name: &'static str, kind: Kind, help: &'static str) -> Key {
    Key { name, kind, group: DATA, help, effect: Effect::Data }
}

const fn free(group: &'static str, name: &'static str, kind: Kind, help: &'static str) -> Key {
    Key { name, kind, group, help, effect: Effect::Nothing }
}

const MODEL: &str = "Model";
/// Heading of the settings of data.
pub const DATA: &str = "Data";
const TRAINING: &str = "Training";
const RUN: &str = "Run";

/// All settings, in the order of help and of `settings.toml`.
pub const KEYS: &[Key] = &[
    free(TRAINING, "recipe", Kind::Text, "Named settings to begin with: default, language or paper; other keys change them"),
    free(MODEL, "model", Kind::Text, "Sizes by name: tiny, small-test, medium-test, paper-small, paper-large or paper-deep"),
    math(MODEL, "from", Kind::Text, "Folder of a model to start from; its sizes hold, and its attention unless another is given"),
    math(MODEL, "hidden", Kind::Count, "Width of the hidden state"),
    math(MODEL, "mlp", Kind::Count, "Width inside the MLP"),
    math(MODEL, "heads", Kind::Count, "Query heads of a layer"),
    math(MODEL, "kv_heads", Kind::Count, "Key-value heads of a layer; 0: as many as heads"),
    math(MODEL, "layers", Kind::Count, "Layers"),
    math(MODEL, "head_dim", Kind::Count, "Width of a head; 0: hidden / heads"),
    math(MODEL, "vocab", Kind::Count, "Tokens in the vocabulary; 0: as many as the data has"),
    math(MODEL, "tie", Kind::Switch, "Use the embedding as output projection too"),
    math(MODEL, "rope_theta", Kind::Number, "Base of the rotary frequencies"),
    math(MODEL, "norm_eps", Kind::Number, "eps of the RMSNorms"),
    math(MODEL, "init_std", Kind::Number, "Standard deviation of fresh weights"),
    math(MODEL, "attention", Kind::Attention, "Attention of every head: a preset, an expression, or a map by layer and head in JSON"),
    data("data", Kind::List, "Files, folders, globs and hf://datasets/…; or builtin, the language with known entropy; may be repeated"),
    data("language", Kind::Text, "Dials of the built-in language, such as \"facts=20 keys=128\""),
    data("tokenizer", Kind::Text, "bytes, a tokenizer.json, or a folder that holds one"),
    data("end_of_document", Kind::Text, "Token that ends a document; where absent the tokenizer's own"),
    data("special_tokens", Kind::Switch, "Let the tokenizer add what its template says to each document"),
    data("field", Kind::Text, "Field of JSON lines or column of parquet files that holds the text"),
    data("documents", Kind::Text, "How text files are cut: file, line, blank-line or separator:<text>"),
    data("held_out", Kind::Number, "Share of documents held out; where absent 0.001, or 0.1 of few documents"),
    data("split_seed", Kind::Count, "Seed that decides what is held out"),
    data("layout", Kind::Text, "packed: documents joined and cut into rows; padded: one document a row"),
    math(TRAINING, "batch", Kind::Count, "Rows computed at once"),
    math(TRAINING, "length", Kind::Count, "Positions of a row"),
    math(TRAINING, "accumulate", Kind::Count, "Batches whose gradients make one update"),
    free(TRAINING, "steps", Kind::Count, "Updates in all"),
    math(TRAINING, "seed", Kind::Count, "Seed of fresh weights and of the order of data"),
    math(TRAINING, "lr", Kind::Number, "Peak learning rate"),
    math(TRAINING, "warmup", Kind::Count, "Steps over which the learning rate rises from zero"),
    math(TRAINING, "decay", Kind::Text, "How it falls afterwards: linear, cosine or constant"),
    math(TRAINING, "horizon", Kind::Count, "Step at which the fall ends, beyond the last one if it should stop earlier; 0: steps"),
    math(TRAINING, "final_lr", Kind::Number, "Share of the peak at which the fall ends"),
    math(TRAINING, "beta1", Kind::Number, "AdamW's memory of the first moment"),
    math(TRAINING, "beta2", Kind::Number, "AdamW's memory of the second moment"),
    math(TRAINING, "adam_eps", Kind::Number, "AdamW's eps"),
    math(TRAINING, "weight_decay", Kind::Number, "AdamW's weight decay"),
    math(TRAINING, "decay_matrices_only", Kind::Switch, "Leave norms, biases and constants without weight decay"),
    math(TRAINING, "clip", Kind::Number, "Largest norm of the gradient; 0: not clipped"),
    math(TRAINING, "clip_gated_only", Kind::Switch, "Clip only where some head has a gate, as the paper did"),
    free(RUN, "eval_every", Kind::Count, "Steps between evaluations on held-out data; 0: never"),
    free(RUN, "eval_batches", Kind::Count, "Batches of an evaluation; 0: all held-out data"),
    free(RUN, "checkpoint_every", Kind::Count, "Steps between checkpoints; 0: only at the end"),
    free(RUN, "keep", Kind::Count, "Newest checkpoints to keep, besides the one with the best held-out loss"),
    free(RUN, "log_every", Kind::Count, "Steps between lines of metrics.jsonl"),
    math(RUN, "mode", Kind::Text, "How attention is computed: parallel, chunk, chunk=LENGTH or auto; the same up to rounding"),
    free(RUN, "threads", Kind::Count, "Threads to compute on; 0: all cores. Results are the same for any number"),
    free(RUN, "skip_nonfinite", Kind::Count, "Updates that may be skipped for a loss or gradient that is not finite"),
];
