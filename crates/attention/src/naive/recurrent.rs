//! The recurrent form computed plainly, with gradients: what faster ways are compared with.
//!
//! Positions are cut into chunks [a, b). Inside a chunk scores are computed pair by pair, before it lies the state:
//!
//! ```text
//! U_t = M_{t,a−1}·Q_tᵀ·H_{a−1} + Σ_{a≤s≤t} M_ts·w(x_ts)·v'_s                     v' = I·κ·v,   M_ts = exp(c_t − c_s)
//! H_{b−1} = M_{b−1,a−1}·H_{a−1} + Σ_{a≤s<b} M_{b−1,s}·K_s·v'_sᵀ                  z alike, with 1 for v'
//! ```
//!
//! Backward in two passes. Forward in time with H: dQ_t = M_{t,a−1}·(H_{a−1}·dU_t + z_{a−1}·dz_t). Backward in time with
//! Ḣ, the gradient of H_{b−1} through all later rows: dK_s = M_{b−1,s}·(Ḣ·v'_s + ż), dv'_s = M_{b−1,s}·Ḣᵀ·K_s. The pairs (t, s)
//! that go through the state change c_t by ⟨dQ_t, Q_t⟩ and c_s by −⟨dK_s, K_s⟩.
//!
//! Memory is linear in T besides one state; nothing of size T×T. A chunk of one is the recurrence itself, a chunk of T the sum over pairs.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use crate::engine::Home;
use crate::kernels::basis::Basis;
use crate::naive::head::{Head, HeadGrads, add_scaled};
use crate::parts::norm::NormGrads;
use crate::real::dot;
use crate::{Attention, Error, Grads, Inputs, Layer, Memory, Real, Report, Saved, Shape, epilogue};

/// The naive recurrent computation, in float64 or float32. Saves nothing.
pub struct Recurrent<R: Real> {
    layer: Layer,
    bases: Vec<Arc<Basis>>,
    shape: Shape,
    chunk: usize,
    home: Arc<Home>,
    real: PhantomData<R>,
}

impl Layer {
    /// The naive recurrent engine for B rows of T positions, in chunks of that many. Refuses variants without a finite map.
    pub fn recurrent<R: Real>(&self, batch: usize, time: usize, chunk: usize) -> Result<Recurrent<R>, Error> {
        self.check_fused()?;
        let shape = self.shape(batch, time)?;
        if chunk == 0 {
            return Err(Error::Shape("a chunk has at least one position, found 0".into()));
        }
        let plan = self.state_plan(Memory::Natural);
        let basis = |(h, &(group, _)): (usize, &(usize, usize))| match &plan.groups[group].moments {
            Some(moments) => self.basis(&moments.orders),
            None => {
                let reason = "it has no finite feature map, so its memory grows with the positions; use a cache of keys and values";
                Err(Error::Combination { variant: self.heads()[h].to_string(), reason: reason.into() })
            }
        };
        let bases = plan.group_of.iter().enumerate().map(basis).collect::<Result<_, _>>()?;
        Ok(Recurrent { layer: self.clone(), bases, shape, chunk, home: Arc::default(), real: PhantomData })
    }
}

impl<R: Real> Recurrent<R> {
    fn head<'a>(&'a self, inputs: &'a Inputs<'a, R>, shape: &Shape, b: usize, h: usize) -> Chunked<'a, R> {
        let head = Head::gather(&self.layer, inputs, shape, b, h);
        let basis = &self.bases[h];
        let polynomial = head.variant.kernel.polynomial().expect("checked when built");
        let inverse = basis.wide_inverse_factorials();
        let scale = head.variant.scale_for(self.shape.d);
        let terms = (0..polynomial.len())
            .flat_map(|i| {
                let factor = scale.powi(polynomial[i].0 as i32);
                inverse[basis.span(i)].iter().map(move |c| R::of(c * factor))
            })
            .collect();
        let coefficients = polynomial.iter().map(|&(_, a)| R::of(a)).collect();
        Chunked { head, basis, terms, coefficients, chunk: self.chunk }
    }
}

impl<R: Real> Attention<R> for Recurrent<R> {
    fn infer(&mut self, inputs: &Inputs<R>, y: &mut [R]) -> Result<Report, Error> {
        let Shape { heads, e, .. } = self.shape;
        self.layer.check(&self.shape, inputs, 1)?;
        self.shape.check_outputs("y", y.len())?;
        y.fill(R::zero());
        let mut report = Report::default();
        for (at, shape, inputs) in inputs.each_document(&self.shape) {
            let y = &mut y[at.start * heads * e..at.end * heads * e];
            let mut found = Report::default();
            for (b, h) in (0..shape.batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                let chunked = self.head(&inputs, &shape, b, h);
                let head = &chunked.head;
                let mut state = chunked.empty();
                let mut u = vec![R::zero(); e];
                for chunk in chunked.chunks() {
                    for t in chunk.clone() {
                        let z = chunked.row(t, &chunk, &state, &mut u);
                        let row = &mut y[head.at_query.index(t) * e..][..e];
                        let denominator = epilogue::forward(&head.variant, head.row(t, z, R::zero()), &u, row);
                        if head.variant.denominator.sums() {
                            found.see((b, h, t), denominator, R::zero());
                        }
                    }
                    chunked.absorb_keys(&chunk, &mut state);
                }
            }
            report = report.or(found.of_document(at.start, &self.shape));
        }
        Ok(report)
    }

    fn forward(&mut self, inputs: &Inputs<R>, y: &mut [R]) -> Result<Saved, Error> {
        let report = self.infer(inputs, y)?;
        Ok(self.home.saved(report, self.home.take()))
    }

    fn backward(&mut self, inputs: &Inputs<R>, saved: &Saved, dy: &[R], grads: &mut Grads<R>) -> Result<(), Error> {
        let Shape { heads, e, .. } = self.shape;
        self.home.check(saved)?;
        self.layer.check(&self.shape, inputs, 1)?;
        self.layer.check_grads(&self.shape, grads)?;
        self.shape.check_outputs("gradient of y", dy.len())?;
        for (at, shape, inputs) in inputs.each_document(&self.shape) {
            let (dy, mut grads) = (&dy[at.start * heads * e..at.end * heads * e], grads.part(&at, &self.shape));
            for (b, h) in (0..shape.batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                self.head(&inputs, &shape, b, h).backward(dy, &mut grads);
            }
        }
        Ok(())
    }
}

/// H [N, e] and z [N], or their gradients.
struct Moments<R> {
    h: Vec<R>,
    z: Vec<R>,
}

impl<R: Real> Moments<R> {
    fn decay(&mut self, m: R) {
        self.h.iter_mut().chain(&mut self.z).for_each(|x| *x *= m);
    }

    /// H += c·K·vᵀ, z += c·b·K.
    fn add(&mut self, c: R, k: &[R], v: &[R], b: R) {
        for ((h, z), &k) in self.h.chunks_exact_mut(v.len()).zip(&mut self.z).zip(k) {
            add_scaled(h, c * k, v);
            *z += c * k * b;
        }
    }

    /// H·v + z·b, [N].
    fn rows(&self, v: &[R], b: R) -> Vec<R> {
        self.h.chunks_exact(v.len()).zip(&self.z).map(|(h, &z)| dot(h, v) + z * b).collect()
    }

    /// Adds c·Hᵀ·k to `to` [e]; returns c·z·k.
    fn columns(&self, c: R, k: &[R], to: &mut [R]) -> R {
        for (h, &k) in self.h.chunks_exact(to.len()).zip(k) {
            add_scaled(to, c * k, h);
        }
        c * dot(&self.z, k)
    }
}

/// One head with what its monomials need.
struct Chunked<'a, R: Real> {
    head: Head<'a, R>,
    basis: &'a Basis,
    /// scale^n/α! by row.
    terms: Vec<R>,
    /// a_n by order.
    coefficients: Vec<R>,
    chunk: usize,
}

impl<R: Real> Chunked<'_, R> {
    fn empty(&self) -> Moments<R> {
        let n = self.basis.rows();
        Moments { h: vec![R::zero(); n * self.head.e], z: vec![R::zero(); n] }
    }

    fn chunks(&self) -> impl DoubleEndedIterator<Item = Range<usize>> + use<R> {
        let (length, chunk) = (self.head.length, self.chunk);
        (0..length.div_ceil(chunk)).map(move |i| i * chunk..((i + 1) * chunk).min(length))
    }

    fn monomials(&self, x: &[R]) -> Vec<R> {
        let mut out = vec![R::zero(); self.basis.rows()];
        self.basis.of_one(x, &mut vec![R::zero(); self.basis.stem_rows()], &mut out);
        out
    }

    /// Multiplies each row by a_n·scale^n/α!.
    fn weigh(&self, rows: &mut [R]) {
        for (i, &a) in self.coefficients.iter().enumerate() {
            let span = self.basis.span(i);
            rows[span.clone()].iter_mut().zip(&self.terms[span]).for_each(|(q, &c)| *q *= c * a);
        }
    }

    fn query(&self, t: usize) -> Vec<R> {
        let mut q = self.monomials(self.head.near.q.row(t));
        self.weigh(&mut q);
        q
    }

    /// dx [d] from the gradient of the monomials of x.
    fn reverse(&self, x: &[R], g: &[R]) -> Vec<R> {
        let zeros = |n: usize| vec![R::zero(); n];
        let (mut stem, mut dstem, mut dx) = (zeros(self.basis.stem_rows()), zeros(self.basis.stem_rows()), zeros(x.len()));
        self.basis.stem(x, 1, &mut stem);
        self.basis.reverse_rows(0..self.basis.rows(), x, 1, &stem, g, &mut dstem, &mut dx);
        self.basis.reverse_stem(x, 1, &stem, &mut dstem, &mut dx);
        dx
    }

    /// M_ts; the state before the first position is empty, and what it is multiplied by does not matter.
    fn decay(&self, t: usize, s: usize) -> R {
        R::of((self.head.log_decay[t] - self.head.log_decay[s]).exp())
    }

    fn before(&self, t: usize, chunk: &Range<usize>) -> R {
        self.decay(t, chunk.start.saturating_sub(1))
    }

    fn factor(&self, s: usize) -> R {
        self.head.in_gate[s] * self.head.key_weights[s]
    }

    fn score(&self, t: usize, s: usize) -> R {
        self.head.near.scale * dot(self.head.near.q.row(t), self.head.near.k.row(s))
    }

    fn weighted_value(&self, s: usize) -> Vec<R> {
        self.head.v.row(s).iter().map(|&v| v * self.factor(s)).collect()
    }

    /// U_t into `u`; returns z_t.
    fn row(&self, t: usize, chunk: &Range<usize>, state: &Moments<R>, u: &mut [R]) -> R {
        u.fill(R::zero());
        let mut z = state.columns(self.before(t, chunk), &self.query(t), u);
        for s in chunk.start..=t {
            let weight = self.decay(t, s) * self.head.variant.kernel.value(self.score(t, s));
            z += weight;
            add_scaled(u, weight, &self.weighted_value(s));
        }
        z
    }

    /// From H and z before a chunk to those at its last position.
    fn absorb_keys(&self, chunk: &Range<usize>, state: &mut Moments<R>) {
        let last = chunk.end - 1;
        state.decay(self.before(last, chunk));
        for s in chunk.clone() {
            state.add(self.decay(last, s), &self.monomials(self.head.near.k.row(s)), &self.weighted_value(s), R::one());
        }
    }

    fn backward(&self, dy: &[R], grads: &mut Grads<R>) {
        let Head { variant, length, e, .. } = &self.head;
        let (length, d, e) = (*length, self.head.near.q.width, *e);
        let mut g = HeadGrads::new(&self.head);
        let (mut du, mut dz) = (vec![R::zero(); length * e], vec![R::zero(); length]);
        let (mut u, mut scratch) = (vec![R::zero(); e], vec![R::zero(); 2 * e]);
        let mut state = self.empty();
        for chunk in self.chunks() {
            for t in chunk.clone() {
                let z = self.row(t, &chunk, &state, &mut u);
                let du = &mut du[t * e..][..e];
                du.copy_from_slice(&dy[self.head.at_query.index(t) * e..][..e]);
                let norm = NormGrads { weight: &mut g.norm_weight, bias: &mut g.norm_bias };
                let row = epilogue::backward(variant, self.head.row(t, z, R::zero()), &u, du, &mut scratch, norm);
                g.take_row(t, &row, &scratch[e..], R::zero());
                dz[t] = row.z;
                self.pairs(t, &chunk, du, row.z, &mut g);

                let before = self.before(t, &chunk);
                let mut dq: Vec<R> = state.rows(du, row.z).into_iter().map(|x| x * before).collect();
                let query = self.query(t);
                g.log_decay[t] += dot(&dq, &query).wide();
                if !g.near.coefficients.is_empty() {
                    let monomials = self.monomials(self.head.near.q.row(t));
                    for (i, da) in g.near.coefficients.iter_mut().enumerate() {
                        *da += self.basis.span(i).map(|row| (dq[row] * monomials[row] * self.terms[row]).wide()).sum::<f64>();
                    }
                }
                self.weigh(&mut dq);
                add_scaled(&mut g.near.q[t * d..][..d], R::one(), &self.reverse(self.head.near.q.row(t), &dq));
            }
            self.absorb_keys(&chunk, &mut state);
        }

        let mut later = self.empty();
        for chunk in self.chunks().rev() {
            let last = chunk.end - 1;
            for s in chunk.clone() {
                let m = self.decay(last, s);
                let key = self.monomials(self.head.near.k.row(s));
                let dk: Vec<R> = later.rows(&self.weighted_value(s), R::one()).into_iter().map(|x| x * m).collect();
                g.log_decay[s] -= dot(&dk, &key).wide();
                add_scaled(&mut g.near.k[s * d..][..d], R::one(), &self.reverse(self.head.near.k.row(s), &dk));
                let mut dv = vec![R::zero(); e];
                later.columns(m, &key, &mut dv);
                self.value_gradient(s, R::one(), &dv, &mut g);
            }
            later.decay(self.before(last, &chunk));
            for t in chunk.clone() {
                later.add(self.before(t, &chunk), &self.query(t), &du[t * e..][..e], dz[t]);
            }
        }
        self.head.finish(g, grads);
    }

    /// Gradients of the pairs (t, s) inside a chunk.
    fn pairs(&self, t: usize, chunk: &Range<usize>, du: &[R], dz: R, g: &mut HeadGrads<R>) {
        let (variant, d) = (&self.head.variant, &self.head.near.q.width);
        let mut slopes = vec![0.0; g.near.coefficients.len()];
        for s in chunk.start..=t {
            let (x, decay) = (self.score(t, s), self.decay(t, s));
            let weight = decay * variant.kernel.value(x);
            let dweight = dot(du, self.head.v.row(s)) * self.factor(s) + dz;
            self.value_gradient(s, weight, du, g);
            g.log_decay[t] += (dweight * weight).wide();
            g.log_decay[s] -= (dweight * weight).wide();
            variant.kernel.learned_slopes(x.wide(), &mut slopes);
            let dvalue = (dweight * decay).wide();
            g.near.coefficients.iter_mut().zip(&slopes).for_each(|(da, slope)| *da += dvalue * slope);
            let dx = dweight * decay * variant.kernel.slope(x) * self.head.near.scale;
            add_scaled(&mut g.near.q[t * d..][..*d], dx, self.head.near.k.row(s));
            add_scaled(&mut g.near.k[s * d..][..*d], dx, self.head.near.q.row(t));
        }
    }

    /// From weight·dv', the gradient of the weighted value s, to those of its factors.
    fn value_gradient(&self, s: usize, weight: R, dv: &[R], g: &mut HeadGrads<R>) {
        let e = dv.len();
        let along = weight * dot(dv, self.head.v.row(s));
        add_scaled(&mut g.v[s * e..][..e], weight * self.factor(s), dv);
        g.in_gate[s] += self.head.key_weights[s] * along;
        g.key_weights[s] += self.head.in_gate[s] * along;
    }
}
