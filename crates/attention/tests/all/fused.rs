//! The fused engine in float32 against the reference in float64: every preset and random layers, odd shapes, every
//! instruction set, any number of threads.
//!
//! Bounds are relative RMS errors: 1e-5 for outputs, 1e-4 for gradients. Some layers are worse conditioned in float32: sums that nearly cancel,
//! powers of large scores, norms of short vectors. For them the bound is four times the error of the naive float32 computation.

use termwise_attention::{Mode, Scratch, Shape, presets};

use crate::expected::{self, Expected, Results, assert_same_bits};
use crate::support::combos::random_case;
use crate::support::{Case, Name, Rng, layer, on_every_isa, same_isa, shape};

fn fused(case: &Case<f32>, scratch: &Scratch) -> Results<f32> {
    expected::fused(case, scratch, Mode::Parallel)
}

/// RoPE requires an even d, which some shapes do not have.
fn without_rope(text: &str, shape: &Shape) -> String {
    if shape.d % 2 == 1 && !text.contains("rope") { format!("{text} rope=off") } else { text.to_string() }
}

fn lengths_for(shape: &Shape) -> Option<Vec<usize>> {
    (shape.batch > 1).then(|| (0..shape.batch).map(|b| if b == 0 { shape.time.div_ceil(2) } else { shape.time }).collect())
}

/// Windows and sinks that end inside a tile, at a tile boundary and several tiles away.
#[test]
fn windows_of_any_size_match_the_reference() {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(17);
    let shape = shape(2, 300, 2, 1, 6, 5);
    for (window, sinks) in
        [(1, 0), (2, 1), (16, 129), (100, 3), (127, 0), (128, 128), (129, 5), (172, 40), (290, 3), (300, 0), (9999, 9999)]
    {
        for parts in ["exp", "exp cap=2 decay=softplus in", "taylor=0..2,coef=learned over=length cap=1.5"] {
            let sinks = if sinks > 0 { format!(" sinks={sinks}") } else { String::new() };
            let text = format!("{parts} window={window}{sinks}");
            let case = Case::<f32>::random(&layer(&text, &shape), shape, lengths_for(&shape), 1.0, &mut rng);
            Expected::of_parallel(&case).compare(&fused(&case, &scratch), &format!("{case}"));
        }
    }
}

#[test]
fn every_preset_matches_the_reference_at_many_shapes() {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(11);
    let shapes = [
        shape(1, 1, 1, 1, 16, 16),
        shape(2, 2, 4, 2, 7, 1),
        shape(2, 17, 6, 3, 16, 32),
        shape(1, 63, 4, 1, 1, 7),
        shape(1, 64, 1, 1, 64, 64),
        shape(2, 65, 4, 2, 32, 16),
        shape(1, 128, 2, 1, 16, 16),
        shape(2, 129, 1, 1, 64, 64),
        shape(1, 130, 1, 1, 80, 128),
        shape(1, 257, 2, 1, 16, 7),
        shape(1, 33, 1, 1, 256, 256),
        shape(1, 70, 1, 1, 128, 80),
    ];
    for preset in presets::all() {
        for shape in shapes {
            let heads = layer(&without_rope(preset.text, &shape), &shape);
            // In one dimension the normalized key is its sign: gradients before the norm are rounding errors.
            if shape.d == 1 && heads[0].qk_norm.is_some() {
                continue;
            }
            // Twice the standard deviation gives scores beyond the clamp of 5.
            let case = Case::<f32>::random(&heads, shape, lengths_for(&shape), 2.0, &mut rng);
            Expected::of_parallel(&case).compare(&fused(&case, &scratch), &case.to_string());
        }
    }
}

#[test]
fn random_layers_with_mixed_heads_match_the_reference() {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(12);
    let mut mixed = 0;
    for _ in 0..120 {
        let (heads, kv_heads) = rng.pick(&[(1, 1), (4, 2), (6, 3), (4, 1)]);
        let time = rng.pick(&[1, 2, 17, 64, 100, 127, 128, 129, 150]);
        // Not e = 1 or 2: norms of so few values are nearly signs, and their gradients are rounding errors divided by a small difference.
        let (d, e) = (rng.pick(&[1, 2, 7, 16, 24, 32]), rng.pick(&[5, 16, 20, 48]));
        let case = random_case::<f32>(shape(rng.pick(&[1, 2]), time, heads, kv_heads, d, e), 0.02, &mut rng);
        mixed += case.heads.iter().any(|variant| *variant != case.heads[0]) as usize;
        Expected::of_parallel(&case).compare(&fused(&case, &scratch), &case.to_string());
    }
    assert!(mixed > 10, "only {mixed} layers mix their heads");
}

#[test]
fn every_instruction_set_matches_the_reference() {
    let scratch = Scratch::default();
    let mut rng = Rng(13);
    let mut cases = Vec::new();
    for preset in presets::all() {
        let shape = shape(1, 70, 2, 1, 20, 12);
        cases.push(Case::<f32>::random(&layer(preset.text, &shape), shape, None, 2.0, &mut rng));
    }
    for _ in 0..40 {
        cases.push(random_case::<f32>(shape(2, 37, 4, 2, 10, 17), 0.02, &mut rng));
    }
    for case in &cases {
        let expected = Expected::of_parallel(case);
        on_every_isa(|isa| expected.compare(&fused(case, &scratch), &format!("{} {case}", isa.name())));
    }
}

#[test]
fn results_are_bit_identical_for_any_thread_count() {
    let _isa = same_isa();
    let mut rng = Rng(14);
    let mut cases = Vec::new();
    for preset in presets::all() {
        let shape = shape(2, 150, 4, 2, 16, 12);
        cases.push(Case::<f32>::random(&layer(preset.text, &shape), shape, lengths_for(&shape), 1.0, &mut rng));
    }
    for _ in 0..20 {
        cases.push(random_case::<f32>(shape(1, 131, 6, 3, 8, 9), 0.02, &mut rng));
    }
    // Many tiles of keys that add to the same queries.
    for text in [
        "softmax",
        "exp over=sum decay=softplus",
        "taylor=0..2,coef=learned over=length in",
        "exp over=none write=delta,scale=0.2 qk_norm=l2 decay=softplus",
    ] {
        let shape = shape(1, 900, 2, 1, 8, 8);
        cases.push(Case::<f32>::random(&layer(text, &shape), shape, None, 1.0, &mut rng));
    }
    let pools = [1, 2, 3, 7].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads can be started"));
    for case in &cases {
        // Every pool has its own scratch memory, which contains values from the first case of another shape.
        let results = pools.each_ref().map(|pool| pool.install(|| fused(case, &Scratch::default())));
        for (pool, other) in pools.iter().zip(&results).skip(1) {
            assert_same_bits(&results[0], other, &format!("{case} with {} threads", pool.current_num_threads()));
        }
    }
}

#[test]
fn results_do_not_depend_on_previous_scratch_contents() {
    let _isa = same_isa();
    let mut rng = Rng(15);
    let scratch = Scratch::default();
    let large = shape(2, 140, 6, 3, 40, 24);
    let poisonous = layer("exp over=sum in out post decay=softplus norm=layer conv=4", &large);
    let mut poison = Case::<f32>::random(&poisonous, large, None, 1.0, &mut rng);
    for (_, tensor) in &mut poison.tensors {
        tensor.fill(f32::NAN);
    }
    for preset in presets::all() {
        let shape = shape(1, 70, 4, 2, 16, 9);
        let case = Case::<f32>::random(&layer(preset.text, &shape), shape, Some(vec![67]), 1.0, &mut rng);
        let fresh = fused(&case, &Scratch::default());
        let spoilt = fused(&poison, &scratch);
        assert!(spoilt.y.iter().all(|y| y.is_nan()), "NaN inputs give NaN outputs");
        let again = fused(&case, &scratch);
        assert_eq!(fresh.y, again.y, "{case}");
        assert_eq!(fresh.gradients, again.gradients, "{case}");
    }
}

#[test]
fn padding_is_neither_read_nor_written() {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(16);
    for preset in presets::all() {
        let shape = shape(2, 70, 4, 2, 8, 6);
        let lengths = vec![41, 70];
        let mut case = Case::<f32>::random(&layer(preset.text, &shape), shape, Some(lengths), 1.0, &mut rng);
        let clean = fused(&case, &scratch);
        for (name, width) in [(Name::Q, 32), (Name::K, 16), (Name::V, 12)] {
            case.get_mut(name)[41 * width..70 * width].fill(f32::NAN);
        }
        case.dy[41 * 24..70 * 24].fill(f32::NAN);
        let found = fused(&case, &scratch);
        assert!(found.y[41 * 24..70 * 24].iter().all(|&y| y == 0.0), "{case}: outputs of padding are zero");
        assert_eq!(found.y, clean.y, "{case}");
        assert_eq!(found.gradients, clean.gradients, "{case}");
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(17);
    for text in ["softmax", "norm", "exp over=length norm=rms decay=softplus", "exp over=sum,floor=1", "exp over=none norm=layer out"] {
        let shape = shape(1, 100, 2, 1, 16, 8);
        // Scores of several hundred: e^x is far beyond float32.
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, 150.0, &mut rng);
        let found = fused(&case, &scratch);
        assert!(found.y.iter().all(|y| y.is_finite()), "{case}");
        Expected::of_parallel(&case).compare(&found, &case.to_string());
    }
}

#[test]
fn polynomials_beyond_float32_do_not_overflow() {
    let scratch = Scratch::default();
    let mut rng = Rng(18);
    for (text, spread) in [
        ("taylor=0..80", 40.0),
        ("taylor=0..80 over=none norm=l2", 40.0),
        ("taylor=0..80 in out decay=softplus", 40.0),
        ("taylor=0..24 over=length norm=rms decay=softplus", 150.0),
        ("taylor=0..40 over=sum,floor=1", 60.0),
        ("taylor=0..40 over=sum", 60.0),
        ("taylor=0..60 over=none norm=layer out", 40.0),
        ("taylor=0,2,4,6,8,10,12,14,16,18,20,22,24,26,coef=learned over=sum", 200.0),
        ("power=30 over=sum", 60.0),
    ] {
        let shape = shape(1, 200, 2, 1, 16, 8);
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, spread, &mut rng);
        let expected = Expected::of_parallel(&case);
        assert!(!expected.narrow.y.iter().all(|y| y.is_finite()), "{case}: plain float32 would do");
        on_every_isa(|isa| {
            let label = format!("{} {case}", isa.name());
            let found = fused(&case, &scratch);
            assert!(found.y.iter().all(|y| y.is_finite()), "{label}");
            // Scores in the hundreds have an error of 1e-5 in float32, and the relative error of a weight is that of its score times its order.
            expected.compare_within(&found, 2e-4, 2e-3, &label);
            assert_eq!(found.place(), None, "{label}");
        });
    }
}
