//! Loss of the original on greedy continuations of the converted model. The loss on given text can hide errors in generated text.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use termwise_model::Model;
use termwise_model::decode::{Decoder, DecoderOptions};

use super::Check;
use crate::kv::Error;
use crate::kv::meter::Reference;

const NAME: &str = "generated text";
const RULE: &str =
    "the original's loss on the converted model's text exceeds that on its own by at most 1 nat per token and twice the KL on given text";
/// Maximum number of prompts.
const MAX_PROMPTS: usize = 4;
/// Maximum increase of the original's loss from its own to the converted model's text, nats per token, in addition to twice the KL on given text.
const MAX_LOSS_INCREASE: f64 = 1.0;

/// Greedy continuations of two models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    /// Number of prompts.
    pub prompts: usize,
    /// Tokens per prompt.
    pub prompt: usize,
    /// Tokens per continuation.
    pub tokens: usize,
    /// Mean number of tokens before the first difference.
    pub agree: f64,
    /// Share of tokens at which both predict the same token after the original's text.
    pub same: f64,
    /// Loss of the original on its own generated text, nats per token.
    pub own: f64,
    /// Its loss on the converted model's text.
    pub converted: f64,
}

/// Index of the largest value; ties: the first.
fn largest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, x) in logits.iter().enumerate() {
        if *x > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// Greedy continuation of a prompt.
pub(crate) fn continuation(decoder: &mut Decoder, prompt: &[u32], tokens: usize) -> Result<Vec<u32>, Error> {
    decoder.clear(0)?;
    decoder.prefill(0, prompt)?;
    let mut written = Vec::with_capacity(tokens);
    for _ in 0..tokens {
        let token = largest(decoder.logits(0)?);
        written.push(token);
        decoder.step(&[Some(token)])?;
    }
    Ok(written)
}

/// Both models continue the first halves of contexts; `None` if contexts are too short.
pub fn measure(model: &Arc<Model>, original: &Arc<Model>, contexts: &[Vec<u32>], tokens: usize) -> Result<Option<Generation>, Error> {
    let prompt = contexts.first().map_or(0, |ids| ids.len() / 2);
    let prompts: Vec<&[u32]> = contexts.iter().filter(|ids| ids.len() / 2 == prompt).take(MAX_PROMPTS).map(|ids| &ids[..prompt]).collect();
    let room = original.config.max_position_embeddings.saturating_sub(prompt);
    let tokens = tokens.min(room);
    if prompt == 0 || tokens == 0 || prompts.is_empty() {
        return Ok(None);
    }
    let mut decoders =
        [Decoder::new(original.clone(), DecoderOptions::default())?, Decoder::new(model.clone(), DecoderOptions::default())?];
    let (mut agree, mut same, mut losses) = (0.0, 0.0, [0.0; 2]);
    for prompt in &prompts {
        let own = continuation(&mut decoders[0], prompt, tokens)?;
        let other = continuation(&mut decoders[1], prompt, tokens)?;
        agree += own.iter().zip(&other).take_while(|(a, b)| a == b).count() as f64;
        // The converted model on the original's text.
        decoders[1].clear(0)?;
        decoders[1].prefill(0, prompt)?;
        for &token in &own {
            same += f64::from(largest(decoders[1].logits(0)?) == token);
            decoders[1].step(&[Some(token)])?;
        }
        for (loss, written) in losses.iter_mut().zip([&own, &other]) {
            let text: Vec<u32> = prompt.iter().chain(written).copied().collect();
            *loss += Reference::new(original, &text)?.losses[prompt.len() - 1..].iter().sum::<f64>();
        }
    }
    let count = prompts.len() as f64;
    let all = count * tokens as f64;
    Ok(Some(Generation {
        prompts: prompts.len(),
        prompt,
        tokens,
        agree: agree / count,
        same: same / all,
        own: losses[0] / all,
        converted: losses[1] / all,
    }))
}

/// Generated text may not be much worse than the predictions of given text.
pub fn check(found: &Generation, kl: f64) -> Check {
    let more = found.converted - found.own;
    let text = format!(
        "the original's loss is {:.3} on its own continuations and {:.3} on the converted model's; they agree for {:.1} of {} tokens, and at {:.1} % of tokens after the same text",
        found.own,
        found.converted,
        found.agree,
        found.tokens,
        100.0 * found.same
    );
    Check::new(NAME, RULE, text, Some(more <= MAX_LOSS_INCREASE + 2.0 * kl))
}

/// The check if the model could not be run.
pub fn refused(error: &termwise_model::Error) -> Check {
    Check::new(NAME, RULE, format!("generation failed: {error}"), Some(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_the_original_finds_improbable_fails() {
        let verdict = |converted: f64, kl: f64| {
            check(&Generation { prompts: 1, prompt: 8, tokens: 8, agree: 1.0, same: 0.5, own: 1.0, converted }, kl).passed
        };
        assert_eq!(verdict(1.9, 0.0), Some(true));
        assert_eq!(verdict(2.1, 0.0), Some(false));
        // A large KL on given text allows more.
        assert_eq!(verdict(2.1, 0.2), Some(true));
        assert_eq!(verdict(f64::NAN, 0.2), Some(false));
    }
}
