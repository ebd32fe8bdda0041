//! `termwise tokenizer`: learn one, or see what one does.

use std::io::{self, Read, Write};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use termwise_data::Tokenizer;
use termwise_data::bpe::{self, BpeConfig};

use super::data::TextArgs;

/// Learn a tokenizer, or see what one does
#[derive(Debug, Subcommand)]
pub enum TokenizerCommand {
    Train(TrainArgs),
    Encode(EncodeArgs),
    Decode(DecodeArgs),
}

/// Learn a byte-level BPE tokenizer from text
///
/// Writes a tokenizer.json that Hugging Face's library reads too.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise tokenizer train tinyshakespeare.txt --vocabulary 1024 --out tokenizer.json
  termwise tokenizer train 'corpus/*.jsonl.gz' --vocabulary 32000 --special '<|endoftext|>' --special '<|pad|>' --out tokenizer.json")]
pub struct TrainArgs {
    #[command(flatten)]
    pub text: TextArgs,
    /// Tokens in all, special ones and the 256 bytes included
    #[arg(long, default_value_t = 8192, value_name = "N")]
    pub vocabulary: usize,
    /// Special token; may be given several times, the first gets the id 0
    #[arg(long = "special", default_value = "<|endoftext|>", value_name = "TOKEN")]
    pub special_tokens: Vec<String>,
    /// Pairs that occur less often are not merged
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub min_frequency: u64,
    /// File to write
    #[arg(long, short, default_value = "tokenizer.json", value_name = "FILE")]
    pub out: PathBuf,
}

/// Print the token ids of a text
#[derive(Debug, Args)]
pub struct EncodeArgs {
    /// `bytes`, a tokenizer.json, or a folder that holds one
    pub tokenizer: String,
    /// The text [default: standard input]
    pub text: Option<String>,
    /// Do not add what the tokenizer's template says, such as <s> in front
    #[arg(long)]
    pub no_special_tokens: bool,
    /// Token that ends documents, where the tokenizer has none of the usual names
    #[arg(long, value_name = "TOKEN")]
    pub end_of_document: Option<String>,
}

/// Print the text of token ids
#[derive(Debug, Args)]
pub struct DecodeArgs {
    /// `bytes`, a tokenizer.json, or a folder that holds one
    pub tokenizer: String,
    /// The ids
    #[arg(required = true, value_name = "ID")]
    pub ids: Vec<u32>,
    /// Leave special tokens out
    #[arg(long)]
    pub skip_special_tokens: bool,
    /// Token that ends documents, where the tokenizer has none of the usual names
    #[arg(long, value_name = "TOKEN")]
    pub end_of_document: Option<String>,
}

/// Runs `termwise tokenizer`.
pub fn run<E: From<termwise_data::Error> + From<io::Error>>(command: &TokenizerCommand, out: &mut impl Write) -> Result<(), E> {
    match command {
        TokenizerCommand::Train(args) => {
            let config =
                BpeConfig { vocabulary: args.vocabulary, special_tokens: args.special_tokens.clone(), min_frequency: args.min_frequency };
            let report = bpe::train(&args.text.config(), &config, &args.out)?;
            let (path, documents, bytes) = (args.out.display(), report.documents, report.bytes);
            writeln!(out, "{path}: {} tokens, learned from {documents} documents, {bytes} bytes", report.vocabulary)?;
        }
        TokenizerCommand::Encode(args) => {
            let tokenizer = Tokenizer::open(&args.tokenizer, args.end_of_document.as_deref())?;
            let text = match &args.text {
                Some(text) => text.clone(),
                None => {
                    let mut text = String::new();
                    io::stdin().read_to_string(&mut text)?;
                    text
                }
            };
            let ids = tokenizer.encode(&text, !args.no_special_tokens)?;
            writeln!(out, "{}", ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "))?;
        }
        TokenizerCommand::Decode(args) => {
            let tokenizer = Tokenizer::open(&args.tokenizer, args.end_of_document.as_deref())?;
            writeln!(out, "{}", tokenizer.decode(&args.ids, args.skip_special_tokens)?)?;
        }
    }
    Ok(())
}
