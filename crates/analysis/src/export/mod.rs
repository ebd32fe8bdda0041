//! Exports a variant as one Python file that needs PyTorch alone.
//!
//! The file is generated from the sources of the PyTorch engine of the Python package (`python/termwise/torch/engine`), with the variant fixed: `module.py`
//! adds the projections and parameters, `self_test.py` a comparison with values that the float64 reference computes here.

mod reference;
mod stitch;

use serde_json::Value;
use termwise_attention::Variant;

use crate::Error;
use crate::parts::Parts;
use reference::Reference;
use stitch::Source;

macro_rules! engine {
    ($($name:literal),*) => {
        [$(Source { name: $name, text: include_str!(concat!("../../../../python/termwise/torch/engine/", $name, ".py")) }),*]
    };
}

/// The modules in the order of the file.
const ENGINE: [Source; 9] = engine!["recurrent", "prepare", "blocked", "naive", "states", "kernels", "epilogue", "parts", "extras"];

/// Source of a PyTorch module, `Attention`, that computes this variant in three forms: parallel, chunked and token by token. `made_by` is the
/// program and its version.
pub fn torch(variant: &Variant, made_by: &str) -> Result<String, Error> {
    variant.validate()?;
    let parts = Parts::new(variant);
    if let Some(part) = parts.pooled {
        let reason = format!(
            "`{part}` needs the KV store of the native engine, which plain PyTorch operations do not have; remove it from the variant"
        );
        return Err(Error::Export { variant: variant.to_string(), reason });
    }
    let fixed = format!("\"\"\"The variant.\"\"\"\n\nVARIANT = {}\n", python(&serde_json::to_value(&parts).unwrap_or_default(), true));
    let values = Reference::new(variant)?.python();
    let generated = [
        Source { name: "variant", text: &fixed },
        Source { name: "module", text: include_str!("module.py") },
        Source { name: "reference", text: &values },
        Source { name: "self_test", text: include_str!("self_test.py") },
    ];
    let [fixed, module, values, self_test] = generated;
    let sources: Vec<Source> = [fixed, module].into_iter().chain(ENGINE).chain([values, self_test]).collect();
    Ok(stitch::joined(&head(variant, made_by), &sources, &["module", "self_test"]))
}

/// The docstring of the file.
fn head(variant: &Variant, made_by: &str) -> String {
    format!(
        "\"\"\"Attention `{variant}` for PyTorch.\n\n    {}\n\n\
         Written by {made_by}: `termwise export torch \"{variant}\"`, from the sources of its PyTorch engine. It needs PyTorch alone. Run as a\n\
         program, it compares itself with reference values.\n\n\
         `Attention` is the module. `forward` takes all positions of a sequence, `extend` and `step` continue from a state: a matrix of constant size if\n\
         the kernel has a finite feature map of low degree, otherwise keys and values, those of the window if there is one. Parameters have the names of\n\
         termwise checkpoints below `self_attn.`.\n\"\"\"\n",
        variant.formula()
    )
}

/// A JSON value as a Python literal, with one line per entry of an outer object.
fn python(value: &Value, outer: bool) -> String {
    let joined = |parts: Vec<String>| parts.join(", ");
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Array(items) => format!("[{}]", joined(items.iter().map(|item| python(item, false)).collect())),
        Value::Object(entries) => {
            let entries = entries.iter().map(|(key, value)| format!("{}: {}", Value::from(key.as_str()), python(value, false)));
            match outer {
                true => format!("{{\n{}}}", entries.map(|entry| format!("    {entry},\n")).collect::<String>()),
                false => format!("{{{}}}", joined(entries.collect())),
            }
        }
        scalar => scalar.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn exported(text: &str) -> String {
        let variant: Variant = text.parse().unwrap_or_else(|error| panic!("{error}"));
        torch(&variant, "a test").unwrap_or_else(|error| panic!("{error}"))
    }

    /// No import from the package is left, and no name is defined twice, which would change its meaning in one of the modules.
    #[test]
    fn every_preset_is_exported_as_one_consistent_file() {
        for preset in termwise_attention::presets::all() {
            let source = exported(preset.name);
            assert!(source.contains("class CausalSelfAttention(Attention):") && !source.contains("from ."), "{}", preset.name);
            let mut defined: BTreeMap<&str, usize> = BTreeMap::new();
            for line in source.lines() {
                let name = line.strip_prefix("def ").or_else(|| line.strip_prefix("class ")).or_else(|| Some(line.split_once(" = ")?.0));
                let name = name.map(|name| name.split(['(', ':']).next().unwrap_or(name)).filter(|name| !name.starts_with([' ', '#']));
                name.into_iter().for_each(|name| *defined.entry(name).or_default() += 1);
            }
            assert!(defined.len() > 40 && defined.values().all(|&times| times == 1), "{}: {defined:?}", preset.name);
            for absent in ["naive_sums", "def read(", "json", "termwise."] {
                assert!(!source.contains(absent), "{absent}");
            }
        }
    }

    #[test]
    fn inference_only_parts_are_refused() {
        for text in ["exp window=4 chosen=2", "exp window=4 bits=8"] {
            let variant: Variant = text.parse().unwrap_or_else(|error| panic!("{error}"));
            assert!(matches!(torch(&variant, "a test"), Err(Error::Export { .. })), "{text}");
        }
    }

    #[test]
    fn the_same_variant_gives_the_same_file() {
        assert_eq!(exported("taylor=0..2 out norm=rms"), exported("taylor=0..2 out norm=rms"));
    }
}
