//! The page and its requests.
//!
//! ```text
//! GET /?token=T                                            the page
//! GET /news?token=T&since=N                                changes after revision N, as JSON
//! GET /look?token=T&run=NAME&text=…&layer=&head=&query=&order=    attention and memory, as JSON
//! GET /export?token=T&run=NAME&run=…                       an HTML report of these runs as one file
//! ```
//!
//! A request must have the Host header of this machine, must not come from a page of another origin, and must have the token. Responses
//! must not be cached, framed or read by other origins.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use serde::Serialize;
use termwise_analysis::look::Request as LookRequest;
use termwise_report::{FIGURES, ScriptedPage, style_sheet};

use crate::serve::Error;
use crate::serve::http::{self, Answer, Handler, Request, lock};
use crate::serve::live::Live;
use crate::serve::look::Opened;

/// The flag that ends the server.
pub type Stop = AtomicBool;

const SCRIPT: &str = include_str!("page.js");
const BODY: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");

/// A listening server with its runs.
pub struct Server {
    listener: TcpListener,
    port: u16,
    token: String,
    live: Mutex<Live>,
    opened: Mutex<Option<Opened>>,
    page: String,
}

fn json(value: &impl Serialize) -> Answer {
    let body = serde_json::to_vec(value).expect("strings, numbers and lists are always valid JSON");
    Answer { status: 200, kind: "application/json", body, file: None }
}

impl Server {
    /// Reads the runs of a directory and listens on a port of this machine; port 0 is any free port.
    pub fn open(folder: &Path, port: u16) -> Result<Server, Error> {
        let live = Live::open(folder)?;
        let (listener, address) = http::listen(port).map_err(|error| Error::Port { port, reason: error.to_string() })?;
        let port = address.port();
        let mut bytes = [0u8; 16];
        getrandom::fill(&mut bytes).map_err(|error| Error::Random(error.to_string()))?;
        let token = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let style = style_sheet() + STYLE;
        let page =
            ScriptedPage { title: "termwise: runs", body: BODY, style: &style, data: "{}", scripts: &[FIGURES, SCRIPT], connects: true };
        Ok(Server { listener, port, token, live: Mutex::new(live), opened: Mutex::new(None), page: page.to_html() })
    }

    /// The address of the page, with the token.
    pub fn address(&self) -> String {
        format!("http://127.0.0.1:{}/?token={}", self.port, self.token)
    }

    /// Number of runs.
    pub fn runs(&self) -> usize {
        lock(&self.live).count()
    }

    /// Handles requests until `stop` is set.
    pub fn run(&self, stop: &Stop) {
        http::serve(&self.listener, self, stop);
    }

    fn look(&self, run: &str, text: Option<&str>, ask: LookRequest) -> Answer {
        let Some(path) = lock(&self.live).path(run).map(Path::to_owned) else { return Answer::refused(404, "no such run") };
        let mut opened = lock(&self.opened);
        let model = match Opened::of_run(&path, opened.take()) {
            Ok(model) => model,
            Err(reason) => return Answer::refused(422, &reason),
        };
        let text = text.map_or_else(|| model.example(), str::to_owned);
        let answer = match model.answer(&text, ask) {
            Ok(found) => json(&serde_json::json!({"text": text, "found": found})),
            Err(reason) => Answer::refused(422, &reason),
        };
        *opened = Some(model);
        answer
    }

    fn export<'a>(&self, runs: impl Iterator<Item = &'a str>) -> Answer {
        let live = lock(&self.live);
        let paths: Option<Vec<_>> = runs.map(|run| live.path(run).map(Path::to_owned)).collect();
        drop(live);
        let Some(paths) = paths.filter(|paths| !paths.is_empty()) else { return Answer::refused(404, "no such run") };
        match crate::reproduce::of_folders(&paths, Path::new("")) {
            Ok(page) => {
                Answer { status: 200, kind: "text/html; charset=utf-8", body: page.to_html().into_bytes(), file: Some("runs.html") }
            }
            Err(error) => Answer::refused(422, &error.to_string()),
        }
    }
}

impl Handler for Server {
    fn check(&self, request: &Request) -> Result<(), Answer> {
        if !["GET", "HEAD"].contains(&request.method.as_str()) {
            return Err(Answer::refused(405, "only GET is allowed; this server is read-only"));
        }
        // Another host name that resolves here would let a page of that name read the responses (DNS rebinding).
        let hosts = [format!("127.0.0.1:{}", self.port), format!("localhost:{}", self.port)];
        let own_host = |host: &[u8]| hosts.iter().any(|own| own.as_bytes() == host);
        if request.values("Host").count() != 1 || !request.values("Host").all(own_host) {
            return Err(Answer::refused(403, "Host header not allowed; use the address that `termwise serve` has printed"));
        }
        let own_origin = |origin: &[u8]| origin.strip_prefix(b"http://").is_some_and(own_host);
        // A link to this page is "none" or "cross-site" with a navigation; scripts of other pages are neither.
        let own_site = |site: &[u8]| [&b"none"[..], b"same-origin"].contains(&site);
        if !request.values("Origin").all(own_origin) || !request.values("Sec-Fetch-Site").all(own_site) {
            return Err(Answer::refused(403, "requests from pages of another origin are not allowed"));
        }
        let (_, query) = parts(&request.target);
        let given = query.iter().find(|(key, _)| key == "token").map_or("", |(_, token)| token.as_str());
        if !same(given.as_bytes(), self.token.as_bytes()) {
            return Err(Answer::refused(403, "the token is missing or wrong; use the address that `termwise serve` has printed"));
        }
        Ok(())
    }

    fn answer(&self, request: &Request) -> Answer {
        let (path, query) = parts(&request.target);
        let first = |name: &str| query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        match path {
            "/" => Answer { status: 200, kind: "text/html; charset=utf-8", body: self.page.clone().into_bytes(), file: None },
            "/news" => {
                let since = first("since").and_then(|text| text.parse().ok()).unwrap_or(0);
                let mut live = lock(&self.live);
                live.refresh();
                let news = live.since(since);
                // The lock is released before the response is written.
                drop(live);
                json(&news)
            }
            "/look" => {
                let number = |name: &str| first(name).and_then(|text| text.parse().ok()).unwrap_or(0);
                let ask =
                    LookRequest { layer: number("layer"), head: number("head"), query: number("query"), order: number("order").min(64) };
                self.look(first("run").unwrap_or_default(), first("text"), ask)
            }
            "/export" => self.export(query.iter().filter(|(key, _)| key == "run").map(|(_, value)| value.as_str())),
            _ => Answer::refused(404, "no such page"),
        }
    }
}

/// Compares in constant time.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}

/// Path and query of an address, decoded.
fn parts(url: &str) -> (&str, Vec<(String, String)>) {
    let (path, query) = url.split_once('?').unwrap_or((url, ""));
    let pairs = query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(key), decoded(value))
    });
    (path, pairs.collect())
}

fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut i) = (Vec::with_capacity(bytes.len()), 0);
    while i < bytes.len() {
        let hex = |at: usize| bytes.get(at).and_then(|&byte| (byte as char).to_digit(16));
        match (bytes[i], hex(i + 1), hex(i + 2)) {
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                i += 2;
            }
            (b'+', ..) => out.push(b' '),
            (byte, ..) => out.push(byte),
        }
        i += 1;
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_decoded() {
        let (path, query) = parts("/look?run=a%2Fb&text=%3F+k1%zz&empty");
        assert_eq!(path, "/look");
        assert_eq!(query, [("run", "a/b"), ("text", "? k1%zz"), ("empty", "")].map(|(a, b)| (a.to_owned(), b.to_owned())));
        assert!(same(b"abc", b"abc") && !same(b"abc", b"abd") && !same(b"", b"a"));
    }
}
