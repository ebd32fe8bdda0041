//! Unsafe code is confined to this crate and to the array conversion of the Python bindings. The compiler enforces it in every other crate.

use std::path::Path;

/// Crates with unsafe code. `cli` installs a signal handler.
const ALLOWED: [&str; 3] = ["kernels", "python", "cli"];

#[test]
fn other_crates_forbid_unsafe_code() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut checked = 0;
    for entry in std::fs::read_dir(crates).expect("the folder of crates") {
        let folder = entry.expect("a readable entry").path();
        let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
        let Ok(root) = std::fs::read_to_string(folder.join("src/lib.rs")) else { continue };
        if !ALLOWED.contains(&name.as_str()) {
            assert!(root.lines().any(|line| line == "#![forbid(unsafe_code)]"), "crate {name} does not forbid unsafe code");
            checked += 1;
        }
    }
    assert!(checked >= 7, "only {checked} crates were checked");
}
