//! Cargo runs the tests of packages in the order of their names, so this one comes last and can say what the others have skipped.

use std::io::Write;

#[test]
fn skipped_tests_are_listed() {
    let skipped = termwise_unrun::take_skipped();
    let mut text = String::new();
    if !skipped.is_empty() {
        let count = skipped.len();
        text = format!("\n{count} tests were skipped ({}=all makes them fail):\n", termwise_unrun::REQUIRE);
        skipped.iter().for_each(|line| text += &format!("  {line}\n"));
    }
    // Past the harness, which shows only what tests say that fail.
    let _ = std::io::stderr().write_all(text.as_bytes());
}
