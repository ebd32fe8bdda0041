//! The fused engine in float32 against the reference in float64: every preset and random layers, odd shapes, every
//! instruction set, any number of threads.
//!
//! Bounds are relative RMS errors: 1e-5 for outputs, 1e-4 for gradients. Some layers are worse conditioned than that in
//! float32, whoever computes them: sums that nearly cancel, powers of large scores, norms of short vectors. There the naive
//! float32 computation says what can be had, and the engine may be four times as far off.

mod support;

use std::sync::Mutex;

use support::combos::random_case;
use support::{Case, Name, Rng, Tensors, layer, presets_of_every_engine, shape};
use termwise_attention::simd::{self, Isa};
use termwise_attention::{Extra, Mode, Real, Report, Scratch, Shape, relative_rms};

/// The instruction set is chosen for the whole process: tests that choose one, or compare bits, take turns.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct Results<R> {
    y: Vec<R>,
    report: Report,
    gradients: Tensors<R>,
}

impl<R> Results<R> {
    /// Where a denominator was not positive.
    fn place(&self) -> Option<(usize, usize, usize)> {
        self.report.nonpositive.map(|n| (n.row, n.head, n.position))
    }
}

fn reference<R: Real>(case: &Case<R>) -> Results<R> {
    let mut engine = case.naive();
    let (y, report) = case.forward(&mut engine);
    Results { y, report, gradients: case.backward(&mut engine) }
}

fn fused(case: &Case<f32>, scratch: &Scratch) -> Results<f32> {
    let mut engine = case.fused(Mode::Parallel, scratch).unwrap_or_else(|error| panic!("{error}"));
    let (y, report) = case.forward(&mut engine);
    Results { y, report, gradients: case.backward(&mut engine) }
}

fn rms<R: Real>(x: &[R]) -> f64 {
    (x.iter().map(|x| x.wide().powi(2)).sum::<f64>() / x.len() as f64).sqrt()
}

/// What float32 can be held to for one case.
struct Expected {
    wide: Results<f64>,
    narrow: Results<f32>,
}

impl Expected {
    fn of(case: &Case<f32>) -> Expected {
        Expected { wide: reference(&case.cast()), narrow: reference(case) }
    }

    #[track_caller]
    fn compare(&self, found: &Results<f32>, label: &str) {
        self.compare_within(found, 1e-5, 1e-4, label);
        assert_eq!(found.place(), self.narrow.place(), "{label}");
    }

    #[track_caller]
    fn compare_within(&self, found: &Results<f32>, outputs: f64, gradients: f64, label: &str) {
        let Expected { wide, narrow } = self;
        // Outputs that are zero by construction, such as those of a power of the distance to the mean of one key, are rounding alone.
        let off = |y: &[f32]| if rms(&wide.y) < 1e-6 { rms(y) } else { relative_rms(y, &wide.y) };
        let bound = outputs.max(4.0 * off(&narrow.y));
        let error = off(&found.y);
        assert!(error < bound, "{label}: outputs differ by {error:e}, bound {bound:e}");
        for (((name, found), (_, expected)), (_, naive)) in found.gradients.iter().zip(&wide.gradients).zip(&narrow.gradients) {
            // Zero by construction or but for eps, such as a gate's before a norm or any before the norm of one value:
            // what is left is rounding, held to an absolute bound at dy of size 1.
            let scale = rms(expected);
            let floor = if scale < 1e-3 { 2e-5 * rms(&wide.gradients[2].1).max(1.0) } else { 0.0 };
            let off = |x: &[f32]| x.iter().zip(expected).map(|(x, e)| (x.wide() - e).powi(2)).sum::<f64>().sqrt() / (x.len() as f64).sqrt();
            // Of one number per head or so, which sums over all positions and may nearly cancel, the size says little about its rounding.
            let (gradients, floor) = if expected.len() < 16 { (3.0 * gradients, 3.0 * floor) } else { (gradients, floor) };
            // A rate of decay has the sum of what all its gates have: their size says what rounding can leave of it.
            let gates = wide.gradients.iter().find(|(other, _)| *other == Name::Extra(Extra::DecayGate));
            let terms = gates.filter(|_| *name == Name::Extra(Extra::DecayRate));
            let terms = terms.map_or(0.0, |(_, x)| rms(x) * (x.len() as f64 / expected.len() as f64).sqrt());
            let bound = (gradients * scale.max(terms)).max(4.0 * off(naive)).max(floor);
            let error = off(found);
            assert!(error <= bound, "{label}: gradients of {name:?} differ by {error:e} of {scale:e}, bound {bound:e}");
        }
    }
}

/// d is odd in some shapes, where RoPE cannot be.
fn without_rope(text: &str, shape: &Shape) -> String {
    if shape.d % 2 == 1 && !text.contains("rope") { format!("{text} rope=off") } else { text.to_string() }
}

fn lengths_for(shape: &Shape) -> Option<Vec<usize>> {
    (shape.batch > 1).then(|| (0..shape.batch).map(|b| if b == 0 { shape.time.div_ceil(2) } else { shape.time }).collect())
}

/// Windows and sinks that end anywhere in a tile, on one and on several tiles away.
#[test]
fn windows_of_any_size() {
    let _guard = alone();
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
            Expected::of(&case).compare(&fused(&case, &scratch), &format!("{case}"));
        }
    }
}

#[test]
fn every_preset_at_many_shapes() {
    let _guard = alone();
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
    for preset in presets_of_every_engine() {
        for shape in shapes {
            let heads = layer(&without_rope(preset.text, &shape), &shape);
            // With one dimension the norm of a key is its sign: gradients of what comes before it are rounding.
            if shape.d == 1 && heads[0].qk_norm.is_some() {
                continue;
            }
            // Twice the spread takes scores beyond the clamp of 5.
            let case = Case::<f32>::random(&heads, shape, lengths_for(&shape), 2.0, &mut rng);
            Expected::of(&case).compare(&fused(&case, &scratch), &case.to_string());
        }
    }
}

#[test]
fn random_layers_with_mixed_heads() {
    let _guard = alone();
    let scratch = Scratch::default();
    let mut rng = Rng(12);
    let mut mixed = 0;
    for _ in 0..120 {
        let (heads, kv_heads) = rng.pick(&[(1, 1), (4, 2), (6, 3), (4, 1)]);
        let time = rng.pick(&[1, 2, 17, 64, 100, 127, 128, 129, 150]);
        // Not e = 1 or 2: norms of so few values are all but signs, and their gradients rounding divided by a small difference.
        let (d, e) = (rng.pick(&[1, 2, 7, 16, 24, 32]), rng.pick(&[5, 16, 20, 48]));
        let case = random_case::<f32>(shape(rng.pick(&[1, 2]), time, heads, kv_heads, d, e), 0.02, &mut rng);
        mixed += case.heads.iter().any(|variant| *variant != case.heads[0]) as usize;
        Expected::of(&case).compare(&fused(&case, &scratch), &case.to_string());
    }
    assert!(mixed > 10, "only {mixed} layers mix their heads");
}

#[test]
fn every_instruction_set() {
    let _guard = alone();
    let before = simd::isa();
    let scratch = Scratch::default();
    let mut rng = Rng(13);
    let mut cases = Vec::new();
    for preset in presets_of_every_engine() {
        let shape = shape(1, 70, 2, 1, 20, 12);
        cases.push(Case::<f32>::random(&layer(preset.text, &shape), shape, None, 2.0, &mut rng));
    }
    for _ in 0..40 {
        cases.push(random_case::<f32>(shape(2, 37, 4, 2, 10, 17), 0.02, &mut rng));
    }
    for case in &cases {
        let expected = Expected::of(case);
        for isa in Isa::available() {
            assert!(simd::choose(isa));
            expected.compare(&fused(case, &scratch), &format!("{} {case}", isa.name()));
        }
    }
    simd::choose(before);
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let _guard = alone();
    let mut rng = Rng(14);
    let mut cases = Vec::new();
    for preset in presets_of_every_engine() {
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
        // Every pool has its own scratch, and the first case of another shape has left something in it.
        let results = pools.each_ref().map(|pool| pool.install(|| fused(case, &Scratch::default())));
        for (pool, other) in pools.iter().zip(&results).skip(1) {
            let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            let threads = pool.current_num_threads();
            assert!(same(&results[0].y, &other.y), "{case}: outputs differ with {threads} threads");
            for ((name, a), (_, b)) in results[0].gradients.iter().zip(&other.gradients) {
                assert!(same(a, b), "{case}: gradients of {name:?} differ with {threads} threads");
            }
        }
    }
}

#[test]
fn scratch_memory_carries_nothing_over() {
    let _guard = alone();
    let mut rng = Rng(15);
    let scratch = Scratch::default();
    let large = shape(2, 140, 6, 3, 40, 24);
    let poisonous = layer("exp over=sum in out post decay=softplus norm=layer conv=4", &large);
    let mut poison = Case::<f32>::random(&poisonous, large, None, 1.0, &mut rng);
    for (_, tensor) in &mut poison.tensors {
        tensor.fill(f32::NAN);
    }
    for preset in presets_of_every_engine() {
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
    let _guard = alone();
    let scratch = Scratch::default();
    let mut rng = Rng(16);
    for preset in presets_of_every_engine() {
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
fn long_scores_do_not_overflow() {
    let _guard = alone();
    let scratch = Scratch::default();
    let mut rng = Rng(17);
    for text in ["softmax", "norm", "exp over=length norm=rms decay=softplus", "exp over=sum,floor=1", "exp over=none norm=layer out"] {
        let shape = shape(1, 100, 2, 1, 16, 8);
        // Scores of several hundred: e^x is far beyond float32.
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, 150.0, &mut rng);
        let found = fused(&case, &scratch);
        assert!(found.y.iter().all(|y| y.is_finite()), "{case}");
        Expected::of(&case).compare(&found, &case.to_string());
    }
}

#[test]
fn polynomials_beyond_float32_do_not_overflow() {
    let _guard = alone();
    let before = simd::isa();
    let scratch = Scratch::default();
    let mut rng = Rng(18);
    for (text, spread) in [
        ("taylor=0..80", 40.0),
        ("taylor=0..80 over=none norm=l2", 40.0),
        ("taylor=0..80 in out decay=softplus", 40.0),
        ("taylor=0..24 over=length norm=rms decay=softplus", 150.0),
        ("taylor=0..40 over=sum,floor=1", 60.0),
        ("taylor=0..40,at=3 over=sum", 60.0),
        ("taylor=0..60 over=none norm=layer out", 40.0),
        ("taylor=0,2,4,6,8,10,12,14,16,18,20,22,24,26,coef=learned over=sum", 200.0),
        ("power=30 over=sum", 60.0),
    ] {
        let shape = shape(1, 200, 2, 1, 16, 8);
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, spread, &mut rng);
        let expected = Expected::of(&case);
        assert!(!expected.narrow.y.iter().all(|y| y.is_finite()), "{case}: plain float32 would do");
        for isa in Isa::available() {
            assert!(simd::choose(isa));
            let found = fused(&case, &scratch);
            assert!(found.y.iter().all(|y| y.is_finite()), "{case}");
            // Scores in the hundreds are right to 1e-5 in float32, and a weight's relative error is that of its score times its order.
            expected.compare_within(&found, 2e-4, 2e-3, &case.to_string());
            assert_eq!(found.place(), None, "{case}");
        }
    }
    simd::choose(before);
}
