//! Results as text.

mod bench;
mod variants;
mod verify;

pub use bench::{attention, gemm, step};
pub use variants::{Described, catalogue, descriptions};
pub use verify::{CasePrinter, Verified, summary};
