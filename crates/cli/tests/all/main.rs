//! All tests of the crate that need no process of their own, as one program: what they share is compiled and linked once.

mod bench;
mod browser;
mod chromium;
mod compose;
mod convert;
mod cut;
mod data;
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
mod play;
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
mod variants;
mod verify;

#[test]
fn tests_of_missing_features_are_counted() {
    termwise_unrun::compiled_out("mpi", cfg!(all(unix, feature = "mpi")), &[include_str!("ranks.rs")]);
}
