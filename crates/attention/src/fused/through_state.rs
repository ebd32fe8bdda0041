//! Gradients through a state: back-propagation through time over calls that continue each other.

use crate::engine::SavedRows;
use crate::fused::plan::Layout;
use crate::fused::{Fused, Planned, backward_tasks, prefill};
use crate::parts::gate::OutGate;
use crate::state::State;
use crate::{Buffer, Decay, Error, Grads, Inputs, Saved};

/// The gradient of a loss with respect to the moments of a [`State`], of all batch rows and groups.
#[derive(Clone, Debug)]
pub struct StateGrads {
    /// [B, G, state_len]
    values: Buffer,
    /// Of a kv head of a batch row.
    state_len: usize,
}

impl StateGrads {
    /// Sets all to zero: nothing flows further back.
    pub fn clear(&mut self) {
        self.values.fill(0.0);
    }

    /// All values; where moments do not reach, zero.
    pub fn values(&self) -> &[f32] {
        &self.values
    }
}

impl Fused {
    /// A gradient of zero with respect to a state, to start [`Fused::backward_from`] with at the last call.
    pub fn state_grads(&self) -> Result<StateGrads, Error> {
        let l = &self.whole.layout;
        check(l)?;
        Ok(StateGrads { values: Buffer::zeros(l.shape.batch * l.shape.kv_heads * l.state_len)?, state_len: l.state_len })
    }

    /// As [`Fused::extend`], and keeps what [`Fused::backward_from`] needs.
    pub fn forward_from(&mut self, state: &mut State, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Saved, Error> {
        check(&self.whole.layout)?;
        let mut saved = self.new_saved()?;
        saved.report = self.continue_from(state, inputs, Some(&mut saved.rows), y)?;
        saved.rows.keep_partition(inputs);
        Ok(saved)
    }

    /// Adds the gradients of Σ y·dy to `grads`, where `before` is the state that [`Fused::forward_from`] began with. `state` holds the gradient
    /// with respect to the state after the call, and is turned into that with respect to `before`: given to the call before, it continues
    /// back-propagation through time, and cleared it truncates it.
    pub fn backward_from(
        &mut self,
        before: &State,
        inputs: &Inputs<f32>,
        saved: &Saved,
        dy: &[f32],
        state: &mut StateGrads,
        grads: &mut Grads<f32>,
    ) -> Result<(), Error> {
        self.home.check(saved)?;
        saved.rows.check_partition(inputs)?;
        check(&self.whole.layout)?;
        self.check_state(before, inputs)?;
        let Fused { whole: Planned { layout, factors, .. }, scratch, .. } = self;
        let s = layout.shape;
        layout.layer.check_grads(&s, grads)?;
        s.check_outputs("gradient of y", dy.len())?;
        let expected = s.batch * s.kv_heads * layout.state_len;
        if (state.values.len(), state.state_len) != (expected, layout.state_len) {
            let found = state.values.len();
            return Err(Error::Tensor { tensor: "gradient of the state".into(), expected, found });
        }
        layout.bind(inputs, factors);
        let SavedRows { u, z, rho, .. } = &saved.rows;
        let (l, saved) = (&*layout, [&u[..], &z[..], &rho[..]]);
        scratch.with(|w| {
            w.ensure_forward(l)?;
            w.ensure_backward(l)?;
            prefill::begin(l, before, w)?;
            backward_tasks(l, inputs, w, factors, saved, dy, Some(&mut state.values), grads)
        })
    }
}

/// Refuses what else a state carries that depends on earlier inputs.
fn check(l: &Layout) -> Result<(), Error> {
    for head in &l.heads {
        let variant = &head.variant;
        let reason = if l.classes[head.class].running.is_some() {
            "gradients do not flow through the mean of the keys so far"
        } else if !head.chunked {
            "its state is a cache, not moments: build the engine with `FusedOptions::continues` and a variant with a finite state"
        } else if variant.conv.is_some() {
            "gradients do not flow through the inputs that a short convolution keeps"
        } else if matches!(variant.out_gate, Some(OutGate::Cumulative(_))) {
            "gradients do not flow through the running sum of a cumulative gate"
        } else if matches!(variant.decay, Some(Decay::LinearDecay(_))) {
            "gradients do not flow through the running sum of a linear decay"
        } else if variant.decays_by_channel() {
            "gradients do not flow through the state of a decay by channel"
        } else {
            continue;
        };
        return Err(Error::Combination { variant: variant.to_string(), reason: reason.into() });
    }
    Ok(())
}
