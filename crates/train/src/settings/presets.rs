//! Presets: model sizes and training recipes.

use toml::Table;

use super::keys::DEFAULT;
use crate::error::{Error, Result};

/// Model sizes, smallest first: name, hidden, mlp, heads, layers.
pub const MODELS: [(&str, u32, u32, u32, u32); 6] = [
    ("tiny", 64, 128, 4, 2),
    ("small-test", 256, 512, 4, 4),
    ("medium-test", 512, 1024, 8, 8),
    // The three models of arXiv 2507.23632.
    ("paper-small", 1024, 2048, 16, 20),
    ("paper-deep", 1024, 2048, 32, 60),
    ("paper-large", 3072, 6144, 16, 20),
];

/// The recipe of arXiv 2507.23632, in float32. The learning rate decays towards zero at 1,000,000 steps, but the run stops at
/// 100,000 steps, at 0.91 of the peak. Only gradients of gated models are clipped. Weight decay is PyTorch's, on
/// every parameter.
const PAPER: &str = r#"
model = "paper-small"
tie = false
rope_theta = 10000.0
norm_eps = 1e-5
init_std = 0.02
batch = 36
length = 1024
accumulate = 1
layout = "padded"
held_out = 0.001
steps = 100000
lr = 1e-4
warmup = 10000
decay = "linear"
horizon = 1000000
final_lr = 0.0
beta1 = 0.9
beta2 = 0.999
adam_eps = 1e-7
weight_decay = 0.01
decay_matrices_only = false
clip = 1.0
clip_gated_only = true
eval_every = 1000
checkpoint_every = 1000
"#;

/// For the synthetic associative-recall language; the default if neither data nor a model to start from is given. The recall circuit forms late
/// unless weights are initialized at about 1/√width, the learning rate is high and a short convolution combines a key with its value.
const LANGUAGE: &str = r#"
model = "tiny"
data = ["builtin"]
attention = "softmax conv=3"
init_std = 0.125
steps = 800
lr = 1e-2
warmup = 50
weight_decay = 0.0
"#;

/// The recipes by name.
pub const RECIPES: [(&str, &str); 3] = [("default", DEFAULT), ("language", LANGUAGE), ("paper", PAPER)];

/// The settings of a recipe.
pub(super) fn recipe(name: &str) -> Result<Table> {
    let unknown = || unknown("recipe", name, RECIPES.iter().map(|recipe| recipe.0));
    let text = RECIPES.iter().find(|recipe| recipe.0 == name).ok_or_else(unknown)?.1;
    Ok(text.parse().expect("the recipes above are valid TOML"))
}

/// The default of a setting, for help: `3e-3; 1e-2 without --data` where the recipe `language` has another one.
pub fn default_of(name: &str) -> Option<String> {
    let table = |text: &str| -> Table { text.parse().expect("the recipes above are valid TOML") };
    let tiny = model("tiny").ok()?;
    let usual = table(DEFAULT).get(name).or(tiny.get(name)).and_then(shown)?;
    let builtin = table(LANGUAGE).get(name).and_then(shown).filter(|builtin| *builtin != usual);
    Some(builtin.map_or(usual.clone(), |builtin| format!("{usual}; {builtin} without --data")))
}

/// A value in command-line syntax; `None` if it is empty.
fn shown(value: &toml::Value) -> Option<String> {
    let text = match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Array(items) => items.iter().filter_map(toml::Value::as_str).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    };
    (!text.is_empty()).then_some(text)
}

/// The sizes of a model.
pub(super) fn model(name: &str) -> Result<Table> {
    let unknown = || unknown("model", name, MODELS.iter().map(|model| model.0));
    let &(_, hidden, mlp, heads, layers) = MODELS.iter().find(|model| model.0 == name).ok_or_else(unknown)?;
    let sizes = [("hidden", hidden), ("mlp", mlp), ("heads", heads), ("kv_heads", 0), ("layers", layers), ("head_dim", 0)];
    Ok(sizes.into_iter().map(|(key, size)| (key.to_owned(), i64::from(size).into())).collect())
}

fn unknown<'a>(key: &str, name: &str, known: impl Iterator<Item = &'a str> + Clone) -> Error {
    let expected = match termwise_base::nearest(name, known.clone()) {
        Some(nearest) => format!("there is no preset of this name; did you mean `{nearest}`?"),
        None => format!("there is no preset of this name; available: {}", known.collect::<Vec<_>>().join(", ")),
    };
    Error::Setting { place: String::new(), key: key.into(), found: format!("\"{name}\""), expected }
}
