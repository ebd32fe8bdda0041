//! Damaged files: an error or documents, never a panic, and bounded memory.
//!
//! The bound, measured by this program's allocator: reading never allocates more than 64 times the size of the file plus 8 MiB, mostly
//! buffers of readers and decompressors. In Parquet files a page states its size before it is decompressed, and the library
//! allocates that much: up to 1024 times the size of the file.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use proptest::prelude::*;
use support::*;
use termwise_data::sources::SourceFile;
use termwise_data::tokens::Tokens;
use termwise_data::{DataConfig, Documents, Prepare, TextSource};

/// Counts the allocations of a thread, and their peak.
struct Counting;

thread_local! {
    static NOW: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    // Threads that are ending have no counters.
    let _ = NOW.try_with(|now| {
        now.set(now.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now.get())));
    });
}

// SAFETY: all calls are forwarded to the system allocator; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's guarantees are forwarded.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's guarantees are forwarded.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Peak of the allocations of `run` on this thread.
fn peak<T>(run: impl FnOnce() -> T) -> (T, i64) {
    let before = NOW.get();
    PEAK.set(before);
    let value = run();
    (value, PEAK.get() - before)
}

fn check_peak(name: &str, file: usize, peak: i64) {
    let multiple = if name.ends_with(".parquet") { 64 + 1024 } else { 64 };
    let most = multiple * file as i64 + (8 << 20);
    assert!(peak <= most, "{name}: {peak} bytes allocated for a file of {file}");
}

/// A modification of a file.
#[derive(Clone, Debug)]
enum Damage {
    Flip(Vec<(prop::sample::Index, u8)>),
    Cut(prop::sample::Index),
    Overwrite(prop::sample::Index, Vec<u8>),
    Insert(prop::sample::Index, Vec<u8>),
    Replace(Vec<u8>),
}

fn damage() -> impl Strategy<Value = Damage> {
    let bytes = || prop::collection::vec(any::<u8>(), 1..40);
    prop_oneof![
        4 => prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 1..6).prop_map(Damage::Flip),
        2 => any::<prop::sample::Index>().prop_map(Damage::Cut),
        3 => (any::<prop::sample::Index>(), prop_oneof![bytes(), prop::collection::vec(Just(0xff), 1..9)]).prop_map(|(at, bytes)| Damage::Overwrite(at, bytes)),
        2 => (any::<prop::sample::Index>(), bytes()).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        1 => prop::collection::vec(any::<u8>(), 0..400).prop_map(Damage::Replace),
    ]
}

impl Damage {
    fn apply(&self, mut file: Vec<u8>) -> Vec<u8> {
        match self {
            Damage::Flip(flips) => flips.iter().for_each(|(at, bit)| {
                let at = at.index(file.len());
                file[at] ^= 1 << bit;
            }),
            Damage::Cut(at) => file.truncate(at.index(file.len())),
            Damage::Overwrite(at, bytes) => {
                let at = at.index(file.len());
                file.iter_mut().skip(at).zip(bytes).for_each(|(old, &new)| *old = new);
            }
            Damage::Insert(at, bytes) => {
                let at = at.index(file.len());
                file.splice(at..at, bytes.iter().copied());
            }
            Damage::Replace(bytes) => file.clone_from(bytes),
        }
        file
    }
}

/// Reads all documents of a damaged file, up to and including the first error.
fn read(name: &str, content: &[u8], documents: &Documents) {
    let folder = Folder::new();
    let file = SourceFile::new(folder.write(name, content)).unwrap();
    let read = Arc::new(AtomicU64::new(0));
    let ((), peak) = peak(|| {
        if let Ok(mut pieces) = file.documents(documents, "text", &read) {
            while let Some(Ok(_)) = pieces.next() {}
            assert!(pieces.next().is_none(), "documents after the end or an error");
        }
    });
    check_peak(name, content.len(), peak);
}

fn lines() -> Vec<u8> {
    (0..30)
        .map(|i| format!("{{\"id\": {i}, \"text\": \"Text \\u00e4 {i} ü\", \"more\": [1.5e3, null, {{\"a\": true}}]}}\n"))
        .collect::<String>()
        .into_bytes()
}

#[cfg(feature = "parquet")]
fn parquet(compression: parquet::basic::Compression) -> Vec<u8> {
    use parquet::data_type::{ByteArray, ByteArrayType};
    let schema = Arc::new(parquet::schema::parser::parse_message_type("message m { optional binary text (UTF8); }").unwrap());
    let properties = parquet::file::properties::WriterProperties::builder().set_compression(compression).build();
    let mut file = Vec::new();
    let mut writer = parquet::file::writer::SerializedFileWriter::new(&mut file, schema, Arc::new(properties)).unwrap();
    for group in 0..2 {
        let texts: Vec<ByteArray> = (0..20).map(|i| ByteArray::from(format!("Text {i} of {group}").as_str())).collect();
        let mut rows = writer.next_row_group().unwrap();
        let mut column = rows.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&[1; 20]), None).unwrap();
        column.close().unwrap();
        rows.close().unwrap();
    }
    writer.close().unwrap();
    file
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn text_and_json_lines_survive_damage(damage in damage(), kind in 0usize..3, rule in 0usize..4) {
        let names = readable(&["d.jsonl", "d.jsonl.gz", "d.jsonl.zst"]);
        let name = names[kind % names.len()];
        read(name, &damage.apply(compress(name, &lines())), &Documents::File);
        // Damage before compression reaches the parsers behind the checksums.
        read(name, &compress(name, &damage.apply(lines())), &Documents::File);
        let rule = [Documents::File, Documents::Line, Documents::BlankLine, Documents::Separator("\"}".into())][rule].clone();
        read("t.txt", &damage.apply(lines()), &rule);
    }

    #[test]
    fn shards_survive_damage(damage in damage(), verify in any::<bool>(), manifest in any::<bool>()) {
        let folder = Folder::new();
        folder.write("t.txt", "one\ntwo\nthree\nfour\n");
        let config = DataConfig { documents: Documents::Line, ..config(&folder, "") };
        let cache = folder.path("cache");
        TextSource::prepare(&config, Path::new(&cache), &Prepare::default()).unwrap();
        let shard = Path::new(&cache).join(shards(&cache).into_keys().next().unwrap());
        let path = if manifest { shard.with_file_name("dataset.json") } else { shard.clone() };
        let before = std::fs::read(&path).unwrap();
        let after = damage.apply(before.clone());
        std::fs::write(&path, &after).unwrap();
        let (opened, peak) = peak(|| Tokens::open(shard.parent().unwrap(), verify));
        check_peak("shard", after.len(), peak);
        if let Ok(tokens) = opened {
            prop_assert!(!verify || manifest || after == before, "damage is not noticed");
            let mut ids = vec![0; tokens.len() as usize];
            let _ = tokens.read(0, &mut ids);
            (0..tokens.documents()).for_each(|document| _ = tokens.document(document));
        }
        // A rebuild repairs any damage.
        TextSource::prepare(&config, Path::new(&cache), &Prepare { rebuild: true, ..Prepare::default() }).unwrap();
    }
}

#[cfg(feature = "parquet")]
proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn parquet_files_survive_damage(damage in damage(), kind in 0usize..3) {
        use parquet::basic::Compression;
        let compression = [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::ZSTD(Default::default())][kind];
        read("d.parquet", &damage.apply(parquet(compression)), &Documents::File);
    }
}

/// Rare in random tests: sizes with all bits set.
#[cfg(feature = "parquet")]
#[test]
fn parquet_files_with_large_sizes_anywhere_have_bounded_allocations() {
    let file = parquet(parquet::basic::Compression::SNAPPY);
    for at in 0..file.len() {
        for (cut, number) in [(1, &[0xfe, 0xff, 0xff, 0xff, 0x0f][..]), (2, &[0xfe, 0xff, 0xff, 0xff, 0x0f]), (1, &[0xfe, 0xff, 0x7f])] {
            let mut large = file.clone();
            large.splice(at..(at + cut).min(file.len()), number.iter().copied());
            // The length of the footer, if the insertion was in the footer.
            let end = large.len();
            let footer = u32::from_le_bytes(file[file.len() - 8..][..4].try_into().unwrap()) as usize;
            if at > file.len() - 8 - footer && at < file.len() - 8 {
                large[end - 8..][..4].copy_from_slice(&((footer + number.len() - cut) as u32).to_le_bytes());
            }
            read("d.parquet", &large, &Documents::File);
        }
    }
}
