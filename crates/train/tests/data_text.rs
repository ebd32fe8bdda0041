//! Text from files to batches.

mod data_support;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use data_support::*;
use proptest::prelude::*;
use termwise_train::data::{DataConfig, Documents, Layout, Prepare, Progress, Rows, Source, TextSource};

/// Documents `<0>`, `<1>`, … of different lengths, one a line.
fn numbered(count: usize) -> String {
    (0..count).map(|i| format!("<{i}>").repeat(1 + i % 7) + "\n").collect()
}

fn all_tokens(source: &TextSource) -> Vec<u32> {
    let mut tokens = vec![0; source.tokens().len() as usize];
    source.tokens().read(0, &mut tokens).unwrap();
    tokens
}

/// The labels that held-out batches ask for, in order, with the token before each; and the bytes of all batches.
fn asked(source: &TextSource, rows: usize, time: usize) -> (Vec<(u32, u32)>, u64) {
    let (mut pairs, mut bytes, mut out) = (Vec::new(), 0, Rows::default());
    let mut index = 0;
    while source.held_out(index, rows, time, &mut out).unwrap() {
        assert_eq!((out.ids.len(), out.labels.len()), (rows * time, rows * time));
        assert!(out.labels.iter().any(|&label| label != -100), "batch {index} asks for nothing");
        pairs.extend(out.ids.iter().zip(&out.labels).filter(|&(_, &label)| label != -100).map(|(&id, &label)| (id, label as u32)));
        bytes += out.bytes;
        index += 1;
    }
    assert!(!source.held_out(index + 5, rows, time, &mut out).unwrap());
    assert!(!source.held_out(u64::MAX, rows, time, &mut out).unwrap());
    (pairs, bytes)
}

#[test]
fn bytes_go_to_disk_and_back() {
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
fn a_file_named_twice_counts_once_and_order_is_that_of_the_sources() {
    let folder = Folder::new();
    folder.write("a.txt", "A");
    folder.write("b.txt", "B");
    let mut config = config(&folder, "");
    config.sources = vec![folder.path("b.txt"), folder.path("*.txt"), folder.path("")];
    assert_eq!(all_tokens(&prepare(&folder, &config).unwrap()), [66, 256, 65, 256]);
}

#[test]
fn text_files_are_cut_into_documents() {
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
        for ending in ["txt", "txt.gz", "txt.zst"] {
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
fn a_long_file_is_one_document_however_it_is_cut() {
    let folder = Folder::new();
    // Without a line break where the cut falls, with characters of two bytes across it; and with line breaks.
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
        assert!(files == one, "{threads} threads give other shards");
        assert_eq!(source.fingerprint(), first.fingerprint());
    }
    // Documents that begin in one shard and end in another, or exactly at its end.
    let (many, cut, source) = build(3, 1_000_003);
    assert!(many.len() > 10);
    assert!(cut == tokens, "cut into shards the tokens are others");
    for document in (0..source.tokens().documents()).step_by(997) {
        assert_eq!(source.tokens().document(document), first.tokens().document(document));
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
    assert!(!run(&|_| {}, &how), "built again");
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
    // No half-built folder is left behind.
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
        assert_eq!(asked(&source, rows, time), (expected.clone(), (text.len() - cut) as u64), "{rows} × {time}");
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

#[test]
fn an_epoch_asks_for_every_window_once_and_batches_are_pure() {
    let folder = Folder::new();
    // Every position has its own four letters.
    let text: String = (0..5000).map(|i| format!("{i:04}")).collect();
    folder.write("t.txt", &text);
    let source = prepare(&folder, &DataConfig { held_out: Some(0.0), ..config(&folder, "") }).unwrap();
    let (rows, time) = (4, 36);
    let windows = text.len() / time - 1;
    let mut out = Rows::default();
    for epoch in 0..2 {
        let mut starts = BTreeSet::new();
        for number in epoch * windows..(epoch + 1) * windows {
            source.train(5, (number / rows) as u64, rows, time, &mut out).unwrap();
            let row = number % rows;
            let (ids, labels) = (&out.ids[row * time..][..time], &out.labels[row * time..][..time]);
            assert!(ids[1..].iter().zip(labels).all(|(&id, &label)| id as i32 == label));
            let window: Vec<u8> = ids.iter().map(|&id| id as u8).chain([labels[time - 1] as u8]).collect();
            let start = (0..text.len()).find(|&i| text.as_bytes()[i..].starts_with(&window)).expect("a window of the text");
            assert!(starts.insert(start), "a window comes twice in epoch {epoch}");
        }
        assert!(starts.iter().zip(starts.iter().skip(1)).all(|(a, b)| b - a == time), "windows overlap or leave gaps");
    }
    let batch = |seed, index| {
        let mut out = Rows::default();
        source.train(seed, index, rows, time, &mut out).unwrap();
        out
    };
    assert_eq!(batch(1, 9), batch(1, 9));
    assert_ne!(batch(1, 9), batch(2, 9));
    assert_ne!(batch(1, 9), batch(1, 10));
    assert_eq!(batch(1, u64::MAX).bytes, (rows * time) as u64);
    let error = source.train(1, 0, 1, text.len() + 1, &mut out).unwrap_err().to_string();
    assert!(error.contains("20001 tokens") && error.contains("shorter rows"), "{error}");
}

#[test]
fn padded_rows_are_documents() {
    let folder = Folder::new();
    folder.write("t.txt", numbered(300));
    let config = DataConfig { documents: Documents::Line, layout: Layout::Padded, held_out: Some(0.2), ..config(&folder, "") };
    let source = prepare(&folder, &config).unwrap();
    let (rows, time) = (8, 12);
    let mut out = Rows::default();
    let check = |out: &Rows, row: usize| -> Option<String> {
        let (ids, labels) = (&out.ids[row * time..][..time], &out.labels[row * time..][..time]);
        let count = labels.iter().take_while(|&&label| label != -100).count();
        assert!(labels[count..].iter().all(|&label| label == -100));
        assert_eq!(out.lengths[row], count.max(1));
        if count == 0 {
            return None;
        }
        assert_eq!(ids[0], 256, "a row begins with the end of a document");
        assert!(ids[1..count].iter().zip(labels).all(|(&id, &label)| id as i32 == label));
        assert!(count == time || labels[count - 1] == 256, "a document that fits ends");
        Some(labels[..count].iter().take_while(|&&label| label != 256).map(|&label| label as u8 as char).collect())
    };
    let name = |text: &str| text[1..text.find('>').unwrap()].parse::<usize>().unwrap();
    let (mut trained, mut held) = (BTreeMap::new(), Vec::new());
    for index in 0..1000 {
        source.train(3, index, rows, time, &mut out).unwrap();
        let texts: Vec<String> = (0..rows).map(|row| check(&out, row).unwrap()).collect();
        assert_eq!(out.bytes, texts.iter().map(|text| text.len() as u64).sum::<u64>());
        texts.iter().for_each(|text| *trained.entry(name(text)).or_insert(0) += 1);
    }
    let mut index = 0;
    while source.held_out(index, rows, time, &mut out).unwrap() {
        let texts: Vec<String> = (0..rows).filter_map(|row| check(&out, row)).collect();
        assert_eq!(out.bytes, texts.iter().map(|text| text.len() as u64).sum::<u64>());
        held.extend(texts.iter().map(|text| name(text)));
        index += 1;
    }
    assert_eq!(held.len(), 60);
    assert!(held.is_sorted(), "held-out documents come in order, each once");
    assert!(held.iter().all(|document| !trained.contains_key(document)), "a document is trained on and held out");
    assert_eq!(trained.len() + held.len(), 300);
    assert!(*trained.values().max().unwrap() < 100, "some documents are drawn far too often");

    let error = prepare(&folder, &DataConfig { documents: Documents::File, ..config }).unwrap_err().to_string();
    assert!(error.contains("padded needs several documents"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Held out and trained on are disjoint, together everything; every held-out token is asked for once, after the token before it; copies stay
    /// on one side.
    #[test]
    fn documents_are_either_trained_on_or_held_out(
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
            // Copies of one document can be all there is on one side.
            Err(error) => {
                prop_assert!(error.to_string().contains("leaves nothing to train on"), "{error}");
                return Ok(());
            }
        };
        let (pairs, bytes) = asked(&source, rows, time);
        let held: Vec<u8> = pairs.iter().map(|&(_, label)| if label == 256 { b'|' } else { label as u8 }).collect();
        let held = String::from_utf8(held).unwrap();
        let held: Vec<&str> = held.split_terminator('|').collect();
        prop_assert!(pairs[0].0 == 256 && pairs.windows(2).all(|pair| pair[1].0 == pair[0].1));
        prop_assert_eq!(bytes, held.iter().map(|text| text.len() as u64).sum::<u64>());
        prop_assert_eq!(source.held_out_documents(), held.len());

        let mut out = Rows::default();
        let train = source.train_tokens() as usize;
        if train > 1 {
            // One window of everything but the last.
            source.train(0, 0, 1, train - 1, &mut out).unwrap();
            let mut train: Vec<u8> = out.ids.iter().map(|&id| if id == 256 { b'|' } else { id as u8 }).collect();
            prop_assert_eq!(out.labels[out.labels.len() - 1], 256);
            train.push(b'|');
            let train = String::from_utf8(train).unwrap();
            let train: Vec<&str> = train.split_terminator('|').collect();
            prop_assert!(train.iter().all(|text| !held.contains(text)), "{train:?} and {held:?} share a document");
            // In order, each document of the corpus is the next of one side.
            let (mut train, mut held) = (train.into_iter().peekable(), held.into_iter().peekable());
            for text in &texts {
                prop_assert!(train.next_if_eq(&text.as_str()).is_some() || held.next_if_eq(&text.as_str()).is_some());
            }
            prop_assert!(train.next().is_none() && held.next().is_none());
        }
    }
}
