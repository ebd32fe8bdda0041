//! Sequences continued from a state: any split into calls, modes and single steps gives the result of one call.

use std::ops::Range;

use proptest::prelude::*;
use termwise_attention::{AuxKind, Mode, Scratch, State, StateKind, Variant};

use crate::chunk::random_layers;
use crate::expected::Expected;
use crate::support::combos::random_case;
use crate::support::{Case, Name, Rng, layer, same_isa, shape, state_of};

const TEXTS: [&str; 27] = [
    "taylor=0..2 over=sum",
    "taylor=0..2 over=sum,floor=1 decay=softplus in out",
    "taylor=0..3 over=length decay=linear in norm=layer",
    "taylor=0..2,coef=learned over=length conv=4",
    "taylor=0..2 over=sum decay=softplus",
    "power=2 over=position in decay=softplus out=cumulative post=out",
    "feature=elu over=sum conv=2",
    "softmax",
    "exp over=sum decay=softplus in conv=3",
    "exp clamp=1 over=length norm=layer out=cumulative",
    "exp over=none norm=l2 decay=linear",
    "exp over=position in norm=rms",
    "feature=relu clamp=2 over=sum,eps=0.1",
    "exp window=9 over=sum",
    "exp window=5 sinks=3 over=length decay=softplus in",
    "taylor=0..2 window=1 sinks=11 cap=2 over=position",
    "power=1 over=none write=delta qk_norm=l2",
    "feature=identity over=none write=delta,2 decay=mamba qk_norm=l2 conv=2 norm=rms",
    "taylor=0..2,coef=learned over=none write=delta,scale=0.5 qk_norm=l2 decay=softplus",
    "exp over=none write=delta,scale=0.3 qk_norm=l2 decay=softplus",
    "exp over=length write=delta,scale=0.4 qk_norm=l2 clamp=0.3 cap=2 norm=l2",
    "feature=identity over=none decay=given,channel norm=rms",
    "taylor=0..3,coef=learned over=length decay=sigmoid,4,channel rope=off",
    "power=2 over=none write=delta,scale=0.8 qk_norm=l2 decay=mamba,channel conv=2",
    "exp over=sum decay=mamba,channel",
    "exp over=none write=delta,scale=0.3 qk_norm=l2 decay=softplus,channel",
    "exp window=5 sinks=3 over=sum decay=given,channel",
];

/// These ranges of positions of each batch row; shorter ones are padded with NaN.
fn part(case: &Case<f32>, ranges: &[Range<usize>]) -> Case<f32> {
    let time = ranges.iter().map(Range::len).max().expect("a batch row");
    let cut = |x: &[f32]| {
        let width = x.len() / (case.shape.batch * case.shape.time);
        let mut out = vec![f32::NAN; case.shape.batch * time * width];
        for (b, range) in ranges.iter().enumerate() {
            let from = &x[(b * case.shape.time + range.start) * width..(b * case.shape.time + range.end) * width];
            out[b * time * width..][..from.len()].copy_from_slice(from);
        }
        out
    };
    let tensor = |(name, x): &(Name, Vec<f32>)| match name {
        Name::AuxTensor(aux) if !aux.is_gate_logits() => (*name, x.clone()),
        _ => (*name, cut(x)),
    };
    Case {
        heads: case.heads.clone(),
        shape: termwise_attention::Shape { time, ..case.shape },
        tensors: case.tensors.iter().map(tensor).collect(),
        lengths: Some(ranges.iter().map(Range::len).collect()),
        rope: case.rope.clone(),
        dy: cut(&case.dy),
    }
}

/// Copies the outputs of a part to their positions.
fn place(case: &Case<f32>, ranges: &[Range<usize>], from: &[f32], y: &mut [f32]) {
    let width = case.shape.heads * case.shape.e;
    let time = ranges.iter().map(Range::len).max().expect("a batch row");
    for (b, range) in ranges.iter().enumerate() {
        let to = &mut y[(b * case.shape.time + range.start) * width..(b * case.shape.time + range.end) * width];
        to.copy_from_slice(&from[b * time * width..][..to.len()]);
    }
}

#[derive(Clone, Copy, Debug)]
enum By {
    Extend(Mode),
    Step,
}

/// Runs the case in stretches of this many positions, each with its own method.
fn run(case: &Case<f32>, stretches: &[(usize, By)], memory: StateKind) -> (Vec<f32>, State) {
    let scratch = Scratch::default();
    let mut state = case.state(memory);
    let mut y = vec![f32::NAN; case.dy.len()];
    let mut at = 0;
    for &(count, by) in stretches {
        let end = (at + count).min(case.shape.time);
        let pieces: Vec<Range<usize>> = match by {
            By::Extend(_) => (at < end).then_some(at..end).into_iter().collect(),
            By::Step => (at..end).map(|t| t..t + 1).collect(),
        };
        for range in pieces {
            let ranges = vec![range; case.shape.batch];
            let mut own = part(case, &ranges);
            own.lengths = None;
            let mut out = vec![f32::NAN; own.dy.len()];
            match by {
                By::Step => state.step(&own.inputs(), &mut out).map(drop),
                By::Extend(mode) => {
                    own.continuing(memory, mode, &scratch).and_then(|mut fused| fused.extend(&mut state, &own.inputs(), &mut out)).map(drop)
                }
            }
            .unwrap_or_else(|error| panic!("{case}: {error}"));
            place(case, &ranges, &out, &mut y);
        }
        at = end;
    }
    assert_eq!(at, case.shape.time, "the stretches cover the case");
    (y, state)
}

fn chunk_mode(case: &Case<f32>, length: usize) -> Mode {
    let finite = |variant: &Variant| variant.window.is_none() && variant.state_rows(case.shape.d).is_some();
    if case.heads.iter().any(finite) { Mode::Chunk(Some(length)) } else { Mode::Auto }
}

/// Keys leave the cache in blocks of 128 for any window, and its size is as reported.
#[test]
fn caches_drop_keys_outside_every_window() {
    let _isa = same_isa();
    let mut rng = Rng(47);
    let shape = shape(1, 700, 2, 1, 2, 2);
    for (window, sinks) in [(1, 0), (1, 130), (100, 4), (127, 1), (128, 0), (129, 128), (300, 3), (600, 200)] {
        let text = format!(
            "exp window={window} over=sum decay=softplus in rope=off{}",
            if sinks > 0 { format!(" sinks={sinks}") } else { String::new() }
        );
        let case = Case::<f32>::random(&layer(&text, &shape), shape, None, 0.8, &mut rng);
        let expected = Expected::of(&case);
        let parallel = By::Extend(Mode::Parallel);
        for stretches in [
            vec![(700, By::Step)],
            vec![(1, parallel), (600, By::Step), (99, parallel)],
            vec![(130, parallel), (1, By::Step), (300, parallel), (269, By::Step)],
            vec![(650, parallel), (50, By::Step)],
        ] {
            let (y, state) = run(&case, &stretches, StateKind::Auto);
            expected.compare_outputs(&y, &format!("{stretches:?} {case}"));
            let keys = (window + sinks + 127usize).next_multiple_of(128);
            // Keys, values in whole vectors, and a weight and a decay per head, which grow like a `Vec`.
            assert!(state.bytes() <= keys * (4 * (2 + 16) + 2 * 2 * (4 + 8)) + 2000, "{text}: {} bytes for {keys} keys", state.bytes());
        }
    }
}

#[test]
fn every_split_matches_one_call() {
    let _isa = same_isa();
    let mut rng = Rng(41);
    let shape = shape(2, 40, 4, 2, 6, 5);
    for text in TEXTS {
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, 0.8, &mut rng);
        let expected = Expected::of(&case);
        for memory in [StateKind::Auto, StateKind::Cache] {
            for split in 0..=shape.time {
                let chunks = By::Extend(chunk_mode(&case, 7));
                for (first, second) in [(By::Extend(Mode::Parallel), chunks), (chunks, By::Step), (By::Step, By::Extend(Mode::Parallel))] {
                    let (y, state) = run(&case, &[(split, first), (shape.time - split, second)], memory);
                    expected.compare_outputs(&y, &format!("{first:?} {split} {second:?} {memory:?} {case}"));
                    assert_eq!(state.position(1), Some(shape.time));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(random_layers(60))]

    #[test]
    fn random_layers_in_random_stretches_match_the_reference(seed in any::<u64>(), time in 1usize..200, cache in any::<bool>()) {
        let _isa = same_isa();
        let mut rng = Rng(seed);
        let (h, g) = rng.pick(&[(1, 1), (4, 2), (4, 1)]);
        let shape = shape(rng.pick(&[1, 2]), time, h, g, rng.pick(&[1, 2, 5, 8]), rng.pick(&[5, 16, 20]));
        let low = |variant: &Variant| variant.near.kernel.polynomial().is_none_or(|orders| orders.iter().all(|(n, _)| *n <= 5));
        // Without lengths: cancelling sums are not excluded after the end of a row.
        let case = loop {
            let case = random_case::<f32>(shape, 0.05, &mut rng);
            if case.lengths.is_none() && case.heads.iter().all(low) {
                break case;
            }
        };
        let mut stretches = Vec::new();
        let mut left = time;
        while left > 0 {
            let by = match rng.below(4) {
                0 => By::Step,
                1 => By::Extend(Mode::Parallel),
                2 => By::Extend(Mode::Auto),
                _ => By::Extend(chunk_mode(&case, 1 + rng.below(40))),
            };
            let count = 1 + rng.below(left);
            stretches.push((count, by));
            left -= count;
        }
        let (y, _) = run(&case, &stretches, if cache { StateKind::Cache } else { StateKind::Auto });
        Expected::of(&case).compare_outputs(&y, &format!("{stretches:?} {case}"));
    }
}

#[test]
fn extending_gives_the_state_of_stepping() {
    let _isa = same_isa();
    let mut rng = Rng(42);
    // Time is split into spans: one KV head and many chunks.
    let shape = shape(1, 300, 2, 1, 6, 5);
    for text in TEXTS {
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, 0.8, &mut rng);
        for memory in [StateKind::Auto, StateKind::Cache] {
            let (_, stepped) = run(&case, &[(shape.time, By::Step)], memory);
            for mode in [Mode::Parallel, chunk_mode(&case, 16)] {
                let (_, state) = run(&case, &[(101, By::Extend(mode)), (shape.time, By::Extend(mode))], memory);
                assert_eq!(state.position(0), stepped.position(0));
                for head in 0..2 {
                    let (found, expected) =
                        (state.largest_score(0, head).expect("a head"), stepped.largest_score(0, head).expect("a head"));
                    assert!((found - expected).abs() < 1e-5 * expected, "{case}: largest score {found}, {expected} by stepping");
                }
                // The next outputs show whether the states are equal.
                let next = Case::<f32>::random(&case.heads, termwise_attention::Shape { time: 1, ..shape }, None, 0.8, &mut rng.clone());
                let [a, b] = [state.clone(), stepped.clone()].map(|mut state| {
                    let mut tokens = next.tensors.clone();
                    for (name, x) in &mut tokens {
                        if let Name::AuxTensor(aux) = name
                            && !aux.is_gate_logits()
                        {
                            x.clone_from(&case.get(Name::AuxTensor(*aux)).to_vec());
                        }
                    }
                    let token = Case {
                        tensors: tokens,
                        rope: case.rope.clone(),
                        heads: case.heads.clone(),
                        dy: next.dy.clone(),
                        lengths: None,
                        shape: next.shape,
                    };
                    let mut y = vec![f32::NAN; token.dy.len()];
                    state.step(&token.inputs(), &mut y).unwrap_or_else(|error| panic!("{case}: {error}"));
                    y
                });
                let error = termwise_attention::relative_rms(&a, &b);
                assert!(error < 2e-5, "{mode} {memory:?} {case}: the next output differs by {error:e}");
            }
        }
    }
}

#[test]
fn batch_rows_resume_at_their_own_positions() {
    let _isa = same_isa();
    let mut rng = Rng(43);
    let shape = shape(2, 60, 4, 2, 6, 5);
    for text in TEXTS {
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, 0.8, &mut rng);
        let expected = Expected::of(&case);
        for mode in [Mode::Parallel, chunk_mode(&case, 8)] {
            let mut state = case.state(StateKind::Auto);
            let mut y = vec![f32::NAN; case.dy.len()];
            for ranges in [[0..5, 0..23], [5..32, 23..24], [32..60, 24..60]] {
                let own = part(&case, &ranges);
                let mut out = vec![f32::NAN; own.dy.len()];
                let mut fused = own.continuing(StateKind::Auto, mode, &Scratch::default()).expect("possible");
                fused.extend(&mut state, &own.inputs(), &mut out).unwrap_or_else(|error| panic!("{case}: {error}"));
                place(&case, &ranges, &out, &mut y);
            }
            assert_eq!((state.position(0), state.position(1)), (Some(60), Some(60)));
            expected.compare_outputs(&y, &format!("{mode} {case}"));
        }
    }
}

#[test]
fn results_are_bit_identical_for_any_thread_count() {
    let _isa = same_isa();
    let mut rng = Rng(44);
    let shape = shape(1, 300, 2, 1, 6, 5);
    let pools = [1, 2, 3].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads can be started"));
    for text in TEXTS {
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, 0.8, &mut rng);
        let stretches = [(130, By::Extend(Mode::Parallel)), (1, By::Step), (200, By::Extend(chunk_mode(&case, 16)))];
        let results = pools.each_ref().map(|pool| pool.install(|| run(&case, &stretches, StateKind::Auto).0));
        assert!(results.iter().all(|y| y.iter().zip(&results[0]).all(|(a, b)| a.to_bits() == b.to_bits())), "{case}");
    }
}

#[test]
fn reported_positions_count_from_the_start_of_the_sequence() {
    let _isa = same_isa();
    let shape = shape(1, 20, 1, 1, 2, 2);
    for text in ["taylor=0..1 over=sum rope=off", "taylor=0..1 clamp=9 over=sum rope=off"] {
        let mut case = Case::<f32>::random(&layer(text, &shape), shape, None, 0.01, &mut Rng(45));
        case.get_mut(Name::Q)[17 * 2..18 * 2].fill(-100.0);
        case.get_mut(Name::K).fill(1.0);
        let scratch = Scratch::default();
        let mut state = case.state(StateKind::Auto);
        for range in [0..6, 6..20] {
            let own = part(&case, std::slice::from_ref(&range));
            let mut fused = own.continuing(StateKind::Auto, Mode::Parallel, &scratch).expect("possible");
            let report = fused.extend(&mut state, &own.inputs(), &mut vec![0.0; own.dy.len()]).expect("possible");
            assert_eq!(report.nonpositive.map(|at| at.position), range.contains(&17).then_some(17));
        }
    }
}

#[test]
fn states_of_another_layer_are_rejected() {
    let here = shape(1, 5, 2, 1, 4, 4);
    let case = Case::<f32>::random(&layer("taylor=0..2 in", &here), here, None, 1.0, &mut Rng(46));
    assert!(case.inputs().get(AuxKind::InGate).is_some());
    let mut fused = case.continuing(StateKind::Auto, Mode::Parallel, &Scratch::default()).expect("possible");
    let mut y = vec![0.0; case.dy.len()];
    for (text, other) in
        [("taylor=0..3 in", here), ("taylor=0..2 in", shape(1, 5, 2, 2, 4, 4)), ("taylor=0..2 in", shape(2, 5, 2, 1, 4, 4))]
    {
        let mut state = state_of(&layer(text, &other), &other, StateKind::Auto).expect("a state");
        assert!(fused.extend(&mut state, &case.inputs(), &mut y).is_err_and(|error| error.to_string().contains("another layer")), "{text}");
        assert_eq!(state.position(0), Some(0));
    }
    let mut state = case.state(StateKind::Auto);
    assert!(fused.extend(&mut state, &case.inputs(), &mut y[1..]).is_err());
    assert!(fused.extend(&mut state, &case.inputs(), &mut y).is_ok());
}
