//! A browser, controlled over its debugging pipe: JSON messages, each followed by a zero byte.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value, json};

/// Names under which Chromium is installed.
const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
/// Timeout, longer than any page takes.
const TIMEOUT: Duration = Duration::from_secs(90);

/// A headless Chromium with one tab. Its network is limited to this machine.
pub struct Browser {
    process: Child,
    commands: File,
    messages: Receiver<Value>,
    session: String,
    next: u64,
    /// Its events, in order.
    pub events: Vec<Value>,
    /// Its pipes and profile.
    _folder: tempfile::TempDir,
}

/// The browser of this machine.
pub fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).flat_map(|folder| NAMES.map(|name| folder.join(name))).find(|file| file.is_file())
}

impl Browser {
    /// Starts it and opens a tab that reports requests, messages and errors.
    pub fn start(program: &Path) -> Browser {
        let folder = tempfile::tempdir().expect("a folder");
        let (inward, outward) = (folder.path().join("in"), folder.path().join("out"));
        let made = Command::new("mkfifo").args([&inward, &outward]).status().expect("mkfifo");
        assert!(made.success(), "no pipes");
        let process = Command::new("sh")
            .arg("-c")
            .arg(r#"in=$1; out=$2; shift 2; exec "$@" 3<"$in" 4>"$out""#)
            .args(["sh".as_ref(), inward.as_os_str(), outward.as_os_str(), program.as_os_str()])
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-dev-shm-usage"])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"])
            .args(["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", folder.path().join("profile").display()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the browser starts");
        let commands = OpenOptions::new().write(true).open(&inward).expect("a pipe to the browser");
        let answers = File::open(&outward).expect("a pipe from the browser");
        let (send, messages) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(answers).split(0) {
                let Ok(bytes) = message else { break };
                let Ok(value) = serde_json::from_slice(&bytes) else { continue };
                if send.send(value).is_err() {
                    break;
                }
            }
        });
        let mut browser = Browser { process, commands, messages, session: String::new(), next: 0, events: Vec::new(), _folder: folder };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let session = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = session["sessionId"].as_str().expect("a session").into();
        for domain in ["Network", "Log", "Runtime", "Page"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Sends a command and waits for its result.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": parameters});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        self.commands.write_all(format!("{message}\0").as_bytes()).expect("the browser listens");
        loop {
            let answer = self.receive(method);
            if answer["id"] == self.next {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
            self.events.push(answer);
        }
    }

    /// Opens a page in a window of that width, and waits until it is loaded.
    pub fn open(&mut self, address: &str, width: u32) {
        let size = json!({"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let loaded = |event: &Value| event["method"] == "Page.loadEventFired";
        let before = self.events.iter().filter(|event| loaded(event)).count();
        self.call("Page.navigate", json!({"url": address}));
        while self.events.iter().filter(|event| loaded(event)).count() == before {
            let event = self.receive("a page");
            self.events.push(event);
        }
    }

    /// The value of an expression in the page.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let result = self.call("Runtime.evaluate", json!({"expression": expression, "returnByValue": true}));
        assert!(result["exceptionDetails"].is_null(), "{}", result["exceptionDetails"]);
        result["result"]["value"].clone()
    }

    /// Network and file requests of the page.
    pub fn requests(&self) -> Vec<&str> {
        let requests = self.events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
        requests.filter_map(|event| event["params"]["request"]["url"].as_str()).collect()
    }

    /// Errors and warnings of the page: exceptions, console, log.
    pub fn complaints(&self) -> Vec<String> {
        let bad = |level: &Value| matches!(level.as_str(), Some("error" | "warning"));
        let complaint = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => bad(&event["params"]["type"]),
            Some("Log.entryAdded") => bad(&event["params"]["entry"]["level"]),
            _ => false,
        };
        self.events.iter().filter(complaint).map(|event| event["params"].to_string()).collect()
    }

    fn receive(&self, waiting_for: &str) -> Value {
        self.messages.recv_timeout(TIMEOUT).unwrap_or_else(|error| panic!("no answer from the browser to {waiting_for}: {error}"))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
