//! Results as text, or as JSON.

use std::io::{self, Write};

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

/// Indented, with a line break at the end.
pub fn json(value: &impl serde::Serialize, out: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}
