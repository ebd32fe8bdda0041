//! One head of one batch row: its prepared inputs, its scores and weights, and the gradients of its inputs.

use crate::epilogue::{Row, RowGrads};
use crate::naive::branch::{Branch, BranchGrads, Score, Tensors};
use crate::naive::gates::{Gates, count};
use crate::naive::head_slice::HeadSlice;
use crate::naive::prepare::{PreparedTensor, Steps};
use crate::naive::{add_to, decay, heavy_hitters};
use crate::parts::quantize::RowFormat;
use crate::{AuxKind, Grads, Inputs, KeyRange, Layer, Real, Rows, Shape, Variant};

/// The inputs of all rows of one head, prepared.
pub(crate) struct Head<'a, R> {
    /// With learned coefficients inserted.
    pub variant: Variant,
    pub query: HeadSlice,
    pub key: HeadSlice,
    shape: Shape,
    pub length: usize,
    pub e: usize,
    q: PreparedTensor<'a, R>,
    k: PreparedTensor<'a, R>,
    pub v: PreparedTensor<'a, R>,
    pub near: Branch<'a, R>,
    pub far: Option<Branch<'a, R>>,
    pub gates: Gates<R>,
    /// c_t of a decay per head.
    pub log_decay: Vec<f64>,
    /// The near keys of each position with heavy hitters; empty if the distance determines them.
    near_keys: Vec<Vec<usize>>,
    inputs: &'a Inputs<'a, R>,
}

impl<'a, R: Real> Head<'a, R> {
    pub fn new(layer: &'a Layer, inputs: &'a Inputs<'a, R>, shape: &Shape, row: usize, head: usize) -> Self {
        let Shape { time, heads, kv_heads, d, e, .. } = *shape;
        let kv_head = head / shape.group();
        let length = inputs.length(row, shape);
        let query = HeadSlice { first: row * time, heads, head, length };
        let key = HeadSlice { first: row * time, heads: kv_heads, head: kv_head, length };

        let mut variant = layer.heads()[head].clone();
        layer.bind(head, KeyRange::Near, inputs, &mut variant.near.kernel);
        if let Some(far) = &mut variant.far {
            layer.bind(head, KeyRange::Far, inputs, &mut far.kernel);
        }
        let prepare = |slice, x, conv, norm| prepared(layer, &layer.heads()[head], inputs, slice, (x, d), (conv, norm));
        let q = prepare(query, inputs.q(), AuxKind::ConvQ, AuxKind::QNorm);
        let mut k = prepare(key, inputs.k(), AuxKind::ConvK, AuxKind::KNorm);
        let steps = Steps { taps: filters(&variant, inputs, key, AuxKind::ConvV, (e, false)), norm: None, rope: None };
        let mut v = PreparedTensor::new(key.read(inputs.v(), e), e, (e, 0), steps);
        quantize_cache(&variant, (&mut k.rotated, d), (&mut v.rotated, e));

        let gates = Gates::new(&variant, inputs, query, key, e);
        let per_channel = variant.decay.as_ref().is_some_and(|decay| decay.by_channel());
        let channels = if per_channel { variant.near.score_dim(d) } else { 1 };
        let decays = decay::log_decays(&variant, inputs, query, channels);
        let (log_decay, channel_decay) = if per_channel { (vec![0.0; length], decays) } else { (decays, Vec::new()) };

        let tensors = Tensors { inputs, query, key };
        let near = Branch::new(tensors, KeyRange::Near, variant.near.clone(), (&q.rotated, &k.rotated, d), channel_decay.clone());
        let far = variant.far.clone().map(|far| Branch::new(tensors, KeyRange::Far, far, (&q.rotated, &k.rotated, d), channel_decay));
        let mut near_keys = Vec::new();
        if let Some(heavy_hitters) = variant.heavy_hitters {
            // Heads with the same KV head and variant share their cache, so the attention of all of them is accumulated.
            let group = kv_head * shape.group()..(kv_head + 1) * shape.group();
            let sharing = group.filter(|&other| layer.heads()[other] == layer.heads()[head]);
            let branches: Vec<Branch<R>> = sharing
                .map(|other| {
                    let query = HeadSlice { head: other, ..query };
                    let q = prepare(query, inputs.q(), AuxKind::ConvQ, AuxKind::QNorm);
                    let near = variant.near.clone();
                    Branch::new(Tensors { query, ..tensors }, KeyRange::Near, near, (&q.rotated, &k.rotated, d), Vec::new())
                })
                .collect();
            near_keys = heavy_hitters::near_keys(&branches, length, variant.distance(), heavy_hitters);
        }
        Head { variant, query, key, shape: *shape, length, e, q, k, v, near, far, gates, log_decay, near_keys, inputs }
    }

    /// c_t − c_s
    pub fn log_decay(&self, t: usize, s: usize) -> R {
        R::of(self.log_decay[t] - self.log_decay[s])
    }

    /// The branch of key s at position t; `None` if the key is not visible.
    fn branch_of_key(&self, t: usize, s: usize) -> Option<&Branch<'a, R>> {
        let near = self.near_keys.get(t).map_or_else(|| self.variant.distance().is_near(t, s), |near| near.contains(&s));
        if near { Some(&self.near) } else { self.far.as_ref() }
    }

    fn branch(&self, range: KeyRange) -> &Branch<'a, R> {
        match range {
            KeyRange::Near => &self.near,
            KeyRange::Far => self.far.as_ref().unwrap_or(&self.near),
        }
    }

    /// The scores of row t, and ρ. The row maximum ρ is subtracted from the argument of exp; for other kernels e^−ρ is part of the factor.
    pub fn scores(&self, t: usize) -> (Vec<Score<R>>, R) {
        let mut scores: Vec<Score<R>> = (0..=t).filter_map(|s| Some(self.branch_of_key(t, s)?.score(t, s, self.log_decay(t, s)))).collect();
        if !self.variant.shifts() {
            scores.iter_mut().for_each(|score| score.factor = score.log.exp());
            return (scores, R::zero());
        }
        let is_exp = |range: KeyRange| self.branch(range).kernel().is_exp();
        let size = |score: &Score<R>| if is_exp(score.range) { score.argument + score.log } else { score.log };
        let rho = scores.iter().map(size).chain(self.sink()).fold(R::neg_infinity(), R::max);
        for score in &mut scores {
            match is_exp(score.range) {
                true => score.argument = score.argument + score.log - rho,
                false => score.factor = (score.log - rho).exp(),
            }
        }
        (scores, rho)
    }

    /// e^−ρ·M_ts·w(x_ts)
    pub fn weight(&self, score: &Score<R>) -> R {
        self.branch(score.range).weight(score)
    }

    /// b_h of a sum with a sink.
    fn sink(&self) -> Option<R> {
        self.variant.denominator.has_sink().then(|| self.inputs.aux(AuxKind::Sink)[self.query.head])
    }

    /// e^{b−ρ}, 0 without a sink.
    fn scaled_sink(&self, rho: R) -> R {
        self.sink().map_or(R::zero(), |b| (b - rho).exp())
    }

    /// The inputs of the epilogue of row t.
    pub fn row(&self, t: usize, z: R, rho: R) -> Row<'_, R> {
        let parameter = |aux| if self.variant.needs(aux) { self.inputs.aux(aux) } else { &[] };
        Row {
            z,
            count: count(&self.variant, t),
            rho,
            out: self.gates.output[t],
            post: self.gates.post_row(t),
            sink: self.scaled_sink(rho),
            weight: parameter(AuxKind::NormWeight),
            bias: parameter(AuxKind::NormBias),
            norm_reads_scale: self.variant.norm_restores_scale(),
        }
    }

    /// Adds the gradients of the epilogue of row t: `posts` [e] are those of a post gate per channel.
    pub fn row_backward(&self, t: usize, rho: R, row: &RowGrads<R>, posts: &[R], g: &mut HeadGrads<R>) {
        g.gates.output[t] = row.out;
        g.sink += row.z * self.scaled_sink(rho);
        match g.gates.per_channel {
            false => g.gates.post[t] = row.post,
            true => g.gates.post[t * posts.len()..][..posts.len()].copy_from_slice(posts),
        }
    }

    /// Adds the gradients of row t through one of its scores, given the gradient of the weight.
    pub fn pair_backward(&self, t: usize, score: &Score<R>, dweight: R, g: &mut HeadGrads<R>) {
        let branch = self.branch(score.range);
        let grads = match branch.range {
            KeyRange::Near => &mut g.near,
            KeyRange::Far => g.far.as_mut().unwrap_or(&mut g.near),
        };
        let log = branch.pair_backward(t, score, dweight, grads).wide();
        g.log_decay[t] += log;
        g.log_decay[score.s] -= log;
    }

    /// Adds the gradients of the inputs, given those of the prepared ones.
    pub fn inputs_backward(&self, mut g: HeadGrads<R>, grads: &mut Grads<R>) {
        let (head, kv_head) = (self.query.head, self.key.head);
        let (mut dq, mut dk) = (vec![R::zero(); self.q.rotated.len()], vec![R::zero(); self.k.rotated.len()]);
        for (branch, g) in std::iter::once((&self.near, &g.near)).chain(self.far.iter().zip(&g.far)) {
            branch.inputs_backward(g, (&self.q.rotated, &mut dq), (&self.k.rotated, &mut dk), grads);
        }
        self.prepare_backward((0, AuxKind::ConvQ, AuxKind::QNorm), &self.q, self.query, dq, grads);
        self.prepare_backward((1, AuxKind::ConvK, AuxKind::KNorm), &self.k, self.key, dk, grads);
        let taps = self.v.steps.taps.len();
        let dv = self.v.backward(std::mem::take(&mut g.v), taps_of(grads, AuxKind::ConvV, kv_head * taps, taps), &mut []);
        self.key.add(&dv, (kv_head * self.e, self.e), 2, grads, &self.shape);

        self.gates.backward(&self.variant, self.inputs, (self.query, self.key), g.gates, grads);
        if self.near.decay.is_empty() {
            decay::backward(&self.variant, self.inputs, self.query, (&g.log_decay, 1), grads);
        } else {
            let mut dc = g.near.decay;
            g.far.iter().flat_map(|far| &far.decay).zip(&mut dc).for_each(|(far, dc)| *dc += far);
            decay::backward(&self.variant, self.inputs, self.query, (&dc, self.near.q.width), grads);
        }
        if self.variant.denominator.has_sink() {
            add_to(grads, AuxKind::Sink, head, &[g.sink]);
        }
        add_to(grads, AuxKind::NormWeight, 0, &g.norm_weight);
        add_to(grads, AuxKind::NormBias, 0, &g.norm_bias);
    }

    /// Adds the gradient of q (`which` 0) or k (1), of its filters and of its norm weights, given that after RoPE.
    fn prepare_backward(
        &self,
        (which, conv, norm): (usize, AuxKind, AuxKind),
        x: &PreparedTensor<R>,
        slice: HeadSlice,
        gradient: Vec<R>,
        grads: &mut Grads<R>,
    ) {
        let over_heads = norm_over_heads(&self.variant);
        let taps = x.steps.taps.len();
        let first_tap = if over_heads { 0 } else { slice.head * taps };
        let mut dnorm = vec![R::zero(); if self.variant.needs(norm) { self.inputs.aux(norm).len() } else { 0 }];
        let gradient = x.backward(gradient, taps_of(grads, conv, first_tap, taps), &mut dnorm);
        let first = if over_heads { 0 } else { slice.head * x.width };
        slice.add(&gradient, (first, x.width), which, grads, &self.shape);
        add_to(grads, norm, 0, &dnorm);
    }
}

/// q or k [B, T, heads, d] of a head after convolution, norm and RoPE.
fn prepared<'a, R: Real>(
    layer: &'a Layer,
    variant: &'a Variant,
    inputs: &'a Inputs<'a, R>,
    slice: HeadSlice,
    (x, d): (Rows<'a, R>, usize),
    (conv, norm): (AuxKind, AuxKind),
) -> PreparedTensor<'a, R> {
    let over_heads = norm_over_heads(variant);
    let norm = variant.qk_norm.as_ref().map(|part| (part, if part.has_weight() { inputs.aux(norm) } else { &[][..] }));
    let taps = filters(variant, inputs, slice, conv, (d, over_heads));
    let steps = Steps { taps, norm, rope: layer.rope().filter(|_| variant.rope) };
    match over_heads {
        true => PreparedTensor::new(slice.read_all(x, d), d, (slice.heads * d, slice.head * d), steps),
        false => PreparedTensor::new(slice.read(x, d), d, (d, 0), steps),
    }
}

/// Whether q and k are normalized over all heads together.
fn norm_over_heads(variant: &Variant) -> bool {
    variant.qk_norm.as_ref().is_some_and(|norm| norm.over_heads())
}

/// The convolution filters of a head, or of all heads; empty without a convolution.
fn filters<'a, R: Real>(
    variant: &Variant,
    inputs: &'a Inputs<'a, R>,
    slice: HeadSlice,
    aux: AuxKind,
    (dim, all): (usize, bool),
) -> &'a [R] {
    match variant.conv {
        Some(width) if all => &inputs.aux(aux)[..slice.heads * dim * width],
        Some(width) => &inputs.aux(aux)[slice.head * dim * width..][..dim * width],
        None => &[],
    }
}

/// Rounds keys and values to those that a quantized KV cache restores.
fn quantize_cache<R: Real>(variant: &Variant, (k, d): (&mut [R], usize), (v, e): (&mut [R], usize)) {
    let Some(bits) = variant.bits else { return };
    let sinks = variant.sinks.unwrap_or(0);
    let round = |rows: &mut [R], dim: usize, format: &dyn Fn(bool) -> RowFormat| {
        for (t, row) in rows.chunks_exact_mut(dim).enumerate() {
            let mut rounded: Vec<f32> = row.iter().map(|x| x.wide() as f32).collect();
            format(t < sinks).round_in_basis(&mut rounded);
            row.iter_mut().zip(&rounded).for_each(|(x, &rounded)| *x = R::of(f64::from(rounded)));
        }
    };
    round(k, d, &|sink| bits.key_format(sink));
    round(v, e, &|sink| bits.value_format(sink));
}

/// The gradient of n filter taps from `first` on; empty if there are none.
fn taps_of<'a, R>(grads: &'a mut Grads<R>, aux: AuxKind, first: usize, n: usize) -> &'a mut [R] {
    grads.aux_tensors.get_mut(aux).filter(|_| n > 0).map(|taps| &mut taps[first..][..n]).unwrap_or_default()
}

/// Gradients of the prepared inputs of a head.
pub(crate) struct HeadGrads<R> {
    pub near: BranchGrads<R>,
    pub far: Option<BranchGrads<R>>,
    /// Of prepared values, [length, e].
    pub v: Vec<R>,
    pub gates: Gates<R>,
    /// Of c_t of a decay per head.
    pub log_decay: Vec<f64>,
    /// Of b_h.
    pub sink: R,
    /// Of γ.
    pub norm_weight: Vec<R>,
    /// Of the bias of the norm.
    pub norm_bias: Vec<R>,
}

impl<R: Real> HeadGrads<R> {
    /// All zero.
    pub fn new(head: &Head<R>) -> Self {
        let zeros = |n: usize| vec![R::zero(); n];
        HeadGrads {
            near: BranchGrads::new(&head.near),
            far: head.far.as_ref().map(BranchGrads::new),
            v: zeros(head.length * head.e),
            gates: head.gates.zeros(),
            log_decay: vec![0.0; head.length],
            sink: R::zero(),
            norm_weight: zeros(head.variant.norm.has_weight() as usize * head.e),
            norm_bias: zeros(head.variant.norm.has_bias() as usize * head.e),
        }
    }
}
