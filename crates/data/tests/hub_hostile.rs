//! A malicious hub: whatever it sends, nothing is written outside of the cache.
#![cfg(feature = "hub")]

mod support;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use support::*;
use termwise_data::{DataConfig, TextSource};

const CONTENT: &[u8] = b"these bytes come from the hub\n";

/// The responses of the hub.
#[derive(Clone)]
struct Answers {
    name: String,
    tag: String,
    commit: String,
    /// Maximum bytes of the content per response.
    most: usize,
    /// Bytes after the content.
    beyond: usize,
}

impl Default for Answers {
    fn default() -> Answers {
        Answers { name: "data/a.txt".into(), tag: "abc123".into(), commit: "c0ffee".into(), most: usize::MAX, beyond: 0 }
    }
}

fn answer(stream: TcpStream, answers: &Answers) -> Option<()> {
    let (line, from, to) = request(&stream)?;
    let mut out = stream;
    if line.contains("/api/") {
        let body = serde_json::json!({"siblings": [{"rfilename": answers.name}], "sha": answers.commit}).to_string();
        return write!(out, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len()).ok();
    }
    let content = [CONTENT, &vec![b'x'; answers.beyond]].concat();
    let end = content.len().min(to.saturating_add(1)).min(from.saturating_add(answers.most));
    let body = content.get(from..end).unwrap_or_default();
    let (tag, commit) = (&answers.tag, &answers.commit);
    write!(
        out,
        "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nConnection: close\r\nETag: \"{tag}\"\r\nX-Repo-Commit: {commit}\r\n\
         Content-Range: bytes {from}-{}/{}\r\n\r\n",
        body.len(),
        end.saturating_sub(1),
        CONTENT.len()
    )
    .ok()?;
    out.write_all(body).ok()
}

/// Every file below a directory.
fn files(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() { found.extend(files(&path)) } else { found.push(path.display().to_string()) }
    }
    found.sort();
    found
}

/// A single test, because it changes the environment of the process.
#[test]
fn a_malicious_hub_cannot_write_outside_of_the_cache() {
    let folder = Folder::new();
    let answers = Arc::new(Mutex::new(Answers::default()));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let served = answers.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let now = served.lock().expect("a lock").clone();
            let _ = answer(stream, &now);
        }
    });
    let ask = |now: Answers, home: &str| {
        *answers.lock().expect("a lock") = now;
        // SAFETY: this is the only test of its program; the server's thread does not read the environment.
        unsafe {
            std::env::set_var("HF_HOME", folder.path(home));
            std::env::set_var("HF_ENDPOINT", format!("http://{address}"));
            std::env::remove_var("HF_HUB_OFFLINE");
        }
        let config = DataConfig { sources: vec!["hf://datasets/o/n/**/*".into()], held_out: Some(0.0), ..DataConfig::default() };
        prepare(&folder, &config).map_err(|error| error.to_string())
    };
    let text = |source: TextSource| {
        let mut tokens = vec![0; source.tokens().len() as usize];
        source.tokens().read(0, &mut tokens).unwrap();
        source.tokenizer().decode(&tokens, true).unwrap().into_bytes()
    };
    // An honest hub, with full responses and with ten bytes at a time.
    assert_eq!(text(ask(Answers::default(), "home-a").unwrap()), CONTENT);
    assert_eq!(text(ask(Answers { most: 10, ..Answers::default() }, "home-b").unwrap()), CONTENT);
    let pointer = folder.path("home-b/hub/datasets--o--n/snapshots/c0ffee/data/a.txt");
    assert_eq!(std::fs::read(&pointer).unwrap(), CONTENT);
    assert_eq!(std::fs::read_to_string(folder.path("home-b/hub/datasets--o--n/refs/main")).unwrap(), "c0ffee");
    #[cfg(unix)]
    assert_eq!(std::fs::read_link(&pointer).unwrap(), Path::new("../../../blobs/abc123"));

    // Malicious ones; existing files must be unchanged.
    let victim = folder.write("victim.txt", "mine");
    let deep = format!("{}victim.txt", "../".repeat(5));
    let absolute = folder.path("victim.txt");
    let hostile = [
        Answers { tag: deep.clone(), ..Answers::default() },
        Answers { tag: absolute.clone(), ..Answers::default() },
        Answers { tag: "..".into(), ..Answers::default() },
        Answers { tag: "a/b".into(), ..Answers::default() },
        Answers { commit: "../../../../c".into(), ..Answers::default() },
        Answers { commit: folder.path("c"), ..Answers::default() },
        Answers { name: deep, ..Answers::default() },
        Answers { name: absolute, ..Answers::default() },
        Answers { name: "data/../../../../../x.txt".into(), ..Answers::default() },
    ];
    let before = files(Path::new(&folder.path("")));
    for (i, answers) in hostile.into_iter().enumerate() {
        let what = format!("{} {} {}", answers.name, answers.tag, answers.commit);
        let error = ask(answers, "home-c").map(|source| text(source).len()).expect_err(&what);
        assert!(
            error.contains("be outside") || error.contains("is not a valid name in the cache") || error.contains("no file"),
            "{i} {what}: {error}"
        );
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "mine", "{what}");
    }
    assert_eq!(files(Path::new(&folder.path(""))), before, "nothing was written anywhere");
    // More bytes than announced are rejected.
    let error = ask(Answers { beyond: 1000, ..Answers::default() }, "home-d").map(|source| text(source).len()).expect_err("too long");
    assert!(error.contains("the responses do not have the announced length"), "{error}");
    let kept = files(Path::new(&folder.path("home-d")));
    assert!(kept.iter().all(|path| !path.contains("/snapshots/") && !path.ends_with("/blobs/abc123")), "{kept:?}");
}
