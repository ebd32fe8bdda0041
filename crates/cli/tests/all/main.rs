//! All tests of the crate that do not need a separate process, in one program to link once.

mod bench;
mod brief;
mod browser;
mod chromium;
mod compose;
mod convert;
mod data;
mod demo;
mod docs;
#[cfg(unix)]
mod endings;
mod eval;
mod generate;
mod golden_curve;
mod help;
mod outputs;
mod overwrite;
mod plan;
#[cfg(all(unix, feature = "mpi"))]
mod ranks;
mod reproduce;
mod separation;
mod serve;
mod show;
mod spectrum;
#[path = "../support/mod.rs"]
mod support;
mod sweep;
mod train;
mod truncate;
mod variants;
mod verify;

#[test]
fn tests_of_missing_features_are_counted() {
    termwise_base::test_skip::compiled_out("mpi", cfg!(all(unix, feature = "mpi")), &[include_str!("ranks.rs")]);
}
