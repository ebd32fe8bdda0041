//! The memory of a call, shared by all layers of a model.

use std::sync::{Arc, Mutex, PoisonError};

use crate::buffer::resize;
use crate::fused::plan::Layout;
use crate::task_scratch::TaskScratch;
use crate::{Buffer, Error, Rope};

/// A handle to scratch memory. Clones share it: give the same one to all layers that run one after another. Calls that run at the same
/// time each get memory of their own.
#[derive(Clone, Default)]
pub struct Scratch(Arc<Mutex<Vec<CallScratch>>>);

impl Scratch {
    fn free(&self) -> std::sync::MutexGuard<'_, Vec<CallScratch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs f with memory that nobody else uses. No lock is held meanwhile: f may run tasks on any thread pool.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut CallScratch) -> T) -> T {
        let mut own = self.free().pop().unwrap_or_default();
        let result = f(&mut own);
        self.free().push(own);
        result
    }

    /// Bytes held by all memory that is not in use at this moment.
    pub fn bytes(&self) -> usize {
        self.free().iter().map(CallScratch::bytes).sum()
    }
}

/// What a call continues from, besides the memory of keys; zero and empty where it continues from nothing.
#[derive(Default)]
pub(super) struct InitialState {
    /// Whether there is one.
    pub given: bool,
    /// Running sums of the gates [B, G] and [B, H], and of the decays [B, H].
    pub in_gate: Vec<f64>,
    pub out_gate: Vec<f64>,
    pub post_gate: Vec<f64>,
    pub decay: Vec<f64>,
    /// c of the position before [N].
    pub log_decay: Vec<f64>,
    /// Positions before [B].
    pub positions: Vec<usize>,
    /// Inputs before the first position that filters reach, [B, heads, w − 1, dimension] of q, k and v; empty without an initial state.
    pub tails: [Buffer; 3],
}

/// Declares the memory of a call from one list, so that nothing held is left uncounted.
macro_rules! call_scratch {
    ($($(#[$doc:meta])* $name:ident: $kind:ty),+ $(,)?) => {
        /// Buffers by name. N stands for (b, h), K for a prepared kv head.
        #[derive(Default)]
        pub(super) struct CallScratch {
            $($(#[$doc])* pub $name: $kind,)+
            /// The rope that the angles belong to, and for how many positions there are any.
            pub angles_of: Option<(Rope, usize)>,
            pub initial: InitialState,
            /// Memory of single tasks, by thread.
            pub tasks: TaskScratch,
        }

        impl CallScratch {
            fn bytes(&self) -> usize {
                let i = &self.initial;
                let sums = [&i.in_gate, &i.out_gate, &i.post_gate, &i.decay, &i.log_decay];
                let initial = sums.map(|sums| 8 * sums.capacity()).iter().sum::<usize>() + 8 * i.positions.capacity() + i.tails.held();
                let angles = self.angles_of.as_ref().map_or(0, |(rope, _)| 8 * rope.frequencies().len());
                0 $(+ self.$name.held())+ + initial + angles + self.tasks.bytes()
            }
        }
    };
}

/// Memory that can be counted.
trait Held {
    fn held(&self) -> usize;
}

impl Held for Buffer {
    fn held(&self) -> usize {
        self.bytes()
    }
}

impl<const N: usize> Held for [Buffer; N] {
    fn held(&self) -> usize {
        self.iter().map(Buffer::bytes).sum()
    }
}

impl<T, const N: usize> Held for [Vec<T>; N] {
    fn held(&self) -> usize {
        self.iter().map(Held::held).sum()
    }
}

impl<T> Held for Vec<T> {
    fn held(&self) -> usize {
        size_of::<T>() * self.capacity()
    }
}

call_scratch! {
    /// Prepared queries [passes, N, Tp, dp], scaled.
    q: Buffer,
    /// Prepared keys [K, Tp, dp], and transposed by tile [K, tiles, width, pitch].
    k: Buffer,
    kt: Buffer,
    /// Prepared values [K, Tp, ep], and transposed by tile [K, tiles, e, pitch].
    v: Buffer,
    vt: Buffer,
    /// Angles [T, pairs], or [B, T, pairs] where batch rows start at positions of their own.
    cos: Buffer,
    sin: Buffer,
    /// Filters of the short convolution with the channel last, [heads, w, dimension] for q, k and v.
    taps: [Buffer; 3],
    /// Normed rows of q and k, [sources, B, T, heads·d], where heads have such a norm.
    normed: [Buffer; 2],
    /// U [N, T, ep], z and ρ [N, T] of heads that walk.
    walk: [Buffer; 3],
    /// Gate factors [B, G, T] and [N, T].
    in_gate: Buffer,
    out_gate: Buffer,
    post_gate: Buffer,
    /// Factors of post gates by channel [B, T, H, e].
    post_channels: Buffer,
    /// Weights of keys [N, Tp].
    key_weights: Buffer,
    /// c of the decay [N, Tp], and by channel [N, Tp, d].
    decay: Vec<f64>,
    channel_decay: Vec<f64>,
    /// Keys transposed by tile, relative to the last position of their block [K, tiles, width, pitch], where decays are by channel.
    kb: Buffer,
    /// β of the write rules [K, T], and what is left of values before it [K, Tp, ep].
    beta: Buffer,
    kept: Buffer,
    /// Logits of one gate of each head [N, T].
    logits: Buffer,
    /// The largest |score| of each tile of queries that sees a cache [N, tiles].
    largest: Buffer,
    /// States at the start of each split, or their gradients at its end [B, G, splits, state_len].
    states: Buffer,

    /// Gradients of the sums over keys, [passes, N, T, ep] and [passes, N, T].
    du: Buffer,
    dz: Buffer,
    /// Gradients of prepared tensors, shaped like them; of queries [passes, N, T, dp].
    dq: Buffer,
    dk: Buffer,
    dv: Buffer,
    /// Gradients of gate factors [N, T], which become those of their logits; of the input gate once for each head.
    din: Buffer,
    dout: Buffer,
    dpost: Buffer,
    /// Gradients of the factors of post gates by channel [N, T, e].
    dpost_channels: Buffer,
    /// Gradients of key weights and, from queries and from keys, of c [N, Tp]; the logits of the decay [N, T], m_h and rates of decay [N], coefficients
    /// of near and of far keys [parts or splits, N, orders].
    dkey_weights: Buffer,
    ddecay_queries: Vec<f64>,
    ddecay_keys: Vec<f64>,
    ddecay_logits: Buffer,
    dconst: Buffer,
    drate: Buffer,
    dlearned: [Vec<f64>; 2],
    /// Gradients of the logits of decays by channel [N, d, T], and of c of one of them [N, T].
    dchannels: Buffer,
    dchannel_sums: Vec<f64>,
    /// What keys that read for a write rule have of the gradients of keys [K, Tp, dp], where decays are by channel.
    dreaders: Buffer,
    /// What the write rules give: gradients of β and of c [K, T], of coefficients [K, orders].
    dbeta: Buffer,
    ddecay_write: Vec<f64>,
    dlearned_write: Vec<f64>,
    /// Gradients of γ, β and b by head [N, 2e + 1], and of filters by batch row and head.
    dnorm: Buffer,
    dtaps: [Buffer; 3],
    /// Gradients of normed rows.
    dnormed: [Buffer; 2],
    /// Gradients of the tensors that prepare queries [N, passes, values] and keys [B, G, classes, values].
    dtensors: [Buffer; 2],
    /// Room for going back through norms of q and k.
    norm_room: Buffer,
}

impl CallScratch {
    /// Sizes for the forward pass of a call, which continues nothing unless told so afterwards.
    pub fn ensure_forward(&mut self, l: &Layout) -> Result<(), Error> {
        let s = &l.shape;
        let (n, kv, tp) = (l.head_count(), l.kv_count(), l.tp());
        let i = &mut self.initial;
        i.given = false;
        i.tails.iter_mut().try_for_each(|tail| tail.ensure(0))?;
        resize(&mut i.positions, s.batch)?;
        i.positions.fill(0);
        resize(&mut i.in_gate, s.batch * s.kv_heads)?;
        i.in_gate.fill(0.0);
        let channels = l.layer.decay_channels();
        for (sums, width) in [(&mut i.out_gate, 1), (&mut i.post_gate, 1), (&mut i.decay, channels), (&mut i.log_decay, channels)] {
            resize(sums, n * width)?;
            sums.fill(0.0);
        }
        self.kt.ensure(kv * l.tiles * l.width * l.pitch)?;
        self.v.ensure(kv * tp * l.ep)?;
        if l.layer.decays_by_channel() {
            self.k.ensure(kv * tp * l.dp)?;
            self.kb.ensure(kv * l.tiles * l.width * l.pitch)?;
            resize(&mut self.channel_decay, n * tp * s.d)?;
        }
        if l.layer.rotates() {
            // Angles that have to move are gone, also where there turns out to be no memory for them.
            if self.cos.bytes().min(self.sin.bytes()) / size_of::<f32>() < s.time * l.layer.rotary_pairs() {
                self.angles_of = None;
            }
            self.cos.ensure(s.time * l.layer.rotary_pairs())?;
            self.sin.ensure(s.time * l.layer.rotary_pairs())?;
        }
        for (buffer, channels) in self.taps.iter_mut().zip(s.widths()) {
            buffer.ensure(channels * l.taps)?;
        }
        for (buffer, len) in self.normed.iter_mut().zip(l.normed_lens()) {
            buffer.ensure(len)?;
        }
        let gates = l.has_gates() as usize;
        self.in_gate.ensure(gates * s.batch * s.kv_heads * s.time)?;
        self.out_gate.ensure(gates * n * s.time)?;
        self.post_gate.ensure(gates * n * s.time)?;
        self.post_channels.ensure(l.has_post_channels() as usize * n * s.time * s.e)?;
        self.key_weights.ensure(gates * n * tp)?;
        resize(&mut self.decay, gates * n * tp)?;
        self.logits.ensure(gates * n * s.time)?;
        self.largest.ensure(n * l.tiles)?;
        self.states.ensure(if l.splits > 1 { s.batch * s.kv_heads * l.splits * l.state_len } else { 0 })
    }

    /// Sizes for the backward pass.
    pub fn ensure_backward(&mut self, l: &Layout) -> Result<(), Error> {
        let s = &l.shape;
        let (n, kv, tp) = (l.head_count(), l.kv_count(), l.tp());
        let passes = l.passes();
        self.q.ensure(passes * n * tp * l.dp)?;
        self.k.ensure(kv * tp * l.dp)?;
        self.vt.ensure(kv * l.tiles * s.e * l.pitch)?;
        self.du.ensure(passes * n * s.time * l.ep)?;
        self.dz.ensure(passes * n * s.time)?;
        self.dq.ensure(passes * n * s.time * l.dp)?;
        self.dk.ensure(kv * tp * l.dp)?;
        self.dv.ensure(kv * tp * l.ep)?;
        let gates = l.has_gates() as usize;
        for buffer in [&mut self.din, &mut self.dout, &mut self.dpost, &mut self.ddecay_logits] {
            buffer.ensure(gates * n * s.time)?;
        }
        self.dkey_weights.ensure(gates * n * tp)?;
        let decays = l.heads.iter().any(|head| head.variant.decay.is_some()) as usize;
        resize(&mut self.ddecay_queries, decays * n * tp)?;
        resize(&mut self.ddecay_keys, decays * n * tp)?;
        self.dpost_channels.ensure(l.has_post_channels() as usize * n * s.time * s.e)?;
        self.dconst.ensure(gates * n)?;
        self.drate.ensure(gates * n)?;
        for (far, dlearned) in [false, true].into_iter().zip(&mut self.dlearned) {
            resize(dlearned, l.parts.count().max(l.splits) * n * l.learned(far))?;
        }
        self.dnorm.ensure(n * (2 * s.e + 1))?;
        for (buffer, channels) in self.dtaps.iter_mut().zip(s.widths()) {
            buffer.ensure(s.batch * channels * l.taps)?;
        }
        self.norm_room.ensure(l.norm_room())?;
        for (buffer, len) in self.dnormed.iter_mut().zip(l.normed_lens()) {
            buffer.ensure(len)?;
        }
        let [queries, keys] = &mut self.dtensors;
        queries.ensure(n * passes * l.tensor_len())?;
        keys.ensure(kv * l.tensor_len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_at_the_same_time_have_memory_of_their_own() {
        let scratch = Scratch::default();
        scratch.with(|a| {
            a.q.ensure(10).expect("memory");
            scratch.with(|b| {
                assert!(b.q.is_empty());
                b.q.ensure(20).expect("memory");
                resize(&mut b.decay, 7).expect("memory");
            });
            assert_eq!(a.q.len(), 10);
        });
        assert_eq!(scratch.bytes(), 40 + 80 + 56);
    }
}
