//! Tokenizers: bytes, Hugging Face tokenizers, and trained ones.

use crate::support;

use std::path::Path;

use support::*;
use termwise_data::bpe::{self, BpeConfig};
use termwise_data::{DataConfig, Documents, Layout, Rows, Source, Tokenizer};

const TEXT: &str = "the theme of the thesis is that the thing there is theirs; ünï 🙂 の\nthe end of the theme\n";

fn learn(folder: &Folder, vocabulary: usize, name: &str) -> String {
    folder.write("text/t.txt", TEXT.repeat(50));
    let path = folder.path(name);
    let config = BpeConfig { vocabulary, ..BpeConfig::default() };
    let report = bpe::train(&config_of(folder), &config, Path::new(&path)).unwrap();
    assert_eq!((report.documents, report.bytes), (1, TEXT.len() as u64 * 50));
    assert!(report.vocabulary <= vocabulary && report.vocabulary > 257);
    path
}

fn config_of(folder: &Folder) -> DataConfig {
    config(folder, "text")
}

#[test]
fn a_trained_tokenizer_is_loaded_and_lossless() {
    let folder = Folder::new();
    let tokenizer = Tokenizer::open(&learn(&folder, 300, "tokenizer.json"), None).unwrap();
    assert_eq!(tokenizer.end(), 0);
    assert!(tokenizer.vocabulary() <= 300);
    let other = "Quite another text: \u{0}\t ß—漢字 🙂🙂\r\n  end ";
    for text in [TEXT, other] {
        let ids = tokenizer.encode(text, true).unwrap();
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        let bytes: u32 = ids.iter().map(|&id| tokenizer.bytes_of_tokens()[id as usize]).sum();
        assert_eq!(bytes as usize, text.len(), "bytes of tokens");
    }
    assert!(tokenizer.encode(TEXT, true).unwrap().len() < TEXT.len() * 2 / 3, "nothing was merged");
    // Its directory also names it.
    assert_eq!(Tokenizer::open(&folder.path(""), None).unwrap().hash(), tokenizer.hash());
    assert!(!tokenizer.begins().unwrap());
}

#[test]
fn training_does_not_depend_on_threads() {
    let folder = Folder::new();
    let learned = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        std::fs::read(pool.install(|| learn(&folder, 320, &format!("t{threads}.json")))).unwrap()
    };
    assert!(learned(1) == learned(3));
}

#[test]
fn invalid_training_settings_are_reported() {
    let folder = Folder::new();
    folder.write("text/t.jsonl", "{\"text\":\"a\"}\n{");
    let path = folder.path("tokenizer.json");
    let learn = |vocabulary| {
        bpe::train(&config_of(&folder), &BpeConfig { vocabulary, ..BpeConfig::default() }, Path::new(&path)).unwrap_err().to_string()
    };
    assert!(learn(256).contains("too small: bytes and special tokens need 257"));
    assert!(learn(300).contains("t.jsonl, line 2: "), "{}", learn(300));
    folder.write("text/t.jsonl", "\n");
    assert!(learn(300).contains("it contains no text"));
    assert!(!Path::new(&path).exists());
}

#[test]
fn the_end_of_document_token_can_be_set() {
    let folder = Folder::new();
    folder.write("text/t.txt", TEXT);
    let path = folder.path("tokenizer.json");
    let config = BpeConfig { vocabulary: 300, special_tokens: vec!["<pad>".into(), "<stop>".into()], min_frequency: 2 };
    bpe::train(&config_of(&folder), &config, Path::new(&path)).unwrap();
    let error = Tokenizer::open(&path, None).unwrap_err().to_string();
    assert!(error.contains("name it in `end_of_document`"), "{error}");
    assert!(Tokenizer::open(&path, Some("<end>")).unwrap_err().to_string().contains("no token `<end>`"));
    assert_eq!(Tokenizer::open(&path, Some("<stop>")).unwrap().end(), 1);
}

/// A template with a begin-of-document token, truncation and padding, as in files from elsewhere.
fn with_template(path: &str, special: &str) {
    let text = std::fs::read_to_string(path).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    value["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": special, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {special: {"id": special, "ids": [0], "tokens": [special]}}
    });
    value["truncation"] = serde_json::json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    value["padding"] = serde_json::json!({"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": special});
    std::fs::write(path, value.to_string()).unwrap();
}

#[test]
fn templates_are_applied_but_truncation_and_padding_are_not() {
    let folder = Folder::new();
    let path = learn(&folder, 300, "tokenizer.json");
    with_template(&path, "<|endoftext|>");
    let tokenizer = Tokenizer::open(&path, None).unwrap();
    assert!(tokenizer.begins().unwrap());
    let (with, without) = (tokenizer.encode(TEXT, true).unwrap(), tokenizer.encode(TEXT, false).unwrap());
    assert!(with[0] == 0 && with[1..] == without);
    assert_eq!(tokenizer.decode(&with, true).unwrap(), TEXT);
    assert_eq!(tokenizer.encode("e", true).unwrap().len(), 2);

    // Padded rows then start with that token, which is not a label.
    folder.write("docs/d.txt", "the\nthe theme\nthesis");
    let data =
        DataConfig { tokenizer: path, documents: Documents::Line, layout: Layout::Padded, held_out: Some(0.4), ..config(&folder, "docs") };
    let source = prepare(&folder, &data).unwrap();
    let mut out = Rows::default();
    source.train(0, 0, 6, 32, &mut out).unwrap();
    for row in 0..6 {
        let length = out.lengths[row];
        assert_eq!((out.ids[row * 32], out.labels[row * 32 + length - 1]), (0, 0));
        assert!(out.labels[row * 32..][..length - 1].iter().all(|&label| label != 0));
        assert!(out.labels[row * 32 + length..(row + 1) * 32].iter().all(|&label| label == -100));
    }
    assert!(source.held_out(0, 4, 32, &mut out).unwrap());
    assert_eq!(out.bytes, source.held_out_bytes());
}

#[test]
fn bytes_of_held_out_batches_add_up_with_any_tokenizer() {
    let Some(shared) = shared() else { return };
    let folder = Folder::new();
    let names =
        ["stories260K/tokenizer.json", "llama2-tokenizer/tokenizer.json"].map(|name| shared.join(name).to_str().unwrap().to_owned());
    for tokenizer in names.into_iter().chain(["bytes".into(), learn(&folder, 400, "tokenizer.json")]) {
        for documents in [Documents::File, Documents::Separator("<|endoftext|>".into())] {
            let sources = vec![shared.join("tinystories-2MiB.txt").to_str().unwrap().to_owned()];
            let data = DataConfig { sources, tokenizer: tokenizer.clone(), documents, held_out: Some(0.02), ..DataConfig::default() };
            let source = prepare(&folder, &data).unwrap();
            let (mut out, mut index, mut sum, mut count) = (Rows::default(), 0, 0, 0);
            let mut ratio = (f64::MAX, 0.0f64);
            while source.held_out(index, 3, 100, &mut out).unwrap() {
                let requested = out.labels.iter().filter(|&&label| label != -100).count();
                sum += out.bytes;
                count += requested as u64;
                if requested == 300 {
                    ratio = (ratio.0.min(out.bytes as f64 / 300.0), ratio.1.max(out.bytes as f64 / 300.0));
                }
                index += 1;
            }
            assert_eq!((sum, count), (source.held_out_bytes(), source.held_out_tokens()), "{tokenizer}");
            assert!(ratio.1 < 2.0 * ratio.0, "bytes per token are between {ratio:?} for {tokenizer}");
            let share = sum as f64 / source.tokens().manifest().bytes as f64;
            assert!((share - 0.02).abs() < 0.005, "{share} of the bytes of {tokenizer}");
        }
    }
}

#[test]
fn the_tokenizer_of_stories_encodes_its_prompt() {
    let Some(shared) = shared() else { return };
    let tokenizer = Tokenizer::open(shared.join("stories260K").to_str().unwrap(), None).unwrap();
    let text = std::fs::read_to_string(shared.join("stories260K/expected.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids: Vec<u32> = serde_json::from_value(expected["prompt_ids"].clone()).unwrap();
    let prompt = expected["prompt"].as_str().unwrap();
    assert_eq!(tokenizer.encode(prompt, true).unwrap(), ids);
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), prompt);
    assert_eq!((tokenizer.vocabulary(), tokenizer.end(), tokenizer.begins().unwrap()), (512, 2, true));
}

/// Pinned with Hugging Face's tokenizers 0.23.3: ids of the first 40 addresses, `</s>` after each, as an FNV-1a hash.
#[test]
fn llama_2_tokens_match_hugging_face() {
    let Some(shared) = shared() else { return };
    let folder = Folder::new();
    let text = std::fs::read_to_string(shared.join("sotu.txt")).unwrap();
    folder.write("t.txt", text.split_inclusive('\n').take(40).collect::<String>());
    let tokenizer = shared.join("llama2-tokenizer/tokenizer.json").to_str().unwrap().to_owned();
    let source = prepare(&folder, &DataConfig { tokenizer, documents: Documents::Line, ..config(&folder, "t.txt") }).unwrap();
    let mut tokens = vec![0; source.tokens().len() as usize];
    source.tokens().read(0, &mut tokens).unwrap();
    let hash = tokens.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &id| (hash ^ u64::from(id)).wrapping_mul(0x0000_0100_0000_01b3));
    assert_eq!((tokens.len(), hash), (405_198, 0x02bb_fc16_a0e6_5144));
}

#[test]
fn shakespeare_is_split_as_in_nanogpt() {
    let Some(shared) = shared() else { return };
    let folder = Folder::new();
    let sources = vec![shared.join("tinyshakespeare.txt").to_str().unwrap().to_owned()];
    let source = prepare(&folder, &DataConfig { sources, held_out: Some(0.1), ..DataConfig::default() }).unwrap();
    // 1,115,394 characters: nanoGPT trains on the first 1,003,854 and holds out 111,540. Here the end-of-document token is one more.
    assert_eq!((source.train_tokens(), source.held_out_tokens(), source.held_out_bytes()), (1_003_854, 111_541, 111_540));
}

#[test]
fn a_damaged_tokenizer_is_an_error_in_one_sentence() {
    let folder = Folder::new();
    let good = std::fs::read_to_string(learn(&folder, 300, "tokenizer.json")).unwrap();
    let open = |text: &str| Tokenizer::open(&folder.write("bad.json", text), None);
    let cut = |end: usize| Tokenizer::open(&folder.write("bad.json", &good.as_bytes()[..end]), None);
    let one_sentence = |error: String| {
        assert!(error.contains("bad.json") && error.lines().count() <= 3 && error.len() < 2000, "{error}");
        error
    };
    // Truncated within each of its components, including the decoder, on which the library panics.
    let ends: Vec<usize> =
        (1..60).map(|part| good.len() * part / 60).chain(good.match_indices("\"decoder\"").map(|(at, _)| at + 40)).collect();
    for end in ends {
        one_sentence(cut(end).unwrap_err().to_string());
    }
    // Components that the library does not know, or on which it panics.
    let mut value: serde_json::Value = serde_json::from_str(&good).unwrap();
    for part in ["decoder", "pre_tokenizer", "post_processor", "normalizer", "model"] {
        let before = value[part].take();
        for wrong in
            [serde_json::json!({"type": "Nonsense"}), serde_json::json!([1]), serde_json::json!({"type": 3}), serde_json::json!("x")]
        {
            value[part] = wrong;
            if let Err(error) = open(&value.to_string()) {
                one_sentence(error.to_string());
            }
        }
        value[part] = before;
    }
    // A template with an undefined token: detected at the first text.
    let template = serde_json::json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}});
    let before = std::mem::replace(&mut value["post_processor"], template);
    match open(&value.to_string()) {
        Ok(tokenizer) => one_sentence(tokenizer.encode("hi", true).unwrap_err().to_string()),
        Err(error) => one_sentence(error.to_string()),
    };
    value["post_processor"] = before;
    // Ids that would need memory for billions of tokens.
    for id in [u64::from(u32::MAX), 2_000_000_000, 1 << 24] {
        let mut huge = value.clone();
        huge["model"]["vocab"]["ü"] = id.into();
        assert!(one_sentence(open(&huge.to_string()).unwrap_err().to_string()).contains(&id.to_string()));
        let mut huge = value.clone();
        huge["added_tokens"][0]["id"] = id.into();
        assert!(one_sentence(open(&huge.to_string()).unwrap_err().to_string()).contains(&id.to_string()));
    }
    assert!(
        bpe::train(&config_of(&folder), &BpeConfig { vocabulary: 1 << 32, ..BpeConfig::default() }, Path::new("t.json"))
            .unwrap_err()
            .to_string()
            .contains("too large")
    );
    assert!(open(&value.to_string()).is_ok());
}

#[test]
fn tokenizers_with_explosive_replacements_are_rejected() {
    let folder = Folder::new();
    let path = learn(&folder, 300, "tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let with = |part: &str, value: serde_json::Value| {
        let mut tokenizer: serde_json::Value = serde_json::from_str(&text).unwrap();
        tokenizer[part] = value;
        Tokenizer::of_json("t.json", tokenizer.to_string().as_bytes(), None)
    };
    let replace =
        |pattern: serde_json::Value, content: &str| serde_json::json!({"type": "Replace", "pattern": pattern, "content": content});
    let sequence = |list: Vec<serde_json::Value>| serde_json::json!({"type": "Sequence", "normalizers": list});
    let word = |text: &str| serde_json::json!({"String": text});
    // Each alone is harmless; four of them make 10^8 bytes from one.
    let bomb = sequence(vec![replace(word("a"), &"a".repeat(100)); 4]);
    for refused in [bomb, replace(serde_json::json!({"Regex": "x*"}), &"y".repeat(300))] {
        let error = with("normalizer", refused).expect_err("refused").to_string();
        assert!(error.contains("t.json") && error.contains("by a factor of"), "{error}");
    }
    // As in tokenizers in use.
    let usual = sequence(vec![replace(word(" "), "▁"), replace(serde_json::json!({"Regex": " {2,}"}), " "), replace(word("``"), "\"")]);
    assert_eq!(with("normalizer", usual).unwrap().encode("e", false).unwrap().len(), 1);
}
