//! What a forward pass leaves, in memory of the caller: for those whose automatic differentiation keeps tensors itself.

use crate::tensors::check_length;
use crate::{Error, Fused, Inputs, Saved};

impl Saved {
    /// The sums of all rows, U [B, H, T, e in whole vectors], z and ρ [B, H, T]; empty where an engine computes them anew.
    pub fn values(&self) -> [&[f32]; 3] {
        [&self.rows.u, &self.rows.z, &self.rows.rho]
    }
}

impl Fused {
    /// What a forward pass with these inputs left, from its [`Saved::values`]: of this engine, or of another of the same layer, sizes and mode.
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
