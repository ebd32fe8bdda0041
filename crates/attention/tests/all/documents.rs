//! Several documents packed into one batch row: each gives the results of a separate call.

use termwise_attention::{Attention, Error, Grads, Inputs, Mode, Real, Report, Scratch, relative_rms};

use crate::support::combos::random_case;
use crate::support::{Case, Name, Rng, Tensors, grads_of, layer, oracle, same_isa, shape};

/// Boundaries of documents shorter and longer than a tile.
fn boundaries(batch: usize, time: usize) -> Vec<usize> {
    let within = [0, 1, 4, time / 3, time / 3 + 1, time - 2].into_iter().filter(|&at| at < time);
    let mut all: Vec<usize> = (0..batch).flat_map(|b| within.clone().map(move |at| b * time + at)).chain([batch * time]).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// One document as a separate case.
fn alone<R: Real>(case: &Case<R>, start: usize, end: usize) -> Case<R> {
    let rows = case.shape.batch * case.shape.time;
    let cut = |x: &[R]| x[x.len() / rows * start..x.len() / rows * end].to_vec();
    let by_position = |name: &Name| !matches!(name, Name::AuxTensor(aux) if !aux.is_gate_logits());
    let tensors = case.tensors.iter().map(|(name, x)| (*name, if by_position(name) { cut(x) } else { x.clone() })).collect();
    Case {
        shape: shape(1, end - start, case.shape.heads, case.shape.kv_heads, case.shape.d, case.shape.e),
        tensors,
        dy: cut(&case.dy),
        ..case.clone()
    }
}

/// y, the report and the gradients of a call with documents.
fn packed<R: Real>(case: &Case<R>, documents: &[usize], engine: &mut impl Attention<R>) -> (Vec<R>, Report, Tensors<R>) {
    let inputs = case.inputs().documents(documents);
    let mut y = vec![R::nan(); case.dy.len()];
    let saved = engine.forward(&inputs, &mut y).unwrap_or_else(|error| panic!("{case}: {error}"));
    let mut inferred = vec![R::nan(); y.len()];
    assert_eq!(engine.infer(&inputs, &mut inferred), Ok(saved.report()));
    assert!(y == inferred, "{case}: infer and forward differ");
    let mut gradients = case.tensors_of(R::zero());
    engine.backward(&inputs, &saved, &case.dy, &mut grads_of(&mut gradients)).unwrap_or_else(|error| panic!("{case}: {error}"));
    let report = saved.report();
    (y, report, gradients)
}

/// The same from one call per document: outputs and gradients per position are concatenated, gradients of parameters are added.
fn separately<R: Real, E: Attention<R>>(case: &Case<R>, documents: &[usize], engine: impl Fn(&Case<R>) -> E) -> (Vec<R>, Tensors<R>) {
    let mut y = Vec::new();
    let mut gradients: Tensors<R> = case.tensors.iter().map(|(name, _)| (*name, Vec::new())).collect();
    for pair in documents.windows(2) {
        let own = alone(case, pair[0], pair[1]);
        let mut engine = engine(&own);
        y.extend(own.forward(&mut engine).0);
        for ((name, all), (_, one)) in gradients.iter_mut().zip(own.backward(&mut engine)) {
            match name {
                Name::AuxTensor(aux) if !aux.is_gate_logits() && !all.is_empty() => {
                    all.iter_mut().zip(one).for_each(|(all, one)| *all += one)
                }
                _ => all.extend(one),
            }
        }
    }
    (y, gradients)
}

#[track_caller]
fn compare<A: Real, B: Real>(found: &(Vec<A>, Report, Tensors<A>), expected: &(Vec<B>, Tensors<B>), bound: f64, label: &str) {
    let off = relative_rms(&found.0, &expected.0);
    assert!(off <= bound, "{label}: outputs differ by {off:e}");
    for ((name, found), (_, expected)) in found.2.iter().zip(&expected.1) {
        if expected.iter().any(|x| x.wide() != 0.0) {
            let off = relative_rms(found, expected);
            assert!(off <= bound, "{label}: gradients of {name:?} differ by {off:e}");
        }
    }
}

/// Together these variants have every part that restarts with a document.
const TEXTS: [&str; 12] = [
    "softmax",
    "exp over=sum decay=softplus in out=cumulative",
    "exp over=length decay=linear conv=4 post",
    "power=2 over=position norm=layer conv=3",
    "taylor=0..2 over=sum,eps=1 decay=softplus in norm=l2",
    "taylor=0..3,coef=learned over=sum,eps=1 out post=out",
    "feature=elu over=sum conv=2",
    "feature=identity over=none write=delta,2 decay=mamba qk_norm=l2 conv=2 norm=rms",
    "taylor=0..2,coef=learned over=none write=delta,scale=0.5 qk_norm=l2 decay=softplus",
    "exp over=none write=delta,scale=0.3 qk_norm=l2 decay=softplus",
    "taylor=0..2 over=sum,eps=1 decay=softplus,channel in",
    "power=2 over=none write=delta,scale=0.8 qk_norm=l2 decay=mamba,channel conv=2",
];

#[test]
fn documents_do_not_attend_to_each_other() {
    let _isa = same_isa();
    let mut rng = Rng(71);
    let scratch = Scratch::default();
    for text in TEXTS {
        for shape in [shape(1, 9, 2, 1, 4, 6), shape(2, 150, 4, 2, 8, 5), shape(1, 400, 2, 2, 6, 8)] {
            let case = Case::<f32>::random(&layer(text, &shape), shape, None, 0.7, &mut rng);
            let documents = boundaries(shape.batch, shape.time);
            for mode in [Mode::Parallel, Mode::Chunk(Some(7)), Mode::Chunk(Some(100)), Mode::Auto] {
                let Ok(mut engine) = case.fused(mode, &scratch) else { continue };
                let expected = separately(&case, &documents, |case| case.fused(mode, &scratch).expect("possible"));
                compare(&packed(&case, &documents, &mut engine), &expected, 1e-6, &format!("{mode} {case}"));
                // Without documents the same engine computes the whole row.
                let whole = case.forward(&mut engine).0;
                assert_eq!(whole, case.forward(&mut case.fused(mode, &scratch).expect("possible")).0, "{case}");
            }
        }
    }
}

#[test]
fn naive_engine_and_chunks_match_the_formula_per_document() {
    let _isa = same_isa();
    let mut rng = Rng(72);
    for text in TEXTS {
        let shape = shape(2, 21, 4, 2, 6, 5);
        let case = Case::<f64>::random(&layer(text, &shape), shape, None, 0.7, &mut rng);
        let documents = boundaries(2, 21);
        let (y, _, gradients) = packed(&case, &documents, &mut case.naive());
        let expected: Vec<f64> = documents.windows(2).flat_map(|pair| oracle::forward(&alone(&case, pair[0], pair[1]), None).y).collect();
        assert!(relative_rms(&y, &expected) < 1e-12, "{case}");
        // One entry of each tensor against a central difference of the formula.
        let loss = |case: &Case<f64>| documents.windows(2).map(|pair| oracle::loss(&alone(case, pair[0], pair[1]), None)).sum::<f64>();
        for (name, gradient) in &gradients {
            let i = rng.below(gradient.len());
            let moved = |by: f64| {
                let mut case = case.clone();
                case.get_mut(*name)[i] += by;
                loss(&case)
            };
            let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            let scale = gradient.iter().map(|g| g * g).sum::<f64>().sqrt().max(1.0);
            assert!((difference - gradient[i]).abs() < 1e-7 * scale, "{case}: {name:?}[{i}] {difference} {}", gradient[i]);
        }
        if case.heads[0].state_rows(shape.d).is_some() {
            let narrow = case.cast::<f32>();
            let mut engine = narrow.fused(Mode::Chunk(Some(3)), &Scratch::default()).expect("a finite state");
            compare(&packed(&narrow, &documents, &mut engine), &(y, gradients), 1e-4, &format!("chunks {case}"));
        }
    }
}

#[test]
fn random_layers_match_separate_calls_per_document() {
    let _isa = same_isa();
    let mut rng = Rng(73);
    let mut compared = 0;
    while compared < 40 {
        let (time, seed) = (1 + rng.below(200), rng.next());
        let mut own = Rng(seed);
        let mut case = random_case::<f32>(shape(1 + rng.below(2), time.max(6), 4, 2, 8, 7), 0.05, &mut own);
        case.lengths = None;
        let documents = boundaries(case.shape.batch, case.shape.time);
        let scratch = Scratch::default();
        let expected = separately(&case, &documents, |case| case.fused(Mode::Parallel, &scratch).expect("possible"));
        // The weights of the first positions of a document may all be zero, which gives NaN.
        if expected.0.iter().any(|y| y.is_nan()) {
            continue;
        }
        compared += 1;
        let mut engine = case.fused(Mode::Parallel, &scratch).expect("possible");
        compare(&packed(&case, &documents, &mut engine), &expected, 1e-5, &format!("{case}"));
    }
}

#[test]
fn packed_rows_and_reports_use_row_positions() {
    let _isa = same_isa();
    let shape = shape(2, 10, 2, 1, 4, 4);
    let mut rng = Rng(74);
    let mut case = Case::<f32>::random(&layer("taylor=1 over=sum rope=off", &shape), shape, None, 1.0, &mut rng);
    // Positive scores, except for one pair within the second document of the second row.
    case.get_mut(Name::Q).fill(1.0);
    case.get_mut(Name::K).fill(1.0);
    case.get_mut(Name::K)[(10 + 6) * 4..][..4].fill(-0.5);
    let documents = [0, 3, 10, 16, 20];
    let (y, report, gradients) = packed(&case, &documents, &mut case.fused(Mode::Parallel, &Scratch::default()).expect("possible"));
    let at = report.nonpositive.expect("seen");
    assert_eq!((at.row, at.head, at.position), (1, 0, 6));
    assert_eq!(packed(&case, &documents, &mut case.naive()).1.nonpositive.map(|at| (at.row, at.position)), Some((1, 6)));

    let widths = case.layer().widths();
    let total: usize = widths.iter().sum();
    let (mut qkv, names) = (vec![0.0; 20 * total], [Name::Q, Name::K, Name::V]);
    for (row, qkv) in qkv.chunks_exact_mut(total).enumerate() {
        let rows = names.iter().zip(widths).flat_map(|(name, width)| &case.get(*name)[row * width..][..width]);
        qkv.iter_mut().zip(rows).for_each(|(to, x)| *to = *x);
    }
    let inputs = Inputs::packed(&qkv, widths).documents(&documents[..]);
    let mut engine = case.fused(Mode::Parallel, &Scratch::default()).expect("possible");
    let (mut found, mut grads) = (vec![0.0; y.len()], vec![0.0; qkv.len()]);
    let saved = engine.forward(&inputs, &mut found).expect("as before");
    engine.backward(&inputs, &saved, &case.dy, &mut Grads::packed(&mut grads, widths)).expect("as before");
    assert_eq!(found, y);
    for (row, grads) in grads.chunks_exact(total).enumerate() {
        let rows: Vec<f32> = gradients.iter().zip(widths).flat_map(|((_, x), width)| x[row * width..][..width].to_vec()).collect();
        assert_eq!(grads, rows, "row {row}");
    }
}

#[test]
fn invalid_boundaries_are_rejected() {
    let _isa = same_isa();
    let shape = shape(2, 5, 1, 1, 4, 4);
    let case = Case::<f32>::random(&layer("softmax", &shape), shape, None, 1.0, &mut Rng(75));
    let mut y = vec![0.0; case.dy.len()];
    let mut ask = |documents: &[usize], lengths: Option<&[usize]>| {
        let inputs = case.inputs().documents(documents).lengths(lengths);
        let naive = case.naive().infer(&inputs, &mut y);
        let fused = case.fused(Mode::Parallel, &Scratch::default()).expect("possible").infer(&inputs, &mut y);
        assert_eq!(naive, fused);
        naive.map(|_| ())
    };
    for wrong in [&[][..], &[0], &[10], &[0, 5], &[1, 5, 10], &[0, 5, 11], &[0, 5, 5, 10], &[0, 7, 5, 10], &[0, 10], &[0, 4, 6, 10]] {
        assert!(matches!(ask(wrong, None), Err(Error::Shape(_))), "{wrong:?}");
    }
    assert!(matches!(ask(&[0, 5, 10], Some(&[5, 5])), Err(Error::Shape(_))));
    assert_eq!(ask(&[0, 5, 10], None), Ok(()));
}

#[test]
fn backward_requires_the_documents_and_lengths_of_forward() {
    let _isa = same_isa();
    let shape = shape(2, 5, 1, 1, 4, 4);
    let case = Case::<f32>::random(&layer("softmax", &shape), shape, None, 1.0, &mut Rng(76));
    let mut engine = case.fused(Mode::Parallel, &Scratch::default()).expect("possible");
    let mut y = vec![0.0; case.dy.len()];
    let [(_, mut q), (_, mut k), (_, mut v)] = [0, 1, 2].map(|i| case.tensors[i].clone());
    let packed = case.inputs().documents(&[0, 2, 5, 10][..]);
    let saved = engine.forward(&packed, &mut y).expect("possible");
    for other in [case.inputs(), case.inputs().documents(&[0, 3, 5, 10][..]), case.inputs().lengths(&[5, 4][..])] {
        let refused = engine.backward(&other, &saved, &case.dy, &mut Grads::new(&mut q, &mut k, &mut v));
        assert_eq!(refused, Err(Error::SavedPartition));
    }
    engine.backward(&packed, &saved, &case.dy, &mut Grads::new(&mut q, &mut k, &mut v)).expect("the same");
}
