//! Gradients through a state: calls that continue each other, backward one after another, against one call over all positions.

use termwise_attention::{Error, Fused, Memory, Mode, Real, Saved, Scratch, State, StateGrads, relative_rms};

use crate::support::{Case, Name, Rng, Tensors, grads_of, layer, shape};

/// Some positions of every row, as a case of its own.
fn segment(case: &Case<f32>, start: usize, end: usize) -> Case<f32> {
    let (batch, time) = (case.shape.batch, case.shape.time);
    let cut = |x: &[f32]| -> Vec<f32> {
        let width = x.len() / (batch * time);
        (0..batch).flat_map(|b| x[(b * time + start) * width..(b * time + end) * width].to_vec()).collect()
    };
    let by_position = |name: &Name| !matches!(name, Name::Extra(extra) if !extra.is_gate_logits());
    let tensors = case.tensors.iter().map(|(name, x)| (*name, if by_position(name) { cut(x) } else { x.clone() })).collect();
    let lengths = case.lengths.as_ref().map(|lengths| lengths.iter().map(|len| len.clamp(&(start + 1), &end) - start).collect());
    let mut shape = case.shape;
    shape.time = end - start;
    Case { shape, tensors, lengths, dy: cut(&case.dy), ..case.clone() }
}

/// Adds the gradients of a segment to those of the whole.
fn add(case: &Case<f32>, all: &mut Tensors<f32>, own: &Tensors<f32>, start: usize, end: usize) {
    let (batch, time) = (case.shape.batch, case.shape.time);
    for ((name, all), (_, own)) in all.iter_mut().zip(own) {
        if matches!(name, Name::Extra(extra) if !extra.is_gate_logits()) {
            all.iter_mut().zip(own).for_each(|(all, own)| *all += own);
            continue;
        }
        let width = all.len() / (batch * time);
        for (b, own) in own.chunks_exact((end - start) * width).enumerate() {
            all[(b * time + start) * width..][..own.len()].copy_from_slice(own);
        }
    }
}

fn backward(case: &Case<f32>, engine: &mut Fused, before: &State, saved: &Saved, state: &mut StateGrads) -> Tensors<f32> {
    let mut gradients = case.tensors_of(0.0);
    let mut grads = grads_of(&mut gradients);
    engine.backward_from(before, &case.inputs(), saved, &case.dy, state, &mut grads).unwrap_or_else(|error| panic!("{case}: {error}"));
    gradients
}

/// Outputs and gradients of all positions from segments between `cuts`; with `truncated`, nothing flows from one to the one before.
fn in_segments(case: &Case<f32>, cuts: &[usize], mode: Mode, truncated: bool) -> (Vec<f32>, Tensors<f32>) {
    let scratch = Scratch::default();
    let mut state = case.state(Memory::Natural);
    let width = case.shape.heads * case.shape.e;
    let mut y = vec![0.0; case.dy.len()];
    let mut passes = Vec::new();
    for pair in cuts.windows(2) {
        let own = segment(case, pair[0], pair[1]);
        let mut engine = own.continuing(Memory::Natural, mode, &scratch).expect("possible");
        let before = state.clone();
        let mut part = vec![f32::NAN; own.dy.len()];
        let saved = engine.forward_from(&mut state, &own.inputs(), &mut part).unwrap_or_else(|error| panic!("{case}: {error}"));
        for (b, part) in part.chunks_exact((pair[1] - pair[0]) * width).enumerate() {
            y[(b * case.shape.time + pair[0]) * width..][..part.len()].copy_from_slice(part);
        }
        passes.push((pair, own, engine, before, saved));
    }
    let mut gradients = case.tensors_of(0.0);
    let mut through = passes[0].2.state_grads().expect("memory");
    for (pair, own, engine, before, saved) in passes.iter_mut().rev() {
        if truncated {
            through.clear();
        }
        let found = backward(own, engine, before, saved, &mut through);
        add(case, &mut gradients, &found, pair[0], pair[1]);
    }
    (y, gradients)
}

#[track_caller]
fn compare<R: Real>(found: &(Vec<f32>, Tensors<f32>), y: &[R], gradients: &Tensors<R>, label: &str) {
    let off = relative_rms(&found.0, y);
    assert!(off < 2e-5, "{label}: outputs differ by {off:e}");
    for ((name, found), (_, expected)) in found.1.iter().zip(gradients) {
        let off = relative_rms(found, expected);
        assert!(off < 2e-4, "{label}: gradients of {name:?} differ by {off:e}");
    }
}

const TEXTS: [&str; 21] = [
    "taylor=0..2 over=sum",
    "taylor=0..2 over=sum,floor=1 decay=softplus in out",
    "taylor=0..4 over=none norm=rms post",
    "taylor=0..2,coef=learned over=sum,eps=1 decay=softplus",
    "power=2 over=position in decay=softplus",
    "taylor=0..3 over=length norm=layer",
    "feature=elu over=sum decay=softplus rope=off",
    "taylor=0,2 over=sum,eps=0.5 in rope=off",
    "power=1 over=none write=delta qk_norm=l2",
    "feature=identity over=none write=delta,2 decay=mamba qk_norm=l2 norm=rms",
    "taylor=0..2,coef=learned over=none write=delta,scale=0.5 qk_norm=l2 decay=softplus",
    "power=2 over=length write=delta,2,scale=-0.7 qk_norm=l2 post=silu",
    "taylor=0..2 over=sum conv=3 decay=softplus",
    "taylor=0..2 over=length out=cumulative conv=4 rope=off",
    "taylor=0..2 over=none norm=rms out=cumulative post=out",
    "taylor=0..2 over=sum decay=linear",
    "power=2 over=length decay=linear qk_norm=rms conv=2",
    "feature=identity over=none write=delta decay=linear conv=3 qk_norm=l2",
    "taylor=0..2 over=sum,eps=1 decay=softplus,channel",
    "power=2 over=length decay=mamba,channel norm=rms",
    "feature=identity over=none write=delta decay=mamba,channel qk_norm=l2 conv=2",
];

#[test]
fn segments_equal_the_whole() {
    let mut rng = Rng(81);
    for text in TEXTS {
        for (shape, lengths) in
            [(shape(2, 150, 4, 2, 6, 9), None), (shape(1, 290, 2, 1, 8, 8), None), (shape(2, 150, 2, 2, 4, 5), Some(vec![120, 150]))]
        {
            let case = Case::<f32>::random(&layer(text, &shape), shape, lengths, 0.7, &mut rng);
            let wide = case.cast::<f64>();
            let (y, gradients) = (wide.forward(&mut wide.naive()).0, wide.backward(&mut wide.naive()));
            for (cuts, mode) in [
                (vec![0, 70, shape.time], Mode::Chunk(Some(7))),
                (vec![0, 64, shape.time], Mode::Chunk(Some(64))),
                (vec![0, 1, 100, shape.time], Mode::Parallel),
                (vec![0, shape.time], Mode::Chunk(Some(20))),
                // Calls that are shorter than a filter.
                (vec![0, 1, 2, 4, shape.time], Mode::Parallel),
            ] {
                compare(&in_segments(&case, &cuts, mode, false), &y, &gradients, &format!("{cuts:?} {mode} {case}"));
            }
        }
    }
}

/// Truncated, the first of two segments gets the gradients that it has alone.
#[test]
fn cleared_gradients_truncate() {
    let mut rng = Rng(82);
    let shape = shape(1, 90, 2, 1, 6, 9);
    let case = Case::<f32>::random(&layer("taylor=0..2 over=sum decay=softplus", &shape), shape, None, 0.7, &mut rng);
    let (_, cut) = in_segments(&case, &[0, 40, 90], Mode::Chunk(Some(16)), true);
    let (_, whole) = in_segments(&case, &[0, 40, 90], Mode::Chunk(Some(16)), false);
    let first = segment(&case, 0, 40);
    let alone = first.backward(&mut first.naive());
    for (((name, cut), (_, whole)), (_, alone)) in cut.iter().zip(&whole).zip(&alone) {
        let off = relative_rms(&cut[..alone.len()], alone);
        assert!(off < 1e-4, "{name:?}: {off:e}");
        if matches!(name, Name::K | Name::V) {
            assert!(relative_rms(&whole[..alone.len()], alone) > 0.1, "{name:?} of the first segment are felt in the second");
        }
    }
}

#[test]
fn what_gradients_cannot_pass_is_refused() {
    let shape = shape(1, 12, 2, 1, 6, 6);
    for text in ["softmax", "taylor=0..2 window=4 far(taylor=0..1)", "taylor=0..2 centre=running"] {
        let case = Case::<f32>::random(&layer(text, &shape), shape, None, 1.0, &mut Rng(83));
        let mut engine = case.continuing(Memory::Natural, Mode::Parallel, &Scratch::default()).expect("possible");
        let mut y = vec![0.0; case.dy.len()];
        let refused = engine.forward_from(&mut case.state(Memory::Natural), &case.inputs(), &mut y);
        assert!(matches!(refused, Err(Error::Combination { .. })), "{text}");
        assert!(matches!(engine.state_grads(), Err(Error::Combination { .. })), "{text}");
    }
}
