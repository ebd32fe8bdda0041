//! Commands whose work is in `termwise_train`.

pub mod source;
pub mod eval;
pub mod settings;
pub mod sweep;
pub mod train;

/// From 1 to that many.
fn size(most: u64) -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(1..=most)
}
