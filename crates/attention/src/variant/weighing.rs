//! How the keys of a class are weighed: the kernel, and what happens to scores on their way to it.

use crate::Kernel;
use crate::parts::kernel::taylor::Coefficients;
use crate::parts::slot::short;

/// The parts of a variant that turn q and k into a weight, of near or of far keys: w( min(cap(x), clamp) ), x = scale · (A·q)·(A'·k).
#[derive(Clone, Debug, PartialEq)]
pub struct Weighing {
    /// w
    pub kernel: Kernel,
    /// Scores are replaced by min(x, clamp) before w.
    pub clamp: Option<f64>,
    /// What q·k is multiplied by; 1/√d where absent, or 1/√dim.
    pub scale: Option<f64>,
    /// Scores are replaced by cap·tanh(x/cap), before the clamp.
    pub cap: Option<f64>,
    /// q and k are projected to this many dimensions.
    pub dim: Option<usize>,
}

/// The scale of scores for head dimension d.
pub(super) fn scale(given: Option<f64>, dim: Option<usize>, d: usize) -> f64 {
    given.unwrap_or(1.0 / (dim.unwrap_or(d) as f64).sqrt())
}

impl Weighing {
    /// The scale of scores for head dimension d.
    pub fn scale_for(&self, d: usize) -> f64 {
        scale(self.scale, self.dim, d)
    }

    /// How many numbers of q and k meet in a score, for head dimension d.
    pub fn score_dim(&self, d: usize) -> usize {
        let dim = self.dim.unwrap_or(d);
        if self.kernel.has_learned_map() { 2 * dim } else { dim }
    }

    /// Whether weights are products of a finite number of features.
    pub fn has_finite_map(&self) -> bool {
        self.clamp.is_none() && self.cap.is_none() && self.kernel.polynomial().is_some()
    }

    /// Whether keys are kept as they are for another kind of them.
    fn prepares_like(&self, other: &Weighing) -> bool {
        let plain = |weighing: &Weighing| (weighing.dim.is_none() && !weighing.kernel.has_learned_map()).then(|| weighing.kernel.map());
        plain(self).is_some() && plain(self) == plain(other)
    }

    /// Numbers of a key that is kept for near queries, and for these as far queries where that is another.
    pub(super) fn kept_width(&self, far: Option<&Weighing>, d: usize) -> usize {
        self.score_dim(d) + far.filter(|far| !self.prepares_like(far)).map_or(0, |far| far.score_dim(d))
    }

    /// Whether it is a function of the score alone: no weights of its own.
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

    /// Rows of the finite feature map for head dimension d; `None` where there is none.
    pub fn state_rows(&self, d: usize) -> Option<u128> {
        if !self.has_finite_map() {
            return None;
        }
        let rows = self.kernel.state_rows(self.score_dim(d))?;
        Some(rows.iter().fold(0u128, |sum, (_, rows)| sum.saturating_add(*rows)))
    }

    /// Why its parts cannot stand together.
    pub(super) fn problem(&self) -> Option<String> {
        for (what, number) in [("clamp", self.clamp), ("scale", self.scale)] {
            if let Some(c) = number.filter(|c| !c.is_finite()) {
                return Some(format!("a {what} is a finite number, found {c}"));
            }
        }
        if let Some(c) = self.cap.filter(|c| !(c.is_finite() && *c > 0.0)) {
            return Some(format!("a cap is a positive number, found {c}"));
        }
        if self.dim == Some(0) {
            return Some("`dim=0` leaves nothing of q and k; write 1 or more, or leave `dim` out".into());
        }
        None
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
