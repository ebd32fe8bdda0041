//! Gradients through a state: back-propagation through time over calls that continue each other.

use rayon::prelude::*;

use crate::buffer::resize;
use crate::engine::SavedRows;
use crate::fused::plan::Layout;
use crate::fused::scratch::SumGrads;
use crate::fused::{Fused, Planned, Through, backward_tasks, prefill};
use crate::kernels::disjoint::Blocks;
use crate::state::State;
use crate::{Buffer, Error, Grads, Inputs, Saved};

/// The gradient of a loss with respect to a [`State`], of all batch rows: its moments, the inputs that a short convolution keeps, and the running sums of
/// cumulative gates and linear decays.
#[derive(Clone, Debug)]
pub struct StateGrads {
    /// Of the moments [B, G, state_len].
    values: Buffer,
    /// Of a kv head of a batch row.
    state_len: usize,
    /// Of the inputs of q, k and v that filters still reach, [B, heads, w − 1, dimension].
    tails: [Buffer; 3],
    /// Of running sums [B, H], where there are gates.
    sums: Vec<SumGrads>,
}

impl StateGrads {
    /// Sets all to zero: nothing flows further back.
    pub fn clear(&mut self) {
        self.values.fill(0.0);
        self.tails.iter_mut().for_each(|tail| tail.fill(0.0));
        self.sums.fill(SumGrads::default());
    }

    /// Those of the moments; where moments do not reach, zero.
    pub fn values(&self) -> &[f32] {
        &self.values
    }
}

impl Fused {
    /// A gradient of zero with respect to a state, to start [`Fused::backward_from`] with at the last call.
    pub fn state_grads(&self) -> Result<StateGrads, Error> {
        let l = &self.whole.layout;
        check(l)?;
        let (s, kept) = (l.shape, l.taps.saturating_sub(1));
        let mut tails = [(); 3].map(|()| Buffer::default());
        tails.iter_mut().zip(s.widths()).try_for_each(|(tail, channels)| tail.ensure(s.batch * channels * kept))?;
        let mut sums = Vec::new();
        resize(&mut sums, l.has_gates() as usize * l.head_count())?;
        let mut grads = StateGrads { values: Buffer::zeros(s.batch * s.kv_heads * l.state_len)?, state_len: l.state_len, tails, sums };
        grads.clear();
        Ok(grads)
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
        let tails = s.widths().map(|channels| s.batch * channels * layout.taps.saturating_sub(1));
        let sums = layout.has_gates() as usize * layout.head_count();
        let rest = (state.state_len, state.tails.each_ref().map(|tail| tail.len()), state.sums.len());
        if state.values.len() != expected || rest != (layout.state_len, tails, sums) {
            let found = state.values.len();
            return Err(Error::Tensor { tensor: "gradient of the state".into(), expected, found });
        }
        layout.bind(inputs, factors);
        let SavedRows { u, z, rho, .. } = &saved.rows;
        let (l, saved) = (&*layout, [&u[..], &z[..], &rho[..]]);
        scratch.with(|w| {
            w.ensure_forward(l)?;
            prefill::begin(l, before, w)?;
            w.ensure_backward(l)?;
            w.through.copy_from_slice(&state.sums);
            backward_tasks(l, inputs, w, factors, saved, dy, Through { moments: Some(&mut state.values), walked: None }, grads)?;
            state.sums.copy_from_slice(&w.through);
            tails_backward(l, inputs, &mut state.tails, &mut w.dtails, grads);
            Ok(())
        })
    }
}

/// Of the inputs that the state keeps for filters after the call: those of the call have their gradients in `grads`, and those from before it, where the
/// call is shorter than the filters, in `before`, which takes the place of `after`.
fn tails_backward(l: &Layout, inputs: &Inputs<f32>, after: &mut [Buffer; 3], before: &mut [Buffer; 3], grads: &mut Grads<f32>) {
    let (s, kept) = (l.shape, l.taps.saturating_sub(1));
    if kept == 0 {
        return;
    }
    let sizes = [(s.heads, s.d), (s.kv_heads, s.d), (s.kv_heads, s.e)];
    for (((after, before), to), (heads, dim)) in after.iter_mut().zip(before).zip(grads.columns(&s)).zip(sizes) {
        let whole = [0, s.time];
        let places = to.blocks(1, &whole).par().zip(Blocks::pieces(before, s.batch * heads).par());
        places.zip(after.par_chunks_exact(kept * dim)).enumerate().for_each(|(n, ((mut to, mut before), after))| {
            let len = inputs.length(n / heads, &s);
            for (i, from) in after.chunks_exact(dim).enumerate() {
                let to = match (len + i).checked_sub(kept) {
                    Some(t) => to.row(0, t),
                    None => &mut before.piece()[(len + i) * dim..][..dim],
                };
                to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            }
        });
        std::mem::swap(after, before);
    }
}

/// Refuses what else a state carries that depends on earlier inputs.
fn check(l: &Layout) -> Result<(), Error> {
    for head in &l.heads {
        let reason = if l.classes[head.class].running.is_some() {
            "gradients do not flow through the mean of the keys so far"
        } else if !head.chunked {
            "its state is a cache, not moments: build the engine with `FusedOptions::continues` and a variant with a finite state"
        } else {
            continue;
        };
        return Err(Error::Combination { variant: head.variant.to_string(), reason: reason.into() });
    }
    Ok(())
}
