//! Results as text.

mod bench;
mod cut;
mod plan;
mod reproduce;
mod separation;
mod spectrum;
mod variants;
mod verify;

pub use bench::{attention, chunk, decode, gemm, step};
pub use cut::cut;
pub use plan::plan;
pub use reproduce::{announce, paper, results};
pub use separation::separation;
pub use spectrum::spectrum;
pub use variants::{Described, catalogue, descriptions};
pub use verify::{CasePrinter, Verified, summary};
