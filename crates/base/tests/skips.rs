//! Skipped tests are reported, recorded and counted. A required test that is skipped fails.

use std::process::Command;

use termwise_base::test_skip::{REQUIRE, compiled_out, need, shared};

/// Started as a separate process by the other test.
#[test]
#[ignore = "started by the other test"]
fn child() {
    assert_eq!(need("flowers", "flower", Some(3)), Some(3));
    compiled_out("flowers", true, &["#[test]\n"]);
    compiled_out("bees", false, &["#[test]\n#[test]\n"]);
    let Some(_) = shared("no such folder") else { return };
    unreachable!("it is not there");
}

#[test]
fn a_skip_is_reported_and_recorded_and_fails_if_required() {
    let run = |require: &str| {
        let this = std::env::current_exe().expect("this test");
        let output = Command::new(this).args(["--exact", "child", "--ignored"]).env(REQUIRE, require).output().expect("a process");
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    };
    let (passed, said, _) = run("flowers");
    assert!(passed && said.contains("SKIPPED skips child: no ../shared/no such folder"), "{said}");
    assert!(said.contains("SKIPPED skips child: 2 tests compiled out without the feature bees"), "{said}");
    for (required, reason) in [
        ("shared", "no ../shared/no such folder"),
        ("browser, shared", "no ../shared/no such folder"),
        ("bees", "tests compiled out without the feature bees"),
        ("all", "tests compiled out without the feature bees"),
    ] {
        let (passed, _, out) = run(required);
        assert!(!passed && out.contains(reason), "{required}: {out}");
    }
    // The child's test command is this process. This process has a separate record, which is not modified.
    let own = std::env::current_exe().expect("this test");
    let folder = own.parent().and_then(|deps| deps.parent()).expect("target/debug").join("skipped-tests");
    let record = folder.join(std::process::id().to_string());
    let bees = "2\tskips child: 2 tests compiled out without the feature bees\n";
    // One line per run, up to its failure.
    let folder = "1\tskips child: no ../shared/no such folder\n";
    assert_eq!(std::fs::read_to_string(&record).expect("a record"), [bees, folder, bees, bees].concat());
    std::fs::remove_file(record).expect("a file");
}
