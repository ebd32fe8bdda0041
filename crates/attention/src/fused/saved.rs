//! Saved sums in memory of the caller, for frameworks whose automatic differentiation stores tensors itself.

use crate::tensors::check_length;
use crate::{Error, Fused, Inputs, Saved};

impl Saved {
    /// The sums of all rows: U [B, H, T, padded e], z and ρ [B, H, T]. Empty if the engine recomputes them.
    pub fn values(&self) -> [&[f32]; 3] {
        [&self.rows.u, &self.rows.z, &self.rows.rho]
    }
}

impl Fused {
    /// The saved sums of a forward pass with these inputs, from its [`Saved::values`]. The pass may be of another engine of the same layer, sizes and
    /// mode.
    pub fn saved_from(&self, inputs: &Inputs<f32>, values: [&[f32]; 3]) -> Result<Saved, Error> {
        let mut saved = self.new_saved()?;
        let rows = &mut saved.rows;
        for ((name, to), from) in [("U", &mut rows.u), ("z", &mut rows.z), ("ρ", &mut rows.rho)].into_iter().zip(values) {
            check_length(format_args!("{name} of a forward pass"), to.len(), from.len())?;
            to.copy_from_slice(from);
        }
        saved.rows.keep_partition(inputs);
        Ok(saved)
    }
}
