//! Tensors of a wrong length are rejected by name before any computation, by both engines.

use termwise_attention::{Attention, AuxTensors, Error, Grads, Inputs, Layer, Mode, Rope, Rows, Scratch, Shape};

use crate::support::{Case, Name, Rng, layer, planned, same_isa, shape};

fn refused(result: Result<impl std::fmt::Debug, Error>) -> String {
    result.expect_err("must be refused").to_string()
}

fn engines(case: &Case<f32>) -> [Box<dyn Attention<f32>>; 2] {
    let fused = case.fused(Mode::Parallel, &Scratch::default()).unwrap_or_else(|error| panic!("{error}"));
    let reference = case.naive();
    [Box::new(fused), Box::new(reference)]
}

fn example() -> Case<f32> {
    let shape = shape(2, 3, 4, 2, 6, 5);
    Case::random(
        &layer("taylor=0..2,coef=learned over=sum in out post decay=linear norm=layer conv=2", &shape),
        shape,
        None,
        1.0,
        &mut Rng(31),
    )
}

#[test]
fn errors_name_every_input_that_is_too_short() {
    let _isa = same_isa();
    let case = example();
    for (i, (name, _)) in case.tensors.iter().enumerate() {
        let mut short = case.clone();
        short.tensors[i].1.pop();
        let expected = match name {
            Name::AuxTensor(aux) => aux.to_string(),
            name => format!("{name:?}").to_lowercase(),
        };
        for mut engine in engines(&case) {
            let mut y = vec![0.0; case.dy.len()];
            let message = refused(engine.forward(&short.inputs(), &mut y));
            assert!(message.starts_with(&format!("{expected}: ")), "{message}");
        }
    }
}

#[test]
fn missing_auxiliary_tensors_and_invalid_lengths_rope_and_outputs_are_rejected() {
    let mut case = example();
    let mut y = vec![0.0; case.dy.len()];
    for mut engine in engines(&case) {
        let inputs = case.inputs().with_aux(AuxTensors::default());
        assert!(refused(engine.forward(&inputs, &mut y)).contains("in_gate"));
        assert!(refused(engine.forward(&case.inputs(), &mut y[1..])).starts_with("y: "));
    }
    for lengths in [vec![3], vec![0, 3], vec![3, 4]] {
        case.lengths = Some(lengths);
        for mut engine in engines(&case) {
            assert!(refused(engine.forward(&case.inputs(), &mut y)).contains("length"));
        }
    }
}

#[test]
fn gradients_of_a_wrong_length_are_rejected() {
    let _isa = same_isa();
    let case = example();
    let lengths: Vec<usize> = case.tensors.iter().map(|(_, x)| x.len()).collect();
    for missing in 0..case.tensors.len() {
        let mut buffers: Vec<Vec<f32>> = lengths.iter().enumerate().map(|(i, &n)| vec![0.0; n - (i == missing) as usize]).collect();
        for mut engine in engines(&case) {
            let (first, rest) = buffers.split_at_mut(3);
            let [q, k, v] = first else { unreachable!("three buffers") };
            let mut aux_tensors = AuxTensors::default();
            for ((name, _), buffer) in case.tensors[3..].iter().zip(rest) {
                if let Name::AuxTensor(aux) = name {
                    aux_tensors.set(*aux, &mut buffer[..]);
                }
            }
            let mut grads = Grads::new(q, k, v).with_aux(aux_tensors);
            let saved = engine.forward(&case.inputs(), &mut vec![0.0; case.dy.len()]).expect("possible");
            let message = refused(engine.backward(&case.inputs(), &saved, &case.dy, &mut grads));
            assert!(message.starts_with("gradient of "), "{message}");
        }
    }
}

#[test]
fn invalid_shapes_and_layers_are_rejected() {
    let good = shape(1, 2, 2, 1, 4, 4);
    for bad in [
        Shape { kv_heads: 0, ..good },
        Shape { heads: 3, kv_heads: 2, ..good },
        Shape { d: 0, ..good },
        Shape { e: 257, ..good },
        Shape { heads: 1 << 40, kv_heads: 1 << 40, ..good },
    ] {
        let sizes = Layer::new(bad.heads, bad.kv_heads, bad.d).value_dim(bad.e).rope(Rope::new(4, 100.0, None).expect("possible"));
        assert!(matches!(sizes.variant("softmax"), Err(Error::Shape(_))), "{bad:?}");
    }
    let possible = planned(&layer("taylor=0..2", &good), &good).expect("possible");
    for (batch, time) in [(0, 1), (1, 0), (usize::MAX, usize::MAX), (1 << 40, 1 << 40), (1, usize::MAX / 2)] {
        assert!(matches!(possible.naive::<f64>(batch, time), Err(Error::Shape(_))), "{batch} {time}");
        assert!(matches!(possible.fused(batch, time), Err(Error::Shape(_))), "{batch} {time}");
        assert!(matches!(possible.state(batch), Err(Error::Shape(_) | Error::Memory { .. })) || batch == 1, "{batch}");
    }
    assert!(planned(&layer("softmax", &shape(1, 2, 3, 1, 4, 4)), &good).is_err());
    let mixed = [layer("exp conv=2", &good)[0].clone(), layer("exp conv=3", &good)[0].clone()];
    assert!(planned(&mixed, &good).is_err());
}

/// q, k and v packed into one tensor, and rows with gaps between them, give bit-identical results to three tensors.
#[test]
fn strided_inputs_and_gradients_are_bit_identical() {
    let _isa = same_isa();
    let mut case = example();
    case.lengths = Some(vec![3, 2]);
    let (layer, rows) = (case.layer(), 6);
    let widths = layer.widths();
    let stride: usize = widths.iter().sum();
    let parts = [Name::Q, Name::K, Name::V].map(|name| case.get(name).to_vec());
    let mut qkv = vec![f32::NAN; rows * stride];
    let (mut first, mut padded) = (0, Vec::new());
    for (part, width) in parts.iter().zip(widths) {
        let mut wide = vec![f32::NAN; rows * (width + 3)];
        for row in 0..rows {
            qkv[row * stride + first..][..width].copy_from_slice(&part[row * width..][..width]);
            wide[row * (width + 3)..][..width].copy_from_slice(&part[row * width..][..width]);
        }
        padded.push(wide);
        first += width;
    }
    let aux_tensors = || {
        let mut aux_tensors = AuxTensors::default();
        for (name, values) in &case.tensors {
            if let Name::AuxTensor(aux) = name {
                aux_tensors.set(*aux, &values[..]);
            }
        }
        aux_tensors
    };
    let packed = Inputs::packed(&qkv, widths).with_aux(aux_tensors()).lengths(case.lengths.as_deref());
    let rows_of = |i: usize| Rows::strided(&padded[i], widths[i] + 3);
    let apart = Inputs::new(rows_of(0), rows_of(1), rows_of(2)).with_aux(aux_tensors()).lengths(case.lengths.as_deref());
    for mut engine in engines(&case) {
        let expected = case.forward(&mut *engine).0;
        let expected_grads = case.backward(&mut *engine);
        for inputs in [&packed, &apart] {
            let mut y = vec![f32::NAN; expected.len()];
            let saved = engine.forward(inputs, &mut y).expect("possible");
            assert_eq!(y, expected);
            let mut gradients: Vec<Vec<f32>> = case.tensors.iter().map(|(_, x)| vec![0.0; x.len()]).collect();
            let mut dqkv = vec![0.0; rows * stride];
            let mut grads = Grads::packed(&mut dqkv, widths);
            for ((name, _), gradient) in case.tensors.iter().zip(&mut gradients) {
                if let Name::AuxTensor(aux) = name {
                    grads = grads.with(*aux, gradient);
                }
            }
            engine.backward(inputs, &saved, &case.dy, &mut grads).expect("possible");
            let mut first = 0;
            for ((_, expected), width) in expected_grads.iter().zip(widths) {
                for (row, expected) in expected.chunks_exact(width).enumerate() {
                    assert_eq!(dqkv[row * stride + first..][..width], *expected);
                }
                first += width;
            }
            gradients[3..].iter().zip(&expected_grads[3..]).for_each(|(found, (_, expected))| assert_eq!(found, expected));
        }
        let mut y = vec![0.0; expected.len()];
        assert!(refused(engine.infer(&Inputs::packed(&qkv[1..], widths).with_aux(aux_tensors()), &mut y)).contains("v ("));
        assert!(
            refused(engine.infer(&Inputs::new(&parts[0], &parts[1], Rows::strided(&parts[2], 1)).with_aux(aux_tensors()), &mut y))
                .contains("stride of only 1")
        );
        let mut short = vec![0.0; rows * stride - 1];
        let saved = engine.forward(&packed, &mut y).expect("possible");
        assert!(
            refused(engine.backward(&packed, &saved, &case.dy, &mut Grads::packed(&mut short, widths))).contains("gradient of q, k and v")
        );
        assert!(refused(engine.backward(&packed, &saved, &case.dy, &mut Grads::packed(&mut short, [1, 2, 3]))).contains("[1, 2, 3]"));
    }
}

/// Two forward passes may precede their backward passes; the saved pass of another engine is rejected.
#[test]
fn saved_passes_are_independent() {
    let _isa = same_isa();
    let shape = shape(2, 40, 4, 2, 6, 5);
    let heads = layer("taylor=0..2,coef=learned in out decay=linear norm=layer", &shape);
    let cases: Vec<Case<f32>> = (0..2).map(|i| Case::random(&heads, shape, None, 1.0, &mut Rng(60 + i))).collect();
    for mode in [Mode::Parallel, Mode::Chunk(Some(8))] {
        let scratch = Scratch::default();
        let expected: Vec<_> = cases.iter().map(|case| case.backward(&mut case.fused(mode, &scratch).expect("possible"))).collect();
        let mut engine = cases[0].fused(mode, &scratch).expect("possible");
        let mut y = vec![0.0; cases[0].dy.len()];
        let saved: Vec<_> = cases.iter().map(|case| engine.forward(&case.inputs(), &mut y).expect("possible")).collect();
        // Another forward pass and an inference in between change nothing.
        drop(engine.forward(&cases[0].inputs(), &mut y).expect("possible"));
        engine.infer(&cases[1].inputs(), &mut y).expect("possible");
        for ((case, saved), expected) in cases.iter().zip(&saved).zip(&expected).rev() {
            assert_eq!(&case.backward_from(&mut engine, saved), expected);
            assert_eq!(&case.backward_from(&mut engine, saved), expected, "a saved pass can be used again");
        }
        let mut other = cases[0].fused(mode, &scratch).expect("possible");
        let [q, k, v] = &mut [24, 12, 10].map(|width| vec![0.0; 2 * 40 * width]);
        let refusal = other.backward(&cases[0].inputs(), &saved[0], &cases[0].dy, &mut Grads::new(q, k, v));
        assert_eq!(refusal, Err(Error::Saved));
        let naive = cases[0].naive().forward(&cases[0].inputs(), &mut y).expect("possible");
        assert_eq!(engine.backward(&cases[0].inputs(), &naive, &cases[0].dy, &mut Grads::new(q, k, v)), Err(Error::Saved));
    }
}

/// The memory of a dropped pass is reused by the next one.
#[test]
fn memory_of_saved_passes_is_reused() {
    let _isa = same_isa();
    let case = example();
    let mut engine = case.fused(Mode::Parallel, &Scratch::default()).expect("possible");
    let mut y = vec![0.0; case.dy.len()];
    let first = engine.forward(&case.inputs(), &mut y).expect("possible");
    let bytes = first.bytes();
    assert!(bytes >= 4 * 2 * 3 * 4 * (16 + 2));
    drop(first);
    assert_eq!(engine.forward(&case.inputs(), &mut y).expect("possible").bytes(), bytes);
}

/// Engines that share scratch memory may run concurrently, as tasks of one thread pool.
#[test]
fn shared_scratch_memory_does_not_deadlock() {
    let _isa = same_isa();
    use rayon::prelude::*;
    let shape = shape(1, 300, 2, 1, 8, 8);
    let case = Case::<f32>::random(&layer("taylor=0..2", &shape), shape, None, 1.0, &mut Rng(70));
    let scratch = Scratch::default();
    let expected = case.backward(&mut case.fused(Mode::Chunk(None), &scratch).expect("possible"));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("a pool");
    pool.install(|| {
        (0..16).into_par_iter().with_max_len(1).for_each(|_| {
            assert_eq!(case.backward(&mut case.fused(Mode::Chunk(None), &scratch).expect("possible")), expected);
        });
    });
    assert!(scratch.bytes() > 0);
}
