//! Attention statistics of each head on text. One pass, context by context; the sums can be saved to a file after each context.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use termwise_attention::View;
use termwise_base::files::write_whole;
use termwise_base::rng::Rng;
use termwise_model::{Model, ObservedAttention, SessionOptions};

use crate::kv::atlas::HeadSums;
use crate::kv::journal::{Sealed, digest, seal, unseal};
use crate::kv::kinds::{SINKS, is_convertible};
use crate::kv::{Error, ProgressFn};

/// Number of near keys; keys further back are far.
pub const NEAR: usize = 64;
/// Sampled queries per head and context.
pub const QUERIES: usize = 128;

/// Statistics of one pass over the text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gathered {
    /// Hash of the model and the contexts.
    pub identity: String,
    /// Number of contexts.
    pub contexts: usize,
    /// By layer and head.
    pub heads: Vec<HeadSums>,
}

impl Gathered {
    /// The statistics in a file; `None` if there is no such file, or another build wrote it.
    fn read(path: &Path) -> Result<Option<Gathered>, Error> {
        let Ok(text) = std::fs::read_to_string(path) else { return Ok(None) };
        match unseal(&text) {
            Sealed::Whole(object) => Ok(serde_json::from_str(&object).ok()),
            Sealed::Broken => Err(Error::Request(format!(
                "{} was edited: its checksum is missing or does not match; remove the file to calibrate again",
                path.display()
            ))),
        }
    }
}

/// Sampled query positions of a context: the same in every pass and head, one from each of equal parts of the context.
pub fn sampled(context: usize, length: usize, count: usize) -> Vec<usize> {
    let mut rng = Rng::new(0x5eed ^ (context as u64) << 20);
    let count = count.min(length);
    let bound = |i: usize| i * length / count.max(1);
    (0..count).map(|i| bound(i) + rng.below((bound(i + 1) - bound(i)).max(1))).collect()
}

/// Hash of weights and configuration.
pub fn identity(model: &Model) -> String {
    let mut hasher = blake3::Hasher::new();
    for values in model.params.values().chunks(1 << 14) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        hasher.update(&bytes);
    }
    hasher.update(format!("{:?}", model.config).as_bytes());
    hasher.finalize().to_hex()[..24].to_owned()
}

/// Runs the model over the contexts and calls `look` for every layer. Can be interrupted between contexts.
pub fn pass(
    model: &Model,
    contexts: &[Vec<u32>],
    stop: &AtomicBool,
    progress: ProgressFn,
    what: &str,
    look: &mut dyn FnMut(usize, &ObservedAttention) -> Result<(), Error>,
) -> Result<(), Error> {
    let layers = model.config.num_hidden_layers as u64;
    for (index, ids) in contexts.iter().enumerate() {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Stopped);
        }
        let mut session = model.session(1, ids.len(), SessionOptions::default().forward_only(true))?;
        let mut failed = Ok(());
        session.observe(&model.params, ids, None, &mut |seen: ObservedAttention| {
            if failed.is_ok() {
                failed = look(index, &seen);
                progress(index as u64 * layers + seen.layer as u64 + 1, contexts.len() as u64 * layers, what);
            }
        })?;
        failed?;
    }
    Ok(())
}

/// One head of the only batch row.
pub fn view(seen: &ObservedAttention, head: usize) -> Result<View, Error> {
    Ok(View::new(seen.attention, seen.shape.batch, seen.shape.time, seen.inputs, 0, head)?)
}

/// Accumulates over all contexts; resumes from the file if model and text match.
pub fn gather(
    model: &Model,
    contexts: &[Vec<u32>],
    file: Option<&Path>,
    stop: &AtomicBool,
    progress: ProgressFn,
) -> Result<Gathered, Error> {
    let config = &model.config;
    let (layers, h, g) = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads);
    if let Some((layer, variant)) =
        (0..layers).find_map(|layer| Some((layer, config.heads(layer).into_iter().find(|own| !is_convertible(own))?)))
    {
        return Err(Error::Request(format!(
            "layer {layer} has `{variant}`, and only heads that are softmax over all keys can be converted: convert the original model"
        )));
    }
    let identity = digest(&format!("{} {contexts:?} {NEAR} {QUERIES} {SINKS}", identity(model)));
    let fits = |known: &Gathered| known.identity == identity && known.contexts <= contexts.len() && known.heads.len() == layers * h;
    let known = file.map(Gathered::read).transpose()?.flatten().filter(fits);
    let mut all =
        known.unwrap_or_else(|| Gathered { identity: identity.clone(), contexts: 0, heads: vec![HeadSums::default(); layers * h] });
    let begun = all.contexts;
    for index in begun..contexts.len() {
        let mut report = |done: u64, of: u64, what: &str| progress(index as u64 * of + done, contexts.len() as u64 * of, what);
        pass(model, &contexts[index..=index], stop, &mut report, "calibrating heads", &mut |_, seen| {
            let rows = sampled(index, contexts[index].len(), QUERIES);
            let found: Result<Vec<_>, Error> = (0..g)
                .into_par_iter()
                .map(|kv_head| -> Result<_, Error> {
                    let mut sums = Vec::new();
                    for head in kv_head * (h / g)..(kv_head + 1) * (h / g) {
                        let view = view(seen, head)?;
                        let mut own = all.heads[seen.layer * h + head].clone();
                        rows.iter().for_each(|&t| own.add(&view, t));
                        sums.push(own);
                    }
                    Ok((kv_head, sums))
                })
                .collect();
            for (kv_head, sums) in found? {
                let first = seen.layer * h + kv_head * (h / g);
                all.heads[first..first + sums.len()].clone_from_slice(&sums);
            }
            Ok(())
        })?;
        all.contexts = index + 1;
        if let Some(path) = file {
            write_whole(path, seal(&serde_json::to_string(&all).unwrap_or_default()).as_bytes())?;
        }
    }
    Ok(all)
}
