//! Small dense linear algebra in float64.

/// Eigenvalues, largest first, and eigenvectors as rows, of a symmetric matrix [n, n], by Jacobi's rotations.
pub fn eigen(a: &[f64], n: usize) -> (Vec<f64>, Vec<f64>) {
    let mut a = a.to_vec();
    let mut v = vec![0.0; n * n];
    (0..n).for_each(|i| v[i * n + i] = 1.0);
    let size: f64 = a.iter().map(|x| x * x).sum::<f64>().max(f64::MIN_POSITIVE);
    for _ in 0..64 {
        let off: f64 = (0..n * n).filter(|i| i / n != i % n).map(|i| a[i] * a[i]).sum();
        if off <= 1e-24 * size {
            break;
        }
        for p in 0..n {
            for q in p + 1..n {
                let apq = a[p * n + q];
                if apq == 0.0 {
                    continue;
                }
                let theta = (a[q * n + q] - a[p * n + p]) / (2.0 * apq);
                let t = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let t = if theta == 0.0 { 1.0 } else { t };
                let c = 1.0 / (t * t + 1.0).sqrt();
                let s = t * c;
                for k in 0..n {
                    let (x, y) = (a[k * n + p], a[k * n + q]);
                    (a[k * n + p], a[k * n + q]) = (c * x - s * y, s * x + c * y);
                }
                for k in 0..n {
                    let (x, y) = (a[p * n + k], a[q * n + k]);
                    (a[p * n + k], a[q * n + k]) = (c * x - s * y, s * x + c * y);
                    let (x, y) = (v[p * n + k], v[q * n + k]);
                    (v[p * n + k], v[q * n + k]) = (c * x - s * y, s * x + c * y);
                }
            }
        }
    }
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&i, &j| a[j * n + j].total_cmp(&a[i * n + i]));
    let values = order.iter().map(|&i| a[i * n + i]).collect();
    let vectors = order.iter().flat_map(|&i| v[i * n..(i + 1) * n].to_vec()).collect();
    (values, vectors)
}

/// A·B of [n, n] matrices.
pub fn product(a: &[f64], b: &[f64], n: usize) -> Vec<f64> {
    let mut c = vec![0.0; n * n];
    for (row, to) in a.chunks_exact(n).zip(c.chunks_exact_mut(n)) {
        for (x, line) in row.iter().zip(b.chunks_exact(n)) {
            to.iter_mut().zip(line).for_each(|(to, y)| *to += x * y);
        }
    }
    c
}

/// The square root of a positive semidefinite matrix and the inverse of that; eigenvalues below a share of the largest are lifted to it.
pub fn roots(a: &[f64], n: usize, share: f64) -> (Vec<f64>, Vec<f64>) {
    let (values, vectors) = eigen(a, n);
    let least = (values[0] * share).max(1e-12);
    let with = |f: &dyn Fn(f64) -> f64| {
        let mut out = vec![0.0; n * n];
        for (value, vector) in values.iter().zip(vectors.chunks_exact(n)) {
            let f = f(value.max(least));
            for (i, x) in vector.iter().enumerate() {
                out[i * n..(i + 1) * n].iter_mut().zip(vector).for_each(|(to, y)| *to += f * x * y);
            }
        }
        out
    };
    (with(&f64::sqrt), with(&|x| 1.0 / x.sqrt()))
}

/// The x ≥ 0 that minimises ½·xᵀGx − bᵀx, G [n, n] symmetric and n small: the best of all sets of unknowns that are not zero.
pub fn nonnegative(g: &[f64], b: &[f64]) -> Vec<f64> {
    let n = b.len();
    let value = |x: &[f64]| {
        let quadratic: f64 = (0..n * n).map(|i| x[i / n] * g[i] * x[i % n]).sum();
        0.5 * quadratic - x.iter().zip(b).map(|(x, b)| x * b).sum::<f64>()
    };
    let mut best = vec![0.0; n];
    for set in 1usize..1 << n {
        let members: Vec<usize> = (0..n).filter(|i| set >> i & 1 == 1).collect();
        let m = members.len();
        let mut matrix: Vec<f64> = members.iter().flat_map(|&i| members.iter().map(move |&j| (i, j))).map(|(i, j)| g[i * n + j]).collect();
        let mut right: Vec<f64> = members.iter().map(|&i| b[i]).collect();
        if !solve(&mut matrix, &mut right, m) || right.iter().any(|x| !x.is_finite() || *x < 0.0) {
            continue;
        }
        let mut x = vec![0.0; n];
        members.iter().zip(&right).for_each(|(&i, &value)| x[i] = value);
        if value(&x) < value(&best) {
            best = x;
        }
    }
    best
}

/// Solves a system in place with pivots; false where it is singular.
fn solve(a: &mut [f64], b: &mut [f64], n: usize) -> bool {
    for i in 0..n {
        let pivot = (i..n).max_by(|&p, &q| a[p * n + i].abs().total_cmp(&a[q * n + i].abs())).unwrap_or(i);
        if a[pivot * n + i].abs() < 1e-300 {
            return false;
        }
        if pivot != i {
            (0..n).for_each(|k| a.swap(i * n + k, pivot * n + k));
            b.swap(i, pivot);
        }
        for row in i + 1..n {
            let factor = a[row * n + i] / a[i * n + i];
            (i..n).for_each(|k| a[row * n + k] -= factor * a[i * n + k]);
            b[row] -= factor * b[i];
        }
    }
    for i in (0..n).rev() {
        let sum: f64 = (i + 1..n).map(|k| a[i * n + k] * b[k]).sum();
        b[i] = (b[i] - sum) / a[i * n + i];
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use termwise_base::rng::Rng;

    fn random(n: usize, seed: u64) -> Vec<f64> {
        let mut rng = Rng::new(seed);
        let x: Vec<f64> = (0..n * n).map(|_| rng.normal()).collect();
        let transposed: Vec<f64> = (0..n * n).map(|i| x[i % n * n + i / n]).collect();
        product(&x, &transposed, n)
    }

    #[test]
    fn eigenvectors_rebuild_the_matrix() {
        for n in [1, 2, 5, 17] {
            let a = random(n, n as u64);
            let (values, vectors) = eigen(&a, n);
            assert!(values.is_sorted_by(|a, b| a >= b));
            for i in 0..n {
                for j in 0..n {
                    let rebuilt: f64 = (0..n).map(|k| values[k] * vectors[k * n + i] * vectors[k * n + j]).sum();
                    assert!((rebuilt - a[i * n + j]).abs() < 1e-9 * values[0], "{n}: {rebuilt} {}", a[i * n + j]);
                    let together: f64 = (0..n).map(|k| vectors[i * n + k] * vectors[j * n + k]).sum();
                    assert!((together - f64::from(i == j)).abs() < 1e-10);
                }
            }
            let (root, inverse) = roots(&a, n, 1e-12);
            let one = product(&root, &inverse, n);
            assert!((0..n * n).all(|i| (one[i] - f64::from(i / n == i % n)).abs() < 1e-5), "{n}");
            let again = product(&root, &root, n);
            assert!(again.iter().zip(&a).all(|(x, y)| (x - y).abs() < 1e-8 * values[0]));
        }
    }

    /// At the solution the gradient is zero where x is positive, and not negative elsewhere.
    #[test]
    fn nonnegative_solutions_meet_their_conditions() {
        let mut rng = Rng::new(3);
        for n in [1, 2, 3, 4] {
            for seed in 0..20 {
                let g = random(n, 100 + seed);
                let b: Vec<f64> = (0..n).map(|_| rng.normal()).collect();
                let x = nonnegative(&g, &b);
                for i in 0..n {
                    let gradient: f64 = (0..n).map(|j| g[i * n + j] * x[j]).sum::<f64>() - b[i];
                    assert!(x[i] >= 0.0 && gradient > -1e-7, "{n} {seed}: {x:?} {gradient}");
                    assert!(x[i] == 0.0 || gradient.abs() < 1e-7);
                }
            }
        }
    }
}
