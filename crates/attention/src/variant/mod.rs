//! One attention as a value.

pub mod presets;
pub mod text;

use crate::kernels::score_rows::Rescale;
use crate::parts::conv;
use crate::parts::denominator::none::NoDenominator;
use crate::parts::gate::{InGate, OutGate, PostGate};
use crate::parts::kernel::Sign;
use crate::parts::kernel::taylor::{Coefficients, Taylor};
use crate::{Decay, Denominator, Error, Kernel, Norm, Shape};

/// The parts of one attention. Its text form ([`std::str::FromStr`], [`std::fmt::Display`]) is described in [`crate::variant::text`].
///
/// ```
/// use termwise_attention::Variant;
///
/// let variant: Variant = "taylor=0..4 norm=l2".parse()?;
/// assert_eq!(variant.to_string(), "taylor=0..4 over=sum norm=l2");
/// assert_eq!("softmax".parse::<Variant>()?, "exp over=sum".parse()?);
/// # Ok::<(), termwise_attention::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// w
    pub kernel: Kernel,
    /// Scores are replaced by min(x, clamp) before w.
    pub clamp: Option<f64>,
    /// What q·k is multiplied by; 1/√d where absent.
    pub scale: Option<f64>,
    /// D
    pub denominator: Denominator,
    /// I
    pub in_gate: Option<InGate>,
    /// O
    pub out_gate: Option<OutGate>,
    /// P
    pub post_gate: Option<PostGate>,
    /// M
    pub decay: Option<Decay>,
    /// N
    pub norm: Norm,
    /// RoPE on q and k.
    pub rope: bool,
    /// Width of the short convolution over q, k and v.
    pub conv: Option<usize>,
}

impl Variant {
    /// The scale of scores for head dimension d.
    pub fn scale_for(&self, d: usize) -> f64 {
        self.scale.unwrap_or(1.0 / (d as f64).sqrt())
    }

    /// How its rows are kept within float32: as the kernel allows, where something later cancels it.
    pub fn rescale(&self) -> Rescale {
        if self.denominator.sums() || self.norm.scale_free() { self.kernel.rescale() } else { Rescale::None }
    }

    /// Whether the row maximum is subtracted from the scores.
    pub fn shifts(&self) -> bool {
        self.rescale() == Rescale::SubtractMax
    }

    /// Whether what was subtracted is still missing when the norm is reached.
    pub(crate) fn norm_restores_scale(&self) -> bool {
        self.rescale() != Rescale::None && !self.denominator.sums()
    }

    /// Checks that the parts can stand together.
    pub fn validate(&self) -> Result<(), Error> {
        let impossible = |reason: String| Err(Error::Combination { variant: self.to_string(), reason });
        if matches!(self.post_gate, Some(PostGate::Shared(_))) && self.out_gate.is_none() {
            return impossible(
                "`post=out` uses the output gate again, and there is none; add `out`, or write `post` for a gate of its own".into(),
            );
        }
        if let Some(width) = self.conv
            && !(1..=conv::MAX_WIDTH).contains(&width)
        {
            return impossible(format!("a short convolution has a width from 1 to {}, found {width}", conv::MAX_WIDTH));
        }
        if let Some(c) = self.clamp.filter(|c| !c.is_finite()) {
            return impossible(format!("a clamp is a finite number, found {c}"));
        }
        if let Some(c) = self.scale.filter(|c| !c.is_finite()) {
            return impossible(format!("a scale is a finite number, found {c}"));
        }
        // Parts may have been built by hand: each must be one that its own text could have given.
        let readable = [
            Kernel::parse(self.kernel.info().word, &self.kernel.args()).map(|part| part.map(drop)),
            Denominator::parse(self.denominator.info().word, &self.denominator.args()).map(|part| part.map(drop)),
            Norm::parse(self.norm.info().word, &self.norm.args()).map(|part| part.map(drop)),
        ];
        match readable.into_iter().flatten().find_map(Result::err) {
            Some(reason) => impossible(reason),
            None => Ok(()),
        }
    }

    /// Checks that this variant can run at this shape.
    pub fn validate_for(&self, shape: &Shape) -> Result<(), Error> {
        self.validate()?;
        if self.rope && shape.d % 2 == 1 {
            return Err(Error::Combination {
                variant: self.to_string(),
                reason: format!("RoPE turns pairs of coordinates and the head dimension {} is odd; write `rope=off`", shape.d),
            });
        }
        Ok(())
    }

    /// What a user should know before spending time on this variant.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let sign = self.kernel.sign();
        if self.denominator.sums() && sign != Sign::Positive {
            let why = match (&self.kernel, sign) {
                (Kernel::Taylor(t), _) if t.degree() % 2 == 1 => {
                    format!("the highest order {} is odd, so weights can be negative", t.degree())
                }
                (_, Sign::Nonnegative) => "all weights of a row can be zero".to_string(),
                _ => "weights can be negative".to_string(),
            };
            let guarded = matches!(&self.denominator, Denominator::Sum(sum) if sum.floor.is_some() || (sum.eps.is_some() && sign == Sign::Nonnegative));
            if !guarded {
                warnings.push(format!("{why} and the sum denominator can reach zero"));
            }
        }
        match self.kernel.rescale() {
            Rescale::SubtractMax if !self.shifts() && self.clamp.is_none() => {
                warnings.push("no clamp, no sum and no scale-free norm: e^x overflows float32 for scores above 88".into());
            }
            Rescale::Multiply if self.rescale() == Rescale::None && self.clamp.is_none() => {
                warnings
                    .push("no clamp, no sum and no scale-free norm: a polynomial of this degree overflows float32 for large scores".into());
            }
            _ => {}
        }
        if matches!(self.kernel, Kernel::Taylor(_) | Kernel::Power(_)) && self.clamp.is_some() {
            warnings.push("a clamped polynomial has no finite feature map: no recurrent form".into());
        }
        warnings
    }

    /// Rows of the finite feature map for head dimension d; `None` where there is none.
    pub fn state_rows(&self, d: usize) -> Option<u128> {
        if self.clamp.is_some() {
            return None;
        }
        Some(self.kernel.state_rows(d)?.iter().fold(0u128, |sum, (_, rows)| sum.saturating_add(*rows)))
    }

    /// float32 numbers in the recurrent state of one head, the denominator's included; `None` where there is no finite state.
    pub fn state_size(&self, d: usize, e: usize) -> Option<u128> {
        let columns = e as u128 + self.denominator.sums() as u128;
        self.state_rows(d).map(|rows| rows.saturating_mul(columns))
    }

    /// The simplest variant with the same output up to eps: two variants are equal in this sense if these are equal.
    ///
    /// A scale-free norm cancels every positive factor of a row: the denominator (a sum only if it cannot change sign)
    /// and the output gate. Kernels that are the same function are written in one way.
    pub fn canonical(&self) -> Variant {
        let mut v = self.clone();
        if v.norm.scale_free() {
            let positive = v.kernel.sign() != Sign::Mixed;
            if !v.denominator.key_side() && (positive || !v.denominator.sums()) {
                v.denominator = Denominator::NoDenominator(NoDenominator);
            }
            if !matches!(v.post_gate, Some(PostGate::Shared(_))) {
                v.out_gate = None;
            }
        }
        v.kernel = match &v.kernel {
            Kernel::Power(power) => plain_order(power.p as usize, &v),
            Kernel::Feature(feature) if feature.map == crate::Map::Identity => plain_order(1, &v),
            Kernel::Taylor(taylor)
                if taylor.orders().len() == 1 && *taylor.coefficients() == Coefficients::Ones && taylor.centre() == 0.0 =>
            {
                plain_order(taylor.orders()[0], &v)
            }
            kernel => kernel.clone(),
        };
        v
    }

    /// The formula of this variant in the symbols of the legend.
    pub fn formula(&self) -> String {
        let x = match self.clamp {
            Some(c) => format!("min(x, {c})"),
            None => "x".to_string(),
        };
        let weight = match &self.kernel {
            Kernel::Exp(_) => format!("exp({x})"),
            Kernel::Taylor(taylor) => {
                let a = if *taylor.coefficients() == Coefficients::Ones { "" } else { "a_n·" };
                let x = match taylor.centre() {
                    0.0 => x,
                    c if c < 0.0 => format!("({x}+{})", -c),
                    c => format!("({x}−{c})"),
                };
                format!("Σ_{{n∈{{{}}}}} {a}{x}^n/n!", taylor.orders_text())
            }
            Kernel::Power(power) => format!("{x}^{}", power.p),
            Kernel::Feature(_) => x,
        };
        let decay = if self.decay.is_some() { "e^(c_t−c_s)·" } else { "" };
        let in_gate = if self.in_gate.is_some() { "·I_s" } else { "" };
        let key = if self.denominator.key_side() { "·S_s^−σ(m)" } else { "" };
        let sum = format!("Σ_s {decay}{weight}{in_gate}{key}·v_s");
        let divided = match &self.denominator {
            Denominator::Sum(part) => {
                let mut d = format!("Σ_s {decay}w");
                if let Some(floor) = part.floor {
                    d = format!("max({d}, {floor})");
                }
                if part.detached {
                    d = format!("detach({d})");
                }
                if let Some(eps) = part.eps {
                    d = format!("({d} + {eps})");
                }
                format!("{sum} / {d}")
            }
            Denominator::Length(_) => format!("{sum} / S_t"),
            Denominator::NoDenominator(_) | Denominator::Position(_) => sum,
        };
        let gated = if self.out_gate.is_some() { format!("O_t·{divided}") } else { divided };
        let normed = match self.norm.info().word {
            "none" => gated,
            word => format!("{word}({gated})"),
        };
        match self.post_gate {
            Some(PostGate::Shared(_)) => format!("y = O_t·{normed}"),
            Some(_) => format!("y = P_t·{normed}"),
            None => format!("y = {normed}"),
        }
    }
}

/// Order n alone. Its 1/n! cancels under a plain sum, or under a norm with nothing between that compares it with a
/// fixed number; elsewhere x^n and x^n/n! are different attentions.
fn plain_order(n: usize, v: &Variant) -> Kernel {
    let cancels = match &v.denominator {
        Denominator::Sum(sum) => sum.floor.is_none() && sum.eps.is_none(),
        _ => v.norm.scale_free(),
    };
    match &v.kernel {
        kernel @ Kernel::Power(_) if !cancels && n > 1 => kernel.clone(),
        _ => Kernel::Taylor(Taylor::new(vec![n], Coefficients::Ones).expect("an order that was valid before")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::denominator::sum::Sum;
    use crate::parts::kernel::power::Power;

    fn variant(text: &str) -> Variant {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn a_maximum_is_subtracted_where_something_cancels_it() {
        for (text, shifts, restores) in [
            ("exp over=sum", true, false),
            ("exp over=sum norm=l2", true, false),
            ("exp over=none norm=l2", true, true),
            ("exp over=length norm=layer", true, true),
            ("exp over=position norm=rms", true, true),
            ("exp over=length", false, false),
            ("exp over=none", false, false),
            ("taylor=0..4 over=sum", false, false),
            ("taylor=0..20 over=sum", false, false),
            ("taylor=0..20 over=none norm=l2", false, true),
            ("feature=elu norm=l2", false, false),
        ] {
            assert_eq!((variant(text).shifts(), variant(text).norm_restores_scale()), (shifts, restores), "{text}");
        }
    }

    #[test]
    fn warnings_name_what_can_go_wrong() {
        for (text, expected) in [
            ("taylor=0..3 over=sum", "odd"),
            ("feature=relu over=sum", "zero"),
            ("feature=identity over=sum", "negative"),
            ("exp over=length", "overflows"),
            ("taylor=0..2 clamp=5", "recurrent"),
        ] {
            assert!(variant(text).warnings().iter().any(|warning| warning.contains(expected)), "{text}: {:?}", variant(text).warnings());
        }
        for text in [
            "softmax",
            "norm",
            "gate",
            "taylor=0..4 over=sum",
            "taylor=0..3 over=length",
            "linear_elu",
            "linear_relu",
            "feature=identity over=sum,floor=1",
        ] {
            assert_eq!(variant(text).warnings(), Vec::<String>::new(), "{text}");
        }
    }

    #[test]
    fn states_of_the_specification() {
        assert_eq!(variant("taylor=0..2 over=sum").state_size(64, 64), Some(139_425));
        assert_eq!(variant("taylor=0..2 over=length").state_size(64, 64), Some(139_425 / 65 * 64));
        assert_eq!(variant("taylor=0..4 over=sum").state_size(16, 16), Some(82_365));
        assert_eq!(variant("feature=elu over=sum").state_size(64, 64), Some(64 * 65));
        assert_eq!(variant("power=2 over=none").state_rows(3), Some(6));
        assert_eq!(variant("softmax").state_rows(64), None);
        assert_eq!(variant("taylor=0..2 clamp=5").state_rows(64), None);
        assert_eq!(variant("taylor=0..150").state_size(256, 256), Some(u128::MAX));
    }

    #[test]
    fn one_over_n_factorial_cancels_only_where_nothing_fixed_is_compared_with_it() {
        let same = |a: &str, b: &str| variant(a).canonical() == variant(b).canonical();
        assert!(same("power=3 over=sum", "taylor=3 over=sum"));
        assert!(same("power=2 over=sum,eps=1 norm=l2", "taylor=2 over=length norm=l2"));
        assert!(same("power=1 over=length", "feature=identity over=length"));
        assert!(!same("power=3 over=length", "taylor=3 over=length"));
        assert!(!same("taylor=2", "taylor=2,at=1"));
        assert!(!same("power=3 over=sum,eps=1", "taylor=3 over=sum,eps=1"));
        // A sum of weights of either sign stays under the norm, and its eps decides where the sign turns.
        assert!(!same("power=3 over=sum,eps=1 norm=l2", "taylor=3 over=sum,eps=1 norm=l2"));
        assert!(!same("taylor=3 over=sum norm=l2", "taylor=3 over=none norm=l2"));
        // The shared gate still acts after the norm.
        assert!(!same("exp out post=out norm=l2", "exp norm=l2"));
    }

    #[test]
    fn odd_dimensions_have_no_rope() {
        let shape = Shape { batch: 1, time: 1, heads: 1, kv_heads: 1, d: 3, e: 3 };
        assert!(variant("exp").validate_for(&shape).is_err());
        assert_eq!(variant("exp rope=off").validate_for(&shape), Ok(()));
        assert_eq!(variant("exp").validate_for(&Shape { d: 4, ..shape }), Ok(()));
        let endless = Variant { clamp: Some(f64::INFINITY), ..Variant::default() };
        for kernel in [Kernel::Power(Power { p: 1000 }), Kernel::Power(Power { p: 151 })] {
            assert!(Variant { kernel, ..Variant::default() }.validate().is_err());
        }
        for sum in [Sum { floor: Some(f64::NAN), ..Sum::default() }, Sum { eps: Some(-1.0), ..Sum::default() }] {
            assert!(Variant { denominator: Denominator::Sum(sum), ..Variant::default() }.validate().is_err());
        }
        assert!(endless.validate().is_err() && Variant { scale: Some(f64::NAN), ..Variant::default() }.validate().is_err());
    }

    #[test]
    fn formulas() {
        assert_eq!(variant("softmax").formula(), "y = Σ_s exp(x)·v_s / Σ_s w");
        assert_eq!(variant("gated_softmax").formula(), "y = layer(O_t·Σ_s exp(min(x, 5))·I_s·v_s / S_t)");
        assert_eq!(variant("taylor=0..4,at=-3.5").formula(), "y = Σ_s Σ_{n∈{0..4}} (x+3.5)^n/n!·v_s / Σ_s w");
        assert_eq!(variant("taylor=0..2,at=1,coef=1:1:0.9 over=none").formula(), "y = Σ_s Σ_{n∈{0..2}} a_n·(x−1)^n/n!·v_s");
        assert_eq!(variant("taylor=0..2,5 over=none out post=out norm=l2").formula(), "y = O_t·l2(O_t·Σ_s Σ_{n∈{0..2,5}} x^n/n!·v_s)");
    }
}
