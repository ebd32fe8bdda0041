//! Invalid sources and their error messages.

use crate::support;

use support::*;
use termwise_data::{DataConfig, Documents, TextSource};

/// The text of all documents.
fn texts(source: &TextSource) -> Vec<String> {
    let mut tokens = vec![0; source.tokens().len() as usize];
    source.tokens().read(0, &mut tokens).unwrap();
    let text = source.tokenizer().decode(&tokens, false).unwrap();
    text.split_terminator("<|endoftext|>").map(str::to_owned).collect()
}

/// The error if the file `name` with this content is the source. It must name the file.
fn complaint(name: &str, content: impl AsRef<[u8]>, change: impl Fn(&mut DataConfig)) -> String {
    let folder = Folder::new();
    let path = folder.write(name, content);
    let mut config = config(&folder, name);
    change(&mut config);
    let error = prepare(&folder, &config).unwrap_err().to_string();
    assert!(error.contains(&path), "{error} does not name {path}");
    let cache = std::fs::read_dir(folder.path("cache")).map_or(0, |entries| entries.count());
    assert_eq!(cache, 0, "something is left in the cache");
    error.replace(&path, "FILE")
}

#[test]
fn json_lines_with_any_line_ending_and_compression() {
    let lines = "\u{feff}{\"text\": \"ein\\u00e4\\n\", \"n\": [1, {\"text\": 2}]}\n\n{\"id\":7,\"text\":\"\"}\r\n{\"\\u0074ext\":\"zwei\"}";
    for name in readable(&["d.jsonl", "d.ndjson", "d.json", "d.jsonl.gz", "d.json.zst", "D.JSONL.GZ"]) {
        let folder = Folder::new();
        folder.write_compressed(&name.to_lowercase(), lines.as_bytes());
        if name.starts_with('D') {
            std::fs::rename(folder.path(&name.to_lowercase()), folder.path(name)).unwrap();
        }
        let source = prepare(&folder, &config(&folder, name)).unwrap();
        assert_eq!(texts(&source), ["einä\n", "zwei"], "{name}");
    }
}

#[test]
fn the_field_can_be_chosen() {
    let folder = Folder::new();
    folder.write("d.jsonl", "{\"text\": 1, \"body\": \"a\"}\n");
    folder.write("e.jsonl", "{\"body\": \"b\"}\n");
    let source = prepare(&folder, &DataConfig { field: "body".into(), held_out: Some(0.0), ..config(&folder, "") }).unwrap();
    assert_eq!(texts(&source), ["a", "b"]);
}

#[test]
fn invalid_json_lines_are_reported() {
    let case = |lines: &str| complaint("d.jsonl", lines, |_| {});
    assert_eq!(case("{\"text\":\"a\"}\n{\"text\":\"b}\n"), "FILE, line 2: EOF while parsing a string, column 11");
    assert_eq!(
        case("{\"text\":\"a\"}\n\n{\"body\":\"b\"}\n"),
        "FILE, line 3: the object has no field `text`; name the one that contains the text"
    );
    assert!(case("[{\"text\":\"a\"}]").contains("line 1: invalid type: sequence, expected one JSON object per line"));
    assert!(case("{\"text\":5}").contains("line 1: invalid type: integer `5`, expected text in the field `text`"));
    assert!(case("{\"text\":null}").contains("line 1: invalid type: null, expected text in the field `text`"));
    assert!(case("{\"text\":\"a\",\"text\":\"b\"}").contains("line 1: the field `text` occurs twice"));
    assert!(case("{\"text\":\"a\"} {}").contains("line 1: trailing characters"));
    assert!(case("{\n \"text\": \"a\"\n}\n").contains("line 1: EOF"));
    assert!(case(&format!("{{\"text\":{}", "[".repeat(100_000))).contains("line 1: "));
    assert!(case(&format!("{{\"x\":{}", "[".repeat(100_000))).contains("line 1: "));
    assert!(complaint("d.jsonl", b"{\"text\":\"a\"}\n{\"x\":\"\xff\",\"text\":\"b\"}", |_| {}).contains("line 2: not UTF-8: byte 0xff"));
}

#[test]
fn invalid_utf8_is_reported() {
    let content = b"eins\nzwei\ndr\xe4i\n";
    assert!(complaint("t.txt", content, |_| {}).contains("FILE, line 3: not UTF-8: byte 0xe4; convert the file to UTF-8"));
    for documents in [Documents::Line, Documents::BlankLine, Documents::Separator("--".into())] {
        let error = complaint("t.txt", content, |config| config.documents = documents.clone());
        assert!(error.contains("FILE, line 3: not UTF-8"), "{documents}: {error}");
    }
    // Truncated within a character.
    assert!(complaint("t.txt", &"aé".as_bytes()[..2], |_| {}).contains("line 1: not UTF-8"));
}

#[test]
fn truncated_files_are_reported() {
    let lines: String = (0..50_000).map(|i| format!("{{\"text\":\"{}\"}}\n", i * 7919 % 10007)).collect();
    for name in readable(&["d.jsonl.gz", "d.jsonl.zst", "t.txt.gz", "t.txt.zst"]) {
        let whole = compress(name, lines.as_bytes());
        for cut in [whole.len() / 2, whole.len() - 1] {
            let error = complaint(name, &whole[..cut], |_| {});
            assert!(error.contains("line ") && error.contains("ends too early"), "{name} at {cut}: {error}");
        }
    }
    assert!(complaint("d.jsonl.gz", "{\"text\":\"a\"}\n", |_| {}).contains("line 1: cannot be read"));
    if cfg!(feature = "zstd") {
        assert!(complaint("d.jsonl.zst", "{\"text\":\"a\"}\n", |_| {}).contains("line 1: cannot be read"));
    }
    let mut damaged = compress("d.gz", lines.as_bytes());
    let middle = damaged.len() - 6;
    damaged[middle] ^= 1;
    assert!(complaint("d.jsonl.gz", damaged, |_| {}).contains("cannot be read"), "the checksum is not verified");
}

#[test]
fn missing_sources_are_reported() {
    let folder = Folder::new();
    folder.write("x.bin", "?");
    let case = |sources: &[&str]| {
        let sources = sources.iter().map(|name| folder.path(name)).collect();
        prepare(&folder, &DataConfig { sources, ..DataConfig::default() }).unwrap_err().to_string()
    };
    assert!(case(&[]).contains("`sources` is empty"));
    assert!(case(&["no.txt"]).contains("no.txt`: no such file or directory"));
    assert!(case(&["*.txt"]).contains("*.txt`: no file matches"));
    assert!(case(&["[.txt"]).contains("not a valid glob"));
    assert!(case(&["x.bin"]).contains("its file extension is unknown; supported are .txt"));
    assert!(case(&[""]).contains("the directory contains no file that ends in .txt"));
    folder.write("blank.txt", "");
    folder.write("blank.jsonl", "\n \n{\"text\":\"\"}\n");
    assert!(case(&["blank.txt", "blank.jsonl"]).contains("it contains no text"));
}

#[test]
fn circular_links_are_not_followed_twice() {
    let folder = Folder::new();
    folder.write("a/t.txt", "text");
    #[cfg(unix)]
    std::os::unix::fs::symlink(folder.path(""), folder.path("a/again")).unwrap();
    assert_eq!(texts(&prepare(&folder, &config(&folder, "")).unwrap()), ["text"]);
}

#[test]
fn invalid_settings_are_reported() {
    let folder = Folder::new();
    folder.write("t.txt", "text");
    let case = |change: &dyn Fn(&mut DataConfig)| {
        let mut config = config(&folder, "");
        change(&mut config);
        prepare(&folder, &config).unwrap_err().to_string()
    };
    for share in [-0.1, 1.0, f64::NAN, f64::INFINITY] {
        assert_eq!(case(&|config| config.held_out = Some(share)), "data: `held_out` must be at least 0 and below 1");
    }
    assert!(case(&|config| config.held_out = Some(0.9)).contains("leaves no training data"));
    assert!(case(&|config| config.field.clear()).contains("`field` is empty"));
    assert!(case(&|config| config.documents = Documents::Separator(String::new())).contains("empty separator"));
    assert!(case(&|config| config.tokenizer = folder.path("t.txt")).contains("not a tokenizer.json"));
    assert!(case(&|config| config.tokenizer = folder.path("none.json")).contains("none.json"));
    assert!(case(&|config| config.end_of_document = Some("</s>".into())).contains("remove `end_of_document`"));
}

#[test]
fn settings_round_trip_through_toml() {
    let text = "sources = [\"a.txt\"]\ntokenizer = \"bytes\"\nspecial_tokens = true\nfield = \"text\"\nsplit_seed = 0\nlayout = \"padded\"\nheld_out = 0.1\n\n[documents]\nseparator = \"--\"\n";
    let config: DataConfig = toml::from_str(text).unwrap();
    assert_eq!((config.held_out, &config.documents), (Some(0.1), &Documents::Separator("--".into())));
    let again: DataConfig = toml::from_str(&toml::to_string(&config).unwrap()).unwrap();
    assert_eq!(again, config);
    let short: DataConfig = toml::from_str("sources = [\"a\"]\ndocuments = \"blank-line\"").unwrap();
    assert_eq!(short, DataConfig { sources: vec!["a".into()], documents: Documents::BlankLine, ..DataConfig::default() });
    assert!(toml::from_str::<DataConfig>("source = [\"a\"]").unwrap_err().to_string().contains("unknown field `source`"));
    for documents in [Documents::File, Documents::Line, Documents::BlankLine, Documents::Separator("a:b".into())] {
        assert_eq!(documents.to_string().parse(), Ok(documents));
    }
    assert!("separator:".parse::<Documents>().is_err());
}

#[test]
fn an_intact_shard_of_other_text_is_rejected() {
    let folder = Folder::new();
    let config = DataConfig { documents: Documents::Line, ..config(&folder, "") };
    let time = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    // Same length and modification time, so all checks before building agree.
    let build = |text: &str, cache: &str| {
        let path = folder.write("t.txt", text);
        std::fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
        let cache = folder.path(cache);
        let opened = TextSource::prepare(&config, std::path::Path::new(&cache), &Default::default());
        (std::path::Path::new(&cache).join(shards(&cache).into_keys().next().unwrap()), opened.map(|_| ()))
    };
    let (one, _) = build("one\ntwo\n", "cache-one");
    let (other, _) = build("six\nten\n", "cache-other");
    assert_eq!(one.parent().unwrap().file_name(), other.parent().unwrap().file_name());
    std::fs::copy(&other, &one).unwrap();
    let error = build("one\ntwo\n", "cache-one").1.unwrap_err().to_string();
    assert!(error.contains("not the shard listed in dataset.json"), "{error}");
}

#[test]
fn tokens_beyond_the_vocabulary_are_rejected_without_verification() {
    use termwise_data::tokens::Tokens;
    let folder = Folder::new();
    folder.write("t.txt", "one\ntwo\n");
    let config = DataConfig { documents: Documents::Line, ..config(&folder, "") };
    prepare(&folder, &config).unwrap();
    let cache = folder.path("cache");
    let path = std::path::Path::new(&cache).join(shards(&cache).into_keys().next().unwrap());
    let whole = std::fs::read(&path).unwrap();
    let read = |last: u16| {
        let mut changed = whole.clone();
        let end = changed.len();
        changed[end - 2..].copy_from_slice(&last.to_le_bytes());
        std::fs::write(&path, changed).unwrap();
        let tokens = Tokens::open(path.parent().unwrap(), false).unwrap();
        let mut ids = vec![0; tokens.len() as usize];
        tokens.read(0, &mut ids).map_err(|error| error.to_string())
    };
    assert_eq!(read(256), Ok(()));
    for last in [257, u16::MAX] {
        let error = read(last).unwrap_err();
        assert!(error.contains(&format!("token 7 is {last}, the vocabulary has 257")), "{error}");
    }
}

#[test]
fn damaged_tokens_are_rejected_and_rebuilt() {
    use std::path::Path;
    use termwise_data::Prepare;
    let folder = Folder::new();
    folder.write("t.txt", "one\ntwo\nthree\nfour\n");
    let config = DataConfig { documents: Documents::Line, ..config(&folder, "") };
    let cache = folder.path("cache");
    let open = |rebuild| TextSource::prepare(&config, Path::new(&cache), &Prepare { rebuild, ..Prepare::default() });
    open(false).unwrap();
    let name = shards(&cache).into_keys().next().unwrap();
    let path = Path::new(&cache).join(name);
    let whole = std::fs::read(&path).unwrap();
    let refused = |content: &[u8]| {
        std::fs::write(&path, content).unwrap();
        let error = open(false).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()) && error.contains("rebuild it with --rebuild"), "{error}");
    };
    for byte in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[byte] ^= 1 << (byte % 8);
        refused(&damaged);
    }
    for length in 1..whole.len() {
        refused(&whole[..length]);
    }
    refused(&[&whole[..], b"\0"].concat());
    refused(&[]);
    open(true).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), whole);

    let manifest = path.with_file_name("dataset.json");
    std::fs::write(&manifest, "{").unwrap();
    assert!(open(false).unwrap_err().to_string().contains("dataset.json"));
    open(true).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(open(false).unwrap_err().to_string().contains("tokens-00000.bin"));
    // A directory without a manifest is not a data set and is rebuilt.
    std::fs::remove_file(&manifest).unwrap();
    open(false).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), whole);
}
