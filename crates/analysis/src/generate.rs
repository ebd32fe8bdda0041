//! Text generation with a model by name.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use termwise_attention::{Mode, Truncation, Variant};
use termwise_base::files;
use termwise_data::Tokenizer;
use termwise_data::language::{Language, Question};
use termwise_model::decode::{Decoder, DecoderOptions, MemoryPolicy, SamplingOptions, truncate_attention, warnings};
use termwise_model::generate::{GenerateError, GenerationEvent, GenerationOptions, GenerationStats, TextGenerator, prompts};
use termwise_model::weights::FloatType;
use termwise_model::{Config, Model};
use termwise_report::{Block, Document, Documented, Section, counted, sig3, thousands};
use termwise_train::source::language_of;

use crate::Error;
use crate::request::Monitor;

/// Options of [`run`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GenerateRequest {
    /// Model by name; default: the newest run.
    pub model: Option<String>,
    /// Prompt; default: an empty one, or on builtin data a held-out document with a query.
    pub prompt: Option<String>,
    /// File of prompts, in place of `prompt`: one per line, or `.jsonl` with a field `prompt`.
    pub prompts: Option<PathBuf>,
    /// Largest number of new tokens per prompt; default: 256, or 1 for a query on builtin data.
    pub max_tokens: Option<usize>,
    /// Sampling of tokens. Prompt n, counted from 0, uses the seed plus n.
    pub sampling: SamplingOptions,
    /// Strings that end a completion.
    pub stop_strings: Vec<String>,
    /// Continue after the end-of-text token.
    pub ignore_end: bool,
    /// Order at which every exp kernel is truncated.
    pub order: Option<usize>,
    /// Keep keys and values until the state of `order` is smaller.
    pub switch: bool,
    /// Variant that replaces the attention of all heads.
    pub attention: Option<Variant>,
    /// Type of the weights.
    pub weights: FloatType,
    /// How prompts are processed.
    pub mode: Mode,
    /// Prompt tokens per prefill chunk.
    pub prefill_chunk: usize,
    /// Allow more tokens than the context of the model.
    pub beyond_context: bool,
    /// Prompts per batch.
    pub batch: usize,
    /// File to which the decoding state is saved.
    pub save_state: Option<PathBuf>,
    /// Saved decoding state to resume from; the prompt is appended.
    pub load_state: Option<PathBuf>,
    /// `bytes`, a `tokenizer.json` or a folder that contains one; default: that of the model.
    pub tokenizer: Option<String>,
    /// End-of-text token; default: that of the tokenizer.
    pub end_of_document: Option<String>,
    /// Whether texts start with their prompts. A question on builtin data is always shown.
    pub echo: bool,
}

impl Default for GenerateRequest {
    fn default() -> GenerateRequest {
        GenerateRequest {
            model: None,
            prompt: None,
            prompts: None,
            max_tokens: None,
            sampling: SamplingOptions::default(),
            stop_strings: Vec::new(),
            ignore_end: false,
            order: None,
            switch: false,
            attention: None,
            weights: FloatType::F32,
            mode: Mode::Auto,
            prefill_chunk: 256,
            beyond_context: false,
            batch: 8,
            save_state: None,
            load_state: None,
            tokenizer: None,
            end_of_document: None,
            echo: true,
        }
    }
}

impl GenerateRequest {
    /// Greedy decoding with the newest run.
    pub fn new() -> GenerateRequest {
        GenerateRequest::default()
    }

    fn memory(&self) -> MemoryPolicy {
        match self.order {
            None => MemoryPolicy::Auto,
            Some(order) if self.switch => MemoryPolicy::SwitchToState(order),
            Some(order) => MemoryPolicy::Truncate(order),
        }
    }
}

/// The result of [`run`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Generation {
    /// Folder of the model.
    pub model: String,
    /// Number of prompts.
    pub prompts: usize,
    /// Finished texts, in the order of prompts.
    pub texts: Vec<GeneratedText>,
    /// Prompts that failed.
    pub failed: usize,
    /// The answer to a question on builtin data.
    pub answer: Option<RecallAnswer>,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Generated tokens.
    pub generated_tokens: usize,
    /// Bytes of the largest decoding state.
    pub state_bytes: usize,
    /// Token counts, speed, memory and truncation bound, one sentence each.
    pub notes: Vec<String>,
}

/// One finished text of a [`Generation`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GeneratedText {
    /// Index of the prompt.
    pub index: usize,
    /// The prompt.
    pub prompt: String,
    /// The text; it starts with the prompt if that was requested.
    pub text: String,
    /// Generated tokens.
    pub tokens: usize,
}

/// The first token after a question of a held-out document of the associative-recall language.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RecallAnswer {
    /// Number of the document.
    pub document: u64,
    /// The key in question.
    pub key: String,
    /// The value that the document states.
    pub stated: String,
    /// The value that the model generates.
    pub generated: String,
}

impl RecallAnswer {
    /// Whether the model generates the stated value.
    pub fn is_right(&self) -> bool {
        self.generated == self.stated
    }

    fn sentence(&self) -> String {
        let RecallAnswer { document, key, stated, generated } = self;
        let verdict = if self.is_right() { "right" } else { "wrong" };
        format!("held-out document {document} queries {key} and states `{key} {stated}`; the model predicts {generated}: {verdict}")
    }
}

impl Generation {
    /// Whether no prompt succeeded.
    pub fn is_failure(&self) -> bool {
        self.failed > 0 && self.failed >= self.prompts
    }

    /// The answer and the notes, one sentence per line.
    pub fn summary_lines(&self) -> Vec<String> {
        let answer = self.answer.as_ref().map(|answer| {
            [answer.sentence(), "query other text with --prompt \"k3 v7 k9 v1 ? k3\", or other documents with --seed 2, 3, …".to_owned()]
        });
        answer.into_iter().flatten().chain(self.notes.iter().cloned()).collect()
    }
}

impl Documented for Generation {
    const KIND: &'static str = "generation";

    fn document(&self) -> Document {
        let texts = self.texts.iter().map(|text| Block::Code(text.text.clone())).collect();
        let mut lead = Vec::new();
        lead.extend(self.answer.as_ref().map(|answer| Block::Text(answer.sentence())));
        lead.push(Block::List(self.notes.clone()));
        Document { title: format!("Text generated by {}", self.model), lead, sections: vec![Section::new("Texts", texts)] }
    }
}

/// Generates text. `on_event` receives text as it is generated and the number of prompts; it returns false to stop.
///
/// # Errors
/// If the model, a prompt file or the tokenizer cannot be used. A prompt that fails is reported as an event, and the others continue.
pub fn run(
    request: &GenerateRequest,
    monitor: &Monitor,
    on_event: &mut dyn FnMut(GenerationEvent, usize) -> bool,
) -> Result<Generation, Error> {
    let folder = monitor.model_folder(request.model.as_deref())?;
    let language = language_of(&folder)?;
    Ok(work(request, &folder, language.as_ref(), monitor, on_event)?)
}

fn work(
    request: &GenerateRequest,
    folder: &Path,
    language: Option<&Language>,
    monitor: &Monitor,
    on_event: &mut dyn FnMut(GenerationEvent, usize) -> bool,
) -> Result<Generation, GenerateError> {
    let sampling = request.sampling;
    sampling.validate()?;
    // Without a prompt, a model of the associative-recall language gets a question.
    let asks = request.prompt.is_none() && request.prompts.is_none() && request.load_state.is_none();
    let question = language.filter(|_| asks).map(|language| language.question(sampling.seed)).transpose()?.flatten();
    // One token answers a question; a longer text after it is noise.
    let answered = question.is_some() || language.is_some() && request.prompt.as_deref().is_some_and(ends_with_question);
    let prompts = match (&request.prompts, &question) {
        (Some(path), _) => prompts::read(path)?,
        (None, Some(question)) => vec![question.text.clone()],
        (None, None) => vec![request.prompt.clone().unwrap_or_default()],
    };
    if let Some(path) = &request.save_state {
        // Before anything is generated: a text that cannot be saved in the end would be lost.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::read_dir(folder).map_err(files::Error::io("write the state to", path)).map_err(termwise_data::Error::from)?;
    }
    let options = DecoderOptions::default()
        .rows(request.batch.min(prompts.len()))
        .prefill_chunk(request.prefill_chunk)
        .mode(request.mode)
        .memory(request.memory())
        .weights(request.weights)
        .beyond_context(request.beyond_context);
    let decoder = match &request.attention {
        None => Decoder::open(folder, options)?,
        Some(attention) => Decoder::new(Model::read(folder)?.with_attention(attention.clone())?, options)?,
    };
    let config = decoder.config().clone();
    let tokenizer = tokenizer(request, folder, language, &config)?;
    let truncated = request.order.map(|order| truncate_attention(&config, order)).transpose()?;
    let map = truncated.as_ref().unwrap_or(&config.attention);
    let heads = (0..config.num_hidden_layers).flat_map(|layer| map.heads(layer, config.num_attention_heads));
    for warning in warnings(&heads.collect::<Vec<_>>()) {
        monitor.warn(&warning.to_string());
    }
    let generation = GenerationOptions::default()
        .sampling(sampling)
        .max_tokens(request.max_tokens.unwrap_or(if answered { 1 } else { 256 }))
        .stop_strings(request.stop_strings.iter().filter(|stop| !stop.is_empty()).cloned().collect())
        .end_tokens(if request.ignore_end { Vec::new() } else { end_tokens(&config, &tokenizer) })
        .echo(request.echo || question.is_some())
        .load_state(request.load_state.clone())
        .save_state(request.save_state.clone());
    let (constant, memory) = (decoder.is_constant(), decoder.memory());
    let mut found = Generation { model: folder.display().to_string(), prompts: prompts.len(), ..Generation::default() };
    let stats = TextGenerator::new(&config, decoder, &tokenizer, generation, &prompts).run(&mut |event| {
        if let GenerationEvent::Finished(done) = &event {
            let (index, tokens) = (done.index, done.tokens);
            found.texts.push(GeneratedText { index, prompt: done.prompt.into(), text: done.text.into(), tokens });
        }
        on_event(event, prompts.len())
    })?;
    if stats.position > config.max_position_embeddings {
        monitor.warn(&format!(
            "the text has {} tokens, and the model was trained on at most {}; tokens beyond are extrapolated",
            thousands(stats.position),
            thousands(config.max_position_embeddings)
        ));
    }
    found.answer = question.and_then(|question| answer(&question, found.texts.first()?, request.sampling.seed));
    (found.failed, found.prompt_tokens, found.generated_tokens) = (stats.failed, stats.prompt_tokens, stats.generated_tokens);
    found.state_bytes = stats.state_bytes;
    found.notes = notes(stats, &config, constant, memory);
    Ok(found)
}

/// Whether the last words of a prompt are a question of the built-in language, as in `? k3`.
fn ends_with_question(prompt: &str) -> bool {
    let mut words = prompt.split_whitespace().rev();
    let key = words.next().and_then(|word| word.strip_prefix('k')).is_some_and(|number| number.parse::<u64>().is_ok());
    key && words.next() == Some("?")
}

/// The first token after a question; `None` if nothing was generated.
fn answer(question: &Question, text: &GeneratedText, document: u64) -> Option<RecallAnswer> {
    let after = text.text.strip_prefix(text.prompt.as_str()).unwrap_or(&text.text);
    let generated = after.split_whitespace().next()?.to_owned();
    Some(RecallAnswer { document, key: question.key.clone(), stated: question.answer.clone(), generated })
}

/// Tokens after which all windows and heavy hitters are full; `None` if no head has a window.
fn full_at(config: &Config) -> Option<usize> {
    let heads = (0..config.num_hidden_layers).flat_map(|layer| config.heads(layer));
    let keys = |head: Variant| Some(head.window? + head.sinks.unwrap_or(0) + head.heavy_hitters.map_or(0, |hitters| hitters.keys));
    heads.filter_map(keys).max()
}

/// Token counts, speed, memory and truncation bound.
fn notes(stats: GenerationStats, config: &Config, constant: bool, memory: MemoryPolicy) -> Vec<String> {
    let GenerationStats { failed, state_bytes, switched_layers: switched, position, largest_score, .. } = stats;
    // A rate of one token is noise.
    let rate = |tokens: usize, time: Duration| match tokens {
        0 | 1 => String::new(),
        _ => format!(" at {} tokens/s", thousands((tokens as f64 / time.as_secs_f64().max(1e-9)).round() as u64)),
    };
    let constant = constant || switched == config.num_hidden_layers;
    let kind = match (constant, full_at(config)) {
        (true, Some(full)) if position >= full => format!("constant from token {} on", thousands(full)),
        (true, Some(full)) => format!("which grows until token {}", thousands(full)),
        (true, None) => "a state of constant size".to_owned(),
        (false, _) => "keys and values".to_owned(),
    };
    let mut text = if failed > 0 { format!("{} failed; ", counted(failed, "prompt")) } else { String::new() };
    let _ = write!(text, "{} read{}", counted(stats.prompt_tokens, "token"), rate(stats.prompt_tokens, stats.prefill_time));
    let _ = write!(text, "; {} written{}", thousands(stats.generated_tokens), rate(stats.generated_tokens, stats.decode_time));
    let _ = writeln!(text, "; {} bytes of memory after {} tokens, {kind}", thousands(state_bytes), thousands(position));
    if let MemoryPolicy::SwitchToState(order) = memory {
        let _ = writeln!(text, "{switched} of {} layers switched to the state of order {order}", config.num_hidden_layers);
        if switched == 0 {
            text += "the cache stayed smaller than that state; write a longer text or use a lower --order\n";
        }
    }
    if let MemoryPolicy::Truncate(order) | MemoryPolicy::SwitchToState(order) = memory
        && (switched > 0 || matches!(memory, MemoryPolicy::Truncate(_)))
        && let Ok(cut) = Truncation::new(order, largest_score)
    {
        let (score, bound) = (sig3(largest_score), cut.of_sum());
        // An output and its truncation are both means of value vectors: 2 bounds any error.
        let _ = match bound < 2.0 {
            true => writeln!(
                text,
                "largest score {score}: truncation at order {order} changes the output of a softmax head by at most {bound:.2e} times the largest value vector"
            ),
            false => writeln!(text, "largest score {score}: too large for a useful bound on the truncation error at order {order}"),
        };
    }
    text.lines().map(str::to_owned).collect()
}

/// The tokenizer that was named, the model's own, that of the built-in language, or bytes where the vocabulary is theirs.
fn tokenizer(request: &GenerateRequest, folder: &Path, language: Option<&Language>, config: &Config) -> Result<Tokenizer, GenerateError> {
    let end = request.end_of_document.as_deref();
    if let Some(name) = &request.tokenizer {
        return Ok(Tokenizer::open(name, end)?);
    }
    if folder.join("tokenizer.json").exists() {
        return Ok(Tokenizer::open(&folder.display().to_string(), end)?);
    }
    match (language, config.vocab_size) {
        // Checkpoints of earlier builds come without it.
        (Some(language), _) => Ok(language.tokenizer()?),
        (None, 256 | 257) => Ok(Tokenizer::open("bytes", end)?),
        (None, vocabulary) => Err(termwise_data::Error::Tokenizer {
            name: folder.join("tokenizer.json").display().to_string(),
            problem: format!(
                "it is not there, and a vocabulary of {vocabulary} tokens is not that of bytes; name a tokenizer with --tokenizer"
            ),
        }
        .into()),
    }
}

/// The end-of-text tokens: those of the model, else that of the tokenizer.
fn end_tokens(config: &Config, tokenizer: &Tokenizer) -> Vec<u32> {
    if config.eos_token_id.is_empty() { vec![tokenizer.end()] } else { config.eos_token_id.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_ends_with_a_key_is_a_question() {
        assert!(ends_with_question("k3 v7 k9 v1 ? k3") && ends_with_question(" ? k12\n"));
        assert!(!["", "k3", "? v3", "k3 v7 ?", "? king", "what? k3"].iter().any(|prompt| ends_with_question(prompt)));
    }

    #[test]
    fn the_first_token_after_a_question_is_the_answer() {
        let question = Question { text: "k3 v7 ? k3".into(), key: "k3".into(), answer: "v7".into() };
        let text = |text: &str| GeneratedText { index: 0, prompt: question.text.clone(), text: text.into(), tokens: 2 };
        let right = answer(&question, &text("k3 v7 ? k3 v7 ? v9"), 1).expect("a token");
        assert!(right.is_right() && right.sentence().ends_with("predicts v7: right"), "{right:?}");
        assert!(!answer(&question, &text("k3 v7 ? k3 v9 v7"), 1).expect("a token").is_right());
        assert_eq!(answer(&question, &text("k3 v7 ? k3"), 1), None);
    }
}
