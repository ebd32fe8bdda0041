//! Reports tests that cannot run.
//!
//! Some tests need a file, a program or a feature that may be unavailable: the reference data in `../shared`, a browser, a build with `hub`. If it is missing,
//! the test returns early. A line is printed to standard error, bypassing the test harness's capture, and is also stored in `target/…/skipped-tests/`, in one
//! file per test command. Tests that were compiled out are reported and counted by [`compiled_out`]. The last test of the workspace,
//! `crates/train/tests/last.rs`, prints all lines and the number of skipped tests.
//!
//! With `TERMWISE_REQUIRE=shared,hub` a skip for one of these needs is a failure. With `TERMWISE_REQUIRE=all` every skip is a failure. The Python tests read
//! the same variable.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Environment variable: comma-separated needs for which tests must not be skipped, or `all`.
pub const REQUIRE: &str = "TERMWISE_REQUIRE";

/// A file or directory of the reference data next to the checkout. If it is missing, the test is skipped:
/// `let Some(folder) = termwise_base::test_skip::shared("golden") else { return };`
#[must_use]
pub fn shared(path: &str) -> Option<PathBuf> {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(path);
    need("shared", &format!("../shared/{path}"), whole.exists().then_some(whole))
}

/// Returns the resource that a test needs, or reports a skip. `need` is the name used in [`REQUIRE`]; `what` describes the resource.
///
/// # Panics
/// If it is missing and required.
#[must_use]
pub fn need<T>(need: &str, what: &str, found: Option<T>) -> Option<T> {
    if found.is_none() {
        skip(need, 1, &format!("no {what}"));
    }
    found
}

/// Reports the tests of these sources that were compiled out, if the feature is not enabled. A source that does not mention the feature, or that begins with
/// `#![cfg(feature = …)]`, counts as a whole. In any other source, items with `#[cfg(feature = …)]` count.
///
/// # Panics
/// If the feature is required.
pub fn compiled_out(feature: &str, enabled: bool, sources: &[&str]) {
    let tests = sources.iter().map(|source| gated_tests(source, feature)).sum();
    if !enabled && tests > 0 {
        skip(feature, tests, &format!("{} compiled out without the feature {feature}", if tests == 1 { "test" } else { "tests" }));
    }
}

fn gated_tests(source: &str, feature: &str) -> usize {
    let attribute = format!("cfg(feature = \"{feature}\")]");
    let whole = !source.contains(&attribute) || source.contains(&format!("#![{attribute}"));
    let mut gated = whole;
    let mut count = 0;
    for line in source.lines() {
        gated |= line == format!("#[{attribute}");
        count += usize::from(gated && line.trim() == "#[test]");
        // The end of an item.
        gated &= whole || line != "}";
    }
    count
}

fn skip(need: &str, tests: usize, reason: &str) {
    let required = std::env::var(REQUIRE).unwrap_or_default();
    assert!(!required.split(',').any(|word| [need, "all"].contains(&word.trim())), "{REQUIRE}={required}: {reason}");
    let thread = std::thread::current();
    let times = if tests == 1 { String::new() } else { format!("{tests} ") };
    let line = format!("{} {}: {times}{reason}\n", program(), thread.name().unwrap_or("a test"));
    // Not with `eprint!`: the harness captures its output unless the test fails.
    let _ = std::io::stderr().write_all(format!("SKIPPED {line}").as_bytes());
    // A record that cannot be written is not a failure: the line was printed.
    let _ = keep(&format!("{tests}\t{line}"));
}

/// Returns the number of tests that this test command has skipped so far, with one line per skip. Removes the record.
pub fn take_skipped() -> (usize, Vec<String>) {
    let path = record();
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let _ = std::fs::remove_file(path);
    let parts = text.lines().filter_map(|line| line.split_once('\t'));
    parts.fold((0, Vec::new()), |(count, mut lines), (tests, line)| {
        lines.push(line.to_owned());
        (count + tests.parse::<usize>().unwrap_or(1), lines)
    })
}

fn keep(line: &str) -> std::io::Result<()> {
    let path = record();
    std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    // In one call: several tests may write concurrently.
    OpenOptions::new().create(true).append(true).open(path)?.write_all(line.as_bytes())
}

/// The file of this test command. All of its test programs have the same parent process.
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

#[cfg(test)]
mod tests {
    use super::gated_tests;

    #[test]
    fn gated_tests_are_counted() {
        let whole = "#![cfg(feature = \"hub\")]\n#[test]\nfn a() {\n}\n#[test]\nfn b() {\n}\n";
        assert_eq!(gated_tests(whole, "hub"), 2);
        assert_eq!(gated_tests(&whole[25..], "hub"), 2, "gated where the module is declared");
        let items = "#[test]\nfn a() {\n}\n#[cfg(feature = \"hub\")]\nblock! {\n    #[test]\n    fn b() {\n    }\n    #[test]\n    fn c() {}\n}\n#[test]\nfn d() {\n}\n";
        assert_eq!(gated_tests(items, "hub"), 2);
    }
}
