//! A small HTTP/1.1 server for a local page. Every read, write and wait has a limit.
//!
//! - One request per connection, in its own thread. The response has `Connection: close`; pipelined requests are discarded.
//! - The request line and the header fields together have at most [`MAX_HEAD_BYTES`] bytes and arrive within [`READ_TIME`].
//! - Bodies are never read: no supported request has one.
//! - At most [`MAX_CONNECTIONS`] are open. A new connection replaces the oldest one whose request has not been accepted yet.
//! - A panic while handling a request gives status 500 and affects nothing else.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum bytes of a request line with its header fields.
pub const MAX_HEAD_BYTES: usize = 96 * 1024;
/// Maximum bytes of a request target, which contains a text to inspect.
pub const MAX_TARGET_BYTES: usize = 64 * 1024;
/// Maximum number of header fields.
const MAX_FIELDS: usize = 64;
/// Maximum number of open connections.
pub const MAX_CONNECTIONS: usize = 256;
/// Time limit from the connection to the end of its header fields.
pub const READ_TIME: Duration = Duration::from_secs(5);
/// Time limit for writing a response.
const WRITE_TIME: Duration = Duration::from_secs(60);
/// Time limit after a response: closing with unread bytes resets the connection, and the client may lose the response.
const DRAIN_TIME: Duration = Duration::from_millis(500);
const DRAIN_BYTES: usize = 1024 * 1024;
/// Interval at which the stop flag is read.
const STOP_INTERVAL: Duration = Duration::from_millis(100);

/// A request without its body.
#[derive(Debug)]
pub(crate) struct Request {
    pub method: String,
    /// Path and query as sent.
    pub target: String,
    fields: Vec<(String, Vec<u8>)>,
}

impl Request {
    /// All values of a header field.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.fields.iter().filter(move |(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_slice())
    }
}

/// A response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub status: u16,
    pub kind: &'static str,
    pub body: Vec<u8>,
    /// File name for saving the body.
    pub file: Option<&'static str>,
}

impl Answer {
    /// An error response with its reason as plain text.
    pub fn refused(status: u16, reason: &str) -> Answer {
        Answer { status, kind: "text/plain; charset=utf-8", body: format!("{reason}\n").into_bytes(), file: None }
    }

    fn head(&self) -> String {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            414 => "URI Too Long",
            422 => "Unprocessable Content",
            431 => "Request Header Fields Too Large",
            _ => "Internal Server Error",
        };
        let disposition = self.file.map_or(String::new(), |name| format!("Content-Disposition: attachment; filename=\"{name}\"\r\n"));
        format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\nCache-Control: no-store\r\n\
             X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nReferrer-Policy: no-referrer\r\n\
             Cross-Origin-Resource-Policy: same-origin\r\n{disposition}\r\n",
            self.status,
            self.kind,
            self.body.len(),
        )
    }
}

/// Handles requests.
pub(crate) trait Handler: Sync {
    /// The error response to a request that is not allowed.
    fn check(&self, request: &Request) -> Result<(), Answer>;
    /// The response to a request that passed the check.
    fn answer(&self, request: &Request) -> Answer;
}

/// Open connections in order of arrival.
#[derive(Default)]
struct Connections {
    open: BTreeMap<u64, Connection>,
    next: u64,
}

struct Connection {
    stream: Arc<TcpStream>,
    /// Whether its request passed the check.
    accepted: bool,
}

impl Connections {
    /// Registers a connection. If there are too many, closes the oldest one that is not accepted, or returns `None` if all are.
    fn add(&mut self, stream: &Arc<TcpStream>) -> Option<u64> {
        if self.open.len() >= MAX_CONNECTIONS {
            let (&oldest, connection) = self.open.iter().find(|(_, connection)| !connection.accepted)?;
            let _ = connection.stream.shutdown(Shutdown::Both);
            self.open.remove(&oldest);
        }
        let id = self.next;
        self.next += 1;
        self.open.insert(id, Connection { stream: stream.clone(), accepted: false });
        Some(id)
    }
}

/// Listens on a port of the loopback address; port 0 is any free port.
pub(crate) fn listen(port: u16) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Handles requests until `stop` is set.
pub(crate) fn serve(listener: &TcpListener, handler: &impl Handler, stop: &AtomicBool) {
    let connections = &Mutex::new(Connections::default());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(STOP_INTERVAL);
            }
            for connection in lock(connections).open.values() {
                let _ = connection.stream.shutdown(Shutdown::Both);
            }
            // `accept` returns at the next connection.
            let _ = listener.local_addr().and_then(TcpStream::connect);
        });
        while !stop.load(Ordering::Relaxed) {
            let Ok((stream, _)) = listener.accept() else {
                // For example too many open files: other connections may close.
                std::thread::sleep(STOP_INTERVAL);
                continue;
            };
            let stream = Arc::new(stream);
            let Some(id) = lock(connections).add(&stream) else { continue };
            let work = move || {
                // A client that has closed its connection needs no response.
                let _ = converse(&stream, handler, || accept(connections, id));
                lock(connections).open.remove(&id);
            };
            // Without a thread the connection is closed.
            if std::thread::Builder::new().name("serve".into()).spawn_scoped(scope, work).is_err() {
                lock(connections).open.remove(&id);
            }
        }
    });
}

fn accept(connections: &Mutex<Connections>, id: u64) {
    if let Some(connection) = lock(connections).open.get_mut(&id) {
        connection.accepted = true;
    }
}

/// Reads a request, writes its response and closes the connection.
fn converse(stream: &TcpStream, handler: &impl Handler, accept: impl FnOnce()) -> io::Result<()> {
    let answered = read_request(stream).and_then(|request| {
        let answer = || {
            handler.check(&request)?;
            accept();
            Ok(handler.answer(&request))
        };
        let internal = |_| Err(Answer::refused(500, "an internal error; its message is on the terminal of `termwise serve`"));
        Ok((catch_unwind(AssertUnwindSafe(answer)).unwrap_or_else(internal)?, request.method == "HEAD"))
    });
    let (answer, head_only) = answered.unwrap_or_else(|refused| (refused, false));
    let mut bytes = answer.head().into_bytes();
    if !head_only {
        bytes.extend(answer.body);
    }
    write_all(stream, &bytes)?;
    stream.shutdown(Shutdown::Write)?;
    drain(stream)
}

/// Reads up to the end of the header fields.
fn read_request(mut stream: &TcpStream) -> Result<Request, Answer> {
    let until = Instant::now() + READ_TIME;
    let late = || Answer::refused(408, "the request did not arrive in time");
    let mut bytes = Vec::new();
    let mut chunk = [0; 8 * 1024];
    loop {
        set_time(until, |time| stream.set_read_timeout(time)).map_err(|_| late())?;
        let count = match stream.read(&mut chunk) {
            Ok(0) => return Err(Answer::refused(400, "the request ends before its header fields do")),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => return Err(late()),
        };
        // Searches only the new bytes: the request is parsed once.
        let searched = bytes.len().saturating_sub(3);
        bytes.extend_from_slice(&chunk[..count]);
        let ended = |ending: &[u8]| bytes[searched..].windows(ending.len()).any(|window| window == ending);
        if ended(b"\r\n\r\n") || ended(b"\n\n") {
            return parse(&bytes);
        }
        if bytes.len() > MAX_HEAD_BYTES {
            let in_target = !bytes.contains(&b'\n');
            return Err(if in_target { target_too_long() } else { Answer::refused(431, "the header fields are too large") });
        }
    }
}

fn target_too_long() -> Answer {
    Answer::refused(414, &format!("the address has more than {MAX_TARGET_BYTES} bytes; use a shorter text"))
}

fn parse(bytes: &[u8]) -> Result<Request, Answer> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut parsed = httparse::Request::new(&mut fields);
    match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => {
            return Err(Answer::refused(431, &format!("there are more than {MAX_FIELDS} header fields")));
        }
        _ => return Err(Answer::refused(400, "this is not an HTTP/1.1 request")),
    }
    let (method, target) = (parsed.method.unwrap_or_default().to_owned(), parsed.path.unwrap_or_default().to_owned());
    if target.len() > MAX_TARGET_BYTES {
        return Err(target_too_long());
    }
    let fields = parsed.headers.iter().map(|field| (field.name.to_owned(), field.value.to_owned())).collect();
    Ok(Request { method, target, fields })
}

fn write_all(mut stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let until = Instant::now() + WRITE_TIME;
    while !bytes.is_empty() {
        set_time(until, |time| stream.set_write_timeout(time))?;
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Discards further bytes of the client, up to a limit.
fn drain(mut stream: &TcpStream) -> io::Result<()> {
    let until = Instant::now() + DRAIN_TIME;
    let (mut chunk, mut left) = ([0; 8 * 1024], DRAIN_BYTES);
    while left > 0 {
        set_time(until, |time| stream.set_read_timeout(time))?;
        match stream.read(&mut chunk)? {
            0 => break,
            count => left = left.saturating_sub(count),
        }
    }
    Ok(())
}

/// Sets the timeout of a socket to the rest of a period; an error after its end.
fn set_time(until: Instant, set: impl FnOnce(Option<Duration>) -> io::Result<()>) -> io::Result<()> {
    match until.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(ErrorKind::TimedOut.into()),
        left => set(Some(left)),
    }
}

/// The value of a mutex, even if a thread panicked with the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Panics;

    impl Handler for Panics {
        fn check(&self, request: &Request) -> Result<(), Answer> {
            assert_ne!(request.target, "/check", "a panic in the check");
            Ok(())
        }

        fn answer(&self, request: &Request) -> Answer {
            assert_ne!(request.target, "/answer", "a panic in the answer");
            Answer::refused(404, "none")
        }
    }

    #[test]
    fn a_panic_ends_only_one_request() {
        let (listener, address) = listen(0).expect("a port");
        let stop = AtomicBool::new(false);
        let ask = |target: &str| {
            let mut stream = TcpStream::connect(address).expect("a connection");
            stream.write_all(format!("GET {target} HTTP/1.1\r\n\r\n").as_bytes()).expect("sent");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("an answer");
            answer
        };
        std::thread::scope(|scope| {
            let server = scope.spawn(|| serve(&listener, &Panics, &stop));
            // More often than the maximum number of connections.
            for _ in 0..MAX_CONNECTIONS + 10 {
                assert!(ask("/answer").starts_with("HTTP/1.1 500 "));
            }
            for _ in 0..MAX_CONNECTIONS + 10 {
                assert!(ask("/check").starts_with("HTTP/1.1 500 "));
            }
            assert!(ask("/").starts_with("HTTP/1.1 404 "));
            stop.store(true, Ordering::Relaxed);
            server.join().expect("no panic ends the server");
        });
    }
}
