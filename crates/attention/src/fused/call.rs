//! The read-only context of one call: plan, inputs, and the state that the call continues from.

use crate::fused::heap_bytes::scratch_memory;
use crate::fused::plan::CallPlan;
use crate::state::State;
use crate::state::kv_cache::KvCache;
use crate::state::memory::GroupMemory;
use crate::{Buffer, Error, Inputs};
use termwise_kernels::buffer::resize;
use termwise_kernels::task_scratch::TaskScratch;

scratch_memory! {
    /// Values at the position before the first of a call. All are zero or empty if the call starts a sequence.
    InitialState {
        /// Whether the call continues from a state.
        given: bool,
        /// Number of earlier positions [B].
        positions: Vec<usize>,
        /// c, the accumulated log decay [N], or [N, d] with a decay per channel.
        log_decay: Vec<f64>,
        /// Inputs of earlier positions within reach of the short convolution, [B, heads, w − 1, dimension] of q, k and v.
        conv_tails: [Buffer; 3],
        /// Copies of windowed caches in the order of positions [B, groups].
        contiguous: Vec<KvCache>,
    }
}

impl InitialState {
    /// The start of a sequence.
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        self.given = false;
        self.conv_tails.iter_mut().try_for_each(|tail| tail.ensure(0))?;
        resize(&mut self.positions, l.shape.batch)?;
        self.positions.fill(0);
        resize(&mut self.log_decay, l.head_count() * l.layer.decay_channels())?;
        self.log_decay.fill(0.0);
        Ok(())
    }
}

/// Inputs of every stage of a call. N is (batch row, head); K is (key transform, batch row, kv head).
#[derive(Clone, Copy)]
pub(in crate::fused) struct Call<'a> {
    pub plan: &'a CallPlan,
    pub inputs: &'a Inputs<'a, f32>,
    pub initial: &'a InitialState,
    /// Keys and values from before the call.
    pub past: Option<PastKeys<'a>>,
    /// Memory of single tasks, per thread.
    pub tasks: &'a TaskScratch,
}

impl Call<'_> {
    /// Positions of batch row b that are not padding.
    pub fn length(&self, b: usize) -> usize {
        self.inputs.length(b, &self.plan.shape)
    }
}

/// Keys and values from before a call, in the order of positions.
#[derive(Clone, Copy)]
pub(in crate::fused) struct PastKeys<'a> {
    pub state: &'a State,
    /// [B, groups]; empty if the state has no ring.
    pub contiguous: &'a [KvCache],
}

impl<'a> PastKeys<'a> {
    /// The past keys of a head, and the head's index in its state group.
    pub fn of(self, b: usize, h: usize) -> Option<(&'a KvCache, usize)> {
        let (group, index) = self.state.plan().group_of[h];
        let at = b * self.state.bases.len() + group;
        match &self.state.groups[at].memory {
            GroupMemory::Recurrent { .. } => None,
            GroupMemory::Cache(cache) => Some((cache, index)),
            GroupMemory::Ring(_) => Some((&self.contiguous[at], index)),
        }
    }
}
