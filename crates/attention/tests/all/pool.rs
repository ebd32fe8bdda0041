//! Exact keys in memory of a fixed size: windows, chosen keys, codes, far keys around the mean of whole keys. One policy, four ways through it: plain sets of
//! positions in float64, a text at once, token by token, and any split of these.

use termwise_attention::{Attention, Error, Extra, Memory, Mode, Scratch, Shape, State, Variant, relative_rms};

use crate::expected::{Expected, assert_same_bits, fused, reference};
use crate::support::{Case, Name, Rng, grads_of, layer, on_every_isa, same_isa, shape, stepped};

const TEXTS: [&str; 18] = [
    "exp window=9 sinks=3",
    "exp window=9 sinks=3 bits=8",
    "exp window=130 bits=4",
    "exp window=1",
    "exp window=9 sinks=3 chosen=7",
    "exp window=140 sinks=1 chosen=5,fade=9",
    "exp window=9 sinks=3 chosen=7 bits=8",
    "exp window=5 sinks=2 chosen=131 bits=4",
    "exp window=9 chosen=7 over=sum,sink cap=3 out post=silu",
    "exp window=9 sinks=3 far(taylor=0..2,coef=learned scale=0.5 dim=3 centre=whole)",
    "exp window=9 sinks=3 far(taylor=0..2,coef=learned scale=0.5 dim=3 centre=whole,gauss) over=sum,sink",
    "exp window=1 far(taylor=0,coef=learned scale=1 dim=2 centre=whole,gauss)",
    "exp window=9 sinks=3 chosen=6 far(taylor=0..2 scale=0.5 dim=3 centre=whole,gauss) bits=8",
    "exp window=9 sinks=1 chosen=6 far(taylor=0..2 dim=3 centre=running)",
    "exp window=9 chosen=6 far(feature=hedgehog)",
    "exp window=9 sinks=4 bits=4 far(taylor=0..2 dim=2 centre=running,gauss)",
    "exp window=9 sinks=3 chosen=4 qk_norm=rms conv=3 norm=rms",
    "exp window=20 chosen=3 over=length norm=l2",
];

fn case(text: &str, shape: Shape, rng: &mut Rng) -> Case<f32> {
    let lengths = (shape.batch > 1).then(|| (0..shape.batch).map(|b| if b == 0 { shape.time.div_ceil(2) } else { shape.time }).collect());
    let mut case: Case<f32> = Case::random(&layer(text, &shape), shape, lengths, 0.7, rng);
    // A spread is one: symmetric, and no variance is negative.
    let (d, far) = (shape.d, Name::Extra(Extra::FarSpread));
    if case.heads[0].has_whole_centre() && case.tensors.iter().any(|(name, _)| *name == far) {
        let own = case.get_mut(far);
        for matrix in own.chunks_exact_mut(d * d) {
            let root = matrix.to_vec();
            for i in 0..d * d {
                matrix[i] = (0..d).map(|k| root[i / d * d + k] * root[i % d * d + k]).sum();
            }
        }
        case.get_mut(Name::Extra(Extra::FarGamma)).iter_mut().for_each(|gamma| *gamma = gamma.abs());
    }
    case
}

fn shapes() -> [Shape; 3] {
    [shape(2, 150, 4, 2, 8, 12), shape(1, 330, 2, 1, 6, 17), shape(1, 40, 6, 2, 4, 5)]
}

#[test]
fn texts_and_tokens_follow_the_plain_policy() {
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
            let (y, _) = stepped(&case, &mut case.state(Memory::Natural));
            let error = relative_rms(&expected, &y);
            assert!(error < 2e-5, "token by token {case}: {error}");
        }
    }
}

/// Positions from `from` to `to` of a case with one row.
fn part(case: &Case<f32>, from: usize, to: usize) -> Case<f32> {
    let time = case.shape.time;
    let mut part = case.clone();
    part.shape.time = to - from;
    for (name, x) in &mut part.tensors {
        if !matches!(name, Name::Extra(extra) if !extra.is_gate_logits()) {
            let width = x.len() / time;
            *x = x[from * width..to * width].to_vec();
        }
    }
    part.dy.truncate((to - from) * case.shape.heads * case.shape.e);
    part
}

#[test]
fn any_split_over_prompts_tokens_and_files_is_the_same_text() -> Result<(), Error> {
    let _isa = same_isa();
    let path = std::env::temp_dir().join(format!("termwise-pool-{}.safetensors", std::process::id()));
    let scratch = Scratch::default();
    let mut rng = Rng(72);
    for text in TEXTS {
        let case = case(text, shape(1, 300, 4, 2, 8, 12), &mut rng);
        let (expected, _) = case.forward(&mut case.fused(Mode::Parallel, &scratch)?);
        let mut state = case.state(Memory::Natural);
        let mut y = Vec::new();
        for (i, (from, to)) in [(0, 2), (2, 3), (3, 60), (60, 61), (61, 62), (62, 250), (250, 300)].into_iter().enumerate() {
            let part = part(&case, from, to);
            let mut own = vec![f32::NAN; (to - from) * 4 * 12];
            if to - from == 1 {
                state.step(&part.inputs(), &mut own)?;
            } else {
                part.continuing(Memory::Natural, Mode::Auto, &scratch)?.extend(&mut state, &part.inputs(), &mut own)?;
            }
            y.extend(own);
            if i % 2 == 0 {
                state.save(&path)?;
                let again = State::load(&path, &case.layer(), 1, Memory::Natural)?;
                assert_eq!((again.position(0), again.bytes()), (state.position(0), state.bytes()), "{case}");
                state = again;
            }
        }
        let error = relative_rms(&expected, &y);
        assert!(error < 2e-5, "{case}: {error}");
        // Memory is that of the places, however long the text was.
        let (width, e) = (case.shape.d, case.shape.e);
        let window = case.heads[0].window_bytes(width, e).expect("a window");
        let far = case.heads[0].state_rows(width).map_or(0, |rows| rows as usize * 4 * (16 + 1));
        let mean = if case.heads[0].has_whole_centre() { 8 * width } else { 8 * 3 };
        assert!(
            state.is_constant() && state.bytes() <= 2 * (window + far + mean) + 8192,
            "{case}: {} bytes, {window} of a window",
            state.bytes()
        );
    }
    let _ = std::fs::remove_file(&path);
    Ok(())
}

/// What is as large as the text is softmax itself.
#[test]
fn memories_that_hold_everything_are_softmax() -> Result<(), Error> {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(73);
    let softmax = case("exp", shape(1, 90, 4, 2, 8, 12), &mut rng);
    let (expected, _) = softmax.forward(&mut softmax.fused(Mode::Parallel, &scratch)?);
    for (text, bound) in [
        ("exp window=90", 0.0),
        ("exp window=10 sinks=80", 0.0),
        ("exp window=10 sinks=2 chosen=90", 1e-6),
        ("exp window=90 bits=8", 2e-2),
        ("exp window=9 far(exp)", 1e-6),
    ] {
        let mut own = softmax.clone();
        own.heads = layer(text, &softmax.shape);
        let d = softmax.shape.d;
        for (extra, value) in [(Extra::CodeCentre, 0.0), (Extra::CodeRange, 4.0)].into_iter().filter(|_| own.heads[0].bits.is_some()) {
            own.tensors.push((Name::Extra(extra), vec![value; 2 * d]));
        }
        let (y, _) = own.forward(&mut own.fused(Mode::Parallel, &scratch)?);
        let error = relative_rms(&expected, &y);
        assert!(error <= bound, "{text}: {error}");
    }
    Ok(())
}

/// A key that is looked at again and again stays, however long ago it was; one that is not goes.
#[test]
fn keys_are_kept_for_what_they_receive() {
    let _isa = same_isa();
    let shape = shape(1, 60, 1, 1, 4, 4);
    let mut rng = Rng(74);
    let mut case = Case::random(&layer("exp window=4 chosen=2 rope=off scale=1", &shape), shape, None, 0.1, &mut rng);
    // All queries look for the first coordinate, which only key 7 has; its value is marked.
    for t in 0..60 {
        case.get_mut(Name::Q)[4 * t..][..4].copy_from_slice(&[3.0, 0.0, 0.0, 0.0]);
        let key = if t == 7 { [3.0, 0.0, 0.0, 0.0] } else { [0.0, 0.1, 0.0, 0.0] };
        case.get_mut(Name::K)[4 * t..][..4].copy_from_slice(&key);
        let value = if t == 7 { [1.0, 0.0, 0.0, 0.0] } else { [0.0, 1.0, 0.0, 0.0] };
        case.get_mut(Name::V)[4 * t..][..4].copy_from_slice(&value);
    }
    let (y, _) = stepped(&case, &mut case.state(Memory::Natural));
    assert!(y[4 * 59] > 0.99, "key 7 was lost: {}", y[4 * 59]);
    let mut window = case.clone();
    window.heads = layer("exp window=6 rope=off scale=1", &shape);
    let (y, _) = stepped(&window, &mut window.state(Memory::Natural));
    assert_eq!(y[4 * 59], 0.0);
}

#[test]
fn every_instruction_set_and_any_number_of_threads() {
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
fn what_cannot_be_kept_or_trained_is_refused() {
    for (text, said) in [
        ("exp chosen=4", "window"),
        ("exp bits=4", "window"),
        ("exp window=4 bits=5", "4 or 8"),
        ("exp window=4 chosen=3 decay=softplus", "decay"),
        ("taylor=0..2 window=4 chosen=3", "exp"),
        ("exp window=4 far(taylor=0..2 centre=whole)", "dim"),
        ("exp window=4 far(taylor=2 dim=2 centre=whole)", "whole series"),
        ("exp centre=whole", "far"),
        ("exp window=4 chosen=0", "chosen"),
    ] {
        let error = text.parse::<Variant>().expect_err(text).to_string();
        assert!(error.contains(said), "{text}: {error}");
    }
    let text = "exp window=4 chosen=3 far(taylor=0..2 dim=2 centre=running)";
    let case = Case::<f32>::random(&layer(text, &shape(1, 9, 2, 1, 4, 4)), shape(1, 9, 2, 1, 4, 4), None, 1.0, &mut Rng(1));
    let mut y = vec![0.0; case.dy.len()];
    let error = case.fused(Mode::Parallel, &Scratch::default()).and_then(|mut engine| engine.forward(&case.inputs(), &mut y).map(drop));
    assert!(error.is_err_and(|error| error.to_string().contains("chosen with far keys and centre=running")));
}

/// Variants with a backward pass, without codes.
const SMOOTH: [&str; 9] = [
    "exp window=3 sinks=1 chosen=2",
    "exp window=2 chosen=3,fade=3 over=sum,sink cap=3 out post=silu",
    "exp window=3 sinks=1 far(taylor=0..2,coef=learned scale=0.5 dim=3 centre=whole)",
    "exp window=2 sinks=1 far(taylor=0..2,coef=learned scale=0.5 dim=3 centre=whole,gauss) over=sum,sink",
    "exp window=1 far(taylor=0,coef=learned scale=1 dim=2 centre=whole,gauss)",
    "exp window=3 chosen=2 far(taylor=0..3 scale=0.5 dim=3 centre=whole,gauss) qk_norm=rms conv=2 norm=rms",
    "exp window=2 sinks=1 chosen=2 far(feature=hedgehog dim=2)",
    "exp window=2 chosen=2 far(taylor=0..2,coef=learned dim=3 centre=learned,gauss) over=sum,eps=0.5",
    "taylor=0..2,coef=learned window=3 far(taylor=0..1 dim=2 centre=whole,gauss) over=sum,eps=0.5 rope=off",
];

/// Every gradient of the naive engine in float64 against differences of its forward pass by the four-point rule. A step that changes a choice says nothing of
/// the slope; a finer one rarely does.
#[test]
fn gradients_are_slopes_while_the_choice_stays() {
    let mut rng = Rng(76);
    let (mut entries, mut finer) = (0, 0);
    for text in SMOOTH {
        for shape in [shape(1, 9, 4, 2, 4, 3), shape(2, 7, 2, 1, 4, 2)] {
            let mut case = case(text, shape, &mut rng).cast::<f64>();
            let mut engine = case.naive();
            let gradients = case.backward(&mut engine);
            let layer = case.layer();
            let is_trained = |name: &Name| !layer.extras().iter().any(|spec| Name::Extra(spec.extra) == *name && !spec.trained);
            for (tensor, (name, gradient)) in gradients.iter().enumerate().filter(|(_, (name, _))| is_trained(name)) {
                for (i, &found) in gradient.iter().enumerate() {
                    let mut seen = Vec::new();
                    for h in [1e-3, 1e-4, 1e-5] {
                        let x = case.tensors[tensor].1[i];
                        let mut at = |step: f64| {
                            case.tensors[tensor].1[i] = x + step * h;
                            let (y, _) = case.forward(&mut engine);
                            let counts =
                                |row: usize| case.lengths.as_ref().is_none_or(|lengths| row % shape.time < lengths[row / shape.time]);
                            let rows = y.chunks(shape.heads * shape.e).zip(case.dy.chunks(shape.heads * shape.e)).enumerate();
                            rows.filter(|(row, _)| counts(*row))
                                .flat_map(|(_, (y, dy))| y.iter().zip(dy))
                                .map(|(y, dy)| y * dy)
                                .sum::<f64>()
                        };
                        let slope = (8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / (12.0 * h);
                        case.tensors[tensor].1[i] = x;
                        seen.push(slope);
                        if (found - slope).abs() <= 1e-7 + 1e-5 * slope.abs() {
                            break;
                        }
                        assert!(h > 1e-5, "{case}: gradient of {name:?}[{i}] is {found}, differences {seen:?}");
                    }
                    entries += 1;
                    finer += usize::from(seen.len() > 1);
                }
            }
        }
    }
    assert!(50 * finer < entries, "{finer} of {entries} entries needed a finer step");
}

/// Straight through: with codes, the gradients are those of the keys and values that the codes stand for, as if these had been given.
#[test]
fn gradients_pass_through_codes() {
    let mut rng = Rng(77);
    let shape = shape(1, 40, 4, 2, 6, 5);
    for (bits, far) in [(8, ""), (4, " far(taylor=0..2,coef=learned scale=0.5 dim=3 centre=whole,gauss)")] {
        let text = format!("exp window=9 sinks=3 chosen=5{far} rope=off");
        let coded = case(&format!("{text} bits={bits}"), shape, &mut rng);
        let mut plain = coded.clone();
        plain.heads = layer(&text, &shape);
        plain.tensors.retain(|(name, _)| !matches!(name, Name::Extra(Extra::CodeCentre | Extra::CodeRange)));
        let (centre, range) = (coded.get(Name::Extra(Extra::CodeCentre)).to_vec(), coded.get(Name::Extra(Extra::CodeRange)).to_vec());
        let levels = ((1u32 << bits) - 1) as f32;
        for row in 3..40 {
            for (c, k) in plain.get_mut(Name::K)[row * 12..][..12].iter_mut().enumerate() {
                let code = (0.5 * levels * (1.0 + (*k - centre[c]) / range[c])).round().clamp(0.0, levels);
                *k = centre[c] + range[c] * (2.0 * code / levels - 1.0);
            }
            for value in plain.get_mut(Name::V)[row * 10..][..10].chunks_mut(5) {
                let (low, high) = value.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &v| (low.min(v), high.max(v)));
                let step = (high - low) / levels;
                value.iter_mut().for_each(|v| *v = low + step * ((*v - low) / step).round().clamp(0.0, levels));
            }
        }
        let (coded, plain) = (reference(&coded.cast::<f64>()), reference(&plain.cast::<f64>()));
        for (name, expected) in &plain.gradients {
            let found = &coded.gradients.iter().find(|(other, _)| other == name).expect("the same tensors").1;
            let error = relative_rms(found, expected);
            assert!(error < 1e-6, "{text} bits={bits}: gradients of {name:?} differ by {error:e}");
        }
        for extra in [Extra::CodeCentre, Extra::CodeRange] {
            let (_, found) = coded.gradients.iter().find(|(name, _)| *name == Name::Extra(extra)).expect("codes");
            assert!(found.iter().all(|&x| x == 0.0), "{extra:?} is calibrated and has a gradient");
        }
    }
}

fn trained() -> impl Iterator<Item = &'static str> {
    TEXTS.into_iter().chain(SMOOTH).filter(|text| text.parse::<Variant>().is_ok_and(|variant| variant.inference_only().is_none()))
}

#[test]
fn gradients_of_texts_are_those_of_the_plain_policy() {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(78);
    for text in trained() {
        for shape in shapes() {
            let case = case(text, shape, &mut rng);
            let expected = Expected::of_parallel(&case);
            for mode in [Mode::Parallel, Mode::Auto] {
                expected.compare(&fused(&case, &scratch, mode), &format!("{mode} {case}"));
            }
        }
    }
}

/// Heads that walk beside heads that do not, in one layer and on one kv head.
#[test]
fn gradients_of_heads_that_differ() {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(79);
    let shape = shape(2, 140, 6, 2, 6, 5);
    let far = "far(taylor=0..2,coef=learned scale=0.5 dim=3 centre=whole,gauss)";
    let own = [
        format!("exp window=9 sinks=3 {far}"),
        format!("exp window=20 chosen=4 {far}"),
        "exp window=9 sinks=3 chosen=4".to_owned(),
        "exp".to_owned(),
        format!("exp window=9 sinks=3 {far}"),
        format!("exp window=9 sinks=3 {far}"),
    ];
    let heads: Vec<Variant> = own.iter().map(|text| text.parse().expect("possible")).collect();
    let case: Case<f32> = Case::random(&heads, shape, Some(vec![90, 140]), 0.7, &mut rng);
    Expected::of_parallel(&case).compare(&fused(&case, &scratch, Mode::Auto), &case.to_string());
}

#[test]
fn gradients_on_every_instruction_set_and_any_number_of_threads() {
    let mut rng = Rng(80);
    let pools = [1, 2, 3].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads can be started"));
    for text in trained() {
        let case = case(text, shape(2, 90, 4, 2, 6, 12), &mut rng);
        let expected = Expected::of_parallel(&case);
        on_every_isa(|isa| {
            let results = pools.each_ref().map(|pool| pool.install(|| fused(&case, &Scratch::default(), Mode::Parallel)));
            expected.compare(&results[0], &format!("{} {case}", isa.name()));
            results[1..].iter().for_each(|other| assert_same_bits(&results[0], other, &format!("{} {case}", isa.name())));
        });
    }
}

/// Documents that lie behind each other in one row, some shorter than the window.
#[test]
fn gradients_of_packed_documents() {
    let _isa = same_isa();
    let mut rng = Rng(81);
    let documents = [0, 5, 60, 61, 150, 190];
    for text in trained() {
        let case = case(text, shape(1, 190, 4, 2, 6, 5), &mut rng);
        let run = |engine: &mut dyn Attention<f32>| {
            let mut y = vec![f32::NAN; case.dy.len()];
            let inputs = case.inputs().documents(&documents[..]);
            let saved = engine.forward(&inputs, &mut y).unwrap_or_else(|error| panic!("{case}: {error}"));
            let mut gradients = case.tensors_of(0.0);
            engine.backward(&inputs, &saved, &case.dy, &mut grads_of(&mut gradients)).unwrap_or_else(|error| panic!("{case}: {error}"));
            gradients
        };
        let expected = run(&mut case.naive());
        let found = run(&mut case.fused(Mode::Auto, &Scratch::default()).expect("an engine"));
        for ((name, found), (_, expected)) in found.iter().zip(&expected).filter(|(_, (_, x))| x.iter().any(|&x| x != 0.0)) {
            let error = relative_rms(found, expected);
            assert!(error < 5e-4, "{case}: gradients of {name:?} differ by {error:e}");
        }
    }
}
