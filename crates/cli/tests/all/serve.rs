//! The live page: access control, and the page in a browser.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::chromium::{self, Browser};
use crate::support::{self, Place};
use serde_json::{Value, json};

/// A server of a folder, ended with the test.
struct Served {
    process: Child,
    port: u16,
    token: String,
}

impl Served {
    fn start(folder: &Path) -> Served {
        let mut process = Command::new(env!("CARGO_BIN_EXE_termwise"))
            .arg("serve")
            .arg(folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program starts");
        let mut address = String::new();
        BufReader::new(process.stdout.take().expect("a pipe")).read_line(&mut address).expect("an address");
        let (port, token) =
            address.trim().strip_prefix("http://127.0.0.1:").and_then(|rest| rest.split_once("/?token=")).expect("an address");
        let (port, token) = (port.parse().expect("a port"), token.to_owned());
        Served { process, port, token }
    }

    /// Status and complete response.
    fn ask(&self, line: &str, fields: &[(&str, &str)]) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("a connection");
        let mut request = format!("{line} HTTP/1.1\r\nConnection: close\r\n");
        if !fields.iter().any(|(name, _)| *name == "Host") {
            request += &format!("Host: 127.0.0.1:{}\r\n", self.port);
        }
        fields.iter().for_each(|(name, value)| request += &format!("{name}: {value}\r\n"));
        stream.write_all((request + "\r\n").as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("no status in {answer}"));
        (status, answer)
    }

    fn get(&self, path: &str) -> (u16, String) {
        let and = if path.contains('?') { '&' } else { '?' };
        self.ask(&format!("GET {path}{and}token={}", self.token), &[])
    }

    fn address(&self) -> String {
        format!("http://127.0.0.1:{}/?token={}", self.port, self.token)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn line(step: u64, loss: f64) -> String {
    format!("{{\"kind\":\"train\",\"step\":{step},\"time\":1.0,\"loss\":{loss},\"lr\":0.1,\"tokens\":1,\"tokens_per_second\":1.0}}\n")
}

/// A run with some steps, written by hand.
fn run(folder: &Path, attention: &str, losses: &[f64]) {
    std::fs::create_dir_all(folder).expect("a folder");
    std::fs::write(folder.join("settings.toml"), format!("attention = \"{attention}\"\nsteps = 100\n")).expect("a file");
    let lines: String = losses.iter().zip(1..).map(|(&loss, step)| line(step, loss)).collect();
    std::fs::write(folder.join("metrics.jsonl"), lines).expect("a file");
}

/// Names, sizes and times of everything below a folder.
fn snapshot(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        let data = entry.metadata().expect("a file");
        found.push(format!("{} {} {:?}", entry.path().display(), data.len(), data.modified().ok()));
        if data.is_dir() {
            found.extend(snapshot(&entry.path()));
        }
    }
    found.sort();
    found
}

#[test]
fn only_this_machine_this_page_and_the_token_are_answered() {
    let place = Place::new();
    run(&place.path("runs/a"), "softmax", &[3.0, 2.0]);
    // The report of a run without evaluations has no figures.
    let evaluation =
        |step| format!("{{\"kind\":\"held_out\",\"step\":{step},\"time\":1.0,\"loss\":2.5,\"perplexity\":12.2,\"tokens\":8}}\n");
    let metrics = std::fs::read_to_string(place.path("runs/a/metrics.jsonl")).expect("a file");
    std::fs::write(place.path("runs/a/metrics.jsonl"), metrics + &evaluation(1) + &evaluation(100)).expect("a file");
    std::fs::write(place.path("secret.txt"), "secret").expect("a file");
    let before = snapshot(&place.path("runs"));
    let served = Served::start(&place.path("runs"));
    let own = format!("GET /news?token={}", served.token);

    let (status, answer) = served.ask(&own, &[]);
    assert_eq!(status, 200, "{answer}");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a body");
    for field in ["X-Content-Type-Options: nosniff", "X-Frame-Options: DENY", "Cache-Control: no-store", "Referrer-Policy: no-referrer"] {
        assert!(head.contains(field), "{field} is missing in {head}");
    }
    assert!(!head.to_lowercase().contains("access-control"), "{head}");
    assert!(body.contains("\"name\":\"a\"") && body.contains("[1,2],[3.0,2.0]"), "{body}");

    for (what, line, fields) in [
        ("no token", "GET /news", vec![]),
        ("a wrong token", "GET /news?token=0123456789abcdef0123456789abcdef", vec![]),
        ("a token that begins right", &*format!("GET /news?token={}", &served.token[..31]), vec![]),
        ("another origin", &own, vec![("Origin", "http://evil.example")]),
        ("no origin", &own, vec![("Origin", "null")]),
        ("a script of another site", &own, vec![("Sec-Fetch-Site", "cross-site")]),
        ("another port", &own, vec![("Sec-Fetch-Site", "same-site")]),
        ("a name that leads here", &own, vec![("Host", "evil.example")]),
    ] {
        let (status, answer) = served.ask(line, &fields);
        assert_eq!(status, 403, "{what}: {answer}");
        assert!(!answer.contains("\"runs\""), "{what}: {answer}");
    }
    let origin = format!("http://127.0.0.1:{}", served.port);
    assert_eq!(served.ask(&own, &[("Origin", &origin), ("Sec-Fetch-Site", "same-origin")]).0, 200);
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        assert_eq!(served.ask(&own.replacen("GET", method, 1), &[("Content-Length", "0")]).0, 405, "{method}");
    }
    for path in [
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/secret.txt",
        "/look?run=..%2Fsecret.txt",
        "/look?run=../../",
        "/export?run=..",
        "/export?run=%2Fetc",
        "/export",
    ] {
        let (status, answer) = served.get(path);
        assert!(status == 404 && !answer.contains("secret\n"), "{path}: {answer}");
    }
    let long = "a".repeat(70_000);
    assert_eq!(served.get(&format!("/look?text={long}")).0, 414);
    let (status, answer) = served.get("/look?run=a&text=x");
    assert!(status == 422 && answer.contains("checkpoint"), "a run without a checkpoint: {answer}");
    let (status, page) = served.get("/export?run=a");
    assert!(status == 200 && page.contains("attachment") && page.contains("<svg"), "{}", &page[..page.len().min(400)]);
    drop(served);
    assert_eq!(snapshot(&place.path("runs")), before, "something was written");
}

#[test]
fn runs_and_serve_list_the_same_runs() {
    let place = Place::new();
    for name in ["a", "play/b", "play/c", "sweeps/book/d"] {
        run(&place.path("runs").join(name), "taylor=0..2", &[3.0, 2.0]);
    }
    let listed = support::termwise(&["runs", &place.at("runs"), "--json"]).assert().success().get_output().stdout.clone();
    let listed: Value = serde_json::from_slice(&listed).expect("JSON");
    let below = |run: &Value| Path::new(run["folder"].as_str().expect("text")).strip_prefix(place.path("runs")).expect("below").to_owned();
    let mut names: Vec<_> = listed["runs"].as_array().expect("runs").iter().map(below).collect();
    names.sort();
    let served = Served::start(&place.path("runs"));
    let news = |since: &Value| -> Value {
        let answer = served.get(&format!("/news?since={since}")).1;
        serde_json::from_str(answer.split_once("\r\n\r\n").expect("a body").1).expect("JSON")
    };
    let first = news(&json!(0));
    let served_names: Vec<_> =
        first["runs"].as_array().expect("runs").iter().map(|run| Path::new(run["name"].as_str().expect("text")).to_owned()).collect();
    assert_eq!((served_names.len(), &served_names), (4, &names));
    let printed = support::termwise(&["runs", &place.at("runs")]).assert().success().get_output().stdout.clone();
    assert!(String::from_utf8_lossy(&printed).contains("taylor=0..2"));

    // Resumed with more steps, and removed.
    let settings = place.path("runs/a/settings.toml");
    std::fs::write(&settings, std::fs::read_to_string(&settings).expect("a file").replace("100", "900")).expect("a file");
    std::fs::remove_dir_all(place.path("runs/play")).expect("removed");
    // New and removed folders are detected at intervals.
    std::thread::sleep(Duration::from_millis(500));
    let second = news(&first["revision"]);
    assert_eq!(second["names"], json!(["a", "sweeps/book/d"]), "{second}");
    assert_eq!((&second["runs"][0]["name"], &second["runs"][0]["steps"]), (&json!("a"), &json!(900)), "{second}");
}

#[test]
fn the_model_of_an_overwritten_run_is_read_again() {
    let place = Place::new();
    place.train(&["--name", "a", "--seed", "1"]).assert().success();
    let served = Served::start(&place.path("runs"));
    let look = || served.get("/look?run=a&text=Tom+walked&query=9");
    let (status, first) = look();
    assert!(status == 200 && look().1 == first, "{first}");
    place.train(&["--name", "a", "--seed", "2", "--overwrite"]).assert().success();
    let (status, second) = look();
    assert!(status == 200 && second != first, "the weights of the model before");
}

#[test]
fn it_listens_on_this_machine_alone() {
    let place = Place::new();
    std::fs::create_dir(place.path("runs")).expect("a folder");
    let served = Served::start(&place.path("runs"));
    let other = |address: &str| {
        TcpStream::connect_timeout(&format!("{address}:{}", served.port).parse().expect("an address"), Duration::from_secs(2))
    };
    // Another address of this machine, as all of 127/8 are.
    assert!(other("127.0.0.1").is_ok() && other("127.0.0.2").is_err());
    let missing = place.at("missing");
    let said = support::termwise(&["serve", &missing]).assert().failure().get_output().stderr.clone();
    assert!(String::from_utf8_lossy(&said).contains("cannot read the directory of runs"));
}

/// Waits until an expression is true in the page, up to a timeout.
fn wait(browser: &mut Browser, expression: &str) {
    let began = Instant::now();
    while browser.evaluate(expression) != json!(true) {
        assert!(began.elapsed() < Duration::from_secs(60), "never true: {expression}; {:?}", browser.complaints());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn curves_grow_names_stay_text_and_models_are_inspected() {
    let Some(program) = termwise_base::test_skip::need("browser", "Chromium", chromium::find()) else { return };
    let place = Place::new();
    place.train(&["--name", "real", "--attention", "softmax"]).assert().success();
    let evil = "<img src=x onerror=document.title='hit'>";
    run(&place.path(&format!("runs/{evil}")), "<b>bold</b> taylor=0..2", &[3.0, 2.5]);
    let served = Served::start(&place.path("runs"));
    let mut browser = Browser::start(&program);
    for width in [360, 1280] {
        browser.open(&served.address(), width);
        wait(&mut browser, "document.body.dataset.ready === 'yes' && document.querySelectorAll('#runs tbody tr').length === 2");
        let overflow = browser.evaluate("document.documentElement.scrollWidth - window.innerWidth");
        assert!(overflow.as_f64().is_some_and(|x| x <= 0.0), "at {width}: {overflow}");
    }
    assert_eq!(browser.evaluate("document.querySelectorAll('img, main b').length"), 0, "a name has become HTML");
    let cells = browser.evaluate("document.querySelector('#runs tbody').textContent");
    assert!(cells.as_str().is_some_and(|text| text.contains(evil) && text.contains("<b>bold</b>")), "{cells}");
    assert_ne!(browser.evaluate("document.title"), "hit");

    browser
        .evaluate("document.getElementById('curve').value = 'train'; document.getElementById('curve').dispatchEvent(new Event('input'));");
    let step = "[...document.querySelectorAll('#runs tbody tr')].some((row) => row.textContent.includes('3 of 100'))";
    assert_eq!(browser.evaluate(step), false);
    let mut file = std::fs::OpenOptions::new().append(true).open(place.path(&format!("runs/{evil}/metrics.jsonl"))).expect("a file");
    file.write_all(line(3, 2.25).as_bytes()).expect("written");
    wait(&mut browser, step);

    // Filter, sort, choose.
    browser.evaluate("document.getElementById('filter').value = 'attention=taylor'; document.getElementById('filter').dispatchEvent(new Event('input'));");
    assert_eq!(browser.evaluate("document.querySelectorAll('#runs tbody tr').length"), 1);
    browser.evaluate("document.getElementById('filter').value = ''; document.getElementById('filter').dispatchEvent(new Event('input'));");
    browser.evaluate("[...document.querySelectorAll('#runs th button')].find((b) => b.textContent.startsWith('loss')).click()");
    let first = browser.evaluate("document.querySelector('#runs tbody tr').dataset.run");
    assert_eq!(first, evil, "2.25 is the smaller loss");

    // A removed run disappears from the table and the list.
    let gone = place.path("runs/gone");
    run(&gone, "softmax", &[9.0]);
    wait(
        &mut browser,
        "document.querySelectorAll('#runs tbody tr').length === 3 && document.querySelectorAll('#look-run option').length === 3",
    );
    std::fs::remove_dir_all(gone).expect("removed");
    wait(
        &mut browser,
        "document.querySelectorAll('#runs tbody tr').length === 2 && document.querySelectorAll('#look-run option').length === 2",
    );

    // Inside the trained model.
    browser.evaluate("document.getElementById('look-run').value = 'real'; document.getElementById('look-text').value = 'Tom walked'; document.getElementById('look').requestSubmit();");
    wait(&mut browser, "document.querySelectorAll('#look-tokens li').length === 10");
    assert_eq!(
        browser.evaluate("document.querySelectorAll('#look-tokens li')[9].querySelectorAll('.bars i').length"),
        2,
        "all terms, and the first"
    );
    wait(&mut browser, "document.getElementById('look-facts').textContent.includes('state of these orders')");
    assert!(browser.complaints().is_empty(), "{:?}", browser.complaints());
    let own = format!("http://127.0.0.1:{}/", served.port);
    let foreign: Vec<&str> = browser.requests().into_iter().filter(|url| !url.starts_with(&own) && !url.starts_with("blob:")).collect();
    assert!(foreign.is_empty(), "the page asked for {foreign:?}");

    let looked = served.get("/look?run=real&text=Tom&order=2&query=2").1;
    let found: Value = serde_json::from_str(looked.split_once("\r\n\r\n").expect("a body").1.trim()).expect("JSON");
    let weights =
        |key: &str| found["found"]["look"][key].as_array().expect("weights").iter().filter_map(Value::as_f64).collect::<Vec<f64>>();
    for key in ["weights", "cut_weights"] {
        let sum: f64 = weights(key).iter().sum();
        assert!(weights(key).len() == 3 && (sum - 1.0).abs() < 1e-9, "{key} {found}");
    }
    let scores = weights("scores");
    let second = |x: &f64| 1.0 + x + x * x / 2.0;
    let all: f64 = scores.iter().map(second).sum();
    assert!(scores.iter().zip(weights("cut_weights")).all(|(x, w)| (second(x) / all - w).abs() < 1e-12), "{found}");
}
