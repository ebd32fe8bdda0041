//! `termwise tokenizer`.

use std::io;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use termwise_base::files;
use termwise_data::Tokenizer;
use termwise_data::bpe::{self, BpeConfig};
use termwise_train::log::print_line;

use super::data::TextArgs;
use crate::context::{Context, Print};
use crate::error::{Exit, Failure};

/// Train and apply tokenizers
#[derive(Debug, Subcommand)]
pub enum TokenizerCommand {
    Train(TrainArgs),
    Encode(EncodeArgs),
    Decode(DecodeArgs),
}

/// Train a byte-level BPE tokenizer on text
///
/// Writes a tokenizer.json in the Hugging Face format.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise tokenizer train tinyshakespeare.txt --vocab 1024 --out tokenizer.json
  termwise tokenizer train 'corpus/*.jsonl.gz' --vocab 32000 --special '<|endoftext|>' --special '<|pad|>' --out tokenizer.json")]
pub struct TrainArgs {
    #[command(flatten)]
    pub text: TextArgs,
    /// Vocabulary size, including special tokens and the 256 bytes
    #[arg(long, default_value_t = 8192, value_name = "N", value_parser = super::size(1 << 24))]
    pub vocab: usize,
    /// Special token; may be repeated, the first has id 0
    #[arg(long = "special", default_value = "<|endoftext|>", value_name = "TOKEN")]
    pub special_tokens: Vec<String>,
    /// Pairs that occur less often are not merged
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub min_frequency: u64,
    /// File to write
    #[arg(long, short, default_value = "tokenizer.json", value_name = "FILE")]
    pub out: PathBuf,
    /// Print JSON, which `termwise report` renders
    #[arg(long)]
    pub json: bool,
}

/// Print the token ids of a text
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise tokenizer encode tokenizer.json 'Once upon a time'
  termwise tokenizer encode runs/first/checkpoints/step-00001000 < book.txt")]
pub struct EncodeArgs {
    /// bytes, a tokenizer.json, or a folder that contains one
    pub tokenizer: String,
    /// Text [default: standard input]
    pub text: Option<String>,
    /// Omit special tokens such as <s> at the start
    #[arg(long)]
    pub no_special_tokens: bool,
    /// End-of-text token [default: that of the tokenizer]
    #[arg(long, value_name = "TOKEN")]
    pub end_of_document: Option<String>,
}

/// Print the text of token ids
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise tokenizer decode tokenizer.json 17 4 99
  termwise tokenizer encode tokenizer.json < book.txt | termwise tokenizer decode tokenizer.json")]
pub struct DecodeArgs {
    /// bytes, a tokenizer.json, or a folder that contains one
    pub tokenizer: String,
    /// Token ids [default: standard input]
    #[arg(value_name = "ID")]
    pub ids: Vec<u32>,
    /// Omit special tokens
    #[arg(long)]
    pub skip_special_tokens: bool,
    /// End-of-text token [default: that of the tokenizer]
    #[arg(long, value_name = "TOKEN")]
    pub end_of_document: Option<String>,
}

pub fn run(command: &TokenizerCommand, context: &mut Context) -> Result<Exit, Failure> {
    match command {
        TokenizerCommand::Train(args) => {
            let config =
                BpeConfig { vocabulary: args.vocab, special_tokens: args.special_tokens.clone(), min_frequency: args.min_frequency };
            context.print(&bpe::train(&args.text.config(), &config, &args.out)?, Print { json: args.json, ..Print::default() })?;
            print_line(&format!("written: {}", args.out.display()));
        }
        TokenizerCommand::Encode(args) => {
            let tokenizer = Tokenizer::open(&args.tokenizer, args.end_of_document.as_deref())?;
            let text = match &args.text {
                Some(text) => text.clone(),
                None => standard_input()?,
            };
            let ids = tokenizer.encode(&text, !args.no_special_tokens)?;
            writeln!(context.out, "{}", ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "))?;
        }
        TokenizerCommand::Decode(args) => {
            let tokenizer = Tokenizer::open(&args.tokenizer, args.end_of_document.as_deref())?;
            let ids = match &args.ids[..] {
                [] => {
                    let wrong = |word: &str| Failure::usage(format!("`{word}` on standard input is not a token id; give whole numbers"));
                    let number = |word: &str| word.parse().map_err(|_| wrong(word));
                    standard_input()?.split_whitespace().map(number).collect::<Result<Vec<u32>, Failure>>()?
                }
                ids => ids.to_vec(),
            };
            writeln!(context.out, "{}", tokenizer.decode(&ids, args.skip_special_tokens)?)?;
        }
    }
    Ok(Exit::Success)
}

fn standard_input() -> Result<String, Failure> {
    Ok(io::read_to_string(io::stdin()).map_err(files::Error::io("read", "standard input"))?)
}
