//! Single operations against reference cases in float64: those of flash-linear-attention's naive functions, and plain PyTorch code.
//!
//! A file names its operation and its sizes in its metadata. Each operation is a variant, with the file's tensors under their names there.

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;
use support::{Case, Name, shape};
use termwise_attention::{Extra, Real, Rope, Shape, Variant, relative_rms};

/// Operations of the reference cases that no part computes.
const NOT_THERE: [&str; 1] = ["log_linear"];

struct File {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, Vec<f64>>,
}

impl File {
    fn read(path: &Path) -> File {
        let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let metadata = header.metadata().clone().unwrap_or_default().into_iter().collect();
        let wide = |data: &[u8]| data.chunks_exact(8).map(|x| f64::from_le_bytes(x.try_into().expect("eight bytes"))).collect();
        let tensors = SafeTensors::deserialize(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        File { metadata, tensors: tensors.iter().map(|(name, view)| (name.to_string(), wide(view.data()))).collect() }
    }

    fn size(&self, name: &str) -> usize {
        self.metadata[name].parse().unwrap_or_else(|_| panic!("{name} is no number"))
    }

    fn get(&self, name: &str) -> &[f64] {
        self.tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    fn shape(&self) -> Shape {
        let [batch, time, heads, d, e] = ["batch", "time", "heads", "d", "e"].map(|name| self.size(name));
        shape(batch, time, heads, heads, d, e)
    }
}

/// A tensor of a file as an input, and the file's gradient from the input's.
struct Input {
    extra: Extra,
    values: Vec<f64>,
    /// The file's name of the gradient, and what it is made of: the gradient of the input.
    gradient: &'static str,
    back: Box<Back>,
}

type Back = dyn Fn(&[f64]) -> Vec<f64>;

fn plain(file: &File, extra: Extra, name: &'static str, gradient: &'static str) -> Input {
    Input { extra, values: file.get(name).to_vec(), gradient, back: Box::new(|g| g.to_vec()) }
}

/// β itself in the file, its logit as an input: β = r·σ(logit).
fn beta(file: &File, range: f64) -> Input {
    let beta = file.get("beta").to_vec();
    let values = beta.iter().map(|b| (b / (range - b)).ln()).collect();
    let back = move |g: &[f64]| g.iter().zip(&beta).map(|(g, b)| g / (b * (1.0 - b / range))).collect();
    Input { extra: Extra::Beta, values, gradient: "dbeta", back: Box::new(back) }
}

/// The running sum c in the file, its steps as an input.
fn running_sum(file: &File) -> Input {
    let Shape { batch, time, heads, .. } = file.shape();
    let row = time * heads;
    // Differences to the position before, or to the one after.
    let difference = move |x: &[f64], i: usize, other: Option<usize>| x[i] - other.map_or(0.0, |other| x[other]);
    let before = move |i: usize| i.checked_sub(heads).filter(|other| other / row == i / row);
    let after = move |i: usize| Some(i + heads).filter(|other| other / row == i / row);
    let values = (0..batch * row).map(|i| difference(file.get("c"), i, before(i))).collect();
    let back = move |g: &[f64]| (0..g.len()).map(|i| difference(g, i, after(i))).collect();
    Input { extra: Extra::DecayGate, values, gradient: "dc", back: Box::new(back) }
}

/// The variant of an operation and its inputs; `None` where nobody knows it.
fn operation(file: &File) -> Option<(String, Vec<Input>)> {
    let (window, sinks, dim) = (file.metadata.get("window"), file.metadata.get("sinks"), file.metadata.get("dim"));
    let text = |size: Option<&String>| size.cloned().unwrap_or_default();
    let (window, sinks, dim) = (text(window), text(sinks), text(dim));
    let x = |extra, name, gradient| plain(file, extra, name, gradient);
    let g = || x(Extra::DecayGate, "g", "dg");
    Some(match file.metadata["operation"].as_str() {
        "window" => (format!("exp window={window}"), vec![]),
        "window_sinks" => (format!("exp window={window} sinks={sinks}"), vec![]),
        "window_sinks_far_taylor2" => (format!("exp window={window} sinks={sinks} far(taylor=0..2)"), vec![]),
        "window_decay" => (format!("exp window={window} decay=given"), vec![g()]),
        "softcap" => ("exp cap=5".into(), vec![]),
        "qk_norm" => ("exp qk_norm=rms".into(), vec![x(Extra::QNorm, "gq", "dgq"), x(Extra::KNorm, "gk", "dgk")]),
        "sink_learned" => ("exp over=sum,sink".into(), vec![x(Extra::Sink, "b", "db")]),
        "vector_gate" => ("exp post=sigmoid,channel".into(), vec![x(Extra::PostGate, "gate", "dgate")]),
        "channel_decay" => ("feature=identity over=none decay=given,channel".into(), vec![g()]),
        "channel_decay_taylor2" => ("taylor=0..2 over=none decay=given,channel".into(), vec![g()]),
        "delta" => ("feature=identity over=none write=delta,2".into(), vec![beta(file, 2.0)]),
        "delta_gated" => ("feature=identity over=none write=delta,2 decay=given".into(), vec![beta(file, 2.0), g()]),
        "delta_channel" => ("feature=identity over=none write=delta,2 decay=given,channel".into(), vec![beta(file, 2.0), g()]),
        "delta_exp" => ("exp scale=1 over=none write=delta,2 decay=given".into(), vec![beta(file, 2.0), running_sum(file)]),
        "delta_taylor2_decay" => {
            ("taylor=0..2 scale=1 over=none write=delta,2 decay=given".into(), vec![beta(file, 2.0), running_sum(file)])
        }
        "dim_taylor2" => {
            (format!("taylor=0..2 dim={dim} over=sum,eps=1e-6"), vec![x(Extra::DimQ, "wq", "dwq"), x(Extra::DimK, "wk", "dwk")])
        }
        "hedgehog" => {
            let inputs = [
                (Extra::FeatureQ, "wq", "dwq"),
                (Extra::FeatureQBias, "bq", "dbq"),
                (Extra::FeatureK, "wk", "dwk"),
                (Extra::FeatureKBias, "bk", "dbk"),
            ];
            ("feature=hedgehog scale=1".into(), inputs.map(|(extra, name, gradient)| x(extra, name, gradient)).into())
        }
        _ => return None,
    })
}

fn case<R: Real>(file: &File, text: &str, inputs: &[Input]) -> Case<R> {
    let shape = file.shape();
    let variant: Variant = format!("{text} rope=off").parse().unwrap_or_else(|error| panic!("{error}"));
    let narrow = |x: &[f64]| x.iter().map(|&x| R::of(x)).collect::<Vec<R>>();
    let mut tensors = vec![(Name::Q, narrow(file.get("q"))), (Name::K, narrow(file.get("k"))), (Name::V, narrow(file.get("v")))];
    tensors.extend(inputs.iter().map(|input| (Name::Extra(input.extra), narrow(&input.values))));
    let rope = Rope::new(shape.d, 100.0, None).expect("a rope");
    Case { heads: vec![variant; shape.heads], shape, tensors, lengths: None, rope, dy: narrow(file.get("dy")) }
}

/// Output and gradients of an engine within these bounds of the file's.
fn compare<R: Real>(file: &File, inputs: &[Input], y: &[R], gradients: &[(Name, Vec<R>)], bounds: (f64, f64), label: &str) {
    let error = relative_rms(y, file.get("y"));
    assert!(error < bounds.0, "{label}: y differs by {error:e}");
    for (name, found) in gradients {
        let wide: Vec<f64> = found.iter().map(|g| g.wide()).collect();
        let (expected, found) = match name {
            Name::Q => ("dq", wide),
            Name::K => ("dk", wide),
            Name::V => ("dv", wide),
            Name::Extra(extra) => {
                let input = inputs.iter().find(|input| input.extra == *extra).expect("one of the inputs");
                (input.gradient, (input.back)(&wide))
            }
        };
        let error = relative_rms(&found, file.get(expected));
        assert!(error < bounds.1, "{label}: {expected} differs by {error:e}");
    }
}

#[test]
fn are_those_of_the_reference_cases() {
    let Some(folder) = termwise_unrun::shared("golden-ops") else { return };
    let mut files: Vec<_> = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    let (mut computed, mut chunked) = (0, 0);
    for path in &files {
        let file = File::read(path);
        let Some((text, inputs)) = operation(&file) else {
            assert!(NOT_THERE.contains(&file.metadata["operation"].as_str()), "{}: nothing computes this operation", path.display());
            continue;
        };
        let label = format!("{} as `{text}`", path.display());
        let wide = case::<f64>(&file, &text, &inputs);
        let mut engine = wide.naive();
        compare(&file, &inputs, &wide.forward(&mut engine).0, &wide.backward(&mut engine), (1e-10, 1e-10), &label);
        let narrow = case::<f32>(&file, &text, &inputs);
        let mut engine = narrow.naive();
        compare(&file, &inputs, &narrow.forward(&mut engine).0, &narrow.backward(&mut engine), (1e-5, 1e-4), &format!("{label}, float32"));
        for chunk in [1, 5, 16] {
            if wide.heads[0].remembered().is_some_and(|weighing| !weighing.has_finite_map()) {
                continue;
            }
            let (label, mut engine) = (format!("{label}, chunks of {chunk}"), wide.recurrent(chunk));
            compare(&file, &inputs, &wide.forward(&mut engine).0, &wide.backward(&mut engine), (1e-10, 1e-10), &label);
            chunked += 1;
        }
        computed += 1;
    }
    assert!(computed > 10 && chunked > 30, "only {computed} operations, {chunked} in chunks");
}
