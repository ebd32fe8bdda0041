//! Near and far branches and projections in float32 against the reference in float64: tiles, chunks, token by token, and any split of a
//! sequence among them.

use std::ops::Range;

use termwise_attention::{FusedOptions, Layer, Mode, Scratch, Shape, State, StateKind, Variant, relative_rms};

use crate::expected::{Expected, assert_same_bits, fused};
use crate::support::{Case, Name, Rng, layer, on_every_isa, same_isa, shape};

/// Together these variants have every part of the near and the far branch; each window is filled in.
const TEXTS: [&str; 20] = [
    "exp WINDOW far(taylor=0..2)",
    "exp WINDOW far(taylor=0..2 dim=3)",
    "exp WINDOW far(taylor=0..2 dim=2) over=sum,sink",
    "exp WINDOW far(taylor=0..2) decay=softplus in",
    "exp WINDOW far(taylor=0..2,coef=learned dim=3 scale=0.4) decay=softplus out",
    "exp WINDOW far(power=2 scale=0.3) over=sum,eps=0.5 in conv=3",
    "exp WINDOW far(feature=hedgehog) qk_norm=rms norm=rms over=length",
    "exp WINDOW far(feature=hedgehog dim=2) over=position in",
    "exp WINDOW far(feature=elu) cap=2 post=silu,channel",
    "exp WINDOW far(exp dim=3) decay=linear",
    "exp WINDOW far(exp cap=2 scale=0.3) over=none norm=l2",
    "exp WINDOW far(taylor=0..2 cap=2)",
    "exp WINDOW far(taylor=0..10)",
    "exp dim=3 WINDOW far(taylor=0..2)",
    "taylor=0..2 WINDOW far(power=2 scale=0.2) over=sum,eps=0.5 in",
    "taylor=0..2 dim=2 WINDOW far(taylor=0..1) over=sum,floor=0.2",
    "feature=hedgehog WINDOW far(exp)",
    "taylor=0..2 WINDOW far(taylor=0..2 dim=3) over=none norm=rms decay=sigmoid",
    "exp WINDOW over=sum,sink",
    "taylor=0..2,coef=learned dim=2 WINDOW far(taylor=0..2,coef=learned) rope=off",
];

/// Variants without a window whose keys are projected or mapped.
const WHOLE: [&str; 4] = [
    "taylor=0..2 dim=3 over=sum,eps=1e-3",
    "taylor=0..2 dim=2 decay=softplus in",
    "feature=hedgehog decay=sigmoid",
    "feature=hedgehog dim=2 over=length norm=rms",
];

fn texts(window: usize, sinks: usize) -> Vec<String> {
    let words = if sinks > 0 { format!("window={window} sinks={sinks}") } else { format!("window={window}") };
    let texts = TEXTS.iter().map(|text| text.replace("WINDOW", &words));
    texts.filter(|text| text.parse::<Variant>().is_ok()).collect()
}

fn lengths_for(shape: &Shape) -> Option<Vec<usize>> {
    (shape.batch > 1).then(|| (0..shape.batch).map(|b| if b == 0 { shape.time.div_ceil(2) } else { shape.time }).collect())
}

fn case(text: &str, shape: Shape, rng: &mut Rng) -> Case<f32> {
    Case::random(&layer(text, &shape), shape, lengths_for(&shape), 0.7, rng)
}

fn chunked(case: &Case<f32>) -> bool {
    case.heads.iter().any(|variant| variant.remembered().is_some_and(|weighing| weighing.has_finite_map()))
}

#[test]
fn tiles_and_chunks_match_the_reference() {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(61);
    let mut in_chunks = 0;
    for (shape, window, sinks) in [
        (shape(2, 150, 4, 2, 8, 12), 9, 3),
        (shape(1, 129, 2, 1, 6, 17), 128, 0),
        (shape(1, 300, 2, 1, 4, 5), 65, 70),
        (shape(1, 70, 2, 2, 6, 5), 1, 0),
        (shape(1, 40, 2, 1, 4, 5), 39, 1),
    ] {
        for text in texts(window, sinks).into_iter().chain(WHOLE.map(String::from)) {
            let case = case(&text, shape, &mut rng);
            let expected = Expected::of(&case);
            expected.compare(&fused(&case, &scratch, Mode::Parallel), &format!("parallel {case}"));
            for length in [7, 64, 100].into_iter().filter(|_| chunked(&case)) {
                expected.compare(&fused(&case, &scratch, Mode::Chunk(Some(length))), &format!("chunks of {length} {case}"));
                in_chunks += 1;
            }
        }
    }
    assert!(in_chunks > 200, "only {in_chunks} in chunks");
}

/// Windows that end inside a tile, at a tile boundary and several tiles away, with sinks before and after their ends.
#[test]
fn windows_of_any_size_match_the_reference() {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(62);
    let shape = shape(1, 300, 2, 1, 4, 5);
    for (window, sinks) in
        [(1, 1), (2, 0), (16, 129), (63, 1), (64, 64), (65, 2), (127, 0), (128, 128), (129, 5), (299, 0), (300, 1), (999, 9)]
    {
        let sinks = if sinks > 0 { format!(" sinks={sinks}") } else { String::new() };
        let case = case(&format!("exp window={window}{sinks} far(taylor=0..2 dim=2) decay=softplus"), shape, &mut rng);
        let expected = Expected::of(&case);
        for mode in [Mode::Parallel, Mode::Chunk(Some(1)), Mode::Chunk(Some(64)), Mode::Chunk(Some(90)), Mode::Chunk(Some(256))] {
            expected.compare(&fused(&case, &scratch, mode), &format!("{mode} {case}"));
        }
    }
}

#[test]
fn every_instruction_set_matches_the_reference() {
    let mut rng = Rng(63);
    for text in texts(11, 2).into_iter().chain(WHOLE.map(String::from)) {
        let case = case(&text, shape(1, 70, 2, 1, 6, 12), &mut rng);
        let expected = Expected::of(&case);
        on_every_isa(|isa| {
            for mode in [Mode::Parallel, Mode::Chunk(Some(20))].into_iter().filter(|mode| *mode == Mode::Parallel || chunked(&case)) {
                expected.compare(&fused(&case, &Scratch::default(), mode), &format!("{} {mode} {case}", isa.name()));
            }
        });
    }
}

#[test]
fn results_are_bit_identical_for_any_thread_count() {
    let _isa = same_isa();
    let mut rng = Rng(64);
    let pools = [1, 2, 3].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads can be started"));
    for text in texts(30, 2).into_iter().chain(WHOLE.map(String::from)) {
        let case = case(&text, shape(1, 400, 2, 1, 6, 10), &mut rng);
        for mode in [Mode::Parallel, Mode::Chunk(Some(24))].into_iter().filter(|mode| *mode == Mode::Parallel || chunked(&case)) {
            let results = pools.each_ref().map(|pool| pool.install(|| fused(&case, &Scratch::default(), mode)));
            for (pool, other) in pools.iter().zip(&results).skip(1) {
                assert_same_bits(&results[0], other, &format!("{mode} {case} with {} threads", pool.current_num_threads()));
            }
        }
    }
}

/// The positions of a case in this range.
fn part(case: &Case<f32>, range: &Range<usize>) -> Case<f32> {
    let Shape { batch, time, .. } = case.shape;
    let cut = |x: &[f32]| {
        let width = x.len() / (batch * time);
        (0..batch).flat_map(|b| &x[(b * time + range.start) * width..(b * time + range.end) * width]).copied().collect::<Vec<f32>>()
    };
    let tensor = |(name, x): &(Name, Vec<f32>)| match name {
        Name::AuxTensor(aux) if !aux.is_gate_logits() => (*name, x.clone()),
        _ => (*name, cut(x)),
    };
    let tensors = case.tensors.iter().map(tensor).collect();
    Case { shape: Shape { time: range.len(), ..case.shape }, tensors, lengths: None, dy: cut(&case.dy), ..case.clone() }
}

/// A case without lengths, split into single steps and calls of this many positions in this mode.
fn continued(case: &Case<f32>, stretches: &[(usize, Option<Mode>)], memory: StateKind) -> (Vec<f32>, State) {
    let (mut state, width) = (case.state(memory), case.shape.heads * case.shape.e);
    let mut y = vec![f32::NAN; case.dy.len()];
    let mut at = 0;
    for &(count, mode) in stretches.iter().cycle() {
        if at == case.shape.time {
            break;
        }
        let range = at..(at + count).min(case.shape.time);
        let pieces: Vec<Range<usize>> = match mode {
            Some(_) => vec![range.clone()],
            None => range.clone().map(|t| t..t + 1).collect(),
        };
        for piece in pieces {
            let own = part(case, &piece);
            let mut out = vec![f32::NAN; own.dy.len()];
            match mode {
                None => state.step(&own.inputs(), &mut out),
                Some(mode) => {
                    let mode = if mode == Mode::Parallel || chunked(case) { mode } else { Mode::Parallel };
                    own.continuing(memory, mode, &Scratch::default())
                        .and_then(|mut fused| fused.extend(&mut state, &own.inputs(), &mut out))
                }
            }
            .unwrap_or_else(|error| panic!("{case}: {error}"));
            for b in 0..case.shape.batch {
                let to = &mut y[(b * case.shape.time + piece.start) * width..][..piece.len() * width];
                to.copy_from_slice(&out[b * piece.len() * width..][..piece.len() * width]);
            }
        }
        at = range.end;
    }
    (y, state)
}

const STRETCHES: [&[(usize, Option<Mode>)]; 5] = [
    &[(1, None)],
    &[(1000, Some(Mode::Parallel))],
    &[(1000, Some(Mode::Chunk(Some(16))))],
    &[(37, Some(Mode::Chunk(Some(8)))), (5, None), (50, Some(Mode::Parallel))],
    &[(3, None), (1, Some(Mode::Parallel)), (11, Some(Mode::Chunk(Some(4))))],
];

#[test]
fn states_match_the_reference() {
    let _isa = same_isa();
    let mut rng = Rng(65);
    for (shape, window, sinks) in [
        (shape(2, 90, 4, 2, 6, 5), 9, 3),
        (shape(1, 300, 2, 1, 4, 5), 130, 1),
        (shape(1, 160, 2, 1, 4, 3), 1, 0),
        (shape(1, 40, 2, 1, 4, 5), 20, 30),
    ] {
        for text in texts(window, sinks).into_iter().chain(WHOLE.map(String::from)) {
            let case = Case { lengths: None, ..case(&text, shape, &mut rng) };
            let expected = Expected::of(&case);
            for memory in [StateKind::Auto, StateKind::Cache] {
                for stretches in STRETCHES {
                    let (y, _) = continued(&case, stretches, memory);
                    expected.compare_outputs(&y, &format!("{memory:?} {stretches:?} {case}"));
                }
            }
        }
    }
}

/// With w = 1 and values of 1, y is exactly the number of visible keys: t + 1.
#[test]
fn every_key_is_counted_once() {
    let _isa = same_isa();
    let mut rng = Rng(66);
    let shape = shape(1, 400, 2, 1, 2, 3);
    for (window, sinks) in [(1, 0), (1, 1), (5, 2), (64, 0), (65, 130), (128, 3), (129, 1), (200, 199), (400, 1)] {
        let sinks = if sinks > 0 { format!(" sinks={sinks}") } else { String::new() };
        let text = format!("taylor=0 window={window}{sinks} far(taylor=0 dim=1) over=none rope=off");
        let mut case = Case { lengths: None, ..case(&text, shape, &mut rng) };
        case.get_mut(Name::V).fill(1.0);
        let check = |y: &[f32], label: String| {
            for (t, row) in y.chunks_exact(6).enumerate() {
                assert!(row.iter().all(|&y| y == (t + 1) as f32), "{label}: {row:?} at {t}, {case}");
            }
        };
        for mode in [Mode::Parallel, Mode::Chunk(Some(1)), Mode::Chunk(Some(50)), Mode::Chunk(Some(128)), Mode::Chunk(Some(300))] {
            check(&fused(&case, &Scratch::default(), mode).y, mode.to_string());
        }
        for memory in [StateKind::Auto, StateKind::Cache] {
            for stretches in STRETCHES {
                check(&continued(&case, stretches, memory).0, format!("{memory:?} {stretches:?}"));
            }
        }
    }
}

#[test]
fn equal_near_and_far_kernels_give_full_attention() {
    let _isa = same_isa();
    let mut rng = Rng(67);
    let shape = shape(1, 200, 4, 2, 8, 6);
    for (kernel, rest) in [("exp", ""), ("exp", "decay=softplus in"), ("taylor=0..2", "over=sum"), ("exp", "over=sum,sink")] {
        let whole = case(&format!("{kernel} {rest}"), shape, &mut rng);
        for window in [1, 20, 128, 199] {
            let near = Case { heads: layer(&format!("{kernel} window={window} sinks=2 far({kernel}) {rest}"), &shape), ..whole.clone() };
            let (a, b) = (fused(&whole, &Scratch::default(), Mode::Parallel), fused(&near, &Scratch::default(), Mode::Parallel));
            assert!(relative_rms(&a.y, &b.y) < 1e-6, "{near}");
            for ((name, a), (_, b)) in a.gradients.iter().zip(&b.gradients) {
                assert!(relative_rms(a, b) < 1e-5, "{name:?} {near}");
            }
        }
    }
}

#[test]
fn a_window_as_long_as_the_sequence_has_no_effect() {
    let _isa = same_isa();
    let mut rng = Rng(68);
    let shape = shape(1, 150, 2, 1, 8, 6);
    for text in ["exp", "exp decay=softplus in", "taylor=0..2 over=sum", "exp over=sum,sink", "exp over=none norm=l2"] {
        let whole = case(text, shape, &mut rng);
        let alone = fused(&whole, &Scratch::default(), Mode::Parallel);
        for classes in ["window=150", "window=1000 far(taylor=0..2)", "window=3 sinks=150 far(power=2)", "window=150 far(exp cap=2)"] {
            let near = Case { heads: layer(&format!("{text} {classes}"), &shape), ..whole.clone() };
            assert_same_bits(&fused(&near, &Scratch::default(), Mode::Parallel), &alone, &near.to_string());
            let (y, _) = continued(&near, &[(1, None)], StateKind::Auto);
            let (exact, _) = continued(&whole, &[(1, None)], StateKind::Cache);
            assert_eq!(y, exact, "{near}");
        }
    }
}

#[test]
fn heads_with_different_windows_match_the_reference() {
    let _isa = same_isa();
    let mut rng = Rng(69);
    let shape = shape(2, 150, 4, 2, 6, 5);
    for texts in [
        ["exp window=8 far(taylor=0..2 dim=2)", "exp", "exp window=30 sinks=1 far(taylor=0..2 dim=2)", "taylor=0..2"],
        ["exp window=8 far(taylor=0..2)", "exp window=9 far(taylor=0..2)", "exp window=8", "feature=elu"],
        ["exp window=8 far(exp)", "exp window=20 far(taylor=0..2)", "taylor=0..2 dim=2", "taylor=0..3 dim=2 decay=softplus"],
    ] {
        let heads: Vec<Variant> = texts.map(|text| text.parse().unwrap_or_else(|error| panic!("{error}"))).into();
        let case = Case::<f32>::random(&heads, shape, lengths_for(&shape), 0.7, &mut rng);
        let expected = Expected::of(&case);
        for mode in [Mode::Parallel, Mode::Chunk(Some(20)), Mode::Chunk(Some(64)), Mode::Auto] {
            expected.compare(&fused(&case, &Scratch::default(), mode), &format!("{mode} {case}"));
        }
        let whole = Case { lengths: None, ..case };
        let expected = Expected::of(&whole);
        for stretches in STRETCHES {
            expected.compare_outputs(&continued(&whole, stretches, StateKind::Auto).0, &format!("{stretches:?} {whole}"));
        }
    }
}

#[test]
fn decoding_uses_constant_memory_and_states_can_be_saved() {
    let _isa = same_isa();
    let mut rng = Rng(70);
    let folder = std::env::temp_dir().join(format!("termwise-far-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    for text in ["exp window=20 sinks=3 far(taylor=0..2 dim=2) decay=softplus in", "taylor=0..2", "exp window=9 far(exp)"] {
        let mut case = Case { lengths: None, ..case(text, shape(1, 500, 2, 1, 4, 5), &mut rng) };
        let early = continued(&part(&case, &(0..200)), &[(1, None)], StateKind::Auto).1;
        let late = continued(&case, &[(1, None)], StateKind::Auto).1;
        assert_eq!(early.bytes() == late.bytes(), early.is_constant(), "{text}: {} and {} bytes", early.bytes(), late.bytes());
        assert_eq!(early.is_constant(), !text.contains("far(exp)"));
        let path = folder.join("state.safetensors");
        early.save(&path).unwrap_or_else(|error| panic!("{error}"));
        let mut loaded = State::load(&path, &case.layer(), 1, StateKind::Auto).unwrap_or_else(|error| panic!("{error}"));
        let mut kept = early.clone();
        for t in 200..260 {
            let own = part(&case, &(t..t + 1));
            let mut y = [vec![0.0; 10], vec![0.0; 10]];
            for (state, y) in [&mut kept, &mut loaded].into_iter().zip(&mut y) {
                state.step(&own.inputs(), y).unwrap_or_else(|error| panic!("{error}"));
            }
            assert_eq!(y[0], y[1], "{text} at {t}");
        }
        kept.clear();
        case = part(&case, &(0..50));
        let mut again = Vec::new();
        for t in 0..50 {
            let mut y = vec![0.0; 10];
            kept.step(&part(&case, &(t..t + 1)).inputs(), &mut y).unwrap_or_else(|error| panic!("{error}"));
            again.extend(y);
        }
        assert_eq!(again, continued(&case, &[(1, None)], StateKind::Auto).0, "{text}: cleared is new");
    }
    std::fs::remove_dir_all(&folder).expect("a folder");
}

#[test]
fn unsupported_combinations_are_rejected_with_a_reason() {
    let said = |text: &str, d: usize| {
        let layer = Layer::new(2, 1, d).variant(&*format!("{text} rope=off"));
        layer.and_then(|layer| layer.fused_with(1, 8, FusedOptions::default()).map(drop)).expect_err(text).to_string()
    };
    assert!(said("exp window=0", 4).contains("contains no key"));
    assert!(said("taylor=0..2 dim=5", 4).contains("larger than the head dimension 4"));
    assert!(said("exp window=3 far(taylor=0..2 dim=9)", 4).contains("larger than the head dimension 4"));
    // A far kernel without a finite feature map stores its keys.
    let endless: Variant = "exp window=3 far(exp)".parse().expect("a variant");
    assert!(endless.warnings().iter().any(|warning| warning.contains("keeps all keys")), "{:?}", endless.warnings());
    let layer = Layer::new(2, 1, 4).variant("exp window=3 far(exp) rope=off").expect("a layer");
    assert!(!layer.state(1).expect("a state").is_constant());
}
