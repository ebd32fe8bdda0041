//! Text made ready, and tokenizers learned, for people.

use serde::{Deserialize, Serialize};
use termwise_report::{Block, Document, Documented, counted, thousands};

use crate::bpe::BpeReport;
use crate::{Source, TextSource};

/// Text that was tokenized.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prepared {
    /// Of files, tokenizer and settings.
    pub fingerprint: String,
    /// Files.
    pub files: usize,
    /// Documents in them.
    pub documents: u64,
    /// Tokens of all documents.
    pub tokens: u64,
    /// Bytes of their text.
    pub bytes: u64,
    /// The quotient of the two.
    pub bytes_per_token: f64,
    /// Tokens that there are.
    pub vocabulary: usize,
    /// Tokens to train on.
    pub train_tokens: u64,
    /// Share of documents, or of the only one, that is held out.
    pub held_out_share: f64,
    /// Documents held out.
    pub held_out_documents: usize,
    /// Their tokens.
    pub held_out_tokens: u64,
    /// Their bytes.
    pub held_out_bytes: u64,
}

impl Prepared {
    /// What a source holds.
    pub fn new(source: &TextSource) -> Prepared {
        let manifest = source.tokens().manifest();
        Prepared {
            fingerprint: source.fingerprint(),
            files: manifest.files.len(),
            documents: manifest.documents,
            tokens: manifest.tokens,
            bytes: manifest.bytes,
            bytes_per_token: manifest.bytes as f64 / manifest.tokens.max(1) as f64,
            vocabulary: source.vocabulary(),
            train_tokens: source.train_tokens(),
            held_out_share: source.held_out_share(),
            held_out_documents: source.held_out_documents(),
            held_out_tokens: source.held_out_tokens(),
            held_out_bytes: source.held_out_bytes(),
        }
    }
}

impl Documented for Prepared {
    const KIND: &'static str = "data";

    fn document(&self) -> Document {
        let n = |n: u64| thousands(n);
        let facts = [
            ("text", format!("{} in {}, {} bytes", counted(self.documents, "document"), counted(self.files, "file"), n(self.bytes))),
            ("tokens", format!("{} of {}, {:.3} bytes per token", n(self.tokens), thousands(self.vocabulary), self.bytes_per_token)),
            ("to train on", format!("{} tokens", n(self.train_tokens))),
            (
                "held out",
                format!(
                    "{} tokens of {}, {} bytes",
                    n(self.held_out_tokens),
                    counted(self.held_out_documents, "document"),
                    n(self.held_out_bytes)
                ),
            ),
            ("fingerprint", self.fingerprint.clone()),
        ];
        Document { title: String::new(), lead: vec![Block::Facts(facts.map(|(name, text)| (name.into(), text)).into())], sections: vec![] }
    }
}

impl Documented for BpeReport {
    const KIND: &'static str = "tokenizer";

    fn document(&self) -> Document {
        let facts = [
            ("tokens", thousands(self.vocabulary)),
            ("learned from", format!("{}, {} bytes", counted(self.documents, "document"), thousands(self.bytes))),
        ];
        Document { title: String::new(), lead: vec![Block::Facts(facts.map(|(name, text)| (name.into(), text)).into())], sections: vec![] }
    }
}
