//! A variant as code of other people's: one file that needs nothing of termwise.
//!
//! `attention.py.jinja` is the module with all parts of the algebra; what a variant does not have is left out of its file. The file ends with
//! values that the reference computed, so that it can check itself wherever it is carried.

mod facts;
mod reference;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, UndefinedBehavior};
use termwise_attention::Variant;

use crate::Error;
use crate::parts::Parts;

/// Source of a PyTorch module, `Attention`, that computes this variant: parallel, in chunks and token by token; `made_by` says who wrote it.
pub fn torch(variant: &Variant, made_by: &str) -> Result<String, Error> {
    variant.validate()?;
    if let Some(part) = Parts::new(variant).pooled {
        let reason =
            format!("`{part}` is part of our own memory of keys, which such a file does not have; leave it out, or use termwise itself");
        return Err(Error::Export { variant: variant.to_string(), reason });
    }
    let failed = |error: minijinja::Error| Error::Export { variant: variant.to_string(), reason: format!("{error:#}") };
    let mut environment = Environment::new();
    // A part that is absent has no properties.
    environment.set_undefined_behavior(UndefinedBehavior::Chainable);
    // Lines that begin so decide what follows; the rest is Python.
    environment.set_syntax(SyntaxConfig::builder().line_statement_prefix("#%").build().map_err(failed)?);
    environment.add_filter("python", facts::python);
    environment.add_template("attention.py", include_str!("attention.py.jinja")).map_err(failed)?;
    let template = environment.get_template("attention.py").map_err(failed)?;
    let text = template.render(facts::Facts::new(variant, made_by)?).map_err(failed)?;
    // Conditions leave empty lines behind; those that are meant are marked.
    let lines = text.lines().filter(|line| !line.trim().is_empty()).map(|line| if line == "~" { "" } else { line });
    Ok(lines.fold(String::new(), |text, line| text + line + "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exported(text: &str) -> String {
        let variant: Variant = text.parse().unwrap_or_else(|error| panic!("{error}"));
        torch(&variant, "a test").unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn every_preset_can_be_exported_and_holds_only_what_it_needs() {
        for preset in termwise_attention::presets::all() {
            let source = exported(preset.name);
            assert!(source.contains("class Attention(nn.Module):") && !source.contains("{{") && !source.contains("#%"), "{}", preset.name);
            assert_eq!(source.contains("def rotated("), preset.parts().rope, "{}", preset.name);
            assert_eq!(source.contains("nn.Conv1d("), preset.parts().conv.is_some(), "{}", preset.name);
            assert_eq!(source.contains("solve_triangular"), preset.parts().write.is_some(), "{}", preset.name);
        }
        let softmax = exported("softmax");
        for absent in ["monomials", "decay", "beta", "window", "norm", "float64: the terms"] {
            assert!(!softmax.split("# Reference values").next().is_some_and(|code| code.contains(absent)), "softmax has {absent}");
        }
    }

    #[test]
    fn what_a_file_cannot_keep_is_refused() {
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
