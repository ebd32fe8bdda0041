//! Documents about tokenized data and trained tokenizers.

use serde::{Deserialize, Serialize};
use termwise_report::{Block, Document, Documented, counted, thousands};

use crate::bpe::BpeReport;
use crate::{Source, TextSource};

/// Tokenized data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prepared {
    /// Fingerprint of files, tokenizer and settings.
    pub fingerprint: String,
    /// Number of files.
    pub files: usize,
    /// Number of documents.
    pub documents: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of bytes of text.
    pub bytes: u64,
    /// Bytes per token.
    pub bytes_per_token: f64,
    /// Vocabulary size.
    pub vocabulary: usize,
    /// Training tokens.
    pub train_tokens: u64,
    /// Held-out fraction of the documents, or of a single document.
    pub held_out_share: f64,
    /// Held-out documents.
    pub held_out_documents: usize,
    /// Held-out tokens.
    pub held_out_tokens: u64,
    /// Held-out bytes.
    pub held_out_bytes: u64,
}

impl Prepared {
    /// Statistics of a source.
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
            ("training", format!("{} tokens", n(self.train_tokens))),
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
            ("trained on", format!("{}, {} bytes", counted(self.documents, "document"), thousands(self.bytes))),
        ];
        Document { title: String::new(), lead: vec![Block::Facts(facts.map(|(name, text)| (name.into(), text)).into())], sections: vec![] }
    }
}
