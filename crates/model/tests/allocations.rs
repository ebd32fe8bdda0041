//! A decoding step does not allocate.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{tiny, tokens};
use termwise_model::decode::{Decoder, DecoderOptions, Sampler, SamplingOptions};

struct Counting;

thread_local! {
    /// Allocations of this thread only: the test harness also allocates.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: all calls are forwarded to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn steps_allocate_nothing() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
    pool.install(|| {
        for attention in ["taylor=0..2", "linear_elu", "taylor=0..2,coef=learned decay=softplus conv=3", "softmax"] {
            let model = tiny(attention, 2, true);
            let mut decoder = Decoder::new(model.clone(), DecoderOptions::default().rows(3).beyond_context(true)).expect("a decoder");
            decoder.prefill_rows(&tokens(30, 29, 1), &[10, 3, 1]).expect("prompts");
            let sampling = SamplingOptions::default().temperature(0.7).top_k(9).top_p(0.9).min_p(0.01).repetition_penalty(1.1).seed(1);
            let mut sampler = Sampler::new(sampling, 29).expect("a sampler");
            let mut step = |decoder: &mut Decoder| {
                let token = sampler.sample(decoder.logits(0).expect("a row"));
                decoder.step(&[Some(token), None, Some(token)]).expect("a step");
            };
            // The first steps allocate buffers that later ones reuse.
            (0..3).for_each(|_| step(&mut decoder));
            let before = COUNT.get();
            // A cache grows by 128 positions at a time.
            (0..100).for_each(|_| step(&mut decoder));
            assert_eq!(COUNT.get() - before, 0, "{attention}");
        }
    });
}
