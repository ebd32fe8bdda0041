//! Reference cases of single operations: files with inputs, output and gradients of one variant, in float64.
//!
//! The metadata of a file name its operation and sizes. Each operation corresponds to a variant. Tensors of the file become inputs under the names
//! that the parts use, and gradients of inputs become those of the file's tensors: a file may contain β if a variant reads its logit, or the
//! running sum c if it reads the steps.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};

use crate::{AuxKind, AuxTensor, Error, Shape, Variant};

/// A validated reference case.
#[derive(Clone, Debug)]
pub struct Operation {
    /// Its name.
    pub name: String,
    /// Its formula, as stated in the file.
    pub about: String,
    /// Its sizes.
    pub shape: Shape,
    /// The variant that computes it.
    pub variant: Variant,
    inputs: Vec<Input>,
    tensors: BTreeMap<String, Vec<f64>>,
}

/// How a tensor of a file is converted to an input.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Plain,
    /// The file contains r·σ(input).
    Sigmoid(f64),
    /// The file contains the running sum of the input.
    RunningSum,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Input {
    aux: AuxKind,
    tensor: &'static str,
    form: Form,
}

/// The reason why a known operation of the reference cases is not supported.
pub fn left_out(name: &str) -> Option<&'static str> {
    (name == "log_linear").then_some("log-linear attention weights keys by Fenwick levels of their distance, which no part supports")
}

/// The variant string of an operation with these sizes, and its auxiliary inputs.
fn known(name: &str, size: impl Fn(&str) -> Result<usize, String>) -> Result<(String, Vec<Input>), String> {
    let plain = |aux, tensor| Input { aux, tensor, form: Form::Plain };
    let beta = Input { aux: AuxKind::Beta, tensor: "beta", form: Form::Sigmoid(2.0) };
    let sums = Input { aux: AuxKind::DecayGate, tensor: "c", form: Form::RunningSum };
    let decay = plain(AuxKind::DecayGate, "g");
    Ok(match name {
        "window" => (format!("exp window={}", size("window")?), vec![]),
        "window_sinks" => (format!("exp window={} sinks={}", size("window")?, size("sinks")?), vec![]),
        "window_sinks_far_taylor2" => (format!("exp window={} sinks={} far(taylor=0..2)", size("window")?, size("sinks")?), vec![]),
        "window_decay" => (format!("exp window={} decay=given", size("window")?), vec![decay]),
        "softcap" => ("exp cap=5".into(), vec![]),
        "qk_norm" => ("exp qk_norm=rms".into(), vec![plain(AuxKind::QNorm, "gq"), plain(AuxKind::KNorm, "gk")]),
        "sink_learned" => ("exp over=sum,sink".into(), vec![plain(AuxKind::Sink, "b")]),
        "vector_gate" => ("exp post=sigmoid,channel".into(), vec![plain(AuxKind::PostGate, "gate")]),
        "channel_decay" => ("feature=identity over=none decay=given,channel".into(), vec![decay]),
        "channel_decay_taylor2" => ("taylor=0..2 over=none decay=given,channel".into(), vec![decay]),
        "delta" => ("feature=identity over=none write=delta,2".into(), vec![beta]),
        "delta_gated" => ("feature=identity over=none write=delta,2 decay=given".into(), vec![beta, decay]),
        "delta_channel" => ("feature=identity over=none write=delta,2 decay=given,channel".into(), vec![beta, decay]),
        "delta_exp" => ("exp scale=1 over=none write=delta,2 decay=given".into(), vec![beta, sums]),
        "delta_taylor2_decay" => ("taylor=0..2 scale=1 over=none write=delta,2 decay=given".into(), vec![beta, sums]),
        "dim_taylor2" => {
            (format!("taylor=0..2 dim={} over=sum,eps=1e-6", size("dim")?), vec![plain(AuxKind::DimQ, "wq"), plain(AuxKind::DimK, "wk")])
        }
        "hedgehog" => {
            let inputs =
                [(AuxKind::FeatureQ, "wq"), (AuxKind::FeatureQBias, "bq"), (AuxKind::FeatureK, "wk"), (AuxKind::FeatureKBias, "bk")];
            ("feature=hedgehog scale=1".into(), inputs.map(|(aux, tensor)| plain(aux, tensor)).into())
        }
        name => return Err(left_out(name).map_or(format!("no part computes an operation `{name}`"), String::from)),
    })
}

impl Operation {
    /// Reads a file and checks that it has every tensor with the expected size.
    pub fn read(path: &Path) -> Result<Operation, Error> {
        let fail = |problem: String| Error::File { path: path.display().to_string(), problem };
        let bytes = std::fs::read(path).map_err(|error| fail(error.to_string()))?;
        Operation::from_bytes(&bytes).map_err(fail)
    }

    fn from_bytes(bytes: &[u8]) -> Result<Operation, String> {
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| format!("it is not a safetensors file: {error}"))?;
        let metadata: BTreeMap<String, String> = header.metadata().clone().unwrap_or_default().into_iter().collect();
        let size = |name: &str| match metadata.get(name).map(|value| (value, value.parse::<usize>())) {
            Some((_, Ok(size))) => Ok(size),
            Some((value, Err(_))) => Err(format!("the metadata's `{name}` is `{value}`, which is not a size")),
            None => Err(format!("the metadata lacks `{name}`; reference cases have their sizes there")),
        };
        let name = metadata.get("operation").ok_or("the metadata names no `operation`")?.clone();
        let heads = size("heads")?;
        let kv_heads = if metadata.contains_key("kv_heads") { size("kv_heads")? } else { heads };
        let shape = Shape { batch: size("batch")?, time: size("time")?, heads, kv_heads, d: size("d")?, e: size("e")? };
        shape.validate().map_err(|error| error.to_string())?;
        let (text, inputs) = known(&name, size)?;
        let variant: Variant = format!("{text} rope=off").parse().map_err(|error: Error| error.to_string())?;

        let file = SafeTensors::deserialize(bytes).map_err(|error| format!("it is not a safetensors file: {error}"))?;
        let mut tensors = BTreeMap::new();
        for (name, view) in file.iter() {
            if view.dtype() != Dtype::F64 {
                return Err(format!("tensor `{name}` is {:?}; a reference case is float64", view.dtype()));
            }
            let values = view.data().chunks_exact(8).map(|x| f64::from_le_bytes(x.try_into().expect("eight bytes")));
            tensors.insert(name.to_string(), values.collect::<Vec<f64>>());
        }
        let layer = crate::Layer::new(heads, kv_heads, shape.d).value_dim(shape.e).variant(&variant).map_err(|error| error.to_string())?;
        let aux =
            |input: &Input| layer.aux_specs().iter().find(|spec| spec.aux == input.aux.into()).map_or(0, |spec| spec.values(shape.rows()));
        let [q, k, v] = shape.widths().map(|width| width * shape.rows());
        let own = [("q", q), ("k", k), ("v", v), ("y", shape.outputs())].into_iter();
        for (tensor, length) in own.chain(inputs.iter().map(|input| (input.tensor, aux(input)))) {
            for tensor in [tensor.to_string(), format!("d{tensor}")] {
                let found = tensors.get(&tensor).ok_or_else(|| format!("there is no tensor `{tensor}`"))?.len();
                if found != length {
                    return Err(format!("tensor `{tensor}` has {found} values, the sizes in the metadata require {length}"));
                }
            }
        }
        Ok(Operation { about: metadata.get("about").cloned().unwrap_or_default(), name, shape, variant, inputs, tensors })
    }

    /// A tensor of the file: `q`, `k`, `v`, `y`, `dy`.
    pub fn tensor(&self, name: &str) -> &[f64] {
        self.tensors.get(name).map_or(&[], |values| values)
    }

    /// The auxiliary inputs of the variant.
    pub fn aux_tensors(&self) -> Vec<(AuxTensor, Vec<f64>)> {
        self.inputs.iter().map(|input| (input.aux.into(), self.input(input))).collect()
    }

    fn input(&self, input: &Input) -> Vec<f64> {
        let given = self.tensor(input.tensor);
        match input.form {
            Form::Plain => given.to_vec(),
            Form::Sigmoid(range) => given.iter().map(|x| (x / (range - x)).ln()).collect(),
            Form::RunningSum => (0..given.len()).map(|i| given[i] - self.before(i).map_or(0.0, |before| given[before])).collect(),
        }
    }

    /// The gradient of an input, converted to that of the file's tensor, with its name in the file; `None` if there is no such input.
    pub fn gradient(&self, aux: AuxTensor, found: &[f64]) -> Option<(String, Vec<f64>)> {
        let input = self.inputs.iter().find(|input| aux == input.aux.into())?;
        let given = self.tensor(input.tensor);
        let gradient = match input.form {
            Form::Plain => found.to_vec(),
            Form::Sigmoid(range) => found.iter().zip(given).map(|(g, x)| g / (x * (1.0 - x / range))).collect(),
            Form::RunningSum => (0..found.len()).map(|i| found[i] - self.after(i).map_or(0.0, |after| found[after])).collect(),
        };
        Some((format!("d{}", input.tensor), gradient))
    }

    /// The index of the same head at the previous position, in a tensor [B, T, H].
    fn before(&self, i: usize) -> Option<usize> {
        let row = self.shape.time * self.shape.heads;
        i.checked_sub(self.shape.heads).filter(|before| before / row == i / row)
    }

    /// The index of the same head at the next position.
    fn after(&self, i: usize) -> Option<usize> {
        let row = self.shape.time * self.shape.heads;
        Some(i + self.shape.heads).filter(|after| after / row == i / row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(metadata: &[(&str, &str)], tensors: &[(&str, usize)]) -> Vec<u8> {
        let data = vec![0u8; 8 * tensors.iter().map(|(_, n)| n).max().copied().unwrap_or(0)];
        let view = |n: usize| safetensors::tensor::TensorView::new(Dtype::F64, vec![n], &data[..8 * n]).expect("a tensor");
        let metadata = metadata.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        safetensors::serialize(tensors.iter().map(|&(name, n)| (name, view(n))), Some(metadata)).expect("a file")
    }

    #[test]
    fn invalid_files_are_reported() {
        let sizes = [("batch", "1"), ("time", "2"), ("heads", "1"), ("d", "2"), ("e", "3"), ("window", "2")];
        let tensors = [("q", 4), ("dq", 4), ("k", 4), ("dk", 4), ("v", 6), ("dv", 6), ("y", 6), ("dy", 6)];
        let named = |name: &'static str| [&[("operation", name)][..], &sizes].concat();
        let said = |bytes: Vec<u8>| Operation::from_bytes(&bytes).expect_err("something is wrong");
        assert!(Operation::from_bytes(&file(&named("window"), &tensors)).is_ok_and(|found| found.variant.window == Some(2)));
        assert!(said(b"no file".to_vec()).contains("safetensors"));
        assert!(said(file(&sizes, &tensors)).contains("`operation`"));
        assert_eq!(Some(&said(file(&named("log_linear"), &tensors))[..]), left_out("log_linear"));
        assert!(said(file(&named("rotate"), &tensors)).contains("`rotate`"));
        assert!(said(file(&named("window_sinks"), &tensors)).contains("lacks `sinks`"));
        assert!(said(file(&named("window")[..6], &tensors)).contains("lacks `window`"));
        assert!(said(file(&named("window"), &tensors[..7])).contains("no tensor `dy`"));
        assert!(said(file(&named("sink_learned"), &tensors)).contains("no tensor `b`"));
        assert!(said(file(&named("window"), &[&[("q", 5)][..], &tensors[1..]].concat())).contains("5 values"));
    }
}
