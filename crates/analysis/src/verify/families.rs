//! Folders of whole models as other libraries write them: `config.json`, `model.safetensors`, and `expected.safetensors` with token ids, the logits,
//! the loss of predicting each next token, and every gradient.

use std::path::Path;

use termwise_attention::relative_rms;
use termwise_model::decode::{Decoder, DecoderOptions};
use termwise_model::weights::Checkpoint;
use termwise_model::{Batch, Model, Objective, SessionOptions};

use super::golden::{LOSS, TENSORS, ZERO, text};
use super::outcome::{Case, Identity, Unit};

/// Tokens of a prompt, and how many there are when generation ends.
const PROMPT: usize = 5;
const GENERATED: usize = 40;
const EXPECTED: &str = "expected.safetensors";

/// Whether a folder is such a model.
pub fn is_one(folder: &Path) -> bool {
    folder.join("config.json").is_file() && folder.join(EXPECTED).is_file()
}

/// One folder: whatever is wrong with it becomes the problem of the case.
pub fn check(folder: &Path) -> Case {
    let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy();
    Case::new(Identity::Golden, name).fill(|case| compare(folder, case))
}

fn compare(folder: &Path, case: &mut Case) -> Result<(), String> {
    let model = Model::read(folder).map_err(text)?;
    let expected = Checkpoint::open(folder.join(EXPECTED)).map_err(text)?;
    let (shape, ids) = expected.read_i64("ids").map_err(text)?;
    let [rows, time] = shape[..] else { return Err(format!("tensor `ids` has shape {shape:?}, it must be rows and positions")) };
    let vocabulary = model.config.vocab_size;
    let token = |id: i64| u32::try_from(id).ok().filter(|&id| (id as usize) < vocabulary);
    let ids: Option<Vec<u32>> = ids.into_iter().map(token).collect();
    let ids = ids.filter(|ids| !ids.is_empty()).ok_or("tensor `ids` holds no tokens, or some that the model does not know")?;
    case.detail = format!("B{rows} T{time} layers {} width {}", model.config.num_hidden_layers, model.config.hidden_size);
    let floats = |name: &str, count: usize| {
        let (shape, values) = expected.read(name).map_err(text)?;
        if values.len() == count {
            Ok(values)
        } else {
            Err(format!("tensor `{name}` has shape {shape:?}, the model asks for {count} values"))
        }
    };

    let mut session = model.session(rows, time, SessionOptions::default()).map_err(text)?;
    session.run(&model.params, &ids, None).map_err(text)?;
    let mut logits = vec![f32::NAN; ids.len() * vocabulary];
    session.logits(&model.params, 0..ids.len(), &mut logits).map_err(text)?;
    case.measure("logits", relative_rms(&logits, &floats("logits", logits.len())?), TENSORS, Unit::RelativeRms);

    let labels: Vec<i32> = (0..ids.len()).map(|at| if at % time + 1 == time { -100 } else { ids[at + 1] as i32 }).collect();
    let mut grads = model.params.zeros_like().map_err(text)?;
    let loss = session.loss_and_grad(&model.params, &Batch::new(&ids, &labels), &mut grads).map_err(text)?;
    case.measure("loss", (loss.mean() - f64::from(floats("loss", 1)?[0])).abs(), LOSS, Unit::Absolute);
    for (entry, found) in grads.iter() {
        let name = format!("grad:{}", entry.spec.name);
        let expected = floats(&name, found.len())?;
        let relative = relative_rms(found, &expected);
        let zero = expected.iter().all(|x| f64::from(x.abs()) < ZERO);
        if zero && (relative.is_nan() || relative > TENSORS) {
            let largest = found.iter().zip(&expected).map(|(a, b)| f64::from((a - b).abs()));
            case.measure(name, largest.fold(0.0, |max: f64, x| if max.is_nan() || x <= max { max } else { x }), ZERO, Unit::Absolute);
        } else {
            case.measure(name, relative, TENSORS, Unit::RelativeRms);
        }
    }
    let listed = expected.names().filter(|name| name.starts_with("grad:")).count();
    if listed != grads.layout().entries().len() {
        return Err(format!("the file has {listed} gradients, the model {} tensors", grads.layout().entries().len()));
    }
    let total = GENERATED.min(model.config.context());
    let different = if total > PROMPT { generated(model, &ids[..PROMPT.min(ids.len())], total)? } else { 0 };
    case.measure("tokens generated with a cache, and without", different as f64, 0.0, Unit::Count);
    Ok(())
}

/// How many of the most probable tokens differ between generating with a cache and running the whole text again for each.
fn generated(model: Model, prompt: &[u32], total: usize) -> Result<usize, String> {
    let most_probable = |logits: &[f32]| {
        logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (id, &x)| if x > best.1 { (id, x) } else { best }).0 as u32
    };
    let mut ids = prompt.to_vec();
    ids.resize(total, 0);
    let mut session = model.session(1, total, SessionOptions::default()).map_err(text)?;
    let mut logits = vec![0.0; model.config.vocab_size];
    for length in prompt.len()..total {
        session.run(&model.params, &ids, Some(&[length])).map_err(text)?;
        session.logits(&model.params, length - 1..length, &mut logits).map_err(text)?;
        ids[length] = most_probable(&logits);
    }
    drop(session);
    let mut decoder = Decoder::new(model, DecoderOptions::default()).map_err(text)?;
    decoder.prefill(0, prompt).map_err(text)?;
    let mut different = 0;
    for &id in &ids[prompt.len()..] {
        different += (most_probable(decoder.logits(0).map_err(text)?) != id) as usize;
        decoder.step(&[Some(id)]).map_err(text)?;
    }
    Ok(different)
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use super::*;

    #[test]
    fn all_pass() {
        let Some(folder) = termwise_base::test_skip::shared("families") else { return };
        let mut cases = Vec::new();
        let _ = crate::verify::check_folder(&folder, &mut |case| {
            cases.push(case);
            ControlFlow::Continue(())
        });
        assert!(cases.len() > 8, "{} families", cases.len());
        for case in &cases {
            assert!(
                case.passed() && case.measures.len() > 10,
                "{}: {:?} {:?}",
                case.subject,
                case.problem,
                case.measures.iter().find(|m| !m.passed())
            );
        }
    }

    #[test]
    fn what_is_wrong_with_a_folder_is_said() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("config.json"), "{}").expect("written");
        assert!(!is_one(folder.path()));
        std::fs::write(folder.path().join(EXPECTED), "nothing").expect("written");
        assert!(is_one(folder.path()) && check(folder.path()).problem.is_some());
    }
}
