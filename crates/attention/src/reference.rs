//! The formula computed plainly: what every faster engine is compared with.
//!
//! ```text
//! q, k, v ← silu(conv(·))                      where there is a short convolution
//! q, k    ← rotate(·)                          where there is RoPE
//! x_ts    = min( scale · φ(q_t)·φ(k_s), clamp )
//! M_ts    = exp(c_t − c_s)
//! U_t     = Σ_{s ≤ t} M_ts · w(x_ts) · I_s · κ_s · v_s        κ_s = S_s^−σ(m) with the `position` denominator, else 1
//! z_t     = Σ_{s ≤ t} M_ts · w(x_ts)
//! y_t     = P_t · N( O_t · U_t / D(z_t, S_t) )
//! ```
//!
//! Row by row with explicit loops, memory linear in T. Where the parts allow it, the row maximum ρ of x + c_t − c_s is
//! subtracted; y does not depend on ρ, so it is a constant in the backward pass.

mod stages;

use std::marker::PhantomData;

use crate::epilogue::{self, Row};
use crate::extras::layer_extras;
use crate::io::check_length;
use crate::parts::feature::Map;
use crate::parts::gate::PostGate;
use crate::parts::norm::NormGrads;
use crate::parts::position::{key_weight, key_weight_slope};
use crate::real::dot;
use crate::{Attention, Error, Extra, Grads, Inputs, Nonpositive, Real, Report, Shape, Variant};
use stages::Stages;

/// The naive computation, in float64 or float32. Keeps nothing between calls: `backward` computes each row anew.
pub struct Reference<R: Real> {
    heads: Vec<Variant>,
    shape: Shape,
    real: PhantomData<R>,
}

impl<R: Real> Reference<R> {
    /// One variant for each head, at this shape.
    pub fn new(heads: &[Variant], shape: Shape) -> Result<Self, Error> {
        layer_extras(heads, &shape)?;
        Ok(Reference { heads: heads.to_vec(), shape, real: PhantomData })
    }
}

impl<R: Real> Attention<R> for Reference<R> {
    fn forward(&mut self, inputs: &Inputs<R>, y: &mut [R]) -> Result<Report, Error> {
        let Shape { batch, time, heads, e, .. } = self.shape;
        inputs.check(&self.heads, &self.shape)?;
        check_length(format_args!("y"), batch * time * heads * e, y.len())?;
        y.fill(R::zero());
        let mut report = Report::default();
        for b in 0..batch {
            for h in 0..heads {
                let head = Head::gather(&self.heads[h], inputs, &self.shape, b, h);
                let mut scores = Vec::with_capacity(head.length);
                let mut u = vec![R::zero(); e];
                for t in 0..head.length {
                    let (z, rho) = head.sums(t, &mut scores, &mut u);
                    let row = &mut y[head.at_query.index(t) * e..][..e];
                    let denominator = epilogue::forward(&head.variant, head.row(t, z, rho), &u, row);
                    let positive = denominator > R::zero();
                    if head.variant.denominator.sums() && !positive && report.nonpositive.is_none() {
                        let value = denominator.wide() * rho.wide().exp();
                        report.nonpositive = Some(Nonpositive { row: b, head: h, position: t, value });
                    }
                }
            }
        }
        Ok(report)
    }

    fn backward(&mut self, inputs: &Inputs<R>, dy: &[R], grads: &mut Grads<R>) -> Result<(), Error> {
        let Shape { batch, time, heads, e, .. } = self.shape;
        inputs.check(&self.heads, &self.shape)?;
        grads.check(&self.heads, &self.shape)?;
        check_length(format_args!("gradient of y"), batch * time * heads * e, dy.len())?;
        for b in 0..batch {
            for h in 0..heads {
                Head::gather(&self.heads[h], inputs, &self.shape, b, h).backward(dy, grads);
            }
        }
        Ok(())
    }
}

/// Where one head lies in tensors [B, T, heads, dimension].
#[derive(Clone, Copy)]
struct Place {
    first: usize,
    heads: usize,
    length: usize,
}

impl Place {
    /// The index of position t, in units of the dimension.
    fn index(&self, t: usize) -> usize {
        self.first + t * self.heads
    }

    /// A copy of the head, [length, dim].
    fn read<R: Real>(&self, x: &[R], dim: usize) -> Vec<R> {
        (0..self.length).flat_map(|t| &x[self.index(t) * dim..][..dim]).copied().collect()
    }

    /// Adds values [length, dim] to the head.
    fn add<R: Real>(&self, values: &[R], to: &mut [R], dim: usize) {
        for (t, row) in values.chunks_exact(dim).enumerate() {
            add_scaled(&mut to[self.index(t) * dim..][..dim], R::one(), row);
        }
    }
}

/// One score x_ts on its way to a weight, which is decay · w(argument).
struct Score<R> {
    /// x before the clamp.
    raw: R,
    /// What enters w.
    argument: R,
    /// M_ts; 1 where it is part of the argument.
    decay: R,
}

/// One head of one batch row with all that its rows need.
struct Head<'a, R> {
    variant: Variant,
    at_query: Place,
    at_key: Place,
    head: usize,
    length: usize,
    d: usize,
    e: usize,
    scale: R,
    q: Stages<'a, R>,
    k: Stages<'a, R>,
    v: Stages<'a, R>,
    in_gate: Vec<R>,
    out_gate: Vec<R>,
    post_gate: Vec<R>,
    /// κ_s
    key_weights: Vec<R>,
    /// c_t
    log_decay: Vec<f64>,
    inputs: &'a Inputs<'a, R>,
}

impl<'a, R: Real> Head<'a, R> {
    fn gather(variant: &Variant, inputs: &'a Inputs<'a, R>, shape: &Shape, row: usize, head: usize) -> Self {
        let Shape { time, heads, kv_heads, d, e, .. } = *shape;
        let kv_head = head / shape.group();
        let length = inputs.length(row, shape);
        let at_query = Place { first: row * time * heads + head, heads, length };
        let at_key = Place { first: row * time * kv_heads + kv_head, heads: kv_heads, length };

        let mut variant = variant.clone();
        if variant.needs(Extra::Coefficients) {
            let all = inputs.extra(Extra::Coefficients);
            let n = all.len() / heads;
            let own: Vec<f64> = all[head * n..][..n].iter().map(|a| a.wide()).collect();
            variant.kernel.bind(&own);
        }
        let taps = |extra, head: usize, dim: usize| match variant.conv {
            Some(width) => &inputs.extra(extra)[head * dim * width..][..dim * width],
            None => &[],
        };
        let rope = variant.rope.then_some(inputs.rope);
        let map = variant.kernel.map();
        let signal = |extra, place: Place| place.read(inputs.extra(extra), 1);
        let mut in_gate = vec![R::one(); length];
        if let Some(gate) = &variant.in_gate {
            in_gate = signal(Extra::InGate, at_key);
            gate.forward(&mut in_gate);
        }
        let mut out_gate = vec![R::one(); length];
        if let Some(gate) = &variant.out_gate {
            out_gate = signal(Extra::OutGate, at_query);
            gate.forward(&mut out_gate);
        }
        let mut post_gate = vec![R::one(); length];
        if let Some(gate) = &variant.post_gate {
            post_gate = if variant.needs(Extra::PostGate) { signal(Extra::PostGate, at_query) } else { out_gate.clone() };
            gate.forward(&mut post_gate);
        }
        let mut log_decay = vec![0.0; length];
        if let Some(decay) = &variant.decay {
            decay.forward(&signal(Extra::DecayGate, at_query), &mut log_decay);
        }
        let mut key_weights = vec![R::one(); length];
        if variant.denominator.key_side() {
            let m = inputs.extra(Extra::NormConst)[head];
            key_weights = (0..length).map(|s| key_weight(m, count(s))).collect();
        }
        Head {
            q: Stages::new(at_query.read(inputs.q, d), d, taps(Extra::ConvQ, head, d), rope, map),
            k: Stages::new(at_key.read(inputs.k, d), d, taps(Extra::ConvK, kv_head, d), rope, map),
            v: Stages::new(at_key.read(inputs.v, e), e, taps(Extra::ConvV, kv_head, e), None, Map::Identity),
            scale: R::of(variant.scale_for(d)),
            variant,
            at_query,
            at_key,
            head,
            length,
            d,
            e,
            in_gate,
            out_gate,
            post_gate,
            key_weights,
            log_decay,
            inputs,
        }
    }

    /// The scores of row t, and the row maximum ρ that was subtracted from their arguments.
    fn scores(&self, t: usize, scores: &mut Vec<Score<R>>) -> R {
        let q = self.q.row(t);
        scores.clear();
        scores.extend((0..=t).map(|s| {
            let raw = self.scale * dot(q, self.k.row(s));
            let clamped = if self.beyond_clamp(raw) { R::of(self.variant.clamp.unwrap_or(f64::INFINITY)) } else { raw };
            let log_decay = R::of(self.log_decay[t] - self.log_decay[s]);
            match self.variant.shifts() {
                true => Score { raw, argument: clamped + log_decay, decay: R::one() },
                false => Score { raw, argument: clamped, decay: log_decay.exp() },
            }
        }));
        if !self.variant.shifts() {
            return R::zero();
        }
        let rho = scores.iter().fold(R::neg_infinity(), |rho, score| rho.max(score.argument));
        scores.iter_mut().for_each(|score| score.argument = score.argument - rho);
        rho
    }

    fn beyond_clamp(&self, x: R) -> bool {
        self.variant.clamp.is_some_and(|clamp| x > R::of(clamp))
    }

    /// U_t into `u`; returns z_t and ρ.
    fn sums(&self, t: usize, scores: &mut Vec<Score<R>>, u: &mut [R]) -> (R, R) {
        let rho = self.scores(t, scores);
        let mut z = R::zero();
        u.fill(R::zero());
        for (s, score) in scores.iter().enumerate() {
            let weight = score.decay * self.variant.kernel.value(score.argument);
            z += weight;
            add_scaled(u, weight * self.in_gate[s] * self.key_weights[s], self.v.row(s));
        }
        (z, rho)
    }

    fn row(&self, t: usize, z: R, rho: R) -> Row<'a, R> {
        let parameter = |extra| if self.variant.needs(extra) { self.inputs.extra(extra) } else { &[] };
        Row {
            z,
            count: count(t),
            rho,
            out: self.out_gate[t],
            post: self.post_gate[t],
            weight: parameter(Extra::NormWeight),
            bias: parameter(Extra::NormBias),
        }
    }

    fn backward(&self, dy: &[R], grads: &mut Grads<R>) {
        let (variant, length, d, e) = (&self.variant, self.length, self.d, self.e);
        let zeros = |n: usize| vec![R::zero(); n];
        let (mut dq, mut dk, mut dv) = (zeros(length * d), zeros(length * d), zeros(length * e));
        let (mut din, mut dout, mut dpost) = (zeros(length), zeros(length), zeros(length));
        let mut dkey_weights = zeros(length);
        let mut dlog_decay = vec![0.0; length];
        let orders =
            if variant.needs(Extra::Coefficients) { self.inputs.extra(Extra::Coefficients).len() / self.at_query.heads } else { 0 };
        let (mut dcoefficients, mut slopes) = (vec![0.0; orders], vec![0.0; orders]);
        let (mut dweight, mut dbias) = (zeros(variant.norm.has_weight() as usize * e), zeros(variant.norm.has_bias() as usize * e));

        let (mut scores, mut u, mut scratch) = (Vec::with_capacity(length), zeros(e), zeros(2 * e));
        for t in 0..length {
            let (z, rho) = self.sums(t, &mut scores, &mut u);
            let mut du = dy[self.at_query.index(t) * e..][..e].to_vec();
            let norm_grads = NormGrads { weight: &mut dweight, bias: &mut dbias };
            let row = epilogue::backward(variant, self.row(t, z, rho), &u, &mut du, &mut scratch, norm_grads);
            dout[t] = row.out;
            dpost[t] = row.post;
            for (s, score) in scores.iter().enumerate() {
                let weight = score.decay * variant.kernel.value(score.argument);
                let along = dot(&du, self.v.row(s));
                let factor = self.in_gate[s] * self.key_weights[s];
                let dweight = along * factor + row.z;
                add_scaled(&mut dv[s * e..][..e], weight * factor, &du);
                din[s] += weight * self.key_weights[s] * along;
                dkey_weights[s] += weight * self.in_gate[s] * along;
                dlog_decay[t] += (dweight * weight).wide();
                dlog_decay[s] -= (dweight * weight).wide();
                if orders > 0 {
                    variant.kernel.learned_slopes(score.argument.wide(), &mut slopes);
                    let dvalue = (dweight * score.decay).wide();
                    dcoefficients.iter_mut().zip(&slopes).for_each(|(da, slope)| *da += dvalue * slope);
                }
                if !self.beyond_clamp(score.raw) {
                    let dx = dweight * score.decay * variant.kernel.slope(score.argument) * self.scale;
                    add_scaled(&mut dq[t * d..][..d], dx, self.k.row(s));
                    add_scaled(&mut dk[s * d..][..d], dx, self.q.row(t));
                }
            }
        }

        let kv_head = self.at_key.first % self.at_key.heads;
        let dq = self.q.backward(dq, own_channels(grads, Extra::ConvQ, self.head, self.q.taps.len()));
        let dk = self.k.backward(dk, own_channels(grads, Extra::ConvK, kv_head, self.k.taps.len()));
        let dv = self.v.backward(dv, own_channels(grads, Extra::ConvV, kv_head, self.v.taps.len()));
        self.at_query.add(&dq, grads.q, d);
        self.at_key.add(&dk, grads.k, d);
        self.at_key.add(&dv, grads.v, e);

        let signal = |extra, place: Place| place.read(self.inputs.extra(extra), 1);
        let mut add = |extra, place: Place, dg: &[R]| {
            if let Some(to) = grads.extras.get_mut(extra) {
                place.add(dg, to, 1);
            }
        };
        match &variant.post_gate {
            Some(PostGate::Shared(_)) => dout.iter_mut().zip(&dpost).for_each(|(dout, &dpost)| *dout += dpost),
            Some(gate) => {
                gate.backward(&signal(Extra::PostGate, self.at_query), &self.post_gate, &mut dpost);
                add(Extra::PostGate, self.at_query, &dpost);
            }
            None => {}
        }
        if let Some(gate) = &variant.out_gate {
            gate.backward(&signal(Extra::OutGate, self.at_query), &self.out_gate, &mut dout);
            add(Extra::OutGate, self.at_query, &dout);
        }
        if let Some(gate) = &variant.in_gate {
            gate.backward(&signal(Extra::InGate, self.at_key), &self.in_gate, &mut din);
            add(Extra::InGate, self.at_key, &din);
        }
        if let Some(decay) = &variant.decay {
            let mut dg = zeros(length);
            decay.backward(&signal(Extra::DecayGate, self.at_query), &dlog_decay, &mut dg);
            add(Extra::DecayGate, self.at_query, &dg);
        }
        if variant.denominator.key_side() {
            let m = self.inputs.extra(Extra::NormConst)[self.head];
            let slope = |s: usize| key_weight_slope(m, count(s), self.key_weights[s]);
            let dm = dkey_weights.iter().enumerate().map(|(s, &dkey)| dkey * slope(s)).sum();
            add_to(grads, Extra::NormConst, self.head, &[dm]);
        }
        let dcoefficients: Vec<R> = dcoefficients.into_iter().map(R::of).collect();
        add_to(grads, Extra::Coefficients, self.head * orders, &dcoefficients);
        add_to(grads, Extra::NormWeight, 0, &dweight);
        add_to(grads, Extra::NormBias, 0, &dbias);
    }
}

/// S_t: every position up to t is seen.
fn count<R: Real>(t: usize) -> R {
    R::of(t as f64 + 1.0)
}

fn add_scaled<R: Real>(to: &mut [R], factor: R, from: &[R]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

fn add_to<R: Real>(grads: &mut Grads<R>, extra: Extra, start: usize, values: &[R]) {
    if let Some(to) = grads.extras.get_mut(extra).filter(|_| !values.is_empty()) {
        add_scaled(&mut to[start..][..values.len()], R::one(), values);
    }
}

/// The gradient of one head's filters; empty where it has none.
fn own_channels<'a, R>(grads: &'a mut Grads<R>, extra: Extra, head: usize, n: usize) -> &'a mut [R] {
    grads.extras.get_mut(extra).filter(|_| n > 0).map(|taps| &mut taps[head * n..][..n]).unwrap_or_default()
}
