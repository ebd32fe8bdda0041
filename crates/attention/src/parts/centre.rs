//! Centre: keys shifted by a vector μ, weights multiplied back: w(x) becomes e^c·w(x − c), c = scale·q·μ
//!
//! scale·q·(k − μ) = x − c, so a centre acts on the scores of a query alone: for exp an identity, for a polynomial an expansion around the
//! mean key instead of around zero. With `gauss` the weights have a further factor e^{γ/2·qᵀΣq}, which is what the orders that are missing
//! would add for Gaussian keys (γ = scale², Σ their covariance).
//!
//! `whole` is for keys that are projected: μ is the running mean of the keys before the projection A, c = q·μ/√d in all dimensions, and the polynomial is one of
//! (A·q)·(A·k − A·μ). What the projection leaves out is then still there by its mean. `gauss` has Σ in all dimensions, too, and is bounded by what n keys can add:
//! with v = γ·qᵀΣq the log of their mean e^x is v/2 only while v ≤ 2·ln n, and √(2·v·ln n) − ln n beyond, where the largest of n Gaussian scores is all there is. So
//! nothing is added while one key is far, just behind the window.

use crate::parts::slot::Info;

/// Where μ comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mean {
    /// Calibrated before: no gradient.
    Given,
    /// Learned per kv head.
    Learned,
    /// The mean of the keys of the class that the position sees, each counted once.
    Running,
    /// The same of keys before their projection, which a part of c remains beside.
    Whole,
}

/// The centre of a kernel's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Centre {
    /// μ
    pub mean: Mean,
    /// Whether there is the factor e^{γ/2·qᵀΣq}.
    pub gauss: bool,
}

const WORDS: [(&str, Mean); 4] = [("given", Mean::Given), ("learned", Mean::Learned), ("running", Mean::Running), ("whole", Mean::Whole)];

impl Centre {
    /// Every kind, for lists; the first word of its text chooses.
    pub const PARTS: &'static [&'static Info] = &[&GIVEN, &LEARNED, &RUNNING, &WHOLE];

    /// Whether μ is a tensor.
    pub fn has_mean(self) -> bool {
        !matches!(self.mean, Mean::Running | Mean::Whole)
    }

    /// Whether μ and γ have gradients.
    pub fn is_trained(self) -> bool {
        self.mean != Mean::Given
    }

    /// Whether Σ has: that of whole keys weighs all dimensions of a query, and is no longer a covariance once it is trained.
    pub fn trains_spread(self) -> bool {
        self.mean == Mean::Whole
    }

    /// The text that `read` takes.
    pub fn text(self) -> String {
        let (word, _) = WORDS.iter().find(|(_, mean)| *mean == self.mean).expect("every mean has a word");
        if self.gauss { format!("{word},gauss") } else { word.to_string() }
    }

    /// `None` where no mean has that word.
    pub fn read(word: &str, args: &str) -> Option<Result<Centre, String>> {
        let (_, mean) = *WORDS.iter().find(|(other, _)| *other == word)?;
        Some(match args {
            "" => Ok(Centre { mean, gauss: false }),
            "gauss" => Ok(Centre { mean, gauss: true }),
            _ => Err(format!("`centre={word}` takes `gauss`, found `{args}`")),
        })
    }
}

const GIVEN: Info = Info {
    word: "given",
    usage: "centre=given[,gauss]",
    formula: "w(x) → e^c·w(x − c), c = scale·q·μ; gauss: · e^(γ/2·qᵀΣq)",
    about: "Keys shifted by a calibrated vector per kv head; it has no gradient.",
    examples: &["given", "given,gauss"],
};

const LEARNED: Info = Info {
    word: "learned",
    usage: "centre=learned[,gauss]",
    formula: "w(x) → e^c·w(x − c), c = scale·q·μ; gauss: · e^(γ/2·qᵀΣq)",
    about: "Keys shifted by a learned vector per kv head.",
    examples: &["learned", "learned,gauss"],
};

const RUNNING: Info = Info {
    word: "running",
    usage: "centre=running[,gauss]",
    formula: "w(x) → e^c·w(x − c), c = scale·q·μ_t, μ_t the mean of the keys seen; gauss: · e^(γ/2·qᵀΣq)",
    about: "Keys shifted by the mean of those seen so far, which is part of the state.",
    examples: &["running", "running,gauss"],
};

const WHOLE: Info = Info {
    word: "whole",
    usage: "centre=whole[,gauss]",
    formula: "w(x) → e^c·w(x − (A·q)·(A·μ_t)), c = q·μ_t/√d; gauss: · e^g(γ·qᵀΣq, n)",
    about: "Projected keys shifted by the running mean of the keys before their projection.",
    examples: &["whole", "whole,gauss"],
};

/// g(v, n): what scores of variance v add to the log of the mean weight of n keys.
pub(crate) fn bounded_gauss(v: f64, n: usize) -> f64 {
    let most = 2.0 * (n.max(1) as f64).ln();
    if v <= most { 0.5 * v } else { (v * most).sqrt() - 0.5 * most }
}

/// ∂g/∂v
pub(crate) fn bounded_gauss_slope(v: f64, n: usize) -> f64 {
    let most = 2.0 * (n.max(1) as f64).ln();
    if v <= most { 0.5 } else { 0.5 * (most / v).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_spread_adds_is_bounded_by_the_number_of_keys() {
        assert_eq!((bounded_gauss(3.0, 1), bounded_gauss(0.0, 0), bounded_gauss(-1.0, 5)), (0.0, 0.0, -0.5));
        let most = 2.0 * 20f64.ln();
        assert!((bounded_gauss(most, 20) - 20f64.ln()).abs() < 1e-12 && (bounded_gauss(most * 1.0001, 20) - 20f64.ln()).abs() < 1e-3);
        assert_eq!(bounded_gauss(1.0, 1000), 0.5);
        // Never more than the largest score can add.
        assert!(bounded_gauss(100.0, 50) < 10.0 * (2.0 * 50f64.ln()).sqrt());
        for (v, n) in [(-1.0, 5), (0.3, 5), (3.0, 5), (3.5, 5), (40.0, 5), (2.0, 1)] {
            let difference = (bounded_gauss(v + 1e-6, n) - bounded_gauss(v - 1e-6, n)) / 2e-6;
            assert!((bounded_gauss_slope(v, n) - difference).abs() < 1e-7, "{v} {n}");
        }
    }

    #[test]
    fn texts_are_read_as_they_are_written() {
        for info in Centre::PARTS {
            for example in info.examples {
                let (word, args) = example.split_once(',').unwrap_or((example, ""));
                assert_eq!(Centre::read(word, args).and_then(Result::ok).map(Centre::text).as_deref(), Some(*example));
            }
        }
        assert!(Centre::read("mean", "").is_none() && Centre::read("running", "gaus").is_some_and(|read| read.is_err()));
    }
}
