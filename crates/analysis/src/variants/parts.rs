//! The slots of the formula and the parts that fit there, from the registries of the algebra.

use serde::{Deserialize, Serialize};
use termwise_attention::Kernel;
use termwise_attention::parts::slot::Info;
use termwise_attention::variant::string::{KEYS, Key};

/// A slot of the formula.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Slot {
    /// The key in a variant's text; `kernel` for the kernel, which has none.
    pub key: String,
    /// What it sets.
    pub about: String,
    /// Whether the bare key can stand alone.
    pub bare: bool,
    /// Whether `key=off` removes what a preset set.
    pub off: bool,
    /// What fits; empty where the value is a number or a switch.
    pub parts: Vec<PartInfo>,
}

/// A part.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartInfo {
    /// Its word.
    pub word: String,
    /// How it is written.
    pub usage: String,
    /// Its formula.
    pub formula: String,
    /// One sentence.
    pub about: String,
    /// Arguments that can be given.
    pub examples: Vec<String>,
}

/// Every slot, the kernel first.
pub fn slots() -> Vec<Slot> {
    let about = "w, what a score becomes before it weighs a value".into();
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
