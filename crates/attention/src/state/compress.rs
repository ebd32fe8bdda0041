//! From a KV cache to a recurrent state: Σ_s M_ts·K(k_s)·v'_sᵀ over the keys of the cache.

use crate::layer::KeyTransform;
use crate::state::memory::{EnteringKey, GroupMemory, State};
use crate::{Error, Layer, Variant};

impl State {
    /// Compresses every cache into the recurrent state of this layer's variants: the state after stepping them from the start, up to rounding.
    /// Keys and values must be prepared alike, so a variant may differ from the head's current one in its kernel, scale, clamp,
    /// denominator and norm, but not in φ, RoPE, convolution, gates, decay, or in the position weights of keys; nor, with a write rule, in its kernel.
    /// Rejects variants without a finite feature map; the state is then unchanged. Frees the caches.
    pub fn compress(&mut self, layer: &Layer) -> Result<(), Error> {
        let mut compressed = layer.state(self.shape.batch)?;
        if compressed.shape != self.shape || (layer.rotates() && self.layer.rope() != layer.rope()) {
            let reason =
                format!("a state of {:?} cannot become one of {:?}: sizes and rope must be the same", self.shape, compressed.shape);
            return Err(Error::Shape(reason));
        }
        let key_transform =
            |layer: &Layer, head: usize| KeyTransform { write: None, ..layer.key_transforms()[layer.head_plans()[head].key_transform] };
        for (head, (old, new)) in self.heads().iter().zip(layer.heads()).enumerate() {
            let same_transform = key_transform(&self.layer, head) == key_transform(layer, head);
            let reason = match () {
                _ if old.window.is_some() || new.window.is_some() => "the cache of a window does not contain all keys".to_string(),
                _ if !new.near.has_finite_map() => "it has no finite feature map".to_string(),
                _ if !same_transform || !prepared_alike(old, new) => {
                    format!("keys and values were cached for `{old}`, which prepares them differently")
                }
                _ => continue,
            };
            let reason = format!("{reason}, so the cache cannot be compressed into its state");
            return Err(Error::Combination { variant: new.to_string(), reason });
        }
        compressed.steps = self.steps.clone();
        let plan = layer.state_plan(compressed.memory);
        for (index, store) in compressed.groups.iter_mut().enumerate() {
            let (b, place) = (index / plan.groups.len(), index % plan.groups.len());
            let (head, basis) = (plan.groups[place].heads[0], compressed.bases[place].as_deref());
            let (from, index_in_group) = self.plan().group_of[head];
            let before = &self.groups[b * self.plan().groups.len() + from];
            store.key_norm = before.key_norm;
            match (&before.memory, &mut store.memory, basis) {
                (GroupMemory::Cache(cache), GroupMemory::Recurrent { h, z }, Some(basis)) => {
                    let per_key = &cache.per_key[index_in_group];
                    let last = self.steps.log_decay[b * self.shape.heads + head];
                    let (mut key, mut scratch) = (vec![0.0; cache.d], vec![0.0; EnteringKey::scratch_len(basis)]);
                    for s in 0..cache.len {
                        cache.key(s, &mut key);
                        let (weight, decay) = (per_key.weight(s), per_key.decay(s, last));
                        EnteringKey { key: &key, value: cache.value(s), weight, decay }.enter(basis, h, z, &mut scratch);
                    }
                }
                (GroupMemory::Recurrent { h, z }, GroupMemory::Recurrent { h: to, z: to_z }, Some(basis)) => {
                    let same = self.bases[from].as_ref().is_some_and(|old| (old.orders(), old.d()) == (basis.orders(), basis.d()));
                    if !same || (z.is_empty() && !to_z.is_empty()) {
                        let (old, variant) = (&self.heads()[head], layer.heads()[head].to_string());
                        let reason = format!("head {head} already has the recurrent state of `{old}`, which is not that of this variant");
                        return Err(Error::Combination { variant, reason });
                    }
                    to.copy_from_slice(h);
                    let n = to_z.len();
                    to_z.copy_from_slice(&z[..n]);
                }
                _ => unreachable!("all variants have a recurrent state"),
            }
        }
        *self = compressed;
        Ok(())
    }
}

fn prepared_alike(a: &Variant, b: &Variant) -> bool {
    let preparing = |v: &Variant| (v.rope, v.conv, v.qk_norm.clone(), v.denominator.key_side());
    // The written values depend on the kernel with which the write rule reads.
    let written = |v: &Variant| v.write.map(|rule| (rule, v.near.kernel.clone(), v.near.cap, v.near.clamp));
    preparing(a) == preparing(b)
        && written(a) == written(b)
        && a.in_gate == b.in_gate
        && a.out_gate == b.out_gate
        && a.post_gate == b.post_gate
        && a.decay == b.decay
}
