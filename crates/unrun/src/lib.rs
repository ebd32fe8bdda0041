//! Tests that cannot run say so.
//!
//! Some tests need what a machine may not have: the material in `../shared`, a browser. They ask for it here. Where it is missing the test
//! ends at once, a line on standard error says so past the harness's capture, and the line is kept in `target/…/skipped-tests/`, in a file of the
//! test command. The last test of the workspace, this crate's own, prints all of them again and how many there are.
//!
//! With `TERMWISE_REQUIRE=shared,browser`, or `all`, a skip is a failure.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

/// What tests must not be skipped for: needs separated by commas, or `all`.
pub const REQUIRE: &str = "TERMWISE_REQUIRE";

/// A file or folder of the material beside the checkout; where it is missing the test is skipped:
/// `let Some(folder) = termwise_unrun::shared("golden") else { return };`
#[must_use]
pub fn shared(path: &str) -> Option<PathBuf> {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(path);
    need("shared", &format!("../shared/{path}"), whole.exists().then_some(whole))
}

/// What a test needs, if it is there. `need` is the word for [`REQUIRE`], `what` says it to people.
///
/// # Panics
/// Where it is missing and required.
#[must_use]
pub fn need<T>(need: &str, what: &str, found: Option<T>) -> Option<T> {
    if found.is_none() {
        let required = std::env::var(REQUIRE).unwrap_or_default();
        assert!(!required.split(',').any(|word| [need, "all"].contains(&word.trim())), "{REQUIRE}={required}, and there is no {what}");
        let thread = std::thread::current();
        let line = format!("{} {}: no {what}\n", program(), thread.name().unwrap_or("a test"));
        // Not with `eprint!`, whose output the harness keeps to itself unless the test fails.
        let _ = std::io::stderr().write_all(format!("SKIPPED {line}").as_bytes());
        // Not worth a failure where it cannot be kept: it was said.
        let _ = keep(&line);
    }
    found
}

/// The tests that this test command has skipped so far, a line each; they are forgotten then.
pub fn take_skipped() -> Vec<String> {
    let path = record();
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let _ = std::fs::remove_file(path);
    text.lines().map(str::to_owned).collect()
}

fn keep(line: &str) -> std::io::Result<()> {
    let path = record();
    std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    // In one call, since several tests may write at once.
    OpenOptions::new().create(true).append(true).open(path)?.write_all(line.as_bytes())
}

/// The file of this test command: all of its programs have the same parent.
fn record() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    // …/debug/deps/NAME-HASH
    let profile = program.parent().and_then(Path::parent).unwrap_or(Path::new(".")).to_owned();
    #[cfg(unix)]
    let command = std::os::unix::process::parent_id();
    #[cfg(not(unix))]
    let command = 0;
    profile.join("skipped-tests").join(command.to_string())
}

/// The test program's name without its hash.
fn program() -> String {
    let name = std::env::current_exe().ok().and_then(|path| Some(path.file_stem()?.to_string_lossy().into_owned())).unwrap_or_default();
    name.rsplit_once('-').map_or(name.clone(), |(front, _)| front.to_owned())
}
