//! Fixed-size KV memory for trained models, and its effect on the loss.
//!
//! ```text
//! text ─► calibrate   how far back each head looks (atlas)
//!      ─► errors      error of each KV head's output with each kind of memory, computed by the engine itself
//!      ─► sensitivity effect of each KV head's error on the model's predictions: measured, one head at a time
//!      ─► allocate    one kind for each KV head within a budget
//!      ─► assemble    the model with its variants, which every other command understands
//!      ─► meter       loss and KL to the original, by position ─► frontier
//!      ─► audit       whether a converted model matches its record, and the effect of each part of its memory
//! ```
//!
//! [`convert()`], [`frontier()`], [`audit()`] and [`atlas()`] are the entry points. Calibration and allocation never see the text that is evaluated.

pub mod allocate;
pub mod assemble;
pub mod atlas;
pub mod audit;
pub mod calibrate;
pub mod convert;
pub mod error;
pub mod errors;
pub mod frontier;
pub mod journal;
pub mod kinds;
pub mod meter;
pub mod recall;
pub mod record;
mod run;
pub mod sensitivity;
mod text;

pub use convert::Granularity;
pub use error::Error;
pub use run::{AtlasOptions, AuditOptions, ConvertOptions, FrontierOptions, TextSplit, atlas, audit, convert, frontier};
pub use text::{Cutting, Named, Text, Texts};

/// How far the work is: pieces done, pieces in all, and what is being done.
pub type Tell<'a> = &'a mut dyn FnMut(u64, u64, &str);
