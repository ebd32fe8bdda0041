//! Evaluation of a model on held-out data.
//!
//! With a stride below the length, windows overlap: each predicts as many tokens as the stride, with up to length − stride tokens of
//! context before them. A stride equal to the length splits the text into independent windows.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use termwise_model::NonpositiveDenominator;
use termwise_model::{Model, Objective, Params, Session, SessionOptions};

use crate::collective::{Alone, Collective};
use crate::error::{Error, Result};
use crate::step::{counts, of_words, part_of, within_batch, words_of};
use termwise_data::{BestLoss, Rows, Source};

/// The result of an evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Number of labels.
    pub tokens: u64,
    /// Cross-entropy, the mean over all tokens, in nats.
    pub loss: f64,
    /// exp of the mean over all tokens.
    #[serde(deserialize_with = "termwise_report::nan")]
    pub perplexity: f64,
    /// Bits per byte; `None` if the data are not text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// Share of labels with the largest probability, for tasks with separate labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Recall tokens, if the data marks them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<Part>,
    /// All other tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest: Option<Part>,
    /// Loss above that of the best possible predictor, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excess: Option<Excess>,
    /// Positions within the training length, if rows are longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Part>,
    /// Positions beyond them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beyond: Option<Part>,
}

/// Some of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Their number.
    pub tokens: u64,
    /// Mean loss in nats; 0 without tokens.
    pub loss: f64,
}

/// Loss above the best possible, in nats per token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Excess {
    /// Over all tokens.
    pub all: f64,
    /// Over recall tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<f64>,
    /// Over the other tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest: Option<f64>,
}

/// Sums of losses, of a batch or of several.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    all: Sum,
    recall: Sum,
    marked: bool,
    /// Whether accuracy is measured, and the number of correct predictions.
    scored: bool,
    correct: u64,
    /// Positions of a row in training, and the losses on these and beyond them.
    trained: Option<usize>,
    within: Sum,
    beyond: Sum,
    bytes: u64,
    /// The first.
    nonpositive: Option<NonpositiveDenominator>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    loss: f64,
    count: u64,
}

impl Sum {
    fn mean(self) -> f64 {
        if self.count == 0 { 0.0 } else { self.loss / self.count as f64 }
    }

    fn part(self) -> Part {
        Part { tokens: self.count, loss: self.mean() }
    }
}

impl Sums {
    /// Sums that separate positions up to the training length `trained` from later ones.
    pub fn beyond(trained: usize) -> Sums {
        Sums { trained: Some(trained), ..Sums::default() }
    }

    /// Evaluates the rows `part` of a batch, at most those that fit into the session, and adds their losses.
    pub fn add(&mut self, session: &mut Session, params: &Params, rows: &Rows, part: Range<usize>) -> Result<()> {
        let loss = session.loss(params, &part_of(rows, part.clone(), None))?;
        if rows.scored {
            self.scored = true;
            self.correct += session.count_correct(params, &rows.labels[part.start * rows.time..part.end * rows.time])? as u64;
        }
        self.all.loss += loss.sum;
        self.all.count += loss.count as u64;
        if part.start == 0 {
            self.bytes += rows.bytes;
        }
        self.nonpositive = self.nonpositive.or(within_batch(loss.nonpositive, part.start));
        if !rows.recall.is_empty() {
            self.marked = true;
            let first = part.start * rows.time;
            let marked = (first..part.end * rows.time).filter(|&at| rows.recall[at] && counts(rows, at));
            for at in marked {
                self.recall.loss += session.token_losses().get(at - first).copied().unwrap_or(0.0);
                self.recall.count += 1;
            }
        }
        if let Some(trained) = self.trained {
            let first = part.start * rows.time;
            for at in (first..part.end * rows.time).filter(|&at| counts(rows, at)) {
                let sum = if at % rows.time.max(1) < trained { &mut self.within } else { &mut self.beyond };
                sum.loss += session.token_losses().get(at - first).copied().unwrap_or(0.0);
                sum.count += 1;
            }
        }
        Ok(())
    }

    /// The sums of one batch, from the loss of every position [B, T].
    pub fn of_losses(rows: &Rows, losses: &[f64]) -> Sums {
        let mut sums = Sums { bytes: rows.bytes, marked: !rows.recall.is_empty(), ..Sums::default() };
        for (at, loss) in losses.iter().enumerate().filter(|&(at, _)| counts(rows, at)) {
            let recalled = rows.recall.get(at).is_some_and(|&recall| recall);
            for sum in [Some(&mut sums.all), recalled.then_some(&mut sums.recall)].into_iter().flatten() {
                sum.loss += loss;
                sum.count += 1;
            }
        }
        sums
    }

    /// Adds the sums of the next batch.
    pub fn merge(&mut self, next: &Sums) {
        let parts = [(&mut self.within, next.within), (&mut self.beyond, next.beyond)];
        for (own, next) in [(&mut self.all, next.all), (&mut self.recall, next.recall)].into_iter().chain(parts) {
            own.loss += next.loss;
            own.count += next.count;
        }
        self.trained = self.trained.or(next.trained);
        self.marked |= next.marked;
        self.scored |= next.scored;
        self.correct += next.correct;
        self.bytes += next.bytes;
        self.nonpositive = self.nonpositive.or(next.nonpositive);
    }

    /// Serializes the sums for other ranks.
    fn to_words(self) -> [u64; 19] {
        let Sums { all, recall, marked, scored, correct, trained, within, beyond, bytes, nonpositive } = self;
        let [a, b, c, d] = [all, recall, within, beyond].map(|sum| [sum.loss.to_bits(), sum.count]);
        // Rows of training have at least one position.
        let [trained, marked] = [trained.unwrap_or(0) as u64, u64::from(marked)];
        let [flag, layer, head, row, position, value] = words_of(nonpositive);
        [
            a[0],
            a[1],
            b[0],
            b[1],
            c[0],
            c[1],
            d[0],
            d[1],
            marked,
            trained,
            bytes,
            u64::from(scored),
            correct,
            flag,
            layer,
            head,
            row,
            position,
            value,
        ]
    }

    /// Deserializes sums; `None` if a rank had none.
    fn of_words(words: &[u64]) -> Option<Sums> {
        let (&[a, b, c, d, e, f, g, h, marked, trained, bytes, scored, correct], rest) = words.split_first_chunk()?;
        let nonpositive = of_words(*rest.first_chunk()?);
        let [all, recall, within, beyond] = [(a, b), (c, d), (e, f), (g, h)].map(|(loss, count)| Sum { loss: f64::from_bits(loss), count });
        let trained = (trained > 0).then_some(trained as usize);
        Some(Sums { all, recall, marked: marked == 1, scored: scored == 1, correct, trained, within, beyond, bytes, nonpositive })
    }

    /// Whether the sum of losses is finite.
    pub fn is_finite(&self) -> bool {
        self.all.loss.is_finite()
    }

    /// The first denominator of an attention that was not positive.
    pub fn nonpositive(&self) -> Option<NonpositiveDenominator> {
        self.nonpositive
    }

    /// The evaluation; `best` is the loss of the best possible predictor.
    pub fn finish(&self, best: Option<BestLoss>) -> Evaluation {
        let loss = self.all.mean();
        let rest = Sum { loss: self.all.loss - self.recall.loss, count: self.all.count - self.recall.count };
        let (within, beyond) = (self.trained.map(|_| self.within.part()), self.trained.map(|_| self.beyond.part()));
        let bits_per_byte = (self.bytes > 0).then(|| self.all.loss / std::f64::consts::LN_2 / self.bytes as f64);
        let (recall, rest) = (self.marked.then(|| self.recall.part()), self.marked.then(|| rest.part()));
        let excess = best.map(|best| Excess {
            all: loss - best.all,
            recall: recall.map(|part| part.loss - best.recall),
            rest: rest.map(|part| part.loss - best.rest),
        });
        let accuracy = (self.scored && self.all.count > 0).then(|| self.correct as f64 / self.all.count as f64);
        Evaluation { tokens: self.all.count, loss, perplexity: loss.exp(), bits_per_byte, accuracy, recall, rest, excess, within, beyond }
    }
}

/// Windows of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Windows {
    /// Windows per batch.
    pub batch: usize,
    /// Tokens per window.
    pub length: usize,
    /// Predicted tokens per window.
    pub stride: usize,
}

/// Evaluates a model on the held-out batches of a source, at most `limit` batches unless it is 0.
pub fn evaluate(model: &Model, source: &dyn Source, windows: Windows, limit: u64) -> Result<Evaluation> {
    Ok(evaluate_with(model, source, windows, limit, SessionOptions::default(), &Alone)?.0)
}

/// As [`evaluate`], with options. Also returns the first denominator that was not positive. Ranks share the batches; the result is the same on
/// all ranks and for any number of them. A loss that is not finite is an error.
pub fn evaluate_with(
    model: &Model,
    source: &dyn Source,
    windows: Windows,
    limit: u64,
    options: SessionOptions,
    collective: &dyn Collective,
) -> Result<(Evaluation, Option<NonpositiveDenominator>)> {
    let (mut session, mut batches) = open(model, source, windows, limit, options)?;
    let next = |rows: &mut Rows, wanted: bool| batches.next(rows, wanted);
    finished(
        over_ranks(collective, next, |rows| {
            let mut sums = Sums::default();
            sums.add(&mut session, &model.params, rows, 0..windows.batch)?;
            Ok(sums)
        })?,
        source,
    )
}

/// As [`evaluate_with`] in one process; calls `observe` with the rows of each batch and the loss of every position, 0 without a label.
pub fn evaluate_observed(
    model: &Model,
    source: &dyn Source,
    windows: Windows,
    limit: u64,
    options: SessionOptions,
    observe: &mut dyn FnMut(&Rows, &[f64]),
) -> Result<(Evaluation, Option<NonpositiveDenominator>)> {
    let (mut session, mut batches) = open(model, source, windows, limit, options)?;
    let next = |rows: &mut Rows, wanted: bool| batches.next(rows, wanted);
    finished(
        over_ranks(&Alone, next, |rows| {
            let mut sums = Sums::default();
            sums.add(&mut session, &model.params, rows, 0..windows.batch)?;
            observe(rows, session.token_losses());
            Ok(sums)
        })?,
        source,
    )
}

fn finished((sums, bad): (Sums, Option<(u64, Sums)>), source: &dyn Source) -> Result<(Evaluation, Option<NonpositiveDenominator>)> {
    if let Some((batch, sums)) = bad {
        return Err(Error::EvaluationNotFinite { batch, denominator: sums.nonpositive });
    }
    Ok((sums.finish(source.best_loss()), sums.nonpositive))
}

/// The held-out batches of a source.
struct Batches<'a> {
    source: &'a dyn Source,
    windows: Windows,
    limit: u64,
    index: u64,
    sliding: Sliding,
}

impl Batches<'_> {
    fn next(&mut self, rows: &mut Rows, wanted: bool) -> Result<bool> {
        let Windows { batch, length, stride } = self.windows;
        let at = self.index;
        self.index += 1;
        if self.limit > 0 && at >= self.limit {
            return Ok(false);
        }
        match stride == length {
            // A batch of another rank need not be filled.
            true if !wanted => Ok(true),
            true => Ok(self.source.held_out(at, batch, length, rows)?),
            false => self.sliding.next(self.source, self.windows, rows),
        }
    }
}

/// Allocates a session and prepares the batches. Rejects invalid windows.
fn open<'a>(
    model: &Model,
    source: &'a dyn Source,
    windows: Windows,
    limit: u64,
    options: SessionOptions,
) -> Result<(Session, Batches<'a>)> {
    let Windows { batch, length, stride } = windows;
    let bad = |key: &str, found: usize, expected: String| Error::Setting {
        place: String::new(),
        key: key.into(),
        found: found.to_string(),
        expected,
    };
    if batch == 0 || length == 0 {
        return Err(bad("batch or length", 0, "it must be at least 1".into()));
    }
    if stride == 0 || stride > length {
        return Err(bad("stride", stride, format!("it must be from 1 to the length, {length}")));
    }
    if source.vocabulary() > model.config.vocab_size {
        let expected = format!("the model's vocabulary has {} tokens; use the model's own tokenizer", model.config.vocab_size);
        return Err(bad("vocabulary of the data", source.vocabulary(), expected));
    }
    // No gradients are needed.
    let options = options.forward_only(true);
    crate::memory::check(&model.config, batch, length, 0, 1)?;
    let session = model.session(batch, length, options)?;
    Ok((session, Batches { source, windows, limit, index: 0, sliding: Sliding::default() }))
}

/// The losses of all batches, added in order, and the first batch whose loss is not finite, with the sums up to it; later batches are not
/// evaluated. Each rank measures every size-th batch. `next` fills the next batch if its second argument is true, and returns false after the last.
pub(crate) fn over_ranks(
    collective: &dyn Collective,
    mut next: impl FnMut(&mut Rows, bool) -> Result<bool>,
    mut measure: impl FnMut(&Rows) -> Result<Sums>,
) -> Result<(Sums, Option<(u64, Sums)>)> {
    let (rank, size) = (collective.rank(), collective.size());
    let (mut sums, mut rows, mut done) = (Sums::default(), Rows::default(), 0);
    loop {
        let mut own = None;
        for turn in 0..size {
            if !next(&mut rows, turn == rank)? {
                break;
            }
            if turn == rank {
                own = Some(measure(&rows)?);
            }
        }
        // One round: every rank has measured a batch, unless none is left.
        let found = match size {
            1 => vec![own],
            _ => collective
                .gather_words(&own.map_or(Vec::new(), |own| own.to_words().to_vec()))?
                .iter()
                .map(|words| Sums::of_words(words))
                .collect(),
        };
        for own in found {
            let Some(own) = own else { return Ok((sums, None)) };
            sums.merge(&own);
            if !sums.is_finite() {
                return Ok((sums, Some((done, sums))));
            }
            done += 1;
        }
    }
}

/// Overlapping windows of a stream.
#[derive(Default)]
struct Sliding {
    piece: u64,
    /// Tokens before the next piece, at most length − stride.
    context: Vec<u32>,
    rows: Rows,
}

impl Sliding {
    fn next(&mut self, source: &dyn Source, windows: Windows, out: &mut Rows) -> Result<bool> {
        let Windows { batch, length, stride } = windows;
        out.reset(batch, length);
        let mut any = false;
        for row in 0..batch {
            if !source.held_out(self.piece, 1, stride, &mut self.rows)? {
                break;
            }
            // Of built-in data the best loss is known.
            if !self.rows.lengths.is_empty() || source.best_loss().is_some() {
                let expected = "these data are separate documents, which have nothing before them; make it the length".into();
                return Err(Error::Setting { place: String::new(), key: "stride".into(), found: stride.to_string(), expected });
            }
            any = true;
            self.piece += 1;
            let (begin, shown) = (row * length, self.context.len());
            out.ids[begin..begin + shown].copy_from_slice(&self.context);
            out.ids[begin + shown..begin + shown + stride].copy_from_slice(&self.rows.ids);
            out.labels[begin + shown..begin + shown + stride].copy_from_slice(&self.rows.labels);
            out.bytes += self.rows.bytes;
            self.context.extend_from_slice(&self.rows.ids);
            let surplus = self.context.len().saturating_sub(length - stride);
            self.context.drain(..surplus);
        }
        Ok(any)
    }
}
