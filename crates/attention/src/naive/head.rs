//! One head of one batch row: everything its rows read, prepared; and the way back from there to the inputs' gradients.

use crate::epilogue::{Post, Row, RowGrads};
use crate::naive::chosen::held as held_keys;
use crate::naive::class::{Class, ClassGrads, Score, Tensors};
use crate::naive::prepare::{Stages, Steps};
use crate::parts::bits;
use crate::parts::denominator::position::{key_weight, key_weight_slope};
use crate::parts::gate::PostGate;
use crate::{Error, Extra, Grads, Inputs, Layer, Real, Rows, Shape, Variant};

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

    /// Where the head's columns lie: in rows of its own, or in rows of all heads.
    fn columns(&self, dim: usize, all: bool) -> (usize, usize) {
        if all { (self.heads * dim, self.head * dim) } else { (dim, 0) }
    }

    /// A copy of the head, [length, dim], or of all heads, [length, heads·dim].
    fn read<R: Real>(&self, x: Rows<R>, dim: usize, all: bool) -> Vec<R> {
        let columns = if all { 0..self.heads * dim } else { self.head * dim..(self.head + 1) * dim };
        (0..self.length).flat_map(|t| &x.row(self.first + t, self.heads * dim)[columns.clone()]).copied().collect()
    }

    /// A copy of the head in gate logits [B, T, heads, dim].
    fn logits<R: Real>(&self, inputs: &Inputs<R>, extra: Extra, dim: usize) -> Vec<R> {
        self.read(inputs.extra(extra).into(), dim, false)
    }

    /// Adds values, as `read` gave them, to the gradient of tensor `which` (0 q, 1 k, 2 v).
    fn add<R: Real>(&self, values: &[R], which: usize, grads: &mut Grads<R>, shape: &Shape, dim: usize, all: bool) {
        let (width, _) = self.columns(dim, all);
        let first = if all { 0 } else { self.head * dim };
        for (t, row) in values.chunks_exact(width).enumerate() {
            add_scaled(&mut grads.row(which, self.first + t, shape)[first..][..width], R::one(), row);
        }
    }

    /// Adds values [length, dim] to the head in the gradient of gate logits.
    fn add_logits<R: Real>(&self, values: &[R], extra: Extra, dim: usize, grads: &mut Grads<R>) {
        let to = grads.extra(extra);
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
    pub shape: Shape,
    pub length: usize,
    pub e: usize,
    q: Stages<'a, R>,
    k: Stages<'a, R>,
    pub v: Stages<'a, R>,
    pub near: Class<'a, R>,
    pub far: Option<Class<'a, R>>,
    pub in_gate: Vec<R>,
    pub out_gate: Vec<R>,
    /// One for each position, or [length, e].
    pub post_gate: Vec<R>,
    /// κ_s
    pub key_weights: Vec<R>,
    /// c_t of a decay by head.
    pub log_decay: Vec<f64>,
    /// β_t of a write rule, else empty.
    pub beta: Vec<R>,
    /// The near keys of each position where that is no matter of distance, else empty.
    held: Vec<Vec<usize>>,
    pub inputs: &'a Inputs<'a, R>,
}

impl<'a, R: Real> Head<'a, R> {
    pub fn gather(layer: &'a Layer, inputs: &'a Inputs<'a, R>, shape: &Shape, row: usize, head: usize) -> Self {
        let Shape { time, heads, kv_heads, d, e, .. } = *shape;
        let kv_head = head / shape.group();
        let length = inputs.length(row, shape);
        let at_query = Place { first: row * time, heads, head, length };
        let at_key = Place { first: row * time, heads: kv_heads, head: kv_head, length };

        let own = &layer.heads()[head];
        let mut variant = own.clone();
        layer.bind(head, inputs, &mut variant.kernel);
        if let Some(far) = &mut variant.far {
            layer.bind_far(head, inputs, &mut far.kernel);
        }
        let rope = layer.rope().filter(|_| variant.rope);
        let all = own.qk_norm.as_ref().is_some_and(|norm| norm.over_heads());
        let taps = |extra, place: Place, dim: usize, all: bool| match variant.conv {
            Some(width) if all => &inputs.extra(extra)[..place.heads * dim * width],
            Some(width) => &inputs.extra(extra)[place.head * dim * width..][..dim * width],
            None => &[],
        };
        let norm = |extra| own.qk_norm.as_ref().map(|norm| (norm, if norm.has_weight() { inputs.extra(extra) } else { &[] }));
        let stages = |x: Rows<'a, R>, place: Place, taps, norm| {
            let (width, first) = place.columns(d, all);
            Stages::new(place.read(x, d, all), d, width, first, Steps { taps, norm, rope })
        };
        let q = stages(inputs.q(), at_query, taps(Extra::ConvQ, at_query, d, all), norm(Extra::QNorm));
        let mut k = stages(inputs.k(), at_key, taps(Extra::ConvK, at_key, d, all), norm(Extra::KNorm));
        let steps = Steps { taps: taps(Extra::ConvV, at_key, e, false), norm: None, rope: None };
        let mut v = Stages::new(at_key.read(inputs.v(), e, false), e, e, 0, steps);
        if let Some(bits) = variant.bits {
            let narrow = |x: &[R]| x.iter().map(|x| x.wide() as f32).collect::<Vec<f32>>();
            let of = |extra| narrow(&inputs.extra(extra)[kv_head * d..][..d]);
            let (centre, range) = (of(Extra::CodeCentre), of(Extra::CodeRange));
            let sinks = variant.sinks.unwrap_or(0);
            for (rows, dim, is_key) in [(&mut k.rotated, d, true), (&mut v.rotated, e, false)] {
                for row in rows.chunks_exact_mut(dim).skip(sinks) {
                    let mut codes = narrow(row);
                    match is_key {
                        true => bits::round_key(bits, bits::Channels { centre: &centre, range: &range }, &mut codes),
                        false => bits::round_value(bits, &mut codes),
                    }
                    row.iter_mut().zip(&codes).for_each(|(x, &code)| *x = R::of(f64::from(code)));
                }
            }
        }

        let mut in_gate = vec![R::one(); length];
        if let Some(gate) = &variant.in_gate {
            in_gate = at_key.logits(inputs, Extra::InGate, 1);
            gate.forward(&mut in_gate, &mut 0.0);
        }
        let mut out_gate = vec![R::one(); length];
        if let Some(gate) = &variant.out_gate {
            out_gate = at_query.logits(inputs, Extra::OutGate, 1);
            gate.forward(&mut out_gate, &mut 0.0);
        }
        let mut post_gate = vec![R::one(); length];
        if let Some(gate) = &variant.post_gate {
            post_gate = match variant.needs(Extra::PostGate) {
                true => at_query.logits(inputs, Extra::PostGate, if gate.by_channel() { e } else { 1 }),
                false => out_gate.clone(),
            };
            gate.forward(&mut post_gate, &mut 0.0);
        }
        let beta = match variant.write {
            Some(delta) => at_key.logits(inputs, Extra::Beta, 1).into_iter().map(|logit| delta.beta(logit)).collect(),
            None => Vec::new(),
        };
        let mut key_weights = vec![R::one(); length];
        if variant.denominator.key_side() {
            let m = inputs.extra(Extra::NormConst)[head];
            key_weights = (0..length).map(|s| key_weight(m, count(&variant, s))).collect();
        }
        let channels = variant.decay.as_ref().filter(|decay| decay.by_channel()).map_or(0, |_| variant.near().score_dim(d));
        let mut decays = log_decays(&variant, at_query, inputs, channels.max(1));
        let (log_decay, by_channel) = if channels > 0 { (vec![0.0; length], decays) } else { (std::mem::take(&mut decays), Vec::new()) };
        let tensors = Tensors { inputs, head, kv_head };
        let distance = variant.distance();
        let qk = (&q.rotated[..], &k.rotated[..], d);
        let near = Class::new(tensors, false, variant.near(), qk, by_channel.clone());
        let mut held = Vec::new();
        if let Some(chosen) = variant.chosen {
            // Heads of one kv head and variant share their keys, so that all of them choose.
            let group = kv_head * shape.group()..(kv_head + 1) * shape.group();
            let sharing = group.filter(|&other| layer.heads()[other] == *own);
            let classes: Vec<Class<R>> = sharing
                .map(|other| {
                    let place = Place { head: other, ..at_query };
                    let q = stages(inputs.q(), place, taps(Extra::ConvQ, place, d, all), norm(Extra::QNorm));
                    let tensors = Tensors { inputs, head: other, kv_head };
                    Class::new(tensors, false, variant.near(), (&q.rotated, &k.rotated, d), Vec::new())
                })
                .collect();
            held = held_keys(&classes, length, distance, chosen);
        }
        let far = variant.far.clone().map(|far| Class::new(tensors, true, far, qk, by_channel));
        Head {
            variant,
            at_query,
            at_key,
            shape: *shape,
            length,
            e,
            q,
            k,
            v,
            near,
            far,
            in_gate,
            out_gate,
            post_gate,
            key_weights,
            log_decay,
            beta,
            held,
            inputs,
        }
    }

    /// The class of key s as position t sees it; `None` where it is not seen.
    pub fn class(&self, t: usize, s: usize) -> Option<&Class<'a, R>> {
        let near = self.held.get(t).map_or_else(|| self.variant.distance().is_near(t, s), |near| near.contains(&s));
        if near { Some(&self.near) } else { self.far.as_ref() }
    }

    /// The class of keys that a state remembers: the far ones where there is a window, all elsewhere.
    pub fn remembered(&self) -> &Class<'a, R> {
        self.class_of(self.variant.window.is_some())
    }

    /// scale_k of a write rule.
    pub fn key_scale(&self) -> R {
        R::of(self.variant.write.map_or(1.0, |delta| delta.scale))
    }

    fn class_of(&self, far: bool) -> &Class<'a, R> {
        if far { self.far.as_ref().unwrap_or(&self.near) } else { &self.near }
    }

    /// b_h of a sum with a sink.
    fn sink(&self) -> Option<R> {
        self.variant.denominator.has_sink().then(|| self.inputs.extra(Extra::Sink)[self.at_query.head])
    }

    /// c_t − c_s
    pub fn log_decay(&self, t: usize, s: usize) -> R {
        R::of(self.log_decay[t] - self.log_decay[s])
    }

    /// The scores of row t among `keys`, with the row maximum ρ taken out, which is returned. For exp that is subtracted from the argument,
    /// elsewhere it is part of the factor; `log` is that of another part of the row.
    pub fn scores(&self, t: usize, keys: impl Iterator<Item = usize>, log: Option<R>, scores: &mut Vec<Score<R>>) -> R {
        scores.clear();
        scores.extend(keys.filter_map(|s| Some(self.class(t, s)?.score(t, s, self.log_decay(t, s)))));
        if !self.variant.shifts() {
            scores.iter_mut().for_each(|score| score.factor = score.log.exp());
            return R::zero();
        }
        let is_exp = |far: bool| self.class_of(far).kernel().is_exp();
        let size = |score: &Score<R>| if is_exp(score.far) { score.argument + score.log } else { score.log };
        let rho = scores.iter().map(size).chain(self.sink()).chain(log).fold(R::neg_infinity(), R::max);
        for score in scores {
            match is_exp(score.far) {
                true => score.argument = score.argument + score.log - rho,
                false => score.factor = (score.log - rho).exp(),
            }
        }
        rho
    }

    pub fn weight(&self, score: &Score<R>) -> R {
        self.class_of(score.far).weight(score)
    }

    /// Adds the gradients of row t through one of its scores, from that of its weight.
    pub fn pair_backward(&self, t: usize, score: &Score<R>, dweight: R, g: &mut HeadGrads<R>) {
        let class = self.class_of(score.far);
        let log = class.pair_backward(t, score, dweight, g.class(score.far)).wide();
        g.log_decay[t] += log;
        g.log_decay[score.s] -= log;
    }

    /// e^{b−ρ}, 0 without a sink.
    pub fn scaled_sink(&self, rho: R) -> R {
        self.sink().map_or(R::zero(), |b| (b - rho).exp())
    }

    pub fn row(&self, t: usize, z: R, rho: R) -> Row<'_, R> {
        let parameter = |extra| if self.variant.needs(extra) { self.inputs.extra(extra) } else { &[] };
        let by_channel = self.variant.post_gate.as_ref().is_some_and(PostGate::by_channel);
        Row {
            z,
            count: count(&self.variant, t),
            rho,
            out: self.out_gate[t],
            post: if by_channel { Post::Each(&self.post_gate[t * self.e..][..self.e]) } else { Post::One(self.post_gate[t]) },
            sink: self.scaled_sink(rho),
            weight: parameter(Extra::NormWeight),
            bias: parameter(Extra::NormBias),
        }
    }

    /// Adds the gradients of the inputs, from those of what the rows read.
    pub(crate) fn finish(&self, mut g: HeadGrads<R>, grads: &mut Grads<R>) {
        let (variant, e, d) = (&self.variant, self.e, self.shape.d);
        let (head, kv_head) = (self.at_query.head, self.at_key.head);
        let (mut dq, mut dk) = (vec![R::zero(); self.q.rotated.len()], vec![R::zero(); self.k.rotated.len()]);
        for (class, g) in [(Some(&self.near), Some(&mut g.near)), (self.far.as_ref(), g.far.as_mut())] {
            let (Some(class), Some(g)) = (class, g) else { continue };
            let [of_q, of_k] = class.features_backward(g, (&self.q.rotated, &mut dq), (&self.k.rotated, &mut dk));
            let to = |extra: Extra| if class.far { extra.of_far() } else { extra };
            for (extra, index, values) in [
                (Extra::DimQ, head, &of_q.matrix),
                (Extra::FeatureQ, head, &of_q.weight),
                (Extra::FeatureQBias, head, &of_q.bias),
                (Extra::DimK, kv_head, &of_k.matrix),
                (Extra::FeatureK, kv_head, &of_k.weight),
                (Extra::FeatureKBias, kv_head, &of_k.bias),
            ] {
                add_to(grads, to(extra), index * values.len(), values);
            }
            let coefficients: Vec<R> = g.coefficients.iter().map(|&a| R::of(a)).collect();
            add_to(grads, to(Extra::Coefficients), head * coefficients.len(), &coefficients);
        }
        let all = variant.qk_norm.as_ref().is_some_and(|norm| norm.over_heads());
        for (which, stages, place, gradient, conv, norm) in
            [(0, &self.q, self.at_query, dq, Extra::ConvQ, Extra::QNorm), (1, &self.k, self.at_key, dk, Extra::ConvK, Extra::KNorm)]
        {
            let mut dnorm = vec![R::zero(); if variant.needs(norm) { self.inputs.extra(norm).len() } else { 0 }];
            let first = if all { 0 } else { place.head * stages.taps.len() };
            let gradient = stages.backward(gradient, own_channels(grads, conv, first, stages.taps.len()), &mut dnorm);
            place.add(&gradient, which, grads, &self.shape, d, all);
            add_to(grads, norm, 0, &dnorm);
        }
        let taps = self.v.taps.len();
        let dv = self.v.backward(std::mem::take(&mut g.v), own_channels(grads, Extra::ConvV, kv_head * taps, taps), &mut []);
        self.at_key.add(&dv, 2, grads, &self.shape, e, false);

        match &variant.post_gate {
            Some(PostGate::Shared(_)) => g.out.iter_mut().zip(&g.post).for_each(|(out, &post)| *out += post),
            Some(gate) => {
                let dim = if gate.by_channel() { e } else { 1 };
                gate.backward(&self.at_query.logits(self.inputs, Extra::PostGate, dim), &self.post_gate, &mut g.post);
                self.at_query.add_logits(&g.post, Extra::PostGate, dim, grads);
            }
            None => {}
        }
        if let Some(gate) = &variant.out_gate {
            gate.backward(&self.at_query.logits(self.inputs, Extra::OutGate, 1), &self.out_gate, &mut g.out);
            self.at_query.add_logits(&g.out, Extra::OutGate, 1, grads);
        }
        if let Some(gate) = &variant.in_gate {
            gate.backward(&self.at_key.logits(self.inputs, Extra::InGate, 1), &self.in_gate, &mut g.in_gate);
            self.at_key.add_logits(&g.in_gate, Extra::InGate, 1, grads);
        }
        if let Some(delta) = variant.write {
            let logits = self.at_key.logits(self.inputs, Extra::Beta, 1);
            let dlogits: Vec<R> = logits.iter().zip(&g.beta).map(|(&logit, &dbeta)| dbeta * delta.slope(logit)).collect();
            self.at_key.add_logits(&dlogits, Extra::Beta, 1, grads);
        }
        self.decay_backward(&g, grads);
        if variant.denominator.key_side() {
            let m = self.inputs.extra(Extra::NormConst)[head];
            let slope = |s: usize| key_weight_slope(m, count(variant, s), self.key_weights[s]);
            let dm = g.key_weights.iter().enumerate().map(|(s, &dkey)| dkey * slope(s)).sum();
            add_to(grads, Extra::NormConst, head, &[dm]);
        }
        if variant.denominator.has_sink() {
            add_to(grads, Extra::Sink, head, &[g.sink]);
        }
        add_to(grads, Extra::NormWeight, 0, &g.norm_weight);
        add_to(grads, Extra::NormBias, 0, &g.norm_bias);
    }

    fn decay_backward(&self, g: &HeadGrads<R>, grads: &mut Grads<R>) {
        let Some(decay) = &self.variant.decay else { return };
        let channels = if decay.by_channel() { self.near.q.width } else { 1 };
        let mut dc = g.log_decay.clone();
        if decay.by_channel() {
            dc.clone_from(&g.near.decay);
            g.far.iter().flat_map(|far| &far.decay).zip(&mut dc).for_each(|(far, dc)| *dc += far);
        }
        let params = self.variant.decay_params(self.inputs, self.at_query.head);
        let logits = if decay.has_logits() { self.at_query.logits(self.inputs, Extra::DecayGate, channels) } else { Vec::new() };
        let mut dlogits = vec![R::zero(); logits.len()];
        let mut drate = 0.0;
        for channel in 0..channels {
            let column = |x: &[R]| x.iter().skip(channel).step_by(channels).copied().collect::<Vec<R>>();
            let own = column(&logits);
            let dc: Vec<f64> = dc.iter().skip(channel).step_by(channels).copied().collect();
            let mut dg = vec![R::zero(); own.len()];
            drate += decay.backward(&own, params, &dc, &mut dg);
            dg.iter().enumerate().for_each(|(t, &dg)| dlogits[t * channels + channel] = dg);
        }
        if decay.has_logits() {
            self.at_query.add_logits(&dlogits, Extra::DecayGate, channels, grads);
        }
        if decay.has_rate() {
            add_to(grads, Extra::DecayRate, self.at_query.head, &[R::of(drate)]);
        }
    }
}

/// c_t of a head, [length, channels]; zero without a decay.
fn log_decays<R: Real>(variant: &Variant, place: Place, inputs: &Inputs<R>, channels: usize) -> Vec<f64> {
    let mut c = vec![0.0; place.length * channels];
    if let Some(decay) = &variant.decay {
        let logits = if decay.has_logits() { place.logits(inputs, Extra::DecayGate, channels) } else { Vec::new() };
        let mut one = vec![0.0; place.length];
        for channel in 0..channels {
            let own: Vec<R> = logits.iter().skip(channel).step_by(channels).copied().collect();
            decay.forward(&own, variant.decay_params(inputs, place.head), &mut one, &mut 0.0);
            one.iter().enumerate().for_each(|(t, &value)| c[t * channels + channel] = value);
        }
    }
    c
}

/// Gradients of what the rows of a head read.
pub(crate) struct HeadGrads<R> {
    pub near: ClassGrads<R>,
    pub far: Option<ClassGrads<R>>,
    /// Of prepared values, [length, e].
    pub v: Vec<R>,
    /// Of I_s.
    pub in_gate: Vec<R>,
    /// Of O_t.
    pub out: Vec<R>,
    /// Of P_t.
    pub post: Vec<R>,
    post_by_channel: bool,
    /// Of κ_s.
    pub key_weights: Vec<R>,
    /// Of c_t of a decay by head.
    pub log_decay: Vec<f64>,
    /// Of β_t.
    pub beta: Vec<R>,
    /// Of b_h.
    pub sink: R,
    /// Of γ.
    pub norm_weight: Vec<R>,
    /// Of β.
    pub norm_bias: Vec<R>,
}

impl<R: Real> HeadGrads<R> {
    /// All zero.
    pub fn new(head: &Head<R>) -> Self {
        let Head { variant, length, e, .. } = head;
        let zeros = |n: usize| vec![R::zero(); n];
        HeadGrads {
            near: ClassGrads::new(&head.near),
            far: head.far.as_ref().map(ClassGrads::new),
            v: zeros(length * e),
            in_gate: zeros(*length),
            out: zeros(*length),
            post: zeros(head.post_gate.len()),
            post_by_channel: variant.post_gate.as_ref().is_some_and(PostGate::by_channel),
            key_weights: zeros(*length),
            log_decay: vec![0.0; *length],
            beta: zeros(head.beta.len()),
            sink: R::zero(),
            norm_weight: zeros(variant.norm.has_weight() as usize * e),
            norm_bias: zeros(variant.norm.has_bias() as usize * e),
        }
    }

    /// Takes in what the epilogue of row t gave: `posts` [e] are the gradients of a post gate by channel.
    pub fn take_row(&mut self, t: usize, row: &RowGrads<R>, posts: &[R], scaled_sink: R) {
        self.out[t] = row.out;
        self.sink += row.z * scaled_sink;
        match self.post_by_channel {
            false => self.post[t] = row.post,
            true => self.post[t * posts.len()..][..posts.len()].copy_from_slice(posts),
        }
    }

    pub fn class(&mut self, far: bool) -> &mut ClassGrads<R> {
        match &mut self.far {
            Some(class) if far => class,
            _ => &mut self.near,
        }
    }
}

/// S_t
pub(crate) fn count<R: Real>(variant: &Variant, t: usize) -> R {
    R::of(variant.visible(t) as f64)
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

/// The gradient of some filters; empty where there are none.
fn own_channels<'a, R>(grads: &'a mut Grads<R>, extra: Extra, first: usize, n: usize) -> &'a mut [R] {
    grads.extras.get_mut(extra).filter(|_| n > 0).map(|taps| &mut taps[first..][..n]).unwrap_or_default()
}

/// Calls f with every head of every document: its inputs and shape, batch row and head, dy, and where gradients go.
pub fn backward_heads<R: Real>(
    layer: &Layer,
    whole: &Shape,
    inputs: &Inputs<R>,
    dy: &[R],
    grads: &mut Grads<R>,
    f: impl Fn(&Inputs<R>, &Shape, (usize, usize), &[R], &mut Grads<R>),
) -> Result<(), Error> {
    layer.check(whole, inputs, 1)?;
    layer.check_grads(whole, grads)?;
    whole.check_outputs("gradient of y", dy.len())?;
    layer.check_trainable()?;
    let width = whole.heads * whole.e;
    for (at, shape, inputs) in inputs.each_document(whole) {
        let (dy, mut grads) = (&dy[at.start * width..at.end * width], grads.part(&at, whole));
        for place in (0..shape.batch).flat_map(|b| (0..shape.heads).map(move |h| (b, h))) {
            f(&inputs, &shape, place, dy, &mut grads);
        }
    }
    Ok(())
}
