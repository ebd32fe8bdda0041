//! Fixed-size KV memory for trained models, and its effect on the loss.
//!
//! ```text
//! text ─► calibrate   attention distance per head (atlas)
//!      ─► errors      output error of each KV head with each kind of memory, computed by the engine
//!      ─► sensitivity effect of each KV head's error on the predictions, measured one head at a time
//!      ─► allocate    one kind per KV head within a budget
//!      ─► assemble    the model with its variants, which every other command can read
//!      ─► meter       loss and KL to the original, by position ─► frontier
//!      ─► audit       checks of a converted model against its record and its original
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

/// Progress callback: steps done, total steps, and the current stage.
pub type ProgressFn<'a> = &'a mut dyn FnMut(u64, u64, &str);
