//! Data for the fit of a head: for each sampled query, how the output depends on the polynomial.
//!
//! With the basis b_0..b_p, U_n = Σ_s M_s·b_n(x_s)·v_s and z_n = Σ_s M_s·b_n(x_s), the polynomial Σ c_n·b_n gives
//!
//! ```text
//! under a sum          y' = Σ c_n·U_n / Σ c_n·z_n        y' − y = Σ c_n·(U_n − z_n·y) / Σ c_n·z_n      y = Σ e^x·v / Σ e^x
//! under a norm         the direction of Σ c_n·U_n        the same with y = û, the true direction, and z_n = U_n·û
//! if size matters      Σ c_n·U_n                         Σ c_n·U_n − U
//! ```
//!
//! Therefore only z and the products of the residuals R_n = U_n − z_n·y with each other are stored per query, and squared errors of any
//! polynomial follow from them.

use termwise_attention::{Denominator, Rescale, ScaledSums, Variant, View};

use super::chebyshev::Interval;

/// How the polynomial's output is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A common factor of the weights cancels.
    Ratio,
    /// It does not: `length` or `none` without a norm, or a sum with a floor, eps or sink.
    Size,
}

impl Kind {
    /// For a variant with an exponential kernel.
    pub fn of(variant: &Variant) -> Kind {
        let plain = matches!(&variant.denominator, Denominator::Sum(sum) if sum.floor.is_none() && sum.eps.is_none())
            && !variant.denominator.has_sink();
        if plain || variant.norm.scale_free() { Kind::Ratio } else { Kind::Size }
    }
}

/// Sampled queries of one head.
#[derive(Clone, Debug)]
pub struct Rows {
    /// How they are compared.
    pub kind: Kind,
    /// Highest order of the basis.
    pub order: usize,
    /// [rows, p + 1]
    z: Vec<f64>,
    /// Products of residuals, the lower triangle by rows, [rows, w(w + 1)/2], w = p + 1, and one more for U if size matters.
    products: Vec<f64>,
    /// Σ ‖y‖² of all rows.
    size: f64,
}

impl Rows {
    /// An empty collection.
    pub fn new(kind: Kind, order: usize) -> Rows {
        Rows { kind, order, z: Vec::new(), products: Vec::new(), size: 0.0 }
    }

    /// Appends the rows of another collection of the same kind and order.
    pub fn append(&mut self, other: &Rows) {
        self.z.extend_from_slice(&other.z);
        self.products.extend_from_slice(&other.products);
        self.size += other.size;
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.z.len() / (self.order + 1)
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.z.is_empty()
    }

    /// Bytes of one row at this order.
    pub fn row_bytes(order: usize) -> usize {
        let width = order + 2;
        8 * (width + width * (width + 1) / 2)
    }

    fn width(&self) -> usize {
        self.order + 1 + usize::from(self.kind == Kind::Size)
    }

    /// z and the products of a row.
    fn row(&self, i: usize) -> (&[f64], &[f64]) {
        let (n, w) = (self.order + 1, self.width());
        let triangle = w * (w + 1) / 2;
        (&self.z[i * n..][..n], &self.products[i * triangle..][..triangle])
    }

    /// Adds query t of a head.
    pub fn add(&mut self, view: &View, t: usize, interval: &Interval) {
        self.add_as(view, t, interval, f64::exp);
    }

    /// The same for a kernel other than exp.
    pub(super) fn add_as(&mut self, view: &View, t: usize, interval: &Interval, w: impl Fn(f64) -> f64) {
        let (n, e) = (self.order + 1, view.e);
        let scores = scores(view, t);
        let highest = scores.iter().map(|&(_, x)| x).fold(f64::NEG_INFINITY, f64::max);
        let rho = if self.kind == Kind::Ratio && view.variant.near.kernel.rescale() == Rescale::SubtractMax { highest } else { 0.0 };
        // The true sums with their log scale ρ, and those of the basis.
        let (mut u, mut z) = (vec![0.0; e], 0.0);
        let (mut moments, mut sums, mut values) = (vec![0.0; n * e], vec![0.0; n], vec![0.0; n]);
        for &(s, x) in &scores {
            let decay = (view.log_decay[t] - view.log_decay[s]).exp();
            let value = &view.v[s * e..][..e];
            let weight = decay * w(x - rho);
            z += weight;
            u.iter_mut().zip(value).for_each(|(u, v)| *u += weight * v);
            interval.values(x, &mut values);
            for ((b, sum), row) in values.iter().zip(&mut sums).zip(moments.chunks_exact_mut(e)) {
                *sum += decay * b;
                row.iter_mut().zip(value).for_each(|(row, v)| *row += decay * b * v);
            }
        }
        let mut y = vec![0.0; e];
        view.finish(&view.variant, t, ScaledSums { u: &u, z, rho }, &mut y);
        let size = square(&y).sqrt();
        match self.kind {
            Kind::Ratio if view.variant.norm.scale_free() => {
                if view.variant.norm.info().word == "layer" {
                    moments.chunks_exact_mut(e).chain([&mut u[..]]).for_each(without_mean);
                }
                let length = square(&u).sqrt();
                if length == 0.0 {
                    return;
                }
                u.iter_mut().for_each(|u| *u /= length);
                for (sum, row) in sums.iter_mut().zip(moments.chunks_exact(e)) {
                    *sum = row.iter().zip(&u).map(|(a, b)| a * b).sum();
                }
            }
            Kind::Ratio => u.iter_mut().for_each(|u| *u /= z),
            Kind::Size => moments.extend_from_slice(&u),
        }
        if self.kind == Kind::Ratio {
            for (sum, row) in sums.iter().zip(moments.chunks_exact_mut(e)) {
                row.iter_mut().zip(&u).for_each(|(row, y)| *row -= sum * y);
            }
        }
        // Gates and denominators scale the residual.
        let factor = size * size / square(&u).max(f64::MIN_POSITIVE);
        if !factor.is_finite() || sums.iter().any(|sum| !sum.is_finite()) {
            return;
        }
        for (i, a) in moments.chunks_exact(e).enumerate() {
            let products = moments.chunks_exact(e).take(i + 1).map(|b| factor * a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>());
            self.products.extend(products);
        }
        self.z.extend_from_slice(&sums);
        self.size += size * size;
    }

    /// √(Σ ‖y' − y‖² / Σ ‖y‖²) with the polynomial Σ c_n·b_n, whose degree may be below the highest; infinite if a denominator is not
    /// positive.
    pub fn error(&self, c: &[f64]) -> f64 {
        (self.squared(c) / self.size.max(f64::MIN_POSITIVE)).sqrt()
    }

    /// Σ ‖y' − y‖²
    pub fn squared(&self, c: &[f64]) -> f64 {
        (0..self.len()).map(|i| self.row_error(i, c)).sum()
    }

    fn row_error(&self, i: usize, c: &[f64]) -> f64 {
        let (z, products) = self.row(i);
        let along = quadratic(products, c, self.kind == Kind::Size, self.order);
        match self.kind {
            Kind::Size => along,
            Kind::Ratio => {
                let z: f64 = z.iter().zip(c).map(|(z, c)| z * c).sum();
                if z > 0.0 { along / (z * z) } else { f64::INFINITY }
            }
        }
    }

    /// Mean z_n.
    pub fn mean_sums(&self, n: usize) -> Vec<f64> {
        let rows = self.len().max(1) as f64;
        (0..n).map(|k| self.z.iter().skip(k).step_by(self.order + 1).sum::<f64>() / rows).collect()
    }

    /// Gauss–Newton model of Σ ‖y' − y‖² at c: half its gradient, and JᵀJ [n, n]. Exact if size matters.
    pub fn model(&self, c: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let n = c.len();
        let (mut gradient, mut normal) = (vec![0.0; n], vec![0.0; n * n]);
        let mut along = vec![0.0; n];
        for i in 0..self.len() {
            let (z, products) = self.row(i);
            let at = |i: usize, j: usize| products[i.max(j) * (i.max(j) + 1) / 2 + i.min(j)];
            let last = self.order + 1;
            for (k, along) in along.iter_mut().enumerate() {
                *along = c.iter().enumerate().map(|(j, c)| c * at(k, j)).sum();
                if self.kind == Kind::Size {
                    *along -= at(last, k);
                }
            }
            if self.kind == Kind::Size {
                gradient.iter_mut().zip(&along).for_each(|(gradient, along)| *gradient += along);
                (0..n * n).for_each(|k| normal[k] += at(k / n, k % n));
                continue;
            }
            let sum: f64 = z.iter().zip(c).map(|(z, c)| z * c).sum();
            let whole: f64 = along.iter().zip(c).map(|(a, c)| a * c).sum();
            let inverse = 1.0 / (sum * sum);
            let ratio = whole / sum;
            for k in 0..n {
                gradient[k] += (along[k] - ratio * z[k]) * inverse;
                for j in 0..n {
                    let product = at(k, j) - (along[k] * z[j] + along[j] * z[k]) / sum + ratio / sum * z[k] * z[j];
                    normal[k * n + j] += product * inverse;
                }
            }
        }
        (gradient, normal)
    }
}

/// x_ts of query t with all visible keys s, with s.
pub fn scores(view: &View, t: usize) -> Vec<(usize, f64)> {
    let d = view.d;
    let q = &view.q[t * d..][..d];
    let product = |s: usize| q.iter().zip(&view.k[s * d..][..d]).map(|(q, k)| q * k).sum();
    view.seen(t).map(|s| (s, view.score(product(s)))).collect()
}

/// cᵀGc from a lower triangle; with U, that of (c, −1) with zeros in between if c is shorter than the basis.
fn quadratic(products: &[f64], c: &[f64], target: bool, order: usize) -> f64 {
    let triangle = |i: usize| &products[i * (i + 1) / 2..][..i + 1];
    let mut sum = 0.0;
    for (i, ci) in c.iter().enumerate() {
        let row = triangle(i);
        sum += ci * (2.0 * row[..i].iter().zip(c).map(|(g, c)| g * c).sum::<f64>() + row[i] * ci);
    }
    if target {
        let row = triangle(order + 1);
        sum += row[order + 1] - 2.0 * row[..c.len()].iter().zip(c).map(|(g, c)| g * c).sum::<f64>();
    }
    sum.max(0.0)
}

fn square(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum()
}

fn without_mean(x: &mut [f64]) {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    x.iter_mut().for_each(|x| *x -= mean);
}
