//! Tensors of a wrong length are refused by name, before anything is computed; both engines alike.

mod support;

use support::{Case, Name, Rng, layer, shape};
use termwise_attention::{Attention, Error, Extras, Fused, Grads, Reference, Rope, Scratch, Shape};

fn refused(result: Result<impl std::fmt::Debug, Error>) -> String {
    result.expect_err("must be refused").to_string()
}

fn engines(case: &Case<f32>) -> [Box<dyn Attention<f32>>; 2] {
    let fused = Fused::new(&case.heads, case.shape, &Scratch::default()).unwrap_or_else(|error| panic!("{error}"));
    let reference = Reference::<f32>::new(&case.heads, case.shape).unwrap_or_else(|error| panic!("{error}"));
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
fn every_short_input_is_named() {
    let case = example();
    for (i, (name, _)) in case.tensors.iter().enumerate() {
        let mut short = case.clone();
        short.tensors[i].1.pop();
        let expected = match name {
            Name::Extra(extra) => format!("{extra:?}"),
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
fn missing_extras_lengths_rope_and_outputs() {
    let mut case = example();
    let mut y = vec![0.0; case.dy.len()];
    for mut engine in engines(&case) {
        let mut inputs = case.inputs();
        inputs.extras = Extras::default();
        assert!(refused(engine.forward(&inputs, &mut y)).contains("InGate"));
        assert!(refused(engine.forward(&case.inputs(), &mut y[1..])).starts_with("y: "));
        let rope = Rope::new(4, 100.0, None).expect("possible");
        let mut inputs = case.inputs();
        inputs.rope = &rope;
        assert!(refused(engine.forward(&inputs, &mut y)).contains("rope"));
    }
    for lengths in [vec![3], vec![0, 3], vec![3, 4]] {
        case.lengths = Some(lengths);
        for mut engine in engines(&case) {
            assert!(refused(engine.forward(&case.inputs(), &mut y)).contains("length"));
        }
    }
}

#[test]
fn gradients_need_room() {
    let case = example();
    let lengths: Vec<usize> = case.tensors.iter().map(|(_, x)| x.len()).collect();
    for missing in 0..case.tensors.len() {
        let mut buffers: Vec<Vec<f32>> = lengths.iter().enumerate().map(|(i, &n)| vec![0.0; n - (i == missing) as usize]).collect();
        for mut engine in engines(&case) {
            let (first, rest) = buffers.split_at_mut(3);
            let [q, k, v] = first else { unreachable!("three buffers") };
            let mut extras = Extras::default();
            for ((name, _), buffer) in case.tensors[3..].iter().zip(rest) {
                if let Name::Extra(extra) = name {
                    extras.set(*extra, &mut buffer[..]);
                }
            }
            let mut grads = Grads { q, k, v, extras };
            let message = refused(engine.backward(&case.inputs(), &case.dy, &mut grads));
            assert!(message.starts_with("gradient of "), "{message}");
        }
    }
}

#[test]
fn impossible_shapes_and_layers() {
    let good = shape(1, 2, 2, 1, 4, 4);
    let scratch = Scratch::default();
    for bad in [
        Shape { batch: 0, ..good },
        Shape { time: 0, ..good },
        Shape { kv_heads: 0, ..good },
        Shape { heads: 3, kv_heads: 2, ..good },
        Shape { d: 0, ..good },
        Shape { e: 257, ..good },
    ] {
        let heads = layer("softmax", &bad);
        assert!(matches!(Reference::<f64>::new(&heads, bad), Err(Error::Shape(_))), "{bad:?}");
        assert!(matches!(Fused::new(&heads, bad, &scratch), Err(Error::Shape(_))), "{bad:?}");
    }
    let heads = layer("softmax", &shape(1, 2, 3, 1, 4, 4));
    assert!(Reference::<f64>::new(&heads, good).is_err() && Fused::new(&heads, good, &scratch).is_err());
    let mixed = [layer("exp conv=2", &good)[0].clone(), layer("exp conv=3", &good)[0].clone()];
    assert!(Reference::<f64>::new(&mixed, good).is_err() && Fused::new(&mixed, good, &scratch).is_err());
}
