//! Classes of equal variants.

use serde::{Deserialize, Serialize};
use termwise_attention::Variant;
use termwise_attention::presets;

/// Presets with equal outputs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Class {
    /// A letter.
    pub label: String,
    /// The simplest variant with these outputs.
    pub canonical: String,
    /// The presets, in the order of their list.
    pub members: Vec<String>,
    /// Why they are equal; absent for a single preset.
    pub relation: Option<Relation>,
}

/// Why two variants are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Relation {
    /// The same parts under two names.
    Identical,
    /// Different parts that are the same function, such as `power=1` and `feature=identity`.
    SameFunction,
    /// A scale-free norm cancels the difference.
    UpToEps,
}

impl Relation {
    /// Why `a` and `b` are equal, if they are.
    pub fn between(a: &Variant, b: &Variant) -> Option<Relation> {
        if a == b {
            Some(Relation::Identical)
        } else if a.canonical() != b.canonical() {
            None
        } else if a.norm.scale_free() {
            Some(Relation::UpToEps)
        } else {
            Some(Relation::SameFunction)
        }
    }

    /// As a phrase.
    pub fn words(self) -> &'static str {
        match self {
            Relation::Identical => "identical variants",
            Relation::SameFunction => "the same function",
            Relation::UpToEps => "equal up to eps, by the scale-free norm",
        }
    }
}

/// Another variant with the same output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Equal {
    /// The preset's name or the variant string.
    pub name: String,
    /// The reason.
    pub relation: Relation,
}

/// A, B, …, Z, AA, AB, …
pub fn label(mut index: usize) -> String {
    let mut letters = Vec::new();
    loop {
        letters.insert(0, (b'A' + (index % 26) as u8) as char);
        if index < 26 {
            return letters.into_iter().collect();
        }
        index = index / 26 - 1;
    }
}

/// The classes of all presets.
pub(super) fn of_presets() -> Vec<Class> {
    let mut classes: Vec<(Variant, Class)> = Vec::new();
    for preset in presets::all() {
        let variant = preset.parts();
        let canonical = variant.canonical();
        match classes.iter_mut().find(|(_, class)| class.canonical == canonical.to_string()) {
            Some((first, class)) => {
                class.members.push(preset.name.into());
                class.relation = class.relation.max(Relation::between(first, &variant));
            }
            None => {
                let label = label(classes.len());
                classes
                    .push((variant, Class { label, canonical: canonical.to_string(), members: vec![preset.name.into()], relation: None }));
            }
        }
    }
    classes.into_iter().map(|(_, class)| class).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_continue_after_the_alphabet() {
        assert_eq!([0, 25, 26, 51, 52, 701, 702].map(label), ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]);
    }

    #[test]
    fn relations_are_detected() {
        let between = |a: &str, b: &str| Relation::between(&a.parse().expect("a variant"), &b.parse().expect("a variant"));
        assert_eq!(between("softmax", "exp over=sum"), Some(Relation::Identical));
        assert_eq!(between("power=1 over=length", "feature=identity over=length"), Some(Relation::SameFunction));
        assert_eq!(between("exp over=sum norm=rms", "exp over=none norm=rms out"), Some(Relation::UpToEps));
        assert_eq!(between("exp over=sum", "exp over=none"), None);
    }
}
