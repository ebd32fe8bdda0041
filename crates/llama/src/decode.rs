//! Writing text with a model, token by token.

use crate::error::{Error, Result};
use crate::model::{Model, Options};

/// The prompt followed by the most probable token at every step, `total` tokens in all; of equal logits the lower token wins.
///
/// Every step runs the model over all `total` positions, so this is for checking a model, not for speed.
pub fn greedy(model: &Model, prompt: &[u32], total: usize, options: Options) -> Result<Vec<u32>> {
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    let total = total.max(prompt.len());
    let mut session = model.session(1, total, options)?;
    let mut logits = vec![0.0; model.config.vocab_size];
    let mut ids = prompt.to_vec();
    ids.resize(total, 0);
    for length in prompt.len()..total {
        session.run(&model.params, &ids, Some(&[length]))?;
        session.logits(&model.params, length - 1..length, &mut logits)?;
        ids[length] = argmax(&logits) as u32;
    }
    Ok(ids)
}

/// The first of the largest values.
fn argmax(values: &[f32]) -> usize {
    values.iter().enumerate().fold(0, |best, (i, value)| if *value > values[best] { i } else { best })
}
