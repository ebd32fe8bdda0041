//! One head of one batch row: everything its rows read, prepared; and the way back from there to the inputs' gradients.

use crate::epilogue::Row;
use crate::naive::prepare::Stages;
use crate::parts::denominator::position::{key_weight, key_weight_slope};
use crate::parts::gate::PostGate;
use crate::parts::kernel::feature::Map;
use crate::{Extra, Grads, Inputs, Real, Shape, Variant};

/// Where one head lies in tensors [B, T, heads, dimension].
#[derive(Clone, Copy)]
pub(crate) struct Place {
    first: usize,
    heads: usize,
    length: usize,
}

impl Place {
    /// The index of position t, in units of the dimension.
    pub fn index(&self, t: usize) -> usize {
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

/// One head of one batch row with all that its rows need.
pub(crate) struct Head<'a, R> {
    pub variant: Variant,
    pub at_query: Place,
    pub at_key: Place,
    pub head: usize,
    pub length: usize,
    pub d: usize,
    pub e: usize,
    pub scale: R,
    pub q: Stages<'a, R>,
    pub k: Stages<'a, R>,
    pub v: Stages<'a, R>,
    pub in_gate: Vec<R>,
    pub out_gate: Vec<R>,
    pub post_gate: Vec<R>,
    /// κ_s
    pub key_weights: Vec<R>,
    /// c_t
    pub log_decay: Vec<f64>,
    pub inputs: &'a Inputs<'a, R>,
}

impl<'a, R: Real> Head<'a, R> {
    pub fn gather(variant: &Variant, inputs: &'a Inputs<'a, R>, shape: &Shape, row: usize, head: usize) -> Self {
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
            gate.forward(&mut in_gate, &mut 0.0);
        }
        let mut out_gate = vec![R::one(); length];
        if let Some(gate) = &variant.out_gate {
            out_gate = signal(Extra::OutGate, at_query);
            gate.forward(&mut out_gate, &mut 0.0);
        }
        let mut post_gate = vec![R::one(); length];
        if let Some(gate) = &variant.post_gate {
            post_gate = if variant.needs(Extra::PostGate) { signal(Extra::PostGate, at_query) } else { out_gate.clone() };
            gate.forward(&mut post_gate, &mut 0.0);
        }
        let mut log_decay = vec![0.0; length];
        if let Some(decay) = &variant.decay {
            decay.forward(&signal(Extra::DecayGate, at_query), &mut log_decay, &mut 0.0);
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

    pub fn row(&self, t: usize, z: R, rho: R) -> Row<'a, R> {
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

    /// Adds the gradients of the inputs, from those of what the rows read.
    pub(crate) fn finish(&self, g: HeadGrads<R>, grads: &mut Grads<R>) {
        let (variant, length, d, e) = (&self.variant, self.length, self.d, self.e);
        let HeadGrads { q: dq, k: dk, v: dv, mut in_gate, mut out, mut post, key_weights, log_decay, coefficients, norm_weight, norm_bias } =
            g;
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
            Some(PostGate::Shared(_)) => out.iter_mut().zip(&post).for_each(|(out, &post)| *out += post),
            Some(gate) => {
                gate.backward(&signal(Extra::PostGate, self.at_query), &self.post_gate, &mut post);
                add(Extra::PostGate, self.at_query, &post);
            }
            None => {}
        }
        if let Some(gate) = &variant.out_gate {
            gate.backward(&signal(Extra::OutGate, self.at_query), &self.out_gate, &mut out);
            add(Extra::OutGate, self.at_query, &out);
        }
        if let Some(gate) = &variant.in_gate {
            gate.backward(&signal(Extra::InGate, self.at_key), &self.in_gate, &mut in_gate);
            add(Extra::InGate, self.at_key, &in_gate);
        }
        if let Some(decay) = &variant.decay {
            let mut dg = vec![R::zero(); length];
            decay.backward(&signal(Extra::DecayGate, self.at_query), &log_decay, &mut dg);
            add(Extra::DecayGate, self.at_query, &dg);
        }
        if variant.denominator.key_side() {
            let m = self.inputs.extra(Extra::NormConst)[self.head];
            let slope = |s: usize| key_weight_slope(m, count(s), self.key_weights[s]);
            let dm = key_weights.iter().enumerate().map(|(s, &dkey)| dkey * slope(s)).sum();
            add_to(grads, Extra::NormConst, self.head, &[dm]);
        }
        let coefficients: Vec<R> = coefficients.into_iter().map(R::of).collect();
        add_to(grads, Extra::Coefficients, self.head * coefficients.len(), &coefficients);
        add_to(grads, Extra::NormWeight, 0, &norm_weight);
        add_to(grads, Extra::NormBias, 0, &norm_bias);
    }
}

/// Gradients of what the rows of a head read.
pub(crate) struct HeadGrads<R> {
    /// Of prepared queries, [length, d].
    pub q: Vec<R>,
    /// Of prepared keys, [length, d].
    pub k: Vec<R>,
    /// Of prepared values, [length, e].
    pub v: Vec<R>,
    /// Of I_s.
    pub in_gate: Vec<R>,
    /// Of O_t.
    pub out: Vec<R>,
    /// Of P_t.
    pub post: Vec<R>,
    /// Of κ_s.
    pub key_weights: Vec<R>,
    /// Of c_t.
    pub log_decay: Vec<f64>,
    /// Of learned a_n.
    pub coefficients: Vec<f64>,
    /// Of γ.
    pub norm_weight: Vec<R>,
    /// Of β.
    pub norm_bias: Vec<R>,
}

impl<R: Real> HeadGrads<R> {
    /// All zero.
    pub fn new(head: &Head<R>) -> Self {
        let Head { variant, length, d, e, .. } = head;
        let zeros = |n: usize| vec![R::zero(); n];
        HeadGrads {
            q: zeros(length * d),
            k: zeros(length * d),
            v: zeros(length * e),
            in_gate: zeros(*length),
            out: zeros(*length),
            post: zeros(*length),
            key_weights: zeros(*length),
            log_decay: vec![0.0; *length],
            coefficients: vec![0.0; variant.learned()],
            norm_weight: zeros(variant.norm.has_weight() as usize * e),
            norm_bias: zeros(variant.norm.has_bias() as usize * e),
        }
    }
}

/// S_t: every position up to t is seen.
pub(crate) fn count<R: Real>(t: usize) -> R {
    R::of(t as f64 + 1.0)
}

pub(crate) fn add_scaled<R: Real>(to: &mut [R], factor: R, from: &[R]) {
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
