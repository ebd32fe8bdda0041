//! The values of a figure, as the script of an HTML report reads them.

use serde::Serialize;

use crate::chart::{Axis, Chart, Layer};
use crate::dot_plot::DotPlot;
use crate::figure::{Figure, Panel};
use crate::layout::WIDTH;
use crate::scale::{Scale, Unit};

/// A figure. It has no panels if the script shows its static SVG.
#[derive(Serialize)]
pub struct FigureData<'a> {
    title: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    panels: Option<Vec<PanelData<'a>>>,
}

#[derive(Serialize)]
struct PanelData<'a> {
    title: &'a str,
    x: AxisData<'a>,
    y: AxisData<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    categories: Option<&'a [String]>,
    series: Vec<Series<'a>>,
    rules: Vec<RuleData<'a>>,
}

#[derive(Serialize)]
struct AxisData<'a> {
    label: &'a str,
    log: bool,
    unit: &'static str,
    #[serde(skip_serializing_if = "<[f64]>::is_empty")]
    ticks: &'a [f64],
}

/// Values that are NaN or infinite become `null`.
#[derive(Default, Serialize)]
struct Series<'a> {
    name: &'a str,
    color: usize,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    dashed: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    x: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    y: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    low: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    high: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    runs: Vec<RunData<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    points: Vec<PointData<'a>>,
}

#[derive(Serialize)]
struct RunData<'a> {
    label: &'a str,
    x: Vec<f64>,
    y: Vec<f64>,
}

#[derive(Serialize)]
struct PointData<'a> {
    x: f64,
    y: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    low: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    high: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    color: Option<usize>,
    name: &'a str,
}

#[derive(Serialize)]
struct RuleData<'a> {
    y: f64,
    label: &'a str,
    color: usize,
}

impl<'a> FigureData<'a> {
    pub fn new(figure: &'a Figure) -> FigureData<'a> {
        // Horizontal dot plots and heat maps are shown as static SVG.
        let panel = |panel: &'a Panel| match panel {
            Panel::Chart(chart) => Some(of_chart(chart)),
            Panel::DotPlot(plot) if plot.in_columns(WIDTH) => Some(of_dot_plot(plot)),
            _ => None,
        };
        FigureData { title: &figure.title, panels: figure.panels.iter().map(panel).collect() }
    }

    /// Whether the figure is shown as static SVG.
    pub fn is_still(&self) -> bool {
        self.panels.is_none()
    }
}

fn axis(axis: &Axis) -> AxisData<'_> {
    let unit = match axis.unit {
        Unit::Number => "number",
        Unit::Bytes => "bytes",
        Unit::Seconds => "seconds",
        Unit::Percent => "percent",
    };
    AxisData { label: &axis.label, log: axis.scale == Scale::Log, unit, ticks: &axis.ticks }
}

/// A line, its band and its runs form one series, matched by name.
fn of_chart(chart: &Chart) -> PanelData<'_> {
    let mut series: Vec<Series> = Vec::new();
    let mut rules = Vec::new();
    fn named<'a, 's>(series: &'s mut Vec<Series<'a>>, name: &'a str, color: usize) -> &'s mut Series<'a> {
        let found = series.iter().position(|s| s.name == name && s.points.is_empty() && !name.is_empty());
        let at = found.unwrap_or_else(|| {
            series.push(Series { name, color, ..Series::default() });
            series.len() - 1
        });
        &mut series[at]
    }
    // Lines first: a band is defined at the points of its line.
    for layer in chart.layers.iter().filter(|layer| matches!(layer, Layer::Line(_))) {
        let Layer::Line(line) = layer else { continue };
        let (x, y) = line.points.iter().copied().unzip();
        let to = named(&mut series, &line.name, line.color);
        if to.x.is_empty() {
            (to.x, to.y, to.dashed) = (x, y, line.dashed);
        } else {
            // Another segment of the same line.
            to.x.push(f64::NAN);
            to.y.push(f64::NAN);
            to.x.extend(x);
            to.y.extend(y);
        }
    }
    for layer in &chart.layers {
        match layer {
            Layer::Line(_) => {}
            Layer::Band(band) => {
                let to = named(&mut series, &band.name, band.color);
                if to.x.is_empty() {
                    to.x = band.points.iter().map(|point| point.0).collect();
                    to.y = vec![f64::NAN; to.x.len()];
                }
                let at = |x: f64| band.points.iter().find(|point| point.0 == x).map_or((f64::NAN, f64::NAN), |point| (point.1, point.2));
                if !band.points.is_empty() {
                    (to.low, to.high) = to.x.iter().map(|&x| at(x)).unzip();
                }
            }
            Layer::Runs(runs) => {
                let to = named(&mut series, &runs.name, runs.color);
                to.runs = runs.runs.iter().map(|(label, points)| run(label, points)).collect();
            }
            Layer::Points(points) => {
                let data = points.points.iter().map(|p| PointData {
                    x: p.x,
                    y: p.y,
                    low: p.interval.map(|s| s.0),
                    high: p.interval.map(|s| s.1),
                    color: None,
                    name: &p.name,
                });
                series.push(Series { name: &points.name, color: points.color, points: data.collect(), ..Series::default() });
            }
            Layer::Mark(mark) => {
                let point = PointData { x: mark.x, y: mark.y, low: None, high: None, color: None, name: &mark.label };
                series.push(Series { color: mark.color, points: vec![point], ..Series::default() });
            }
            Layer::Rule(rule) => rules.push(RuleData { y: rule.y, label: &rule.label, color: rule.color }),
        }
    }
    PanelData { title: &chart.title, x: axis(&chart.x), y: axis(&chart.y), categories: None, series, rules }
}

fn run<'a>(label: &'a str, points: &[(f64, f64)]) -> RunData<'a> {
    let (x, y) = points.iter().copied().unzip();
    RunData { label, x, y }
}

fn of_dot_plot(plot: &DotPlot) -> PanelData<'_> {
    let series = plot.series.iter().map(|steps| {
        let point = |(i, value): (usize, &Option<crate::Estimate>)| {
            let value = (*value)?;
            let color = plot.colors.get(i).copied();
            Some(PointData { x: i as f64, y: value.mean, low: Some(value.low), high: Some(value.high), color, name: "" })
        };
        let points = steps.values.iter().take(plot.categories.len()).enumerate().filter_map(point).collect();
        Series { name: &steps.name, color: steps.color, points, ..Series::default() }
    });
    let rules = plot.rules.iter().map(|rule| RuleData { y: rule.y, label: &rule.label, color: rule.color });
    PanelData {
        title: &plot.title,
        x: AxisData { label: &plot.label, log: false, unit: "number", ticks: &[] },
        y: axis(&plot.value),
        categories: Some(&plot.categories),
        series: series.collect(),
        rules: rules.collect(),
    }
}
