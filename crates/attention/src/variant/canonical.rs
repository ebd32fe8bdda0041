//! Canonical variants: two variants have the same output, up to eps, if their canonical forms are equal.

use crate::parts::denominator::none::NoDenominator;
use crate::parts::gate::PostGate;
use crate::parts::kernel::Sign;
use crate::parts::kernel::taylor::{Coefficients, Taylor};
use crate::{Denominator, Kernel, Map, Variant};

impl Variant {
    /// The simplest variant with the same output up to eps. Two variants have the same output if their canonical forms are equal.
    ///
    /// A scale-free norm cancels every positive factor of a row: the denominator (a sum only if it cannot change sign)
    /// and the output gate. Equal kernels are written in one way.
    pub fn canonical(&self) -> Variant {
        let mut v = self.clone();
        // Branches with equal score functions are one, unless each has its own tensors.
        if v.far.as_ref().is_some_and(|far| *far == v.near && far.has_no_tensors()) {
            v.heavy_hitters = None;
            (v.window, v.sinks, v.far) = (None, None, None);
        }
        if v.norm.scale_free() {
            let positive = v.sign() != Sign::Mixed;
            if !v.denominator.key_side() && (positive || !v.denominator.sums()) {
                v.denominator = Denominator::NoDenominator(NoDenominator);
            }
            if !matches!(v.post_gate, Some(PostGate::Shared(_))) {
                v.out_gate = None;
            }
        }
        v.near.kernel = match &v.near.kernel {
            Kernel::Power(power) => plain_order(power.p as usize, &v),
            Kernel::Feature(feature) if feature.map == Map::Identity => plain_order(1, &v),
            Kernel::Taylor(taylor) if taylor.orders().len() == 1 && *taylor.coefficients() == Coefficients::Ones => {
                plain_order(taylor.orders()[0], &v)
            }
            kernel => kernel.clone(),
        };
        v
    }
}

/// A single order n. Its 1/n! cancels under a plain sum, or under a norm if nothing in between compares it with a
/// constant, with other weights or with itself. Otherwise x^n and x^n/n! are different attentions.
fn plain_order(n: usize, v: &Variant) -> Kernel {
    let alone = v.far.is_none() && v.write.is_none();
    let cancels = alone
        && match &v.denominator {
            Denominator::Sum(sum) => sum.floor.is_none() && sum.eps.is_none() && !sum.sink,
            _ => v.norm.scale_free(),
        };
    match &v.near.kernel {
        kernel @ Kernel::Power(_) if !cancels && n > 1 => kernel.clone(),
        _ => Kernel::Taylor(Taylor::new(vec![n], Coefficients::Ones).expect("an order that was valid before")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variant(variant_string: &str) -> Variant {
        variant_string.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn one_over_n_factorial_cancels_only_without_constants() {
        let same = |a: &str, b: &str| variant(a).canonical() == variant(b).canonical();
        assert!(same("power=3 over=sum", "taylor=3 over=sum"));
        assert!(same("power=2 over=sum,eps=1 norm=l2", "taylor=2 over=length norm=l2"));
        assert!(same("power=1 over=length", "feature=identity over=length"));
        assert!(!same("power=3 over=length", "taylor=3 over=length"));
        assert!(!same("power=3 over=sum,eps=1", "taylor=3 over=sum,eps=1"));
        // A sum of weights of either sign is kept under the norm, and its eps determines where the sign changes.
        assert!(!same("power=3 over=sum,eps=1 norm=l2", "taylor=3 over=sum,eps=1 norm=l2"));
        assert!(!same("taylor=3 over=sum norm=l2", "taylor=3 over=none norm=l2"));
        // The shared gate still acts after the norm.
        assert!(!same("exp out post=out norm=l2", "exp norm=l2"));
    }
}
