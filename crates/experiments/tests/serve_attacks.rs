//! Hostile clients of the real server on the loopback address: none can stop it or block other clients, and memory stays bounded.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use termwise_experiments::serve::Server;

/// Far above the time of an answer, below every time-out of the server that a blocked client would wait for.
const PROMPT: Duration = Duration::from_secs(4);

/// Runs a test against a server of one run, and ends the server.
fn with_server(test: impl FnOnce(&Client)) {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("a")).expect("a folder");
    std::fs::write(folder.path().join("a/settings.toml"), "steps = 3\nattention = \"softmax\"\n").expect("a file");
    let server = Server::open(folder.path(), 0).expect("a server");
    let address = server.address();
    let (port, token) = address.strip_prefix("http://127.0.0.1:").and_then(|rest| rest.split_once("/?token=")).expect("an address");
    let client = Client { port: port.parse().expect("a port"), token: token.to_owned() };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.run(&stop));
        let tested = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            test(&client);
            client.is_served();
        }));
        stop.store(true, Ordering::Relaxed);
        running.join().expect("the server ends without a panic");
        if let Err(panic) = tested {
            std::panic::resume_unwind(panic);
        }
    });
}

struct Client {
    port: u16,
    token: String,
}

impl Client {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out");
        stream.set_write_timeout(Some(Duration::from_secs(20))).expect("a time-out");
        stream
    }

    /// A connection on which this was sent.
    fn send(&self, request: &str) -> TcpStream {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).expect("sent");
        stream
    }

    fn request(&self, fields: &str) -> String {
        format!("GET /news?token={} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n{fields}\r\n", self.token, self.port)
    }

    /// A request with a token is answered promptly.
    fn is_served(&self) {
        let began = Instant::now();
        let answer = received(&mut self.send(&self.request("")));
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("\"name\":\"a\""), "{answer}");
        assert!(began.elapsed() < PROMPT, "answered after {:?}", began.elapsed());
    }
}

/// Everything up to the end of the connection.
fn received(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("an answer and the end of the connection");
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn announced_bodies_are_neither_allocated_nor_awaited() {
    with_server(|client| {
        for length in ["99999999999", "18446744073709551615", "18446744073709551616", "-1", "1000000"] {
            for round in 0..4 {
                let mut foreign = client.send(&format!("GET / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"));
                assert!(received(&mut foreign).starts_with("HTTP/1.1 403 "), "{length}, {round}");
                let mut own = client.send(&client.request(&format!("Content-Length: {length}\r\n")));
                assert!(received(&mut own).starts_with("HTTP/1.1 200 "), "{length}, {round}");
            }
        }
        let mut chunked = client.send(&client.request("Transfer-Encoding: chunked\r\n").replacen("GET", "POST", 1));
        chunked.write_all(b"ffffffffffffffff\r\nabc").expect("sent");
        assert!(received(&mut chunked).starts_with("HTTP/1.1 405 "));
    });
}

#[test]
fn clients_with_slow_bodies_do_not_block_others() {
    with_server(|client| {
        let slow: Vec<TcpStream> =
            (0..20).map(|_| client.send("GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc")).collect();
        client.is_served();
        drop(slow);
    });
}

#[test]
fn clients_with_slow_header_fields_are_ended_after_a_time() {
    with_server(|client| {
        let began = Instant::now();
        let mut slow: Vec<TcpStream> = (0..20).map(|_| client.send("GET / HTTP/1.1\r\nX: ")).collect();
        client.is_served();
        // A byte now and then does not extend the time.
        let last = slow.last_mut().expect("one");
        while last.write_all(b"x").is_ok() && began.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(200));
        }
        assert!(began.elapsed() < Duration::from_secs(20), "still open after {:?}", began.elapsed());
        assert!(received(&mut slow[0]).starts_with("HTTP/1.1 408 "));
    });
}

#[test]
fn pipelined_requests_are_discarded() {
    with_server(|client| {
        // Nothing is read meanwhile. Each writer ends when the server closes its connection.
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut stream = client.connect();
                    let request = client.request("");
                    let sent = (0..50_000).take_while(|_| stream.write_all(request.as_bytes()).is_ok()).count();
                    assert!(sent < 50_000, "the connection was never closed");
                });
            }
            client.is_served();
        });
        let two = client.request("") + &client.request("");
        assert_eq!(received(&mut client.send(&two)).matches("HTTP/1.1").count(), 1);
    });
}

#[test]
fn endless_lines_are_refused_at_a_limit() {
    with_server(|client| {
        for (start, status) in [("GET /?", "414"), ("GET / HTTP/1.1\r\nX: ", "431"), ("GET / HTTP/1.1\r\n", "431")] {
            let mut stream = client.send(start);
            let line = if start.ends_with('\n') { "X: y\r\n".repeat(1000) } else { "x".repeat(6000) };
            let mut sent = 0;
            // Buffers of both sockets take some megabytes.
            while sent < 64 << 20 && stream.write_all(line.as_bytes()).is_ok() {
                sent += line.len();
            }
            assert!(sent < 64 << 20, "{start:?}: the server reads on");
            let mut inside = client.send(&format!("{start}{}", "x".repeat(300_000)));
            if !start.ends_with('\n') {
                assert!(received(&mut inside).starts_with(&format!("HTTP/1.1 {status} ")), "{start:?}");
            }
        }
        let long = client.request("").replacen("/news?", &format!("/news?text={}&", "x".repeat(70_000)), 1);
        assert!(received(&mut client.send(&long)).starts_with("HTTP/1.1 414 "));
        let many = "X: y\r\n".repeat(100);
        assert!(received(&mut client.send(&client.request(&many))).starts_with("HTTP/1.1 431 "));
    });
}

#[test]
fn clients_beyond_the_limit_replace_the_oldest_without_a_request() {
    with_server(|client| {
        let mut idle: Vec<TcpStream> = (0..300).map(|_| client.connect()).collect();
        client.is_served();
        let began = Instant::now();
        let _ = idle[0].read(&mut [0; 64]);
        assert!(began.elapsed() < Duration::from_secs(3), "the oldest was kept");
    });
}

#[test]
fn clients_that_do_not_read_responses_do_not_block_others() {
    with_server(|client| {
        let unread: Vec<TcpStream> = (0..20).map(|_| client.send(&client.request("").replace("/news", "/"))).collect();
        client.is_served();
        drop(unread);
    });
}

#[test]
fn requests_that_are_not_http_are_refused() {
    with_server(|client| {
        for bytes in ["\r\n\r\n", "\u{0}\u{1}\n\n", "GET\r\n\r\n", "GET / HTTP/9\r\n\r\n", "GET / HTTP/1.1\r\nno colon\r\n\r\n"] {
            assert!(received(&mut client.send(bytes)).starts_with("HTTP/1.1 400 "), "{bytes:?}");
        }
        let stream = client.send("GET / HT");
        stream.shutdown(Shutdown::Write).expect("closed");
        assert!(received(&mut { stream }).starts_with("HTTP/1.1 400 "));
        let own = format!("Host: 127.0.0.1:{}\r\n", client.port);
        for hosts in [String::new(), format!("{own}Host: evil.example\r\n"), format!("{own}{own}")] {
            let request = client.request("").replacen(&own, &hosts, 1);
            assert!(received(&mut client.send(&request)).starts_with("HTTP/1.1 403 "), "{hosts:?}");
        }
        let origins = client.request(&format!("Origin: http://127.0.0.1:{}\r\nOrigin: http://evil.example\r\n", client.port));
        assert!(received(&mut client.send(&origins)).starts_with("HTTP/1.1 403 "));
        let head = received(&mut client.send(&client.request("").replacen("GET", "HEAD", 1)));
        assert!(head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"), "{head}");
    });
}
