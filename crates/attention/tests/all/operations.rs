//! Single operations against float64 reference cases from the naive functions of flash-linear-attention and from plain PyTorch code.

use termwise_attention::operations::{self, Operation};
use termwise_attention::{Error, Mode, Real, Rope, Scratch, StateKind, relative_rms};

use crate::support::{Case, Name, oracle, stepped};

fn case<R: Real>(operation: &Operation) -> Case<R> {
    let shape = operation.shape;
    let narrow = |x: &[f64]| x.iter().map(|&x| R::of(x)).collect::<Vec<R>>();
    let mut tensors: Vec<_> = [(Name::Q, "q"), (Name::K, "k"), (Name::V, "v")].map(|(name, x)| (name, narrow(operation.tensor(x)))).into();
    tensors.extend(operation.aux_tensors().into_iter().map(|(aux, values)| (Name::AuxTensor(aux), narrow(&values))));
    let rope = Rope::new(shape.d, 100.0, None).expect("a rope");
    let heads = vec![operation.variant.clone(); shape.heads];
    Case { heads, shape, tensors, lengths: None, rope, dy: narrow(operation.tensor("dy")) }
}

/// Asserts that output and gradients of an engine are within these bounds of the reference case.
fn compare<R: Real>(operation: &Operation, y: &[R], gradients: &[(Name, Vec<R>)], bounds: (f64, f64), label: &str) {
    let error = relative_rms(y, operation.tensor("y"));
    assert!(error < bounds.0, "{label}: y differs by {error:e}");
    for (name, found) in gradients {
        let wide: Vec<f64> = found.iter().map(|g| g.wide()).collect();
        let (name, found) = match name {
            Name::Q => ("dq".to_string(), wide),
            Name::K => ("dk".to_string(), wide),
            Name::V => ("dv".to_string(), wide),
            Name::AuxTensor(aux) => operation.gradient(*aux, &wide).expect("one of the inputs"),
        };
        let error = relative_rms(&found, operation.tensor(&name));
        assert!(error < bounds.1, "{label}: {name} differs by {error:e}");
    }
}

#[test]
fn operations_match_the_reference_cases() {
    let Some(folder) = termwise_base::test_skip::shared("golden-ops") else { return };
    let mut files: Vec<_> = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    let (mut computed, mut recurrent, mut fast, mut left_out) = (0, 0, 0, 0);
    for path in &files {
        let operation = match Operation::read(path) {
            Ok(operation) => operation,
            Err(Error::File { problem, .. }) if Some(&problem[..]) == operations::left_out("log_linear") => {
                left_out += 1;
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let label = format!("{} as `{}`", operation.name, operation.variant);
        let wide = case::<f64>(&operation);
        let mut engine = wide.naive();
        compare(&operation, &wide.forward(&mut engine).0, &wide.backward(&mut engine), (1e-10, 1e-10), &label);
        let narrow = case::<f32>(&operation);
        let mut engine = narrow.naive();
        compare(&operation, &narrow.forward(&mut engine).0, &narrow.backward(&mut engine), (1e-5, 1e-4), &format!("{label}, float32"));
        if let Some(found) = oracle::recurrent(&wide) {
            compare(&operation, &found.y, &[], (1e-10, 0.0), &format!("{label}, recurrence"));
            recurrent += 1;
        }
        computed += 1;
        let finite = narrow.heads[0].remembered().is_some_and(|weighing| weighing.has_finite_map());
        let chunks = if finite { vec![1, 5, 16] } else { vec![] };
        for mode in chunks.into_iter().map(|length| Mode::Chunk(Some(length))).chain([Mode::Parallel]) {
            let (label, mut engine) = (format!("{label}, fused, {mode}"), narrow.fused(mode, &Scratch::default()).expect("possible"));
            compare(&operation, &narrow.forward(&mut engine).0, &narrow.backward(&mut engine), (1e-5, 1e-4), &label);
        }
        for memory in [StateKind::Auto, StateKind::Cache] {
            compare(&operation, &stepped(&narrow, &mut narrow.state(memory)).0, &[], (1e-5, 0.0), &format!("{label}, steps, {memory:?}"));
        }
        fast += 1;
    }
    assert!(computed > 10 && recurrent > 3 && fast > 10, "only {computed} operations, {recurrent} by recurrence, {fast} in all engines");
    assert!(left_out <= 1, "{left_out} operations are not supported");
}
