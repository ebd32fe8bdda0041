//! Reference files: a small model with the logits, the loss and every gradient that it must give, or a single operation, known by its metadata. Folders may
//! contain models as other libraries write them: `config.json`, `model.safetensors`, `expected.safetensors`.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use termwise_attention::operations::{self, Operation};
use termwise_attention::parts::gate::PostGate;
use termwise_attention::{Attention, FusedOptions, Real, Rope, Variant, relative_rms};
use termwise_model::config::Config;
use termwise_model::weights::Checkpoint;
use termwise_model::{Batch, Model, Objective, SessionOptions};

use super::GOLDEN;
use super::case::{Case, Unit};
use crate::Error;
use crate::layer::{Layer, Name, Sizes, Tensors};
use crate::plain_config::plain_config;

/// Logits and gradients, relative RMS.
const TENSORS: f64 = 1e-4;
/// Gradients that are zero by construction have only rounding errors.
const ZERO: f64 = 1e-6;
const LOSS: f64 = 1e-5;
/// Outputs and gradients of operations in float64 and in float32, relative RMS.
const F64_TOLERANCE: (f64, f64) = (1e-10, 1e-10);
const F32_TOLERANCE: (f64, f64) = (1e-5, 1e-4);
const EXPECTED: &str = "expected.safetensors";

fn is_model(folder: &Path) -> bool {
    folder.join("config.json").is_file() && folder.join(EXPECTED).is_file()
}

/// Every `.safetensors` file and every model of a folder, by name, or the folder itself if it is a model. A folder without them is a case that fails.
pub fn check_folder(folder: &Path, done: &mut impl FnMut(Case) -> ControlFlow<()>) -> ControlFlow<()> {
    if is_model(folder) {
        return done(check(folder));
    }
    let entries = std::fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>, _>>());
    let problem = match entries {
        Err(error) => format!("cannot read the folder: {error}"),
        Ok(mut files) => {
            files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors") || is_model(path));
            files.sort();
            if !files.is_empty() {
                return files.iter().try_for_each(|path| done(check(path)));
            }
            "there is no .safetensors file in the folder, and no model with an expected.safetensors".to_string()
        }
    };
    done(Case::new(&GOLDEN, folder.display().to_string()).fill(|_| Err(problem)))
}

fn check(path: &Path) -> Case {
    let mut case = Case::new(&GOLDEN, path.file_name().unwrap_or(path.as_os_str()).to_string_lossy());
    let operation =
        if path.is_dir() { None } else { Checkpoint::open(path).ok().and_then(|file| file.metadata().get("operation").cloned()) };
    case.left_out = operation.as_deref().and_then(operations::left_out).map(Into::into);
    match operation {
        _ if case.left_out.is_some() => case,
        Some(_) => case.fill(|case| check_operation(path, case)),
        None if path.is_dir() => case.fill(|case| check_model(path, case)),
        None => case.fill(|case| check_file(path, case)),
    }
}

fn text(error: termwise_model::Error) -> String {
    error.to_string()
}

/// The naive engine in float64, the fused engine and the recurrent state in float32.
fn check_operation(file: &Path, case: &mut Case) -> Result<(), Error> {
    let operation = Operation::read(file)?;
    case.detail = format!("{} {}", operation.variant, Sizes::from(operation.shape));
    let (wide, narrow) = (operation_layer::<f64>(&operation)?, operation_layer::<f32>(&operation)?);
    compare_operation(&operation, &wide, &mut wide.naive()?, ("float64", F64_TOLERANCE), case)?;
    compare_operation(&operation, &narrow, &mut narrow.fused(FusedOptions::default())?, ("fused", F32_TOLERANCE), case)?;
    case.measure("token by token: y", relative_rms(&narrow.token_by_token()?, operation.tensor("y")), F32_TOLERANCE.0, Unit::RelativeRms);
    Ok(())
}

fn operation_layer<R: Real>(operation: &Operation) -> Result<Layer<R>, Error> {
    let shape = operation.shape;
    let cast = |x: &[f64]| x.iter().map(|&x| R::of(x)).collect::<Vec<R>>();
    let mut tensors: Tensors<R> =
        [(Name::Q, "q"), (Name::K, "k"), (Name::V, "v")].map(|(name, x)| (name, cast(operation.tensor(x)))).into();
    tensors.extend(operation.aux_tensors().into_iter().map(|(aux, values)| (Name::AuxTensor(aux), cast(&values))));
    let heads = vec![operation.variant.clone(); shape.heads];
    Ok(Layer { heads, shape, tensors, lengths: None, rope: Rope::new(shape.d, 100.0, None)?, dy: cast(operation.tensor("dy")) })
}

fn compare_operation<R: Real>(
    operation: &Operation,
    layer: &Layer<R>,
    engine: &mut impl Attention<R>,
    (label, bounds): (&str, (f64, f64)),
    case: &mut Case,
) -> Result<(), Error> {
    let results = layer.run(engine)?;
    case.measure(format!("{label}: y"), relative_rms(&results.y, operation.tensor("y")), bounds.0, Unit::RelativeRms);
    for (name, found) in &results.gradients {
        let wide: Vec<f64> = found.iter().map(|g| g.wide()).collect();
        let named = match name {
            Name::AuxTensor(aux) => operation.gradient(*aux, &wide),
            qkv => Some((format!("d{qkv}"), wide)),
        };
        if let Some((name, found)) = named {
            case.measure(format!("{label}: {name}"), relative_rms(&found, operation.tensor(&name)), bounds.1, Unit::RelativeRms);
        }
    }
    Ok(())
}

/// A folder: token ids, logits, the loss of predicting each next token, and every gradient.
fn check_model(folder: &Path, case: &mut Case) -> Result<(), String> {
    let model = Model::read(folder).map_err(text)?;
    let expected = Checkpoint::open(folder.join(EXPECTED)).map_err(text)?;
    let (shape, _) = expected.read_i64("ids").map_err(text)?;
    let [batch, time] = shape[..] else { return Err(format!("tensor `ids` has shape {shape:?}, expected [rows, positions]")) };
    let ids = tokens(&expected, "ids", [batch, time], model.config.vocab_size)?;
    let label = |at: usize| if at % time + 1 == time { -100 } else { ids[at + 1] as i32 };
    let labels: Vec<i32> = (0..ids.len()).map(label).collect();
    compare(&model, [batch, time], &Batch::new(&ids, &labels), &expected, case)
}

/// A file: weights, token ids, labels and what [`compare`] reads; sizes and variant are in the metadata.
fn check_file(file: &Path, case: &mut Case) -> Result<(), String> {
    let checkpoint = Checkpoint::open(file).map_err(text)?;
    let config = config(&checkpoint)?;
    check_names(&checkpoint, &config)?;
    let shape = [number(&checkpoint, "batch")?, number(&checkpoint, "seq")?];
    let mut model = Model::zeros(config).map_err(text)?;
    for entry in model.params.layout().clone().entries() {
        let values = &mut model.params.values_mut()[entry.range()];
        checkpoint.read_into(&format!("weight:{}", entry.spec.name), &entry.spec.shape, values).map_err(text)?;
    }
    let ids = tokens(&checkpoint, "input_ids", shape, model.config.vocab_size)?;
    let (_, labels) = checkpoint.read_i64("labels").map_err(text)?;
    let labels: Vec<i32> = labels.into_iter().map(|label| i32::try_from(label).unwrap_or(i32::MAX)).collect();
    if labels.len() != ids.len() {
        return Err(format!("tensor `labels` has {} values, expected {}", labels.len(), ids.len()));
    }
    compare(&model, shape, &Batch::new(&ids, &labels), &checkpoint, case)
}

/// Logits, loss and gradients of a model.
fn compare(model: &Model, [batch, time]: [usize; 2], data: &Batch, expected: &Checkpoint, case: &mut Case) -> Result<(), String> {
    case.detail = format!("B{batch} T{time} layers {} width {}", model.config.num_hidden_layers, model.config.hidden_size);
    let floats = |name: &str, count: usize| {
        let (shape, values) = expected.read(name).map_err(text)?;
        (values.len() == count).then_some(values).ok_or_else(|| format!("tensor `{name}` has shape {shape:?}, expected {count} values"))
    };
    let (rows, vocabulary) = (batch * time, model.config.vocab_size);
    let mut session = model.session(batch, time, SessionOptions::default()).map_err(text)?;
    session.run(&model.params, data.ids, None).map_err(text)?;
    let mut logits = vec![f32::NAN; rows * vocabulary];
    session.logits(&model.params, 0..rows, &mut logits).map_err(text)?;
    case.measure("logits", relative_rms(&logits, &floats("logits", logits.len())?), TENSORS, Unit::RelativeRms);
    let mut grads = model.params.zeros_like().map_err(text)?;
    let loss = session.loss_and_grad(&model.params, data, &mut grads).map_err(text)?;
    case.measure("loss", (loss.mean() - f64::from(floats("loss", 1)?[0])).abs(), LOSS, Unit::Absolute);
    let variant = model.config.attention.default_variant();
    for (entry, found) in grads.iter() {
        let name = format!("grad:{}", entry.spec.name);
        let values = floats(&name, found.len())?;
        let relative = relative_rms(found, &values);
        if relative.is_nan() || relative > TENSORS && is_zero(&name, variant, &values) {
            // NaN is kept.
            let differences = found.iter().zip(&values).map(|(a, b)| f64::from((a - b).abs()));
            let largest = differences.fold(0.0, |max: f64, x| if max.is_nan() || x <= max { max } else { x });
            case.measure(name, largest, ZERO, Unit::Absolute);
        } else {
            case.measure(name, relative, TENSORS, Unit::RelativeRms);
        }
    }
    let listed = expected.names().filter(|name| name.starts_with("grad:")).count();
    let tensors = grads.layout().entries().len();
    if listed == tensors { Ok(()) } else { Err(format!("the file has {listed} gradients, the model {tensors} tensors")) }
}

/// Gradients that are zero by construction: those below rounding, and that of an output gate that a scale-free norm cancels up to eps.
fn is_zero(name: &str, variant: &Variant, expected: &[f32]) -> bool {
    let cancelled = variant.norm.scale_free() && !matches!(variant.post_gate, Some(PostGate::Shared(_)));
    expected.iter().all(|x| f64::from(x.abs()) < ZERO) || cancelled && name.contains("self_attn.out_gate_proj.")
}

fn tokens(file: &Checkpoint, name: &str, shape: [usize; 2], vocabulary: usize) -> Result<Vec<u32>, String> {
    let (found, values) = file.read_i64(name).map_err(text)?;
    if found != shape {
        return Err(format!("tensor `{name}` has shape {found:?}, expected {shape:?}"));
    }
    let token = |id: i64| u32::try_from(id).ok().filter(|&id| (id as usize) < vocabulary);
    values
        .into_iter()
        .map(|id| token(id).ok_or_else(|| format!("tensor `{name}` contains {id}, expected tokens below {vocabulary}")))
        .collect()
}

fn optional<T: std::str::FromStr>(file: &Checkpoint, key: &str) -> Result<Option<T>, String> {
    let Some(value) = file.metadata().get(key) else { return Ok(None) };
    value.parse().map(Some).map_err(|_| format!("`{key}` in the metadata is `{value}`, which is not a valid number"))
}

fn number<T: std::str::FromStr>(file: &Checkpoint, key: &str) -> Result<T, String> {
    optional(file, key)?.ok_or_else(|| format!("the metadata has no `{key}`; a reference file states its sizes there"))
}

fn config(file: &Checkpoint) -> Result<Config, String> {
    let attention: String = number(file, "attention_type")?;
    let variant: Variant = attention.parse().map_err(|error| format!("`attention_type` in the metadata: {error}"))?;
    let (hidden, heads): (usize, usize) = (number(file, "hidden")?, number(file, "heads")?);
    let head_dim: usize = optional(file, "head_dim")?.unwrap_or(hidden / heads.max(1));
    // Without a number of KV heads, the rows of the first key projection give it.
    let rows = file.info("weight:model.layers.0.self_attn.k_proj.weight").ok().and_then(|info| info.shape.first().copied());
    let kv_heads = rows.and_then(|rows| rows.checked_div(head_dim)).unwrap_or(heads);
    let config = Config {
        intermediate_size: number(file, "inter")?,
        num_hidden_layers: number(file, "layers")?,
        num_key_value_heads: optional(file, "kv_heads")?.unwrap_or(kv_heads),
        head_dim,
        rms_norm_eps: number(file, "rms_norm_eps")?,
        rope_theta: number(file, "rope_theta")?,
        tie_word_embeddings: file.info("weight:lm_head.weight").is_err(),
        ..plain_config(number(file, "vocab")?, hidden, heads, number(file, "seq")?, variant)
    };
    config.validate().map_err(text)?;
    Ok(config)
}

/// Weights and gradients are exactly those of the model, so sizes are bounded by the file before memory is allocated.
fn check_names(file: &Checkpoint, config: &Config) -> Result<(), String> {
    let specs = config.parameter_list().map_err(text)?;
    for spec in &specs {
        for name in [format!("weight:{}", spec.name), format!("grad:{}", spec.name)] {
            let found = file.info(&name).map_err(text)?.shape;
            if found != spec.shape {
                return Err(format!("tensor `{name}` has shape {found:?}, expected {:?} by the metadata", spec.shape));
            }
        }
    }
    let known = |name: &str| name.split_once(':').is_some_and(|(_, name)| specs.iter().any(|spec| spec.name == name));
    match file.names().find(|name| (name.starts_with("weight:") || name.starts_with("grad:")) && !known(name)) {
        Some(name) => Err(format!("a model with the `attention_type` of the metadata has no tensor `{name}`")),
        None => Ok(()),
    }
}
