//! The slots of the formula and the parts that fit there, from the registries of the algebra.

use serde::Serialize;
use termwise_attention::Kernel;
use termwise_attention::parts::slot::Info;
use termwise_attention::variant::text::KEYS;

/// A slot of the formula.
#[derive(Debug, Serialize)]
pub struct Slot {
    /// The key in a variant's text; `kernel` for the kernel, which has none.
    pub key: &'static str,
    /// What it sets.
    pub about: &'static str,
    /// Whether the bare key can stand alone.
    pub bare: bool,
    /// Whether `key=off` removes what a preset set.
    pub off: bool,
    /// What fits; empty where the value is a number or a switch.
    pub parts: Vec<PartInfo>,
}

/// A part.
#[derive(Debug, Serialize)]
pub struct PartInfo {
    /// Its word.
    pub word: &'static str,
    /// How it is written.
    pub usage: &'static str,
    /// Its formula.
    pub formula: &'static str,
    /// One sentence.
    pub about: &'static str,
    /// Arguments that can be given.
    pub examples: &'static [&'static str],
}

/// Every slot, the kernel first.
pub fn slots() -> Vec<Slot> {
    let about = "w, what a score becomes before it weighs a value";
    let kernel = Slot { key: "kernel", about, bare: false, off: false, parts: infos(Kernel::PARTS) };
    let keys =
        KEYS.iter().map(|key| Slot { key: key.word, about: key.about, bare: key.bare.is_some(), off: key.off, parts: infos(key.parts) });
    std::iter::once(kernel).chain(keys).collect()
}

fn infos(parts: &[&'static Info]) -> Vec<PartInfo> {
    let info = |info: &&'static Info| PartInfo {
        word: info.word,
        usage: info.usage,
        formula: info.formula,
        about: info.about,
        examples: info.examples,
    };
    parts.iter().map(info).collect()
}
