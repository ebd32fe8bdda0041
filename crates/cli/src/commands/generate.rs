//! `termwise generate`.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::channel;

use clap::Args;
use termwise_analysis::generate::{self, GenerateRequest};
use termwise_analysis::request::Monitor;
use termwise_attention::{Mode, Variant};
use termwise_model::decode::SamplingOptions;
use termwise_model::generate::{Completion, GenerationEvent};
use termwise_model::weights::FloatType;
use termwise_train::log::print_line;

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
  termwise generate runs/first --prompt \"k3 v7 k9 v1 ? k3\"            builtin data: two facts and a query
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
    /// Prompt [default: an empty one; on builtin data a held-out document with a query]
    #[arg(long, value_name = "TEXT", conflicts_with = "prompts", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// File of prompts: one per line, or .jsonl with a field `prompt`
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Largest number of new tokens per prompt; 0 reads the prompt only [default: 256, or 1 for a query on builtin data]
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
    fn request(&self) -> GenerateRequest {
        let mut request = GenerateRequest::new();
        request.model = self.model.clone();
        request.prompt = self.prompt.clone();
        request.prompts = self.prompts.clone();
        request.max_tokens = self.max_tokens;
        request.sampling = SamplingOptions::default()
            .temperature(self.temperature)
            .top_k(self.top_k)
            .top_p(self.top_p)
            .min_p(self.min_p)
            .repetition_penalty(self.repetition_penalty)
            .seed(self.seed);
        request.stop_strings = self.stop.clone();
        request.ignore_end = self.ignore_end;
        request.order = self.order;
        request.switch = self.switch;
        request.attention = self.attention.clone();
        request.weights = self.weights;
        request.mode = self.mode;
        request.prefill_chunk = self.prefill_chunk;
        request.beyond_context = self.beyond_context;
        request.batch = self.batch;
        request.save_state = self.save_state.clone();
        request.load_state = self.load_state.clone();
        request.tokenizer = self.tokenizer.clone();
        request.end_of_document = self.end_of_document.clone();
        request.echo = self.echo || !self.json && !self.no_echo;
        request
    }
}

pub fn run(args: &GenerateArgs, context: &mut Context) -> Result<Exit, Failure> {
    let (pool, out) = (context.pool()?, &mut context.out);
    let (request, json) = (args.request(), args.json);
    let message = |text: &str| {
        if !args.quiet {
            print_line(text);
        }
    };
    // Text goes through a channel: the pool generates, and this thread writes to standard output.
    let (send, receive) = channel::<String>();
    std::thread::scope(|scope| {
        let work = move || {
            let monitor = Monitor { stop: &AtomicBool::new(false), progress: &|_, _, _| (), message: &message };
            let mut begun = false;
            generate::run(&request, &monitor, &mut |event, prompts| {
                let text = match event {
                    GenerationEvent::Text(text) => {
                        begun = true;
                        Some(text.to_owned()).filter(|_| !json)
                    }
                    GenerationEvent::Finished(done) => {
                        begun = false;
                        Some(if json { json_line(&done) } else { separator(done.index, prompts).to_owned() })
                    }
                    GenerationEvent::Failed(failed) => {
                        print_line(&format!("error: {}", failed.error));
                        // End the text before the failure.
                        let begun = std::mem::take(&mut begun);
                        (begun && !json).then(|| separator(failed.index, prompts).to_owned())
                    }
                };
                text.is_none_or(|text| send.send(text).is_ok())
            })
        };
        let worker = scope.spawn(|| pool.install(work));
        let printed = receive.iter().try_for_each(|text| out.write_all(text.as_bytes()).and_then(|()| out.flush()));
        // Without a receiver, generation ends at the next text.
        drop(receive);
        let found = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        printed?;
        if !args.quiet && !found.is_failure() {
            print_line(&found.summary_lines().join("\n"));
        }
        Ok(match found.failed {
            0 => Exit::Success,
            _ if found.is_failure() => Exit::Failure,
            _ => Exit::Partial,
        })
    })
}

/// The separator after a text: an empty line between prompts.
fn separator(index: usize, prompts: usize) -> &'static str {
    if index + 1 < prompts { "\n\n" } else { "\n" }
}

fn json_line(done: &Completion) -> String {
    serde_json::to_string(done).expect("texts and whole numbers are JSON") + "\n"
}
