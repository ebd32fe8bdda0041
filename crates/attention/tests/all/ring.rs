//! Exact keys in memory of a fixed size: windows, heavy hitters, quantized keys, far keys. One policy, computed in four ways: plain sets of positions in
//! float64, a full sequence, token by token, and any split of these.

use termwise_attention::{Attention, Error, Mode, Scratch, Shape, State, StateKind, Variant, relative_rms};

use crate::support::{Case, Name, Rng, grads_of, layer, on_every_isa, same_isa, shape, stepped};

const TEXTS: [&str; 23] = [
    "exp window=9 sinks=3",
    "exp window=9 sinks=3 bits=8",
    "exp window=130 bits=4",
    "exp window=1",
    "exp window=9 sinks=3 chosen=7",
    "exp window=140 sinks=1 chosen=5,fade=9",
    "exp window=9 sinks=3 chosen=7 bits=8",
    "exp window=5 sinks=2 chosen=131 bits=4",
    "exp window=9 chosen=7 over=sum,sink cap=3 out post=silu",
    "exp window=9 sinks=3 far(taylor=0..2,coef=learned scale=0.5 dim=3)",
    "exp window=9 sinks=3 far(taylor=0..2,coef=learned scale=0.5 dim=3) over=sum,sink",
    "exp window=1 far(taylor=0,coef=learned scale=1 dim=2)",
    "exp window=9 sinks=3 chosen=6 far(taylor=0..2,coef=learned scale=0.5 dim=3)",
    "exp window=9 sinks=3 bits=16",
    "exp window=9 sinks=130 chosen=7 bits=8,4",
    "exp window=9 chosen=6 far(feature=hedgehog)",
    "exp window=9 sinks=4 bits=4,16",
    "exp window=9 sinks=3 chosen=4 qk_norm=rms conv=3 norm=rms",
    "exp window=20 chosen=3 over=length norm=l2",
    "exp window=9 sinks=3 decay=softplus in",
    "exp window=7 decay=softplus,channel",
    "exp window=9 far(taylor=0..2 dim=2) decay=sigmoid in",
    "feature=elu window=5 sinks=1 far(taylor=0..2 dim=2) over=sum",
];

fn case(text: &str, shape: Shape, rng: &mut Rng) -> Case<f32> {
    let lengths = (shape.batch > 1).then(|| (0..shape.batch).map(|b| if b == 0 { shape.time.div_ceil(2) } else { shape.time }).collect());
    Case::random(&layer(text, &shape), shape, lengths, 0.7, rng)
}

fn shapes() -> [Shape; 3] {
    [shape(2, 150, 4, 2, 8, 12), shape(1, 330, 2, 1, 6, 17), shape(1, 40, 6, 2, 4, 5)]
}

#[test]
fn full_sequences_and_steps_match_the_reference() {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(71);
    for text in TEXTS {
        for shape in shapes() {
            let case = case(text, shape, &mut rng);
            let (expected, _) = case.cast::<f64>().forward(&mut case.cast::<f64>().naive());
            let expected: Vec<f32> = expected.iter().map(|&y| y as f32).collect();
            for mode in [Mode::Parallel, Mode::Auto] {
                let (y, _) = case.forward(&mut case.fused(mode, &scratch).unwrap_or_else(|error| panic!("{case}: {error}")));
                let error = relative_rms(&expected, &y);
                assert!(error < 2e-5, "{mode} {case}: {error}");
            }
            let (y, _) = stepped(&case, &mut case.state(StateKind::Auto));
            let error = relative_rms(&expected, &y);
            assert!(error < 2e-5, "token by token {case}: {error}");
        }
    }
}

/// Positions `from..to` of a case with one row.
fn part(case: &Case<f32>, from: usize, to: usize) -> Case<f32> {
    let time = case.shape.time;
    let mut part = case.clone();
    part.shape.time = to - from;
    for (name, x) in &mut part.tensors {
        if !matches!(name, Name::AuxTensor(aux) if !aux.is_gate_logits()) {
            let width = x.len() / time;
            *x = x[from * width..to * width].to_vec();
        }
    }
    part.dy.truncate((to - from) * case.shape.heads * case.shape.e);
    part
}

#[test]
fn any_split_into_prompts_steps_and_files_gives_the_same_outputs() -> Result<(), Error> {
    let _isa = same_isa();
    let path = std::env::temp_dir().join(format!("termwise-ring-{}.safetensors", std::process::id()));
    let scratch = Scratch::default();
    let mut rng = Rng(72);
    for text in TEXTS {
        let case = case(text, shape(1, 300, 4, 2, 8, 12), &mut rng);
        let (expected, _) = case.forward(&mut case.fused(Mode::Parallel, &scratch)?);
        let mut state = case.state(StateKind::Auto);
        let mut y = Vec::new();
        for (i, (from, to)) in [(0, 2), (2, 3), (3, 60), (60, 61), (61, 62), (62, 250), (250, 300)].into_iter().enumerate() {
            let part = part(&case, from, to);
            let mut own = vec![f32::NAN; (to - from) * 4 * 12];
            if to - from == 1 {
                state.step(&part.inputs(), &mut own)?;
            } else {
                part.continuing(StateKind::Auto, Mode::Auto, &scratch)?.extend(&mut state, &part.inputs(), &mut own)?;
            }
            y.extend(own);
            if i % 2 == 0 {
                state.save(&path)?;
                let again = State::load(&path, &case.layer(), 1, StateKind::Auto)?;
                assert_eq!((again.position(0), again.bytes()), (state.position(0), state.bytes()), "{case}");
                state = again;
            }
        }
        let error = relative_rms(&expected, &y);
        assert!(error < 2e-5, "{case}: {error}");
        // The memory does not depend on the length of the sequence.
        let (width, e) = (case.shape.d, case.shape.e);
        let window = case.heads[0].window_bytes(width, e).expect("a window");
        let far = case.heads[0].state_rows(width).map_or(0, |rows| rows as usize * 4 * (16 + 1));
        assert!(state.is_constant() && state.bytes() <= 2 * (window + far) + 8192, "{case}: {} bytes, {window} of a window", state.bytes());
    }
    let _ = std::fs::remove_file(&path);
    Ok(())
}

/// Memory for all keys gives softmax attention.
#[test]
fn memory_for_all_keys_gives_softmax() -> Result<(), Error> {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(73);
    let softmax = case("exp", shape(1, 90, 4, 2, 8, 12), &mut rng);
    let (expected, _) = softmax.forward(&mut softmax.fused(Mode::Parallel, &scratch)?);
    for (text, bound) in [
        ("exp window=90", 0.0),
        ("exp window=10 sinks=80", 0.0),
        ("exp window=10 sinks=2 chosen=90", 1e-6),
        ("exp window=90 bits=16", 5e-3),
        ("exp window=90 bits=8", 1e-2),
        ("exp window=90 bits=4", 0.15),
        ("exp window=9 far(exp)", 1e-6),
    ] {
        let mut own = softmax.clone();
        own.heads = layer(text, &softmax.shape);
        let (y, _) = own.forward(&mut own.fused(Mode::Parallel, &scratch)?);
        let error = relative_rms(&expected, &y);
        assert!(error <= bound, "{text}: {error}");
    }
    Ok(())
}

/// A key with high attention weights is kept at any distance; other keys are evicted.
#[test]
fn keys_with_high_accumulated_attention_are_kept() {
    let _isa = same_isa();
    let shape = shape(1, 60, 1, 1, 4, 4);
    let mut rng = Rng(74);
    let mut case = Case::random(&layer("exp window=4 chosen=2 rope=off scale=1", &shape), shape, None, 0.1, &mut rng);
    // All queries match the first coordinate, which only key 7 has; its value differs from the others.
    for t in 0..60 {
        case.get_mut(Name::Q)[4 * t..][..4].copy_from_slice(&[3.0, 0.0, 0.0, 0.0]);
        let key = if t == 7 { [3.0, 0.0, 0.0, 0.0] } else { [0.0, 0.1, 0.0, 0.0] };
        case.get_mut(Name::K)[4 * t..][..4].copy_from_slice(&key);
        let value = if t == 7 { [1.0, 0.0, 0.0, 0.0] } else { [0.0, 1.0, 0.0, 0.0] };
        case.get_mut(Name::V)[4 * t..][..4].copy_from_slice(&value);
    }
    let (y, _) = stepped(&case, &mut case.state(StateKind::Auto));
    assert!(y[4 * 59] > 0.99, "key 7 was lost: {}", y[4 * 59]);
    let mut window = case.clone();
    window.heads = layer("exp window=6 rope=off scale=1", &shape);
    let (y, _) = stepped(&window, &mut window.state(StateKind::Auto));
    assert_eq!(y[4 * 59], 0.0);
}

#[test]
fn results_match_on_every_instruction_set_and_are_bit_identical_for_any_thread_count() {
    let mut rng = Rng(75);
    let pools = [1, 3].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads can be started"));
    for text in TEXTS {
        let case = case(text, shape(1, 90, 4, 2, 6, 12), &mut rng);
        let (expected, _) = case.cast::<f64>().forward(&mut case.cast::<f64>().naive());
        let expected: Vec<f32> = expected.iter().map(|&y| y as f32).collect();
        on_every_isa(|isa| {
            let run = || case.forward(&mut case.fused(Mode::Parallel, &Scratch::default()).expect("an engine")).0;
            let own = pools.each_ref().map(|pool| pool.install(run));
            assert_eq!(own[0], own[1], "{} {case}", isa.name());
            let error = relative_rms(&expected, &own[0]);
            assert!(error < 2e-5, "{} {case}: {error}", isa.name());
        });
    }
}

#[test]
fn unsupported_memory_and_training_are_rejected() {
    let _isa = same_isa();
    for (text, said) in [
        ("exp chosen=4", "window"),
        ("exp bits=4", "window"),
        ("exp window=4 bits=5", "8 or 4"),
        ("exp window=4 bits=8,x", "8 or 4"),
        ("exp window=4 bits=8 far(taylor=0..2)", "`bits` or `far`"),
        ("exp window=4 chosen=3 decay=softplus", "decay"),
        ("taylor=0..2 window=4 chosen=3", "exp"),
        ("exp window=4 chosen=0", "chosen"),
    ] {
        let error = text.parse::<Variant>().expect_err(text).to_string();
        assert!(error.contains(said), "{text}: {error}");
    }
    let shape = shape(1, 9, 2, 1, 4, 4);
    for (text, part) in [("exp window=4 chosen=3", "chosen"), ("exp window=4 bits=8", "bits"), ("exp window=4 chosen=2 bits=4", "chosen")] {
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, 1.0, &mut Rng(1));
        let refused = |error: Error| {
            let said = error.to_string();
            assert!(said.contains(&format!("`{part}` is inference-only")), "{text}: {said}");
        };
        let mut y = vec![0.0; case.dy.len()];
        refused(case.layer().check_trainable().expect_err(text));
        let mut engine = case.fused(Mode::Parallel, &Scratch::default()).expect("inference works");
        engine.infer(&case.inputs(), &mut y).expect("inference works");
        refused(engine.forward(&case.inputs(), &mut y).map(drop).expect_err(text));
        // A saved pass restored from its sums, as in automatic differentiation.
        let sums = [72 * 4, 18, 18].map(|n| vec![0.0; n]);
        let saved = engine.saved_from(&case.inputs(), [&sums[0], &sums[1], &sums[2]]).expect("sums");
        let mut gradients = case.tensors_of(0.0);
        refused(engine.backward(&case.inputs(), &saved, &case.dy, &mut grads_of(&mut gradients)).expect_err(text));
        refused(case.naive().forward(&case.inputs(), &mut y).map(drop).expect_err(text));
    }
}

/// More query heads per KV head than any fixed-size array of a step.
#[test]
fn hundreds_of_query_heads_share_one_kv_head() {
    let _isa = same_isa();
    let shape = shape(1, 7, 300, 1, 8, 8);
    for text in ["exp window=4 far(taylor=0..1) rope=off", "exp window=4 sinks=1 bits=8 rope=off"] {
        let case = case(text, shape, &mut Rng(76));
        let (expected, _) = case.cast::<f64>().forward(&mut case.cast::<f64>().naive());
        let expected: Vec<f32> = expected.iter().map(|&y| y as f32).collect();
        let (y, _) = stepped(&case, &mut case.state(StateKind::Auto));
        assert!(relative_rms(&expected, &y) < 2e-5, "{text}");
    }
}
