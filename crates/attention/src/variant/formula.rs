//! The formula of a variant.

use crate::parts::gate::PostGate;
use crate::{Denominator, Variant};

impl Variant {
    /// The formula of this variant in the symbols of the legend.
    pub fn formula(&self) -> String {
        let weight = match &self.far {
            None => self.near.formula(),
            Some(far) => format!("(near: {}; far: {})", self.near.formula(), far.formula()),
        };
        let keys = match (self.window, self.sinks, &self.far) {
            (Some(w), None, None) => format!("Σ_{{t−s<{w}}}"),
            (Some(w), Some(s), None) => format!("Σ_{{t−s<{w} or s<{s}}}"),
            _ => "Σ_s".to_string(),
        };
        let keys = match self.heavy_hitters.filter(|_| self.far.is_none()) {
            Some(heavy_hitters) => keys.replace('}', &format!(" or among {} heavy hitters}}", heavy_hitters.keys)),
            None => keys,
        };
        let decay = if self.decay.as_ref().is_some_and(|decay| !decay.by_channel()) { "e^(c_t−c_s)·" } else { "" };
        let value = if self.write.is_some() { "u_s" } else { "v_s" };
        let in_gate = if self.in_gate.is_some() { "·I_s" } else { "" };
        let key = if self.denominator.key_side() { "·S_s^−σ(m)" } else { "" };
        let sum = format!("{keys} {decay}{weight}{in_gate}{key}·{value}");
        let divided = match &self.denominator {
            Denominator::Sum(part) => {
                let mut d = format!("Σ_s {decay}w");
                if part.sink {
                    d = format!("({d} + e^b)");
                }
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
        match &self.post_gate {
            Some(PostGate::Shared(_)) => format!("y = O_t·{normed}"),
            Some(gate) if gate.by_channel() => format!("y = P_t⊙{normed}"),
            Some(_) => format!("y = P_t·{normed}"),
            None => format!("y = {normed}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variant(variant_string: &str) -> Variant {
        variant_string.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn formulas() {
        assert_eq!(variant("softmax").formula(), "y = Σ_s exp(x)·v_s / Σ_s w");
        assert_eq!(variant("gated_softmax").formula(), "y = layer(O_t·Σ_s exp(min(x, 5))·I_s·v_s / S_t)");
        assert_eq!(variant("taylor=0..2,coef=1:1:0.9 over=none").formula(), "y = Σ_s Σ_{n∈{0..2}} a_n·x^n/n!·v_s");
        assert_eq!(variant("taylor=0..2,5 over=none out post=out norm=l2").formula(), "y = O_t·l2(O_t·Σ_s Σ_{n∈{0..2,5}} x^n/n!·v_s)");
    }
}
