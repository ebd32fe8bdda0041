//! Pictures of results.

use std::collections::BTreeMap;

use termwise_report::{Axis, Band, Chart, DotPlot, Estimate, Figure, Layer, Line, Point, Points, Rule, Runs, Scale, Steps, Unit, ramp};

use super::list::series;
use super::results::{Results, Run, Summary, TaskOutcome, VariantOutcome};
use super::{Metric, SOFTMAX};

/// Colours of variants beside that of softmax.
const COLOURS: usize = 8;
/// More lines than this, dashed ones included, are a tangle.
const LINES: usize = 8;

/// A colour for each variant, the same in all figures of a page: softmax has the first, orders of the series a sequential ramp, the others
/// theirs in the order in which they come.
#[derive(Clone, Debug, Default)]
pub struct Colours {
    others: Vec<String>,
    /// Ascending.
    orders: Vec<String>,
}

/// The highest order of a truncated series by its name, as in `orders 0..4`.
fn highest_order(name: &str) -> Option<usize> {
    name.strip_prefix("orders ")?.rsplit("..").next()?.parse().ok()
}

impl Colours {
    pub fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> Colours {
        let mut known = Colours::default();
        for name in names {
            let list = if highest_order(name).is_some() { &mut known.orders } else { &mut known.others };
            if name != SOFTMAX && !list.iter().any(|other| other == name) {
                list.push(name.to_owned());
            }
        }
        known.orders.sort_by_key(|name| highest_order(name));
        known
    }

    pub fn of_results(results: &Results) -> Colours {
        let tasks = results.experiments.iter().flat_map(|outcome| &outcome.tasks);
        Colours::of(tasks.flat_map(|task| &task.variants).map(|outcome| outcome.variant.name.as_str()))
    }

    /// The colour, and whether lines are dashed because the colours have begun anew.
    fn get(&self, name: &str) -> (usize, bool) {
        let place = |list: &[String]| list.iter().position(|other| other == name);
        match (place(&self.orders), place(&self.others)) {
            (Some(step), _) => (ramp(step, self.orders.len()), false),
            (None, Some(place)) => (1 + place % COLOURS, place / COLOURS % 2 == 1),
            (None, None) => (0, false),
        }
    }
}

/// The metric by step, a band over seeds for each variant; none where there are too many variants or no evaluation.
pub fn curves(heading: &str, task: &TaskOutcome, runs: &[Run], colours: &Colours) -> Option<Figure> {
    if task.variants.len() > LINES {
        return None;
    }
    let (mut bands, mut lines, mut dots) = (Vec::new(), Vec::new(), Vec::new());
    for outcome in &task.variants {
        let mut by_step: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        let mut single = Vec::new();
        for run in outcome.runs.iter().map(|&run| &runs[run]).filter(|run| run.status == "finished") {
            let mut own = Vec::new();
            for point in &run.curve {
                let value = match task.metric {
                    Metric::Recall => point.recall,
                    Metric::Loss => Some(point.loss),
                    Metric::Beyond => point.beyond,
                    Metric::Error => point.accuracy.map(|accuracy| 1.0 - accuracy),
                };
                by_step.entry(point.step).or_default().extend(value);
                own.extend(value.map(|value| (point.step as f64, value)));
            }
            single.push((format!("seed {}", run.seed), own));
        }
        let points: Vec<(f64, Summary)> =
            by_step.iter().filter_map(|(&step, numbers)| Some((step as f64, Summary::of(numbers)?))).collect();
        let band = |&(step, s): &(f64, Summary)| Some((step, s.least?, s.greatest?)).filter(|_| s.count > 1);
        let name = outcome.variant.name.clone();
        let (color, dashed) = colours.get(&name);
        if !single.is_empty() {
            dots.push(Layer::Runs(Runs { name: name.clone(), color, runs: single }));
        }
        bands.push(Layer::Band(Band { name: name.clone(), color, points: points.iter().filter_map(band).collect() }));
        lines.push(Layer::Line(Line { name, color, dashed, points: points.iter().map(|(step, s)| (*step, s.mean)).collect() }));
    }
    bands.append(&mut lines);
    bands.append(&mut dots);
    let chart = Chart {
        title: task.metric.name().into(),
        x: Axis::new("steps", Scale::Linear, Unit::Number),
        y: Axis::new("", Scale::Linear, Unit::Number),
        layers: bands,
    };
    Some(Figure {
        title: format!("{heading}: {} during training, {}", task.metric.short(), task.task),
        description: sentence(task),
        panels: vec![chart.into()],
    })
}

/// The final numbers in words.
fn sentence(task: &TaskOutcome) -> String {
    let number = |outcome: &VariantOutcome| outcome.metric.map(|summary| format!("{} {summary}", outcome.variant.name));
    format!("At the end, {}: {}.", task.metric.short(), task.variants.iter().filter_map(number).collect::<Vec<_>>().join(", "))
}

fn estimate(summary: Summary) -> Estimate {
    Estimate { mean: summary.mean, low: summary.least.unwrap_or(summary.mean), high: summary.greatest.unwrap_or(summary.mean) }
}

/// The metric at the end for every variant, softmax as a line to compare with.
pub fn dot_plot(heading: &str, task: &TaskOutcome, colours: &Colours) -> Option<Figure> {
    let compared = |outcome: &&VariantOutcome| outcome.variant.name != SOFTMAX && outcome.metric.is_some();
    let steps: Vec<&VariantOutcome> = task.variants.iter().filter(compared).collect();
    let softmax = task.variants.iter().find(|outcome| outcome.variant.name == SOFTMAX).and_then(|outcome| outcome.metric);
    if steps.is_empty() {
        return None;
    }
    let rule = softmax.map(|summary| Rule { y: summary.mean, label: SOFTMAX.into(), color: 0 });
    let plot = DotPlot {
        title: task.metric.name().into(),
        label: String::new(),
        categories: steps.iter().map(|outcome| outcome.variant.name.clone()).collect(),
        value: Axis::new("", Scale::Linear, Unit::Number),
        series: vec![Steps { name: String::new(), color: 1, values: steps.iter().map(|outcome| outcome.metric.map(estimate)).collect() }],
        colors: steps.iter().map(|outcome| colours.get(&outcome.variant.name).0).collect(),
        rules: rule.into_iter().collect(),
    };
    Some(Figure {
        title: format!("{heading}: {} at the end, {}", task.metric.short(), task.task),
        description: sentence(task),
        panels: vec![plot.into()],
    })
}

/// Every variant of the first task with recall tokens, once.
fn recalling(results: &Results) -> Option<(&TaskOutcome, Vec<&VariantOutcome>)> {
    let mut tasks = results.experiments.iter().flat_map(|outcome| outcome.tasks.first()).filter(|task| task.metric == Metric::Recall);
    let first = tasks.next()?;
    let mut seen: Vec<&VariantOutcome> = first.variants.iter().collect();
    for outcome in tasks.filter(|task| task.task == first.task).flat_map(|task| &task.variants) {
        if !seen.iter().any(|other| other.variant == outcome.variant) {
            seen.push(outcome);
        }
    }
    Some((first, seen))
}

/// The answer in one picture: linear attentions, the orders of the series, and Norm beside softmax.
pub fn overview(results: &Results) -> Option<Figure> {
    let (task, seen) = recalling(results)?;
    let rank = |outcome: &VariantOutcome| match outcome.variant.name.as_str() {
        name if name.starts_with("linear") => Some(0),
        name if name.starts_with("orders") => Some(1),
        "Norm" => Some(2),
        SOFTMAX => Some(3),
        _ => None,
    };
    let mut chosen: Vec<(usize, &VariantOutcome)> = seen.into_iter().filter_map(|outcome| Some((rank(outcome)?, outcome))).collect();
    chosen.sort_by_key(|(rank, _)| *rank);
    let variants = chosen.into_iter().map(|(_, outcome)| outcome.clone()).collect();
    let figure = dot_plot("", &TaskOutcome { variants, claims: Vec::new(), ..task.clone() }, &Colours::of_results(results))?;
    Some(Figure { title: "What can be recalled: linear attention, orders of the series, a norm".into(), ..figure })
}

/// Linear attention, orders of the series and softmax during training.
pub fn orders(results: &Results) -> Option<Figure> {
    let (task, seen) = recalling(results)?;
    let wanted = |name: &str| name == SOFTMAX || name.starts_with("orders") || name.starts_with("linear");
    let mut variants: Vec<VariantOutcome> = seen.into_iter().filter(|outcome| wanted(&outcome.variant.name)).cloned().collect();
    // The first orders tell the story; a tangle does not.
    variants.truncate(LINES);
    let figure = curves("", &TaskOutcome { variants, claims: Vec::new(), ..task.clone() }, &results.runs, &Colours::of_results(results))?;
    Some(Figure { title: "Orders of the series, during training".into(), ..figure })
}

/// What decoding keeps against the loss on recall tokens: softmax and every variant of the first task with a constant state.
pub fn memory(results: &Results) -> Option<Figure> {
    let (_, mut seen) = recalling(results)?;
    // Caches are all of one size: softmax stands for them.
    seen.retain(|outcome| outcome.constant_state || outcome.variant.name == SOFTMAX);
    let points = |constant: bool| -> Vec<Point> {
        let fitting = seen.iter().filter(|outcome| outcome.constant_state == constant);
        let point = |outcome: &&VariantOutcome| {
            // Marks of the series stand close together: after the first, its orders are name enough.
            let name = &outcome.variant.name;
            let short = name.strip_prefix("orders ").filter(|_| *name != series(2)).unwrap_or(name);
            Some(Point::new(outcome.state_bytes? as f64, outcome.metric?.mean).named(short.to_owned()))
        };
        fitting.filter_map(point).collect()
    };
    let layers: Vec<Layer> = [("cache, grows with the context", 0, false), ("state of constant size", 1, true)]
        .into_iter()
        .map(|(name, color, constant)| Layer::Points(Points { name: name.into(), color, points: points(constant) }))
        .collect();
    if seen.iter().all(|outcome| outcome.metric.is_none()) {
        return None;
    }
    let chart = Chart {
        title: Metric::Recall.name().into(),
        x: Axis::new("kept between tokens", Scale::Log, Unit::Bytes),
        y: Axis::new("", Scale::Linear, Unit::Number),
        layers,
    };
    Some(Figure {
        title: "What is kept, and what can be recalled from it".into(),
        description: "Softmax and every variant with a state of constant size: bytes kept between tokens, and mean loss on recall tokens."
            .into(),
        panels: vec![chart.into()],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_have_a_ramp_that_no_other_variant_uses() {
        let names = ["softmax", "linear ELU", "orders 0..10", "orders 0..2", "linear ELU", "orders 0..4", "Norm"];
        let colours = Colours::of(names);
        let get = |name: &str| colours.get(name).0;
        assert_eq!([get("softmax"), get("linear ELU"), get("Norm")], [0, 1, 2]);
        let orders = ["orders 0..2", "orders 0..4", "orders 0..10"].map(get);
        assert!(orders.is_sorted_by(|a, b| a < b) && orders[0] == ramp(0, 3) && orders[2] == ramp(2, 3), "{orders:?}");
        assert!(names.iter().all(|name| !colours.get(name).1));
    }
}
