//! Documents of presets, parts and single variants.

use termwise_attention::Variant;
use termwise_report::{Block, Cell, Document, Documented, Section, Table, Unit, thousands};

use super::{Catalogue, Class, Described, Description, Relation, Sizes, Slot, State};

impl Documented for Catalogue {
    const KIND: &'static str = "catalogue";

    fn document(&self) -> Document {
        let Sizes { heads, kv_heads, head_dim, hidden } = self.sizes;
        let (names, classes) = (self.presets.len(), self.classes.len());
        let mut expressions = Table::new("", ["group", "variant string", "added parameters", "state", "break-even"]);
        let mut presets = Table::new("", ["preset", "group", "note"]);
        let mut warnings = Vec::new();
        for (label, group) in self.classes.iter().flat_map(|class| groups(class, &self.presets)) {
            let first = group[0];
            let [state, even] = state_cells(&first.state);
            let expression = Cell::code(&first.expression);
            expressions.rows.push(vec![Cell::text(&label), expression, Cell::count(first.added_count), state, even]);
            for preset in &group {
                let name = preset.name.as_deref().unwrap_or_default();
                presets.rows.push(vec![Cell::code(name), Cell::text(&label), Cell::text(&preset.note)]);
            }
            warnings.extend(first.warnings.iter().map(|warning| format!("**{label}**: {warning}")));
        }
        let counted = format!(
            "Costs for {heads} heads, {kv_heads} KV heads, head dimension {head_dim} and width {hidden}. Added parameters: per layer. State: floats per head, or KV if it \
             grows by 2·d per token. Break-even: number of tokens at which a KV cache has the same size."
        );
        let presets_text = format!(
            "{names} names in {classes} groups. All presets with the same letter have equal outputs. Presets with the same letter and number also have the same \
             variant string; the others are equal up to eps, because of the scale-free norm."
        );
        let parts = "A variant string is a kernel and settings in any order, such as `exp over=length out norm=l2`.";
        Document {
            title: "Attention variants".into(),
            lead: vec![Block::Code(self.formula.clone())],
            sections: vec![
                Section::new(
                    "Groups of presets with equal outputs",
                    vec![Block::text(counted), Block::table("classes", expressions), Block::List(warnings)],
                ),
                Section::new("Presets", vec![Block::text(presets_text), Block::table("presets", presets)]),
                Section::new("Parts", std::iter::once(Block::text(parts)).chain(self.slots.iter().map(slot)).collect()),
                Section::new("Details of a variant", vec![Block::Code("termwise variants NAME_OR_VARIANT ...".into())]),
            ],
        }
    }

    /// The formula, the names of all presets, and the words of all parts.
    fn summary(&self) -> Document {
        let presets = self.classes.iter().map(|class| class.members.join(" = ")).collect::<Vec<_>>().join(", ");
        let parts = self.slots.iter().map(|slot| match slot.parts.is_empty() {
            true => format!("`{}`", slot.key),
            false => format!("`{}`: {}", slot.key, slot.parts.iter().map(|part| part.word.as_str()).collect::<Vec<_>>().join(" ")),
        });
        let lead = vec![
            Block::Code(self.formula.clone()),
            Block::Text(format!("**{} presets** (= marks equal outputs): {presets}", self.presets.len())),
            Block::Text(format!("**Parts**: {}", parts.collect::<Vec<_>>().join("; "))),
            Block::Text("`termwise variants VARIANT` describes one variant.".into()),
        ];
        Document { title: String::new(), lead, sections: Vec::new() }
    }
}

/// The presets of a class by variant string, numbered if there are several.
fn groups<'a>(class: &Class, presets: &'a [Description]) -> Vec<(String, Vec<&'a Description>)> {
    let mut groups: Vec<Vec<&Description>> = Vec::new();
    for preset in presets.iter().filter(|preset| preset.class.as_ref() == Some(&class.label)) {
        match groups.iter_mut().find(|group| group[0].expression == preset.expression) {
            Some(group) => group.push(preset),
            None => groups.push(vec![preset]),
        }
    }
    let several = groups.len() > 1;
    let label = |i: usize| if several { format!("{}{}", class.label, i + 1) } else { class.label.clone() };
    groups.into_iter().enumerate().map(|(i, group)| (label(i), group)).collect()
}

fn state_cells(state: &State) -> [Cell; 2] {
    match state {
        State::KvCache => [Cell::text("KV"), Cell::text("")],
        State::Recurrent { floats, break_even_tokens, .. } => [Cell::Count(*floats), Cell::Count(*break_even_tokens)],
        State::BeyondMemory => [Cell::text("> 2^64"), Cell::text("never")],
    }
}

fn slot(slot: &Slot) -> Block {
    let off = if slot.off { format!("; `{}=off` removes it", slot.key) } else { String::new() };
    let caption = format!("**{}**: {}{off}", slot.key, slot.about);
    if slot.parts.is_empty() {
        return Block::Text(caption);
    }
    let mut table = Table::new(caption, ["part", "formula", ""]);
    table.rows.extend(slot.parts.iter().map(|part| vec![Cell::code(&part.usage), Cell::text(&part.formula), Cell::text(&part.about)]));
    Block::table(format!("part-{}", slot.key), table)
}

impl Documented for Described {
    const KIND: &'static str = "variants";

    fn document(&self) -> Document {
        let section = |one: &Description| Section::new(one.name.as_ref().unwrap_or(&one.expression), vec![self.facts(one)]);
        Document { title: String::new(), lead: self.comparison(), sections: self.variants.iter().map(section).collect() }
    }
}

impl Described {
    /// One sentence per pair of variants: whether they are equal, and why.
    fn comparison(&self) -> Vec<Block> {
        let name = |one: &Description| format!("`{}`", one.name.as_ref().unwrap_or(&one.expression));
        let mut sentences = Vec::new();
        for (i, a) in self.variants.iter().enumerate() {
            for b in &self.variants[i + 1..] {
                let relation = match (a.expression.parse::<Variant>(), b.expression.parse::<Variant>()) {
                    (Ok(a), Ok(b)) => Relation::between(&a, &b),
                    _ => continue,
                };
                sentences.push(match relation {
                    Some(relation) => format!("{} and {} are equal: {}.", name(a), name(b), relation.words()),
                    None => format!("{} and {} are not equal: no identity relates them.", name(a), name(b)),
                });
            }
        }
        if sentences.is_empty() { Vec::new() } else { vec![Block::List(sentences)] }
    }

    fn facts(&self, one: &Description) -> Block {
        let Sizes { heads, kv_heads, head_dim: d, hidden } = self.sizes;
        let mut facts: Vec<(String, String)> = Vec::new();
        let mut fact = |name: &str, text: String| facts.push((name.into(), text));
        if !one.note.is_empty() {
            fact("note", one.note.clone());
        }
        fact("variant string", format!("`{}`", one.expression));
        fact("formula", one.formula.clone());
        for relation in [Relation::Identical, Relation::SameFunction, Relation::UpToEps] {
            let names = one.equal_to.iter().filter(|equal| equal.relation == relation).map(|equal| format!("`{}`", equal.name));
            let names = names.collect::<Vec<_>>().join(", ");
            if !names.is_empty() {
                fact("equal to", format!("{names} ({})", relation.words()));
            }
        }
        if one.canonical != one.expression {
            fact("canonical form", format!("`{}`, with the same output", one.canonical));
        }
        let tensors: Vec<String> = one.added.iter().map(|added| format!("{} {:?}", added.name, added.shape)).collect();
        fact(
            "added parameters",
            match tensors.is_empty() {
                true => "none".into(),
                false => format!(
                    "{} per layer ({heads} heads, {kv_heads} KV heads, head dimension {d}, width {hidden}): {}",
                    thousands(one.added_count),
                    tensors.join(", ")
                ),
            },
        );
        fact(
            "state",
            match &one.state {
                State::KvCache => format!("no finite state; a KV cache grows by {} floats per token and head", 2 * d),
                State::Recurrent { floats, bytes, break_even_tokens: even } => {
                    let bytes = bytes.map_or("more than the engine supports".into(), |bytes| Unit::Bytes.format(bytes as f64));
                    let (floats, even) = (thousands(*floats), thousands(*even));
                    format!("{floats} floats per head (d {d}), {bytes}, as much as a KV cache takes at {even} tokens")
                }
                State::BeyondMemory => "finite but more than 2^64 floats per head; a KV cache is always smaller".into(),
            },
        );
        one.warnings.iter().for_each(|warning| fact("warning", warning.clone()));
        Block::Facts(facts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::variants::{catalogue, describe};

    #[test]
    fn documents_survive_a_json_round_trip() {
        let all = catalogue(Sizes::default()).expect("presets are possible");
        let texts = ["taylor=0..3", "exp over=sum norm=l2", "gated_softmax"];
        let some = Described { sizes: all.sizes, variants: describe(&texts, all.sizes).expect("possible") };
        termwise_report::reads_again(&all);
        termwise_report::reads_again(&some);
    }
}
