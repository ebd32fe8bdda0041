//! Modules have no cyclic dependencies, neither among the directories of the crate nor among the files of a directory.
//! Unsafe code is only in the kernels crate.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Dependencies among the modules of one directory.
type Graph = BTreeMap<String, BTreeSet<String>>;

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("a readable folder").map(|entry| entry.expect("a readable entry").path()).collect();
    entries.sort();
    for path in entries {
        match path.extension() {
            None => sources(&path, found),
            Some(_) if path.file_stem().is_some_and(|stem| stem == "tests" || stem == "testing") => {}
            Some(_) => found.push(path),
        }
    }
}

/// The code of a file without comments and tests.
fn code(text: &str) -> String {
    let own = text.split("#[cfg(test)]").next().unwrap_or_default();
    own.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// The module of a file: `fused/plan.rs` is fused::plan, `fused/mod.rs` is fused.
fn module(path: &Path) -> Vec<String> {
    let mut parts: Vec<String> = path.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|last| last == "mod" || last == "lib") {
        parts.pop();
    }
    parts
}

/// Paths that follow `start`, with groups in braces expanded.
fn paths(code: &str, start: &str) -> Vec<Vec<String>> {
    let mut all = Vec::new();
    for (at, _) in code.match_indices(start) {
        expand(&code[at + start.len()..], &mut Vec::new(), &mut all);
    }
    all
}

/// Reads one path or group; returns the rest.
fn expand<'a>(mut text: &'a str, before: &mut Vec<String>, all: &mut Vec<Vec<String>>) -> &'a str {
    let depth = before.len();
    loop {
        text = text.trim_start();
        if let Some(mut rest) = text.strip_prefix('{') {
            loop {
                rest = expand(rest, before, all).trim_start();
                match rest.strip_prefix(',') {
                    Some(next) => rest = next,
                    None => break,
                }
            }
            before.truncate(depth);
            return rest.strip_prefix('}').unwrap_or(rest);
        }
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
        if end > 0 {
            before.push(text[..end].to_string());
        }
        text = &text[end..];
        match text.strip_prefix("::") {
            Some(rest) if end > 0 => text = rest,
            _ => {
                all.push(before.clone());
                before.truncate(depth);
                // Skip a renamed import.
                return text.trim_start().strip_prefix("as ").map_or(text, |rest| &rest[rest.find([',', '}', ';']).unwrap_or(0)..]);
            }
        }
    }
}

/// The dependencies among the files and directories of each directory.
fn graphs(files: &[(Vec<String>, String)]) -> BTreeMap<Vec<String>, Graph> {
    let modules: BTreeSet<&Vec<String>> = files.iter().map(|(module, _)| module).collect();
    // Reexports of the crate root, with the module that defines them.
    let root = files.iter().find(|(module, _)| module.is_empty()).map_or("", |(_, code)| code);
    let offered: BTreeMap<String, Vec<String>> =
        paths(root, "pub use ").into_iter().filter_map(|path| Some((path.last()?.clone(), path))).collect();
    let mut graphs: BTreeMap<Vec<String>, Graph> = BTreeMap::new();
    for (from, code) in files.iter().filter(|(module, _)| !module.is_empty()) {
        for path in paths(code, "crate::") {
            let mut to = match path.first().and_then(|first| offered.get(first)).filter(|_| !modules.contains(&path[..1].to_vec())) {
                Some(path) => path.clone(),
                None => path,
            };
            while !to.is_empty() && !modules.contains(&to) {
                to.pop();
            }
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            // The `mod.rs` of a directory may be used by all modules in it.
            if common < from.len() && common < to.len() {
                graphs.entry(from[..common].to_vec()).or_default().entry(from[common].clone()).or_default().insert(to[common].clone());
            }
        }
    }
    graphs
}

/// A path from a module back to itself.
fn cycle(graph: &Graph) -> Option<Vec<String>> {
    fn visit(graph: &Graph, at: &str, way: &mut Vec<String>, done: &mut BTreeSet<String>) -> Option<Vec<String>> {
        if let Some(start) = way.iter().position(|other| other == at) {
            return Some(way[start..].iter().cloned().chain([at.to_string()]).collect());
        }
        if !done.insert(at.to_string()) {
            return None;
        }
        way.push(at.to_string());
        let found = graph.get(at).into_iter().flatten().find_map(|next| visit(graph, next, way, done));
        way.pop();
        found
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|start| visit(graph, start, &mut Vec::new(), &mut done))
}

fn crate_files() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    sources(&root, &mut found);
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).expect("a readable file");
        (path.strip_prefix(&root).expect("below src").to_path_buf(), text)
    };
    found.into_iter().map(read).collect()
}

#[test]
fn modules_have_no_cyclic_dependencies() {
    let files: Vec<_> = crate_files().into_iter().map(|(path, text)| (module(&path), code(&text))).collect();
    assert!(files.len() > 50, "{} files", files.len());
    let graphs = graphs(&files);
    assert!(graphs[&vec![]]["fused"].contains("layer") && graphs[&vec!["fused".to_string()]]["decode"].contains("plan"));
    for (folder, graph) in graphs {
        assert_eq!(cycle(&graph), None, "in `{}`", folder.join("::"));
    }
}

#[test]
fn cyclic_dependencies_are_detected() {
    let file = |path: &str, text: &str| (module(Path::new(path)), code(text));
    let files = |last: &str| {
        vec![
            file("lib.rs", "pub use b::{inner::Thing as Other, More};"),
            file("a.rs", "use crate::{More, c::{self, X}};\n// crate::d\n#[cfg(test)]\nuse crate::d::Y;"),
            file("b/mod.rs", ""),
            file("b/inner.rs", "use crate::b::late::Z;"),
            file("b/late.rs", last),
            file("c.rs", ""),
            file("d.rs", "use crate::a;"),
        ]
    };
    let found = |last: &str| graphs(&files(last)).values().find_map(cycle);
    assert_eq!(found("use crate::c::X;"), None);
    assert_eq!(found("use crate::b::inner::Thing;"), Some(["inner", "late", "inner"].map(String::from).to_vec()));
    assert_eq!(found("use crate::{c, a::X};"), Some(["a", "b", "a"].map(String::from).to_vec()));
}

#[test]
fn there_is_no_unsafe_code() {
    for (path, text) in crate_files() {
        assert!(
            !code(&text).replace("unsafe_code", "").contains("unsafe"),
            "unsafe code in {}: it belongs in the kernels crate",
            path.display()
        );
    }
}
