//! D = Σ_s M·w, optionally + e^b, max(·, floor), + eps, or detached from the gradient

use crate::Real;
use crate::parts::denominator::DenominatorPart;
use crate::parts::slot::{Info, Part, number, short};

/// The sum of the weights of a row.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Sum {
    /// Lower bound of the sum.
    pub floor: Option<f64>,
    /// Added to the sum.
    pub eps: Option<f64>,
    /// Whether the sum has no gradient.
    pub detached: bool,
    /// Whether e^b is added to the sum, b learned per head: a key without a value. It is included in z.
    pub sink: bool,
}

impl Part for Sum {
    const INFO: Info = Info {
        word: "sum",
        usage: "over=sum[,floor=X][,eps=X][,detached][,sink]",
        formula: "D_t = Σ_s M_ts·w_ts, with sink + exp(b_h), then max(D, floor), then + eps",
        about: "The sum of the weights, as in softmax; `detached` stops its gradient, `sink` adds a learned exp(b_h) (gpt-oss).",
        examples: &["sum", "sum,floor=1", "sum,floor=1,detached", "sum,detached,eps=1e-4", "sum,eps=1e-8", "sum,sink", "sum,eps=1e-8,sink"],
    };

    fn parse(args: &str) -> Result<Self, String> {
        let mut sum = Sum::default();
        for option in args.split(',').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("floor", value)) if sum.floor.is_none() => sum.floor = Some(number("floor", value, true)?),
                Some(("eps", value)) if sum.eps.is_none() => sum.eps = Some(number("eps", value, true)?),
                None if option == "detached" && !sum.detached => sum.detached = true,
                None if option == "sink" && !sum.sink => sum.sink = true,
                _ => return Err(format!("`over=sum` takes `floor=X`, `eps=X`, `detached` and `sink`, each once; found `{option}`")),
            }
        }
        Ok(sum)
    }

    fn args(&self) -> String {
        let mut options = Vec::new();
        options.extend(self.floor.map(|x| format!("floor={}", short(x))));
        options.extend(self.eps.map(|x| format!("eps={}", short(x))));
        options.extend(self.detached.then(|| "detached".to_string()));
        options.extend(self.sink.then(|| "sink".to_string()));
        options.join(",")
    }
}

impl DenominatorPart for Sum {
    fn sums(&self) -> bool {
        true
    }
    fn has_sink(&self) -> bool {
        self.sink
    }

    #[inline(always)]
    fn value<R: Real>(&self, z: R, _: R, rho: R) -> R {
        let floored = match self.floor {
            Some(floor) => z.max(without_scale(floor, rho)),
            None => z,
        };
        match self.eps {
            Some(eps) => floored + without_scale(eps, rho),
            None => floored,
        }
    }

    #[inline(always)]
    fn slope<R: Real>(&self, z: R, _: R, rho: R) -> R {
        let held = self.detached || self.floor.is_some_and(|floor| z < without_scale(floor, rho));
        if held { R::zero() } else { R::one() }
    }
}

/// A true value x with the log scale ρ removed: x·e^{−ρ}.
#[inline(always)]
fn without_scale<R: Real>(x: f64, rho: R) -> R {
    R::of(x * (-rho.wide()).exp())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_examples, check_denominator};

    #[test]
    fn floor_then_eps() {
        let sum = Sum { floor: Some(1.0), eps: Some(0.5), detached: false, sink: false };
        assert_eq!([0.2, 3.0].map(|z| sum.value(z, 9.0, 0.0)), [1.5, 3.5]);
        assert_eq!(Sum::default().value(0.2, 9.0, 0.0), 0.2);
    }

    #[test]
    fn slopes_and_log_scales() {
        assert_examples::<Sum>();
        for floor in [None, Some(1.0)] {
            for eps in [None, Some(0.5)] {
                check_denominator(&Sum { floor, eps, ..Sum::default() }, false);
                check_denominator(&Sum { floor, eps, detached: true, sink: true }, true);
            }
        }
    }

    #[test]
    fn options_may_not_repeat() {
        assert!(Sum::parse("floor=1,floor=2").is_err() && Sum::parse("eps=0").is_err() && Sum::parse("eps=-1").is_err());
        assert!(Sum::parse("detached,detached").is_err() && Sum::parse("flor=1").is_err());
    }
}
