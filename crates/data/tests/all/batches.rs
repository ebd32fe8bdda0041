//! Training batches of text: windows in random order, and one document per row.

use crate::support;

use std::collections::{BTreeMap, BTreeSet};

use support::*;
use termwise_data::{DataConfig, Documents, Layout, Rows, Source};

#[test]
fn an_epoch_has_every_window_once_and_batches_are_pure() {
    let folder = Folder::new();
    // Every position has a unique sequence of four letters.
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
            assert!(starts.insert(start), "a window occurs twice in epoch {epoch}");
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
    assert!(error.contains("a row needs 20001") && error.contains("shorter rows"), "{error}");
}

#[test]
fn seed_and_epoch_determine_offset_and_order() {
    let folder = Folder::new();
    let text: String = (0..5000).map(|i| format!("{i:04}")).collect();
    folder.write("t.txt", &text);
    let source = prepare(&folder, &DataConfig { held_out: Some(0.0), ..config(&folder, "") }).unwrap();
    let time = 400;
    let windows = text.len() / time - 1;
    // The starts of the windows of an epoch, and their order.
    let epoch = |seed: u64, epoch: usize| {
        let mut out = Rows::default();
        let starts: Vec<usize> = (epoch * windows..(epoch + 1) * windows)
            .map(|number| {
                source.train(seed, number as u64, 1, time, &mut out).unwrap();
                let window: Vec<u8> = out.ids.iter().map(|&id| id as u8).collect();
                (0..text.len()).find(|&i| text.as_bytes()[i..].starts_with(&window)).unwrap()
            })
            .collect();
        let offset = *starts.iter().min().unwrap();
        (offset, starts.iter().map(|start| (start - offset) / time).collect::<Vec<_>>())
    };
    let (offset, order) = epoch(1, 0);
    for (other_offset, other_order) in [epoch(2, 0), epoch(1, 1), epoch(2, 1)] {
        assert_ne!(offset, other_offset);
        assert_ne!(order, other_order);
    }
}

#[test]
fn padded_rows_contain_one_document_each() {
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
    let drawn = |seed, index| {
        let mut out = Rows::default();
        source.train(seed, index, rows, time, &mut out).unwrap();
        out
    };
    assert_eq!(drawn(1, 4), drawn(1, 4));
    assert!(drawn(1, 4) != drawn(2, 4) && drawn(1, 4) != drawn(1, 5));
    assert!(*trained.values().max().unwrap() < 100, "some documents are drawn far too often");

    let error = prepare(&folder, &DataConfig { documents: Documents::File, ..config }).unwrap_err().to_string();
    assert!(error.contains("padded needs several documents"), "{error}");
}

#[test]
fn a_shard_truncated_while_in_use_is_an_error() {
    for layout in [Layout::Packed, Layout::Padded] {
        let folder = Folder::new();
        let lines: String = (0..4000).map(|i| format!("the theme of thesis {i}\n")).collect();
        folder.write("t.txt", &lines);
        let config = DataConfig { held_out: Some(0.1), documents: Documents::Line, layout, ..config(&folder, "") };
        let source = prepare(&folder, &config).unwrap();
        let mut out = Rows::default();
        source.train(1, 0, 2, 64, &mut out).unwrap();
        let cache = folder.path("cache");
        let shard = std::path::Path::new(&cache).join(shards(&cache).into_keys().next().unwrap());
        let file = std::fs::File::options().write(true).open(shard).unwrap();
        // No tokens and little of the table are left. With a memory map, the process would end with SIGBUS.
        file.set_len(8000).unwrap();
        for index in 0..200 {
            let error = source.train(1, index, 2, 64, &mut out).unwrap_err().to_string();
            assert!(error.contains("truncated while it was in use"), "{error}");
        }
    }
}
