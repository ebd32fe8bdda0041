//! O_t = 1 / max(1, Σ_{s≤t} exp(g_s)), g = W·h + b

use crate::Real;
use crate::parts::gate::GatePart;
use crate::parts::slot::{Info, unit_part};

unit_part! {
    /// The inverse of a running sum of exponentials.
    Cumulative,
    Info {
        word: "cumulative",
        usage: "out=cumulative",
        formula: "O_t = 1 / max(1, Σ_{s≤t} exp(W·h_s + b))",
        about: "A learned denominator that depends on the keys but not on the query.",
        examples: &["cumulative"],
    }
}

impl GatePart for Cumulative {
    #[inline(always)]
    fn forward<R: Real>(&self, g: &mut [R], sum: &mut f64) {
        // float64: the sum runs over all positions and must not stall when it is large.
        for g in g {
            *sum += g.wide().exp();
            *g = R::of(1.0 / sum.max(1.0));
        }
    }

    #[inline(always)]
    fn backward<R: Real>(&self, g: &[R], factor: &[R], dfactor: &mut [R]) {
        let mut dsum = 0.0;
        // A factor of 1 is clamped by the floor (or exactly on it): no gradient.
        for ((d, &factor), &g) in dfactor.iter_mut().zip(factor).zip(g).rev() {
            if factor < R::one() {
                dsum -= d.wide() * factor.wide() * factor.wide();
            }
            *d = R::of(dsum * g.wide().exp());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, check_gate, numbers};

    #[test]
    fn one_over_a_running_sum_of_at_least_one() {
        let mut g = [-2.0f64, 0.0, 1.0];
        Cumulative.forward(&mut g, &mut 0.0);
        let sums = [(-2f64).exp(), (-2f64).exp() + 1.0, (-2f64).exp() + 1.0 + 1f64.exp()];
        assert_all_close(&g, &[1.0, 1.0 / sums[1], 1.0 / sums[2]], 1e-15);
    }

    #[test]
    fn gradients_on_both_sides_of_the_floor() {
        check_gate(&Cumulative, &[-3.0, -2.0, -1.0, 0.5, -0.3, 1.2]);
        check_gate(&Cumulative, &numbers(12, 3));
    }
}
