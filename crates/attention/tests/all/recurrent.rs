//! The recurrent form against the reference: chunk mode with all gradients, the state token by token, and the recurrence of
//! `naive::recurrence` as an independent oracle.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use termwise_attention::presets;
use termwise_attention::{Attention, Inputs, Mode, Nonpositive, Real, Scratch, Shape, StateKind, Variant, relative_rms};

use crate::expected::{Expected, Results, fused, place, reference};
use crate::support::combos::{random_case, random_case_of, small_shape};
use crate::support::{Case, Name, Rng, layer, on_every_isa, oracle, same_isa, shape, state_of, stepped, token};

fn chunked(case: &Case<f32>, chunk: usize) -> Results<f32> {
    fused(case, &Scratch::default(), Mode::Chunk(Some(chunk)))
}

fn finite(variant: &Variant) -> bool {
    variant.near.clamp.is_none() && variant.near.cap.is_none() && variant.window.is_none() && variant.near.kernel.polynomial().is_some()
}

/// Whether the memory per head does not grow with the number of positions: a state, a window, or both.
fn bounded(variant: &Variant) -> bool {
    variant.remembered().is_none_or(|weighing| weighing.has_finite_map())
}

/// Every preset with a finite feature map, and combinations of parts that no preset has.
fn finite_texts() -> Vec<String> {
    let more = [
        "taylor=0..2",
        "taylor=0..3 over=sum,floor=1",
        "taylor=0..4 over=sum decay=softplus",
        "taylor=0..3,coef=1:0.9:0.8:0.6 over=length in",
        "taylor=0..4 over=length in out norm=layer decay=linear",
        "taylor=0..2,coef=learned over=sum decay=softplus",
        "taylor=1,3 over=position in norm=l2",
        "power=2 over=sum,eps=0.1 conv=3",
        "power=4 over=sum out=cumulative",
        "power=0 over=sum",
        "feature=identity over=none norm=rms decay=softplus post",
        "taylor=0..6 over=sum out post=out norm=scaled_l2",
        "taylor=0..2,coef=learned write=delta,2,scale=0.3 over=length qk_norm=l2 decay=softplus",
        "power=2 write=delta over=none qk_norm=l2 conv=2 norm=layer",
        "taylor=0..2 over=sum,eps=1 decay=sigmoid,4,channel",
        "power=2 write=delta over=none qk_norm=l2 decay=mamba,channel",
    ];
    let presets = presets::all().iter().filter(|preset| finite(&preset.parts())).map(|preset| preset.text.to_string());
    presets.chain(more.map(String::from)).collect()
}

/// Presets and further combinations with bounded memory: windows, far states, write rules.
fn bounded_texts() -> Vec<String> {
    let more = [
        "exp window=3 over=sum,sink",
        "exp window=1 sinks=1 cap=2 in",
        "exp window=3 sinks=2 far(taylor=0..2) decay=softplus",
        "exp window=2 far(taylor=0..2 dim=1)",
        "exp window=4 sinks=1 far(taylor=0..3,coef=learned) out",
        "exp window=2 far(feature=hedgehog) over=length norm=rms qk_norm=rms",
        "taylor=0..2 window=3 far(power=2 scale=0.2) over=sum,eps=0.5 in post=silu,channel",
        "exp window=3 over=position decay=sigmoid",
        "taylor=0..3,coef=learned over=none norm=l2",
        "taylor=0..2,coef=1:0.9:0.5 over=length",
        "taylor=0..2 dim=1 over=sum decay=fixed",
        "feature=hedgehog scale=1 decay=mamba post=silu",
        "taylor=0..3 decay=given,channel over=none norm=l2",
        "feature=elu decay=sigmoid,16,channel over=sum",
        "taylor=0..2,coef=learned write=delta,2,scale=0.5 over=length qk_norm=l2 decay=softplus",
        "power=2 write=delta over=none qk_norm=l2 decay=mamba,channel norm=layer",
        "feature=elu write=delta,scale=0.3 over=none out post=out",
        "feature=hedgehog write=delta over=none conv=2 decay=given",
        "taylor=0..2 dim=2 write=delta,scale=0.2 over=none qk_norm=rms,all",
    ];
    let presets = presets::all().iter().filter(|preset| bounded(&preset.parts()) && !finite_texts().contains(&preset.text.to_string()));
    presets.map(|preset| preset.text.to_string()).chain(more.map(String::from)).collect()
}

/// y of the recurrence, compared with the reference in float64; whether the recurrence supports the case.
#[track_caller]
fn check_recurrence(case: &Case<f64>, bound: f64) -> bool {
    let Some(found) = oracle::recurrent(case) else { return false };
    let error = relative_rms(&found.y, &reference(case).y);
    let bound = bound.max(1e-14 * found.condition);
    assert!(error < bound, "{case}: outputs of the recurrence differ by {error:e}, bound {bound:e}");
    true
}

#[test]
fn recurrence_matches_the_reference_in_float64() {
    let _isa = same_isa();
    let mut rng = Rng(41);
    let mut supported = 0;
    for text in finite_texts() {
        for shape in [shape(1, 1, 1, 1, 2, 3), shape(2, 7, 4, 2, 2, 3), shape(1, 10, 2, 1, 4, 5)] {
            let lengths = (shape.batch > 1).then(|| vec![5, shape.time]);
            let case = Case::<f64>::random(&layer(&text, &shape), shape, lengths, 1.0, &mut rng);
            supported += check_recurrence(&case, 1e-12) as usize;
        }
    }
    assert!(supported > 40, "the recurrence supports only {supported} cases");
}

#[test]
fn chunks_of_any_length_match_the_reference() {
    let _isa = same_isa();
    let mut rng = Rng(43);
    // Monomials of high order overflow the precision of float32.
    let texts: Vec<String> = finite_texts().into_iter().chain(bounded_texts()).filter(|text| !text.contains("0..79")).collect();
    let mut states = 0;
    for text in texts {
        for shape in [shape(1, 1, 1, 1, 2, 3), shape(2, 7, 4, 2, 2, 3), shape(1, 11, 2, 1, 4, 5)] {
            let lengths = (shape.batch > 1).then(|| vec![5, shape.time]);
            let case = Case::<f32>::random(&layer(&text, &shape), shape, lengths, 0.7, &mut rng);
            if case.layer().check_trainable().is_err() {
                continue;
            }
            let expected = Expected::of(&case);
            if case.heads[0].remembered().is_none() {
                continue;
            }
            for chunk in [1, 3, shape.time, shape.time + 4] {
                expected.compare(&chunked(&case, chunk), &format!("{case} chunk {chunk}"));
                states += 1;
            }
        }
    }
    assert!(states > 400, "only {states} cases have a state");
}

/// Bounds on the float32 error per head: 1e-5, or for a worse conditioned head eight times the error of another float32 computation. For a
/// recurrent state that is chunk mode, since sums over monomials cancel where sums over keys do not: products of monomials are as large as
/// (Σ_i |q_i·k_i|)^n, however small (q·k)^n is.
fn narrow_bounds(case: &Case<f32>, memory: StateKind) -> Vec<f64> {
    let wide = reference(&case.cast::<f64>()).y;
    let errors = |engine: &mut dyn Attention<f32>| head_errors(&case.shape, &case.forward(engine).0, &wide);
    let mut bounds = errors(&mut case.naive());
    if memory == StateKind::Auto
        && let Ok(mut chunks) = case.fused(Mode::Chunk(Some(1)), &Scratch::default())
    {
        bounds.iter_mut().zip(errors(&mut chunks)).for_each(|(bound, chunks)| *bound = bound.max(chunks.min(MAX_STATE_ERROR)));
    }
    bounds.into_iter().map(|error| 1e-5f64.max(8.0 * error)).collect()
}

/// No state is allowed a larger relative error than eight times this, however badly conditioned.
const MAX_STATE_ERROR: f64 = 1e-3;

/// Relative errors of the outputs of each head.
fn head_errors(shape: &Shape, found: &[f32], expected: &[f64]) -> Vec<f64> {
    let Shape { heads, e, .. } = *shape;
    let own = |h: usize| (0..found.len()).filter(move |i| i / e % heads == h);
    let column = |h: usize| (own(h).map(|i| found[i]).collect::<Vec<f32>>(), own(h).map(|i| expected[i]).collect::<Vec<f64>>());
    (0..heads).map(column).map(|(found, expected)| relative_rms(&found, &expected)).collect()
}

#[track_caller]
fn check_steps(case: &Case<f32>) {
    let expected = reference(&case.cast::<f64>());
    for memory in [StateKind::Auto, StateKind::Cache] {
        let large = |variant: &Variant| variant.state_rows(case.shape.d).is_some_and(|rows| rows > 100_000);
        if memory == StateKind::Auto && case.heads.iter().any(large) {
            continue;
        }
        let mut state = case.state(memory);
        let (y, report) = stepped(case, &mut state);
        let errors = head_errors(&case.shape, &y, &expected.y);
        for (h, (error, bound)) in errors.iter().zip(narrow_bounds(case, memory)).enumerate() {
            assert!(*error <= bound, "{case} {memory:?}: outputs of head {h} differ by {error:e}, bound {bound:e}");
        }
        assert_eq!(place(&report), expected.place(), "{case} {memory:?}");
    }
}

#[test]
fn steps_match_the_reference_in_float32() {
    let _isa = same_isa();
    let mut rng = Rng(42);
    let shapes =
        [shape(1, 1, 1, 1, 2, 3), shape(2, 7, 4, 2, 2, 20), shape(1, 40, 6, 2, 6, 5), shape(1, 9, 2, 2, 4, 70), shape(1, 140, 2, 1, 4, 17)];
    let cached = presets::all().iter().filter(|preset| !finite(&preset.parts())).map(|preset| preset.text.to_string());
    for text in finite_texts().into_iter().chain(bounded_texts()).chain(cached) {
        for shape in shapes {
            let lengths = (shape.batch > 1).then(|| vec![5, shape.time]);
            let case = Case::<f32>::random(&layer(&text, &shape), shape, lengths, 1.0, &mut rng);
            check_steps(&case);
        }
    }
}

#[test]
fn caches_evaluate_polynomials_that_overflow_float32() {
    let _isa = same_isa();
    let mut rng = Rng(43);
    for text in ["taylor=0..80", "taylor=0..80 over=none norm=l2", "taylor=0..60 decay=softplus", "power=40 over=sum"] {
        let shape = shape(1, 140, 2, 1, 16, 8);
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, 40.0, &mut rng);
        assert!(!reference(&case).y.iter().all(|y| y.is_finite()), "{case}: the naive engine in float32 is finite");
        let (y, _) = stepped(&case, &mut case.state(StateKind::Cache));
        let error = relative_rms(&y, &reference(&case.cast::<f64>()).y);
        assert!(error < 2e-4, "{case}: off by {error:e}");
    }
}

/// A random layer of variants with finite maps.
fn random_finite<R: Real>(seed: u64) -> Case<R> {
    let mut rng = Rng(seed);
    loop {
        let shape = small_shape(&mut rng);
        let case = random_case::<R>(shape, 0.05, &mut rng);
        let rows = |variant: &Variant| variant.state_rows(shape.d).unwrap_or(u128::MAX);
        if case.heads.iter().all(|variant| finite(variant) && rows(variant) < 3000) {
            return case;
        }
    }
}

proptest! {
    // A fixed seed: about one random layer in a thousand amplifies rounding beyond any useful bound.
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, rng_seed: RngSeed::Fixed(7), ..ProptestConfig::default() })]

    #[test]
    fn random_layers_by_recurrence_in_float64(seed: u64) {
        check_recurrence(&random_finite::<f64>(seed), 1e-12);
    }

    #[test]
    fn random_layers_with_bounded_memory_in_chunks(seed: u64, chunk in 1usize..8) {
        let _isa = same_isa();
        let mut rng = Rng(seed);
        let shape = small_shape(&mut rng);
        let low = |variant: &Variant| variant.near.kernel.polynomial().is_none_or(|orders| orders.iter().all(|(n, _)| *n <= 5));
        let state = |variant: &Variant| bounded(variant) && variant.remembered().is_some() && low(variant);
        let case = random_case_of::<f32>(Shape { e: shape.e.max(3), ..shape }, 0.05, state, &mut rng);
        Expected::of(&case).compare_outputs(&chunked(&case, chunk).y, &format!("{case} chunk {chunk}"));
    }

    #[test]
    fn random_layers_step_by_step(seed: u64) {
        let _isa = same_isa();
        let mut rng = Rng(seed);
        let (heads, kv_heads) = rng.pick(&[(1, 1), (4, 2), (6, 1), (5, 1)]);
        let time = rng.pick(&[1, 2, 17, 131]);
        let shape = shape(rng.pick(&[1, 2]), time, heads, kv_heads, rng.pick(&[1, 2, 3, 4]), rng.pick(&[5, 16, 20, 48]));
        check_steps(&random_case::<f32>(shape, 0.05, &mut rng));
    }
}

/// The states of the two heads have different sizes, and scratch memory has the size of the larger one.
#[test]
fn delta_rule_with_channel_decay_in_chunks_next_to_a_larger_state() {
    let _isa = same_isa();
    let shape = shape(1, 7, 2, 2, 6, 3);
    let texts = ["taylor=0..2 rope=off", "feature=identity scale=1 write=delta over=none decay=sigmoid,4,channel qk_norm=l2 rope=off"];
    for texts in [texts, [texts[1], texts[0]]] {
        let heads: Vec<Variant> = texts.iter().map(|text| text.parse().expect("a variant")).collect();
        let case = Case::<f32>::random(&heads, shape, None, 1.0, &mut Rng(61));
        for chunk in [1, 3, 7] {
            Expected::of(&case).compare_outputs(&chunked(&case, chunk).y, &format!("{case} chunk {chunk}"));
        }
    }
}

#[test]
fn steps_match_on_every_instruction_set_and_are_bit_identical_for_any_thread_count() {
    let mut rng = Rng(43);
    // Large enough for several threads.
    let shape = shape(2, 3, 6, 3, 16, 40);
    let texts = [
        "taylor=0..3 over=sum",
        "taylor=0..3 decay=softplus",
        "taylor=0..2,coef=learned in over=length norm=rms",
        "softmax",
        "power=3 over=none",
        "power=2 write=delta over=none decay=softplus qk_norm=l2",
        "power=2 over=none decay=softplus,channel",
    ];
    for text in texts {
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, 1.0, &mut rng);
        on_every_isa(|_| check_steps(&case));
        let _isa = same_isa();
        let outputs = [1, 2, 5].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads can be started");
            let run = || stepped(&case, &mut case.state(StateKind::Auto)).0;
            pool.install(run).iter().map(|y| y.to_bits()).collect::<Vec<u32>>()
        });
        assert!(outputs.iter().all(|other| *other == outputs[0]), "{case}");
    }
}

#[test]
fn distinct_monomials_give_the_products_of_full_tensor_powers() {
    let _isa = same_isa();
    let mut rng = Rng(44);
    for d in 1..=4 {
        for n in 0..=6 {
            let (q, k): (Vec<f64>, Vec<f64>) = (0..d).map(|_| (rng.normal(), rng.normal())).unzip();
            let full =
                |x: &[f64]| (0..n).fold(vec![1.0], |power: Vec<f64>, _| power.iter().flat_map(|p| x.iter().map(move |x| p * x)).collect());
            let expected: f64 = full(&q).iter().zip(full(&k)).map(|(q, k)| q * k).sum();
            let basis = termwise_attention::Basis::new(d, &[n]).expect("a small basis");
            let packed = |x: &[f64]| {
                let mut rows = vec![0.0; basis.rows()];
                basis.of_one(x, &mut vec![0.0; basis.lower_order_rows()], &mut rows);
                rows
            };
            assert!(basis.rows() <= full(&q).len());
            let terms = packed(&q).into_iter().zip(packed(&k)).zip(basis.wide_inverse_factorials());
            let found: f64 = terms.map(|((q, k), c)| q * k * c).sum::<f64>() * (1..=n).product::<usize>() as f64;
            let magnitude: f64 = q.iter().zip(&k).map(|(q, k)| (q * k).abs()).sum::<f64>().powi(n as i32);
            assert!((found - expected).abs() <= 1e-12 * magnitude, "d = {d}, n = {n}: {found} and {expected}");
        }
    }
}

#[test]
fn heads_with_equal_keys_share_one_state() {
    let _isa = same_isa();
    let shape = shape(2, 1, 4, 2, 4, 16);
    let bytes = |texts: [&str; 4], memory| {
        let heads = texts.map(|text| text.parse::<Variant>().expect("a variant"));
        state_of(&heads, &shape, memory).expect("possible").bytes()
    };
    let natural = |texts| bytes(texts, StateKind::Auto) - bytes(["softmax"; 4], StateKind::Auto);
    // Two batch rows, two kv heads, 15 rows of 16 and one more for z.
    let unit = 15 * 17 * 4;
    assert_eq!(natural(["taylor=0..2"; 4]), 4 * unit);
    assert_eq!(natural(["taylor=0..2", "taylor=0..2,coef=1:2:3 scale=1", "taylor=0..2", "taylor=0..2 norm=l2 out"]), 4 * unit);
    assert_eq!(natural(["taylor=0..2 decay=softplus"; 4]), 8 * unit);
    assert_eq!(natural(["taylor=0..2 over=none"; 4]), 4 * 15 * 16 * 4);
    assert_eq!(natural(["taylor=0..2", "taylor=0..2 rope=off", "taylor=0..2", "taylor=0..2 in"]), 8 * unit);
    assert!(state_of(&layer("taylor=0..79", &shape), &Shape { d: 64, ..shape }, StateKind::Auto).is_err());
}

#[test]
fn nonpositive_denominators_are_reported_with_their_absolute_position() {
    let _isa = same_isa();
    let shape = shape(2, 6, 4, 2, 2, 3);
    let heads = layer("taylor=0..1 rope=off scale=1", &shape);
    let mut case = Case::<f32>::random(&heads, shape, None, 0.01, &mut Rng(45));
    // 1 + q·k of head 2 falls below zero at position 4 of row 1: its sum over 5 keys is 5 − 100.
    case.get_mut(Name::K).fill(1.0);
    case.get_mut(Name::Q).fill(0.0);
    case.get_mut(Name::Q)[((6 + 4) * 4 + 2) * 2] = -20.0;
    for memory in [StateKind::Auto, StateKind::Cache] {
        let (y, report) = stepped(&case, &mut state_of(&heads, &shape, memory).expect("possible"));
        assert_eq!(report.nonpositive, Some(Nonpositive { row: 1, head: 2, position: 4, value: -95.0 }));
        assert!(y.iter().all(|y| y.is_finite()));
    }
    for chunk in [1, 2, 6] {
        assert_eq!(chunked(&case, chunk).place(), Some((1, 2, 4)));
    }
    case.get_mut(Name::K)[3] = f32::NAN;
    let (_, report) = stepped(&case, &mut state_of(&heads, &shape, StateKind::Auto).expect("possible"));
    assert_eq!(place(&report), Some((0, 2, 0)), "NaN is not positive");
}

/// Every engine reports the true denominator, even if rows have a log scale or float32 overflows.
#[test]
fn all_engines_report_the_same_denominator() {
    let _isa = same_isa();
    let shape = shape(1, 3, 1, 1, 2, 2);
    // Scores of −500: weights beyond e^40, so that rows of high degree are rescaled.
    for (text, size) in [("taylor=0..1", 5.0), ("taylor=0..9", 500.0), ("power=9", 500.0), ("taylor=0..15 over=sum,eps=1", 100.0)] {
        let mut case = Case::<f32>::random(&layer(&format!("{text} scale=1 rope=off"), &shape), shape, None, 1.0, &mut Rng(47));
        case.get_mut(Name::Q).fill(-size);
        case.get_mut(Name::K).fill(0.5);
        let expected = reference(&case.cast::<f64>()).report.nonpositive.expect("a negative sum");
        assert!(expected.value < 0.0, "{text}");
        let mut found = vec![reference(&case).report, chunked(&case, 2).report];
        found.push(case.forward(&mut case.fused(Mode::Parallel, &Scratch::default()).expect("possible")).1);
        found.extend([StateKind::Auto, StateKind::Cache].map(|memory| stepped(&case, &mut case.state(memory)).1));
        for (engine, report) in found.iter().enumerate() {
            let found = report.nonpositive.unwrap_or_else(|| panic!("{text}: engine {engine} reports nothing"));
            assert_eq!((found.row, found.head, found.position), (0, 0, 0), "{text}");
            assert!((found.value / expected.value - 1.0).abs() < 1e-3, "{text}, engine {engine}: {} for {}", found.value, expected.value);
        }
    }
    // An infinite denominator and NaN are reported as not positive by every engine.
    for size in [f32::INFINITY, f32::NAN] {
        let mut case = Case::<f32>::random(&layer("power=2 scale=1 rope=off", &shape), shape, None, 1.0, &mut Rng(48));
        case.get_mut(Name::Q).fill(size);
        let mut found = vec![reference(&case).report, chunked(&case, 2).report];
        found.push(case.forward(&mut case.fused(Mode::Parallel, &Scratch::default()).expect("possible")).1);
        found.extend([StateKind::Auto, StateKind::Cache].map(|memory| stepped(&case, &mut case.state(memory)).1));
        for (engine, report) in found.iter().enumerate() {
            let value = report.nonpositive.map(|found| (found.position, found.value.is_finite()));
            assert_eq!(value, Some((0, false)), "engine {engine} at {size}");
        }
    }
}

#[test]
fn invalid_steps_are_rejected() {
    let _isa = same_isa();
    let shape = shape(1, 4, 2, 1, 4, 4);
    let heads = layer("taylor=0..2", &shape);
    let case = Case::<f32>::random(&heads, shape, None, 1.0, &mut Rng(46));
    let mut state = state_of(&heads, &shape, StateKind::Auto).expect("possible");
    let mut y = vec![0.0; 8];
    // Four positions instead of one.
    assert!(state.step(&case.inputs(), &mut y).is_err());
    let one = token(&case, 0);
    assert!(state.step(&one.inputs(), &mut y[..7]).is_err());
    assert_eq!((state.position(0), state.position(1), state.largest_score(0, 2)), (Some(0), None, None));
    assert!(state.step(&one.inputs(), &mut y).is_ok());
    let none = Inputs::new(&[], &[], &[]);
    assert!(state.step(&none, &mut y).is_err());
    assert_eq!(state.position(0), Some(1));
    state.clear();
    let mut again = vec![0.0; 8];
    state.step(&one.inputs(), &mut again).expect("possible");
    assert_eq!(y, again, "a cleared state is an empty one");
}
