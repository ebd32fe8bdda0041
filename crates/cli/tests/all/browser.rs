//! The report in a real browser: it opens without network and errors, and its figures are there on a phone and on a desk.

use std::process::Command;

use serde_json::Value;

use crate::chromium::{self, Browser};

/// Widths of figures and of the page, and whether anything sticks out to the right.
const LAYOUT: &str = "(() => {
    const figures = [...document.querySelectorAll('figure svg, svg.termwise')].filter((svg, i, all) => all.indexOf(svg) === i);
    const shown = [...figures].map(svg => svg.getBoundingClientRect()).filter(box => box.width > 0);
    return {
        heading: document.querySelector('h1')?.textContent ?? '',
        figures: figures.length,
        narrowest: Math.min(...shown.map(box => box.width)),
        lowest: Math.min(...shown.map(box => box.height)),
        beyond: shown.filter(box => box.right > window.innerWidth + 1).length,
        shown: shown.length,
        words: [...document.querySelectorAll('svg text')].length,
        overflow: document.documentElement.scrollWidth - window.innerWidth,
    };
})()";

const BACKGROUND: &str = "getComputedStyle(document.body).backgroundColor";

#[test]
fn the_report_opens_without_network_on_phone_and_desk() {
    let Some(program) = termwise_unrun::need("browser", "Chromium", chromium::find()) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("report");
    let termwise = env!("CARGO_BIN_EXE_termwise");
    let run = Command::new(termwise).args(["reproduce", "all", "--scale", "test", "--out"]).arg(&out).output().expect("the program runs");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));

    let address = format!("file://{}", out.join("index.html").display());
    let mut browser = Browser::start(&program);
    for width in [360, 1280] {
        browser.open(&address, width);
        let layout = browser.evaluate(LAYOUT);
        let number = |key: &str| layout[key].as_f64().unwrap_or_else(|| panic!("no {key} in {layout}"));
        assert!(layout["heading"].as_str().is_some_and(|text| !text.is_empty()), "{layout}");
        assert!(number("figures") >= 4.0 && number("shown") >= 4.0, "at {width}: {layout}");
        assert!(number("narrowest") >= 250.0 && number("lowest") >= 100.0, "at {width}: {layout}");
        assert!(number("beyond") == 0.0 && number("overflow") <= 0.0, "at {width}: {layout}");
        assert!(number("words") > 40.0, "at {width}: {layout}");
    }
    let light = browser.evaluate(BACKGROUND);
    let dark = serde_json::json!({"features": [{"name": "prefers-color-scheme", "value": "dark"}]});
    browser.call("Emulation.setEmulatedMedia", dark);
    assert_ne!(browser.evaluate(BACKGROUND), light, "dark and light look the same");

    let foreign: Vec<&str> = browser.requests().into_iter().filter(|url| *url != address).collect();
    assert!(foreign.is_empty(), "the page asked for {foreign:?}");
    assert!(browser.complaints().is_empty(), "{:?}", browser.complaints());
}

/// The test above can fail: a page that asks for something and complains is noticed.
#[test]
fn requests_and_errors_are_noticed() {
    let Some(program) = termwise_unrun::need("browser", "Chromium", chromium::find()) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let page = folder.path().join("bad.html");
    std::fs::write(&page, "<h1>x</h1><img src='http://example.invalid/a.png'><script>console.error('oh'); missing()</script>")
        .expect("a page");
    let address = format!("file://{}", page.display());
    let mut browser = Browser::start(&program);
    browser.open(&address, 360);
    assert!(browser.requests().iter().any(|url| url.contains("example.invalid")), "{:?}", browser.requests());
    assert!(browser.complaints().len() >= 2, "{:?}", browser.complaints());
    let layout: Value = browser.evaluate(LAYOUT);
    assert_eq!(layout["figures"], 0);
}
