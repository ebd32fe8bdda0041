//! Tokenization of text files, and the held-out split.

use crate::support;

use std::collections::BTreeSet;
use std::path::Path;

use proptest::prelude::*;
use support::*;
use termwise_data::{DataConfig, Documents, Layout, Prepare, Progress, Rows, Source, TextSource};

fn all_tokens(source: &TextSource) -> Vec<u32> {
    let mut tokens = vec![0; source.tokens().len() as usize];
    source.tokens().read(0, &mut tokens).unwrap();
    tokens
}

/// The labels of the held-out batches in order, with the token before each; and the bytes of all batches.
fn requested(source: &TextSource, rows: usize, time: usize) -> (Vec<(u32, u32)>, u64) {
    let (mut pairs, mut bytes, mut out) = (Vec::new(), 0, Rows::default());
    let mut index = 0;
    while source.held_out(index, rows, time, &mut out).unwrap() {
        assert_eq!((out.ids.len(), out.labels.len()), (rows * time, rows * time));
        assert!(out.labels.iter().any(|&label| label != -100), "batch {index} has no labels");
        pairs.extend(out.ids.iter().zip(&out.labels).filter(|&(_, &label)| label != -100).map(|(&id, &label)| (id, label as u32)));
        bytes += out.bytes;
        index += 1;
    }
    assert!(!source.held_out(index + 5, rows, time, &mut out).unwrap());
    assert!(!source.held_out(u64::MAX, rows, time, &mut out).unwrap());
    (pairs, bytes)
}

#[test]
fn byte_tokens_round_trip_through_shards() {
    let folder = Folder::new();
    folder.write("b.txt", "zwei\nZeilen");
    folder.write("a/x.txt", "eins");
    folder.write("a/.hidden.txt", "nein");
    folder.write("a/notes.md", "nein");
    folder.write("c.txt", "");
    folder.write("d.txt", "ä∂🙂");
    let source = prepare(&folder, &config(&folder, "")).unwrap();
    let expected: Vec<u32> = ["eins", "zwei\nZeilen", "ä∂🙂"].iter().flat_map(|text| text.bytes().map(u32::from).chain([256])).collect();
    assert_eq!(all_tokens(&source), expected);
    assert_eq!(source.tokenizer().decode(&expected, true).unwrap(), "einszwei\nZeilenä∂🙂");
    assert_eq!(source.tokenizer().decode(&expected[..6], false).unwrap(), "eins<|endoftext|>z");
    assert!(source.tokenizer().decode(&[257], true).is_err());
    assert_eq!(source.tokens().documents(), 3);
    assert_eq!(source.tokens().manifest().bytes, 4 + 11 + 9);
    assert_eq!(source.vocabulary(), 257);
}

#[test]
fn files_are_read_once_in_the_order_of_the_sources() {
    let folder = Folder::new();
    folder.write("a.txt", "A");
    folder.write("b.txt", "B");
    let mut config = config(&folder, "");
    config.sources = vec![folder.path("b.txt"), folder.path("*.txt"), folder.path("")];
    assert_eq!(all_tokens(&prepare(&folder, &config).unwrap()), [66, 256, 65, 256]);
}

#[test]
fn text_files_are_split_into_documents() {
    let cases: [(Documents, &str, &[&str]); 7] = [
        (Documents::File, "a\n\nb\n", &["a\n\nb\n"]),
        (Documents::File, "\u{feff}a", &["a"]),
        (Documents::Line, "\u{feff}a \r\n\n  \nb", &["a ", "b"]),
        (Documents::BlankLine, "\n\na\nb\n \n\n\nc\r\n\r\nd\n", &["a\nb", "c", "d"]),
        (Documents::Separator("<|end|>".into()), "a\n<|end|>\nb<|end|><|end|>c\n\nd\n<|end|>\n", &["a", "b", "c\n\nd"]),
        (Documents::Separator("\n--\n".into()), "a\n--\nb\n--\n--\nc", &["a", "b", "--\nc"]),
        (Documents::Separator("aa".into()), "xaaay", &["x", "ay"]),
    ];
    for (documents, text, expected) in cases {
        for ending in readable(&["txt", "txt.gz", "txt.zst"]) {
            let folder = Folder::new();
            folder.write_compressed(&format!("t.{ending}"), text.as_bytes());
            let config = DataConfig { documents: documents.clone(), held_out: Some(0.0), ..config(&folder, "") };
            let source = prepare(&folder, &config).unwrap();
            let found = source.tokenizer().decode(&all_tokens(&source), false).unwrap();
            let found: Vec<&str> = found.split_terminator("<|endoftext|>").collect();
            assert_eq!(found, expected, "{documents} of {text:?} in {ending}");
        }
    }
}

#[test]
fn a_long_file_in_pieces_is_one_document() {
    let folder = Folder::new();
    // Without a line break at the end of a piece, with characters of two bytes across it; and with line breaks.
    let text = "é".repeat(9 << 20) + &"Zeile\n".repeat(3 << 20);
    folder.write("t.txt", &text);
    let source = prepare(&folder, &config(&folder, "")).unwrap();
    assert_eq!(source.tokens().documents(), 1);
    assert!(all_tokens(&source).iter().map(|&id| id as u8).take(text.len()).eq(text.bytes()));
    assert_eq!(source.tokens().len(), text.len() as u64 + 1);
}

#[test]
fn shards_are_the_same_for_any_number_of_threads() {
    let folder = Folder::new();
    let text: String = (0..400_000u64).map(|i| format!("{} {}\n", i * i % 7919, "x".repeat((i % 60) as usize))).collect();
    folder.write("t.txt", &text);
    folder.write("u.txt", numbered(1000));
    let config = DataConfig { documents: Documents::Line, ..config(&folder, "") };
    let build = |threads: usize, shard_tokens: usize| {
        let cache = folder.path(&format!("cache-{threads}-{shard_tokens}"));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let source =
            pool.install(|| TextSource::prepare(&config, Path::new(&cache), &Prepare { shard_tokens, ..Prepare::default() }).unwrap());
        (shards(&cache), all_tokens(&source), source)
    };
    let (one, tokens, first) = build(1, 1 << 26);
    assert_eq!(one.len(), 1);
    for threads in [2, 5] {
        let (files, _, source) = build(threads, 1 << 26);
        assert!(files == one, "{threads} threads give different shards");
        assert_eq!(source.fingerprint(), first.fingerprint());
    }
    // Documents that begin in one shard and end in another, or exactly at its end.
    let (many, cut, source) = build(3, 1_000_003);
    assert!(many.len() > 10);
    assert!(cut == tokens, "smaller shards change the tokens");
    for document in (0..source.tokens().documents()).step_by(997) {
        assert_eq!(source.tokens().document(document).unwrap(), first.tokens().document(document).unwrap());
    }
}

#[test]
fn tokens_are_reused_until_something_changes() {
    let folder = Folder::new();
    folder.write("t.txt", numbered(100));
    let mut config = DataConfig { documents: Documents::Line, ..config(&folder, "") };
    let built = std::cell::Cell::new(0);
    let count = |_: &Progress| built.set(built.get() + 1);
    let how = Prepare { progress: &count, ..Prepare::default() };
    let mut run = |change: &dyn Fn(&mut DataConfig), how: &Prepare| {
        change(&mut config);
        built.set(0);
        TextSource::prepare(&config, Path::new(&folder.path("cache")), how).unwrap();
        built.get() > 0
    };
    assert!(run(&|_| {}, &how));
    let before = shards(&folder.path("cache"));
    let written =
        || std::fs::metadata(std::fs::read_dir(folder.path("cache")).unwrap().next().unwrap().unwrap().path()).unwrap().modified().unwrap();
    let time = written();
    assert!(!run(&|_| {}, &how), "rebuilt");
    assert_eq!((written(), shards(&folder.path("cache"))), (time, before));
    assert!(!run(&|config| config.held_out = Some(0.5), &how), "the split costs a rebuild");
    assert!(!run(&|config| config.layout = Layout::Padded, &how), "the layout costs a rebuild");
    assert!(run(&|_| {}, &Prepare { rebuild: true, ..how }));
    assert!(run(&|config| config.documents = Documents::Separator("<5>".into()), &how), "other documents are not noticed");
    folder.write("u.txt", "more");
    assert!(run(&|_| {}, &how), "a new file is not noticed");
    folder.write("u.txt", "else");
    let file = std::fs::File::options().write(true).open(folder.path("u.txt")).unwrap();
    file.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(2)).unwrap();
    assert!(run(&|_| {}, &how), "a change of equal length is not noticed");
    // No incomplete directory is left.
    let names = std::fs::read_dir(folder.path("cache")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().starts_with('.')));
}

#[test]
fn the_end_of_a_single_document_is_held_out() {
    let folder = Folder::new();
    let text: String = (0..1000).map(|i| format!("{i} ")).collect();
    folder.write("t.txt", &text);
    let source = prepare(&folder, &DataConfig { held_out: Some(0.1), ..config(&folder, "") }).unwrap();
    let cut = text.len() * 9 / 10;
    assert_eq!((source.train_tokens(), source.held_out_tokens()), (cut as u64, (text.len() - cut + 1) as u64));
    let expected: Vec<(u32, u32)> =
        (cut..=text.len()).map(|i| (text.as_bytes()[i - 1].into(), text.as_bytes().get(i).map_or(256, |&b| b.into()))).collect();
    for (rows, time) in [(1, 1), (3, 7), (2, 64), (5, 1000)] {
        assert_eq!(requested(&source, rows, time), (expected.clone(), (text.len() - cut) as u64), "{rows} × {time}");
    }
}

#[test]
fn shares_are_of_documents_and_at_least_one() {
    let share = |count: usize, share: Option<f64>| {
        let folder = Folder::new();
        folder.write("t.txt", numbered(count));
        let source = prepare(&folder, &DataConfig { documents: Documents::Line, held_out: share, ..config(&folder, "") }).unwrap();
        source.held_out_documents()
    };
    assert_eq!(share(100, Some(0.0)), 0);
    assert_eq!(share(100, Some(0.001)), 1);
    assert_eq!(share(100, Some(0.25)), 25);
    assert_eq!(share(100, None), 10);
    assert_eq!(share(20_000, None), 20);
    assert_eq!(share(2, Some(0.99)), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// The splits are disjoint and together complete. Every held-out token is a label once, after the token before it. Copies are
    /// in the same split.
    #[test]
    fn documents_are_either_for_training_or_held_out(
        texts in prop::collection::vec("[a-e]{1,6}", 2..40),
        share in 0.01f64..0.9,
        seed in any::<u64>(),
        rows in 1usize..4,
        time in 1usize..50,
        shard_tokens in 1usize..40,
    ) {
        prop_assume!(texts.iter().collect::<BTreeSet<_>>().len() > 1);
        let folder = Folder::new();
        folder.write("t.txt", texts.join("\n"));
        let config = DataConfig { documents: Documents::Line, held_out: Some(share), split_seed: seed, ..config(&folder, "") };
        let how = Prepare { shard_tokens, ..Prepare::default() };
        let source = match TextSource::prepare(&config, Path::new(&folder.path("cache")), &how) {
            Ok(source) => source,
            // One split may consist of copies of one document only.
            Err(error) => {
                prop_assert!(error.to_string().contains("leaves no training data"), "{error}");
                return Ok(());
            }
        };
        let (pairs, bytes) = requested(&source, rows, time);
        let held: Vec<u8> = pairs.iter().map(|&(_, label)| if label == 256 { b'|' } else { label as u8 }).collect();
        let held = String::from_utf8(held).unwrap();
        let held: Vec<&str> = held.split_terminator('|').collect();
        prop_assert!(pairs[0].0 == 256 && pairs.windows(2).all(|pair| pair[1].0 == pair[0].1));
        prop_assert_eq!(bytes, held.iter().map(|text| text.len() as u64).sum::<u64>());
        prop_assert_eq!(source.held_out_documents(), held.len());

        let mut out = Rows::default();
        let train = source.train_tokens() as usize;
        if train > 1 {
            // One window of everything except the last token.
            source.train(0, 0, 1, train - 1, &mut out).unwrap();
            let mut train: Vec<u8> = out.ids.iter().map(|&id| if id == 256 { b'|' } else { id as u8 }).collect();
            prop_assert_eq!(out.labels[out.labels.len() - 1], 256);
            train.push(b'|');
            let train = String::from_utf8(train).unwrap();
            let train: Vec<&str> = train.split_terminator('|').collect();
            prop_assert!(train.iter().all(|text| !held.contains(text)), "{train:?} and {held:?} share a document");
            // In order, each document of the corpus is the next of one split.
            let (mut train, mut held) = (train.into_iter().peekable(), held.into_iter().peekable());
            for text in &texts {
                prop_assert!(train.next_if_eq(&text.as_str()).is_some() || held.next_if_eq(&text.as_str()).is_some());
            }
            prop_assert!(train.next().is_none() && held.next().is_none());
        }
    }
}

#[test]
fn directories_of_killed_builders_are_removed_and_active_ones_kept() {
    let folder = Folder::new();
    folder.write("a.txt", numbered(50));
    let left = |name: &str| {
        let place = std::path::PathBuf::from(folder.path("cache")).join(name);
        std::fs::create_dir_all(&place).unwrap();
        std::fs::write(place.join("shard"), "x").unwrap();
        place
    };
    let (dead, busy, early) = (left(".building-dead"), left(".building-busy"), left(".building-early"));
    // A killed builder has released its lock, an active one has it, and one without a lock file may be about to publish.
    std::fs::write(dead.join(".lock"), "").unwrap();
    let lock = std::fs::File::create(busy.join(".lock")).unwrap();
    lock.lock().unwrap();
    prepare(&folder, &config(&folder, "")).unwrap();
    assert!(!dead.exists() && busy.exists() && early.exists());
    let building = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with(".building-");
    assert_eq!(
        std::fs::read_dir(folder.path("cache")).unwrap().filter(|entry| building(entry.as_ref().unwrap())).count(),
        2,
        "its own is gone"
    );
    drop(lock);
    folder.write("b.txt", numbered(51));
    prepare(&folder, &config(&folder, "")).unwrap();
    assert!(!busy.exists());
    let published: Vec<_> = std::fs::read_dir(folder.path("cache"))
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().is_dir() && !building(entry))
        .collect();
    assert!(published.len() == 2 && published.iter().all(|entry| !entry.path().join(".lock").exists()));
}
