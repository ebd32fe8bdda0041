//! The report in a browser: it opens without network requests and errors, and its figures fit on phones and desktops.

use std::process::Command;

use serde_json::Value;
use termwise_report::{Axis, Block, Chart, Document, Figure, HeatMap, Layer, Line, Names, Point, Points, Rule, Scale, Shade, Unit};

use crate::chromium::{self, Browser};

/// Widths of figures and of the page, and whether anything overflows to the right.
const LAYOUT: &str = "(() => {
    const figures = [...document.querySelectorAll('figure svg, svg.termwise')].filter((svg, i, all) => all.indexOf(svg) === i);
    // The visible form of a figure: the picture or the interactive chart.
    const seen = figures.map(svg => svg.closest('figure')?.querySelector('.live') ?? svg);
    const shown = seen.map(part => part.getBoundingClientRect()).filter(box => box.width > 0);
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
fn the_report_opens_offline_on_narrow_and_wide_screens() {
    let Some(program) = termwise_base::test_skip::need("browser", "Chromium", chromium::find()) else { return };
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

    answers(&mut browser);
    // Without scripts and in print, figures are static pictures.
    browser.call("Emulation.setEmulatedMedia", serde_json::json!({"media": "print"}));
    assert_eq!(browser.evaluate(STILL), true, "on paper");
    browser.call("Emulation.setEmulatedMedia", serde_json::json!({"media": ""}));
    assert_eq!(browser.evaluate(STILL), false, "on a screen they answer");
    browser.call("Emulation.setScriptExecutionDisabled", serde_json::json!({"value": true}));
    browser.open(&address, 1281);
    assert_eq!(browser.evaluate(STILL), true, "without scripts");

    let foreign: Vec<&str> = browser.requests().into_iter().filter(|url| *url != address).collect();
    assert!(foreign.is_empty(), "the page asked for {foreign:?}");
    assert!(browser.complaints().is_empty(), "{:?}", browser.complaints());
}

/// Whether all pictures outside of collapsed sections are visible.
const STILL: &str = "[...document.querySelectorAll('figure > svg')].filter(svg => !svg.closest('details:not([open])'))
    .every(svg => svg.getBoundingClientRect().height > 0)";

/// Position of a training curve in the window.
const PLOT: &str = "(() => {
    const plot = [...document.querySelectorAll('.panel')].find(panel => panel.querySelector('.legend button'));
    plot.scrollIntoView({block: 'center', behavior: 'instant'});
    const box = plot.querySelector('.plot').getBoundingClientRect();
    window.panel = plot;
    return {x: box.left, y: box.top, width: box.width, height: box.height};
})()";

/// Figures show values under the pointer and by keyboard, zoom, isolate curves, change their scale, and hide runs.
fn answers(browser: &mut Browser) {
    let place = browser.evaluate(PLOT);
    let at = |share: f64| {
        (place["x"].as_f64().expect("x") + share * place["width"].as_f64().expect("width"), place["y"].as_f64().expect("y") + 90.0)
    };
    let mouse = |browser: &mut Browser, kind: &str, (x, y): (f64, f64), buttons: u8| {
        let button = if buttons > 0 || kind == "mouseReleased" { "left" } else { "none" };
        let event = serde_json::json!({"type": kind, "x": x, "y": y, "button": button, "buttons": buttons, "clickCount": 1});
        browser.call("Input.dispatchMouseEvent", event);
    };
    mouse(browser, "mouseMoved", at(0.5), 0);
    let tip = browser.evaluate("panel.querySelector('.tip').hidden ? '' : panel.querySelector('.tip').textContent");
    assert!(
        tip.as_str().is_some_and(|text| text.contains("steps") && text.chars().filter(char::is_ascii_digit).count() > 3),
        "hover: {tip}"
    );

    let whole = "panel.querySelector('.tools button:last-child').hidden";
    assert_eq!(browser.evaluate(whole), true, "nothing is zoomed yet");
    mouse(browser, "mousePressed", at(0.4), 1);
    mouse(browser, "mouseMoved", at(0.6), 1);
    mouse(browser, "mouseReleased", at(0.8), 0);
    assert_eq!(browser.evaluate(whole), false, "dragging zooms");
    browser.evaluate("panel.querySelector('.tools button:last-child').click()");
    assert_eq!(browser.evaluate(whole), true, "and the button goes back");

    let picture = "panel.querySelector('.plot canvas').toDataURL()";
    let before = browser.evaluate(picture);
    browser.evaluate("panel.querySelector('.legend button').click()");
    let alone = browser.evaluate(picture);
    assert_ne!(before, alone, "an entry of the legend isolates its series");
    assert_eq!(
        browser.evaluate("panel.querySelectorAll('.legend .faint').length + 1"),
        browser.evaluate("panel.querySelectorAll('.legend button').length")
    );
    browser.evaluate("panel.querySelector('.legend button').click()");
    assert_eq!(browser.evaluate(picture), before, "and brings the others back");
    browser.evaluate("[...panel.querySelectorAll('.tools button')].find(b => b.textContent === 'Log').click()");
    assert_ne!(browser.evaluate(picture), before, "a log axis");
    browser.evaluate("[...panel.querySelectorAll('.tools button')].find(b => b.textContent === 'Log').click()");

    browser.evaluate("panel.querySelector('.plot canvas:last-of-type').focus()");
    for kind in ["rawKeyDown", "keyUp"] {
        browser.call(
            "Input.dispatchKeyEvent",
            serde_json::json!({"type": kind, "key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39}),
        );
    }
    let said = browser.evaluate("panel.querySelector('.said').textContent");
    assert!(said.as_str().is_some_and(|text| text.contains("steps")), "keys read values: {said}");

    let boxes = browser.evaluate("document.querySelectorAll('.choose input').length");
    assert!(boxes.as_f64().is_some_and(|count| count >= 4.0), "check boxes of runs: {boxes}");
    let first = "[...document.querySelectorAll('.choose tbody th')].find(th => th.textContent === panel.querySelector('.legend button').textContent)";
    browser.evaluate(&format!("{first}.querySelector('input').click()"));
    assert_ne!(browser.evaluate(picture), before, "a variant that is left out is not drawn");
    browser.evaluate(&format!("{first}.querySelector('input').click()"));
    assert_eq!(browser.evaluate(picture), before, "and comes back");
    // The same variant has the same color in every figure.
    let colors = browser.evaluate(
        "(() => { const seen = {}; for (const b of document.querySelectorAll('.legend button')) { const c = b.firstChild.style.color; \
         (seen[b.textContent] ??= new Set()).add(c); } return Object.values(seen).every(set => set.size === 1) })()",
    );
    assert_eq!(colors, true, "a variant has two colors");
}

/// A static figure switches to its picture of ratios, if there is one.
#[test]
fn a_heat_map_has_a_log_switch() {
    let Some(program) = termwise_base::test_skip::need("browser", "Chromium", chromium::find()) else { return };
    let map = |title: &str, values: [f64; 3]| {
        let map = HeatMap {
            title: title.into(),
            x: Names::count("head", 3),
            y: Names::count("layer", 1),
            values: vec![values.map(Some).into()],
            shade: Shade::Linear,
            range: None,
            unit: Unit::Number,
        };
        let figure = Figure { title: title.into(), description: title.into(), panels: vec![map.into()] };
        Block::Figure { name: title.into(), figure, caption: String::new() }
    };
    let folder = tempfile::tempdir().expect("a folder");
    let lead = vec![map("far", [0.001, 0.1, 5.0]), map("near", [1.0, 2.0, 3.0])];
    let page = Document { title: "maps".into(), lead, sections: vec![] }.write(folder.path()).expect("written");
    let mut browser = Browser::start(&program);
    browser.open(&format!("file://{}", page.display()), 1280);
    assert_eq!(browser.evaluate("document.querySelectorAll('figure > .tools').length"), 1, "one of the two");
    browser.evaluate("window.still = document.querySelector('figure > .in-log').parentNode");
    let seen = "[still.querySelector(':scope > svg'), still.querySelector('.in-log')].map(part => part.getBoundingClientRect().height > 0)";
    for (pressed, expected) in [("false", [true, false]), ("true", [false, true]), ("false", [true, false])] {
        assert_eq!(browser.evaluate(seen), serde_json::json!(expected));
        assert_eq!(browser.evaluate("still.querySelector(':scope > .tools button').getAttribute('aria-pressed')"), pressed);
        browser.evaluate("still.querySelector(':scope > .tools button').click()");
    }
    assert!(browser.complaints().is_empty(), "{:?}", browser.complaints());
}

/// Redraws all plots, and returns the texts with their boxes and the positions of dots, in drawing order.
const DRAWN: &str = "(() => {
    const texts = [], dots = [], prototype = CanvasRenderingContext2D.prototype, { fillText, arc } = prototype;
    prototype.fillText = function (text, x, y) {
        const width = this.measureText(text).width, left = this.textAlign === 'left' ? x : this.textAlign === 'right' ? x - width : x - width / 2;
        texts.push({ text, left, right: left + width, top: y - 10, bottom: y + 2 });
        fillText.call(this, text, x, y);
    };
    prototype.arc = function (x, y, ...rest) { dots.push([x, y]); arc.call(this, x, y, ...rest); };
    document.dispatchEvent(new Event('toggle'));
    Object.assign(prototype, { fillText, arc });
    return { texts, dots };
})()";

/// Labels of close points are all drawn without overlap; a curve with one point is visible.
#[test]
fn names_in_a_figure_do_not_overlap() {
    let Some(program) = termwise_base::test_skip::need("browser", "Chromium", chromium::find()) else { return };
    let names = ["softmax", "0..2", "0..4", "0..6", "0..8", "0..10"];
    let points = names.iter().enumerate().map(|(i, name)| Point::new(100.0 + i as f64, 1.0 + 0.001 * i as f64).named(*name)).collect();
    let line = |name: &str, points: Vec<(f64, f64)>| Layer::Line(Line { name: name.into(), color: 1, dashed: false, points });
    let chart = Chart {
        title: "crowded".into(),
        x: Axis::new("x", Scale::Linear, Unit::Number),
        y: Axis::new("y", Scale::Linear, Unit::Number),
        layers: vec![
            Layer::Points(Points { name: "points".into(), color: 2, points }),
            line("alone", vec![(50.0, 0.5)]),
            // Just above the rule, from its middle to its right end.
            line("above", (0..40).map(|i| (80.0 + i as f64, 0.21)).collect()),
            Layer::Rule(Rule { y: 0.2, label: "rule".into(), color: 0 }),
        ],
    };
    let figure = Figure { title: "crowded".into(), description: String::new(), panels: vec![chart.into()] };
    let lead = vec![Block::Figure { name: "crowded".into(), figure, caption: String::new() }];
    let folder = tempfile::tempdir().expect("a folder");
    let page = Document { title: "crowded".into(), lead, sections: vec![] }.write(folder.path()).expect("written");
    let mut browser = Browser::start(&program);
    browser.open(&format!("file://{}", page.display()), 1280);
    let drawn = browser.evaluate(DRAWN);
    let side = |text: &Value, key: &str| text[key].as_f64().expect("a number");
    let texts: Vec<&Value> = drawn["texts"].as_array().expect("texts").iter().collect();
    let written = |name: &str| texts.iter().find(|text| text["text"] == name).copied();
    let boxes: Vec<&Value> =
        names.iter().chain(&["rule"]).map(|name| written(name).unwrap_or_else(|| panic!("no {name}: {drawn}"))).collect();
    for (i, a) in boxes.iter().enumerate() {
        for b in &boxes[..i] {
            let apart = side(a, "left") >= side(b, "right") || side(b, "left") >= side(a, "right");
            assert!(apart || side(a, "top") >= side(b, "bottom") || side(b, "top") >= side(a, "bottom"), "{a} {b}");
        }
    }
    let rule = written("rule").expect("a name");
    // No dot of the line above the rule overlaps its label.
    let dots = drawn["dots"].as_array().expect("dots");
    assert_eq!(dots.len(), names.len() + 1, "the points, and the line of one point; the long line has no markers: {drawn}");
    let top = side(rule, "top");
    assert!(dots.iter().all(|dot| dot[1].as_f64().is_some_and(|y| y < top)), "{drawn}");
    assert!(browser.complaints().is_empty(), "{:?}", browser.complaints());
}

/// The tests above can fail: requests and console errors of a page are detected.
#[test]
fn requests_and_errors_are_noticed() {
    let Some(program) = termwise_base::test_skip::need("browser", "Chromium", chromium::find()) else { return };
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
