//! State groups: heads that can share what is kept of past keys.
//!
//! Where the kernel is a polynomial of the score, the past is a state of constant size,
//!
//! ```text
//! H = Σ_s e^{c − c_s} · K(k_s) (κ_s·v_s)ᵀ  [N, e]        z = Σ_s e^{c − c_s} · K(k_s)  [N]
//! ```
//!
//! elsewhere it is a cache of keys and values. Kernels, scales and coefficients act on the query's side, so heads of one kv head share
//! a state where keys are prepared alike, the orders are the same, and none has a decay or a weight of its own for each key.

use crate::parts::chosen::Chosen;
use crate::parts::distance::Distance;
use crate::{Shape, Variant};

/// What a layer may keep of past keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// A state of constant size where the kernel has a finite map and no clamp, a cache elsewhere.
    Natural,
    /// A cache of keys and values everywhere.
    Cache,
}

/// How the exact keys of a variant are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Places {
    pub distance: Distance,
    pub chosen: Option<Chosen>,
    pub bits: Option<u32>,
}

impl Places {
    /// `None` where the variant's exact keys have no memory of a fixed size.
    pub fn of(variant: &Variant) -> Option<Places> {
        variant.is_pooled().then(|| Places { distance: variant.distance(), chosen: variant.chosen, bits: variant.bits })
    }

    /// S + W + N
    pub fn count(self) -> usize {
        self.distance.sinks.saturating_add(self.distance.window).saturating_add(self.chosen.map_or(0, |chosen| chosen.keys))
    }
}

/// Heads of one kv head that share a state or a cache.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StateGroup {
    /// The kv head.
    pub g: usize,
    /// The query heads that read it.
    pub heads: Vec<usize>,
    /// Index of the way in which its keys are prepared.
    pub class: usize,
    /// What the state is made of; `None` for a cache.
    pub moments: Option<Moments>,
    /// Which keys a cache holds.
    pub distance: Distance,
    /// Beside a cache: what keys become when they leave its window.
    pub far: Option<Far>,
    /// How exact keys are kept, where that takes memory of a fixed size; in a cache elsewhere.
    pub places: Option<Places>,
}

/// How far keys are kept.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Far {
    /// Index of the way in which they are prepared.
    pub class: usize,
    /// Of what their state is made; `None` where they stay in the cache.
    pub moments: Option<Moments>,
}

impl StateGroup {
    /// The state of constant size that it has, of all keys or of far keys, and how these are prepared.
    pub fn remembered(&self) -> Option<(usize, &Moments)> {
        match (&self.moments, &self.far) {
            (Some(moments), _) => Some((self.class, moments)),
            (None, Some(Far { class, moments: Some(moments) })) => Some((*class, moments)),
            _ => None,
        }
    }
}

/// The content of a state H, z.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Moments {
    /// Orders of its monomials, ascending.
    pub orders: Vec<usize>,
    /// Whether there is a z, for a denominator that sums.
    pub sums: bool,
    /// Whether keys have weights, the same for all heads of the group.
    pub weighs_keys: bool,
    /// Whether it decays, all rows alike or by channel; its group then has one head.
    pub decays: bool,
    pub channels: bool,
    /// Whether the weights of keys are of one head alone; its group then has one head.
    pub own_weights: bool,
}

impl Moments {
    /// The state of the keys that a variant remembers by a finite map.
    fn of(variant: &Variant) -> Option<Moments> {
        let weighing = variant.remembered()?;
        let polynomial = weighing.kernel.polynomial().filter(|_| weighing.has_finite_map())?;
        Some(Moments {
            orders: polynomial.into_iter().map(|(n, _)| n).collect(),
            sums: variant.denominator.sums(),
            weighs_keys: variant.in_gate.is_some() || variant.denominator.key_side(),
            decays: variant.decays_by_head(),
            channels: variant.decays_by_channel(),
            own_weights: variant.denominator.key_side(),
        })
    }

    /// Whether another head can have the same.
    fn can_be_shared(&self) -> bool {
        !self.decays && !self.channels && !self.own_weights
    }
}

/// The state groups of a layer.
#[derive(Clone, Debug)]
pub(crate) struct StatePlan {
    pub groups: Vec<StateGroup>,
    /// Of each head: its group, and its place among the heads of that group.
    pub group_of: Vec<(usize, usize)>,
}

impl StatePlan {
    /// The one plan of state groups: of all heads, whose near and far keys are prepared by these classes.
    pub fn new(heads: &[Variant], classes: &[(usize, Option<usize>)], shape: &Shape, memory: Memory) -> StatePlan {
        let mut groups: Vec<StateGroup> = Vec::new();
        let mut group_of = Vec::with_capacity(heads.len());
        for (h, (variant, &(class, far))) in heads.iter().zip(classes).enumerate() {
            let (g, state) =
                (h / shape.group(), if memory == Memory::Natural || variant.is_walked() { Moments::of(variant) } else { None });
            let shared = state.as_ref().is_none_or(Moments::can_be_shared);
            // Far keys that stay keys are never forgotten.
            let distance = if far.is_some() && state.is_none() { Distance::ALL } else { variant.distance() };
            let (moments, far) = match far {
                Some(class) => (None, Some(Far { class, moments: state })),
                None => (state, None),
            };
            let keeps_far = far.as_ref().is_some_and(|far| far.moments.is_none());
            let places = if keeps_far { None } else { Places::of(variant) };
            let group = StateGroup { g, heads: Vec::new(), class, moments, distance, far, places };
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

    fn groups(texts: [&str; 4], memory: Memory) -> Vec<Vec<usize>> {
        let rope = Rope::new(4, 100.0, None).expect("a rope");
        let layer = Layer::new(4, 2, 4).rope(rope).heads(texts).unwrap_or_else(|error| panic!("{error}"));
        layer.state_plan(memory).groups.iter().map(|group| group.heads.clone()).collect()
    }

    #[test]
    fn heads_share_what_has_the_same_content() {
        let natural = |texts| groups(texts, Memory::Natural);
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
        assert_eq!(groups(["taylor=0..2", "softmax", "taylor=0..2", "exp rope=off"], Memory::Cache), [vec![0, 1], vec![2], vec![3]]);
    }
}
