//! Forward and backward passes in chunk mode.

use proptest::prelude::*;
use termwise_attention::{FusedOptions, Mode, Scratch, Shape, Variant, presets, relative_rms};

use crate::chunk::random_layers;
use crate::expected::{Expected, assert_same_bits, fused};
use crate::support::combos::random_case;
use crate::support::{Case, Name, Rng, layer, on_every_isa, planned, same_isa, shape};

/// Together these variants have every part that is carried between chunks.
const TEXTS: [&str; 24] = [
    "taylor=0..2 over=sum",
    "taylor=0..2 over=sum,floor=1 decay=softplus in out",
    "taylor=0..3 over=length decay=linear in norm=layer",
    "taylor=0..4 over=none norm=rms post out",
    "taylor=1 over=length conv=3",
    "taylor=0,2 over=sum,eps=0.5 in rope=off",
    "taylor=0..4 over=sum decay=softplus",
    "taylor=0..2,coef=1:0.9:0.8 over=sum,eps=1 in",
    "taylor=0..2,coef=learned over=sum,eps=1 decay=softplus",
    "taylor=0..3,coef=learned over=length",
    "taylor=0 over=sum decay=softplus",
    "power=2 over=sum,detached,eps=1e-3 out=cumulative",
    "power=3 over=position in decay=softplus",
    "power=1 over=position norm=l2",
    "feature=elu over=sum decay=softplus conv=2",
    "feature=relu over=sum,eps=1e-2 out post=out norm=scaled_l2",
    "power=1 over=none write=delta qk_norm=l2",
    "feature=identity over=none write=delta,2 decay=mamba qk_norm=l2 conv=2 norm=rms",
    "taylor=0..2,coef=learned over=none write=delta,scale=0.5 qk_norm=l2 decay=softplus",
    "power=2 over=length write=delta,2,scale=-0.7 qk_norm=l2 post=silu",
    "feature=identity over=none decay=given,channel norm=rms",
    "taylor=0..2 over=sum,eps=1 decay=softplus,channel in",
    "taylor=0..3,coef=learned over=length decay=sigmoid,4,channel rope=off",
    "power=2 over=none write=delta,scale=0.8 qk_norm=l2 decay=mamba,channel conv=2",
];

fn finite(variant: &Variant, shape: &Shape) -> bool {
    variant.window.is_none() && variant.state_size(shape.d, shape.e).is_some_and(|size| size < 300_000)
}

fn lengths_for(shape: &Shape) -> Option<Vec<usize>> {
    (shape.batch > 1).then(|| (0..shape.batch).map(|b| if b == 0 { shape.time.div_ceil(2) } else { shape.time }).collect())
}

/// Small queries keep powers of scores well above rounding errors.
fn case(heads: &[Variant], shape: Shape, rng: &mut Rng) -> Case<f32> {
    Case::random(heads, shape, lengths_for(&shape), 0.7, rng)
}

#[test]
fn chunks_of_any_length_match_the_reference() {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(31);
    for text in TEXTS {
        for shape in [shape(2, 150, 4, 2, 8, 12), shape(1, 129, 2, 1, 6, 17), shape(1, 1, 1, 1, 4, 4), shape(1, 300, 1, 1, 4, 16)] {
            let case = case(&layer(text, &shape), shape, &mut rng);
            let expected = Expected::of(&case);
            for length in [1, 7, 64, 100, 128, 200, shape.time] {
                expected.compare(&fused(&case, &scratch, Mode::Chunk(Some(length))), &format!("chunks of {length} {case}"));
            }
        }
    }
}

#[test]
fn every_preset_with_a_finite_state_matches_the_reference() {
    let _isa = same_isa();
    let scratch = Scratch::default();
    let mut rng = Rng(32);
    let mut names = Vec::new();
    for preset in presets::all() {
        for shape in [shape(1, 1, 1, 1, 16, 16), shape(2, 65, 4, 2, 32, 16), shape(2, 129, 6, 3, 16, 32), shape(1, 257, 2, 1, 64, 64)] {
            let heads = layer(preset.text, &shape);
            if !finite(&heads[0], &shape) {
                assert!(
                    heads[0].window.is_some()
                        || heads[0].near.clamp.is_some()
                        || heads[0].state_rows(shape.d).is_none_or(|rows| rows > 10_000),
                    "{}",
                    preset.text
                );
                continue;
            }
            names.push(preset.text);
            let case = case(&heads, shape, &mut rng);
            let expected = Expected::of(&case);
            for mode in [Mode::Chunk(None), Mode::Chunk(Some(7)), Mode::Auto] {
                expected.compare(&fused(&case, &scratch, mode), &format!("{mode} {case}"));
            }
        }
    }
    names.dedup();
    assert!(names.len() >= 4, "{names:?}");
}

proptest! {
    #![proptest_config(random_layers(120))]

    #[test]
    fn random_layers_with_mixed_heads_match_the_reference(
        seed in any::<u64>(), length in 1usize..150, time in 1usize..180, dims in (1usize..9, 3usize..34), heads in 0usize..4, batch in 1usize..3,
    ) {
        let _isa = same_isa();
        let mut rng = Rng(seed);
        let (h, g) = [(1, 1), (4, 2), (6, 3), (4, 1)][heads];
        let shape = shape(batch, time, h, g, dims.0, dims.1);
        // Orders whose float32 monomials cancel no worse than the naive sum at scores of this size.
        let low = |variant: &Variant| variant.near.kernel.polynomial().is_none_or(|orders| orders.iter().all(|(n, _)| *n <= 5));
        // In one dimension a power of the query is a factor of the row, which such a norm cancels: its gradient is a rounding error.
        let felt = |variant: &Variant| shape.d > 1 || !variant.norm.scale_free();
        let case = loop {
            let case = random_case::<f32>(shape, 0.05, &mut rng);
            let heads = &case.heads;
            if heads.iter().any(|variant| finite(variant, &shape)) && heads.iter().all(low) && heads.iter().all(felt) {
                break case;
            }
        };
        let found = fused(&case, &Scratch::default(), Mode::Chunk(Some(length)));
        Expected::of(&case).compare(&found, &format!("chunks of {length} {case}"));
    }
}

#[test]
fn every_instruction_set_matches_the_reference() {
    let mut rng = Rng(33);
    for text in TEXTS {
        let shape = shape(1, 70, 4, 2, 5, 12);
        let text = if text.contains("rope") { text.to_string() } else { format!("{text} rope=off") };
        let case = case(&layer(&text, &shape), shape, &mut rng);
        let expected = Expected::of(&case);
        on_every_isa(|isa| {
            for length in [20, 32] {
                let found = fused(&case, &Scratch::default(), Mode::Chunk(Some(length)));
                expected.compare(&found, &format!("{} chunks of {length} {case}", isa.name()));
            }
        });
    }
}

#[test]
fn results_are_bit_identical_for_any_thread_count() {
    let _isa = same_isa();
    let mut rng = Rng(34);
    let pools = [1, 2, 3].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads can be started"));
    for text in TEXTS {
        for shape in [shape(1, 500, 1, 1, 6, 10), shape(2, 150, 4, 2, 6, 10)] {
            let case = case(&layer(text, &shape), shape, &mut rng);
            let results = pools.each_ref().map(|pool| pool.install(|| fused(&case, &Scratch::default(), Mode::Chunk(Some(24)))));
            for (pool, other) in pools.iter().zip(&results).skip(1) {
                assert_same_bits(&results[0], other, &format!("{case} with {} threads", pool.current_num_threads()));
            }
        }
    }
}

#[test]
fn later_tokens_do_not_change_earlier_outputs() {
    let _isa = same_isa();
    let mut rng = Rng(35);
    for text in TEXTS {
        let shape = shape(1, 200, 2, 1, 6, 10);
        let mut case = case(&layer(text, &shape), shape, &mut rng);
        let run = |case: &Case<f32>| fused(case, &Scratch::default(), Mode::Chunk(Some(32))).y;
        let before = run(&case);
        for from in [33, 100, 199] {
            for (name, width) in [(Name::Q, 12), (Name::K, 6), (Name::V, 10)] {
                case.get_mut(name)[from * width..].iter_mut().for_each(|x| *x = -*x);
            }
            assert_eq!(run(&case)[..from * 20], before[..from * 20], "{case} from {from}");
            for (name, width) in [(Name::Q, 12), (Name::K, 6), (Name::V, 10)] {
                case.get_mut(name)[from * width..].iter_mut().for_each(|x| *x = -*x);
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_scratch_contents_or_padding() {
    let _isa = same_isa();
    let mut rng = Rng(36);
    let scratch = Scratch::default();
    let large = shape(2, 140, 6, 3, 10, 24);
    let mut poison =
        Case::<f32>::random(&layer("taylor=0..2 in out post decay=softplus norm=layer conv=4", &large), large, None, 1.0, &mut rng);
    poison.tensors.iter_mut().for_each(|(_, tensor)| tensor.fill(f32::NAN));
    let mode = Mode::Chunk(Some(24));
    for text in TEXTS {
        let shape = shape(2, 70, 4, 2, 8, 6);
        let mut case = Case::<f32>::random(&layer(text, &shape), shape, Some(vec![41, 70]), 1.0, &mut rng);
        let fresh = fused(&case, &Scratch::default(), mode);
        assert!(fused(&poison, &scratch, mode).y.iter().all(|y| y.is_nan()), "NaN inputs give NaN outputs");
        assert_same_bits(&fused(&case, &scratch, mode), &fresh, &case.to_string());
        for (name, width) in [(Name::Q, 32), (Name::K, 16), (Name::V, 12)] {
            case.get_mut(name)[41 * width..70 * width].fill(f32::NAN);
        }
        case.dy[41 * 24..70 * 24].fill(f32::NAN);
        let padded = fused(&case, &scratch, mode);
        assert!(padded.y[41 * 24..70 * 24].iter().all(|&y| y == 0.0), "{case}: outputs of padding are zero");
        assert_same_bits(&padded, &fresh, &format!("{case} with NaN behind the length"));
    }
}

#[test]
fn strong_decay_over_long_sequences() {
    let _isa = same_isa();
    let mut rng = Rng(37);
    for text in ["taylor=0..2 over=sum decay=softplus", "power=2 over=length decay=softplus norm=l2", "taylor=0..2 over=none decay=linear"]
    {
        let shape = shape(1, 4000, 1, 1, 4, 5);
        let mut case = Case::<f32>::random(&layer(text, &shape), shape, None, 0.7, &mut rng);
        // c falls to −12,000 or varies by tens: far outside the range of exp in float32.
        for (i, g) in case.get_mut(Name::aux(termwise_attention::AuxKind::DecayGate)).iter_mut().enumerate() {
            *g += if text.contains("softplus") { 3.0 } else { 60.0 * (i as f32 / 300.0).sin() };
        }
        let expected = Expected::of(&case);
        for length in [7, 128] {
            let found = fused(&case, &Scratch::default(), Mode::Chunk(Some(length)));
            assert!(found.y.iter().all(|y| y.is_finite()));
            expected.compare(&found, &format!("chunks of {length} {case}"));
        }
    }
}

/// Channels that decay within one position next to channels that hardly decay: no exponent may overflow float32.
#[test]
fn strong_decay_per_channel() {
    let _isa = same_isa();
    let mut rng = Rng(38);
    let shape = shape(2, 150, 2, 1, 5, 6);
    for text in [
        "feature=identity over=none decay=given,channel rope=off",
        "taylor=0..2 over=length decay=given,channel rope=off",
        "power=1 over=none write=delta qk_norm=l2 decay=given,channel rope=off",
    ] {
        let mut case = case(&layer(text, &shape), shape, &mut rng);
        let steps = [-200.0, -30.0, -1.0, -1e-3, 0.0];
        let gates = case.get_mut(Name::aux(termwise_attention::AuxKind::DecayGate));
        gates.iter_mut().enumerate().for_each(|(i, gate)| *gate = steps[i % 5] * (1.0 + 0.3 * gate.abs()));
        let expected = Expected::of(&case);
        for length in [1, 16, 50, 150] {
            expected.compare(&fused(&case, &Scratch::default(), Mode::Chunk(Some(length))), &format!("chunks of {length} {case}"));
        }
    }
}

#[test]
fn nonpositive_denominators_are_reported_in_every_mode() {
    let _isa = same_isa();
    let mut rng = Rng(38);
    let shape = shape(2, 90, 2, 1, 4, 4);
    let case = Case::<f32>::random(&layer("taylor=0..1 over=sum", &shape), shape, None, 4.0, &mut rng);
    let parallel = fused(&case, &Scratch::default(), Mode::Parallel).report.nonpositive.expect("scores below −1 abound");
    for length in [1, 8, 64] {
        let found = fused(&case, &Scratch::default(), Mode::Chunk(Some(length))).report.nonpositive.expect("as in parallel mode");
        assert_eq!((found.row, found.head, found.position), (parallel.row, parallel.head, parallel.position));
        assert!((found.value - parallel.value).abs() < 1e-3 * parallel.value.abs().max(1.0));
    }
}

#[test]
fn variants_without_a_finite_state_are_rejected_in_chunk_mode() {
    let shape = shape(1, 300, 2, 1, 64, 64);
    let engine = |texts: [&str; 2], mode| {
        let heads = texts.map(|text| text.parse::<Variant>().expect("a variant"));
        planned(&heads, &shape).and_then(|layer| layer.fused_with(1, 300, FusedOptions::default().mode(mode)))
    };
    for texts in [["softmax"; 2], ["taylor=0..2 clamp=5"; 2], ["softmax_taylor_80terms"; 2]] {
        let found = engine(texts, Mode::Chunk(None));
        assert!(found.is_err_and(|error| error.to_string().contains("finite state")), "{texts:?}");
        let auto = engine(texts, Mode::Auto).expect("auto accepts every variant");
        assert_eq!(auto.mode_taken(), Mode::Parallel);
    }
    assert!(engine(["taylor=1"; 2], Mode::Chunk(Some(0))).is_err());
    let mixed = engine(["softmax", "taylor=0..2"], Mode::Chunk(Some(64))).expect("mixed");
    assert_eq!((mixed.mode_taken(), mixed.runs_in_chunks(0), mixed.runs_in_chunks(1)), (Mode::Chunk(Some(64)), false, true));
    assert_eq!(engine(["taylor=1"; 2], Mode::Parallel).expect("parallel").mode_taken(), Mode::Parallel);
}

#[test]
fn order_three_at_dimension_64_matches_parallel_mode() {
    let _isa = same_isa();
    let shape = shape(1, 150, 1, 1, 64, 64);
    let mut rng = Rng(39);
    let case = Case::<f32>::random(&layer("taylor=0..3 over=length", &shape), shape, None, 0.7, &mut rng);
    let found = fused(&case, &Scratch::default(), Mode::Chunk(Some(64)));
    let other = fused(&case, &Scratch::default(), Mode::Parallel);
    assert!(relative_rms(&found.y, &other.y) < 1e-5);
    for ((name, a), (_, b)) in found.gradients.iter().zip(&other.gradients) {
        assert!(relative_rms(a, b) < 1e-4, "{name:?}");
    }
}
