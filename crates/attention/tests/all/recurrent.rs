//! The recurrent form against the reference: naive chunks of any length with all gradients, and the state token by token.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use termwise_attention::parts::kernel::Sign;
use termwise_attention::presets;
use termwise_attention::{Attention, Inputs, Memory, Mode, Nonpositive, Real, Scratch, Shape, Variant, relative_rms};

use crate::expected::{Results, place, reference, rms, run};
use crate::support::combos::{random_case, random_case_of, small_shape};
use crate::support::{Case, Name, Rng, layer, on_every_isa, planned, presets_of_every_engine, same_isa, shape, state_of, stepped, token};

fn chunked<R: Real>(case: &Case<R>, chunk: usize) -> Results<R> {
    run(case, case.recurrent(chunk))
}

/// Outputs and gradients within these relative bounds. A gradient that is zero by construction is rounding alone, held to
/// the bound at the size of the gradient of v, or to one.
#[track_caller]
fn compare<R: Real>(found: &Results<R>, expected: &Results<f64>, outputs: f64, gradients: f64, label: &str) {
    let error = relative_rms(&found.y, &expected.y);
    assert!(error < outputs, "{label}: outputs differ by {error:e}");
    for ((name, found), (_, wide)) in found.gradients.iter().zip(&expected.gradients) {
        let difference: Vec<f64> = found.iter().zip(wide).map(|(a, b)| a.wide() - b).collect();
        let floor = rms(&expected.gradients[2].1).max(1.0);
        let (error, bound) = (rms(&difference), gradients * rms(wide).max(floor));
        assert!(error <= bound, "{label}: gradients of {name:?} differ by {error:e}, bound {bound:e}");
    }
}

fn finite(variant: &Variant) -> bool {
    variant.clamp.is_none() && variant.cap.is_none() && variant.window.is_none() && variant.kernel.polynomial().is_some()
}

/// Whether what is kept does not grow with the positions: a state, a window, or both.
fn bounded(variant: &Variant) -> bool {
    variant.remembered().is_none_or(|weighing| weighing.has_finite_map())
}

/// Every preset with a finite map, and what the presets leave out.
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
    let presets = presets_of_every_engine().filter(|preset| finite(&preset.parts())).map(|preset| preset.text.to_string());
    presets.chain(more.map(String::from)).collect()
}

/// What the presets with states leave out: windows, far states, write rules.
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
        "exp window=2 far(taylor=0..2) decay=given,channel norm=rms qk_norm=l2",
    ];
    let presets = presets::all().iter().filter(|preset| bounded(&preset.parts()) && !finite_texts().contains(&preset.text.to_string()));
    presets.map(|preset| preset.text.to_string()).chain(more.map(String::from)).collect()
}

#[test]
fn chunks_of_all_that_is_bounded_are_the_reference_in_float64() {
    let mut rng = Rng(43);
    for text in bounded_texts() {
        for shape in [shape(1, 1, 1, 1, 2, 3), shape(2, 7, 4, 2, 2, 3), shape(1, 11, 2, 1, 4, 1)] {
            let lengths = (shape.batch > 1).then(|| vec![5, shape.time]);
            let case = Case::<f64>::random(&layer(&text, &shape), shape, lengths, 1.0, &mut rng);
            let expected = reference(&case);
            for chunk in [1, 3, shape.time, shape.time + 4] {
                let found = chunked(&case, chunk);
                compare(&found, &expected, 1e-11, 1e-11, &format!("{case} chunk {chunk}"));
                assert_eq!(found.place(), expected.place());
            }
        }
    }
    let mut states = 0;
    for _ in 0..150 {
        let case = random_case_of::<f64>(small_shape(&mut rng), 0.05, bounded, &mut rng);
        let (expected, chunk) = (reference(&case), 1 + rng.below(4));
        compare(&chunked(&case, chunk), &expected, 1e-10, 1e-10, &format!("{case} chunk {chunk}"));
        states += case.heads[0].remembered().is_some() as usize;
    }
    assert!(states > 50, "only {states} cases have a state");
}

#[test]
fn chunks_of_any_length_are_the_reference_in_float64() {
    let mut rng = Rng(41);
    let shapes = [shape(1, 1, 1, 1, 2, 3), shape(2, 7, 4, 2, 2, 3), shape(1, 10, 2, 1, 4, 5)];
    for text in finite_texts() {
        for shape in shapes {
            // 80 terms are too many for more than two dimensions.
            if text.contains("0..79") && shape.d > 2 {
                continue;
            }
            let lengths = (shape.batch > 1).then(|| vec![5, shape.time]);
            let case = Case::<f64>::random(&layer(&text, &shape), shape, lengths, 1.0, &mut rng);
            let expected = reference(&case);
            for chunk in [1, 3, shape.time, shape.time + 4] {
                let found = chunked(&case, chunk);
                compare(&found, &expected, 1e-12, 1e-12, &format!("{case} chunk {chunk}"));
                assert_eq!(found.place(), expected.place());
            }
        }
    }
}

/// Every variant with a finite map in place of those without: what float32 can do for the others is seen from the same layer.
fn made_finite(case: &Case<f32>) -> Case<f32> {
    let mut case = case.clone();
    for variant in &mut case.heads {
        (variant.clamp, variant.cap, variant.window, variant.sinks, variant.far) = (None, None, None, None, None);
        if !finite(variant) {
            variant.kernel = "taylor=0..2".parse::<Variant>().expect("a variant").kernel;
        }
    }
    case
}

/// What float32 can be held to for each head: 1e-5, or where a head is worse conditioned than that whoever computes it, eight
/// times the error of the naive computation of the same form. Moments cancel where sums over keys do not: their products of
/// monomials are as large as (Σ_i |q_i·k_i|)^n, however small (q·k)^n is.
fn narrow_bounds(case: &Case<f32>, memory: Memory) -> Vec<f64> {
    let errors = |case: &Case<f32>, mut engine: Box<dyn Attention<f32>>| {
        let mut y = vec![f32::NAN; case.dy.len()];
        engine.infer(&case.inputs(), &mut y).unwrap_or_else(|error| panic!("{case}: {error}"));
        head_errors(&case.shape, &y, &reference(&case.cast::<f64>()).y)
    };
    let mut bounds = errors(case, Box::new(case.naive()));
    if memory == Memory::Natural {
        let own = made_finite(case);
        let moments = errors(&own, Box::new(own.recurrent(1)));
        for ((bound, moments), variant) in bounds.iter_mut().zip(moments).zip(&case.heads) {
            *bound = if finite(variant) { bound.max(moments) } else { *bound };
        }
    }
    bounds.into_iter().map(|naive| 1e-5f64.max(8.0 * naive)).collect()
}

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
    for memory in [Memory::Natural, Memory::Cache] {
        let large = |variant: &Variant| variant.state_rows(case.shape.d).is_some_and(|rows| rows > 100_000);
        if memory == Memory::Natural && case.heads.iter().any(large) {
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
fn steps_are_the_reference_in_float32() {
    let mut rng = Rng(42);
    let shapes =
        [shape(1, 1, 1, 1, 2, 3), shape(2, 7, 4, 2, 2, 20), shape(1, 40, 6, 2, 6, 5), shape(1, 9, 2, 2, 4, 70), shape(1, 140, 2, 1, 4, 17)];
    let cached = presets_of_every_engine().filter(|preset| !finite(&preset.parts())).map(|preset| preset.text.to_string());
    for text in finite_texts().into_iter().chain(cached) {
        for shape in shapes {
            let lengths = (shape.batch > 1).then(|| vec![5, shape.time]);
            let case = Case::<f32>::random(&layer(&text, &shape), shape, lengths, 1.0, &mut rng);
            check_steps(&case);
        }
    }
}

#[test]
fn caches_hold_polynomials_beyond_float32() {
    let mut rng = Rng(43);
    for text in ["taylor=0..80", "taylor=0..80 over=none norm=l2", "taylor=0..60 decay=softplus", "power=40 over=sum"] {
        let shape = shape(1, 140, 2, 1, 16, 8);
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, 40.0, &mut rng);
        assert!(!reference(&case).y.iter().all(|y| y.is_finite()), "{case}: plain float32 would do");
        let (y, _) = stepped(&case, &mut case.state(Memory::Cache));
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

/// Norms of one or two values are all but signs: their gradients are rounding divided by small differences.
fn looseness(shape: &Shape) -> f64 {
    if shape.e < 3 { 100.0 } else { 1.0 }
}

/// Weights that change sign may cancel in float32 to any degree, and sums over monomials do so sooner than sums over keys.
fn may_cancel(variant: &Variant) -> bool {
    let compared = variant.denominator.sums() || variant.norm.scale_free();
    let orders = variant.kernel.polynomial().unwrap_or_default();
    compared && variant.kernel.sign() == Sign::Mixed && orders.iter().any(|&(n, _)| n > 1)
}

proptest! {
    // Fixed: once in thousands of layers rounding is amplified beyond any bound that would still find mistakes.
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, rng_seed: RngSeed::Fixed(7), ..ProptestConfig::default() })]

    #[test]
    fn random_layers_in_chunks_in_float64(seed: u64, chunk in 1usize..8) {
        let case = random_finite::<f64>(seed);
        let expected = reference(&case);
        compare(&chunked(&case, chunk), &expected, 1e-12, 1e-12 * looseness(&case.shape), &case.to_string());
    }

    #[test]
    fn random_layers_in_chunks_in_float32(seed: u64, chunk in 1usize..8) {
        let case = random_finite::<f32>(seed);
        prop_assume!(!case.heads.iter().any(may_cancel));
        let (expected, naive) = (reference(&case.cast::<f64>()), reference(&case));
        let found = chunked(&case, chunk);
        let off = |y: &[f32]| relative_rms(y, &expected.y);
        prop_assert!(off(&found.y) < 1e-5f64.max(8.0 * off(&naive.y)), "{case}: {:e}", off(&found.y));
        for (((name, found), (_, wide)), (_, naive)) in found.gradients.iter().zip(&expected.gradients).zip(&naive.gradients) {
            let off = |x: &[f32]| rms(&x.iter().zip(wide).map(|(a, b)| a.wide() - b).collect::<Vec<f64>>());
            let bound = (1e-4 * looseness(&case.shape) * rms(wide).max(rms(&expected.gradients[2].1)).max(1.0)).max(8.0 * off(naive));
            prop_assert!(off(found) <= bound, "{case}: gradients of {name:?} differ by {:e}, bound {bound:e}", off(found));
        }
    }

    #[test]
    fn random_layers_step_by_step(seed: u64) {
        let mut rng = Rng(seed);
        let (heads, kv_heads) = rng.pick(&[(1, 1), (4, 2), (6, 1), (5, 1)]);
        let time = rng.pick(&[1, 2, 17, 131]);
        let shape = shape(rng.pick(&[1, 2]), time, heads, kv_heads, rng.pick(&[1, 2, 3, 4]), rng.pick(&[5, 16, 20, 48]));
        check_steps(&random_case::<f32>(shape, 0.05, &mut rng));
    }
}

#[test]
fn every_instruction_set_and_any_number_of_threads() {
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
            let run = || stepped(&case, &mut case.state(Memory::Natural)).0;
            pool.install(run).iter().map(|y| y.to_bits()).collect::<Vec<u32>>()
        });
        assert!(outputs.iter().all(|other| *other == outputs[0]), "{case}");
    }
}

#[test]
fn packed_products_are_products_of_full_tensor_powers() {
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
fn heads_share_what_they_can_and_sizes_are_those_of_the_buffers() {
    let shape = shape(2, 1, 4, 2, 4, 16);
    let bytes = |texts: [&str; 4], memory| {
        let heads = texts.map(|text| text.parse::<Variant>().expect("a variant"));
        state_of(&heads, &shape, memory).expect("possible").bytes()
    };
    let natural = |texts| bytes(texts, Memory::Natural) - bytes(["softmax"; 4], Memory::Natural);
    // Two batch rows, two kv heads, 15 rows of 16 and one more for z.
    let unit = 15 * 17 * 4;
    assert_eq!(natural(["taylor=0..2"; 4]), 4 * unit);
    assert_eq!(natural(["taylor=0..2", "taylor=0..2,coef=1:2:3 scale=1", "taylor=0..2", "taylor=0..2 norm=l2 out"]), 4 * unit);
    assert_eq!(natural(["taylor=0..2 decay=softplus"; 4]), 8 * unit);
    assert_eq!(natural(["taylor=0..2 over=none"; 4]), 4 * 15 * 16 * 4);
    assert_eq!(natural(["taylor=0..2", "taylor=0..2 rope=off", "taylor=0..2", "taylor=0..2 in"]), 8 * unit);
    assert!(state_of(&layer("taylor=0..79", &shape), &Shape { d: 64, ..shape }, Memory::Natural).is_err());
}

#[test]
fn a_denominator_that_is_not_positive_is_named_by_its_absolute_position() {
    let shape = shape(2, 6, 4, 2, 2, 3);
    let heads = layer("taylor=0..1 rope=off scale=1", &shape);
    let mut case = Case::<f32>::random(&heads, shape, None, 0.01, &mut Rng(45));
    // 1 + q·k of head 2 falls below zero at position 4 of row 1: its sum over 5 keys is 5 − 100.
    case.get_mut(Name::K).fill(1.0);
    case.get_mut(Name::Q).fill(0.0);
    case.get_mut(Name::Q)[((6 + 4) * 4 + 2) * 2] = -20.0;
    for memory in [Memory::Natural, Memory::Cache] {
        let (y, report) = stepped(&case, &mut state_of(&heads, &shape, memory).expect("possible"));
        assert_eq!(report.nonpositive, Some(Nonpositive { row: 1, head: 2, position: 4, value: -95.0 }));
        assert!(y.iter().all(|y| y.is_finite()));
    }
    for chunk in [1, 2, 6] {
        assert_eq!(chunked(&case.cast::<f64>(), chunk).place(), Some((1, 2, 4)));
    }
    case.get_mut(Name::K)[3] = f32::NAN;
    let (_, report) = stepped(&case, &mut state_of(&heads, &shape, Memory::Natural).expect("possible"));
    assert_eq!(place(&report), Some((0, 2, 0)), "NaN is not positive");
}

/// Every engine reports the true denominator: also where rows have a log scale, and where float32 has overflowed.
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
        found.extend([Memory::Natural, Memory::Cache].map(|memory| stepped(&case, &mut case.state(memory)).1));
        for (engine, report) in found.iter().enumerate() {
            let found = report.nonpositive.unwrap_or_else(|| panic!("{text}: engine {engine} saw nothing"));
            assert_eq!((found.row, found.head, found.position), (0, 0, 0), "{text}");
            assert!((found.value / expected.value - 1.0).abs() < 1e-3, "{text}, engine {engine}: {} for {}", found.value, expected.value);
        }
    }
    // What is infinite or no number is not positive, whoever computes it.
    for size in [f32::INFINITY, f32::NAN] {
        let mut case = Case::<f32>::random(&layer("power=2 scale=1 rope=off", &shape), shape, None, 1.0, &mut Rng(48));
        case.get_mut(Name::Q).fill(size);
        let mut found = vec![reference(&case).report, chunked(&case, 2).report];
        found.push(case.forward(&mut case.fused(Mode::Parallel, &Scratch::default()).expect("possible")).1);
        found.extend([Memory::Natural, Memory::Cache].map(|memory| stepped(&case, &mut case.state(memory)).1));
        for (engine, report) in found.iter().enumerate() {
            let value = report.nonpositive.map(|found| (found.position, found.value.is_finite()));
            assert_eq!(value, Some((0, false)), "engine {engine} at {size}");
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let _isa = same_isa();
    let shape = shape(1, 4, 2, 1, 4, 4);
    for text in ["softmax", "taylor=0..2 clamp=5"] {
        assert!(planned(&layer(text, &shape), &shape).and_then(|layer| layer.recurrent::<f64>(1, 4, 2)).is_err());
    }
    assert!(planned(&layer("taylor=0..2", &shape), &shape).and_then(|layer| layer.recurrent::<f64>(1, 4, 0)).is_err());
    let heads = layer("taylor=0..2", &shape);
    let case = Case::<f32>::random(&heads, shape, None, 1.0, &mut Rng(46));
    let mut state = state_of(&heads, &shape, Memory::Natural).expect("possible");
    let mut y = vec![0.0; 8];
    // Four positions where one is asked for.
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
