//! `termwise generate`.

mod summary;

use std::path::{Path, PathBuf};

use clap::Args;
use termwise_attention::{Mode, Variant};
use termwise_data::Tokenizer;
use termwise_data::language::{Language, Question};
use termwise_model::decode::{Decoder, DecoderOptions, MemoryPolicy, SamplingOptions, warnings};
use termwise_model::generate::{Completion, GenerationEvent, GenerationOptions, Result, TextGenerator, prompts};
use termwise_model::weights::FloatType;
use termwise_model::{Config, Model};
use termwise_report::thousands;
use termwise_train::tell::tell;

use super::source::{language_of, model_folder, warning};
use crate::context::Context;
use crate::error::{Exit, Failure};

/// Generate text with a model
///
/// Text is printed to standard output as it is generated; speed and memory are printed to standard error. Softmax keeps all keys and
/// values. Attention with a finite feature map keeps a state of constant size.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise generate                                                    the newest run in runs/
  termwise generate runs/first --prompt \"k3 v7 k9 v1 ? k3\"            builtin data: two facts and a question
  termwise generate path/to/model --prompt \"Once upon a time\"
  termwise generate path/to/model --prompt Once --temperature 0.8 --top-p 0.9 --seed 7 --stop \"\\n\\n\"
  termwise generate path/to/model --prompt Once --order 4              softmax truncated at order 4: constant memory
  termwise generate path/to/model --prompt Once --order 4 --switch     exact until the state is smaller, then truncated
  termwise generate path/to/model --prompt Once --weights bf16         half the memory for weights, up to twice as fast
  termwise generate path/to/model --prompts prompts.jsonl --json       many prompts, one line of JSON each
  termwise generate path/to/model --prompt Once --save-state once.safetensors
  termwise generate path/to/model --load-state once.safetensors        resume from a saved state

Sampling follows Hugging Face: repetition penalty, temperature, top-k, top-p, min-p, in this order. Prompt number n, counted from 0, uses
the seed --seed + n, so its output does not depend on the other prompts. Failed prompts are reported on standard error. The exit code is 3
if some prompts failed, 1 if all did.")]
pub struct GenerateArgs {
    /// Model folder, run, checkpoint or hf://OWNER/NAME[@REVISION] [default: the newest run in runs/]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Prompt [default: an empty one; on builtin data a held-out document with a question]
    #[arg(long, value_name = "TEXT", conflicts_with = "prompts", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// File of prompts: one per line, or .jsonl with a field `prompt`
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Largest number of new tokens per prompt; 0 reads the prompt only [default: 256, or 1 for a question on builtin data]
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Sampling temperature; 0: greedy
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    pub temperature: f64,
    /// Top-k sampling; 0: off
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub top_k: usize,
    /// Top-p (nucleus) sampling; 1: off
    #[arg(long, default_value_t = 1.0, value_name = "P", allow_negative_numbers = true)]
    pub top_p: f64,
    /// Min-p sampling: smallest probability relative to the largest; 0: off
    #[arg(long, default_value_t = 0.0, value_name = "P", allow_negative_numbers = true)]
    pub min_p: f64,
    /// Repetition penalty; 1: off
    #[arg(long, default_value_t = 1.0, value_name = "X", allow_negative_numbers = true)]
    pub repetition_penalty: f64,
    /// Sampling seed
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Stop before this text; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Continue after the end-of-text token
    #[arg(long)]
    pub ignore_end: bool,
    /// Truncate every exp kernel at this order, for constant memory
    #[arg(long, value_name = "P", value_parser = crate::args::order())]
    pub order: Option<usize>,
    /// Keep keys and values until the state of --order is smaller, then switch to it
    #[arg(long, requires = "order")]
    pub switch: bool,
    /// Replace the attention of all heads by this variant
    #[arg(long, value_name = "VARIANT")]
    pub attention: Option<Variant>,
    /// Type of the weights: float32, or bfloat16, which is up to twice as fast with 8 bits of precision
    #[arg(long, alias = "precision", default_value = "float32", value_name = "TYPE")]
    pub weights: FloatType,
    /// How prompts are processed: parallel, chunk, chunk=LENGTH or auto
    #[arg(long, default_value = "auto", value_name = "MODE")]
    pub mode: Mode,
    /// Prompt tokens per prefill chunk: larger chunks are faster and need larger buffers
    #[arg(long, alias = "window", default_value_t = 256, value_name = "N", value_parser = super::size(1 << 16))]
    pub prefill_chunk: usize,
    /// Allow more tokens than the context of the model
    #[arg(long)]
    pub beyond_context: bool,
    /// Prompts of --prompts per batch
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = super::size(4096))]
    pub batch: usize,
    /// Save the decoding state to this file
    #[arg(long, value_name = "FILE", conflicts_with = "prompts")]
    pub save_state: Option<PathBuf>,
    /// Resume from a saved decoding state; --prompt is appended
    #[arg(long, value_name = "FILE", conflicts_with = "prompts")]
    pub load_state: Option<PathBuf>,
    /// bytes, a tokenizer.json, or a folder that contains one [default: that of the model]
    #[arg(long, value_name = "TOKENIZER")]
    pub tokenizer: Option<String>,
    /// End-of-text token [default: that of the tokenizer]
    #[arg(long, value_name = "TOKEN")]
    pub end_of_document: Option<String>,
    /// With --json: include the prompt in `text`
    #[arg(long)]
    pub echo: bool,
    /// Print only the generated text, without the prompt
    #[arg(long, conflicts_with = "echo")]
    pub no_echo: bool,
    /// Print one line of JSON per prompt
    #[arg(long)]
    pub json: bool,
    /// Suppress warnings, speed and memory
    #[arg(long, short)]
    pub quiet: bool,
}

impl GenerateArgs {
    fn sampling(&self) -> SamplingOptions {
        SamplingOptions::default()
            .temperature(self.temperature)
            .top_k(self.top_k)
            .top_p(self.top_p)
            .min_p(self.min_p)
            .repetition_penalty(self.repetition_penalty)
            .seed(self.seed)
    }

    fn memory(&self) -> MemoryPolicy {
        match self.order {
            None => MemoryPolicy::Auto,
            Some(order) if self.switch => MemoryPolicy::SwitchToState(order),
            Some(order) => MemoryPolicy::Truncate(order),
        }
    }
}

pub fn run(args: &GenerateArgs, context: &mut Context) -> std::result::Result<Exit, Failure> {
    let (pool, out) = (context.pool()?, &mut context.out);
    let folder = &model_folder(args.model.as_deref(), args.quiet)?;
    let language = language_of(folder)?;
    // Text goes through a channel, since products run on threads of their own and standard output belongs to this one.
    let (send, receive) = std::sync::mpsc::channel::<String>();
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| pool.install(move || work(args, folder, language.as_ref(), &mut |text| send.send(text).is_ok())));
        let printed = receive.iter().try_for_each(|text| out.write_all(text.as_bytes()).and_then(|()| out.flush()));
        // Without a reader the writing ends at its next piece.
        drop(receive);
        let (summary, exit) = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        printed?;
        if !args.quiet && exit != Exit::Failure {
            tell(summary.trim_end());
        }
        Ok(exit)
    })
}

/// The summary for standard error, and the exit code.
fn work(args: &GenerateArgs, folder: &Path, language: Option<&Language>, show: &mut dyn FnMut(String) -> bool) -> Result<(String, Exit)> {
    let sampling = args.sampling();
    sampling.validate()?;
    // Nothing to go on from: a model of the built-in language is asked something.
    let asks = args.prompt.is_none() && args.prompts.is_none() && args.load_state.is_none();
    let question = language.filter(|_| asks).map(|language| language.question(args.seed)).transpose()?.flatten();
    // One token answers a question; a longer text after it is noise.
    let answered = question.is_some() || language.is_some() && args.prompt.as_deref().is_some_and(ends_with_question);
    let prompts = match (&args.prompts, &question) {
        (Some(path), _) => prompts::read(path)?,
        (None, Some(question)) => vec![question.text.clone()],
        (None, None) => vec![args.prompt.clone().unwrap_or_default()],
    };
    if let Some(path) = &args.save_state {
        // Before anything is written: a text that cannot be saved in the end would be lost.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::read_dir(folder)
            .map_err(termwise_base::files::Error::io("write the state to", path))
            .map_err(termwise_data::Error::from)?;
    }
    let options = DecoderOptions::default()
        .rows(args.batch.min(prompts.len()))
        .prefill_chunk(args.prefill_chunk)
        .mode(args.mode)
        .memory(args.memory())
        .weights(args.weights)
        .beyond_context(args.beyond_context);
    let decoder = match &args.attention {
        None => Decoder::open(folder, options)?,
        Some(attention) => Decoder::new(Model::read(folder)?.with_attention(attention.clone())?, options)?,
    };
    let config = decoder.config().clone();
    let tokenizer = tokenizer(args, folder, language, &config)?;
    if !args.quiet {
        let order = args.order.map(|order| termwise_model::decode::truncate_attention(&config, order)).transpose()?;
        let map = order.as_ref().unwrap_or(&config.attention);
        let heads = (0..config.num_hidden_layers).flat_map(|layer| map.heads(layer, config.num_attention_heads));
        for warning in warnings(&heads.collect::<Vec<_>>()) {
            tell(&format!("warning: {warning}"));
        }
    }
    let generation = GenerationOptions::default()
        .sampling(sampling)
        .max_tokens(args.max_tokens.unwrap_or(if answered { 1 } else { 256 }))
        .stop_strings(args.stop.iter().filter(|stop| !stop.is_empty()).cloned().collect())
        .end_tokens(if args.ignore_end { Vec::new() } else { end_tokens(&config, &tokenizer) })
        .echo(args.echo || question.is_some() || !args.json && !args.no_echo)
        .load_state(args.load_state.clone())
        .save_state(args.save_state.clone());
    let (constant, memory) = (decoder.is_constant(), decoder.memory());
    let (mut answer, mut begun) = (None, false);
    let stats = TextGenerator::new(&config, decoder, &tokenizer, generation, &prompts).run(&mut |event| match event {
        GenerationEvent::Text(text) => {
            begun = true;
            args.json || show(text.to_owned())
        }
        GenerationEvent::Finished(written) => {
            begun = false;
            let after = written.text.strip_prefix(written.prompt).unwrap_or(written.text);
            answer = after.split_whitespace().next().map(str::to_owned);
            show(if args.json { json_line(&written) } else { apart(written.index, prompts.len()).to_owned() })
        }
        GenerationEvent::Failed(failed) => {
            tell(&format!("error: {}", failed.error));
            // What was written before the failure is a text of its own.
            !std::mem::take(&mut begun) || args.json || show(apart(failed.index, prompts.len()).to_owned())
        }
    })?;
    if stats.position > config.max_position_embeddings {
        warning(args.quiet)(&format!(
            "the text has {} tokens, and the model was trained on at most {}; tokens beyond are extrapolated",
            thousands(stats.position),
            thousands(config.max_position_embeddings)
        ));
    }
    let judged = question.map_or(String::new(), |question| judged(&question, answer.as_deref(), args.seed));
    let exit = match stats.failed {
        0 => Exit::Success,
        failed if failed < prompts.len() => Exit::Partial,
        _ => Exit::Failure,
    };
    Ok((judged + &summary::summary(stats, &config, constant, memory), exit))
}

/// What follows a text: those of several prompts are set apart by an empty line.
fn apart(index: usize, prompts: usize) -> &'static str {
    if index + 1 < prompts { "\n\n" } else { "\n" }
}

fn json_line(written: &Completion) -> String {
    serde_json::to_string(written).expect("texts and whole numbers are JSON") + "\n"
}

/// Whether the last words of a prompt are a question of the built-in language, as in `? k3`.
fn ends_with_question(prompt: &str) -> bool {
    let mut words = prompt.split_whitespace().rev();
    let key = words.next().and_then(|word| word.strip_prefix('k')).is_some_and(|number| number.parse::<u64>().is_ok());
    key && words.next() == Some("?")
}

/// Compares the first token after a question with the fact that the document states.
fn judged(question: &Question, answer: Option<&str>, number: u64) -> String {
    let Question { key, answer: stated, .. } = question;
    let verdict = match answer {
        Some(answer) if answer == stated => format!("the model answers {answer}: right"),
        Some(answer) => format!("the model answers {answer}: wrong"),
        // With --max-tokens 0.
        None => return String::new(),
    };
    format!(
        "held-out document {number} asks for {key} and states `{key} {stated}`; {verdict}\n\
         ask your own with --prompt \"k3 v7 k9 v1 ? k3\", or about other documents with --seed 2, 3, …\n"
    )
}

/// The tokenizer that was named, the model's own, that of the built-in language, or bytes where the vocabulary is theirs.
fn tokenizer(args: &GenerateArgs, folder: &Path, language: Option<&Language>, config: &Config) -> Result<Tokenizer> {
    let end = args.end_of_document.as_deref();
    if let Some(name) = &args.tokenizer {
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
}
