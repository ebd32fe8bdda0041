//! Text generation: prompts are read, continued and decoded to text.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;
use termwise_data::{Text, Tokenizer};

use crate::Config;
use crate::decode::{Decoder, RowError, Sampler, SamplingOptions, SavedSequence, StopStrings};
use crate::error::Result;
use crate::generate::error::GenerateError;

/// Options of a [`TextGenerator`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GenerationOptions {
    /// Sampling of tokens. Prompt n, counted from 0, uses the seed plus n.
    pub sampling: SamplingOptions,
    /// The largest number of tokens generated per prompt. 0 only reads the prompt.
    pub max_tokens: usize,
    /// Strings that end a completion. They are not part of it.
    pub stop_strings: Vec<String>,
    /// Tokens that end a completion.
    pub end_tokens: Vec<u32>,
    /// Whether the completion starts with its prompt.
    pub echo: bool,
    /// A saved decoder state to continue from.
    pub load_state: Option<PathBuf>,
    /// File to which the decoder state is saved at the end.
    pub save_state: Option<PathBuf>,
}

/// Greedy decoding of up to 256 tokens, without stop strings and end tokens.
impl Default for GenerationOptions {
    fn default() -> GenerationOptions {
        GenerationOptions {
            sampling: SamplingOptions::default(),
            max_tokens: 256,
            stop_strings: Vec::new(),
            end_tokens: Vec::new(),
            echo: false,
            load_state: None,
            save_state: None,
        }
    }
}

setters!(GenerationOptions {
    sampling: SamplingOptions,
    max_tokens: usize,
    stop_strings: Vec<String>,
    end_tokens: Vec<u32>,
    echo: bool,
    load_state: Option<PathBuf>,
    save_state: Option<PathBuf>,
});

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishReason {
    /// `max_tokens` was reached.
    Length,
    /// An end token was sampled.
    End,
    /// A stop string occurred.
    Stop,
    /// The KV cache has reached the context length of the model.
    Context,
}

/// An event during generation. Completions are reported one after the other, in the order of their prompts.
#[derive(Clone, Debug)]
pub enum GenerationEvent<'a> {
    /// More text of the current completion.
    Text(&'a str),
    /// The current completion has ended.
    Finished(Completion<'a>),
    /// The current completion has failed. Its text so far was reported before; other completions are not affected.
    Failed(FailedCompletion<'a>),
}

/// A completion that failed.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct FailedCompletion<'a> {
    /// Index of the prompt.
    pub index: usize,
    /// The prompt.
    pub prompt: &'a str,
    /// The error. It names the prompt if there are several.
    pub error: &'a GenerateError,
}

/// A finished completion.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Completion<'a> {
    /// Index of the prompt.
    pub index: usize,
    /// The prompt.
    pub prompt: &'a str,
    /// The whole text.
    pub text: &'a str,
    /// Number of tokens of the prompt, including special tokens.
    pub prompt_tokens: usize,
    /// Number of generated tokens.
    pub tokens: usize,
    /// Why it ended.
    pub finish: FinishReason,
    /// The stop string that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop: Option<&'a str>,
    /// Seed of its sampler.
    pub seed: u64,
    /// Bytes of the decoder state at the end.
    pub state_bytes: usize,
}

/// Statistics of a generation over all prompts.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct GenerationStats {
    /// Completions that failed.
    pub failed: usize,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Time of prefill.
    pub prefill_time: Duration,
    /// Generated tokens.
    pub generated_tokens: usize,
    /// Time of decoding.
    pub decode_time: Duration,
    /// The largest decoder state of a completion, in bytes.
    pub state_bytes: usize,
    /// The largest number of layers of a completion that switched to a recurrent state.
    pub switched_layers: usize,
    /// The largest number of tokens of a sequence, including its prompt.
    pub position: usize,
    /// The largest absolute attention score.
    pub largest_score: f64,
}

/// A completion in a row of the decoder.
struct ActiveCompletion<'t> {
    index: usize,
    /// All tokens so far: loaded, of the prompt, generated.
    tokens: Vec<u32>,
    /// Number of tokens of the prompt, including special tokens.
    prompt_tokens: usize,
    generated: usize,
    sampler: Sampler,
    text: Text<'t>,
    stop_strings: StopStrings,
    /// Text without a possible beginning of a stop string, and the length of it that was reported.
    output: String,
    reported: usize,
    finish: Option<FinishReason>,
    stop: Option<usize>,
    state_bytes: usize,
}

/// A completion that has ended and is not reported yet.
enum EndedCompletion<'t> {
    Finished(ActiveCompletion<'t>),
    Failed { index: usize, output: String, reported: usize, error: GenerateError },
}

impl EndedCompletion<'_> {
    fn index(&self) -> usize {
        match self {
            EndedCompletion::Finished(completion) => completion.index,
            EndedCompletion::Failed { index, .. } => *index,
        }
    }
}

/// Completes many prompts with one decoder. A row whose completion has ended or failed starts the next prompt.
pub struct TextGenerator<'a> {
    config: &'a Config,
    decoder: Decoder,
    tokenizer: &'a Tokenizer,
    options: GenerationOptions,
    prompts: &'a [String],
    /// One per row.
    active: Vec<Option<ActiveCompletion<'a>>>,
    /// Ended completions that are not reported yet.
    ended: Vec<EndedCompletion<'a>>,
    /// Index of the completion that is reported next.
    current: usize,
    stats: GenerationStats,
}

impl<'a> TextGenerator<'a> {
    /// A generator that completes these prompts.
    pub fn new(
        config: &'a Config,
        decoder: Decoder,
        tokenizer: &'a Tokenizer,
        options: GenerationOptions,
        prompts: &'a [String],
    ) -> TextGenerator<'a> {
        let active = (0..decoder.rows()).map(|_| None).collect();
        TextGenerator {
            config,
            decoder,
            tokenizer,
            options,
            prompts,
            active,
            ended: Vec::new(),
            current: 0,
            stats: GenerationStats::default(),
        }
    }

    /// Completes all prompts and reports events to `report`, in the order of prompts. Stops early if `report` returns false.
    ///
    /// A completion that fails is reported as [`GenerationEvent::Failed`] and counted in [`GenerationStats::failed`]. Other completions are not
    /// affected.
    pub fn run(mut self, report: &mut dyn FnMut(GenerationEvent) -> bool) -> Result<GenerationStats, GenerateError> {
        let mut next = 0;
        let mut tokens = vec![None; self.active.len()];
        while next < self.prompts.len() || self.active.iter().any(Option::is_some) {
            for row in 0..self.active.len() {
                // A completion that ends at once frees its row for the next prompt.
                while self.active[row].is_none() && next < self.prompts.len() {
                    let start = Instant::now();
                    let started = self.start(row, next);
                    self.stats.prefill_time += start.elapsed();
                    match started {
                        Ok(completion) => self.active[row] = Some(completion),
                        Err(error) => self.fail(next, (String::new(), 0), error),
                    }
                    next += 1;
                    self.settle(row);
                }
            }
            let start = Instant::now();
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
            self.stats.decode_time += start.elapsed();
            for row in 0..self.active.len() {
                self.settle(row);
            }
            if !self.report(report) {
                break;
            }
        }
        self.report(report);
        Ok(self.stats)
    }

    /// Samples the next token of a row; `None` if the row is free or its completion has ended.
    fn next_token(&mut self, row: usize) -> Result<Option<u32>, GenerateError> {
        let Some(completion) = &mut self.active[row] else { return Ok(None) };
        let token = sample(completion, self.decoder.logits(row)?, &self.options)?;
        self.stats.generated_tokens += 1;
        if token.is_some() && self.decoder.remaining_context(row)? == Some(0) {
            completion.finish = Some(FinishReason::Context);
            return Ok(None);
        }
        Ok(token)
    }

    /// Ends the completion of a row with an error and frees the row.
    fn fail_row(&mut self, row: usize, error: GenerateError) {
        if let Some(completion) = self.active[row].take() {
            self.fail(completion.index, (completion.output, completion.reported), error);
        }
    }

    fn fail(&mut self, index: usize, (output, reported): (String, usize), error: GenerateError) {
        let error = self.named(error, index);
        self.stats.failed += 1;
        self.ended.push(EndedCompletion::Failed { index, output, reported, error });
    }

    /// Starts a prompt in a row: prefill, sampler, stop strings.
    fn start(&mut self, row: usize, index: usize) -> Result<ActiveCompletion<'a>, GenerateError> {
        let prompt = &self.prompts[index];
        self.decoder.clear(row)?;
        let saved = match &self.options.load_state {
            Some(path) => self.decoder.load(row, path)?,
            None => SavedSequence::default(),
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
        let mut sampler =
            Sampler::new(self.options.sampling.seed(self.options.sampling.seed.wrapping_add(index as u64)), self.config.vocab_size)?;
        sampler.mark_seen(&tokens);
        sampler.skip_to(saved.draws);
        let mut completion = ActiveCompletion {
            index,
            prompt_tokens: tokens.len() - before,
            generated: 0,
            sampler,
            text: Text::after(self.tokenizer, &tokens)?,
            stop_strings: StopStrings::new(self.options.stop_strings.iter().cloned()),
            output: if self.options.echo { prompt.clone() } else { String::new() },
            reported: 0,
            finish: None,
            stop: None,
            state_bytes: 0,
            tokens,
        };
        // If nothing is generated, the last token stays unread, as a sampled token would, so a saved state continues from it.
        let end = if self.options.max_tokens == 0 { completion.tokens.len().saturating_sub(1) } else { completion.tokens.len() };
        if self.options.max_tokens == 0 {
            completion.finish = Some(FinishReason::Length);
        }
        if end > read {
            self.decoder.prefill(row, &completion.tokens[read..end])?;
            self.stats.prompt_tokens += end - read;
        } else if self.options.max_tokens > 0 {
            return Err(crate::Error::EmptyPrompt.into());
        }
        Ok(completion)
    }

    /// The first token without a prompt.
    fn first_token(&self) -> Result<Option<u32>, GenerateError> {
        let template = if self.tokenizer.begins()? { self.tokenizer.encode("a", true)?.first().copied() } else { None };
        let first = self.config.bos_token_id.or(template).unwrap_or(self.tokenizer.end());
        Ok(Some(first).filter(|&first| (first as usize) < self.config.vocab_size))
    }

    /// Moves a completion that has ended out of its row.
    fn settle(&mut self, row: usize) {
        if let Some(mut completion) = self.active[row].take_if(|completion| completion.finish.is_some()) {
            match self.finish(row, &mut completion) {
                Ok(()) => self.ended.push(EndedCompletion::Finished(completion)),
                Err(error) => self.fail(completion.index, (completion.output, completion.reported), error),
            }
        }
    }

    fn finish(&mut self, row: usize, completion: &mut ActiveCompletion) -> Result<(), GenerateError> {
        if completion.stop.is_none() {
            let rest = completion.text.finish()?;
            let (text, stop) = completion.stop_strings.push(&rest);
            completion.output += &text;
            if stop.is_some() {
                (completion.stop, completion.finish) = (stop, Some(FinishReason::Stop));
            } else {
                completion.output += &completion.stop_strings.finish();
            }
        }
        completion.state_bytes = self.decoder.state_bytes(row)?;
        self.stats.state_bytes = self.stats.state_bytes.max(completion.state_bytes);
        self.stats.switched_layers = self.stats.switched_layers.max(self.decoder.switched_layers(row)?);
        self.stats.position = self.stats.position.max(self.decoder.position(row)?);
        let scores =
            self.decoder.states(row)?.iter().flat_map(|state| (0..state.heads().len()).filter_map(|head| state.largest_score(0, head)));
        self.stats.largest_score = scores.fold(self.stats.largest_score, |a, b| if b <= a { a } else { b });
        if let Some(path) = &self.options.save_state {
            let saved = SavedSequence { tokens: completion.tokens.clone(), draws: completion.sampler.draws() };
            self.decoder.save(row, &saved, path)?;
        }
        Ok(())
    }

    /// Reports new text of the current completion and completions that have ended. Returns false to stop.
    fn report(&mut self, report: &mut dyn FnMut(GenerationEvent) -> bool) -> bool {
        loop {
            let front = self.current;
            let done = self.ended.iter().position(|over| over.index() == front).map(|at| self.ended.swap_remove(at));
            let running = self.active.iter_mut().flatten().find(|completion| completion.index == front);
            match (done, running) {
                (Some(EndedCompletion::Failed { index, output, reported, error }), _) => {
                    self.current += 1;
                    let (rest, prompt) = (&output[reported..], self.prompts[index].as_str());
                    if !(rest.is_empty() || report(GenerationEvent::Text(rest)))
                        || !report(GenerationEvent::Failed(FailedCompletion { index, prompt, error: &error }))
                    {
                        return false;
                    }
                }
                (Some(EndedCompletion::Finished(completion)), _) => {
                    self.current += 1;
                    let rest = &completion.output[completion.reported..];
                    if !(rest.is_empty() || report(GenerationEvent::Text(rest)))
                        || !report(GenerationEvent::Finished(self.completion(&completion)))
                    {
                        return false;
                    }
                }
                (None, Some(completion)) => {
                    let new = &completion.output[completion.reported..];
                    let proceed = new.is_empty() || report(GenerationEvent::Text(new));
                    completion.reported = completion.output.len();
                    return proceed;
                }
                (None, None) => return true,
            }
        }
    }

    fn completion<'j>(&'j self, completion: &'j ActiveCompletion) -> Completion<'j> {
        Completion {
            index: completion.index,
            prompt: &self.prompts[completion.index],
            text: &completion.output,
            prompt_tokens: completion.prompt_tokens,
            tokens: completion.generated,
            finish: completion.finish.unwrap_or(FinishReason::Length),
            stop: completion.stop.and_then(|stop| self.options.stop_strings.get(stop)).map(String::as_str),
            seed: self.options.sampling.seed.wrapping_add(completion.index as u64),
            state_bytes: completion.state_bytes,
        }
    }

    /// Adds the number of the prompt to an error if there are several prompts.
    fn named(&self, error: GenerateError, index: usize) -> GenerateError {
        if self.prompts.len() == 1 {
            return error;
        }
        GenerateError::Prompt { number: index + 1, error: Box::new(error) }
    }
}

/// Samples the next token of a completion; `None` if the completion ends.
fn sample(completion: &mut ActiveCompletion, logits: &[f32], options: &GenerationOptions) -> Result<Option<u32>, GenerateError> {
    let token = completion.sampler.sample(logits);
    completion.tokens.push(token);
    completion.generated += 1;
    if options.end_tokens.contains(&token) {
        completion.finish = Some(FinishReason::End);
        return Ok(None);
    }
    let new = completion.text.push(token)?;
    let (text, stop) = completion.stop_strings.push(&new);
    completion.output += &text;
    completion.stop = stop;
    completion.finish = match stop {
        Some(_) => Some(FinishReason::Stop),
        None if completion.generated >= options.max_tokens => Some(FinishReason::Length),
        None => None,
    };
    Ok(completion.finish.is_none().then_some(token))
}
