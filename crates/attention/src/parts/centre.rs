//! Centre: keys shifted by a vector μ, weights multiplied back: w(x) becomes e^c·w(x − c), c = scale·q·μ
//!
//! scale·q·(k − μ) = x − c, so a centre acts on the scores of a query alone: for exp an identity, for a polynomial an expansion around the
//! mean key instead of around zero. With `gauss` the weights have a further factor e^{γ/2·qᵀΣq}, which is what the orders that are missing
//! would add for Gaussian keys (γ = scale², Σ their covariance).

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
}

/// The centre of a kernel's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Centre {
    /// μ
    pub mean: Mean,
    /// Whether there is the factor e^{γ/2·qᵀΣq}.
    pub gauss: bool,
}

const WORDS: [(&str, Mean); 3] = [("given", Mean::Given), ("learned", Mean::Learned), ("running", Mean::Running)];

impl Centre {
    /// Every kind, for lists; the first word of its text chooses.
    pub const PARTS: &'static [&'static Info] = &[&GIVEN, &LEARNED, &RUNNING];

    /// Whether μ is a tensor.
    pub fn has_mean(self) -> bool {
        self.mean != Mean::Running
    }

    /// Whether μ and γ have gradients.
    pub fn is_trained(self) -> bool {
        self.mean != Mean::Given
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

#[cfg(test)]
mod tests {
    use super::*;

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
