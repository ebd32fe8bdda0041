use super::*;
use crate::combinatorics::factorial;
use crate::real::dot;
use crate::simd::{Isa, Task, dispatch_on};
use crate::testing::{assert_all_close, assert_close, assert_gradient, numbers};

const ORDERS: [&[usize]; 10] = [&[0], &[1], &[0, 1], &[0, 1, 2], &[2], &[0, 2, 3], &[1, 4], &[0, 1, 2, 3, 4], &[5], &[0, 1, 2, 3, 4, 5, 6]];

fn one(basis: &Basis, x: &[f64]) -> Vec<f64> {
    let mut out = vec![f64::NAN; basis.rows()];
    basis.of_one(x, &mut vec![f64::NAN; basis.lower_order_rows()], &mut out);
    out
}

/// Exponents of every row, from the prime factors of monomials of primes.
fn exponents(d: usize, orders: &[usize]) -> Vec<Vec<u32>> {
    let primes = [2.0, 3.0, 5.0, 7.0, 11.0];
    let basis = Basis::new(d, orders).expect("a small basis");
    one(&basis, &primes[..d])
        .into_iter()
        .map(|value| {
            let mut rest = value as u64;
            let powers = primes[..d].iter().map(|&prime| {
                let mut power = 0;
                while rest.is_multiple_of(prime as u64) {
                    (rest, power) = (rest / prime as u64, power + 1);
                }
                power
            });
            let powers: Vec<u32> = powers.collect();
            assert_eq!(rest, 1);
            powers
        })
        .collect()
}

#[test]
fn every_monomial_occurs_once() {
    for d in 1..=5 {
        for orders in ORDERS {
            let found = exponents(d, orders);
            let expected: u128 = orders.iter().map(|&n| monomials(d, n)).sum();
            assert_eq!(found.len() as u128, expected);
            let unique: std::collections::BTreeSet<_> = found.iter().collect();
            assert_eq!(unique.len(), found.len());
            let basis = Basis::new(d, orders).expect("a small basis");
            for (i, &n) in orders.iter().enumerate() {
                for row in basis.order_range(i) {
                    assert_eq!(found[row].iter().sum::<u32>() as usize, n);
                    let product: f64 = found[row].iter().map(|&power| factorial(power as usize)).product();
                    assert_close(basis.wide_inverse_factorials()[row] * product, 1.0, 1e-15);
                    assert_close(basis.inverse_factorials()[row] as f64 * product, 1.0, 1e-7);
                }
            }
        }
    }
}

#[test]
fn products_are_powers_over_factorials() {
    for d in [1, 2, 3, 5, 8] {
        for n in 0..=6 {
            let basis = Basis::new(d, &[n]).expect("a small basis");
            let (q, k) = (numbers(d, 1), numbers(d, 2));
            let weighted: Vec<f64> = one(&basis, &q).iter().zip(basis.wide_inverse_factorials()).map(|(q, c)| q * c).collect();
            let magnitude: f64 = q.iter().zip(&k).map(|(q, k)| (q * k).abs()).sum();
            let found = dot(&weighted, &one(&basis, &k)) * factorial(n);
            assert_close(found / magnitude.powi(n as i32), (dot(&q, &k) / magnitude).powi(n as i32), 1e-13);
        }
    }
}

#[test]
fn many_positions_equal_single_positions_for_any_run_of_rows() {
    for d in [1, 2, 5] {
        for orders in ORDERS {
            let basis = Basis::new(d, orders).expect("a small basis");
            for len in [1, 3, 8] {
                let x = numbers(d * len, 3);
                let mut lower_orders = vec![f64::NAN; basis.lower_order_rows() * len];
                basis.lower_orders(&x, len, &mut lower_orders);
                for run in [1, 2, 7, basis.rows()] {
                    let mut rows = vec![f64::NAN; basis.rows() * len];
                    for start in (0..basis.rows()).step_by(run) {
                        let end = (start + run).min(basis.rows());
                        basis.rows_of(start..end, Positions { x: &x, len, lower_orders: &lower_orders }, &mut rows[start * len..end * len]);
                    }
                    for l in 0..len {
                        let column = |values: &[f64]| values.iter().skip(l).step_by(len).copied().collect::<Vec<_>>();
                        assert_all_close(&column(&rows), &one(&basis, &column(&x)), 0.0);
                    }
                }
            }
        }
    }
}

#[test]
fn gradients_equal_central_differences() {
    for orders in ORDERS {
        let (d, len) = (3, 2);
        let basis = Basis::new(d, orders).expect("a small basis");
        let (x, g) = (numbers(d * len, 4), numbers(basis.rows() * len, 5));
        let rows = |x: &[f64]| {
            let (mut lower_orders, mut rows) = (vec![f64::NAN; basis.lower_order_rows() * len], vec![f64::NAN; basis.rows() * len]);
            basis.lower_orders(x, len, &mut lower_orders);
            basis.rows_of(0..basis.rows(), Positions { x, len, lower_orders: &lower_orders }, &mut rows);
            (lower_orders, rows)
        };
        let (lower_orders, _) = rows(&x);
        for run in [2, basis.rows()] {
            let (mut dlower_orders, mut dx) = (vec![0.0; lower_orders.len()], vec![0.0; x.len()]);
            let positions = Positions { x: &x, len, lower_orders: &lower_orders };
            let mut grads = PositionGrads { dx: &mut dx, dlower_orders: &mut dlower_orders };
            for start in (0..basis.rows()).step_by(run) {
                let end = (start + run).min(basis.rows());
                basis.reverse_rows(start..end, positions, &g[start * len..end * len], &mut grads);
            }
            basis.reverse_lower_orders(positions, &mut grads);
            assert_gradient(&x, &dx, |x| dot(&rows(x).1, &g));
        }
    }
}

#[test]
fn too_many_rows_are_refused() {
    assert!(Basis::new(64, &(0..=79).collect::<Vec<_>>()).is_err_and(|error| error.to_string().contains("79")));
    assert!(Basis::new(256, &[150]).is_err());
    assert!(Basis::new(2, &(0..=79).collect::<Vec<_>>()).is_ok());
    assert!(Basis::new(3, &[]).is_err() && Basis::new(3, &[2, 1]).is_err() && Basis::new(0, &[1]).is_err());
}

struct ScaledBasis<'a> {
    basis: &'a Basis,
    x: &'a [f32],
    table: &'a [f32],
    out: &'a mut [f32],
}

impl Task for ScaledBasis<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut room = vec![f32::NAN; self.basis.lower_order_rows()];
        self.basis.scaled_of_one(simd, self.x, (self.table, |n| n as f32 - 1.5), &mut room, self.out);
    }
}

#[test]
fn scaled_rows_equal_rows_times_factors_on_every_instruction_set() {
    for isa in Isa::available() {
        for d in [1, 2, 5, 8, 19, 40] {
            for orders in ORDERS.into_iter().filter(|orders| monomials(d, orders[orders.len() - 1]) < 20_000) {
                let basis = Basis::new(d, orders).expect("a small basis");
                let x: Vec<f32> = numbers(d, 3).into_iter().map(|x| x as f32).collect();
                let mut rows = vec![f32::NAN; basis.rows()];
                basis.of_one(&x, &mut vec![f32::NAN; basis.lower_order_rows()], &mut rows);
                for factors in [false, true] {
                    let table = if factors { basis.inverse_factorials() } else { &[] };
                    // Longer than the rows: values past the end must not change.
                    let mut out = vec![7.0; basis.rows() + 3];
                    dispatch_on(isa, ScaledBasis { basis: &basis, x: &x, table, out: &mut out });
                    for (i, &n) in orders.iter().enumerate() {
                        for row in basis.order_range(i) {
                            let expected = rows[row] * if factors { table[row] * (n as f32 - 1.5) } else { 1.0 };
                            assert_eq!(out[row], expected, "{} {orders:?}, d {d}, row {row}", isa.name());
                        }
                    }
                    assert_eq!(out[basis.rows()..], [7.0; 3]);
                }
            }
        }
    }
}
