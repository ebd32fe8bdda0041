//! q, k ← γ · x / √(mean x² + eps), over the head dimension or over all heads

use crate::Real;
use crate::parts::norm::rms::{inverse_rms, scale_row, scale_row_backward};
use crate::parts::qk_norm::QkNormPart;
use crate::parts::slot::{Info, Part, number, short};

/// The eps of most families.
const EPS: f64 = 1e-6;

/// RMS norm of q and of k with learned weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkRms {
    /// Over all heads of a position, with weights [H·d] and [G·d], instead of [d] per head.
    pub all: bool,
    /// Added to the mean square.
    pub eps: f64,
}

impl Part for QkRms {
    const INFO: Info = Info {
        word: "rms",
        usage: "qk_norm=rms[,all][,eps=X]",
        formula: "q, k ← γ·x / √(mean x² + eps), eps = 1e-6 unless given",
        about: "RMS norm of q and of k with learned weights: over the head dimension (Qwen3), or over all heads (OLMo-2).",
        examples: &["rms", "rms,all", "rms,eps=1e-5", "rms,all,eps=1e-5"],
    };

    fn parse(args: &str) -> Result<Self, String> {
        let (mut all, mut eps) = (false, None);
        for option in args.split(',').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                None if option == "all" && !all => all = true,
                Some(("eps", value)) if eps.is_none() => eps = Some(number("eps", value, true)?),
                _ => return Err(format!("`qk_norm=rms` takes `all` and `eps=X`, each once; found `{option}`")),
            }
        }
        Ok(QkRms { all, eps: eps.unwrap_or(EPS) })
    }

    fn args(&self) -> String {
        let eps = (self.eps != EPS).then(|| format!("eps={}", short(self.eps)));
        self.all.then(|| "all".to_string()).into_iter().chain(eps).collect::<Vec<_>>().join(",")
    }
}

impl QkNormPart for QkRms {
    fn has_weight(&self) -> bool {
        true
    }
    fn over_heads(&self) -> bool {
        self.all
    }

    #[inline(always)]
    fn forward<R: Real>(&self, x: &mut [R], weight: &[R]) {
        scale_row(x, inverse_rms(x, R::of(self.eps)), weight);
    }

    #[inline(always)]
    fn backward<R: Real>(&self, x: &[R], weight: &[R], dy: &mut [R], dweight: &mut [R]) {
        scale_row_backward(x, inverse_rms(x, R::of(self.eps)), weight, dy, dweight);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, check_qk_norm};

    #[test]
    fn unit_mean_square_and_gradients() {
        let norm = QkRms { all: false, eps: 0.5 };
        let mut x = [3.0f64, -4.0];
        norm.forward(&mut x, &[1.0, 2.0]);
        assert_all_close(&x, &[3.0 / 13f64.sqrt(), -8.0 / 13f64.sqrt()], 1e-15);
        check_qk_norm(&norm);
        check_qk_norm(&QkRms { all: true, eps: 1e-6 });
        assert!(QkRms::parse("all,all").is_err() && QkRms::parse("eps=0").is_err() && QkRms::parse("l2").is_err());
    }
}
