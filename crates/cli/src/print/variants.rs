//! Presets, parts and single variants.

use std::io::{self, Write};

use serde::Serialize;
use termwise_lab::variants::{Catalogue, Class, Description, Relation, Sizes, Slot, State};

use termwise_report::Unit;

use crate::text::{Align, Table, WIDTH, thousands, wrap};

/// The JSON form of variants that were asked for.
#[derive(Serialize)]
pub struct Described<'a> {
    pub sizes: Sizes,
    pub variants: &'a [Description],
}

/// All presets by class, and all parts.
pub fn catalogue(all: &Catalogue, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{}\n", all.formula)?;
    writeln!(
        out,
        "PRESETS, {} names in {} classes. A class has a letter: all in it give equal outputs.",
        all.presets.len(),
        all.classes.len()
    )?;
    writeln!(out, "Names under one expression are identical; expressions in one class are equal up to eps, by the scale-free norm.")?;
    let Sizes { heads, kv_heads, head_dim, hidden } = all.sizes;
    writeln!(out, "Counted for H {heads}, G {kv_heads}, d {head_dim}, width {hidden}: adds = parameters added to a layer;")?;
    writeln!(out, "state = floats a head keeps, `KV` where that grows by 2·d a token; even = tokens at which a KV cache is as large.\n")?;
    let mut table = Table::new([Align::Left, Align::Left, Align::Right, Align::Right, Align::Right]);
    table.row(["", "expression", "adds", "state", "even"]);
    let groups: Vec<(&Class, Vec<&Description>)> = all.classes.iter().flat_map(|class| expressions(class, &all.presets)).collect();
    for (class, group) in &groups {
        let first = group[0];
        let (state, even) = state_columns(&first.state);
        table.row([class.label.clone(), first.expression.clone(), thousands(first.added_count as u64), state, even]);
    }
    let lines = table.lines();
    writeln!(out, "{}", lines[0])?;
    let mut before = "";
    for (line, (class, group)) in lines[1..].iter().zip(&groups) {
        let repeated = before == class.label;
        before = &class.label;
        // The letter stands once, at the first expression of its class.
        let line = if repeated { line.replacen(&class.label, &" ".repeat(class.label.len()), 1) } else { line.clone() };
        writeln!(out, "{line}")?;
        for preset in group {
            let name = preset.name.as_deref().unwrap_or_default();
            let note = if preset.note.is_empty() { String::new() } else { format!(" — {}", preset.note) };
            writeln!(out, "      {}", wrap(&format!("{name}{note}"), 10, WIDTH))?;
        }
        for warning in &group[0].warnings {
            writeln!(out, "      warning: {}", wrap(warning, 15, WIDTH))?;
        }
    }
    writeln!(out, "\nPARTS, to build variants from: a kernel and settings in any order, as in `exp over=length out norm=l2`.\n")?;
    all.slots.iter().try_for_each(|slot| parts(slot, out))?;
    writeln!(out, "Details of any variant: termwise variants NAME_OR_EXPRESSION ...")
}

/// The presets of a class, by expression.
fn expressions<'a>(class: &'a Class, presets: &'a [Description]) -> Vec<(&'a Class, Vec<&'a Description>)> {
    let mut groups: Vec<(&Class, Vec<&Description>)> = Vec::new();
    for preset in presets.iter().filter(|preset| preset.class.as_ref() == Some(&class.label)) {
        match groups.iter_mut().find(|(_, group)| group[0].expression == preset.expression) {
            Some((_, group)) => group.push(preset),
            None => groups.push((class, vec![preset])),
        }
    }
    groups
}

fn state_columns(state: &State) -> (String, String) {
    match state {
        State::KvCache => ("KV".into(), String::new()),
        State::Recurrent { floats, break_even_tokens, .. } => (thousands(*floats), thousands(*break_even_tokens)),
        State::BeyondMemory => ("> 2^64".into(), "never".into()),
    }
}

fn parts(slot: &Slot, out: &mut impl Write) -> io::Result<()> {
    let off = if slot.off { format!("; `{}=off` removes it", slot.key) } else { String::new() };
    writeln!(out, "{:<7} {}{off}", slot.key, slot.about)?;
    for part in &slot.parts {
        writeln!(out, "    {}", part.usage)?;
        writeln!(out, "        {}", wrap(part.formula, 8, WIDTH))?;
        writeln!(out, "        {}", wrap(part.about, 8, WIDTH))?;
    }
    writeln!(out)
}

/// Variants one after the other, in detail.
pub fn descriptions(all: &[Description], sizes: Sizes, out: &mut impl Write) -> io::Result<()> {
    for (i, description) in all.iter().enumerate() {
        if i > 0 {
            writeln!(out)?;
        }
        one(description, sizes, out)?;
    }
    Ok(())
}

fn one(description: &Description, sizes: Sizes, out: &mut impl Write) -> io::Result<()> {
    const INDENT: usize = 14;
    let mut line = |key: &str, text: &str| writeln!(out, "  {key:<10}  {}", wrap(text, INDENT, WIDTH));
    let Sizes { heads, kv_heads, head_dim: d, hidden } = sizes;
    if let Some(name) = &description.name {
        line("preset", name)?;
    }
    if !description.note.is_empty() {
        line("note", &description.note)?;
    }
    line("expression", &description.expression)?;
    line("formula", &description.formula)?;
    let list = |relation: Relation| {
        let names = description.equal_to.iter().filter(move |equal| equal.relation == relation);
        names.map(|equal| equal.name.as_str()).collect::<Vec<_>>().join(", ")
    };
    for relation in [Relation::Identical, Relation::SameFunction, Relation::UpToEps] {
        let names = list(relation);
        if !names.is_empty() {
            line("equal to", &format!("{names} ({})", relation.words()))?;
        }
    }
    if description.canonical != description.expression {
        line("simplest", &format!("{}, with the same output", description.canonical))?;
    }
    if description.added.is_empty() {
        line("adds", "no parameters")?;
    } else {
        let tensors: Vec<String> = description.added.iter().map(|added| format!("{} {:?}", added.name, added.shape)).collect();
        let count = thousands(description.added_count as u64);
        line("adds", &format!("{count} parameters a layer (H {heads}, G {kv_heads}, d {d}, width {hidden}): {}", tensors.join(", ")))?;
    }
    let state = match &description.state {
        State::KvCache => format!("no finite state; a KV cache grows by {} floats a token and head", 2 * d),
        State::Recurrent { floats, bytes, break_even_tokens } => {
            let bytes = bytes.map_or("more than the engine builds".into(), |bytes| Unit::Bytes.format(bytes as f64));
            let (floats, even) = (thousands(*floats), thousands(*break_even_tokens));
            format!("{floats} floats a head (d {d}), {bytes}, as much as a KV cache takes at {even} tokens")
        }
        State::BeyondMemory => "finite but beyond 2^64 floats a head; a KV cache is always smaller".into(),
    };
    line("state", &state)?;
    description.warnings.iter().try_for_each(|warning| line("warning", warning))
}
