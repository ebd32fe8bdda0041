//! Figures as Vega-Lite 5 specifications with inline values.

use serde_json::{Value, json};

use crate::chart::{Axis, Chart, Layer};
use crate::colour::{self, Theme};
use crate::dot_plot::DotPlot;
use crate::figure::{Figure, Panel};
use crate::heat::{HeatMap, Shade};
use crate::scale::Scale;

const SCHEMA: &str = "https://vega.github.io/schema/vega-lite/v5.json";

impl Figure {
    /// The figure as a Vega-Lite specification: stacked panels, each with its values.
    pub fn to_vega_lite(&self) -> Value {
        let panels: Vec<Value> = self
            .panels
            .iter()
            .map(|panel| match panel {
                Panel::Chart(chart) => of_chart(chart),
                Panel::DotPlot(plot) => of_dot_plot(plot),
                Panel::HeatMap(map) => of_map(map),
            })
            .collect();
        // Panels may have different series.
        let resolve = json!({"scale": {"color": "independent"}});
        json!({"$schema": SCHEMA, "title": self.title, "description": self.description, "resolve": resolve, "vconcat": panels})
    }
}

/// A finite number; `null` for NaN and infinity.
fn number(value: f64) -> Value {
    if value.is_finite() { json!(value) } else { Value::Null }
}

fn axis(axis: &Axis, field: &str) -> Value {
    let scale = if axis.scale == Scale::Log { json!({"type": "log"}) } else { json!({"type": "linear", "zero": false}) };
    let title = if axis.label.is_empty() { Value::Null } else { json!(axis.label) };
    let ticks = if axis.ticks.is_empty() { json!({}) } else { json!({"values": axis.ticks}) };
    json!({"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": ticks})
}

/// Names and colours of series: a name has the same colour in all formats.
fn colours(names: &[(&str, usize)]) -> Value {
    let colours = Theme::Light.colours();
    let domain: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
    let range: Vec<String> = names.iter().map(|(_, color)| colour::code(colours.of(*color))).collect();
    json!({"field": "series", "type": "nominal", "title": null, "scale": {"domain": domain, "range": range}})
}

fn of_chart(chart: &Chart) -> Value {
    let mut names: Vec<(&str, usize)> = Vec::new();
    let mut note = |name, color| {
        if !names.iter().any(|(known, _)| *known == name) {
            names.push((name, color));
        }
    };
    let (mut lines, mut bands, mut points, mut rules) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for layer in &chart.layers {
        match layer {
            Layer::Line(line) => {
                note(line.name.as_str(), line.color);
                lines.extend(line.points.iter().map(|&(x, y)| json!({"series": line.name, "x": number(x), "y": number(y)})));
            }
            Layer::Band(band) => {
                note(band.name.as_str(), band.color);
                bands.extend(
                    band.points
                        .iter()
                        .map(|&(x, low, high)| json!({"series": band.name, "x": number(x), "low": number(low), "high": number(high)})),
                );
            }
            Layer::Points(list) => {
                note(list.name.as_str(), list.color);
                points.extend(list.points.iter().map(|p| json!({"series": list.name, "x": number(p.x), "y": number(p.y), "name": p.name})));
            }
            Layer::Mark(mark) => {
                note(mark.label.as_str(), mark.color);
                points.push(json!({"series": mark.label, "x": number(mark.x), "y": number(mark.y), "name": mark.label}));
            }
            Layer::Runs(runs) => {
                points.extend(runs.ends().map(|(name, (x, y))| json!({"series": runs.name, "x": number(x), "y": number(y), "name": name})));
            }
            Layer::Rule(rule) => rules.push(json!({"y": number(rule.y), "label": rule.label})),
        }
    }
    let color = colours(&names);
    let (x, y) = (axis(&chart.x, "x"), axis(&chart.y, "y"));
    let (mut low, mut layers) = (axis(&chart.y, "low"), Vec::new());
    low["title"] = y["title"].clone();
    if !bands.is_empty() {
        let encoding = json!({"x": x, "y": low, "y2": {"field": "high"}, "color": color});
        layers.push(json!({"data": {"values": bands}, "mark": {"type": "area", "opacity": 0.18}, "encoding": encoding}));
    }
    if !lines.is_empty() {
        layers.push(
            json!({"data": {"values": lines}, "mark": {"type": "line", "tooltip": true}, "encoding": {"x": x, "y": y, "color": color}}),
        );
    }
    if !points.is_empty() {
        let mark = json!({"type": "point", "filled": true, "tooltip": {"content": "data"}});
        layers.push(json!({"data": {"values": points}, "mark": mark, "encoding": {"x": x, "y": y, "color": color}}));
    }
    if !rules.is_empty() {
        layers.push(json!({"data": {"values": rules}, "mark": {"type": "rule", "strokeDash": [7, 4], "tooltip": {"content": "data"}}, "encoding": {"y": y}}));
    }
    json!({"title": chart.title, "width": 480, "height": 260, "layer": layers})
}

fn of_dot_plot(plot: &DotPlot) -> Value {
    let names: Vec<(&str, usize)> = plot.series.iter().map(|steps| (steps.name.as_str(), steps.color)).collect();
    let mut values = Vec::new();
    for steps in &plot.series {
        for (category, value) in plot.categories.iter().zip(&steps.values) {
            if let Some(value) = value {
                values.push(json!({"series": steps.name, "category": category, "mean": number(value.mean), "low": number(value.low), "high": number(value.high)}));
            }
        }
    }
    let categories = json!({"field": "category", "type": "nominal", "sort": null, "title": if plot.label.is_empty() { Value::Null } else { json!(plot.label) }});
    let color = colours(&names);
    let means = json!({"y": categories, "x": axis(&plot.value, "mean"), "color": color});
    let mut low = axis(&plot.value, "low");
    low["title"] = means["x"]["title"].clone();
    let whiskers = json!({"y": categories, "x": low, "x2": {"field": "high"}, "color": color});
    let mut layers = vec![
        json!({"mark": {"type": "rule"}, "encoding": whiskers}),
        json!({"mark": {"type": "point", "filled": true, "tooltip": {"content": "data"}}, "encoding": means}),
    ];
    let rules: Vec<Value> = plot.rules.iter().map(|rule| json!({"x": number(rule.y), "label": rule.label})).collect();
    if !rules.is_empty() {
        layers.push(json!({"data": {"values": rules}, "mark": {"type": "rule", "strokeDash": [7, 4], "tooltip": {"content": "data"}}, "encoding": {"x": axis(&plot.value, "x")}}));
    }
    json!({"title": plot.title, "width": 480, "data": {"values": values}, "layer": layers})
}

fn of_map(map: &HeatMap) -> Value {
    let (rows, columns) = map.size();
    let mut values = Vec::new();
    for row in 0..rows {
        for column in 0..columns {
            let value = map.value(row, column).map_or(Value::Null, number);
            values.push(json!({"row": map.y.get(row), "column": map.x.get(column), "value": value}));
        }
    }
    let scale = match map.shade {
        Shade::Linear => json!({"scheme": "viridis"}),
        Shade::Log => json!({"scheme": "viridis", "type": "log"}),
        Shade::Diverging => json!({"scheme": "blueorange", "domainMid": 0}),
    };
    let side = |field: &str, label: &str| json!({"field": field, "type": "ordinal", "sort": null, "title": label});
    json!({
        "title": map.title,
        "data": {"values": values},
        "mark": {"type": "rect", "tooltip": true},
        "encoding": {
            "x": side("column", &map.x.label),
            "y": side("row", &map.y.label),
            "color": {"field": "value", "type": "quantitative", "title": null, "scale": scale}
        }
    })
}
