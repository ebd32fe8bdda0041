//! Rules of the workspace that the compiler does not check: a crate depends only on crates that come before it (dev-dependencies are not
//! restricted), and one module reads metrics.

use std::path::{Path, PathBuf};

/// All crates of the workspace in dependency order: directory and package name.
const ORDER: [(&str, &str); 11] = [
    ("base", "termwise-base"),
    ("kernels", "termwise-kernels"),
    ("attention", "termwise-attention"),
    ("report", "termwise-report"),
    ("data", "termwise-data"),
    ("model", "termwise-model"),
    ("train", "termwise-train"),
    ("analysis", "termwise-analysis"),
    ("experiments", "termwise-experiments"),
    ("cli", "termwise"),
    ("python", "termwise-python"),
];

/// Workspace crates among the dependencies of a manifest.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut inside = false;
    let mut found = Vec::new();
    for line in manifest.lines() {
        // `[dependencies]`, `[target.'cfg(unix)'.dependencies]` or `[dependencies.NAME]`; also of build scripts.
        let mut name = line.split(['.', ' ', '=']).next().unwrap_or_default();
        if let Some(table) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            let mut words = table.split('.').skip_while(|word| !matches!(*word, "dependencies" | "build-dependencies"));
            inside = words.next().is_some() && !table.starts_with("workspace");
            name = words.next().unwrap_or_default();
        }
        if inside && (name == "termwise" || name.starts_with("termwise-")) {
            found.push(name.to_owned());
        }
    }
    found
}

#[test]
fn crates_depend_only_on_earlier_crates() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut folders: Vec<String> = std::fs::read_dir(&crates)
        .expect("the folder of crates")
        .map(|entry| entry.expect("a readable entry"))
        .filter(|entry| entry.path().join("Cargo.toml").exists())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    folders.sort();
    let mut expected: Vec<&str> = ORDER.iter().map(|(folder, _)| *folder).collect();
    expected.sort();
    assert_eq!(folders, expected, "the crates of the workspace");
    let mut total = 0;
    for (place, (folder, package)) in ORDER.iter().enumerate() {
        let manifest = std::fs::read_to_string(crates.join(folder).join("Cargo.toml")).expect("a manifest");
        assert!(manifest.contains(&format!("name = \"{package}\"")), "{folder} is not the package {package}");
        for dependency in dependencies(&manifest) {
            total += 1;
            let earlier = ORDER[..place].iter().any(|(_, name)| *name == dependency);
            assert!(earlier, "{package} depends on {dependency}, which does not come before it");
        }
    }
    assert!(total > 20, "only {total} dependencies were found");
}

#[test]
fn dependencies_are_found_in_every_form() {
    let manifest = "[package]\nname = \"termwise-a\"\n[dependencies]\ntermwise-b.workspace = true\nserde = \"1\"\n[dev-dependencies]\n\
        termwise-c.workspace = true\n[target.'cfg(unix)'.dependencies]\ntermwise-d = { path = \"d\" }\n[dependencies.termwise-e]\n\
        path = \"e\"\n[build-dependencies]\ntermwise-f = \"1\"\n[dev-dependencies.termwise-g]\npath = \"g\"\n";
    assert_eq!(dependencies(manifest), ["termwise-b", "termwise-d", "termwise-e", "termwise-f"]);
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("a readable entry").path();
        match path.is_dir() {
            true => sources(&path, found),
            false if path.extension().is_some_and(|extension| extension == "rs") => found.push(path),
            false => {}
        }
    }
}

/// `termwise_train::metrics` is the only code that reads metrics.jsonl. Two readers once disagreed about the last evaluation, and a claim was decided
/// by an earlier one.
#[test]
fn one_module_reads_metrics() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    ORDER.iter().for_each(|(folder, _)| sources(&crates.join(folder).join("src"), &mut files));
    let mut named = 0;
    for path in &files {
        let text = std::fs::read_to_string(path).expect("a source");
        let program = text.split("\nmod tests {").next().unwrap_or_default();
        if path.ends_with("train/src/metrics.rs") || path.components().any(|part| part.as_os_str() == "tests") {
            continue;
        }
        for line in program.lines().filter(|line| line.contains("METRICS") || line.contains("\"metrics.jsonl\"")) {
            named += 1;
            let reads = ["read(", "read_to_string(", "read_text(", "open("].iter().any(|call| line.contains(call));
            assert!(!reads || line.contains("metrics::read("), "{}: {line}", path.display());
        }
    }
    assert!(named > 5, "the file is named in {named} lines");
}
