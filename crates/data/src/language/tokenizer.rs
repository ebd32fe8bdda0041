//! The language as text: `k12 v7 w3 ? k12 v7`.

use serde_json::{Map, Value, json};

use super::{Language, Stream};
use crate::Tokenizer;
use crate::error::Result;

/// The start token of a document, token 0. Other tools know it as a separator of documents.
const START_TOKEN: &str = "<|endoftext|>";

/// A question about a document that states its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The document up to its first question, as text: `k12 v7 w3 … ? k12`.
    pub text: String,
    /// The queried key: `k12`.
    pub key: String,
    /// The stated value: `v7`.
    pub answer: String,
}

impl Language {
    /// A Hugging Face `tokenizer.json` in which every token is a word, separated by spaces, with token 0 in front.
    pub fn tokenizer_json(&self) -> Vec<u8> {
        let config = self.config();
        let kinds = [("w", config.words), ("k", config.keys), ("v", config.values)];
        let names = kinds.into_iter().flat_map(|(letter, count)| (0..count).map(move |i| format!("{letter}{i}")));
        words_tokenizer(["?".to_owned()].into_iter().chain(names))
    }

    /// The tokenizer of that file.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::of_json("the built-in language", &self.tokenizer_json(), None)
    }

    /// The first question of held-out document `number`, modulo their count; `None` if the document ends before an answer.
    pub fn question(&self, number: u64) -> Result<Option<Question>> {
        let length = self.config().length;
        let (mut ids, mut labels, mut recall) = (vec![0; length], vec![0; length], vec![false; length]);
        let document = Stream::HeldOut.document(self.config().held_out_from as u64 + number % (self.config().held_out as u64).max(1));
        self.grammar.write(document, &mut ids, &mut labels, &mut recall);
        let Some(at) = recall.iter().position(|&recall| recall) else { return Ok(None) };
        let tokenizer = self.tokenizer()?;
        let text = |tokens: &[u32]| tokenizer.decode(tokens, true);
        Ok(Some(Question { text: text(&ids[..=at])?, key: text(&ids[at..=at])?, answer: text(&[labels[at] as u32])? }))
    }
}

/// A Hugging Face `tokenizer.json` in which every token is one of these words, separated by spaces, with token 0 in front.
pub(crate) fn words_tokenizer(words: impl IntoIterator<Item = String>) -> Vec<u8> {
    let names = std::iter::once(START_TOKEN.to_owned()).chain(words);
    let vocab: Map<String, Value> = names.zip(0u32..).map(|(name, id)| (name, id.into())).collect();
    let added = json!({
        "id": 0, "content": START_TOKEN, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true
    });
    let begin = json!({"SpecialToken": {"id": START_TOKEN, "type_id": 0}});
    let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [added],
        "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, sequence("A")],
            "pair": [begin, sequence("A"), sequence("B")],
            "special_tokens": {START_TOKEN: {"id": START_TOKEN, "ids": [0], "tokens": [START_TOKEN]}}
        },
        "decoder": null,
        // Not a word of the language, so unknown words are rejected.
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unknown>"}
    });
    serde_json::to_vec_pretty(&tokenizer).expect("texts and numbers are always valid JSON")
}
