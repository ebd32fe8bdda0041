//! Every pair of slot values is either rejected with a reason, or every engine computes it.

use std::path::Path;

use termwise_attention::variant::combinations::{BASE_KERNELS, SLOT_VALUES, accepted, combine};
use termwise_attention::{Attention, Mode, Scratch, State, StateKind, Variant};

use crate::expected::{Expected, fused};
use crate::support::{Case, Rng, same_isa, shape, stepped, token};

/// Every pair of values of different slots, each on every base kernel.
fn pairs() -> Vec<String> {
    let mut pairs = Vec::new();
    for (i, first) in SLOT_VALUES.iter().enumerate() {
        for second in SLOT_VALUES[i + 1..].iter().filter(|second| second.slot != first.slot) {
            let strings = BASE_KERNELS.map(|kernel| combine(first, second, kernel));
            pairs.extend(strings);
        }
    }
    pairs.sort();
    pairs.dedup();
    pairs
}

fn case(variant: &Variant, rng: &mut Rng) -> Case<f32> {
    let shape = shape(1, 7, 2, 1, 4, 3);
    Case::random(&vec![variant.clone(); shape.heads], shape, None, 0.7, rng)
}

fn has_finite_state(variant: &Variant) -> bool {
    variant.remembered().is_some_and(|score_fn| score_fn.has_finite_map())
}

#[test]
fn every_pair_of_parts_works_or_is_rejected_with_a_reason() {
    let _isa = same_isa();
    let (scratch, mut rng) = (Scratch::default(), Rng(17));
    let (mut works, mut refused, mut chunked, mut trained) = (0, 0, 0, 0);
    for text in pairs() {
        let variant = match accepted(&text) {
            Ok(variant) => variant,
            Err(reason) => {
                assert!(reason.len() > 20, "{text}: {reason}");
                refused += 1;
                continue;
            }
        };
        works += 1;
        assert_eq!(variant.to_string().parse(), Ok(variant.clone()), "{text}");
        let case = case(&variant, &mut rng);
        if variant.inference_only().is_some() {
            infers(&case, &scratch, &text);
        } else {
            trained += 1;
            let expected = Expected::of_parallel(&case);
            expected.compare(&fused(&case, &scratch, Mode::Parallel), &format!("{text}: parallel"));
            let expected = Expected::of(&case);
            for memory in [StateKind::Auto, StateKind::Cache] {
                expected.compare_outputs(&stepped(&case, &mut case.state(memory)).0, &format!("{text}: {memory:?} state"));
            }
            if has_finite_state(&variant) {
                chunked += 1;
                expected.compare(&fused(&case, &scratch, Mode::Chunk(Some(2))), &format!("{text}: chunks"));
            }
        }
        files_continue(&case, &text);
    }
    assert!(works > 500 && refused > 50 && chunked > 200 && trained > 500, "{works} {refused} {chunked} {trained}");
}

/// Forward passes of a variant without a backward pass.
fn infers(case: &Case<f32>, scratch: &Scratch, text: &str) {
    let wide = case.cast::<f64>();
    let expected = wide.forward(&mut wide.naive()).0;
    let compare = |y: &[f32], label: &str| {
        let error = termwise_attention::relative_rms(y, &expected);
        assert!(error < 1e-5, "{text}: {label}: outputs differ by {error:e}");
    };
    let mut engine = case.fused(Mode::Parallel, scratch).unwrap_or_else(|error| panic!("{text}: {error}"));
    compare(&case.forward(&mut engine).0, "parallel");
    for memory in [StateKind::Auto, StateKind::Cache] {
        compare(&stepped(case, &mut case.state(memory)).0, "state");
    }
    let mut y = vec![0.0; case.dy.len()];
    let error = engine.forward(&case.inputs(), &mut y).err().unwrap_or_else(|| panic!("{text}: has a backward pass")).to_string();
    assert!(error.contains("inference-only"), "{text}: {error}");
}

/// A state that is written to a file after half of the positions and read back continues bit for bit.
fn files_continue(case: &Case<f32>, text: &str) {
    let step = |state: &mut State, t: usize| {
        let mut y = vec![f32::NAN; case.dy.len() / case.shape.time];
        state.step(&token(case, t).inputs(), &mut y).unwrap_or_else(|error| panic!("{text}: {error}"));
        y
    };
    for memory in [StateKind::Auto, StateKind::Cache] {
        let mut state = case.state(memory);
        (0..4).for_each(|t| drop(step(&mut state, t)));
        let bytes = State::to_bytes(std::slice::from_ref(&state)).unwrap_or_else(|error| panic!("{text}: {error}"));
        let layer = case.layer();
        let mut read = State::from_bytes(&bytes, Path::new("state"), &[(&layer, memory)], case.shape.batch)
            .unwrap_or_else(|error| panic!("{text}: {error}"));
        for t in 4..case.shape.time {
            let [a, b] = [step(&mut state, t), step(&mut read[0], t)].map(|y| y.into_iter().map(f32::to_bits).collect::<Vec<_>>());
            assert_eq!(a, b, "{text}: position {t} after reading a file");
        }
    }
}
