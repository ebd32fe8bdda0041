//! Binomials, factorials and numbers of monomials.

/// C(n, k), or `u128::MAX` on overflow.
pub fn binomial(n: usize, k: usize) -> u128 {
    if k > n {
        return 0;
    }
    let k = k.min(n - k);
    let mut c: u128 = 1;
    for i in 0..k {
        let Some(product) = c.checked_mul((n - i) as u128) else { return u128::MAX };
        c = product / (i as u128 + 1);
    }
    c
}

/// n!
pub fn factorial(n: usize) -> f64 {
    (1..=n).fold(1.0, |product, i| product * i as f64)
}

/// Number of monomials of order n in d variables: C(d+n−1, n).
pub fn monomials(d: usize, n: usize) -> u128 {
    if n == 0 { 1 } else { binomial(d + n - 1, n) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_sizes_of_the_specification() {
        let rows = |d, p| (0..=p).map(|n| monomials(d, n)).sum::<u128>();
        assert_eq!(rows(64, 2) * 65, 139_425);
        assert_eq!(rows(64, 2), binomial(66, 2));
        assert_eq!(rows(16, 2) * 17, 2_601);
        assert_eq!(rows(16, 3) * 17, 16_473);
        assert_eq!(rows(16, 4) * 17, 82_365);
    }

    #[test]
    fn large_orders_saturate() {
        assert_eq!(binomial(5, 2), 10);
        assert_eq!(binomial(3, 5), 0);
        assert_eq!(monomials(256, 150), u128::MAX);
    }
}
