//! Joins Python modules of one package into one file.
//!
//! Modules import from each other only by `from .module import name`, so a name means the same in the joined file. Top-level definitions that are
//! not reachable are omitted, with their imports.

use std::collections::{BTreeMap, BTreeSet};

/// One module: its name in the package and its source.
pub struct Source<'a> {
    pub name: &'a str,
    pub text: &'a str,
}

/// A top-level statement with its comments and decorators.
struct Statement<'a> {
    lines: Vec<&'a str>,
    /// The names that it defines.
    name: Option<&'a str>,
}

struct Module<'a> {
    docstring: String,
    /// For each name in this module: the module of origin and its name there.
    imports: BTreeMap<&'a str, (&'a str, &'a str)>,
    statements: Vec<Statement<'a>>,
}

/// The joined file after `head`: the modules in this order, with everything that the statements of the modules `roots` refer to.
pub fn joined(head: &str, sources: &[Source], roots: &[&str]) -> String {
    let modules: BTreeMap<&str, Module> = sources.iter().map(|source| (source.name, Module::read(source.text))).collect();
    let mut reached: BTreeSet<(&str, usize)> = BTreeSet::new();
    let mut external: BTreeSet<(&str, &str)> = BTreeSet::new();
    let mut open: Vec<(&str, usize)> =
        roots.iter().flat_map(|root| (0..modules[root].statements.len()).map(move |index| (*root, index))).collect();
    while let Some((place, index)) = open.pop() {
        if !reached.insert((place, index)) {
            continue;
        }
        for word in modules[place].statements[index].words() {
            let (mut from, mut name) = (place, word);
            if let Some(&(module, original)) = modules[place].imports.get(word) {
                match module.strip_prefix('.') {
                    None => {
                        external.insert((module, original));
                        continue;
                    }
                    Some(module) => (from, name) = (module, original),
                }
            }
            let defined = |module: &Module| module.statements.iter().position(|statement| statement.name == Some(name));
            open.extend(modules.get(from).and_then(defined).map(|index| (from, index)));
        }
    }
    let mut text = format!("{head}\nfrom __future__ import annotations\n{}", imports(&external));
    for source in sources {
        let module = &modules[source.name];
        let own: Vec<&Statement> =
            module.statements.iter().enumerate().filter(|(i, _)| reached.contains(&(source.name, *i))).map(|(_, own)| own).collect();
        if own.is_empty() {
            continue;
        }
        text += "\n\n";
        for line in module.docstring.lines() {
            text += format!("# {line}").trim_end();
            text.push('\n');
        }
        for (index, statement) in own.iter().enumerate() {
            let blank = if statement.is_block() || index > 0 && own[index - 1].is_block() { "\n\n" } else { "\n" };
            text += if index == 0 && !statement.is_block() { "" } else { blank };
            text.extend(statement.lines.iter().flat_map(|line| [line, "\n"]));
        }
    }
    text
}

/// Import statements, the standard library first.
fn imports(wanted: &BTreeSet<(&str, &str)>) -> String {
    let mut by_module: BTreeMap<(bool, &str), Vec<&str>> = BTreeMap::new();
    wanted.iter().for_each(|(module, name)| by_module.entry((module.starts_with("torch"), module)).or_default().push(name));
    let mut groups = [String::new(), String::new()];
    for ((torch, module), names) in by_module {
        let group = &mut groups[torch as usize];
        if names.contains(&"") {
            *group += &format!("import {module}\n");
        }
        let names: Vec<&str> = names.into_iter().filter(|name| !name.is_empty()).collect();
        if !names.is_empty() {
            *group += &format!("from {module} import {}\n", names.join(", "));
        }
    }
    groups.iter().filter(|group| !group.is_empty()).map(|group| format!("\n{group}")).collect()
}

impl<'a> Module<'a> {
    fn read(text: &'a str) -> Module<'a> {
        let mut module = Module { docstring: String::new(), imports: BTreeMap::new(), statements: Vec::new() };
        for lines in split(text) {
            let Some(&first) = lines.iter().find(|line| !line.starts_with(['#', '@'])) else { continue };
            if first.starts_with("\"\"\"") {
                module.docstring = lines.join("\n").trim_matches('"').trim_end().to_string();
            } else if let Some(rest) = first.strip_prefix("from ") {
                let (from, _) = rest.split_once(' ').unwrap_or((rest, ""));
                let names =
                    lines.iter().flat_map(|line| line.split_once(" import ").map_or(*line, |(_, names)| names).split([',', '(', ')']));
                for name in names.map(str::trim).filter(|name| !name.is_empty() && from != "__future__") {
                    // An alias keeps its whole text, since it is written again.
                    let alias = name.split_once(" as ").map_or(name, |(_, alias)| alias);
                    module.imports.insert(alias, (from, name));
                }
            } else if let Some(name) = first.strip_prefix("import ") {
                module.imports.insert(name, (name, ""));
            } else {
                let rest = ["def ", "class "].iter().find_map(|word| first.strip_prefix(word)).unwrap_or(first);
                let name = rest.split(|c: char| !is_word(c)).next().filter(|name| !name.is_empty() && *name != "if");
                module.statements.push(Statement { lines, name });
            }
        }
        module
    }
}

/// Top-level statements: lines from one that begins in the first column to the next, with comments and decorators before it.
fn split(text: &str) -> Vec<Vec<&str>> {
    let (mut found, mut quoted, mut prefix): (Vec<Vec<&str>>, _, _) = (Vec::new(), false, false);
    for line in text.lines() {
        let begins = !quoted && !line.is_empty() && !line.starts_with([' ', ')', ']', '}']);
        if begins && !prefix || found.is_empty() {
            found.push(Vec::new());
        }
        if begins {
            prefix = line.starts_with(['#', '@']);
        }
        found.last_mut().expect("one was pushed").push(line);
        quoted ^= line.matches("\"\"\"").count() % 2 == 1;
    }
    for lines in &mut found {
        while lines.last().is_some_and(|line| line.is_empty()) {
            lines.pop();
        }
    }
    found
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

impl<'a> Statement<'a> {
    fn is_block(&self) -> bool {
        self.lines.last().is_some_and(|line| line.starts_with(' '))
    }

    /// Identifiers outside of comments and docstrings.
    fn words(&self) -> BTreeSet<&'a str> {
        let mut quoted = false;
        let mut words = BTreeSet::new();
        for line in self.lines.iter().filter(|line| !line.trim_start().starts_with('#')) {
            for (index, part) in line.split("\"\"\"").enumerate() {
                quoted ^= index > 0;
                if !quoted {
                    words.extend(part.split(|c: char| !is_word(c)).filter(|word| !word.is_empty()));
                }
            }
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreferenced_definitions_are_omitted() {
        let a = "\"\"\"About a.\n\nMore.\n\"\"\"\nimport math\nimport sys\n\nfrom .b import used\n\n\n@decorated\ndef root():\n    \"\"\"unused\"\"\"\n    return used(math.pi)\n";
        let b = "from os import path, sep as S\n\n#: About.\nTWO = 2\n\n\ndef unused():\n    return path\n\n\ndef used(x):\n    return S * TWO * x\n";
        let text = joined("HEAD", &[Source { name: "a", text: a }, Source { name: "b", text: b }], &["a"]);
        let expected = "HEAD\nfrom __future__ import annotations\n\nimport math\nfrom os import sep as S\n\n\n# About a.\n#\n# More.\n\n\n@decorated\ndef root():\n    \"\"\"unused\"\"\"\n    return used(math.pi)\n\n\n#: About.\nTWO = 2\n\n\ndef used(x):\n    return S * TWO * x\n";
        assert_eq!(text, expected);
    }
}
