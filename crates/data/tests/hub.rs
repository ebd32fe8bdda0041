//! Hub data sets from a cache on disk.
#![cfg(feature = "hub")]

mod support;

use support::*;
use termwise_data::{DataConfig, TextSource};

fn ask(folder: &Folder, source: &str) -> Result<TextSource, String> {
    let config = DataConfig { sources: vec![source.into()], held_out: Some(0.0), ..DataConfig::default() };
    prepare(folder, &config).map_err(|error| error.to_string())
}

/// A single test, because it changes the environment of the process.
#[test]
fn cached_data_sets_are_found_offline() {
    let folder = Folder::new();
    let home = folder.path("home");
    // SAFETY: this is the only test of its program, and no other thread reads the environment yet.
    unsafe {
        std::env::set_var("HF_HOME", &home);
        std::env::set_var("HF_HUB_OFFLINE", "1");
    }
    let place = "home/hub/datasets--owner--name";
    folder.write(&format!("{place}/refs/main"), "abc123");
    folder.write(&format!("{place}/refs/refs/convert/parquet"), "def456");
    folder.write(&format!("{place}/snapshots/abc123/data/b.jsonl"), "{\"text\":\"b\"}");
    folder.write(&format!("{place}/snapshots/abc123/data/a.jsonl"), "{\"text\":\"a\"}");
    folder.write(&format!("{place}/snapshots/abc123/data/more/c.jsonl"), "{\"text\":\"c\"}");
    folder.write(&format!("{place}/snapshots/abc123/README.md"), "no");
    folder.write(&format!("{place}/snapshots/def456/d.txt"), "d");
    let tokens = |source: &str| {
        let source = ask(&folder, source).unwrap();
        let mut tokens = vec![0; source.tokens().len() as usize];
        source.tokens().read(0, &mut tokens).unwrap();
        source.tokenizer().decode(&tokens, true).unwrap()
    };
    assert_eq!(tokens("hf://datasets/owner/name/data/*.jsonl"), "ab");
    assert_eq!(tokens("hf://datasets/owner/name/**/*.jsonl"), "abc");
    assert_eq!(tokens("hf://datasets/owner/name/data/b.jsonl"), "b");
    assert_eq!(tokens("hf://datasets/owner/name@refs%2Fconvert%2Fparquet/*.txt"), "d");
    assert_eq!(tokens("hf://datasets/owner/name@def456/*.txt"), "d");

    let error = ask(&folder, "hf://datasets/owner/name/*.parquet").unwrap_err();
    assert!(error.contains("HF_HUB_OFFLINE is set and the cache in") && error.contains("contains no matching file"), "{error}");
    let error = ask(&folder, "hf://datasets/owner/other/*.parquet").unwrap_err();
    assert!(error.contains("does not contain it; fetch it once without HF_HUB_OFFLINE"), "{error}");
    for wrong in ["hf://owner/name/*", "hf://datasets/name/*", "hf://datasets/../name/*", "hf://datasets/a/b@../x", "hf://datasets/a/b/"] {
        let error = ask(&folder, wrong).unwrap_err();
        assert!(error.contains("write it as hf://datasets/<owner>/<name>"), "{wrong}: {error}");
    }
    assert!(ask(&folder, "hf://datasets/a/b/[").unwrap_err().contains("not a valid glob"));
}
