//! State groups: heads that share a recurrent state or a KV cache.
//!
//! If the kernel is a polynomial of the score, past keys are a recurrent state of constant size,
//!
//! ```text
//! H = Σ_s e^{c − c_s} · K(k_s) (κ_s·v_s)ᵀ  [N, e]        z = Σ_s e^{c − c_s} · K(k_s)  [N]
//! ```
//!
//! otherwise a KV cache, with a window a ring buffer. Kernels, scales and coefficients act on the query's side, so heads of one kv head share a
//! recurrent state if their keys have the same preparation and orders, and no head has its own decay or key weights.

use crate::parts::distance::Distance;
use crate::parts::heavy_hitters::HeavyHitters;
use crate::parts::quantize::CacheBits;
use crate::{ScoreFn, Shape, Variant};

/// The kind of memory for past keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// A recurrent state if the kernel has a finite feature map and no clamp, otherwise a cache.
    Auto,
    /// A cache for every head.
    Cache,
}

/// The layout of a windowed KV cache: sinks, a ring of the last keys, heavy hitters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CacheLayout {
    pub distance: Distance,
    /// Whether keys are rows after RoPE, without weights or decays per key.
    pub plain: bool,
    pub heavy_hitters: Option<HeavyHitters>,
    /// Bits of stored keys and values; `None` for float32.
    pub bits: Option<CacheBits>,
}

impl CacheLayout {
    /// `None` without a window, or if far keys are in the cache.
    pub fn of(variant: &Variant) -> Option<CacheLayout> {
        let finite = variant.far.as_ref().is_none_or(ScoreFn::has_finite_map);
        (variant.window.is_some() && finite).then(|| CacheLayout {
            distance: variant.distance(),
            plain: variant.is_pooled(),
            heavy_hitters: variant.heavy_hitters,
            bits: variant.bits,
        })
    }

    /// S + W + N
    pub fn slots(self) -> usize {
        let heavy_hitters = self.heavy_hitters.map_or(0, |heavy_hitters| heavy_hitters.keys);
        self.distance.sinks.saturating_add(self.distance.window).saturating_add(heavy_hitters)
    }
}

/// Heads of one kv head that share a state or a cache.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StateGroup {
    /// The kv head.
    pub g: usize,
    /// The query heads that read it.
    pub heads: Vec<usize>,
    /// Index of the transform of its keys.
    pub key_transform: usize,
    /// The content of its recurrent state; `None` for a cache.
    pub recurrent: Option<RecurrentSpec>,
    /// The keys of its cache.
    pub distance: Distance,
    /// In addition to a cache: the keys that have left its window.
    pub far: Option<Far>,
    /// The layout of its windowed cache; `None` for a cache of all keys and for a recurrent state.
    pub layout: Option<CacheLayout>,
}

/// The memory of far keys.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Far {
    /// Index of their transform.
    pub key_transform: usize,
    /// The content of their recurrent state; `None` if they are in the cache.
    pub recurrent: Option<RecurrentSpec>,
}

impl StateGroup {
    /// Its recurrent state, of all keys or of far keys, and the index of their transform.
    pub fn remembered(&self) -> Option<(usize, &RecurrentSpec)> {
        match (&self.recurrent, &self.far) {
            (Some(recurrent), _) => Some((self.key_transform, recurrent)),
            (None, Some(Far { key_transform, recurrent: Some(recurrent) })) => Some((*key_transform, recurrent)),
            _ => None,
        }
    }
}

/// The content of a recurrent state H, z.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RecurrentSpec {
    /// Orders of its monomials, ascending.
    pub orders: Vec<usize>,
    /// Whether it has z, for a denominator that sums.
    pub sums: bool,
    /// Whether keys have weights, the same for all heads of the group.
    pub weighs_keys: bool,
    /// Whether it decays, per head or per channel; its group then has one head.
    pub decays: bool,
    pub channels: bool,
    /// Whether each head has its own key weights; its group then has one head.
    pub own_weights: bool,
}

impl RecurrentSpec {
    /// The recurrent state of a variant whose kernel, or far kernel, has a finite feature map.
    fn of(variant: &Variant) -> Option<RecurrentSpec> {
        let score_fn = variant.remembered()?;
        let polynomial = score_fn.kernel.polynomial().filter(|_| score_fn.has_finite_map())?;
        Some(RecurrentSpec {
            orders: polynomial.into_iter().map(|(n, _)| n).collect(),
            sums: variant.denominator.sums(),
            weighs_keys: variant.in_gate.is_some() || variant.denominator.key_side(),
            decays: variant.decays_by_head(),
            channels: variant.decays_by_channel(),
            own_weights: variant.denominator.key_side(),
        })
    }

    /// Whether several heads can share it.
    fn can_be_shared(&self) -> bool {
        !self.decays && !self.channels && !self.own_weights
    }
}

/// The state groups of a layer.
#[derive(Clone, Debug)]
pub(crate) struct StatePlan {
    pub groups: Vec<StateGroup>,
    /// For each head: its group, and its index among the heads of that group.
    pub group_of: Vec<(usize, usize)>,
}

impl StatePlan {
    /// The state groups of all heads, whose near and far keys have these key transforms.
    pub fn new(heads: &[Variant], key_transforms: &[(usize, Option<usize>)], shape: &Shape, memory: StateKind) -> StatePlan {
        let mut groups: Vec<StateGroup> = Vec::new();
        let mut group_of = Vec::with_capacity(heads.len());
        for (h, (variant, &(key_transform, far))) in heads.iter().zip(key_transforms).enumerate() {
            let (g, state) =
                (h / shape.group(), if memory == StateKind::Auto || variant.is_sequential() { RecurrentSpec::of(variant) } else { None });
            let shared = state.as_ref().is_none_or(RecurrentSpec::can_be_shared);
            // Far keys without a recurrent state are in the cache.
            let distance = if far.is_some() && state.is_none() { Distance::ALL } else { variant.distance() };
            let (recurrent, far) = match far {
                Some(key_transform) => (None, Some(Far { key_transform, recurrent: state })),
                None => (state, None),
            };
            let keeps_far = far.as_ref().is_some_and(|far| far.recurrent.is_none());
            let layout = if keeps_far { None } else { CacheLayout::of(variant) };
            let group = StateGroup { g, heads: Vec::new(), key_transform, recurrent, distance, far, layout };
            let known = groups.iter().position(|other| shared && group == StateGroup { heads: Vec::new(), ..other.clone() });
            let index = known.unwrap_or(groups.len());
            if known.is_none() {
                groups.push(group);
            }
            group_of.push((index, groups[index].heads.len()));
            groups[index].heads.push(h);
        }
        StatePlan { groups, group_of }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layer, Rope};

    fn groups(texts: [&str; 4], memory: StateKind) -> Vec<Vec<usize>> {
        let rope = Rope::new(4, 100.0, None).expect("a rope");
        let layer = Layer::new(4, 2, 4).rope(rope).heads(texts).unwrap_or_else(|error| panic!("{error}"));
        layer.state_plan(memory).groups.iter().map(|group| group.heads.clone()).collect()
    }

    #[test]
    fn heads_with_equal_content_share_a_state() {
        let natural = |texts| groups(texts, StateKind::Auto);
        assert_eq!(natural(["taylor=0..2"; 4]), [vec![0, 1], vec![2, 3]]);
        // Scales, coefficients and the kind of polynomial act on the query's side.
        assert_eq!(natural(["taylor=0..2", "taylor=0..2,coef=1:2:3 scale=2", "taylor=2", "power=2"]), [vec![0, 1], vec![2, 3]]);
        for other in ["taylor=0..3", "taylor=0..2 over=length", "taylor=0..2 in", "taylor=0..2 rope=off", "taylor=0..2 conv=2", "softmax"] {
            assert_eq!(natural(["taylor=0..2", other, "taylor=0..2", "taylor=0..2"]), [vec![0], vec![1], vec![2, 3]], "{other}");
        }
        for own in ["taylor=0..2 decay=softplus", "taylor=1 over=position"] {
            assert_eq!(natural([own; 4]), [vec![0], vec![1], vec![2], vec![3]], "{own}");
        }
        assert_eq!(natural(["softmax", "exp clamp=2 decay=linear", "taylor=0..2 clamp=3", "exp over=position"]), [vec![0, 1], vec![2, 3]]);
        assert_eq!(groups(["taylor=0..2", "softmax", "taylor=0..2", "exp rope=off"], StateKind::Cache), [vec![0, 1], vec![2], vec![3]]);
    }
}
