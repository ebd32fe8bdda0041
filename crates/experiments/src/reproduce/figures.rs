//! Figures of results.

use std::collections::BTreeMap;

use termwise_report::{Axis, Band, Chart, DotPlot, Estimate, Figure, Layer, Line, Point, Points, Rule, Runs, Scale, Steps, Unit, ramp};

use super::list::LINEAR;
use super::results::{CurvePoint, Results, Run, Summary, TaskOutcome, VariantOutcome};
use super::scale::Scale as BudgetScale;
use super::{Metric, SOFTMAX, text_page};

/// Colours of variants other than softmax.
const COLOURS: usize = 8;
/// Maximum number of lines in a figure.
const LINES: usize = 8;

/// A colour per variant, the same in all figures of a report. Softmax has the first colour, Taylor orders have a sequential ramp, and the other
/// variants follow in order of appearance.
#[derive(Clone, Debug, Default)]
pub struct Colours {
    /// Colours of families instead, as in the figures of [`text_page`].
    families: bool,
    others: Vec<String>,
    /// Ascending.
    orders: Vec<String>,
}

/// The highest order in the name of a truncated series, such as `orders 0..4`.
pub fn highest_order(name: &str) -> Option<usize> {
    name.strip_prefix("orders ")?.split([',', ' ']).next()?.rsplit("..").next()?.parse().ok()
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
        let families = matches!(results.scale, BudgetScale::Text | BudgetScale::Mini | BudgetScale::Zoology);
        let known = Colours::of(tasks.flat_map(|task| &task.variants).map(|outcome| outcome.variant.name.as_str()));
        Colours { families, ..known }
    }

    /// The colour, and whether lines are dashed because colours repeat.
    fn get(&self, name: &str) -> (usize, bool) {
        if self.families {
            return (text_page::family(name).color, false);
        }
        let place = |list: &[String]| list.iter().position(|other| other == name);
        match (place(&self.orders), place(&self.others)) {
            (Some(step), _) => (ramp(step, self.orders.len()), false),
            (None, Some(place)) => (1 + place % COLOURS, place / COLOURS % 2 == 1),
            (None, None) => (0, false),
        }
    }
}

/// The metric by step, with a band over seeds for each variant; `None` if there are too many variants or no curves.
pub fn curves(heading: &str, task: &TaskOutcome, runs: &[Run], colours: &Colours) -> Option<Figure> {
    let value = |point: &CurvePoint| match task.metric {
        Metric::Recall => point.recall,
        Metric::Loss => Some(point.loss),
        Metric::Beyond => point.beyond,
        Metric::Error => point.accuracy.map(|accuracy| 1.0 - accuracy),
    };
    let points = |run: &Run| run.curve.iter().filter_map(|point| Some((point.step, value(point)?))).collect();
    Some(Figure {
        title: format!("{heading}: {} during training, {}", task.metric.short(), task.task),
        description: sentence(task),
        panels: vec![chart_by_step(task.metric.name(), task, runs, colours, points)?.into()],
    })
}

/// Training loss by step; `None` if it was not logged.
pub fn training_loss(task: &TaskOutcome, runs: &[Run], colours: &Colours) -> Option<Figure> {
    let chart =
        chart_by_step("training loss", task, runs, colours, |run| run.train.iter().copied().filter(|point| point.1.is_finite()).collect())?;
    Some(Figure { title: "Training loss".into(), description: "Training loss by step.".into(), panels: vec![chart.into()] })
}

/// Mean and range over finished runs of a variant, by step; `None` without points or with too many variants.
fn chart_by_step(
    title: &str,
    task: &TaskOutcome,
    runs: &[Run],
    colours: &Colours,
    points_of: impl Fn(&Run) -> Vec<(u64, f64)>,
) -> Option<Chart> {
    if task.variants.len() > LINES {
        return None;
    }
    let (mut bands, mut lines, mut dots) = (Vec::new(), Vec::new(), Vec::new());
    for outcome in &task.variants {
        let mut by_step: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        let mut single = Vec::new();
        for run in outcome.runs.iter().map(|&run| &runs[run]).filter(|run| run.status == "finished") {
            let own = points_of(run);
            own.iter().for_each(|&(step, value)| by_step.entry(step).or_default().push(value));
            single.push((format!("seed {}", run.seed), own.into_iter().map(|(step, value)| (step as f64, value)).collect()));
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
    // Files may have been stored without curves.
    if lines.iter().all(|line| matches!(line, Layer::Line(line) if line.points.is_empty())) {
        return None;
    }
    bands.append(&mut lines);
    bands.append(&mut dots);
    let (x, y) = (Axis::new("steps", Scale::Linear, Unit::Number), Axis::new("", Scale::Linear, Unit::Number));
    Some(Chart { title: title.into(), x, y, layers: bands })
}

/// The final numbers in words.
fn sentence(task: &TaskOutcome) -> String {
    let number = |outcome: &VariantOutcome| outcome.metric.map(|summary| format!("{} {summary}", outcome.variant.name));
    format!("At the end, {}: {}.", task.metric.short(), task.variants.iter().filter_map(number).collect::<Vec<_>>().join(", "))
}

fn estimate(summary: Summary) -> Estimate {
    Estimate { mean: summary.mean, low: summary.least.unwrap_or(summary.mean), high: summary.greatest.unwrap_or(summary.mean) }
}

/// The metric at the end for every variant, with softmax as a line.
pub fn dot_plot(heading: &str, task: &TaskOutcome, colours: &Colours) -> Option<Figure> {
    Some(Figure {
        title: format!("{heading}: {} at the end, {}", task.metric.short(), task.task),
        description: sentence(task),
        panels: vec![dot_plot_of(&task.variants, task.metric, colours)?.into()],
    })
}

fn dot_plot_of(variants: &[VariantOutcome], metric: Metric, colours: &Colours) -> Option<DotPlot> {
    let compared = |outcome: &&VariantOutcome| outcome.variant.name != SOFTMAX && outcome.metric.is_some();
    let steps: Vec<&VariantOutcome> = variants.iter().filter(compared).collect();
    let softmax = variants.iter().find(|outcome| outcome.variant.name == SOFTMAX).and_then(|outcome| outcome.metric);
    if steps.is_empty() {
        return None;
    }
    let rule = softmax.map(|summary| Rule { y: summary.mean, label: SOFTMAX.into(), color: 0 });
    Some(DotPlot {
        title: metric.name().into(),
        label: String::new(),
        categories: steps.iter().map(|outcome| outcome.variant.name.clone()).collect(),
        value: Axis::new("", Scale::Linear, Unit::Number),
        series: vec![Steps { name: String::new(), color: 1, values: steps.iter().map(|outcome| outcome.metric.map(estimate)).collect() }],
        colors: steps.iter().map(|outcome| colours.get(&outcome.variant.name).0).collect(),
        rules: rule.into_iter().collect(),
    })
}

/// The first task with recall tokens, and every variant that was trained on it, once.
pub fn recalling(results: &Results) -> Option<(&TaskOutcome, Vec<&VariantOutcome>)> {
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

/// A variant with its state, such as `orders 0..2, 20.8 KB`.
fn with_state(outcome: &VariantOutcome) -> String {
    let state = outcome.state_bytes.map(|bytes| format!(", {}", Unit::Bytes.format(bytes as f64)));
    outcome.variant.name.clone() + &state.unwrap_or_default()
}

/// The answer in one figure: linear attentions, orders of the series and Norm, with softmax and the chance level as lines.
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
    let variants: Vec<VariantOutcome> = chosen.into_iter().map(|(_, outcome)| outcome.clone()).collect();
    let softmax = variants.iter().find(|outcome| outcome.variant.name == SOFTMAX).map(with_state);
    let mut plot = dot_plot_of(&variants, task.metric, &Colours::of_results(results))?;
    let names = variants.iter().filter(|outcome| outcome.variant.name != SOFTMAX && outcome.metric.is_some());
    plot.categories = names.map(with_state).collect();
    plot.rules.iter_mut().zip(softmax).for_each(|(rule, name)| rule.label = name);
    plot.rules.extend(results.scale.chance().map(|y| Rule { y, label: "chance".into(), color: 5 }));
    Some(Figure { title: "Loss on recall tokens, and bytes of state".into(), description: sentence(task), panels: vec![plot.into()] })
}

/// Linear attention, orders of the series and softmax during training.
pub fn orders(results: &Results) -> Option<Figure> {
    let (task, seen) = recalling(results)?;
    let wanted = |name: &str| name == SOFTMAX || name.starts_with("orders") || name == LINEAR;
    let mut variants: Vec<VariantOutcome> = seen.into_iter().filter(|outcome| wanted(&outcome.variant.name)).cloned().collect();
    variants.truncate(LINES);
    let figure = curves("", &TaskOutcome { variants, claims: Vec::new(), ..task.clone() }, &results.runs, &Colours::of_results(results))?;
    Some(Figure { title: "Taylor orders during training".into(), ..figure })
}

/// Bytes that decoding keeps against the loss on recall tokens: softmax and every variant of the first task with a constant state.
pub fn memory(results: &Results) -> Option<Figure> {
    let (_, mut seen) = recalling(results)?;
    // All caches have the size of that of softmax.
    seen.retain(|outcome| outcome.constant_state || outcome.variant.name == SOFTMAX);
    let colours = Colours::of_results(results);
    let layer = |outcome: &VariantOutcome| {
        let (name, found) = (outcome.variant.name.clone(), outcome.metric?);
        let color = colours.get(&name).0;
        let Estimate { mean, low, high } = estimate(found);
        let point = Point::new(outcome.state_bytes? as f64, mean).within(low, high).named(name);
        Some(Layer::Points(Points { name: String::new(), color, points: vec![point] }))
    };
    let layers: Vec<Layer> = seen.into_iter().filter_map(layer).collect();
    if layers.is_empty() {
        return None;
    }
    let chart = Chart {
        title: Metric::Recall.name().into(),
        x: Axis::new("recurrent state, or KV cache at the length of training", Scale::Log, Unit::Bytes),
        y: Axis::new("", Scale::Linear, Unit::Number),
        layers,
    };
    Some(Figure {
        title: "Loss on recall tokens against bytes of state".into(),
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
