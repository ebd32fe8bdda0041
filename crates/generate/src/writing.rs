//! The loop that reads prompts and writes what follows them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use serde::Serialize;
use termwise_data::Tokenizer;
use termwise_llama::Config;
use termwise_llama::generate::{Decoder, RowError, Sampler, Sampling, Saved, Stops};

use termwise_data::Text;

/// How texts are written.
pub struct Plan {
    /// How tokens are chosen; prompt number n, from 0, has the seed plus n.
    pub sampling: Sampling,
    /// Tokens to write at most for each prompt; 0 only reads.
    pub max_tokens: usize,
    /// Texts that end what is written; nothing of them is given.
    pub stops: Vec<String>,
    /// Tokens that end a text.
    pub ends: Vec<u32>,
    /// Whether a text begins with its prompt.
    pub echo: bool,
    /// A file of what a model remembers, to go on from.
    pub load: Option<PathBuf>,
    /// Where what the model remembers goes at the end.
    pub save: Option<PathBuf>,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// As many tokens as were asked for.
    Length,
    /// The token that ends a text.
    End,
    /// A stop string.
    Stop,
    /// The context of a model that keeps all keys and values.
    Context,
}

/// What becomes known while texts are written.
#[derive(Clone, Debug)]
pub enum Piece<'a> {
    /// More of the text whose turn it is: texts come one after the other, in the order of their prompts.
    More(&'a str),
    /// That text has ended.
    End(Written<'a>),
    /// That text has failed; what was written of it came before, and the other texts are finished.
    Failed(Failed<'a>),
}

/// A text that could not be finished.
#[derive(Clone, Copy, Debug)]
pub struct Failed<'a> {
    /// Number of its prompt, from 0.
    pub index: usize,
    /// Its prompt.
    pub prompt: &'a str,
    /// Why; names the prompt where there are several.
    pub error: &'a Error,
}

/// A text that has ended.
#[derive(Clone, Debug, Serialize)]
pub struct Written<'a> {
    /// Number of its prompt, from 0.
    pub index: usize,
    /// Its prompt.
    pub prompt: &'a str,
    /// All of it.
    pub text: &'a str,
    /// Tokens of the prompt, with what begins it.
    pub prompt_tokens: usize,
    /// Tokens that were written.
    pub tokens: usize,
    /// Why it ended.
    pub finish: Finish,
    /// The stop string that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop: Option<&'a str>,
    /// Seed of its sampling.
    pub seed: u64,
    /// Bytes that the model remembered at its end.
    pub state_bytes: usize,
}

/// What writing took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Took {
    /// Texts that failed.
    pub failed: usize,
    /// Tokens of prompts.
    pub read: usize,
    /// Time to read them.
    pub reading: Duration,
    /// Tokens that were written.
    pub written: usize,
    /// Time to write them.
    pub writing: Duration,
    /// Most bytes that a text took.
    pub state_bytes: usize,
    /// Most layers of a text that went on with a state of constant size.
    pub switched: usize,
    /// Most tokens of a text.
    pub position: usize,
    /// The largest |score| of a query and a key.
    pub largest_score: f64,
}

/// One text in a row of the decoder.
struct Job<'t> {
    index: usize,
    /// Everything so far: what was loaded, the prompt, what was written.
    tokens: Vec<u32>,
    /// Tokens of the prompt, with what begins it.
    prompt_tokens: usize,
    written: usize,
    sampler: Sampler,
    text: Text<'t>,
    stops: Stops,
    /// What may be shown, and how much of it has been.
    output: String,
    shown: usize,
    finish: Option<Finish>,
    stop: Option<usize>,
    state_bytes: usize,
}

/// A text that is over, before its turn to be shown.
enum Over<'t> {
    Done(Job<'t>),
    Failed { index: usize, output: String, shown: usize, error: Error },
}

impl Over<'_> {
    fn index(&self) -> usize {
        match self {
            Over::Done(job) => job.index,
            Over::Failed { index, .. } => *index,
        }
    }
}

/// Many texts in the rows of one decoder: a row whose text has ended or failed takes the next prompt.
pub struct Writing<'a> {
    config: &'a Config,
    decoder: Decoder,
    tokenizer: &'a Tokenizer,
    plan: Plan,
    prompts: &'a [String],
    /// One for each row.
    jobs: Vec<Option<Job<'a>>>,
    /// Texts that are over before their turn to be shown.
    waiting: Vec<Over<'a>>,
    /// The text whose turn it is.
    front: usize,
    took: Took,
}

impl<'a> Writing<'a> {
    /// To write what follows these prompts.
    pub fn new(config: &'a Config, decoder: Decoder, tokenizer: &'a Tokenizer, plan: Plan, prompts: &'a [String]) -> Writing<'a> {
        let jobs = (0..decoder.rows()).map(|_| None).collect();
        Writing { config, decoder, tokenizer, plan, prompts, jobs, waiting: Vec::new(), front: 0, took: Took::default() }
    }

    /// Writes all texts; what it took. Ends early where nobody looks on. A text that fails is shown as [`Piece::Failed`] and counted in
    /// [`Took::failed`]; the others are as if it had not been there.
    pub fn run(mut self, show: &mut dyn FnMut(Piece) -> bool) -> Result<Took> {
        let mut next = 0;
        let mut tokens = vec![None; self.jobs.len()];
        while next < self.prompts.len() || self.jobs.iter().any(Option::is_some) {
            for row in 0..self.jobs.len() {
                // A text that is over before it wrote anything leaves its row free at once.
                while self.jobs[row].is_none() && next < self.prompts.len() {
                    let begun = Instant::now();
                    let job = self.begin(row, next);
                    self.took.reading += begun.elapsed();
                    match job {
                        Ok(job) => self.jobs[row] = Some(job),
                        Err(error) => self.fail(next, (String::new(), 0), error),
                    }
                    next += 1;
                    self.settle(row);
                }
            }
            let begun = Instant::now();
            for (row, token) in tokens.iter_mut().enumerate() {
                *token = match self.next_token(row) {
                    Ok(token) => token,
                    Err(error) => {
                        self.fail_row(row, error);
                        None
                    }
                };
            }
            for RowError { row, error } in self.decoder.step_rows(&tokens)? {
                self.fail_row(row, error.into());
            }
            self.took.writing += begun.elapsed();
            for row in 0..self.jobs.len() {
                self.settle(row);
            }
            if !self.show(show) {
                break;
            }
        }
        self.show(show);
        Ok(self.took)
    }

    /// The token that a row's text goes on with, `None` where there is none or it ends here.
    fn next_token(&mut self, row: usize) -> Result<Option<u32>> {
        let Some(job) = &mut self.jobs[row] else { return Ok(None) };
        let token = choose(job, self.decoder.logits(row)?, &self.plan)?;
        self.took.written += 1;
        if token.is_some() && self.decoder.room(row)? == Some(0) {
            job.finish = Some(Finish::Context);
            return Ok(None);
        }
        Ok(token)
    }

    /// Ends the text of a row, which is free from then on.
    fn fail_row(&mut self, row: usize, error: Error) {
        if let Some(job) = self.jobs[row].take() {
            self.fail(job.index, (job.output, job.shown), error);
        }
    }

    fn fail(&mut self, index: usize, (output, shown): (String, usize), error: Error) {
        let error = self.named(error, index);
        self.took.failed += 1;
        self.waiting.push(Over::Failed { index, output, shown, error });
    }

    /// Reads a prompt into a row.
    fn begin(&mut self, row: usize, index: usize) -> Result<Job<'a>> {
        let prompt = &self.prompts[index];
        self.decoder.clear(row)?;
        let saved = match &self.plan.load {
            Some(path) => self.decoder.load(row, path)?,
            None => Saved::default(),
        };
        let fresh = saved.tokens.is_empty();
        let read = self.decoder.position(row)?;
        let mut tokens = saved.tokens;
        let before = tokens.len();
        if !prompt.is_empty() {
            tokens.extend(self.tokenizer.encode(prompt, fresh)?);
        } else if fresh {
            tokens.extend(self.first_token()?);
        }
        let mut sampler = Sampler::new(
            Sampling { seed: self.plan.sampling.seed.wrapping_add(index as u64), ..self.plan.sampling },
            self.config.vocab_size,
        )?;
        sampler.see(&tokens);
        sampler.skip_to(saved.draws);
        let mut job = Job {
            index,
            prompt_tokens: tokens.len() - before,
            written: 0,
            sampler,
            text: Text::after(self.tokenizer, &tokens)?,
            stops: Stops::new(self.plan.stops.iter().cloned()),
            output: if self.plan.echo { prompt.clone() } else { String::new() },
            shown: 0,
            finish: None,
            stop: None,
            state_bytes: 0,
            tokens,
        };
        // With nothing to write, the last token waits, as one that was written last does: whoever goes on begins with it.
        let end = if self.plan.max_tokens == 0 { job.tokens.len().saturating_sub(1) } else { job.tokens.len() };
        if self.plan.max_tokens == 0 {
            job.finish = Some(Finish::Length);
        }
        if end > read {
            self.decoder.read(row, &job.tokens[read..end])?;
            self.took.read += end - read;
        } else if self.plan.max_tokens > 0 {
            return Err(termwise_llama::Error::EmptyPrompt.into());
        }
        Ok(job)
    }

    /// What a text begins with where there is no prompt.
    fn first_token(&self) -> Result<Option<u32>> {
        let template = if self.tokenizer.begins()? { self.tokenizer.encode("a", true)?.first().copied() } else { None };
        let first = self.config.bos_token_id.or(template).unwrap_or(self.tokenizer.end());
        Ok(Some(first).filter(|&first| (first as usize) < self.config.vocab_size))
    }

    /// Takes a text that has ended out of its row.
    fn settle(&mut self, row: usize) {
        if let Some(mut job) = self.jobs[row].take_if(|job| job.finish.is_some()) {
            match self.finish(row, &mut job) {
                Ok(()) => self.waiting.push(Over::Done(job)),
                Err(error) => self.fail(job.index, (job.output, job.shown), error),
            }
        }
    }

    fn finish(&mut self, row: usize, job: &mut Job) -> Result<()> {
        if job.stop.is_none() {
            let rest = job.text.finish()?;
            let (text, stop) = job.stops.push(&rest);
            job.output += &text;
            if stop.is_some() {
                (job.stop, job.finish) = (stop, Some(Finish::Stop));
            } else {
                job.output += &job.stops.finish();
            }
        }
        job.state_bytes = self.decoder.state_bytes(row)?;
        self.took.state_bytes = self.took.state_bytes.max(job.state_bytes);
        self.took.switched = self.took.switched.max(self.decoder.switched(row)?);
        self.took.position = self.took.position.max(self.decoder.position(row)?);
        let scores =
            self.decoder.states(row)?.iter().flat_map(|state| (0..state.heads().len()).filter_map(|head| state.largest_score(0, head)));
        self.took.largest_score = scores.fold(self.took.largest_score, |a, b| if b <= a { a } else { b });
        if let Some(path) = &self.plan.save {
            let saved = Saved { tokens: job.tokens.clone(), draws: job.sampler.draws() };
            self.decoder.save(row, &saved, path)?;
        }
        Ok(())
    }

    /// Shows what can be shown; false where nobody looks on.
    fn show(&mut self, show: &mut dyn FnMut(Piece) -> bool) -> bool {
        loop {
            let front = self.front;
            let done = self.waiting.iter().position(|over| over.index() == front).map(|at| self.waiting.swap_remove(at));
            let running = self.jobs.iter_mut().flatten().find(|job| job.index == front);
            match (done, running) {
                (Some(Over::Failed { index, output, shown, error }), _) => {
                    self.front += 1;
                    let (rest, prompt) = (&output[shown..], self.prompts[index].as_str());
                    if !(rest.is_empty() || show(Piece::More(rest))) || !show(Piece::Failed(Failed { index, prompt, error: &error })) {
                        return false;
                    }
                }
                (Some(Over::Done(job)), _) => {
                    self.front += 1;
                    let rest = &job.output[job.shown..];
                    if !(rest.is_empty() || show(Piece::More(rest))) || !show(Piece::End(self.written(&job))) {
                        return false;
                    }
                }
                (None, Some(job)) => {
                    let new = &job.output[job.shown..];
                    let looks_on = new.is_empty() || show(Piece::More(new));
                    job.shown = job.output.len();
                    return looks_on;
                }
                (None, None) => return true,
            }
        }
    }

    fn written<'j>(&'j self, job: &'j Job) -> Written<'j> {
        Written {
            index: job.index,
            prompt: &self.prompts[job.index],
            text: &job.output,
            prompt_tokens: job.prompt_tokens,
            tokens: job.written,
            finish: job.finish.unwrap_or(Finish::Length),
            stop: job.stop.and_then(|stop| self.plan.stops.get(stop)).map(String::as_str),
            seed: self.plan.sampling.seed.wrapping_add(job.index as u64),
            state_bytes: job.state_bytes,
        }
    }

    /// The error with the prompt that it belongs to, where there are several.
    fn named(&self, error: Error, index: usize) -> Error {
        if self.prompts.len() == 1 {
            return error;
        }
        Error::Prompt { number: index + 1, error: Box::new(error) }
    }
}

/// The next token of a text, `None` where it ends here.
fn choose(job: &mut Job, logits: &[f32], plan: &Plan) -> Result<Option<u32>> {
    let token = job.sampler.choose(logits);
    job.tokens.push(token);
    job.written += 1;
    if plan.ends.contains(&token) {
        job.finish = Some(Finish::End);
        return Ok(None);
    }
    let new = job.text.push(token)?;
    let (text, stop) = job.stops.push(&new);
    job.output += &text;
    job.stop = stop;
    job.finish = match stop {
        Some(_) => Some(Finish::Stop),
        None if job.written >= plan.max_tokens => Some(Finish::Length),
        None => None,
    };
    Ok(job.finish.is_none().then_some(token))
}
