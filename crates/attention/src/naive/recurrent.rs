//! The recurrent form computed plainly, with gradients: what faster ways are compared with.
//!
//! Positions are cut into chunks [a, b). Inside a chunk scores are computed pair by pair, before it lies the state:
//!
//! ```text
//! U_t = M_{t,a−1}·Q_tᵀ·H_{a−1} + Σ_{s not in H} M_ts·w(x_ts)·u'_s                 u' = I·κ·u,   M_ts = exp(c_t − c_s)
//! H_{b−1} = M_{b−1,a−1}·H_{a−1} + Σ_{s enters} M_{b−1,s}·K_s·u'_sᵀ                 z alike, with 1 for u'
//! u_t = v_t,  or  β_t·( v_t − M_{t,a−1}·K̂_tᵀ·H_{a−1} − Σ_{a≤s<t} M_ts·w(x̂_ts)·u_s )
//! ```
//!
//! Without a window all keys before a are in H. With one, only far keys are: a key enters when it is far from every later position, and the
//! window and the sinks stay pairs. A decay by channel goes into the coordinates of q and k before their monomials.
//!
//! Backward in two passes. Forward in time with H: dQ_t = M_{t,a−1}·(H_{a−1}·dU_t + z_{a−1}·dz_t). Backward in time with
//! Ḣ, the gradient of H_{b−1} through all later rows: dK_s = M_{b−1,s}·(Ḣ·u'_s + ż), du'_s = M_{b−1,s}·Ḣᵀ·K_s. The pairs (t, s)
//! that go through the state change c_t by ⟨dQ_t, Q_t⟩ and c_s by −⟨dK_s, K_s⟩. A write rule needs a third pass, forward in time, for the
//! gradients of K̂.
//!
//! Memory is linear in T besides one state; nothing of size T×T. A chunk of one is the recurrence itself, a chunk of T the sum over pairs.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use crate::engine::Home;
use crate::kernels::basis::Basis;
use crate::naive::class::{Class, Score};
use crate::naive::head::{Head, HeadGrads, add_scaled, backward_heads};
use crate::parts::norm::NormGrads;
use crate::real::dot;
use crate::{Attention, Error, Grads, Inputs, Kernel, Layer, Real, Report, Saved, Shape, epilogue};

/// The naive recurrent computation, in float64 or float32. Saves nothing.
pub struct Recurrent<R: Real> {
    layer: Layer,
    /// Of each head whose keys go into a state.
    bases: Vec<Option<Arc<Basis>>>,
    shape: Shape,
    chunk: usize,
    home: Arc<Home>,
    real: PhantomData<R>,
}

impl Layer {
    /// The naive recurrent engine for B rows of T positions, in chunks of that many. Refuses variants whose memory grows with the positions.
    pub fn recurrent<R: Real>(&self, batch: usize, time: usize, chunk: usize) -> Result<Recurrent<R>, Error> {
        let shape = self.shape(batch, time)?;
        if chunk == 0 {
            return Err(Error::Shape("a chunk has at least one position, found 0".into()));
        }
        let mut known: Vec<Arc<Basis>> = Vec::new();
        let mut bases = Vec::with_capacity(shape.heads);
        for variant in self.heads() {
            if variant.chosen.is_some() {
                let reason = "which keys are near is no matter of distance there; use a state, or the naive engine";
                return Err(Error::Combination { variant: variant.to_string(), reason: reason.into() });
            }
            let Some(weighing) = variant.remembered() else {
                bases.push(None);
                continue;
            };
            let Some(polynomial) = weighing.kernel.polynomial().filter(|_| weighing.has_finite_map()) else {
                let reason = "it has no finite feature map, so its memory grows with the positions; use a cache of keys and values";
                return Err(Error::Combination { variant: variant.to_string(), reason: reason.into() });
            };
            let orders: Vec<usize> = polynomial.iter().map(|&(n, _)| n).collect();
            let width = weighing.score_dim(shape.d);
            let same = |basis: &&Arc<Basis>| basis.orders() == orders && basis.d() == width;
            let basis = match known.iter().find(same) {
                Some(basis) => basis.clone(),
                None => Arc::new(Basis::new(width, &orders)?),
            };
            known.push(basis.clone());
            bases.push(Some(basis));
        }
        Ok(Recurrent { layer: self.clone(), bases, shape, chunk, home: Arc::default(), real: PhantomData })
    }
}

impl<R: Real> Recurrent<R> {
    fn head<'a>(&'a self, inputs: &'a Inputs<'a, R>, shape: &Shape, b: usize, h: usize) -> Chunked<'a, R> {
        let head = Head::gather(&self.layer, inputs, shape, b, h);
        let memory = self.bases[h].as_deref().map(|basis| Memory::new(basis, head.remembered(), head.key_scale()));
        Chunked { head, memory, chunk: self.chunk }
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
                let (mut state, mut written) = (chunked.empty(), Written::default());
                let (mut sum, mut scores) = (vec![R::zero(); e], Vec::new());
                for chunk in chunked.chunks() {
                    chunked.write(&chunk, &state, &mut written);
                    for t in chunk.clone() {
                        let (z, rho) = chunked.row(t, &chunk, &state, &written.u, &mut scores, &mut sum);
                        let row = &mut y[head.at_query.index(t) * e..][..e];
                        let denominator = epilogue::forward(&head.variant, head.row(t, z, rho), &sum, row);
                        if head.variant.denominator.sums() {
                            found.see((b, h, t), denominator, rho);
                        }
                    }
                    chunked.absorb(&chunk, &mut state, &written.u);
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
        self.home.check(saved)?;
        backward_heads(&self.layer, &self.shape, inputs, dy, grads, |inputs, shape, (b, h), dy, grads| {
            self.head(inputs, shape, b, h).backward(dy, grads);
        })
    }
}

/// H [N, e] and z [N], or their gradients.
struct Moments<R> {
    h: Vec<R>,
    z: Vec<R>,
}

impl<R: Real> Moments<R> {
    /// Each row times its factor.
    fn decay(&mut self, m: &[R]) {
        let e = self.h.len() / self.z.len().max(1);
        for ((h, z), &m) in self.h.chunks_exact_mut(e.max(1)).zip(&mut self.z).zip(m) {
            h.iter_mut().for_each(|h| *h *= m);
            *z *= m;
        }
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

/// u [length, e], and what a write rule kept of the values before β.
struct Written<R> {
    u: Vec<R>,
    kept: Vec<R>,
}

impl<R> Default for Written<R> {
    fn default() -> Self {
        Written { u: Vec::new(), kept: Vec::new() }
    }
}

/// What the monomials of a state need.
struct Memory<'a, R> {
    basis: &'a Basis,
    /// scale^n/α! by row, of queries and of keys that a write rule reads with.
    terms: [Vec<R>; 2],
    /// a_n for n = 0..=p, zero where an order is absent.
    coefficients: Vec<f64>,
    /// The orders of learned coefficients.
    learned: Vec<usize>,
}

/// What reads a state: a query, or a key that is written.
#[derive(Clone, Copy, PartialEq)]
enum Reader {
    Query,
    Key,
}

impl<'a, R: Real> Memory<'a, R> {
    fn new(basis: &'a Basis, class: &Class<R>, key_scale: R) -> Self {
        let inverse = basis.wide_inverse_factorials();
        let orders = basis.orders();
        let terms = [class.scale, key_scale].map(|scale| {
            let row = |i: usize| {
                let factor = scale.wide().powi(orders[i] as i32);
                inverse[basis.order_range(i)].iter().map(move |c| R::of(c * factor))
            };
            (0..orders.len()).flat_map(row).collect()
        });
        let mut coefficients = vec![0.0; orders.last().map_or(0, |n| n + 1)];
        class.kernel().polynomial().into_iter().flatten().for_each(|(n, a)| coefficients[n] = a);
        let learned = match class.kernel() {
            Kernel::Taylor(taylor) if class.weighing.learned() > 0 => taylor.orders().to_vec(),
            _ => Vec::new(),
        };
        Memory { basis, terms, coefficients, learned }
    }

    fn monomials(&self, x: &[R]) -> Vec<R> {
        let mut out = vec![R::zero(); self.basis.rows()];
        self.basis.of_one(x, &mut vec![R::zero(); self.basis.lower_order_rows()], &mut out);
        out
    }

    /// Multiplies each row by a_n·scale^n/α!.
    fn weigh(&self, rows: &mut [R], reader: Reader) {
        for (i, &n) in self.basis.orders().iter().enumerate() {
            let (span, a) = (self.basis.order_range(i), R::of(self.coefficients[n]));
            rows[span.clone()].iter_mut().zip(&self.terms[reader as usize][span]).for_each(|(q, &term)| *q *= term * a);
        }
    }

    /// dx from the gradient of the monomials of x.
    fn reverse(&self, x: &[R], g: &[R]) -> Vec<R> {
        let zeros = |n: usize| vec![R::zero(); n];
        let (mut lower_orders, mut dlower_orders, mut dx) =
            (zeros(self.basis.lower_order_rows()), zeros(self.basis.lower_order_rows()), zeros(x.len()));
        self.basis.lower_orders(x, 1, &mut lower_orders);
        self.basis.reverse_rows(0..self.basis.rows(), x, 1, &lower_orders, g, &mut dlower_orders, &mut dx);
        self.basis.reverse_lower_orders(x, 1, &lower_orders, &mut dlower_orders, &mut dx);
        dx
    }
}

/// One head in chunks.
struct Chunked<'a, R: Real> {
    head: Head<'a, R>,
    /// `None` where no key goes into a state.
    memory: Option<Memory<'a, R>>,
    chunk: usize,
}

impl<'a, R: Real> Chunked<'a, R> {
    fn empty(&self) -> Moments<R> {
        let n = self.memory.as_ref().map_or(0, |memory| memory.basis.rows());
        Moments { h: vec![R::zero(); n * self.head.e], z: vec![R::zero(); n] }
    }

    fn chunks(&self) -> impl DoubleEndedIterator<Item = Range<usize>> + use<R> {
        let (length, chunk) = (self.head.length, self.chunk);
        (0..length.div_ceil(chunk)).map(move |i| i * chunk..((i + 1) * chunk).min(length))
    }

    /// The class of the keys in the state.
    fn class(&self) -> &Class<'a, R> {
        self.head.remembered()
    }

    /// Keys before this are in the state before position a, sinks aside.
    fn frontier(&self, a: usize) -> usize {
        a.saturating_sub(self.head.variant.window.map_or(0, |window| window - 1))
    }

    /// Keys that enter the state at the end of a chunk.
    fn entering(&self, chunk: &Range<usize>) -> Range<usize> {
        let sinks = self.head.variant.sinks.unwrap_or(0);
        let end = if self.memory.is_some() { self.frontier(chunk.end) } else { 0 };
        self.frontier(chunk.start).max(sinks).min(end)..end
    }

    /// Keys that position t sees, or does not, as pairs: the sinks, and all that are not in the state.
    fn pairs(&self, t: usize, chunk: &Range<usize>) -> impl Iterator<Item = usize> + use<R> {
        let frontier = self.frontier(chunk.start);
        (0..self.head.variant.sinks.unwrap_or(0).min(frontier)).chain(frontier..t + 1)
    }

    /// The position at which the state before a chunk stands; an empty one stands anywhere.
    fn reference(&self, chunk: &Range<usize>) -> usize {
        chunk.start.saturating_sub(1)
    }

    /// exp(c_t,i − c_s,i) by channel; ones without such a decay.
    fn channels(&self, t: usize, s: usize) -> Vec<R> {
        let (width, c) = (self.class().q.width, &self.class().decay);
        if c.is_empty() { vec![R::one(); width] } else { (0..width).map(|i| R::of((c[t * width + i] - c[s * width + i]).exp())).collect() }
    }

    fn decayed(&self, x: &[R], t: usize, s: usize) -> Vec<R> {
        x.iter().zip(self.channels(t, s)).map(|(&x, m)| x * m).collect()
    }

    /// What each row of a state is multiplied by from position s to t.
    fn row_decay(&self, t: usize, s: usize) -> Vec<R> {
        let Some(memory) = &self.memory else { return Vec::new() };
        let m = self.head.log_decay(t, s).exp();
        memory.monomials(&self.channels(t, s)).into_iter().map(|row| row * m).collect()
    }

    fn factor(&self, s: usize) -> R {
        self.head.in_gate[s] * self.head.key_weights[s]
    }

    fn weighted_value(&self, s: usize, u: &[R]) -> Vec<R> {
        let e = self.head.e;
        u[s * e..][..e].iter().map(|&u| u * self.factor(s)).collect()
    }

    /// Q_t, or K̂_t, without the decay by head.
    fn reading(&self, t: usize, chunk: &Range<usize>, reader: Reader) -> Vec<R> {
        let Some(memory) = &self.memory else { return Vec::new() };
        let mut rows = memory.monomials(&self.decayed(self.reader(t, reader), t, self.reference(chunk)));
        memory.weigh(&mut rows, reader);
        rows
    }

    /// The vector that reads.
    fn reader(&self, t: usize, reader: Reader) -> &[R] {
        match reader {
            Reader::Query => self.class().q.row(t),
            Reader::Key => self.class().k.row(t),
        }
    }

    /// Adds the gradients of what reads, from that of its features.
    fn reading_backward(&self, t: usize, chunk: &Range<usize>, reader: Reader, mut dread: Vec<R>, g: &mut HeadGrads<R>) {
        let Some(memory) = &self.memory else { return };
        let x = self.decayed(self.reader(t, reader), t, self.reference(chunk));
        let monomials = memory.monomials(&x);
        let terms = &memory.terms[reader as usize];
        let log = dot(&dread, &self.reading(t, chunk, reader));
        g.log_decay[t] += log.wide();
        let far = self.class().far;
        for (i, &n) in memory.basis.orders().iter().enumerate() {
            // The gradient of a_n.
            let da = memory.basis.order_range(i).map(|row| (dread[row] * monomials[row] * terms[row]).wide()).sum::<f64>();
            if let Some(slot) = memory.learned.iter().position(|&m| m == n) {
                g.class(far).coefficients[slot] += da;
            }
        }
        memory.weigh(&mut dread, reader);
        let dx = memory.reverse(&x, &dread);
        self.decayed_backward(t, self.reference(chunk), &x, &dx, reader, R::one(), g);
    }

    /// From the gradient of x ⊙ e^{c_t − c_s} to that of x at its position, where its own c has this sign in the exponent.
    #[allow(clippy::too_many_arguments, reason = "both positions, both vectors")]
    fn decayed_backward(&self, t: usize, s: usize, x: &[R], dx: &[R], reader: Reader, sign: R, g: &mut HeadGrads<R>) {
        let (class, width) = (self.class(), self.class().q.width);
        let at = if sign > R::zero() { t } else { s };
        let m = self.channels(t, s);
        let grads = g.class(class.far);
        let to = if reader == Reader::Query { &mut grads.q } else { &mut grads.k };
        (0..width).for_each(|i| to[at * width + i] += dx[i] * m[i]);
        if !class.decay.is_empty() {
            (0..width).for_each(|i| grads.decay[at * width + i] += (sign * dx[i] * x[i]).wide());
        }
    }

    /// M_{t,a−1}, with ρ taken out.
    fn query_factor(&self, t: usize, chunk: &Range<usize>, rho: R) -> R {
        (self.head.log_decay(t, self.reference(chunk)) - rho).exp()
    }

    fn key_factor(&self, t: usize, chunk: &Range<usize>) -> R {
        self.head.log_decay(t, self.reference(chunk)).exp()
    }

    /// The scores of key t with the earlier keys of its chunk.
    fn key_scores(&self, t: usize, chunk: &Range<usize>) -> impl Iterator<Item = Score<R>> {
        (chunk.start..t).map(move |s| self.head.near.key_score(t, s, self.head.key_scale(), self.head.log_decay(t, s)))
    }

    /// Appends what a chunk writes, from the state before it.
    fn write(&self, chunk: &Range<usize>, state: &Moments<R>, written: &mut Written<R>) {
        let e = self.head.e;
        for t in chunk.clone() {
            let mut kept = self.head.v.row(t).to_vec();
            let mut beta = R::one();
            if let Some(&own) = self.head.beta.get(t) {
                beta = own;
                state.columns(-self.key_factor(t, chunk), &self.reading(t, chunk, Reader::Key), &mut kept);
                for score in self.key_scores(t, chunk) {
                    add_scaled(&mut kept, -self.head.near.weight(&score), &written.u[score.s * e..][..e]);
                }
            }
            written.u.extend(kept.iter().map(|&kept| kept * beta));
            written.kept.extend(kept);
        }
    }

    /// U_t into `sum`; returns z_t and ρ.
    fn row(&self, t: usize, chunk: &Range<usize>, state: &Moments<R>, u: &[R], scores: &mut Vec<Score<R>>, sum: &mut [R]) -> (R, R) {
        let log = self.memory.as_ref().map(|_| R::zero());
        let rho = self.head.scores(t, self.pairs(t, chunk), log, scores);
        sum.fill(R::zero());
        let mut z = R::zero();
        if self.memory.is_some() {
            z += state.columns(self.query_factor(t, chunk, rho), &self.reading(t, chunk, Reader::Query), sum);
        }
        for score in scores {
            let weight = self.head.weight(score);
            z += weight;
            add_scaled(sum, weight, &self.weighted_value(score.s, u));
        }
        (z, rho)
    }

    /// k_s at the position where a chunk ends, and its monomials.
    fn entered(&self, s: usize, chunk: &Range<usize>) -> (Vec<R>, Vec<R>) {
        let key = self.decayed(self.class().k.row(s), chunk.end - 1, s);
        let monomials = self.memory.as_ref().map(|memory| memory.monomials(&key)).unwrap_or_default();
        (key, monomials)
    }

    /// From H and z before a chunk to those at its last position.
    fn absorb(&self, chunk: &Range<usize>, state: &mut Moments<R>, u: &[R]) {
        let last = chunk.end - 1;
        state.decay(&self.row_decay(last, self.reference(chunk)));
        for s in self.entering(chunk) {
            state.add(self.head.log_decay(last, s).exp(), &self.entered(s, chunk).1, &self.weighted_value(s, u), R::one());
        }
    }

    fn backward(&self, dy: &[R], grads: &mut Grads<R>) {
        let Head { variant, length, e, .. } = &self.head;
        let (length, e) = (*length, *e);
        let mut g = HeadGrads::new(&self.head);
        let zeros = |n: usize| vec![R::zero(); n];
        let (mut dsums, mut dz, mut rhos, mut du) = (zeros(length * e), zeros(length), zeros(length), zeros(length * e));
        let (mut sum, mut scratch, mut scores) = (zeros(e), zeros(2 * e), Vec::new());
        let (mut state, mut written) = (self.empty(), Written::default());
        for chunk in self.chunks() {
            self.write(&chunk, &state, &mut written);
            for t in chunk.clone() {
                let (z, rho) = self.row(t, &chunk, &state, &written.u, &mut scores, &mut sum);
                let dsum = &mut dsums[t * e..][..e];
                dsum.copy_from_slice(&dy[self.head.at_query.index(t) * e..][..e]);
                let norm = NormGrads { weight: &mut g.norm_weight, bias: &mut g.norm_bias };
                let row = epilogue::backward(variant, self.head.row(t, z, rho), &sum, dsum, &mut scratch, norm);
                g.take_row(t, &row, &scratch[e..], self.head.scaled_sink(rho));
                (dz[t], rhos[t]) = (row.z, rho);
                for score in &scores {
                    let dweight = dot(dsum, &written.u[score.s * e..][..e]) * self.factor(score.s) + row.z;
                    self.value_backward(score.s, self.head.weight(score), dsum, &written.u, &mut du, &mut g);
                    self.head.pair_backward(t, score, dweight, &mut g);
                }
                if self.memory.is_some() {
                    let factor = self.query_factor(t, &chunk, rho);
                    let dread = state.rows(dsum, row.z).into_iter().map(|x| x * factor).collect();
                    self.reading_backward(t, &chunk, Reader::Query, dread, &mut g);
                }
            }
            self.absorb(&chunk, &mut state, &written.u);
        }

        let mut later = self.empty();
        let mut residuals = zeros(length * e);
        for chunk in self.chunks().rev() {
            let last = chunk.end - 1;
            for s in self.entering(&chunk) {
                let m = self.head.log_decay(last, s).exp();
                let (key, monomials) = self.entered(s, &chunk);
                let dmonomials: Vec<R> = later.rows(&self.weighted_value(s, &written.u), R::one()).into_iter().map(|x| x * m).collect();
                g.log_decay[s] -= dot(&dmonomials, &monomials).wide();
                if let Some(memory) = &self.memory {
                    let dkey = memory.reverse(&key, &dmonomials);
                    self.decayed_backward(last, s, &key, &dkey, Reader::Key, -R::one(), &mut g);
                }
                let mut dvalue = zeros(e);
                later.columns(m, &monomials, &mut dvalue);
                self.value_backward(s, R::one(), &dvalue, &written.u, &mut du, &mut g);
            }
            for t in chunk.clone().rev() {
                self.residual_backward(t, &chunk, &written, &mut du, &mut residuals, &mut g);
            }
            later.decay(&self.row_decay(last, self.reference(&chunk)));
            for t in chunk.clone().filter(|_| self.memory.is_some()) {
                let query = self.reading(t, &chunk, Reader::Query);
                later.add(self.query_factor(t, &chunk, rhos[t]), &query, &dsums[t * e..][..e], dz[t]);
                if !self.head.beta.is_empty() {
                    let key = self.reading(t, &chunk, Reader::Key);
                    later.add(-self.key_factor(t, &chunk), &key, &residuals[t * e..][..e], R::zero());
                }
            }
        }

        let mut state = self.empty();
        for chunk in self.chunks().filter(|_| !self.head.beta.is_empty()) {
            for t in chunk.clone() {
                let factor = self.key_factor(t, &chunk);
                let dread = state.rows(&residuals[t * e..][..e], R::zero()).into_iter().map(|x| -x * factor).collect();
                self.reading_backward(t, &chunk, Reader::Key, dread, &mut g);
            }
            self.absorb(&chunk, &mut state, &written.u);
        }
        add_scaled(&mut g.v, R::one(), &residuals);
        self.head.finish(g, grads);
    }

    /// From du_t, which is complete, to the gradients of β_t, of the keys of its chunk, and of v_t, which are the residuals.
    fn residual_backward(
        &self,
        t: usize,
        chunk: &Range<usize>,
        written: &Written<R>,
        du: &mut [R],
        residuals: &mut [R],
        g: &mut HeadGrads<R>,
    ) {
        let e = self.head.e;
        let mut residual = du[t * e..][..e].to_vec();
        if let Some(&beta) = self.head.beta.get(t) {
            g.beta[t] += dot(&residual, &written.kept[t * e..][..e]);
            residual.iter_mut().for_each(|r| *r *= beta);
            for score in self.key_scores(t, chunk) {
                let (s, near) = (score.s, &self.head.near);
                add_scaled(&mut du[s * e..][..e], -near.weight(&score), &residual);
                let dweight = -dot(&residual, &written.u[s * e..][..e]);
                let log = near.key_pair_backward(t, &score, self.head.key_scale(), dweight, &mut g.near).wide();
                g.log_decay[t] += log;
                g.log_decay[s] -= log;
            }
        }
        residuals[t * e..][..e].copy_from_slice(&residual);
    }

    /// From weight·du', the gradient of the weighted value s, to those of its factors.
    fn value_backward(&self, s: usize, weight: R, dvalue: &[R], u: &[R], du: &mut [R], g: &mut HeadGrads<R>) {
        let e = dvalue.len();
        let along = weight * dot(dvalue, &u[s * e..][..e]);
        add_scaled(&mut du[s * e..][..e], weight * self.factor(s), dvalue);
        g.in_gate[s] += self.head.key_weights[s] * along;
        g.key_weights[s] += self.head.in_gate[s] * along;
    }
}
