//! After a warm-up call an engine allocates no memory.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use support::{Case, Name, Rng, layer, shape, token};
use termwise_attention::{Attention, AuxTensors, Grads, Mode, Scratch, StateKind};

/// Counts allocations.
struct Counting;

static ASKED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls are forwarded to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ASKED.fetch_add(1, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The only test of its process, on one thread: no other code allocates.
#[test]
fn engines_allocate_nothing_after_the_first_call() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    pool.install(|| {
        for (text, mode) in [
            ("softmax", Mode::Parallel),
            ("softmax window=40 sinks=3 cap=20", Mode::Parallel),
            ("exp over=sum decay=softplus in out post", Mode::Parallel),
            ("taylor=0..4,coef=learned norm=l2 conv=3", Mode::Parallel),
            ("taylor=0..2 over=sum decay=softplus", Mode::Chunk(Some(64))),
            ("softmax qk_norm=rms", Mode::Parallel),
            ("feature=elu over=sum conv=2 norm=layer", Mode::Chunk(Some(32))),
            ("feature=hedgehog dim=3", Mode::Chunk(Some(32))),
            ("exp window=30 sinks=2 far(taylor=0..2,coef=learned dim=3) decay=softplus", Mode::Parallel),
            ("exp window=30 sinks=2 far(taylor=0..2 dim=3) in", Mode::Chunk(Some(32))),
            ("taylor=0..2,coef=learned over=none write=delta,scale=0.5 qk_norm=l2 decay=softplus", Mode::Chunk(Some(32))),
            ("exp over=none write=delta,scale=0.2 qk_norm=l2", Mode::Parallel),
            ("power=2 over=none write=delta,scale=0.8 qk_norm=l2 decay=mamba,channel", Mode::Chunk(Some(32))),
            ("exp over=sum decay=softplus,channel", Mode::Parallel),
        ] {
            let shape = shape(2, 200, 4, 2, 8, 8);
            let case = Case::<f32>::random(&layer(text, &shape), shape, None, 0.5, &mut Rng(81));
            let scratch = Scratch::default();
            let mut engine = case.fused(mode, &scratch).expect("possible");
            let mut gradients = case.tensors.clone();
            let mut y = vec![0.0; case.dy.len()];
            let (mut counts, mut bytes) = (Vec::with_capacity(4), Vec::with_capacity(4));
            for _ in 0..4 {
                let inputs = case.inputs();
                let (qkv, rest) = gradients.split_at_mut(3);
                let [(_, q), (_, k), (_, v)] = qkv else { panic!("q, k and v come first") };
                let mut aux_tensors = AuxTensors::default();
                for (name, values) in rest {
                    if let Name::AuxTensor(aux) = name {
                        aux_tensors.set(*aux, &mut values[..]);
                    }
                }
                let mut grads = Grads::new(q, k, v).with_aux(aux_tensors);
                let before = ASKED.load(Ordering::Relaxed);
                let saved = engine.forward(&inputs, &mut y).expect("possible");
                engine.backward(&inputs, &saved, &case.dy, &mut grads).expect("possible");
                drop(saved);
                engine.infer(&inputs, &mut y).expect("possible");
                counts.push(ASKED.load(Ordering::Relaxed) - before);
                bytes.push(scratch.bytes());
            }
            assert_eq!((counts[3], bytes[3]), (0, bytes[1]), "{text}: allocations of four rounds {counts:?}, scratch memory {bytes:?}");
        }
        for text in [
            "softmax",
            "softmax window=40 sinks=3",
            "exp window=30 sinks=2 far(taylor=0..2,coef=learned dim=3) decay=softplus in",
            "exp window=20 bits=8",
            "taylor=0..2 over=sum decay=softplus conv=3 qk_norm=rms",
            "exp over=sum decay=softplus,channel",
        ] {
            let shape = shape(2, 70, 4, 2, 8, 8);
            let case = Case::<f32>::random(&layer(text, &shape), shape, None, 0.5, &mut Rng(82));
            let mut engine = case.continuing(StateKind::Auto, Mode::Parallel, &Scratch::default()).expect("possible");
            let (mut state, one) = (case.state(StateKind::Auto), token(&case, 3));
            let (mut y, mut one_y) = (vec![0.0; case.dy.len()], vec![0.0; one.dy.len()]);
            let mut counts = Vec::with_capacity(3);
            for _ in 0..3 {
                state.clear();
                let (inputs, token) = (case.inputs(), one.inputs());
                let before = ASKED.load(Ordering::Relaxed);
                for _ in 0..2 {
                    engine.extend(&mut state, &inputs, &mut y).expect("possible");
                    state.step(&token, &mut one_y).expect("possible");
                }
                counts.push(ASKED.load(Ordering::Relaxed) - before);
            }
            assert_eq!(counts[2], 0, "{text}: allocations of three rounds of prefill and decoding {counts:?}");
        }
    });
}
