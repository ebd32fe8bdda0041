//! Tokenizers: text to tokens and back.

use std::cell::Cell;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::Once;

use serde_json::Value;
use termwise_base::files;
use tokenizers::{ModelWrapper, Tokenizer as HuggingFace};

use crate::error::{Error, Result};

/// Common names of end-of-document tokens, in search order.
const END_TOKENS: [&str; 9] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>", "<|im_end|>", "[EOS]", "[SEP]"];

/// Maximum size of a tokenizer.json; the largest in use have about 30 MB.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// Token ids from here on are considered damaged: memory is needed for every id up to the largest.
const MAX_IDS: u64 = 1 << 24;

/// Maximum factor by which the replacements of a tokenizer may lengthen a text. Those in use replace a space by three bytes.
const MAX_GROWTH: f64 = 256.0;

/// Converts between text and tokens. Usable from several threads.
pub struct Tokenizer {
    kind: Kind,
    /// `bytes`, or the file name.
    name: String,
    end: u32,
    vocabulary: usize,
    hash: String,
    bytes: Vec<u32>,
}

enum Kind {
    Bytes,
    HuggingFace(Box<HuggingFace>),
}

impl Tokenizer {
    /// One token per byte, and the token 256, which ends a document.
    pub fn bytes() -> Tokenizer {
        let mut bytes = vec![1; 257];
        bytes[256] = 0;
        Tokenizer { kind: Kind::Bytes, name: "bytes".into(), end: 256, vocabulary: 257, hash: "bytes-1".into(), bytes }
    }

    /// `bytes`, a Hugging Face `tokenizer.json`, or a directory that contains one. `end` is the end-of-document token. Default:
    /// the first of its usual names.
    ///
    /// Truncation and padding in the file are disabled: documents are tokenized completely.
    pub fn open(name: &str, end: Option<&str>) -> Result<Tokenizer> {
        let refuse = |problem: String| Error::Tokenizer { name: name.into(), problem };
        if name == "bytes" {
            return match end {
                None => Ok(Tokenizer::bytes()),
                Some(_) => Err(refuse("its end-of-document token is 256; remove `end_of_document`".into())),
            };
        }
        let path = if Path::new(name).is_dir() { Path::new(name).join("tokenizer.json") } else { name.into() };
        if !path.exists() {
            // Hub names, such as gpt2 or owner/name, have no extension.
            let hub = match Path::new(name).extension() {
                None if name.matches('/').count() < 2 && !name.starts_with(['.', '/']) => {
                    "; for a model of the Hugging Face hub, download its tokenizer.json, or name the model as hf://OWNER/NAME, which includes its tokenizer"
                }
                _ => "",
            };
            let problem = format!("there is no such file; name a tokenizer.json, a directory that contains one, or `bytes`{hub}");
            return Err(Error::io("read the tokenizer", name)(std::io::Error::new(std::io::ErrorKind::NotFound, problem)));
        }
        let file = files::read(&path, MAX_FILE_BYTES).map_err(Error::io("read the tokenizer", &path))?;
        Tokenizer::of_json(name, &file, end)
    }

    /// Parses the content of a `tokenizer.json`.
    pub fn of_json(name: &str, file: &[u8], end: Option<&str>) -> Result<Tokenizer> {
        let refuse = |problem: String| Error::Tokenizer { name: name.into(), problem };
        let not_one = |error: &dyn fmt::Display| refuse(format!("not a tokenizer.json in Hugging Face format: {error}"));
        let description: Value = serde_json::from_slice(file).map_err(|error| not_one(&error))?;
        if let Some(id) = largest_id(&description).filter(|&id| id >= MAX_IDS) {
            return Err(refuse(format!("it has a token with the id {id}; ids must be below {MAX_IDS}")));
        }
        for part in ["normalizer", "pre_tokenizer", "decoder"] {
            let growth = growth(&description[part]);
            if growth > MAX_GROWTH {
                return Err(refuse(format!("its {part} may lengthen a text by a factor of {growth:.0}; the maximum is {MAX_GROWTH}")));
            }
        }
        let inner = guarded(|| {
            let mut inner = HuggingFace::from_bytes(file)?;
            inner.with_truncation(None)?;
            inner.with_padding(None);
            Ok(inner)
        });
        let inner = inner.map_err(|error| not_one(&error))?;
        let vocabulary = inner.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1);
        let end = match end {
            Some(end) => inner.token_to_id(end).ok_or_else(|| refuse(format!("it has no token `{end}`")))?,
            None => END_TOKENS.iter().find_map(|end| inner.token_to_id(end)).ok_or_else(|| {
                refuse(format!("no end-of-document token was found (tried {}); name it in `end_of_document`", END_TOKENS.join(", ")))
            })?,
        };
        let bytes = bytes_of_tokens(&inner, &description, vocabulary);
        let hash = blake3::hash(file).to_hex().to_string();
        Ok(Tokenizer { kind: Kind::HuggingFace(Box::new(inner)), name: name.into(), end, vocabulary, hash, bytes })
    }

    /// `bytes`, or the file as the user named it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The largest token id plus one.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The end-of-document token.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// A hash of the tokenizer's file.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Whether text starts with a special token, such as `<s>`, if special tokens are added.
    pub fn begins(&self) -> Result<bool> {
        let (with, without) = (self.encode("a", true)?, self.encode("a", false)?);
        Ok(with.first() != without.first())
    }

    /// The tokens of a text, with the tokenizer's template if `special`. The end-of-document token is not added.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::HuggingFace(inner) => {
                // Other tokenizers split unknown words.
                let whole = matches!(inner.get_model(), ModelWrapper::WordLevel(_));
                let unknown = || text.split_whitespace().find(|word| whole && inner.token_to_id(word).is_none());
                let encoding = guarded(|| inner.encode_fast(text, special)).map_err(|error| match unknown() {
                    Some(word) => self.error(format!(
                        "cannot encode: it has no token for `{word}` ({error}); `termwise data show` prints text of the synthetic language"
                    )),
                    None => self.error(format!("cannot encode: {error}")),
                })?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The text of tokens. With `skip_special`, special tokens such as the end-of-document token are omitted. Bytes that are not UTF-8
    /// become `U+FFFD`.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocabulary) {
            return Err(self.error(format!("cannot decode {id}: the vocabulary has {} tokens", self.vocabulary)));
        }
        match &self.kind {
            Kind::Bytes => {
                let mut text = String::new();
                for run in ids.split_inclusive(|&id| id == 256) {
                    let (run, end) =
                        run.split_last().filter(|&(&last, _)| last == 256).map_or((run, ""), |(_, run)| (run, "<|endoftext|>"));
                    text += &String::from_utf8_lossy(&run.iter().map(|&id| id as u8).collect::<Vec<_>>());
                    text += if skip_special { "" } else { end };
                }
                Ok(text)
            }
            Kind::HuggingFace(inner) => {
                guarded(|| inner.decode(ids, skip_special)).map_err(|error| self.error(format!("cannot decode: {error}")))
            }
        }
    }

    /// Number of text bytes of each token, [vocabulary]: exact for `bytes` and byte-level tokenizers. For others it is the length of the
    /// token, which differs from the text if it was normalized. Special tokens have 0 bytes.
    pub fn bytes_of_tokens(&self) -> &[u32] {
        &self.bytes
    }

    fn error(&self, problem: String) -> Error {
        Error::Tokenizer { name: self.name.clone(), problem }
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({}, {} tokens)", self.name, self.vocabulary)
    }
}

/// Runs library code, which panics on some damaged files. A panic becomes an error without output.
fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    thread_local!(static GUARDED: Cell<bool> = const { Cell::new(false) });
    static SILENCED: Once = Once::new();
    SILENCED.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                usual(info);
            }
        }));
    });
    GUARDED.set(true);
    // No state is shared after a panic: the file's bytes and the tokenizer are only read.
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(false);
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("the tokenizers library panicked: {}", text.unwrap_or("no message").lines().next().unwrap_or_default()).into())
    })
}

/// The largest token id in a tokenizer.json.
fn largest_id(description: &Value) -> Option<u64> {
    let vocabulary = &description["model"]["vocab"];
    let named = vocabulary.as_object().into_iter().flat_map(|map| map.values()).filter_map(Value::as_u64);
    let added = description["added_tokens"].as_array().into_iter().flatten().filter_map(|token| token["id"].as_u64());
    named.chain(added).max()
}

/// The maximum factor by which the replacements or prefixes of a normalizer or decoder can lengthen a text.
fn growth(part: &Value) -> f64 {
    let list = ["normalizers", "pretokenizers", "decoders"].into_iter().filter_map(|name| part[name].as_array()).flatten();
    let pattern = |kind: &str| part["pattern"][kind].as_str();
    let own = match (part["content"].as_str(), pattern("String"), pattern("Regex")) {
        (Some(content), Some(text), _) => (content.len() as f64 / text.len().max(1) as f64).max(1.0),
        // It may match the empty string between all bytes, which are kept.
        (Some(content), None, Some(_)) => content.len() as f64 + 1.0,
        _ => 1.0,
    };
    // A prefix is applied to at least one byte.
    let front = part["prepend"].as_str().map_or(1.0, |text| text.len() as f64 + 1.0);
    list.map(growth).product::<f64>() * own * front
}

fn bytes_of_tokens(inner: &HuggingFace, description: &Value, vocabulary: usize) -> Vec<u32> {
    let byte_level = mentions(&description["pre_tokenizer"], "ByteLevel") || mentions(&description["decoder"], "ByteLevel");
    let word_piece = description["model"]["type"] == "WordPiece";
    let mut bytes = vec![0; vocabulary];
    for (token, id) in inner.get_vocab(false) {
        bytes[id as usize] = if byte_level {
            token.chars().count()
        } else if token.len() == 6 && token.starts_with("<0x") && token.ends_with('>') {
            1
        } else if let Some(rest) = token.strip_prefix("##").filter(|_| word_piece) {
            rest.len()
        } else {
            // SentencePiece writes a space as U+2581, three bytes.
            token.len() - 2 * token.matches('▁').count()
        } as u32;
    }
    for (&id, added) in inner.get_added_tokens_decoder().iter() {
        bytes[id as usize] = if added.special { 0 } else { added.content.len() as u32 };
    }
    bytes
}

/// Whether a component of a tokenizer, or one in its sequence, has this type.
fn mentions(part: &Value, kind: &str) -> bool {
    match part {
        Value::Object(map) => map.get("type").is_some_and(|found| found == kind) || map.values().any(|part| mentions(part, kind)),
        Value::Array(parts) => parts.iter().any(|part| mentions(part, kind)),
        _ => false,
    }
}
