//! Hub models from a local server and from the cache.
#![cfg(feature = "hub")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use termwise_data::hub::folder;
use termwise_model::weights::WriteOptions;
use termwise_model::{Config, Model};

type Files = BTreeMap<String, Vec<u8>>;

/// A hub with two repositories at commit `c0ffee`, which records its requests.
#[derive(Clone, Default)]
struct Hub {
    repos: Arc<BTreeMap<String, Files>>,
    requested: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    fn serve(self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let hub = self.clone();
                std::thread::spawn(move || hub.answer(stream));
            }
        });
        format!("http://{address}")
    }

    fn answer(&self, stream: TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream.try_clone().ok()?);
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let path = line.split_whitespace().nth(1)?.to_owned();
        let mut range = None;
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).ok()?;
            if header.trim().is_empty() {
                break;
            }
            if let Some(bytes) = header.to_lowercase().trim().strip_prefix("range: bytes=") {
                let (from, to) = bytes.split_once('-')?;
                range = Some((from.parse::<usize>().ok()?, to.parse::<usize>().ok()));
            }
        }
        self.requested.lock().ok()?.push(path.clone());
        let (status, headers, body) = self.respond(&path, range);
        let mut out = stream;
        let length = body.len();
        write!(out, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n").ok()?;
        out.write_all(&body).ok()
    }

    fn respond(&self, path: &str, range: Option<(usize, Option<usize>)>) -> (&'static str, String, Vec<u8>) {
        for (name, files) in self.repos.iter() {
            if path == format!("/api/models/{name}/revision/main") {
                let siblings: Vec<serde_json::Value> = files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
                return ("200 OK", String::new(), serde_json::json!({"siblings": siblings, "sha": "c0ffee"}).to_string().into_bytes());
            }
            let file = path.strip_prefix(&format!("/{name}/resolve/main/"));
            if let Some(bytes) = file.and_then(|file| files.get(file)) {
                let (from, to) = range.map_or((0, None), |range| range);
                let to = to.unwrap_or(bytes.len()).min(bytes.len().saturating_sub(1));
                let headers = format!(
                    "ETag: \"{:x}\"\r\nX-Repo-Commit: c0ffee\r\nContent-Range: bytes {from}-{to}/{}\r\n",
                    bytes.iter().fold(bytes.len(), |hash, &byte| hash.wrapping_mul(31).wrapping_add(byte.into())),
                    bytes.len()
                );
                return ("206 Partial Content", headers, bytes[from..=to].to_vec());
            }
        }
        ("404 Not Found", String::new(), b"Entry not found".to_vec())
    }
}

fn model() -> Model {
    let text = r#"{"model_type": "llama", "vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2}"#;
    Model::fresh(Config::from_json_str(text, "test").expect("a configuration"), 1).expect("a model")
}

fn files(options: &WriteOptions) -> Files {
    let folder = tempfile::tempdir().expect("a folder");
    model().write(folder.path(), options).expect("files");
    let entries = std::fs::read_dir(folder.path()).expect("a listing").map(|entry| entry.expect("an entry").path());
    entries.map(|path| (path.file_name().expect("a name").to_string_lossy().into_owned(), std::fs::read(&path).expect("a file"))).collect()
}

/// A single test, because it changes the environment of the process.
#[test]
fn models_are_fetched_once_and_then_cached() {
    let home = tempfile::tempdir().expect("a folder");
    let mut repos = BTreeMap::new();
    let mut single = files(&WriteOptions::default());
    single.insert("README.md".into(), b"not requested".to_vec());
    single.insert("tokenizer.json".into(), b"{}".to_vec());
    repos.insert("owner/single".to_owned(), single);
    let sharded = files(&WriteOptions::default().max_shard_bytes(Some(512)));
    assert!(sharded.len() > 4, "{:?}", sharded.keys());
    repos.insert("owner/sharded".to_owned(), sharded.clone());
    let mut torn = sharded;
    let shard = torn.keys().find(|name| name.contains("-of-")).expect("a shard").clone();
    torn.remove(&shard);
    repos.insert("owner/torn".to_owned(), torn);
    repos.insert("owner/pickled".to_owned(), [("config.json".into(), b"{}".to_vec()), ("model.bin".into(), vec![1])].into());
    repos.insert("owner/empty".to_owned(), [("README.md".into(), vec![1])].into());
    let hub = Hub { repos: Arc::new(repos), ..Hub::default() };
    let address = hub.clone().serve();
    // SAFETY: this is the only test of its program; the server's threads do not read the environment.
    unsafe {
        std::env::set_var("HF_HOME", home.path());
        std::env::set_var("HF_ENDPOINT", &address);
        std::env::remove_var("HF_HUB_OFFLINE");
    }
    for name in ["hf://owner/single", "hf://owner/sharded"] {
        let found = folder(name).unwrap_or_else(|error| panic!("{error}"));
        assert!(found.starts_with(home.path()), "{}", found.display());
        assert_eq!(Model::read(&found).expect("the model").params.values(), model().params.values());
        let before = hub.requested.lock().expect("a list").len();
        assert_eq!(folder(name).expect("the folder"), found);
        let requested = hub.requested.lock().expect("a list")[before..].to_vec();
        assert!(requested.iter().all(|path| path.starts_with("/api/")), "fetched twice: {requested:?}");
    }
    assert!(!hub.requested.lock().expect("a list").iter().any(|path| path.contains("README")));

    let error = |name: &str| folder(name).expect_err("refused").to_string();
    let torn = folder("hf://owner/torn").expect("the fetched files");
    assert!(Model::read(&torn).expect_err("a shard is missing").to_string().contains(&shard));
    assert!(error("hf://owner/pickled").contains("neither model.safetensors nor model.safetensors.index.json"));
    assert!(error("hf://owner/empty").contains("no config.json"));
    let absent = error("hf://owner/absent");
    assert!(absent.contains("404") && absent.contains("check owner, name and revision"), "{absent}");
    for wrong in ["hf://name", "hf://../x", "hf://a/b/c", "hf://a/b@", "hf://a/b@..", "hf://"] {
        assert!(error(wrong).contains("write it as hf://<owner>/<name>"), "{wrong}");
    }
    assert_eq!(folder("some/where").expect("a path"), std::path::Path::new("some/where"));

    // SAFETY: as above.
    unsafe { std::env::set_var("HF_HUB_OFFLINE", "1") };
    let before = hub.requested.lock().expect("a list").len();
    assert!(Model::read(folder("hf://owner/sharded").expect("cached")).is_ok());
    assert!(error("hf://owner/absent").contains("does not contain it; fetch it once without HF_HUB_OFFLINE"));
    assert_eq!(hub.requested.lock().expect("a list").len(), before, "no request is sent");
}
