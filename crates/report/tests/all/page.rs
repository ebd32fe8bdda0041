//! HTML reports and tables as browsers and other programs read them.

use crate::sample;

use roxmltree::{Document as Parsed, Node, ParsingOptions};
use termwise_report::{Axis, Block, Cell, Document, DotPlot, Estimate, Figure, HeatMap, Scale, Section, Shade, Steps, Table, Tone, Unit};

fn parse(text: &str) -> Parsed<'_> {
    // The document type is that of HTML.
    Parsed::parse_with_options(text, ParsingOptions { allow_dtd: true, ..ParsingOptions::default() }).expect("well-formed")
}

fn named<'a, 'i>(document: &'a Parsed<'i>, name: &str) -> Vec<Node<'a, 'i>> {
    document.descendants().filter(|node| node.tag_name().name() == name).collect()
}

#[test]
fn an_html_report_is_self_contained() {
    let text = sample::page().to_html();
    assert!(!text.contains("http:") && !text.contains("https:") && !text.contains("url(") && !text.contains("@import"));
    assert!(!text.replace(termwise_report::FIGURES, "").contains("NaN") && text == sample::page().to_html());
    let document = parse(&text);
    for (element, attribute) in [("img", ""), ("link", ""), ("iframe", ""), ("a", "download"), ("a", "src")] {
        assert!(named(&document, element).iter().all(|n| !attribute.is_empty() && !n.has_attribute(attribute)), "{element}");
    }
    let scripts = named(&document, "script");
    assert_eq!(scripts.len(), 2, "data once, and one script for all figures");
    assert!(scripts.iter().all(|n| !n.has_attribute("src")));
    let data: serde_json::Value = serde_json::from_str(scripts[0].text().expect("data")).expect("JSON");
    let figures = data["figures"].as_object().expect("figures");
    assert!(figures.len() == 9 && figures.keys().all(|id| text.contains(&format!("<figure id=\"{id}\">"))), "{:?}", figures.keys());
    assert!(figures.values().any(|figure| figure["panels"][0]["series"][0]["y"].is_array()));
    let policy = named(&document, "meta")
        .into_iter()
        .find_map(|n| n.has_attribute("http-equiv").then(|| n.attribute("content"))?)
        .expect("a policy");
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-") && !policy.contains("unsafe"), "{policy}");
    assert_eq!(named(&document, "style").len(), 1, "one sheet for all figures");
    assert_eq!((named(&document, "svg").len(), named(&document, "table").len(), named(&document, "section").len()), (10, 2, 6));
    assert_eq!(text.matches("<div class=\"in-log\"").count(), 1, "nine figures, one of them with a log form");
    // Links point to anchors in the document, and anchors are unique.
    let ids: Vec<&str> = document.descendants().filter_map(|n| n.attribute("id")).collect();
    assert!(ids.iter().enumerate().all(|(i, id)| !ids[..i].contains(id)), "{ids:?}");
    for link in named(&document, "a") {
        let target = link.attribute("href").and_then(|href| href.strip_prefix('#')).expect("an anchor in the document");
        assert!(ids.contains(&target), "{target}");
    }
    // Every class rule of figures is scoped to figures.
    let css = named(&document, "style")[0].text().expect("rules").to_string();
    let figures = css.split_once("svg.termwise").expect("rules of figures").1;
    assert!(
        figures
            .split('}')
            .filter_map(|rule| rule.rsplit('{').nth(1))
            .filter(|s| s.contains('.'))
            .skip(1)
            .all(|s| s.starts_with(".termwise ")),
        "{figures}"
    );
    assert!(
        named(&document, "svg")
            .iter()
            .all(|n| n.attribute("role") == Some("img") && n.first_element_child().is_some_and(|t| t.has_tag_name("title")))
    );
    let badges: Vec<String> = document
        .descendants()
        .filter(|n| n.attribute("class").is_some_and(|c| c.starts_with("badge")))
        .map(|n| n.descendants().filter(Node::is_text).filter_map(|t| t.text()).collect())
        .collect();
    assert_eq!(badges, ["✓ reproduced", "○ inconclusive at this scale", "✗ contradicted"]);
}

#[test]
fn hostile_names_are_escaped() {
    let evil = "</title></style><script>alert(1)</script>\"'&\u{0}\u{1b}[31m";
    let mut table = Table::new(evil, [evil]);
    table.rows = vec![vec![Cell::text(evil)], vec![Cell::code(evil)], vec![Cell::Link(evil.into(), "javascript:alert(1)".into())]];
    let map = HeatMap { title: evil.into(), ..sample::heads() };
    let figure = Figure { title: evil.into(), description: evil.into(), panels: vec![map.into()] };
    let blocks = vec![
        Block::Text(evil.into()),
        Block::List(vec![evil.into()]),
        Block::Figure { name: evil.into(), figure: figure.clone(), caption: evil.into() },
        Block::Figure { name: "../../etc/passwd".into(), figure, caption: String::new() },
        Block::Table { name: evil.into(), table: table.clone() },
        Block::badge(Tone::Open, evil, evil),
        Block::Facts(vec![(evil.into(), evil.into())]),
        Block::Code(format!("{evil}\n  {evil}")),
        Block::Details { summary: evil.into(), blocks: vec![Block::Text(format!("[{evil}](javascript:x) **{evil}**"))] },
    ];
    let sections = vec![Section { heading: evil.into(), blocks: blocks.clone() }, Section { heading: evil.into(), blocks }];
    let page = Document { title: evil.into(), lead: vec![], sections };
    let text = page.to_html();
    let document = parse(&text);
    // Only the data and script of the report, none from a name.
    assert!(named(&document, "script").len() == 2 && text.matches("<script").count() == 2 && !text.contains("href=\"java"));
    let data: serde_json::Value = serde_json::from_str(named(&document, "script")[0].text().expect("data")).expect("JSON");
    assert!(data["figures"].as_object().is_some_and(|all| all.values().all(|figure| figure["title"] == evil)), "{data}");
    assert!(!text.contains('\u{1b}') && !table.to_text(100).contains('\u{1b}'));
    assert_eq!(named(&document, "title")[0].text().map(|t| t.contains("<script>alert(1)</script>")), Some(true));
    let code = named(&document, "pre")[0].descendants().filter_map(|n| n.text()).next().expect("lines").to_string();
    assert_eq!(code.lines().count(), 2);
    let folder = tempfile::tempdir().expect("a folder");
    page.write(folder.path()).expect("written");
    let mut names: Vec<String> = std::fs::read_dir(folder.path().join("figures"))
        .expect("figures")
        .filter_map(|entry| Some(entry.ok().filter(|entry| entry.path().is_file())?.file_name().to_string_lossy().into_owned()))
        .collect();
    names.sort();
    assert_eq!(names.len(), 16, "two names twice, four kinds: {names:?}");
    assert_eq!(std::fs::read_dir(folder.path().join("figures/column")).expect("figures").count(), 8, "two kinds for papers");
    assert!(names.contains(&"etc-passwd.svg".into()) && names.contains(&"etc-passwd-2.csv".into()), "{names:?}");
}

#[test]
fn a_report_directory_contains_all_linked_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let index = sample::page().write(&folder.path().join("deep/er")).expect("written");
    let text = std::fs::read_to_string(&index).expect("a page");
    let document = parse(&text);
    let mut files = 0;
    for href in named(&document, "a").iter().filter_map(|n| n.attribute("href")).filter(|href| !href.starts_with('#')) {
        let bytes = std::fs::read(index.with_file_name(href)).unwrap_or_else(|e| panic!("{href}: {e}"));
        let start: &[u8] = match href.rsplit('.').next() {
            Some("svg") => b"<svg ",
            Some("png") => b"\x89PNG",
            Some("pdf") => b"%PDF-",
            _ => b"",
        };
        assert!(bytes.starts_with(start) && !bytes.is_empty(), "{href}");
        files += 1;
    }
    assert_eq!(files, 9 * 6 + 2);
    let summary = std::fs::read_to_string(index.with_file_name("summary.md")).expect("a summary");
    let pictures: Vec<&str> =
        summary.lines().filter_map(|line| line.strip_suffix(')')?.split_once("](figures/")).map(|(_, file)| file).collect();
    assert!(!pictures.is_empty() && pictures.iter().all(|file| index.with_file_name("figures").join(file).is_file()), "{pictures:?}");
    let blocked = sample::page().write(&index).expect_err("a file is not a directory").to_string();
    assert!(blocked.starts_with("cannot write ") && blocked.contains("index.html"), "{blocked}");
}

#[test]
fn tables_align_numbers_and_respect_wide_characters() {
    let mut table = Table::new("**Bold** caption", ["名前", "loss", "n"]);
    table.rows = vec![
        vec![Cell::text("漢字"), Cell::MeanSd(1.5, 0.25, 2), Cell::Number(7.0, 0)],
        vec![Cell::code("a"), Cell::MeanSd(12.0, f64::NAN, 2), Cell::Number(-1234.0, 0)],
        vec![Cell::Link("link".into(), "#x".into())],
        vec![Cell::text("b"), Cell::MeanSd(f64::NAN, 1.0, 2), Cell::Number(-0.0001, 2)],
    ];
    let expected = "Bold caption\n\n\
                    名前         loss      n\n\
                    ────  ───────────  ─────\n\
                    漢字  1.50 ± 0.25      7\n\
                    a           12.00  −1234\n\
                    link            –      –\n\
                    b               –   0.00\n";
    assert_eq!(table.to_text(100), expected);
    let csv = "名前,loss,loss std,n\n漢字,1.5,0.25,7\na,12,,-1234\nlink,,,\nb,,1,-0.0001\n";
    assert_eq!(table.to_csv(), csv);
    let html = table.to_html();
    let document = parse(&html);
    assert_eq!(named(&document, "td").len(), 12);
    assert_eq!(named(&document, "th").iter().filter(|n| n.attribute("class") == Some("number")).count(), 2);
    assert_eq!(named(&document, "strong").first().and_then(|n| n.text()), Some("Bold"));
    let empty = Table::default();
    assert!(parse(&empty.to_html()).root_element().has_tag_name("table") && !empty.to_text(80).contains("NaN"));
    let amount = Cell::Amount(f64::INFINITY, Unit::Bytes);
    assert!(Table { rows: vec![vec![amount]], ..empty }.to_text(80).contains('–'));
}

#[test]
fn heat_maps_fit_the_terminal() {
    let numbers = sample::heads().to_text(100);
    assert!(numbers.contains("layer \\ head") && numbers.contains(" 65 %") && numbers.lines().all(|line| line.chars().count() <= 100));
    let blocks = sample::spectrum(12, 100).to_text(60);
    assert!(blocks.lines().all(|line| line.chars().count() <= 60) && blocks.contains('█') && blocks.contains('·'), "{blocks}");
    assert!(blocks.ends_with("▁ 1e-8 to █ 1, log scale; · none\n"));
    assert_eq!(blocks.matches("layer \\ order n").count(), 3, "{blocks}");
    // Every column name is above its column.
    let ruler = blocks.lines().find(|line| line.contains("layer \\")).expect("names");
    let place = |name: &str| ruler.find(name).expect("a name");
    assert_eq!(place(" 20") - place(" 10"), 10);
    assert_eq!(HeatMap { values: vec![], ..sample::heads() }.to_text(80).lines().last(), Some("no values to show"));
    let narrow = sample::spectrum(2, 30).to_text(0);
    assert!(narrow.lines().count() > 4);
}

/// The Vega-Lite form contains every value of a figure; NaN and infinity are absent.
#[test]
fn vega_lite_contains_every_value() {
    let chart = termwise_report::Chart {
        title: "loss".into(),
        x: termwise_report::Axis::new("step", termwise_report::Scale::Linear, Unit::Number),
        y: termwise_report::Axis::new("nats", termwise_report::Scale::Log, Unit::Number),
        layers: vec![
            termwise_report::Layer::Line(termwise_report::Line {
                name: "a".into(),
                color: 1,
                dashed: false,
                points: vec![(0.0, 3.0), (1.0, f64::NAN), (2.0, 1.5)],
            }),
            termwise_report::Layer::Runs(termwise_report::Runs {
                name: "a".into(),
                color: 1,
                runs: vec![("seed 1".into(), vec![(0.0, 3.0), (2.0, 1.25)])],
            }),
        ],
    };
    let figure = Figure { title: "t".into(), description: "d".into(), panels: vec![chart.into(), sample::heads().into()] };
    let vega = figure.to_vega_lite();
    assert!(vega["$schema"].as_str().is_some_and(|schema| schema.contains("vega-lite/v5")));
    let lines = &vega["vconcat"][0]["layer"][0];
    assert_eq!(lines["data"]["values"][2], serde_json::json!({"series": "a", "x": 2.0, "y": 1.5}));
    assert!(lines["data"]["values"][1]["y"].is_null() && lines["encoding"]["y"]["scale"]["type"] == "log");
    assert_eq!(lines["encoding"]["color"]["scale"]["range"][0], "#0b5fc0");
    assert_eq!(vega["vconcat"][0]["layer"][1]["data"]["values"][0]["y"], 1.25, "the end of a run");
    assert_eq!(vega["vconcat"][1]["mark"]["type"], "rect");
    assert!(figure.to_csv().contains("\"a, seed 1\",2,1.25"), "{}", figure.to_csv());
}

/// A figure shown as static SVG has a second SVG on a log scale if its values span a wide range, and only then.
#[test]
fn static_figures_include_their_log_form() {
    let map = |values: &[f64]| HeatMap { values: vec![values.iter().copied().map(Some).collect()], ..sample::heads() };
    let rows = |means: &[f64]| DotPlot {
        title: "recall".into(),
        label: String::new(),
        categories: (0..means.len()).map(|i| format!("a variant whose name is too long for a column, {i}")).collect(),
        value: Axis::new("nats", Scale::Linear, Unit::Number),
        series: vec![Steps { name: String::new(), color: 1, values: means.iter().map(|&mean| Some(Estimate::exact(mean))).collect() }],
        colors: vec![],
        rules: vec![],
    };
    let columns = |plot: DotPlot| DotPlot { categories: vec!["a".into(), "b".into(), "c".into()], ..plot };
    let cases: [(termwise_report::Panel, bool); 9] = [
        (map(&[0.001, 0.5, 0.9]).into(), true),
        (map(&[0.0, 0.01, 0.9]).into(), true),
        (map(&[0.2, 0.5, 0.9]).into(), false),
        (map(&[-0.001, 0.5, 0.9]).into(), false),
        (HeatMap { shade: Shade::Log, ..map(&[0.001, 0.5, 0.9]) }.into(), false),
        (HeatMap { shade: Shade::Diverging, ..map(&[0.001, 0.5, 0.9]) }.into(), false),
        (rows(&[0.001, 0.3, 2.7]).into(), true),
        (rows(&[1.0, 2.0, 2.7]).into(), false),
        // The script redraws columns with its own log axis.
        (columns(rows(&[0.001, 0.3, 2.7])).into(), false),
    ];
    for (index, (panel, wanted)) in cases.into_iter().enumerate() {
        let figure = Figure { title: "a figure".into(), description: "a figure".into(), panels: vec![panel] };
        let blocks = vec![Block::Figure { name: "a".into(), figure, caption: String::new() }];
        let text = Document { title: "a page".into(), lead: blocks, sections: vec![] }.to_html();
        let document = parse(&text);
        let second = document.descendants().find(|n| n.attribute("class") == Some("in-log"));
        assert_eq!(second.is_some(), wanted, "case {index}");
        if let Some(second) = second {
            assert_eq!(second.attribute("hidden"), Some(""), "without scripts only one is shown");
            let picture = |node: Node| {
                node.descendants().filter_map(|n| n.attribute("d").or(n.attribute("fill"))).map(str::to_owned).collect::<Vec<_>>()
            };
            let first = second.parent().and_then(|figure| figure.first_element_child()).expect("a picture");
            assert_ne!(picture(first), picture(second), "case {index}");
        }
    }
}
