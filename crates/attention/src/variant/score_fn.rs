//! The score function of near or far keys: the kernel, and scale, cap, clamp and projection of the scores that it takes.

use crate::Kernel;
use crate::parts::kernel::exp::Exp;
use crate::parts::kernel::taylor::Coefficients;
use crate::parts::slot::short;
use crate::variant::builders;

/// The weight of a key as a function of q and k: w( min(cap(x), clamp) ), x = scale · (A·q)·(A'·k).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ScoreFn {
    /// The kernel w.
    pub kernel: Kernel,
    /// Scores are replaced by min(x, clamp) before w.
    pub clamp: Option<f64>,
    /// The factor of q·k; default: 1/√d, or 1/√dim.
    pub scale: Option<f64>,
    /// Scores are replaced by cap·tanh(x/cap), before the clamp.
    pub cap: Option<f64>,
    /// q and k are projected to this many dimensions.
    pub dim: Option<usize>,
}

impl Default for ScoreFn {
    /// exp
    fn default() -> ScoreFn {
        ScoreFn::new(Kernel::Exp(Exp))
    }
}

impl From<Kernel> for ScoreFn {
    fn from(kernel: Kernel) -> ScoreFn {
        ScoreFn::new(kernel)
    }
}

impl ScoreFn {
    /// This kernel of scores with the default scale.
    pub fn new(kernel: Kernel) -> ScoreFn {
        ScoreFn { kernel, clamp: None, scale: None, cap: None, dim: None }
    }

    builders! {
        /// Replaces the kernel.
        with_kernel: kernel, Kernel;
        /// Replaces the clamp.
        with_clamp: clamp, Option<f64>;
        /// Replaces the scale.
        with_scale: scale, Option<f64>;
        /// Replaces the cap.
        with_cap: cap, Option<f64>;
        /// Replaces the projection.
        with_dim: dim, Option<usize>;
    }

    /// The scale of scores for head dimension d.
    pub fn scale_for(&self, d: usize) -> f64 {
        self.scale.unwrap_or(1.0 / (self.dim.unwrap_or(d) as f64).sqrt())
    }

    /// Dimension of the scalar product of a score, for head dimension d.
    pub fn score_dim(&self, d: usize) -> usize {
        let dim = self.dim.unwrap_or(d);
        if self.kernel.has_learned_map() { 2 * dim } else { dim }
    }

    /// Whether weights are products of a finite number of features.
    pub fn has_finite_map(&self) -> bool {
        self.clamp.is_none() && self.cap.is_none() && self.kernel.polynomial().is_some()
    }

    /// Whether the other branch stores the same keys.
    fn prepares_like(&self, other: &ScoreFn) -> bool {
        let plain = |score_fn: &ScoreFn| (score_fn.dim.is_none() && !score_fn.kernel.has_learned_map()).then(|| score_fn.kernel.map());
        plain(self).is_some() && plain(self) == plain(other)
    }

    /// Number of values per cached key: for near queries, and for far queries if those differ.
    pub(super) fn kept_width(&self, far: Option<&ScoreFn>, d: usize) -> usize {
        self.score_dim(d) + far.filter(|far| !self.prepares_like(far)).map_or(0, |far| far.score_dim(d))
    }

    /// Whether it is a function of the score only, without parameters.
    pub(super) fn has_no_tensors(&self) -> bool {
        self.dim.is_none() && !self.kernel.has_learned_map() && self.learned() == 0
    }

    /// Number of learned coefficients of each head.
    pub fn learned(&self) -> usize {
        match &self.kernel {
            Kernel::Taylor(taylor) if *taylor.coefficients() == Coefficients::Learned => taylor.orders().len(),
            _ => 0,
        }
    }

    /// Rows of the finite feature map for head dimension d; `None` if there is none.
    pub fn state_rows(&self, d: usize) -> Option<u128> {
        if !self.has_finite_map() {
            return None;
        }
        let rows = self.kernel.state_rows(self.score_dim(d))?;
        Some(rows.iter().fold(0u128, |sum, (_, rows)| sum.saturating_add(*rows)))
    }

    /// Its weight in the symbols of the legend.
    pub(super) fn formula(&self) -> String {
        let x = match self.cap {
            Some(c) => format!("{}·tanh(x/{})", short(c), short(c)),
            None => "x".to_string(),
        };
        let x = match self.clamp {
            Some(c) => format!("min({x}, {c})"),
            None => x,
        };
        let compound = self.clamp.is_none() && self.cap.is_some();
        let base = if compound { format!("({x})") } else { x.clone() };
        match &self.kernel {
            Kernel::Exp(_) => format!("exp({x})"),
            Kernel::Taylor(taylor) => {
                let a = if *taylor.coefficients() == Coefficients::Ones { "" } else { "a_n·" };
                format!("Σ_{{n∈{{{}}}}} {a}{base}^n/n!", taylor.orders_text())
            }
            Kernel::Power(power) => format!("{base}^{}", power.p),
            Kernel::Feature(_) => x,
        }
    }
}
