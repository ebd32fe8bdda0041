//! From a cache to moments: Σ_s M_ts·K(k_s)·v'_sᵀ over the keys that are kept.

use crate::kernels::simd::{Simd, Task, dispatch};
use crate::state::memory::{Kind, Memory, State, UnitMemory};
use crate::{Error, Shape, Variant};

impl State {
    /// Turns every cache into the moments of these variants, one for each head: what stepping them from the start would have
    /// left, up to rounding. Keys and values must be prepared alike, so a variant may differ from the head's present one in its
    /// kernel, scale, clamp, denominator and norm, but not in φ, RoPE, convolution, gates, decay, or in weighing keys by their position.
    /// Refuses variants without a finite map; the state is then unchanged. Frees the caches.
    pub fn fold(&mut self, heads: &[Variant]) -> Result<(), Error> {
        let mut folded = State::new(heads, self.shape, Memory::Natural)?;
        for (old, new) in self.heads.iter().zip(heads) {
            let reason = match () {
                _ if new.clamp.is_some() || new.kernel.polynomial().is_none() => "it has no finite map".to_string(),
                _ if !prepared_alike(old, new) => format!("keys and values were kept for `{old}`, which prepares them differently"),
                _ => continue,
            };
            return Err(Error::Combination {
                variant: new.to_string(),
                reason: format!("{reason}, so the cache cannot be folded into it"),
            });
        }
        folded.carry = self.carry.clone();
        let units = folded.units.len();
        for (index, store) in folded.stores.iter_mut().enumerate() {
            let (b, unit) = (index / units, &folded.units[index % units]);
            let head = unit.heads[0];
            let (from, place) = self.unit_of[head];
            let before = &self.stores[b * self.units.len() + from];
            store.key_norm = before.key_norm;
            match (&before.memory, &mut store.memory, &unit.kind) {
                (UnitMemory::Cache(cache), UnitMemory::Moments { h, z }, Kind::Moments { basis, .. }) => {
                    let column = &cache.columns[place];
                    let last = self.carry.log_decay[b * self.shape.heads + head];
                    let (mut key, mut stem, mut rows) = (vec![0.0; self.shape.d], vec![0.0; basis.stem_rows()], vec![0.0; basis.rows()]);
                    for s in 0..cache.len {
                        cache.key(s, &mut key);
                        let decay = column.decay.get(s).map_or(1.0, |c| (last - c).exp() as f32);
                        let weight = column.weights.get(s).map_or(1.0, |w| *w) * decay;
                        basis.of_one(&key, &mut stem, &mut rows);
                        dispatch(Add { h, z, rows: &rows, value: cache.value(s), weight, decay });
                    }
                }
                (UnitMemory::Moments { h, z }, UnitMemory::Moments { h: to, z: to_z }, Kind::Moments { basis, .. }) => {
                    let kept =
                        self.units[from].basis().is_some_and(|old| old.orders() == basis.orders()) && (to_z.is_empty() || !z.is_empty());
                    if !kept {
                        let variant = &heads[head];
                        let reason =
                            format!("head {head} has moments of `{}` already, which are not those of this variant", self.heads[head]);
                        return Err(Error::Combination { variant: variant.to_string(), reason });
                    }
                    to.copy_from_slice(h);
                    let n = to_z.len();
                    to_z.copy_from_slice(&z[..n]);
                }
                _ => unreachable!("all variants have moments"),
            }
        }
        *self = folded;
        Ok(())
    }

    /// Bytes of the moments that [`State::fold`] would leave: when a cache has grown beyond this, folding saves memory.
    pub fn folded_bytes(heads: &[Variant], shape: Shape) -> Result<usize, Error> {
        Ok(State::new(heads, shape, Memory::Natural)?.bytes())
    }
}

fn prepared_alike(a: &Variant, b: &Variant) -> bool {
    let preparing = |v: &Variant| (v.kernel.map(), v.rope, v.conv, v.denominator.key_side());
    preparing(a) == preparing(b) && a.in_gate == b.in_gate && a.out_gate == b.out_gate && a.post_gate == b.post_gate && a.decay == b.decay
}

/// H += weight·K·vᵀ, z += decay·K.
struct Add<'a> {
    h: &'a mut [f32],
    z: &'a mut [f32],
    rows: &'a [f32],
    value: &'a [f32],
    weight: f32,
    decay: f32,
}

impl Task for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (h, &k) in self.h.chunks_exact_mut(self.value.len()).zip(self.rows) {
            let k = k * self.weight;
            h.iter_mut().zip(self.value).for_each(|(h, &v)| *h += k * v);
        }
        self.z.iter_mut().zip(self.rows).for_each(|(z, &k)| *z += self.decay * k);
    }
}
