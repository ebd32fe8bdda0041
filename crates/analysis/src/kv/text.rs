//! Contexts for calibration and for evaluation.

use crate::spectrum::windows;
use serde::{Deserialize, Serialize};
use termwise_data::Source;

use crate::kv::Error;

/// A text split into independent contexts.
#[derive(Clone, Debug)]
pub struct Text {
    /// Name of the text.
    pub name: String,
    /// Whether other contexts of it were used for calibration.
    pub calibrated: bool,
    /// Tokens of each context.
    pub contexts: Vec<Vec<u32>>,
}

/// Contexts for calibration and for evaluation.
#[derive(Clone, Debug)]
pub struct Texts {
    /// Contexts for calibration, in turn from all calibration texts.
    pub calibration: Vec<Vec<u32>>,
    /// Number of calibration texts.
    pub calibration_texts: usize,
    /// Evaluated texts.
    pub evaluation: Vec<Text>,
}

/// A text and its purpose.
pub struct Named<'a> {
    /// Name of the text.
    pub name: String,
    /// Its tokens.
    pub source: &'a dyn Source,
    /// Whether its first half is used for calibration.
    pub fitted: bool,
    /// Whether it is evaluated.
    pub evaluated: bool,
}

/// Lengths and numbers of contexts.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Cutting {
    /// Tokens per evaluated context.
    pub length: usize,
    /// Evaluated contexts per text.
    pub contexts: usize,
    /// Tokens per calibration context.
    pub calibration_length: usize,
    /// Calibration contexts over all texts, or one per calibration text if there are more texts.
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

    /// The starts of two calibration contexts, in which sensitivities are measured: of the first and the last text, or the first and the last of one text.
    pub fn probes(&self) -> Vec<Vec<u32>> {
        let count = self.calibration.len();
        let last = if self.calibration_texts > 1 { self.calibration_texts.min(count) } else { count };
        let ends = if last > 1 { vec![0, last - 1] } else { (0..last).collect() };
        let length = PROBE_LENGTH / ends.len().max(1);
        ends.into_iter().map(|index| self.calibration[index][..length.min(self.calibration[index].len())].to_vec()).collect()
    }

    /// Cuts texts into contexts. The first contexts of a calibration text are used for calibration, and contexts of its second half are evaluated. Contexts of
    /// other texts are evaluated from the start.
    pub fn cut(sources: &[Named], cutting: Cutting) -> Result<Texts, Error> {
        let Cutting { length, contexts, calibration_length, calibration_contexts } = cutting;
        let fitted_texts = sources.iter().filter(|source| source.fitted).count();
        if fitted_texts == 0 {
            return Err(Error::Request(
                "there is no calibration text; name some with --calibration, or leave it out to use all of --data".into(),
            ));
        }
        let calibration_contexts = calibration_contexts.max(fitted_texts);
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
                return Err(Error::Request(format!(
                    "{name} has {} contexts of {length} tokens; the first half is for calibration ({each} contexts of {calibration_length}) and the second for evaluation: name more text, or shorter contexts",
                    all.len()
                )));
            }
            calibration.push(first);
            if contexts > 0 {
                // Evenly spaced over the text.
                let rest = &all[skip..];
                let count = contexts.min(rest.len());
                let chosen = (0..count).map(|i| rest[i * rest.len() / count].clone()).collect();
                texts.evaluation.push(Text { name: name.clone(), calibrated: *fitted, contexts: chosen });
            }
        }
        // Alternates between the texts, so any prefix is a mixture.
        let in_turn = (0..each).flat_map(|i| calibration.iter().filter_map(move |contexts| contexts.get(i).cloned()));
        texts.calibration = in_turn.take(calibration_contexts).collect();
        Ok(texts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use termwise_data::Rows;

    /// A text whose token at position t is `first` + t / 8: contexts of 8 tokens are constant and distinct.
    #[derive(Debug)]
    struct Steps {
        first: u32,
        contexts: u64,
    }

    impl Source for Steps {
        fn vocabulary(&self) -> usize {
            1 << 20
        }

        fn fingerprint(&self) -> String {
            String::new()
        }

        fn train(&self, _: u64, _: u64, _: usize, _: usize, _: &mut Rows) -> termwise_data::Result<()> {
            Ok(())
        }

        fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> termwise_data::Result<bool> {
            out.reset(rows, time);
            out.ids.fill(self.first + index as u32);
            out.labels.fill(0);
            Ok(index < self.contexts)
        }
    }

    fn cut(sources: &[(u32, bool, bool)], calibration_contexts: usize) -> Texts {
        let steps: Vec<Steps> = sources.iter().map(|&(first, ..)| Steps { first, contexts: 40 }).collect();
        let named: Vec<Named> = sources
            .iter()
            .zip(&steps)
            .map(|(&(first, fitted, evaluated), source)| Named { name: first.to_string(), source, fitted, evaluated })
            .collect();
        Texts::cut(&named, Cutting { length: 8, contexts: 4, calibration_length: 8, calibration_contexts }).expect("contexts")
    }

    /// The first token of each context.
    fn firsts(contexts: &[Vec<u32>]) -> Vec<u32> {
        contexts.iter().map(|context| context[0]).collect()
    }

    #[test]
    fn calibration_alternates_between_texts() {
        let three = [(1000, true, true), (2000, true, false), (3000, true, false), (4000, false, true)];
        let texts = cut(&three, 4);
        assert_eq!(firsts(&texts.calibration), [1000, 2000, 3000, 1001]);
        // Every text is in the measurements of errors, and two of them in those of sensitivities.
        assert_eq!(firsts(texts.error_contexts()), [1000, 2000, 3000]);
        assert_eq!(firsts(&texts.probes()), [1000, 3000]);
        // No text is left out.
        assert_eq!(firsts(&cut(&three, 2).calibration), [1000, 2000, 3000]);
        // One text: two contexts of it.
        let texts = cut(&three[..1], 4);
        assert_eq!(firsts(&texts.calibration), [1000, 1001, 1002, 1003]);
        assert_eq!(firsts(texts.error_contexts()), [1000, 1001]);
        assert_eq!(firsts(&texts.probes()), [1000, 1003]);
        assert_eq!(firsts(&cut(&three[..1], 1).probes()), [1000]);
    }

    #[test]
    fn calibration_contexts_are_not_evaluated() {
        let texts = cut(&[(1000, true, true), (2000, true, false), (4000, false, true)], 8);
        let evaluated: Vec<(String, bool, Vec<u32>)> =
            texts.evaluation.iter().map(|text| (text.name.clone(), text.calibrated, firsts(&text.contexts))).collect();
        // The second half of a calibration text, all of another text, evenly spaced.
        assert_eq!(evaluated, [("1000".into(), true, vec![1020, 1025, 1030, 1035]), ("4000".into(), false, vec![4000, 4010, 4020, 4030])]);
    }
}
