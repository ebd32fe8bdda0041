//! The memory of a call, shared by all layers of a model.

use std::sync::{Arc, Mutex, PoisonError};

use crate::Error;
use crate::fused::call::InitialState;
use crate::fused::chunks::{self, SplitStates};
use crate::fused::delta::{self, DeltaGrads, DeltaScratch};
use crate::fused::epilogue::{EpilogueGrads, SumBuffers};
use crate::fused::gradients::TileGrads;
use crate::fused::heap_bytes::{HeapBytes, scratch_memory};
use crate::fused::plan::CallPlan;
use crate::fused::prepare::channel_decay::{self, ChannelDecayGrads, ChannelDecayScratch};
use crate::fused::prepare::gates::{GateGrads, GateScratch};
use crate::fused::prepare::{self, PrepareGrads, PreparedRows, PreparedValues, RowTables};
use crate::fused::tiles;
use crate::fused::tiles::forward::TileScratch;
use termwise_kernels::task_scratch::TaskScratch;

/// A handle to scratch memory. Clones share it: pass the same one to all layers that run sequentially. Concurrent calls
/// each get separate memory.
#[derive(Clone, Default)]
pub struct Scratch(Arc<Mutex<Vec<CallScratch>>>);

impl Scratch {
    fn free(&self) -> std::sync::MutexGuard<'_, Vec<CallScratch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs f with exclusive memory. No lock is held while f runs, so f may run tasks on any thread pool.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut CallScratch) -> T) -> T {
        let mut own = self.free().pop().unwrap_or_default();
        let result = f(&mut own);
        self.free().push(own);
        result
    }

    /// Bytes of all memory that no running call uses.
    pub fn bytes(&self) -> usize {
        self.free().iter().map(HeapBytes::heap_bytes).sum()
    }
}

scratch_memory! {
    /// The memory of a call: one struct per stage.
    CallScratch {
        initial: InitialState,
        tables: RowTables,
        rows: PreparedRows,
        values: PreparedValues,
        gates: GateScratch,
        channel_decay: ChannelDecayScratch,
        delta: DeltaScratch,
        tiles: TileScratch,
        states: SplitStates,
        sequential: SumBuffers,
        grads: CallGrads,
        /// Memory of single tasks, per thread.
        tasks: TaskScratch,
    }
}

scratch_memory! {
    /// Gradients per stage of the backward pass.
    CallGrads {
        epilogue: EpilogueGrads,
        tiles: TileGrads,
        delta: DeltaGrads,
        channel_decay: ChannelDecayGrads,
        prepare: PrepareGrads,
        gates: GateGrads,
    }
}

/// Values of task memory that any stage of a forward pass needs.
fn forward_task_len(l: &CallPlan) -> usize {
    let lens = [prepare::task_len(l), channel_decay::task_len(l), delta::task_len(l, false)];
    lens.into_iter().fold(tiles::forward::task_len(l).max(chunks::run::task_len(l, false)), usize::max)
}

/// Values of task memory that any stage of a backward pass needs.
fn backward_task_len(l: &CallPlan) -> usize {
    let lens = [tiles::backward::tiles_len(l), chunks::run::task_len(l, true), delta::task_len(l, true)];
    lens.into_iter().fold(forward_task_len(l), usize::max)
}

impl CallScratch {
    /// Sizes for the forward pass of a call that starts a sequence.
    pub fn ensure_forward(&mut self, l: &CallPlan) -> Result<(), Error> {
        self.initial.ensure(l)?;
        self.tables.ensure(l)?;
        self.rows.ensure(l)?;
        self.values.ensure(l)?;
        self.gates.ensure(l)?;
        self.channel_decay.ensure(l)?;
        self.delta.ensure(l)?;
        self.tiles.ensure(l)?;
        self.states.ensure(l)?;
        Ok(self.tasks.ensure(forward_task_len(l))?)
    }

    /// Sizes for the backward pass, beyond those of the forward pass.
    pub fn ensure_backward(&mut self, l: &CallPlan) -> Result<(), Error> {
        self.rows.ensure_backward(l)?;
        self.values.ensure_backward(l)?;
        self.delta.ensure_backward(l)?;
        let CallGrads { epilogue, tiles, delta, channel_decay, prepare, gates } = &mut self.grads;
        epilogue.ensure(l)?;
        tiles.ensure(l)?;
        delta.ensure(l)?;
        channel_decay.ensure(l)?;
        prepare.ensure(l)?;
        gates.ensure(l)?;
        Ok(self.tasks.ensure(backward_task_len(l))?)
    }
}

#[cfg(test)]
mod tests {
    use termwise_kernels::buffer::resize;

    use super::*;

    #[test]
    fn concurrent_calls_have_separate_memory() {
        let scratch = Scratch::default();
        scratch.with(|a| {
            a.rows.q.ensure(10).expect("memory");
            scratch.with(|b| {
                assert!(b.rows.q.is_empty());
                b.rows.q.ensure(20).expect("memory");
                resize(&mut b.gates.decay, 7).expect("memory");
            });
            assert_eq!(a.rows.q.len(), 10);
        });
        assert_eq!(scratch.bytes(), 40 + 80 + 56);
    }

    #[test]
    fn softmax_needs_no_memory_of_other_stages() {
        use crate::{Attention, FusedOptions, Grads, Inputs, Layer};

        let scratch = Scratch::default();
        let layer = Layer::new(2, 1, 4).variant("exp rope=off").expect("possible");
        let mut engine = layer.fused_with(1, 3, FusedOptions::default().scratch(&scratch)).expect("possible");
        let (q, kv, mut y) = ([0.1; 24], [0.2; 12], [0.0; 24]);
        let inputs = Inputs::new(&q, &kv, &kv);
        let saved = engine.forward(&inputs, &mut y).expect("possible");
        let (mut dq, mut dk, mut dv) = ([0.0; 24], [0.0; 12], [0.0; 12]);
        engine.backward(&inputs, &saved, &[1.0; 24], &mut Grads::new(&mut dq, &mut dk, &mut dv)).expect("possible");
        scratch.with(|w| {
            let CallGrads { epilogue, tiles, delta, channel_decay, prepare, gates } = &w.grads;
            assert!([epilogue.heap_bytes(), tiles.heap_bytes(), w.rows.heap_bytes(), w.values.heap_bytes()].iter().all(|&bytes| bytes > 0));
            let unused = [delta.heap_bytes(), channel_decay.heap_bytes(), prepare.heap_bytes(), gates.heap_bytes()];
            assert_eq!(unused, [0; 4]);
            let unused = [w.delta.heap_bytes(), w.channel_decay.heap_bytes(), w.states.heap_bytes(), w.sequential.heap_bytes()];
            assert_eq!(unused, [0; 4]);
            assert!(w.gates.key_weights.is_empty() && w.gates.decay.is_empty() && w.gates.out_gate.is_empty());
        });
    }
}
