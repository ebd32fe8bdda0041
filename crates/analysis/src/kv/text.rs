//! Contexts of text, and which of them are fitted to.

use crate::spectrum::windows;
use serde::{Deserialize, Serialize};
use termwise_data::Source;

use crate::kv::Error;

/// One kind of text, in contexts that know nothing of each other.
#[derive(Clone, Debug)]
pub struct Text {
    /// What people call it.
    pub name: String,
    /// Whether other contexts of it were fitted to.
    pub calibrated: bool,
    /// Tokens of each context.
    pub contexts: Vec<Vec<u32>>,
}

/// What is fitted to, and what is evaluated.
#[derive(Clone, Debug)]
pub struct Texts {
    /// Contexts for calibration, in turn from all calibration texts.
    pub calibration: Vec<Vec<u32>>,
    /// Number of calibration texts.
    pub calibration_texts: usize,
    /// Contexts to measure.
    pub evaluation: Vec<Text>,
}

/// A text and its purpose.
pub struct Named<'a> {
    /// What people call it.
    pub name: String,
    /// Its tokens.
    pub source: &'a dyn Source,
    /// Whether its first half is fitted to.
    pub fitted: bool,
    /// Whether it is evaluated.
    pub evaluated: bool,
}

/// How texts are cut.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Cutting {
    /// Tokens of a context that is evaluated.
    pub length: usize,
    /// Contexts of each text that are evaluated.
    pub contexts: usize,
    /// Tokens of a context that is fitted to.
    pub calibration_length: usize,
    /// Contexts that are fitted to, over all texts.
    pub calibration_contexts: usize,
}

/// Contexts in which output errors are measured, or one per calibration text if there are more texts.
const ERROR_CONTEXTS: usize = 2;
/// Tokens in which sensitivities are measured.
pub const PROBE_LENGTH: usize = 1024;

impl Texts {
    /// The calibration contexts in which output errors are measured: at least one of each calibration text.
    pub fn error_contexts(&self) -> &[Vec<u32>] {
        &self.calibration[..ERROR_CONTEXTS.max(self.calibration_texts).min(self.calibration.len())]
    }

    /// The starts of the first and the last calibration context, in which sensitivities are measured. They are of different texts if there are several.
    pub fn probes(&self) -> Vec<Vec<u32>> {
        let ends = match self.calibration.as_slice() {
            [first, .., last] => vec![first, last],
            contexts => contexts.iter().collect(),
        };
        let length = PROBE_LENGTH / ends.len().max(1);
        ends.into_iter().map(|context| context[..length.min(context.len())].to_vec()).collect()
    }

    /// Of texts that are fitted to the first part serves that, and contexts from the second half on are evaluated; of the others contexts from the first on.
    pub fn cut(sources: &[Named], cutting: Cutting) -> Result<Texts, Error> {
        let Cutting { length, contexts, calibration_length, calibration_contexts } = cutting;
        let fitted_texts = sources.iter().filter(|source| source.fitted).count();
        if fitted_texts == 0 {
            return Err(Error::Asked(
                "there is no calibration text; name some with --calibration, or leave it out to use all of --data".into(),
            ));
        }
        let mut texts = Texts { calibration: Vec::new(), calibration_texts: fitted_texts, evaluation: Vec::new() };
        let mut calibration: Vec<Vec<Vec<u32>>> = Vec::new();
        let each = calibration_contexts.div_ceil(fitted_texts);
        for Named { name, source, fitted, evaluated } in sources {
            let contexts = if *evaluated { contexts } else { 0 };
            let needed = (each * calibration_length * *fitted as usize + contexts * length) as u64;
            let all = windows(*source, length, 4 * needed.max(1 << 20))?;
            let all: Vec<Vec<u32>> = all.into_iter().filter(|context| context.len() == length).collect();
            let (first, skip) = if *fitted {
                (windows(*source, calibration_length, (each * calibration_length) as u64)?, all.len() / 2)
            } else {
                (Vec::new(), 0)
            };
            let first: Vec<Vec<u32>> = first.into_iter().filter(|context| context.len() == calibration_length).take(each).collect();
            let used = first.len() * calibration_length;
            if *fitted && (first.len() < each || used > skip * length) || all.len() - skip < contexts.min(1) {
                return Err(Error::Asked(format!(
                    "{name} has {} contexts of {length} tokens; the first half is for calibration ({each} contexts of {calibration_length}) and the second for evaluation: name more text, or shorter contexts",
                    all.len()
                )));
            }
            calibration.push(first);
            if contexts > 0 {
                // Spread over what there is, so that one chapter does not decide.
                let rest = &all[skip..];
                let count = contexts.min(rest.len());
                let chosen = (0..count).map(|i| rest[i * rest.len() / count].clone()).collect();
                texts.evaluation.push(Text { name: name.clone(), calibrated: *fitted, contexts: chosen });
            }
        }
        // In turn from all texts, so that the first contexts and any number of them are a mixture.
        let in_turn = (0..each).flat_map(|i| calibration.iter().filter_map(move |contexts| contexts.get(i).cloned()));
        texts.calibration = in_turn.take(calibration_contexts).collect();
        Ok(texts)
    }
}
