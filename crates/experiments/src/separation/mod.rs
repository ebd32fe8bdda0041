//! The separation theorem of "Why Softmax Attention Outperforms Linear Attention" (arXiv 2310.11685): one attention layer with a
//! threshold readout distinguishes two families of inputs with softmax weights, but not with linear ones.
//!
//! **A reconstruction**: the statement below is checked by algebra and by simulation; it is not quoted from the paper.
//!
//! Networks on A1, A2, A3 ∈ R^{n×d}, scores A1 (QKᵀ) A2ᵀ with QKᵀ = all ones, so a score is (row sum of A1's row) · (row sum of
//! A2's row): u = exp(score), score, score^p or Σ_{k≤p} score^k/k!; f = u/⟨u,1⟩; c_j = A3ᵀ f_j ∈ R^d;
//!
//! F = relu( Σ_{j≤n} Σ_{i≤m} relu(⟨c_j, y_i⟩ − τ) ),  y_i ∈ {−1,+1}^d uniform,  τ = (c+0.1)·√ln n.
//!
//! Data, self-attention: A1 = A2 = A3 = A, L = √ln n; column 1 is a·L at row j3 and 0 elsewhere; columns 2..d−1 are b·L times the identity
//! of size d−2, stacked, the last copy truncated; column d is c·L; b + c = 1. D_0 has a = a_0, D_1 has a = a_1. Cross-attention: the
//! queries' row sums are all L, keys and values as above. A pair of inputs with the same y and j3 is distinguished if F = 0 on D_0 and
//! F > 0 on D_1; the success probability is over y and j3.
//!
//! Implementation:
//! - rows differ only in their column of the identity and in being row j3, so a weight has a closed form and a draw costs O(d·m), for any n
//!   ([`Pair`]); [`naive`] is the plain n × n computation;
//! - vectors y_i are independent, so the success probability also has a closed form ([`Pair::exact`]), with which simulated rates are
//!   compared and from which the bridge is computed;
//! - a draw depends only on seed and index: networks are compared on the same draws, and results are the same for any number of threads.
//!
//! ```
//! use termwise_experiments::separation::{Network, Pair, Setting};
//!
//! let setting = Setting { a1: 3.0, ..Setting::of(1000) };
//! assert!(Pair::new(Network::Softmax, &setting)?.exact() > 0.99);
//! assert!(Pair::new(Network::Linear, &setting)?.exact() < 0.01);
//! # Ok::<(), termwise_experiments::Error>(())
//! ```

mod bridge;
mod curve;
mod document;
mod draw;
mod exact;
mod figure;
pub mod naive;
mod network;
mod output;
mod reference;
mod request;
mod setting;
mod share;
#[cfg(test)]
mod tests;

pub use bridge::{Bridge, BridgePoint, MAX_BRIDGE_ORDER, REQUIRED_PROBABILITY, Series};
pub use curve::{Point, Sweep};
pub use document::Separation;
pub use draw::Draw;
pub use figure::{bridge_figure, success_figure};
pub use network::{MAX_ORDER, Network, Weights};
pub use output::{Pair, Side, Signs};
pub use reference::{Compared, ComparedOrder, REFERENCE_DRAWS, Reference, Verdict};
pub use request::{SeparationRequest, run};
pub use setting::{Setting, default_m};
pub use share::Share;

/// For help, output and files: the basis of the statement.
pub const RECONSTRUCTION: &str =
    "a reconstruction of the separation theorem of arXiv 2310.11685: checked by algebra and simulation, not quoted";
/// Default number of draws.
pub const DRAWS: u64 = 10_000;
