//! The write rule `delta`: u_t = β_t·(v_t − Σ_{s<t} M_ts·w(x̂_ts)·u_s), x̂_ts = scale_k·k_t·k_s, β = r·σ(W·h + b)
//!
//! The write rule stores the difference between the value and the prediction of the state for its key. β is one number per kv head and
//! position, so heads of one kv head share the written values.

use crate::Real;
use crate::parts::gate::sigmoid::{sigmoid, slope_from_value};
use crate::parts::slot::{Info, number, short};

/// The delta rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Delta {
    /// r, the upper end of β: 1, or up to 2.
    pub range: f64,
    /// scale_k, the factor of k·k.
    pub scale: f64,
}

impl Delta {
    /// Its description.
    pub const INFO: Info = Info {
        word: "delta",
        usage: "write=delta[,R][,scale=X]",
        formula: "u_t = β_t·(v_t − Σ_{s<t} M_ts·w(X·k_t·k_s)·u_s), β = R·σ(W·h + b)",
        about: "The delta rule: the prediction of the state for a key is subtracted before the value is written; R = 1 unless given, up to 2.",
        examples: &["delta", "delta,2", "delta,scale=0.5", "delta,2,scale=0.5"],
    };

    /// Parses the arguments that follow the word.
    pub fn parse(args: &str) -> Result<Delta, String> {
        let mut delta = Delta { range: 1.0, scale: 1.0 };
        let (mut range, mut scale) = (None, None);
        for option in args.split(',').map(str::trim).filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                None if range.is_none() => range = Some(number("the range of β", option, true)?),
                Some(("scale", value)) if scale.is_none() => scale = Some(number("scale", value, false)?),
                _ => return Err(format!("`write=delta` takes a range of β and `scale=X`, each once; found `{option}`")),
            }
        }
        delta.range = range.unwrap_or(delta.range);
        delta.scale = scale.unwrap_or(delta.scale);
        match delta.range {
            r if r > 0.0 && r <= 2.0 => Ok(delta),
            r => Err(format!("β is between 0 and R, and above 2 every write overshoots: R is at most 2, found {r}")),
        }
    }

    /// The arguments as `parse` reads them.
    pub fn args(&self) -> String {
        let range = (self.range != 1.0).then(|| short(self.range));
        let scale = (self.scale != 1.0).then(|| format!("scale={}", short(self.scale)));
        range.into_iter().chain(scale).collect::<Vec<_>>().join(",")
    }

    /// β
    #[inline(always)]
    pub fn beta<R: Real>(&self, logit: R) -> R {
        R::of(self.range) * sigmoid(logit)
    }

    /// ∂β/∂logit
    #[inline(always)]
    pub fn slope<R: Real>(&self, logit: R) -> R {
        R::of(self.range) * slope_from_value(sigmoid(logit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_close, derivative};

    #[test]
    fn texts_and_slopes() {
        for example in Delta::INFO.examples {
            let delta = Delta::parse(example.trim_start_matches("delta").trim_start_matches(',')).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(Delta::parse(&delta.args()), Ok(delta), "{example}");
            for logit in [-3.0, 0.0, 1.2] {
                assert_close(delta.slope(logit), derivative(|g| delta.beta(g), logit), 1e-10);
                assert!(delta.beta(logit) < delta.range);
            }
        }
        for wrong in ["0", "2.5", "-1", "nan", "1,2", "scale=x", "scale=1,scale=1", "range=2"] {
            assert!(Delta::parse(wrong).is_err(), "{wrong}");
        }
    }
}
