//! CSV output, one value per row.

use crate::chart::{Chart, Layer};
use crate::dot_plot::DotPlot;
use crate::figure::{Figure, Panel};
use crate::heat::HeatMap;

/// Rows of fields, quoted if necessary.
#[derive(Default)]
pub struct Csv(String);

impl Csv {
    /// Appends a row.
    pub fn line(&mut self, fields: impl IntoIterator<Item = impl AsRef<str>>) {
        for (i, field) in fields.into_iter().enumerate() {
            if i > 0 {
                self.0.push(',');
            }
            let field = field.as_ref();
            if field.contains([',', '"', '\n', '\r']) || field.trim() != field {
                self.0.push('"');
                self.0.push_str(&field.replace('"', "\"\""));
                self.0.push('"');
            } else {
                self.0.push_str(field);
            }
        }
        self.0.push('\n');
    }

    /// The CSV text.
    pub fn finish(self) -> String {
        self.0
    }
}

/// The shortest decimal form that parses to the same value; empty for NaN and infinity.
pub fn number(value: f64) -> String {
    match value {
        v if !v.is_finite() => String::new(),
        v if v != 0.0 && !(1e-5..1e16).contains(&v.abs()) => format!("{v:e}"),
        v => format!("{v}"),
    }
}

impl Figure {
    /// One row per value, at full precision: `panel,row,column,value` if all panels are heat maps, otherwise
    /// `panel,series,x,y,low,high`, with each row of a heat map as a series. NaN and infinity are empty fields.
    pub fn to_csv(&self) -> String {
        let mut csv = Csv::default();
        let maps = !self.panels.is_empty() && self.panels.iter().all(|panel| matches!(panel, Panel::HeatMap(_)));
        csv.line(if maps { &["panel", "row", "column", "value"][..] } else { &["panel", "series", "x", "y", "low", "high"] });
        for panel in &self.panels {
            match panel {
                Panel::Chart(chart) => chart.write(&mut csv),
                Panel::DotPlot(plot) => plot.write(&mut csv),
                Panel::HeatMap(map) => map.write(&mut csv, if maps { 0 } else { 2 }),
            }
        }
        csv.finish()
    }
}

impl Chart {
    fn write(&self, csv: &mut Csv) {
        let mut line = |series: &str, [x, y, low, high]: [f64; 4]| {
            csv.line([self.title.as_str(), series, &number(x), &number(y), &number(low), &number(high)]);
        };
        const NONE: f64 = f64::NAN;
        for layer in &self.layers {
            match layer {
                Layer::Line(l) => l.points.iter().for_each(|&(x, y)| line(&l.name, [x, y, NONE, NONE])),
                Layer::Mark(mark) => line(&mark.label, [mark.x, mark.y, NONE, NONE]),
                Layer::Band(b) => b.points.iter().for_each(|&(x, low, high)| line(&b.name, [x, NONE, low, high])),
                Layer::Points(points) => {
                    for p in &points.points {
                        let names: Vec<&str> = [points.name.as_str(), p.name.as_str()].into_iter().filter(|n| !n.is_empty()).collect();
                        let (low, high) = p.interval.unwrap_or((NONE, NONE));
                        line(&names.join(": "), [p.x, p.y, low, high]);
                    }
                }
                Layer::Runs(runs) => {
                    for (name, points) in &runs.runs {
                        points.iter().for_each(|&(x, y)| line(&format!("{}, {name}", runs.name), [x, y, NONE, NONE]));
                    }
                }
                Layer::Rule(rule) => line(&rule.label, [NONE, rule.y, NONE, NONE]),
            }
        }
    }
}

impl DotPlot {
    fn write(&self, csv: &mut Csv) {
        for steps in &self.series {
            for (category, estimate) in self.categories.iter().zip(&steps.values) {
                let [mean, low, high] = estimate.map_or([f64::NAN; 3], |e| [e.mean, e.low, e.high]).map(number);
                csv.line([self.title.as_str(), &steps.name, category, &mean, &low, &high]);
            }
        }
        for rule in &self.rules {
            csv.line([self.title.as_str(), &rule.label, "", &number(rule.y), "", ""]);
        }
    }
}

impl HeatMap {
    fn write(&self, csv: &mut Csv, empty: usize) {
        let (rows, columns) = self.size();
        for row in 0..rows {
            for column in 0..columns {
                let mut fields = vec![self.title.clone(), self.y.get(row), self.x.get(column)];
                fields.push(self.value(row, column).map(number).unwrap_or_default());
                fields.resize(fields.len() + empty, String::new());
                csv.line(&fields);
            }
        }
    }
}
