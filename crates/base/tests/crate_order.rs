//! A crate depends only on crates that come before it. Dev-dependencies are not restricted.

use std::path::Path;

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
        if line.starts_with('[') {
            inside = line == "[dependencies]" || (line.starts_with("[target.") && line.ends_with(".dependencies]"));
        }
        let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
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
