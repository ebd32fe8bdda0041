//! Dot plots, points and heat maps, and figures as CSV and PNG.

use crate::sample;

use roxmltree::{Document, Node};
use termwise_report::{
    Axis, Band, Chart, DotPlot, Estimate, Figure, HeatMap, Layer, Line, Names, Panel, Point, Points, Rule, Scale, Shade, Steps, Theme, Unit,
};

fn classed<'a, 'i>(document: &'a Document<'i>, class: &str) -> Vec<Node<'a, 'i>> {
    let has = |node: &Node| node.attribute("class").is_some_and(|classes| classes.split(' ').any(|c| c == class));
    document.descendants().filter(has).collect()
}

fn of(panel: impl Into<Panel>) -> Figure {
    Figure { title: "t".into(), description: "d".into(), panels: vec![panel.into()] }
}

fn numbers(d: &str) -> Vec<f64> {
    d.split(|c: char| c.is_alphabetic() || c == ' ').filter(|x| !x.is_empty()).map(|x| x.parse().expect("a number")).collect()
}

fn chart(layers: Vec<Layer>, scale: Scale) -> Chart {
    let axis = || Axis::new("", scale, Unit::Number);
    Chart { title: "chart".into(), x: axis(), y: axis(), layers }
}

/// Every figure of the sample report, and edge cases.
fn all() -> Vec<Figure> {
    let map = HeatMap { values: vec![vec![Some(f64::NAN), None], vec![], vec![Some(f64::INFINITY)]], ..sample::heads() };
    vec![
        sample::losses(),
        sample::dot_plot(false),
        sample::dot_plot(true),
        sample::scatter(),
        sample::separation(),
        of(sample::spectrum(40, 100)),
        of(sample::heads()),
        of(sample::differences()),
        of(map),
        of(HeatMap { x: Names::count("", 0), y: Names::count("", 0), values: vec![], ..sample::heads() }),
        Figure { title: String::new(), description: String::new(), panels: vec![] },
    ]
}

#[test]
fn everything_drawn_is_valid_and_inside_the_figure() {
    for figure in all() {
        let text = figure.to_svg();
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        let document = Document::parse(&text).expect("XML");
        let view = numbers(document.root_element().attribute("viewBox").expect("a view"));
        for node in document.descendants().filter(|node| node.has_attribute("d")) {
            for place in numbers(node.attribute("d").expect("a path").trim_end_matches("h0").replace("h0", "").as_str()).chunks(2) {
                assert!(place[0] >= 0.0 && place[0] <= view[2] && place[1] >= 0.0 && place[1] <= view[3], "{place:?} {}", figure.title);
            }
        }
        for node in document.descendants().filter(|node| node.tag_name().name() == "text") {
            let at = |key| node.attribute(key).and_then(|x| x.parse::<f64>().ok()).expect("a place");
            assert!(at("x") >= 0.0 && at("x") <= view[2] && at("y") > 0.0 && at("y") <= view[3], "{:?}", node.text());
        }
        assert_eq!(text, figure.to_svg());
    }
}

#[test]
fn bands_enclose_their_line_and_are_not_in_the_legend() {
    let band = Band {
        name: "seeds".into(),
        color: 2,
        points: vec![(0.0, 1.0, 3.0), (1.0, 2.0, 4.0), (2.0, f64::NAN, 1.0), (3.0, 1.0, 2.0), (4.0, 1.0, 2.0)],
    };
    let line = Line { name: "mean".into(), color: 2, dashed: false, points: vec![(0.0, 2.0), (1.0, 3.0)] };
    let text = of(chart(vec![Layer::Band(band), Layer::Line(line)], Scale::Linear)).to_svg();
    let document = Document::parse(&text).expect("XML");
    let shapes = classed(&document, "band");
    assert_eq!(shapes.len(), 1);
    let d = shapes[0].attribute("d").expect("a path");
    assert_eq!((d.matches('M').count(), d.matches('z').count()), (2, 2), "a gap where a value is missing: {d}");
    let (band, line) = (numbers(d), numbers(classed(&document, "line")[1].attribute("d").expect("a path").replace("h0", "").as_str()));
    // Around: low, low, high, high; the line is in the middle.
    assert!(((band[1] + band[7]) / 2.0 - line[1]).abs() < 0.02 && band[1] > line[1] && ((band[3] + band[5]) / 2.0 - line[3]).abs() < 0.02);
    let texts: Vec<&str> = document.descendants().filter(|n| n.tag_name().name() == "text").filter_map(|n| n.text()).collect();
    assert!(texts.contains(&"mean") && !texts.contains(&"seeds"));
}

#[test]
fn points_have_error_bars_labels_and_shapes() {
    let points = |color, y: f64| {
        let point = Point::new(1.0, y).within(y - 1.0, y + 1.0).named(format!("name {color}"));
        Layer::Points(Points { name: format!("series {color}"), color, points: vec![point, Point::new(2.0, y), Point::new(f64::NAN, y)] })
    };
    let text = of(chart((0..6).map(|i| points(i, 3.0 * (i + 1) as f64)).collect(), Scale::Linear)).to_svg();
    let document = Document::parse(&text).expect("XML");
    assert_eq!(
        (classed(&document, "dot").len(), classed(&document, "whisker").len()),
        (6 * 3, 6),
        "two in the chart and one in the legend"
    );
    let titles: Vec<&str> = classed(&document, "dot").iter().filter_map(|n| n.first_element_child()?.text()).collect();
    assert!(titles.contains(&"series 3, name 3: 1, 12"), "{titles:?}");
    let names: Vec<&str> = classed(&document, "mark").iter().filter_map(|n| n.text()).collect();
    assert_eq!(names, ["name 0", "name 1", "name 2", "name 3", "name 4", "name 5"]);
    // A shape is its outline relative to its first corner.
    let shape = |node: &Node| {
        let p = numbers(node.attribute("d").expect("a path").trim_end_matches('z'));
        p.chunks(2).map(|c| (((c[0] - p[0]) * 10.0).round() as i64, ((c[1] - p[1]) * 10.0).round() as i64)).collect::<Vec<_>>()
    };
    let samples: Vec<_> = classed(&document, "dot").iter().filter(|n| !n.has_children()).map(shape).collect();
    assert!((0..6).all(|i| (0..i).all(|j| samples[i] != samples[j])), "{samples:?}");
}

/// Points close to it take the places above and next to it, so the label is below.
#[test]
fn the_lowest_point_has_room_for_its_label() {
    let places = [(1.0, 2.44), (1.1, 2.53), (1.2, 1.743), (2.4, 1.728), (2.6, 1.779), (1.9, 1.779), (2.4, 1.8), (9.0, 3.0)];
    let point = |(index, &(x, y)): (usize, &(f64, f64))| Point::new(x, y).named(format!("point {index}"));
    let points = Points { name: "points".into(), color: 0, points: places.iter().enumerate().map(point).collect() };
    let text = of(chart(vec![Layer::Points(points)], Scale::Linear)).to_svg();
    let document = Document::parse(&text).expect("XML");
    let names: Vec<&str> = classed(&document, "mark").iter().filter_map(|n| n.text()).collect();
    assert!(names.contains(&"point 3"), "{names:?}");
}

#[test]
fn dot_plots_have_columns_or_rows_and_rules_have_labels() {
    for (long, fixed) in [(false, 1), (true, 0)] {
        let text = sample::dot_plot(long).to_svg();
        let document = Document::parse(&text).expect("XML");
        let dots: Vec<Node> = classed(&document, "dot").into_iter().filter(Node::has_children).collect();
        assert_eq!(dots.len(), if long { 11 } else { 13 }, "one is missing");
        let rule = numbers(classed(&document, "rule")[0].attribute("d").expect("a path"));
        assert_eq!(rule[fixed], rule[fixed + 2], "across categories");
        assert!(classed(&document, "mark").iter().any(|n| n.text() == Some("softmax ≤ 2.69")));
    }
    let steps = Steps {
        name: String::new(),
        color: 1,
        values: vec![Some(Estimate::exact(1.0)), Some(Estimate { mean: 2.0, low: -1.0, high: 3.0 })],
    };
    let plot = DotPlot {
        title: "log".into(),
        label: String::new(),
        categories: vec!["a".into(), "b".into(), "c".into()],
        value: Axis::new("", Scale::Log, Unit::Number),
        series: vec![steps],
        colors: Vec::new(),
        rules: vec![],
    };
    let text = of(plot).to_svg();
    let document = Document::parse(&text).expect("XML");
    let whiskers = classed(&document, "whisker");
    assert_eq!(whiskers.len(), 1, "a value without a spread has none");
    let axis = classed(&document, "axis").into_iter().map(|n| numbers(n.attribute("d").expect("a path"))[1]).next_back();
    assert_eq!(Some(numbers(whiskers[0].attribute("d").expect("a path"))[1]), axis, "values outside the log scale end at the axis");
}

#[test]
fn rule_labels_avoid_lines() {
    let flat = Line { name: "l".into(), color: 1, dashed: false, points: vec![(0.0, 9.0), (5.0, 3.1), (10.0, 3.1)] };
    let rule = Layer::Rule(Rule { y: 3.0, label: "a rule".into(), color: 0 });
    let lower = Line { points: vec![(0.0, 2.9), (10.0, 2.9)], ..flat.clone() };
    let place = |layers: Vec<Layer>| {
        let text = of(chart(layers, Scale::Linear)).to_svg();
        let document = Document::parse(&text).expect("XML");
        let label = classed(&document, "mark")[0];
        let [x, y] = ["x", "y"].map(|key| label.attribute(key).and_then(|at| at.parse::<f64>().ok()).expect("a place"));
        (x, y, numbers(classed(&document, "rule")[0].attribute("d").expect("a path"))[1])
    };
    let (x, ..) = place(vec![Layer::Line(flat.clone()), Layer::Line(lower), rule.clone()]);
    assert!(x < 240.0, "left, where the line is high: {x}");
    // Nothing is lower than the rule: there is room for the label below it.
    let (x, y, of_rule) = place(vec![Layer::Line(flat), rule]);
    assert!(x > 240.0 && y > of_rule, "{x} {y} {of_rule}");
}

#[test]
fn cells_have_their_value_as_a_tooltip_and_a_matching_colour() {
    let map = HeatMap {
        title: "<map> & \"more\"".into(),
        x: Names::new("or<der", ["a&b", "c"]),
        y: Names::count("layer", 2),
        values: vec![vec![Some(1e-4), Some(1e-2)], vec![Some(1.0), Some(0.0)]],
        shade: Shade::Log,
        range: None,
        unit: Unit::Number,
    };
    let text = of(map.clone()).to_svg();
    let document = Document::parse(&text).expect("XML");
    let cells: Vec<(String, String)> = document
        .descendants()
        .filter(|n| n.has_attribute("fill") && n.has_children())
        .map(|n| (n.attribute("fill").expect("a colour").into(), n.first_element_child().and_then(|t| t.text()).expect("a title").into()))
        .collect();
    let titles: Vec<&str> = cells.iter().map(|c| c.1.as_str()).collect();
    assert_eq!(titles, ["layer 0, or<der a&b: 1e-4", "layer 0, or<der c: 0.01", "layer 1, or<der a&b: 1"]);
    let bar: Vec<&str> =
        document.descendants().filter(|n| n.has_attribute("fill") && !n.has_children()).filter_map(|n| n.attribute("fill")).collect();
    assert_eq!((bar[0], bar[bar.len() - 1]), (cells[0].0.as_str(), cells[2].0.as_str()), "ends of the bar are the ends of the values");
    let middle = i64::from_str_radix(&cells[1].0[1..], 16).expect("a colour");
    let near = |other: &str| {
        (0..3)
            .map(|i| ((middle >> (8 * i) & 255) - (i64::from_str_radix(&other[1..], 16).expect("a colour") >> (8 * i) & 255)).abs())
            .sum::<i64>()
    };
    assert!(near(bar[bar.len() / 2]) < 12, "halfway on the log scale");
    let blank = classed(&document, "blank");
    assert_eq!(blank[0].first_element_child().and_then(|n| n.text()), Some("layer 1, or<der c: 0"));
    // Numbers only if they fit.
    assert_eq!(classed(&document, "cell").len(), 3);
    let large = of(sample::spectrum(40, 100)).to_svg();
    assert!(!large.contains("class=\"cell ") && large.len() < 600_000, "{}", large.len());
    // Values outside the range are clamped.
    let text = of(HeatMap { range: Some((1e-2, 1.0)), ..map }).to_svg();
    let document = Document::parse(&text).expect("XML");
    let fills: Vec<&str> =
        document.descendants().filter(|n| n.has_attribute("fill") && n.has_children()).filter_map(|n| n.attribute("fill")).collect();
    assert_eq!(fills[0], fills[1]);
}

#[test]
fn csv_round_trips_values() {
    fn parse(text: &str) -> Vec<Vec<String>> {
        let (mut rows, mut field, mut row, mut quoted) = (vec![], String::new(), vec![], false);
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '"' if quoted && chars.peek() == Some(&'"') => {
                    chars.next();
                    field.push('"');
                }
                '"' => quoted = !quoted,
                ',' if !quoted => row.push(std::mem::take(&mut field)),
                '\n' if !quoted => {
                    row.push(std::mem::take(&mut field));
                    rows.push(std::mem::take(&mut row));
                }
                c => field.push(c),
            }
        }
        rows
    }
    let hostile = "a,\"b\"\nc";
    let line = Line { name: hostile.into(), color: 0, dashed: false, points: vec![(0.1 + 0.2, 1e-300), (1e300, f64::NAN)] };
    let band = Band { name: "b".into(), color: 0, points: vec![(1.0, 1.0 / 3.0, 2.0 / 3.0)] };
    let rows = parse(&of(chart(vec![Layer::Line(line), Layer::Band(band)], Scale::Linear)).to_csv());
    assert_eq!(rows[0], ["panel", "series", "x", "y", "low", "high"]);
    assert_eq!((rows[1][1].as_str(), rows[1][2].parse(), rows[1][3].parse()), (hostile, Ok(0.1 + 0.2), Ok(1e-300)));
    assert_eq!((rows[2][2].parse(), rows[2][3].as_str()), (Ok(1e300), ""));
    assert_eq!((rows[3][3].as_str(), rows[3][4].parse(), rows[3][5].parse()), ("", Ok(1.0 / 3.0), Ok(2.0 / 3.0)));

    let map = sample::spectrum(5, 7);
    let rows = parse(&of(map.clone()).to_csv());
    assert_eq!((rows.len(), rows[0].join(",")), (1 + 5 * 7, "panel,row,column,value".into()));
    for row in &rows[1..] {
        let (l, n): (usize, usize) = (row[1].parse().expect("a layer"), row[2].parse().expect("an order"));
        assert_eq!(row[3].parse().ok(), map.values[l][n]);
    }
    let rows = parse(&sample::dot_plot(false).to_csv());
    assert!(rows.iter().all(|row| row.len() == 6) && rows[1][2] == "0..1" && rows[1][3].parse::<f64>().is_ok_and(|y| y > 3.1));
    let mixed = Figure { panels: vec![map.into(), chart(vec![], Scale::Linear).into()], ..of(chart(vec![], Scale::Linear)) };
    assert!(parse(&mixed.to_csv()).iter().all(|row| row.len() == 6));
}

#[test]
fn column_figures_are_240_points_wide_and_have_no_title() {
    for figure in all().into_iter().filter(|figure| !figure.title.is_empty()) {
        let text = figure.to_column_svg();
        let document = Document::parse(&text).expect("XML");
        let root = document.root_element();
        assert_eq!(root.attribute("width"), Some("240pt"));
        assert!(classed(&document, "title").is_empty() && !text.contains("prefers-color-scheme"), "{}", figure.title);
        let view = numbers(root.attribute("viewBox").expect("a view"));
        let points = 240.0 / view[2];
        // The smallest text of a figure, but for numbers in cells, has 7 points.
        assert!(12.0 * points >= 7.0);
        for node in document.descendants().filter(|node| node.tag_name().name() == "text") {
            let at = |key| node.attribute(key).and_then(|x| x.parse::<f64>().ok()).expect("a place");
            assert!(at("x") >= 0.0 && at("x") <= view[2] && at("y") > 0.0 && at("y") <= view[3], "{:?}", node.text());
        }
        let single = figure.panels.len() == 1 && !matches!(figure.panels[0], Panel::HeatMap(_));
        assert_eq!(classed(&document, "chart").is_empty(), single, "panels of a figure with several keep their titles");
        if let ([Panel::Chart(chart)], true) = (&figure.panels[..], single) {
            let name = if chart.y.label.is_empty() { &chart.title } else { &chart.y.label };
            assert!(classed(&document, "quiet").iter().any(|node| node.text() == Some(name)), "the values have a name: {name}");
        }
    }
}

#[test]
fn pdf_pages_are_whole() {
    for figure in all().into_iter().filter(|figure| !figure.title.is_empty()) {
        let bytes = figure.to_column_pdf();
        let text = std::str::from_utf8(&bytes).expect("text");
        assert!(text.starts_with("%PDF-1.4\n") && text.ends_with("%%EOF\n") && !text.contains("NaN") && !text.contains("inf"));
        assert_eq!(bytes, figure.to_column_pdf());
        // The offsets of all objects in the table, and that of the table at the end, are correct.
        let number = |text: &str| text.trim().parse::<usize>().expect("a number");
        let (before, end) = text.rsplit_once("startxref\n").expect("an end");
        let table = &text[number(end.trim_end_matches("%%EOF\n"))..];
        assert!(table.starts_with("xref\n0 5\n") && before.contains("/Root 1 0 R"));
        for (object, line) in (1..5).zip(table.lines().skip(3)) {
            assert!(text[number(&line[..10])..].starts_with(&format!("{object} 0 obj\n")), "{line}");
        }
        let (head, stream) = text.split_once("stream\n").expect("a stream");
        let length = number(head.rsplit_once("/Length ").expect("a length").1.trim_end_matches(['>', '\n']));
        assert!(stream[length..].starts_with("endstream"));
        let size = numbers_in(text.split_once("/MediaBox[").expect("a size").1.split_once(']').expect("an end").0);
        let svg = figure.to_column_svg();
        let document = Document::parse(&svg).expect("XML");
        let side = |key| document.root_element().attribute(key).expect("a side").trim_end_matches("pt").parse::<f64>().expect("points");
        assert_eq!(size, [0.0, 0.0, 240.0, side("height")], "the page of the SVG");
        // A polyline of the drawing has the same corners in both formats.
        if let Some(line) = classed(&document, "line").first() {
            let d = line.attribute("d").expect("a path").replace("h0", "");
            let corners: Vec<String> = numbers(&d).chunks(2).map(|place| format!("{} {} ", place[0], place[1])).collect();
            assert!(corners.iter().all(|corner| stream.contains(corner.as_str())), "{d}");
        }
    }
}

fn numbers_in(text: &str) -> Vec<f64> {
    text.split_whitespace().map(|x| x.parse().expect("a number")).collect()
}

fn decode(bytes: &[u8]) -> (u32, u32, Vec<[u8; 4]>) {
    let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().expect("a PNG file");
    let mut pixels = vec![0; reader.output_buffer_size().expect("a size")];
    let info = reader.next_frame(&mut pixels).expect("pixels");
    assert_eq!(info.color_type, png::ColorType::Rgba);
    (info.width, info.height, pixels.chunks(4).map(|p| [p[0], p[1], p[2], p[3]]).collect())
}

#[test]
fn png_pixels_match_the_drawing() {
    for figure in all() {
        let text = figure.to_svg();
        let document = Document::parse(&text).expect("XML");
        let side = |key| document.root_element().attribute(key).and_then(|x| x.parse::<f64>().ok()).expect("a side");
        let bytes = figure.to_png(1.5);
        let (width, height, pixels) = decode(&bytes);
        assert_eq!((width, height), ((side("width") * 1.5).ceil() as u32, (side("height") * 1.5).ceil() as u32));
        assert!(pixels.iter().all(|p| p[3] == 255) && pixels[0] == [255; 4]);
        if figure.title.is_empty() {
            continue;
        }
        // Ink at the title, none next to it.
        let dark = |x: std::ops::Range<u32>, y: std::ops::Range<u32>| {
            y.flat_map(|y| x.clone().map(move |x| (y * width + x) as usize)).filter(|&i| pixels[i][0] < 100).count()
        };
        assert!(dark(27..100, 25..55) > 40, "{}", figure.title);
        assert_eq!(dark(0..25, 0..60), 0);
        let mut colours = pixels.clone();
        colours.sort_unstable();
        colours.dedup();
        assert!(colours.len() > 20, "{} {}", figure.title, colours.len());
        assert_eq!(bytes, figure.to_png(1.5));
    }
}

#[test]
fn pixels_have_the_colours_of_the_theme_and_of_cells() {
    let figure = of(sample::differences());
    let (.., light) = decode(&figure.to_png(1.0));
    let (.., dark) = decode(&figure.to_png_in(Theme::Dark, 1.0));
    assert_eq!((light[0], dark[0]), ([255; 4], [0x0d, 0x11, 0x17, 255]));
    let text = figure.to_svg();
    let document = Document::parse(&text).expect("XML");
    for node in document.descendants().filter(|n| n.has_attribute("fill") && n.has_children()) {
        let fill = u32::from_str_radix(&node.attribute("fill").expect("a colour")[1..], 16).expect("a colour");
        let rgba = [(fill >> 16) as u8, (fill >> 8) as u8, fill as u8, 255];
        let count = |pixels: &[[u8; 4]]| pixels.iter().filter(|p| **p == rgba).count();
        assert!(count(&light) > 300 && count(&dark) > 300, "{rgba:?}");
    }
    // An isolated point is a dot in both formats.
    let line = Line { name: String::new(), color: 1, dashed: false, points: vec![(1.0, 1.0), (f64::NAN, 1.0), (3.0, 2.0)] };
    let (.., pixels) = decode(&of(chart(vec![Layer::Line(line)], Scale::Linear)).to_png(4.0));
    assert!(pixels.iter().filter(|p| **p == [0x0b, 0x5f, 0xc0, 255]).count() > 80);
}

#[test]
fn png_scales_are_clamped() {
    let figure = of(chart(vec![], Scale::Linear));
    for scale in [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e9] {
        let (width, height, _) = decode(&figure.to_png(scale));
        assert!((48..=16_384).contains(&width) && height <= 16_384, "{scale}");
    }
}
