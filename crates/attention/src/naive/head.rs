//! One head of one batch row: everything its rows read, prepared; and the way back from there to the inputs' gradients.

use crate::epilogue::Row;
use crate::naive::prepare::Stages;
use crate::parts::denominator::position::{key_weight, key_weight_slope};
use crate::parts::gate::PostGate;
use crate::parts::kernel::feature::Map;
use crate::{Extra, Grads, Inputs, Layer, Real, Rows, Shape, Variant};

/// Where one head lies in tensors [B, T, heads, dimension].
#[derive(Clone, Copy)]
pub(crate) struct Place {
    first: usize,
    heads: usize,
    pub head: usize,
    length: usize,
}

impl Place {
    /// The index of position t, in units of the dimension.
    pub fn index(&self, t: usize) -> usize {
        (self.first + t) * self.heads + self.head
    }

    /// A copy of the head, [length, dim].
    fn read<R: Real>(&self, x: Rows<R>, dim: usize) -> Vec<R> {
        (0..self.length).flat_map(|t| &x.row(self.first + t, self.heads * dim)[self.head * dim..][..dim]).copied().collect()
    }

    /// A copy of the head in gate logits [B, T, heads].
    fn logits<R: Real>(&self, inputs: &Inputs<R>, extra: Extra) -> Vec<R> {
        self.read(inputs.extra(extra).into(), 1)
    }

    /// Adds values [length, dim] to the head in the gradient of tensor `which` (0 q, 1 k, 2 v).
    fn add<R: Real>(&self, values: &[R], which: usize, grads: &mut Grads<R>, shape: &Shape, dim: usize) {
        for (t, row) in values.chunks_exact(dim).enumerate() {
            add_scaled(&mut grads.row(which, self.first + t, shape)[self.head * dim..][..dim], R::one(), row);
        }
    }

    /// Adds values [length] to the head in the gradient of gate logits.
    fn add_logits<R: Real>(&self, values: &[R], extra: Extra, grads: &mut Grads<R>) {
        let to = grads.extra(extra);
        values.iter().enumerate().for_each(|(t, &value)| to[self.index(t)] += value);
    }
}

/// One head of one batch row with all that its rows need.
pub(crate) struct Head<'a, R> {
    pub variant: Variant,
    pub at_query: Place,
    pub at_key: Place,
    pub shape: Shape,
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
    pub fn gather(layer: &'a Layer, inputs: &'a Inputs<'a, R>, shape: &Shape, row: usize, head: usize) -> Self {
        let Shape { time, heads, kv_heads, d, e, .. } = *shape;
        let kv_head = head / shape.group();
        let length = inputs.length(row, shape);
        let at_query = Place { first: row * time, heads, head, length };
        let at_key = Place { first: row * time, heads: kv_heads, head: kv_head, length };

        let mut variant = layer.heads()[head].clone();
        layer.bind(head, inputs, &mut variant.kernel);
        let taps = |extra, head: usize, dim: usize| match variant.conv {
            Some(width) => &inputs.extra(extra)[head * dim * width..][..dim * width],
            None => &[],
        };
        let rope = layer.rope().filter(|_| variant.rope);
        let map = variant.kernel.map();
        let mut in_gate = vec![R::one(); length];
        if let Some(gate) = &variant.in_gate {
            in_gate = at_key.logits(inputs, Extra::InGate);
            gate.forward(&mut in_gate, &mut 0.0);
        }
        let mut out_gate = vec![R::one(); length];
        if let Some(gate) = &variant.out_gate {
            out_gate = at_query.logits(inputs, Extra::OutGate);
            gate.forward(&mut out_gate, &mut 0.0);
        }
        let mut post_gate = vec![R::one(); length];
        if let Some(gate) = &variant.post_gate {
            post_gate = if variant.needs(Extra::PostGate) { at_query.logits(inputs, Extra::PostGate) } else { out_gate.clone() };
            gate.forward(&mut post_gate, &mut 0.0);
        }
        let mut log_decay = vec![0.0; length];
        if let Some(decay) = &variant.decay {
            decay.forward(&at_query.logits(inputs, Extra::DecayGate), &mut log_decay, &mut 0.0);
        }
        let mut key_weights = vec![R::one(); length];
        if variant.denominator.key_side() {
            let m = inputs.extra(Extra::NormConst)[head];
            key_weights = (0..length).map(|s| key_weight(m, count(s))).collect();
        }
        Head {
            q: Stages::new(at_query.read(inputs.q(), d), d, taps(Extra::ConvQ, head, d), rope, map),
            k: Stages::new(at_key.read(inputs.k(), d), d, taps(Extra::ConvK, kv_head, d), rope, map),
            v: Stages::new(at_key.read(inputs.v(), e), e, taps(Extra::ConvV, kv_head, e), None, Map::Identity),
            scale: R::of(variant.scale_for(d)),
            variant,
            at_query,
            at_key,
            shape: *shape,
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
        let (head, kv_head) = (self.at_query.head, self.at_key.head);
        let dq = self.q.backward(dq, own_channels(grads, Extra::ConvQ, head, self.q.taps.len()));
        let dk = self.k.backward(dk, own_channels(grads, Extra::ConvK, kv_head, self.k.taps.len()));
        let dv = self.v.backward(dv, own_channels(grads, Extra::ConvV, kv_head, self.v.taps.len()));
        self.at_query.add(&dq, 0, grads, &self.shape, d);
        self.at_key.add(&dk, 1, grads, &self.shape, d);
        self.at_key.add(&dv, 2, grads, &self.shape, e);

        match &variant.post_gate {
            Some(PostGate::Shared(_)) => out.iter_mut().zip(&post).for_each(|(out, &post)| *out += post),
            Some(gate) => {
                gate.backward(&self.at_query.logits(self.inputs, Extra::PostGate), &self.post_gate, &mut post);
                self.at_query.add_logits(&post, Extra::PostGate, grads);
            }
            None => {}
        }
        if let Some(gate) = &variant.out_gate {
            gate.backward(&self.at_query.logits(self.inputs, Extra::OutGate), &self.out_gate, &mut out);
            self.at_query.add_logits(&out, Extra::OutGate, grads);
        }
        if let Some(gate) = &variant.in_gate {
            gate.backward(&self.at_key.logits(self.inputs, Extra::InGate), &self.in_gate, &mut in_gate);
            self.at_key.add_logits(&in_gate, Extra::InGate, grads);
        }
        if let Some(decay) = &variant.decay {
            let mut dg = vec![R::zero(); length];
            decay.backward(&self.at_query.logits(self.inputs, Extra::DecayGate), &log_decay, &mut dg);
            self.at_query.add_logits(&dg, Extra::DecayGate, grads);
        }
        if variant.denominator.key_side() {
            let m = self.inputs.extra(Extra::NormConst)[head];
            let slope = |s: usize| key_weight_slope(m, count(s), self.key_weights[s]);
            let dm = key_weights.iter().enumerate().map(|(s, &dkey)| dkey * slope(s)).sum();
            add_to(grads, Extra::NormConst, head, &[dm]);
        }
        let coefficients: Vec<R> = coefficients.into_iter().map(R::of).collect();
        add_to(grads, Extra::Coefficients, head * coefficients.len(), &coefficients);
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
