//! Cargo runs the tests of packages in the order of their names, so this one comes last and can list the tests that the others skipped.

use std::io::Write;

#[test]
fn skipped_tests_are_listed() {
    let (count, skipped) = termwise_base::test_skip::take_skipped();
    let mut text = String::new();
    if !skipped.is_empty() {
        text = format!("\n{count} tests were skipped or compiled out ({}=all makes that a failure):\n", termwise_base::test_skip::REQUIRE);
        skipped.iter().for_each(|line| text += &format!("  {line}\n"));
    }
    // Past the harness, which captures the output of tests that pass.
    let _ = std::io::stderr().write_all(text.as_bytes());
}
