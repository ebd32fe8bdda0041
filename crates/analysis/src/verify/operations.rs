//! Reference cases of single operations, through every engine that computes them.

use std::path::Path;

use termwise_attention::operations::{self, Operation};
use termwise_attention::{Attention, Error, FusedOptions, Mode, Real, Rope, relative_rms};

use super::outcome::{Case, Identity, Unit};
use crate::layer::{Layer, Name, Sizes, Tensors};

/// Outputs and gradients in float64, relative RMS.
const WIDE: (f64, f64) = (1e-10, 1e-10);
/// In float32.
const NARROW: (f64, f64) = (1e-5, 1e-4);
/// Lengths of chunks; 1 is token by token.
const CHUNKS: [usize; 3] = [1, 7, 16];

/// One file: the naive engine in float64, the fused engine in float32 in parallel and in chunks, and the state token by token, each as far as
/// it supports the parts.
pub fn check(file: &Path, name: &str, subject: &str) -> Case {
    let mut case = Case::new(Identity::Golden, subject);
    if let Some(why) = operations::left_out(name) {
        case.left_out = Some(why.into());
        return case;
    }
    case.fill(|case| {
        let operation = Operation::read(file)?;
        case.detail = format!("{} {}", operation.variant, Sizes::from(operation.shape));
        run(&operation, case)
    })
}

fn run(operation: &Operation, case: &mut Case) -> Result<(), Error> {
    let (wide, narrow) = (layer::<f64>(operation)?, layer::<f32>(operation)?);
    compare(operation, &wide, &mut wide.naive()?, "float64", WIDE, case)?;
    compare(operation, &narrow, &mut narrow.fused(FusedOptions::default())?, "fused", NARROW, case)?;
    for chunk in CHUNKS.into_iter().filter(|_| operation.variant.remembered().is_some_and(|weighing| weighing.has_finite_map())) {
        let mut engine = narrow.fused(FusedOptions::default().mode(Mode::Chunk(Some(chunk))))?;
        compare(operation, &narrow, &mut engine, &format!("fused chunks of {chunk}"), NARROW, case)?;
    }
    let error = relative_rms(&narrow.token_by_token()?, operation.tensor("y"));
    case.measure("token by token: y", error, NARROW.0, Unit::RelativeRms);
    Ok(())
}

fn layer<R: Real>(operation: &Operation) -> Result<Layer<R>, Error> {
    let shape = operation.shape;
    let narrow = |x: &[f64]| x.iter().map(|&x| R::of(x)).collect::<Vec<R>>();
    let mut tensors: Tensors<R> =
        [(Name::Q, "q"), (Name::K, "k"), (Name::V, "v")].map(|(name, x)| (name, narrow(operation.tensor(x)))).into();
    tensors.extend(operation.aux_tensors().into_iter().map(|(extra, values)| (Name::AuxTensor(extra), narrow(&values))));
    let heads = vec![operation.variant.clone(); shape.heads];
    Ok(Layer { heads, shape, tensors, lengths: None, rope: Rope::new(shape.d, 100.0, None)?, dy: narrow(operation.tensor("dy")) })
}

fn compare<R: Real>(
    operation: &Operation,
    layer: &Layer<R>,
    engine: &mut impl Attention<R>,
    label: &str,
    bounds: (f64, f64),
    case: &mut Case,
) -> Result<(), Error> {
    let results = layer.run(engine)?;
    case.measure(format!("{label}: y"), relative_rms(&results.y, operation.tensor("y")), bounds.0, Unit::RelativeRms);
    for (name, found) in &results.gradients {
        let wide: Vec<f64> = found.iter().map(|g| g.wide()).collect();
        let named = match name {
            Name::AuxTensor(extra) => operation.gradient(*extra, &wide),
            qkv => Some((format!("d{qkv}"), wide)),
        };
        if let Some((name, found)) = named {
            case.measure(format!("{label}: {name}"), relative_rms(&found, operation.tensor(&name)), bounds.1, Unit::RelativeRms);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_those_of_the_reference_cases() {
        let Some(folder) = termwise_base::test_skip::shared("golden-ops") else { return };
        let (mut compared, mut left_out) = (0, 0);
        let _ = crate::verify::check_folder(&folder, &mut |case| {
            assert!(case.passed(), "{case:#?}");
            left_out += case.left_out.is_some() as usize;
            compared += !case.measures.is_empty() as usize;
            std::ops::ControlFlow::Continue(())
        });
        assert!(compared > 10 && left_out <= 1, "{compared} compared, {left_out} left out");
    }

    #[test]
    fn a_wrong_number_is_seen() {
        let Some(folder) = termwise_base::test_skip::shared("golden-ops") else { return };
        let operation = Operation::read(&folder.join("delta_gated.safetensors")).expect("a reference case");
        let mut layer = layer::<f64>(&operation).expect("a layer");
        layer.tensors[3].1[5] += 1e-6;
        let mut case = Case::new(Identity::Golden, "changed");
        compare(&operation, &layer, &mut layer.naive().expect("an engine"), "float64", WIDE, &mut case).expect("a pass");
        assert!(!case.passed());
    }
}
