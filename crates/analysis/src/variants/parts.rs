//! The slots of the formula and their parts, from the registries of the algebra.

use serde::{Deserialize, Serialize};
use termwise_attention::Kernel;
use termwise_attention::parts::slot::Info;
use termwise_attention::variant::string::{KEYS, Key};

/// A slot of the formula.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Slot {
    /// The key in a variant string; `kernel` for the kernel, which has none.
    pub key: String,
    /// Its meaning.
    pub about: String,
    /// Whether the bare key is valid.
    pub bare: bool,
    /// Whether `key=off` removes the part of a preset.
    pub off: bool,
    /// Its parts; empty if the value is a number or a switch.
    pub parts: Vec<PartInfo>,
}

/// A part.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartInfo {
    /// Its word.
    pub word: String,
    /// Its syntax.
    pub usage: String,
    /// Its formula.
    pub formula: String,
    /// One sentence.
    pub about: String,
    /// Valid arguments.
    pub examples: Vec<String>,
}

/// Every slot, the kernel first.
pub fn slots() -> Vec<Slot> {
    let about = "w, the weight as a function of the score".into();
    let kernel = Slot { key: "kernel".into(), about, bare: false, off: false, parts: infos(Kernel::PARTS) };
    let slot =
        |key: &Key| Slot { key: key.word.into(), about: key.about.into(), bare: key.bare.is_some(), off: key.off, parts: infos(key.parts) };
    std::iter::once(kernel).chain(KEYS.iter().map(slot)).collect()
}

fn infos(parts: &[&'static Info]) -> Vec<PartInfo> {
    let info = |info: &&'static Info| PartInfo {
        word: info.word.into(),
        usage: info.usage.into(),
        formula: info.formula.into(),
        about: info.about.into(),
        examples: info.examples.iter().map(|&example| example.into()).collect(),
    };
    parts.iter().map(info).collect()
}
