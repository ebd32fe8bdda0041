//! Reference files: a small model each, with the logits, the loss and every gradient that it must give; or a single operation, known by its
//! metadata. Folders among them may hold models of other families.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use termwise_attention::parts::gate::PostGate;
use termwise_attention::{Variant, relative_rms};
use termwise_model::config::{AttentionMap, Config};
use termwise_model::weights::Checkpoint;
use termwise_model::{Batch, Model, Objective, SessionOptions};

use super::outcome::{Case, Identity, Unit};
use super::{families, operations};

/// Logits and gradients, relative RMS.
pub(super) const TENSORS: f64 = 1e-4;
/// Gradients that are zero by construction: rounding is all there is.
pub(super) const ZERO: f64 = 1e-6;
pub(super) const LOSS: f64 = 1e-5;

/// Every `.safetensors` file of a folder and every model of a family in it, by name; or the folder itself, if it is such a model. A folder that
/// cannot be read or has none is a case that does not pass.
pub fn check_folder(folder: &Path, tell: &mut impl FnMut(Case) -> ControlFlow<()>) -> ControlFlow<()> {
    if families::is_one(folder) {
        return tell(families::check(folder));
    }
    let entries = std::fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>, _>>());
    let problem = match entries {
        Err(error) => format!("cannot read the folder: {error}"),
        Ok(mut files) => {
            files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors") || families::is_one(path));
            files.sort();
            if !files.is_empty() {
                return files.iter().try_for_each(|path| tell(if path.is_dir() { families::check(path) } else { check_file(path) }));
            }
            "there is no .safetensors file in the folder, and no model with an expected.safetensors".to_string()
        }
    };
    tell(Case { problem: Some(problem), ..Case::new(Identity::Golden, folder.display().to_string()) })
}

/// One file: whatever is wrong with it becomes the problem of the case.
pub fn check_file(file: &Path) -> Case {
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
    if let Some(operation) = Checkpoint::open(file).ok().and_then(|file| file.metadata().get("operation").cloned()) {
        return operations::check(file, &operation, &name);
    }
    Case::new(Identity::Golden, name).fill(|case| compare(file, case))
}

fn compare(file: &Path, case: &mut Case) -> Result<(), String> {
    let checkpoint = Checkpoint::open(file).map_err(text)?;
    let golden = Golden { checkpoint: &checkpoint };
    let (batch, time) = (golden.number("batch")?, golden.number("seq")?);
    let config = golden.config()?;
    let variant = config.attention.default_variant().clone();
    case.detail = format!("B{batch} T{time} layers {} width {}", config.num_hidden_layers, config.hidden_size);
    golden.check_names(&config)?;
    let ids = golden.integers("input_ids", [batch, time], |id| u32::try_from(id).ok())?;
    let labels = golden.integers("labels", [batch, time], |label| i32::try_from(label).ok())?;

    let mut model = Model::zeros(config).map_err(text)?;
    let layout = model.params.layout().clone();
    for entry in layout.entries() {
        let values = &mut model.params.values_mut()[entry.range()];
        checkpoint.read_into(&format!("weight:{}", entry.spec.name), &entry.spec.shape, values).map_err(text)?;
    }
    let mut session = model.session(batch, time, SessionOptions::default()).map_err(text)?;
    session.run(&model.params, &ids, None).map_err(text)?;
    let vocabulary = model.config.vocab_size;
    let mut logits = vec![f32::NAN; ids.len() * vocabulary];
    session.logits(&model.params, 0..ids.len(), &mut logits).map_err(text)?;
    let expected = golden.floats("logits", &[batch, time, vocabulary])?;
    case.measure("logits", relative_rms(&logits, &expected), TENSORS, Unit::RelativeRms);

    let mut grads = model.params.zeros_like().map_err(text)?;
    let loss = session.loss_and_grad(&model.params, &Batch::new(&ids, &labels), &mut grads).map_err(text)?;
    let expected = f64::from(golden.floats("loss", &[1])?[0]);
    case.measure("loss", (loss.mean() - expected).abs(), LOSS, Unit::Absolute);
    for (entry, found) in grads.iter() {
        let name = format!("grad:{}", entry.spec.name);
        let expected = golden.floats(&name, &entry.spec.shape)?;
        let relative = relative_rms(found, &expected);
        if relative.is_nan() || relative > TENSORS && is_zero(&name, &variant, &expected) {
            let largest = found.iter().zip(&expected).map(|(a, b)| f64::from((a - b).abs()));
            // NaN, once met, stays.
            let largest = largest.fold(0.0, |max: f64, x| if max.is_nan() || x <= max { max } else { x });
            case.measure(name, largest, ZERO, Unit::Absolute);
        } else {
            case.measure(name, relative, TENSORS, Unit::RelativeRms);
        }
    }
    Ok(())
}

/// Gradients that are zero by construction: those below rounding, and the output gate's where a scale-free norm cancels it up to eps.
fn is_zero(name: &str, variant: &Variant, expected: &[f32]) -> bool {
    let cancelled = variant.norm.scale_free() && !matches!(variant.post_gate, Some(PostGate::Shared(_)));
    expected.iter().all(|x| f64::from(x.abs()) < ZERO) || cancelled && name.contains("self_attn.out_gate_proj.")
}

pub(super) fn text(error: termwise_model::Error) -> String {
    error.to_string()
}

struct Golden<'a> {
    checkpoint: &'a Checkpoint,
}

impl Golden<'_> {
    fn optional<T: std::str::FromStr>(&self, key: &str) -> Result<Option<T>, String> {
        let Some(value) = self.checkpoint.metadata().get(key) else { return Ok(None) };
        value.parse().map(Some).map_err(|_| format!("the metadata's `{key}` is `{value}`, which is not a number that can be"))
    }

    fn number<T: std::str::FromStr>(&self, key: &str) -> Result<T, String> {
        let missing = || format!("the metadata lacks `{key}`; a reference file states its sizes there");
        self.optional(key)?.ok_or_else(missing)
    }

    fn config(&self) -> Result<Config, String> {
        let attention: String = self.number("attention_type")?;
        let variant: Variant = attention.parse().map_err(|error| format!("the metadata's `attention_type`: {error}"))?;
        let (hidden, heads): (usize, usize) = (self.number("hidden")?, self.number("heads")?);
        let head_dim = self.optional("head_dim")?.unwrap_or(hidden / heads.max(1));
        let config = Config {
            family: Default::default(),
            vocab_size: self.number("vocab")?,
            hidden_size: hidden,
            intermediate_size: self.number("inter")?,
            num_hidden_layers: self.number("layers")?,
            num_attention_heads: heads,
            num_key_value_heads: self.optional("kv_heads")?.unwrap_or(self.kv_heads(head_dim).unwrap_or(heads)),
            head_dim,
            rms_norm_eps: self.number("rms_norm_eps")?,
            rope_theta: self.number("rope_theta")?,
            rope_scaling: None,
            partial_rotary_factor: 1.0,
            tie_word_embeddings: self.checkpoint.info("weight:lm_head.weight").is_err(),
            max_position_embeddings: self.number("seq")?,
            bos_token_id: None,
            eos_token_id: Vec::new(),
            initializer_range: 0.02,
            torch_dtype: None,
            attention: AttentionMap::from(variant),
            other: Default::default(),
        };
        config.validate().map_err(text)?;
        Ok(config)
    }

    /// As many as the first key projection has rows for, where the metadata does not say.
    fn kv_heads(&self, head_dim: usize) -> Option<usize> {
        let rows = *self.checkpoint.info("weight:model.layers.0.self_attn.k_proj.weight").ok()?.shape.first()?;
        rows.checked_div(head_dim)
    }

    /// Weights and gradients are those of the model, no more and no less, so that the sizes are bounded by the file before memory is
    /// taken for them.
    fn check_names(&self, config: &Config) -> Result<(), String> {
        let specs = config.parameter_list().map_err(text)?;
        for spec in &specs {
            for name in [format!("weight:{}", spec.name), format!("grad:{}", spec.name)] {
                let found = self.checkpoint.info(&name).map_err(text)?.shape;
                if found != spec.shape {
                    return Err(format!("tensor `{name}` has shape {found:?}, the metadata's sizes ask for {:?}", spec.shape));
                }
            }
        }
        let known = |name: &str| specs.iter().any(|spec| spec.name == name);
        let mut names = self.checkpoint.names().filter(|name| name.starts_with("weight:") || name.starts_with("grad:"));
        match names.find(|name| name.split_once(':').is_none_or(|(_, name)| !known(name))) {
            Some(name) => Err(format!("tensor `{name}` has no place in a model with the metadata's `attention_type`")),
            None => Ok(()),
        }
    }

    fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        let (found, values) = self.checkpoint.read(name).map_err(text)?;
        if found == shape {
            Ok(values)
        } else {
            Err(format!("tensor `{name}` has shape {found:?}, the metadata's sizes ask for {shape:?}"))
        }
    }

    fn integers<T>(&self, name: &str, shape: [usize; 2], convert: impl Fn(i64) -> Option<T>) -> Result<Vec<T>, String> {
        let (found, values) = self.checkpoint.read_i64(name).map_err(text)?;
        if found != shape {
            return Err(format!("tensor `{name}` has shape {found:?}, the metadata's sizes ask for {shape:?}"));
        }
        let value = |value: i64| convert(value).ok_or_else(|| format!("tensor `{name}` holds {value}, which is no token"));
        values.into_iter().map(value).collect()
    }
}
