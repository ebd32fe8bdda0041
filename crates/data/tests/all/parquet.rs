//! Parquet files as sources.
#![cfg(feature = "parquet")]

use crate::support;

use std::sync::Arc;

use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use support::*;
use termwise_data::{DataConfig, TextSource};

const SCHEMA: &str = "message m { required int32 id; optional binary text (UTF8); }";

/// A file with an id and a string per row, and a row group per slice.
fn parquet(compression: Compression, groups: &[Vec<Option<&[u8]>>]) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut file = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut file, schema, properties).unwrap();
    for group in groups {
        let mut rows = writer.next_row_group().unwrap();
        let mut column = rows.next_column().unwrap().unwrap();
        let ids: Vec<i32> = (0..group.len() as i32).collect();
        column.typed::<Int32Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        let mut column = rows.next_column().unwrap().unwrap();
        let levels: Vec<i16> = group.iter().map(|text| text.is_some().into()).collect();
        let texts: Vec<ByteArray> = group.iter().flatten().map(|&text| ByteArray::from(text.to_vec())).collect();
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&levels), None).unwrap();
        column.close().unwrap();
        rows.close().unwrap();
    }
    writer.close().unwrap();
    file
}

fn texts(source: &TextSource) -> Vec<String> {
    let mut tokens = vec![0; source.tokens().len() as usize];
    source.tokens().read(0, &mut tokens).unwrap();
    let text = source.tokenizer().decode(&tokens, false).unwrap();
    text.split_terminator("<|endoftext|>").map(str::to_owned).collect()
}

fn complaint(content: &[u8], field: &str) -> String {
    let folder = Folder::new();
    let path = folder.write("d.parquet", content);
    let error = prepare(&folder, &DataConfig { field: field.into(), ..config(&folder, "") }).unwrap_err().to_string();
    assert!(error.contains(&path), "{error}");
    error.replace(&path, "FILE")
}

#[test]
fn rows_are_documents() {
    let long: Vec<String> = (0..1000).map(|i| format!("Text {i} ") + &"ü".repeat(i % 50)).collect();
    let groups = [
        long[..700].iter().map(|text| Some(text.as_bytes())).collect::<Vec<_>>(),
        vec![Some(&b""[..])],
        long[700..].iter().map(|text| Some(text.as_bytes())).collect(),
    ];
    for compression in
        [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::ZSTD(ZstdLevel::default()), Compression::GZIP(Default::default())]
    {
        let folder = Folder::new();
        folder.write("d.parquet", parquet(compression, &groups));
        assert_eq!(texts(&prepare(&folder, &config(&folder, "")).unwrap()), long, "{compression}");
    }
}

#[test]
fn invalid_columns_are_reported() {
    let file = parquet(Compression::SNAPPY, &[vec![Some(b"a"), Some(b"b")]]);
    assert_eq!(complaint(&file, "body"), "source `FILE`: there is no column `body`; it has id, text");
    assert_eq!(complaint(&file, "id"), "source `FILE`: the column `id` contains INT32, not text");
}

#[test]
fn invalid_rows_are_reported() {
    let rows: Vec<Option<&[u8]>> = (0..100).map(|i| if i == 77 { None } else { Some(&b"a"[..]) }).collect();
    assert_eq!(complaint(&parquet(Compression::SNAPPY, &[rows]), "text"), "FILE, row 78: the row has no text (null)");
    let rows: Vec<Option<&[u8]>> = (0..100).map(|i| if i == 70 { Some(&b"a\xff"[..]) } else { Some(&b"a"[..]) }).collect();
    let file = parquet(Compression::SNAPPY, &[vec![Some(b"a")], rows]);
    assert_eq!(complaint(&file, "text"), "FILE, row 72: not UTF-8 at byte 1 of the text");
}

#[test]
fn truncated_files_are_reported() {
    let rows: Vec<Option<&[u8]>> = vec![Some(b"some text"); 50];
    let file = parquet(Compression::SNAPPY, &[rows.clone(), rows]);
    for cut in [0, 1, 7, 8, file.len() / 2, file.len() - 1] {
        let error = complaint(&file[..cut], "text");
        assert!(error.contains("not a readable parquet file"), "{cut}: {error}");
    }
}
