//! Figures as SVG.

use roxmltree::{Document, Node};
use termwise_report::{Axis, Chart, Figure, Layer, Line, Mark, Scale, Unit};

fn axis(scale: Scale, unit: Unit) -> Axis {
    Axis::new("length & width", scale, unit)
}

fn line(name: &str, color: usize, points: &[(f64, f64)]) -> Layer {
    Layer::Line(Line { name: name.into(), color, dashed: color == 2, points: points.to_vec() })
}

fn figure(layers: Vec<Layer>, scale: Scale) -> Figure {
    let chart = Chart { title: "a < b".into(), x: axis(scale, Unit::Number), y: axis(scale, Unit::Bytes), layers };
    Figure { title: "\"Tests\" & <more>\u{1}".into(), description: "What is seen: ]]> &amp;".into(), panels: vec![chart.into()] }
}

fn paths<'a, 'i>(document: &'a Document<'i>, class: &str) -> Vec<Node<'a, 'i>> {
    let has = |node: &Node| node.attribute("class").is_some_and(|classes| classes.split(' ').any(|c| c == class));
    document.descendants().filter(has).collect()
}

/// The lines of charts, which have a title, without their samples in the legend.
fn series<'a, 'i>(document: &'a Document<'i>) -> Vec<Node<'a, 'i>> {
    paths(document, "line").into_iter().filter(Node::has_children).collect()
}

/// All numbers of a path.
fn numbers(node: Node) -> Vec<f64> {
    let d = node.attribute("d").expect("a path");
    d.split(|c: char| c.is_alphabetic() || c == ' ').filter(|x| !x.is_empty()).map(|x| x.parse().expect("a number")).collect()
}

#[test]
fn every_series_is_drawn_inside_the_plot_and_named() {
    let layers = vec![
        line("cache", 0, &[(1.0, 512.0), (1e3, 512e3), (1e6, 512e6)]),
        line("0..2", 1, &[(1.0, 5e5), (1e6, 5e5)]),
        line("0..3", 2, &[(1.0, 1e7), (1e6, 1e7)]),
        Layer::Mark(Mark { x: 1089.0, y: 5e5, label: "1,089".into(), color: 1 }),
    ];
    let text = figure(layers, Scale::Log).to_svg();
    let document = Document::parse(&text).expect("XML");
    let root = document.root_element();
    assert_eq!((root.tag_name().name(), root.attribute("role")), ("svg", Some("img")));
    assert!(document.descendants().filter(Node::is_element).all(|node| node.tag_name().namespace() == Some("http://www.w3.org/2000/svg")));
    let child = |name: &str| root.children().find(|node| node.tag_name().name() == name).and_then(|node| node.text());
    assert_eq!(child("title"), Some("\"Tests\" & <more>\u{fffd}"));
    assert_eq!(child("desc"), Some("What is seen: ]]> &amp;"));
    assert!(child("style").is_some_and(|css| css.contains("@media (prefers-color-scheme:dark)") && css.contains(".line.c5")));

    let names: Vec<&str> = series(&document).iter().filter_map(|node| node.first_element_child()?.text()).collect();
    assert_eq!(names, ["cache", "0..2", "0..3"]);
    let legend: Vec<&str> = document.descendants().filter(|n| n.tag_name().name() == "text").filter_map(|n| n.text()).collect();
    assert!(names.iter().all(|name| legend.iter().filter(|text| text == &name).count() == 1), "{legend:?}");
    assert!(legend.contains(&"1,089") && legend.contains(&"a < b") && legend.contains(&"length & width"));
    assert_eq!(paths(&document, "dashed").len(), 2, "in the chart and in the legend");

    let view: Vec<f64> = root.attribute("viewBox").expect("a view").split(' ').map(|x| x.parse().expect("a number")).collect();
    for node in series(&document) {
        assert!(numbers(node).iter().all(|&x| (0.0..=view[2].max(view[3])).contains(&x)));
    }
    // From left to right, and the cache from bottom to top.
    let cache = numbers(series(&document)[0]);
    let (first, last) = ((cache[0], cache[1]), (cache[cache.len() - 2], cache[cache.len() - 1]));
    assert!(first.0 < last.0 && first.1 > last.1 && last.0 <= view[2]);
    // A power law is a straight line on log-log axes.
    let half = |value: f64, first: f64, last: f64| ((value - first) / (last - first) - 0.5).abs() < 1e-3;
    assert!(half(cache[3], first.0, last.0) && half(cache[4], first.1, last.1));
    let flat = numbers(series(&document)[1]);
    assert_eq!(flat[1], flat[flat.len() - 1]);
    // The mark is on the flat line.
    let dot = paths(&document, "dot")[0];
    let heights: Vec<f64> = numbers(dot).chunks(2).map(|place| place[1]).collect();
    let (low, high) = heights.iter().fold((f64::MAX, 0f64), |(low, high), &y| (low.min(y), high.max(y)));
    assert!(((low + high) / 2.0 - flat[1]).abs() < 0.02 && high - low > 6.0);
}

#[test]
fn tick_labels_match_their_positions() {
    let text = figure(vec![line("a", 0, &[(1.0, 1e3), (1e6, 1e9)])], Scale::Log).to_svg();
    let document = Document::parse(&text).expect("XML");
    let ticks = |class: &str| paths(&document, class).iter().filter_map(|node| node.text()).collect::<Vec<_>>();
    assert_eq!(ticks("x"), ["1", "10", "100", "1k", "10k", "100k", "1M"]);
    assert_eq!(ticks("y"), ["1 KB", "10 KB", "100 KB", "1 MB", "10 MB", "100 MB", "1 GB"]);
    let places: Vec<f64> = paths(&document, "x").iter().filter_map(|node| node.attribute("x")?.parse().ok()).collect();
    assert!(places.windows(2).all(|pair| (pair[1] - pair[0] - (places[6] - places[0]) / 6.0).abs() < 0.02), "{places:?}");
}

#[test]
fn tick_labels_do_not_overlap() {
    for (low, high, unit) in
        [(34_816.0, 2_097_152.0, Unit::Bytes), (8e3, 9e9, Unit::Bytes), (1.0, 123_456_789.0, Unit::Number), (0.999, 1.001, Unit::Number)]
    {
        for scale in [Scale::Log, Scale::Linear] {
            let chart = Chart {
                title: "t".into(),
                x: Axis::new("x", scale, unit),
                y: Axis::new("", Scale::Linear, Unit::Number),
                layers: vec![line("a", 0, &[(low, 1.0), (high, 2.0)])],
            };
            let figure = Figure { title: "t".into(), description: String::new(), panels: vec![chart.into()] };
            for text in [figure.to_svg(), figure.to_column_svg()] {
                let document = Document::parse(&text).expect("XML");
                let place = |node: &Node| node.attribute("x").and_then(|x| x.parse::<f64>().ok()).expect("a place");
                let ticks: Vec<(f64, usize)> =
                    paths(&document, "x").iter().map(|node| (place(node), node.text().expect("a label").chars().count())).collect();
                assert!(ticks.len() >= 2, "{low} {high}: {ticks:?}");
                // Characters of the font are at least 4 pixels wide, and most have 8.
                let apart = |pair: &[(f64, usize)]| pair[1].0 - pair[0].0 >= 3.0 * (pair[0].1 + pair[1].1) as f64;
                assert!(ticks.windows(2).all(apart), "{low} {high}: {ticks:?}");
            }
        }
    }
}

#[test]
fn values_outside_the_domain_are_gaps_and_empty_charts_show_a_message() {
    let wild = [(1.0, 1.0), (2.0, f64::NAN), (3.0, 3.0), (4.0, f64::INFINITY), (f64::NEG_INFINITY, 1.0), (5.0, 5.0), (6.0, 6.0)];
    for scale in [Scale::Linear, Scale::Log] {
        let text = figure(vec![line("a", 0, &wild), line("empty", 1, &[])], scale).to_svg();
        let document = Document::parse(&text).expect("XML");
        let d = series(&document)[0].attribute("d").expect("a path");
        assert_eq!((d.matches('M').count(), d.matches('L').count()), (3, 1), "{d}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }
    let negative = figure(vec![line("a", 0, &[(0.0, 1.0), (1.0, 0.0), (1.0, -1.0)])], Scale::Log).to_svg();
    let nothing = figure(vec![], Scale::Linear).to_svg();
    let marks = figure(vec![Layer::Mark(Mark { x: f64::NAN, y: 1.0, label: "here".into(), color: 9 })], Scale::Linear).to_svg();
    for text in [negative, nothing, marks] {
        Document::parse(&text).expect("XML");
        assert!(text.contains("no values to show") && !text.contains("NaN"), "{text}");
    }
    let bare = Figure { title: String::new(), description: String::new(), panels: vec![] }.to_svg();
    Document::parse(&bare).expect("XML");
}

#[test]
fn long_legends_and_titles_take_several_rows() {
    let layers = (0..12).map(|i| line(&format!("series with the number {i}"), i, &[(0.0, 0.0), (1.0, i as f64)])).collect();
    let text = Figure { title: "many words ".repeat(20) + &"x".repeat(100), ..figure(layers, Scale::Linear) }.to_svg();
    let document = Document::parse(&text).expect("XML");
    let width: f64 = document.root_element().attribute("width").and_then(|x| x.parse().ok()).expect("a width");
    let samples: Vec<Vec<f64>> = paths(&document, "line").into_iter().filter(|n| !n.has_children()).map(numbers).collect();
    assert_eq!(samples.len(), 12);
    let rows: Vec<f64> = samples.iter().map(|s| s[1]).collect();
    assert!(rows.is_sorted() && rows[0] < rows[11] && samples.iter().all(|s| s[0] + 24.0 < width));
    let titles: Vec<&str> = paths(&document, "title").iter().filter_map(|node| node.text()).collect();
    assert!(titles.len() > 4 && titles.iter().all(|line| line.len() < 60), "{titles:?}");
    assert_eq!(titles.join("").matches('x').count(), 100);
}

#[test]
fn svg_output_is_deterministic() {
    let make = || figure(vec![line("a", 0, &[(0.0, 0.1), (1.0, 0.2)])], Scale::Linear).to_svg();
    assert_eq!(make(), make());
}
