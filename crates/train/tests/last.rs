//! Cargo tests packages in alphabetical order, so this test runs last and can list the tests that were skipped.

use std::io::Write;

#[test]
fn skipped_tests_are_listed() {
    let (count, skipped) = termwise_base::test_skip::take_skipped();
    let mut text = String::new();
    if !skipped.is_empty() {
        text = format!("\n{count} tests were skipped or compiled out ({}=all makes that a failure):\n", termwise_base::test_skip::REQUIRE);
        skipped.iter().for_each(|line| text += &format!("  {line}\n"));
    }
    // Bypasses the harness, which captures the output of passing tests.
    let _ = std::io::stderr().write_all(text.as_bytes());
}
