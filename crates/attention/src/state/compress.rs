//! From a cache to moments: Σ_s M_ts·K(k_s)·v'_sᵀ over the keys that are kept.

use crate::kernels::simd::dispatch;
use crate::layer::Class;
use crate::state::memory::{Add, GroupMemory, State};
use crate::{Error, Layer, Variant};

impl State {
    /// Compresses every cache into the moments of this layer's variants: what stepping them from the start would have left, up to rounding.
    /// Keys and values must be prepared alike, so a variant may differ from the head's present one in its kernel, scale, clamp,
    /// denominator and norm, but not in φ, RoPE, convolution, gates, decay, or in weighing keys by their position; nor, with a write rule, in its kernel.
    /// Refuses variants without a finite map; the state is then unchanged. Frees the caches.
    pub fn compress(&mut self, layer: &Layer) -> Result<(), Error> {
        let mut compressed = layer.state(self.shape.batch)?;
        if compressed.shape != self.shape || (layer.rotates() && self.layer.rope() != layer.rope()) {
            let reason =
                format!("a state of {:?} cannot become one of {:?}: sizes and rope must be the same", self.shape, compressed.shape);
            return Err(Error::Shape(reason));
        }
        let class = |layer: &Layer, head: usize| Class { write: None, ..layer.classes()[layer.head_plans()[head].class] };
        for (head, (old, new)) in self.heads().iter().zip(layer.heads()).enumerate() {
            let same_class = class(&self.layer, head) == class(layer, head);
            let reason = match () {
                _ if old.window.is_some() || new.window.is_some() => "a window keeps its own keys, and forgets others".to_string(),
                _ if !new.near().has_finite_map() => "it has no finite map".to_string(),
                _ if !same_class || !prepared_alike(old, new) => {
                    format!("keys and values were kept for `{old}`, which prepares them differently")
                }
                _ => continue,
            };
            let reason = format!("{reason}, so the cache cannot be compressed into its state");
            return Err(Error::Combination { variant: new.to_string(), reason });
        }
        compressed.steps = self.steps.clone();
        let plan = layer.state_plan(compressed.memory);
        for (index, store) in compressed.stores.iter_mut().enumerate() {
            let (b, place) = (index / plan.groups.len(), index % plan.groups.len());
            let (head, basis) = (plan.groups[place].heads[0], compressed.bases[place].as_deref());
            let (from, column) = self.plan().group_of[head];
            let before = &self.stores[b * self.plan().groups.len() + from];
            store.key_norm = before.key_norm;
            match (&before.memory, &mut store.memory, basis) {
                (GroupMemory::Cache(cache), GroupMemory::Moments { h, z }, Some(basis)) => {
                    let column = &cache.columns[column];
                    let last = self.steps.log_decay[b * self.shape.heads + head];
                    let (mut key, mut lower_orders, mut rows) =
                        (vec![0.0; cache.d], vec![0.0; basis.lower_order_rows()], vec![0.0; basis.rows()]);
                    for s in 0..cache.len {
                        cache.key(s, &mut key);
                        let decay = column.decay.get(s).map_or(1.0, |c| (last - c).exp() as f32);
                        let weight = column.weights.get(s).map_or(1.0, |w| *w) * decay;
                        basis.of_one(&key, &mut lower_orders, &mut rows);
                        dispatch(Add { h, z, rows: &rows, value: cache.value(s), weight, decay });
                    }
                }
                (GroupMemory::Moments { h, z }, GroupMemory::Moments { h: to, z: to_z }, Some(basis)) => {
                    let same = self.bases[from].as_ref().is_some_and(|old| (old.orders(), old.d()) == (basis.orders(), basis.d()));
                    if !same || (z.is_empty() && !to_z.is_empty()) {
                        let (old, variant) = (&self.heads()[head], layer.heads()[head].to_string());
                        let reason = format!("head {head} has moments of `{old}` already, which are not those of this variant");
                        return Err(Error::Combination { variant, reason });
                    }
                    to.copy_from_slice(h);
                    let n = to_z.len();
                    to_z.copy_from_slice(&z[..n]);
                }
                _ => unreachable!("all variants have moments"),
            }
        }
        *self = compressed;
        Ok(())
    }
}

fn prepared_alike(a: &Variant, b: &Variant) -> bool {
    let preparing = |v: &Variant| (v.rope, v.conv, v.qk_norm.clone(), v.denominator.key_side());
    // What a write rule has written depends on the kernel by which it read.
    let written = |v: &Variant| v.write.map(|rule| (rule, v.kernel.clone(), v.cap, v.clamp));
    preparing(a) == preparing(b)
        && written(a) == written(b)
        && a.in_gate == b.in_gate
        && a.out_gate == b.out_gate
        && a.post_gate == b.post_gate
        && a.decay == b.decay
}
