//! The inputs of one token for one state group: prepared rows, kernels, gates and decays.

use crate::layer::{Features, HeadPlan, RowSources, StateGroup};
use crate::parts::write::Delta;
use crate::state::block::{PerKey, Query, QuerySums};
use crate::state::memory::{GroupMemory, GroupState, State};
use crate::{AuxKind, Inputs, Kernel, Layer, Shape};
use termwise_kernels::PAD;
use termwise_kernels::basis::Basis;
use termwise_kernels::real::dot;
use termwise_kernels::score_rows::Rescale;
use termwise_kernels::simd::Simd;

/// n in whole vectors.
pub(crate) fn padded(n: usize) -> usize {
    n.next_multiple_of(PAD)
}

/// Values of prepared keys for near and for far queries; 0 without far queries.
pub(crate) fn widths(layer: &Layer, group: &StateGroup) -> [usize; 2] {
    let width = |key_transform: usize| layer.key_transforms()[key_transform].width;
    [width(group.key_transform), group.far.as_ref().map_or(0, |far| width(far.key_transform))]
}

/// The prepared rows of one token for one state group.
pub(crate) struct TokenRows<'a> {
    /// The key as it is stored: for near queries, then for far queries if the memory stores those values.
    pub key: &'a mut [f32],
    /// [ep]
    pub value: &'a mut [f32],
    /// [heads, width in whole vectors]
    pub queries: &'a mut [f32],
    pub far_queries: &'a mut [f32],
}

impl<'a> TokenRows<'a> {
    /// Prepares position t of a call, or the token with t = 0.
    #[inline(always)]
    pub fn prepare<S: Simd>(&mut self, simd: S, sources: &RowSources, context: &GroupContext, t: usize) {
        let ([near, far], b, group) = (widths(sources.layer, context.group), context.b, context.group);
        let (near_key, far_key) = self.key.split_at_mut(near);
        sources.keys(group.key_transform, b, group.g).forward(simd, t, near_key);
        if let Some(far) = group.far.as_ref().filter(|_| !far_key.is_empty()) {
            sources.keys(far.key_transform, b, group.g).forward(simd, t, far_key);
        }
        sources.values(group.key_transform, b, group.g).forward(simd, t, self.value);
        for (i, &head) in group.heads.iter().enumerate() {
            sources.query(b, head, false).forward(simd, t, &mut self.queries[i * padded(near)..][..padded(near)]);
            if group.far.is_some() {
                sources.query(b, head, true).forward(simd, t, &mut self.far_queries[i * padded(far)..][..padded(far)]);
            }
        }
    }

    /// ‖k‖ of the key for near queries.
    #[inline(always)]
    pub fn key_norm(&self, context: &GroupContext) -> f32 {
        let near = &self.key[..widths(&context.state.layer, context.group)[0]];
        dot(near, near).sqrt()
    }

    /// Values of scratch memory for a group with keys of these widths.
    pub fn len([near, far]: [usize; 2], ep: usize, heads: usize) -> usize {
        padded(near + far) + ep + (padded(near) + padded(far)) * heads
    }

    /// Splits them off the scratch memory; returns the rest.
    pub fn split(context: &GroupContext, state: &GroupState, scratch: &'a mut [f32]) -> (TokenRows<'a>, &'a mut [f32]) {
        let ([near, far], heads) = (widths(&context.state.layer, context.group), context.group.heads.len());
        let stored = match &state.memory {
            GroupMemory::Recurrent { .. } => near,
            GroupMemory::Cache(cache) => cache.d,
            GroupMemory::Ring(ring) => ring.d,
        };
        let (key, scratch) = scratch.split_at_mut(padded(near + far));
        let (value, scratch) = scratch.split_at_mut(padded(context.state.shape.e));
        let (queries, scratch) = scratch.split_at_mut(padded(near) * heads);
        let (far_queries, scratch) = scratch.split_at_mut(padded(far) * heads);
        (TokenRows { key: &mut key[..stored], value, queries, far_queries }, scratch)
    }
}

/// Inputs of a step of one state group of one batch row.
pub(crate) struct GroupContext<'a> {
    pub state: &'a State,
    pub inputs: &'a Inputs<'a, f32>,
    pub b: usize,
    pub group: &'a StateGroup,
    pub basis: Option<&'a Basis>,
}

impl GroupContext<'_> {
    /// The score function of a head for near or far keys.
    pub fn head(&self, head: usize, far: bool) -> &HeadPlan {
        let layer = &self.state.layer;
        layer.far_plans()[head].as_ref().filter(|_| far).unwrap_or(&layer.head_plans()[head])
    }

    /// The kernel of a head for near or far keys, with its learned coefficients.
    pub fn kernel(&self, head: usize, far: bool) -> &Kernel {
        self.state.far_kernels[head].as_ref().filter(|_| far).unwrap_or(&self.state.kernels[head])
    }

    /// a_n if it is learned, otherwise 1: the tables contain it.
    #[inline(always)]
    pub fn coefficient(&self, head: usize, far: bool, order: usize) -> f32 {
        if self.head(head, far).learned > 0 { self.kernel(head, far).coefficient(order) as f32 } else { 1.0 }
    }

    /// The query of a head for near or far keys, before the first block.
    #[inline(always)]
    pub fn query<'b>(&'b self, head: usize, far: bool, q: &'b [f32], u: &'b mut [f32], sums: &'b mut QuerySums) -> Query<'b> {
        let (plan, kernel) = (self.head(head, far), self.kernel(head, far));
        Query { q, kernel, cap: plan.cap, clamp: plan.clamp, rescale: plan.rescale, log_decay: self.log_decay(head), u, sums }
    }

    /// b_h of a sum with a sink.
    pub fn sink(&self, head: usize) -> Option<f32> {
        self.head(head, false).variant.needs(AuxKind::Sink).then(|| self.inputs.aux(AuxKind::Sink)[head])
    }

    /// The sink that near and far sums are joined with: none if the near sums started with it.
    pub fn joined_sink(&self, head: usize) -> Option<f32> {
        self.sink(head).filter(|_| self.head(head, false).rescale != Rescale::SubtractMax)
    }

    /// I_t·κ_t
    pub fn key_weight(&self, head: usize) -> f32 {
        self.state.token.key_weights[self.b * self.state.shape.heads + head]
    }

    /// c_t; 0 if the decay is part of the keys.
    #[inline(always)]
    pub fn log_decay(&self, head: usize) -> f64 {
        if self.decays_by_channel() { 0.0 } else { self.state.steps.log_decay[self.b * self.state.shape.heads + head] }
    }

    /// m_t of a decay per head, 1 otherwise.
    pub fn decay(&self, head: usize) -> f32 {
        let decays = self.head(head, false).variant.decays_by_head();
        if decays { self.state.token.decay[self.b * self.state.shape.heads + head] } else { 1.0 }
    }

    /// Whether keys decay per channel; the group then has one head.
    pub fn decays_by_channel(&self) -> bool {
        self.head(self.group.heads[0], false).variant.decays_by_channel()
    }

    /// m_t of a decay per channel [d].
    pub fn channel_decay(&self) -> &[f32] {
        let Shape { heads, d, .. } = self.state.shape;
        &self.state.token.decay[(self.b * heads + self.group.heads[0]) * d..][..d]
    }

    /// The write rule of the group and β_t.
    pub fn write_rule(&self) -> Option<(Delta, f32)> {
        let rule = self.head(self.group.heads[0], false).variant.write?;
        let logit = self.inputs.aux(AuxKind::Beta)[self.b * self.state.shape.kv_heads + self.group.g];
        Some((rule, rule.beta(logit)))
    }

    /// Stores the weight and c of this token's key for a head.
    pub fn set_per_key(&self, head: usize, at: usize, per_key: &mut PerKey) {
        let plan = self.head(head, false);
        let weight = plan.weighs_keys.then(|| self.key_weight(head));
        per_key.set(at, weight, plan.variant.decays_by_head().then(|| self.log_decay(head)));
    }

    /// The features of far keys, if the group has any.
    pub fn far_features(&self) -> Option<Features<'_>> {
        let transform = self.state.layer.key_transforms()[self.group.far.as_ref()?.key_transform];
        Some(transform.of_keys(self.inputs, self.state.shape.d, self.group.g))
    }
}
