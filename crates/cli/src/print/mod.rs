//! Results as text.

mod bench;
mod plan;
mod variants;
mod verify;

pub use bench::{attention, chunk, decode, gemm, step};
pub use plan::plan;
pub use variants::{Described, catalogue, descriptions};
pub use verify::{CasePrinter, Verified, summary};
