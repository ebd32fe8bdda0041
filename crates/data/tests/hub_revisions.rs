//! A data set that changes on the hub: all files are read from one revision.
#![cfg(feature = "hub")]

mod support;

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use support::*;
use termwise_data::DataConfig;

/// A commit and its files.
#[derive(Clone, Default)]
struct Revision {
    commit: String,
    files: BTreeMap<String, String>,
    /// Each response is of another commit.
    restless: bool,
}

fn answer(stream: TcpStream, now: &Mutex<Revision>) -> Option<()> {
    let (line, from, to) = request(&stream)?;
    let mut out = stream;
    let mut now = now.lock().ok()?;
    if now.restless {
        now.commit.push('0');
    }
    if line.contains("/api/") {
        let siblings: Vec<serde_json::Value> = now.files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        let body = serde_json::json!({"siblings": siblings, "sha": now.commit}).to_string();
        return write!(out, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len()).ok();
    }
    let (name, content) = now.files.iter().find(|(name, _)| line.contains(&format!("/resolve/main/{name}")))?;
    let body = content.as_bytes().get(from..content.len().min(to.saturating_add(1))).unwrap_or_default();
    write!(
        out,
        "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nConnection: close\r\nETag: \"{}-{}\"\r\nX-Repo-Commit: {}\r\nContent-Range: bytes {from}-{}/{}\r\n\r\n",
        body.len(),
        name.replace(['/', '.'], "-"),
        content.trim().replace(' ', "-"),
        now.commit,
        from + body.len().saturating_sub(1),
        content.len()
    )
    .ok()?;
    out.write_all(body).ok()
}

/// A single test, because it changes the environment of the process.
#[test]
fn files_of_a_data_set_belong_to_one_revision() {
    let folder = Folder::new();
    let now = Arc::new(Mutex::new(Revision::default()));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let served = now.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = answer(stream, &served);
        }
    });
    // SAFETY: this is the only test of its program; the server's thread does not read the environment.
    unsafe {
        std::env::set_var("HF_HOME", folder.path("home"));
        std::env::set_var("HF_ENDPOINT", format!("http://{address}"));
        std::env::remove_var("HF_HUB_OFFLINE");
    }
    let ask = |commit: &str, files: &[(&str, &str)], restless: bool| {
        let files = files.iter().map(|(name, text)| (format!("data/{name}.txt"), format!("{text}\n"))).collect();
        *now.lock().expect("a lock") = Revision { commit: commit.into(), files, restless };
        let config = DataConfig { sources: vec!["hf://datasets/o/n/**/*".into()], held_out: Some(0.0), ..DataConfig::default() };
        let source = prepare(&folder, &config).map_err(|error| error.to_string())?;
        let mut tokens = vec![0; source.tokens().len() as usize];
        source.tokens().read(0, &mut tokens).unwrap();
        Ok::<_, String>(source.tokenizer().decode(&tokens, true).unwrap())
    };
    assert_eq!(ask("c1", &[("a", "old a")], false).unwrap(), "old a\n");
    // A file is added, and the cached one has changed.
    assert_eq!(ask("c2", &[("a", "new a"), ("b", "new b")], false).unwrap(), "new a\nnew b\n");
    assert_eq!(ask("c2", &[("a", "new a"), ("b", "new b")], false).unwrap(), "new a\nnew b\n");
    // A hub that changes constantly is reported.
    let error = ask("c3", &[("a", "x"), ("b", "y"), ("c", "z")], true).unwrap_err();
    assert!(error.contains("changed while it was fetched"), "{error}");
}
