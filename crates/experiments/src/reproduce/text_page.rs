//! Figures and tables of the experiments on text.

use std::collections::BTreeMap;

use termwise_report::{Axis, Band, Block, Cell, Chart, Figure, Layer, Line, Point, Points, Scale as AxisScale, Section, Table, Unit};
use termwise_train::eval::Part;
use termwise_train::slices::Slices;

use super::list::{LINEAR, SOFTMAX, series};
use super::results::{Outcome, Results, Summary, TaskOutcome, VariantOutcome};
use super::text::{ORDERS, TOKENS, plain};
use super::{Id, recall};

/// Losses further above all references than this are left out of a figure, and named in its caption.
const BEYOND: f64 = 1.0;

fn of(results: &Results, id: Id) -> Option<&Outcome> {
    results.experiments.iter().find(|outcome| outcome.id == id)
}

fn metric(task: &TaskOutcome, name: &str) -> Option<Summary> {
    task.variants.iter().find(|outcome| outcome.variant.name == name)?.metric
}

/// What a caption states: model, tokens, seeds, chance level.
fn setting(results: &Results) -> String {
    let tokens = results.tokens.unwrap_or(TOKENS) as f64 / 1e6;
    format!(
        "Llama with 4 layers and width 128, context 512, {tokens:.1} M training tokens, bytes as tokens; uniform predictions have ln 257 = 5.549 nats. \
         Bytes were chosen because the gap appears within this budget."
    )
}

/// The first screen: one figure and two sentences.
pub fn lead(results: &Results) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (id, name) in [(Id::Orders, "loss-by-order"), (Id::OrdersConv, "loss-by-order-conv")] {
        let Some(task) = of(results, id).and_then(|outcome| outcome.tasks.first()) else { continue };
        let Some((figure, left_out)) = loss_by_order(task) else { continue };
        if blocks.is_empty() {
            blocks.push(Block::Text(answer(results)));
        }
        let conv =
            if id == Id::OrdersConv { " Every variant has a short convolution (conv=4)." } else { " No variant has a short convolution." };
        let caption = format!("Mean, and smallest to largest over seeds. {}{conv}{left_out}", setting(results));
        blocks.push(Block::Figure { name: name.into(), figure, caption });
    }
    blocks
}

/// How far orders close the gap, in two sentences.
fn answer(results: &Results) -> String {
    let sentence = |id: Id, when: &str| {
        let task = of(results, id)?.tasks.first()?;
        let [softmax, linear] = [SOFTMAX, LINEAR].map(|name| metric(task, name));
        let (softmax, linear) = (softmax?.mean, linear?.mean);
        let closed = |order: usize| {
            let share = (linear - metric(task, &series(order))?.mean) / (linear - softmax);
            Some(format!("orders 0..{order} close {:.0} %", 100.0 * share))
        };
        let closed: Vec<String> = [2, 4, 10].into_iter().filter_map(closed).collect();
        let closed = if closed.is_empty() { String::new() } else { format!(" of which {}", closed.join(", ")) };
        Some(format!("{when}, linear attention is {:.3} nats per byte above softmax,{closed}.", linear - softmax))
    };
    let sentences = [sentence(Id::Orders, "Without a short convolution"), sentence(Id::OrdersConv, "With one in every variant")];
    sentences.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// Figure 1, and a sentence about points that are not in it.
fn loss_by_order(task: &TaskOutcome) -> Option<(Figure, String)> {
    let references = [(SOFTMAX, 0), (LINEAR, 2), ("Norm", 3), ("Gate", 4)];
    let known: Vec<(&str, usize, f64)> =
        references.iter().filter_map(|&(name, color)| Some((name, color, metric(task, name)?.mean))).collect();
    let limit = known.iter().map(|known| known.2).fold(f64::NEG_INFINITY, f64::max) + BEYOND;
    let all: Vec<(usize, Summary)> = ORDERS.into_iter().filter_map(|order| Some((order, metric(task, &series(order))?))).collect();
    let (shown, beyond): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, found)| found.greatest.unwrap_or(found.mean) <= limit);
    if shown.is_empty() {
        return None;
    }
    let x = |order: usize| order as f64;
    let name = "Taylor orders 0..p".to_owned();
    let band = shown.iter().filter_map(|(order, found)| Some((x(*order), found.least?, found.greatest?))).collect();
    let mut layers = vec![Layer::Band(Band { name: name.clone(), color: 1, points: band })];
    for (reference, color, mean) in known {
        let points = vec![(x(ORDERS[0]), mean), (x(ORDERS[ORDERS.len() - 1]), mean)];
        layers.push(Layer::Line(Line { name: reference.into(), color, dashed: true, points }));
    }
    let points = shown.iter().map(|(order, found)| (x(*order), found.mean)).collect();
    layers.push(Layer::Line(Line { name: name.clone(), color: 1, dashed: false, points }));
    let point = |(order, found): &(usize, Summary)| {
        Point::new(x(*order), found.mean).within(found.least.unwrap_or(found.mean), found.greatest.unwrap_or(found.mean))
    };
    layers.push(Layer::Points(Points { name: String::new(), color: 1, points: shown.iter().map(point).collect() }));
    let chart = Chart {
        title: "held-out loss, nats per byte".into(),
        x: Axis::new("highest Taylor order p", AxisScale::Linear, Unit::Number),
        y: Axis::new("", AxisScale::Linear, Unit::Number),
        layers,
    };
    let beyond: Vec<String> = beyond.iter().map(|(order, found)| format!("0..{order} ({:.2})", found.mean)).collect();
    let left_out =
        if beyond.is_empty() { String::new() } else { format!(" Not shown, because they are far above: orders {}.", beyond.join(", ")) };
    let figure = Figure {
        title: format!("Held-out loss against the highest Taylor order, {}", task.task),
        description:
            "Mean loss of Taylor attention with orders 0 to p for several p, with softmax, linear attention, Norm and Gate as lines.".into(),
        panels: vec![chart.into()],
    };
    Some((figure, left_out))
}

/// Family, its color, and what is left of the name of one member.
fn family(name: &str) -> (&'static str, usize, String) {
    let short = |prefix: &str| name.strip_prefix(prefix).unwrap_or(name).trim_start_matches([',', ' ']).to_owned();
    match name {
        SOFTMAX => ("softmax, full cache", 0, String::new()),
        _ if name.starts_with("window") && name.contains("far") => ("window and far orders", 6, short("window 32 and far orders ")),
        _ if name.starts_with("window") => ("sliding window", 1, short("window ")),
        _ if name.starts_with(LINEAR) => ("linear ELU + 1", 2, short(LINEAR)),
        _ if name.contains("elta") => ("delta rule", 4, name.replace(", unit keys", "")),
        _ if name.contains("unit keys") => ("unit keys, no delta rule", 5, name.replace(", unit keys", "")),
        _ if name.starts_with("orders") => ("Taylor orders", 3, short("orders ")),
        _ if name.starts_with("Based") => ("Based", 8, String::new()),
        _ => ("decay", 7, name.to_owned()),
    }
}

/// Every variant of the experiments with or without a convolution, once.
fn points(results: &Results, conv: bool) -> Vec<&VariantOutcome> {
    let mut seen: Vec<&VariantOutcome> = Vec::new();
    let outcomes = results.experiments.iter().filter(|outcome| {
        plain(outcome.id).is_some_and(|(kind, has)| has == conv && matches!(kind, Id::Orders | Id::State | Id::Delta | Id::Families))
    });
    for outcome in outcomes.flat_map(|outcome| outcome.tasks.first()).flat_map(|task| &task.variants) {
        // Without a state of constant size a variant has the same cache as softmax.
        let counts = outcome.constant_state || outcome.variant.name == SOFTMAX;
        if counts && outcome.metric.is_some() && !seen.iter().any(|other| other.variant.name == outcome.variant.name) {
            seen.push(outcome);
        }
    }
    seen
}

/// Names of those that no other has both less state and less loss than, by bytes.
fn pareto<'a>(points: &[&'a VariantOutcome]) -> Vec<&'a VariantOutcome> {
    let place = |outcome: &VariantOutcome| Some((outcome.state_bytes?, outcome.metric?.mean));
    let mut front: Vec<&VariantOutcome> = points.iter().copied().filter(|outcome| place(outcome).is_some()).collect();
    front.sort_by(|one, other| place(one).partial_cmp(&place(other)).unwrap_or(std::cmp::Ordering::Equal));
    let mut best = f64::INFINITY;
    front.retain(|outcome| {
        let loss = outcome.metric.map_or(f64::INFINITY, |found| found.mean);
        let kept = loss < best;
        best = best.min(loss);
        kept
    });
    front
}

/// Figure 2.
fn loss_by_state(results: &Results, conv: bool) -> Option<(Figure, String)> {
    let all = points(results, conv);
    let references: Vec<f64> =
        all.iter().filter(|one| [SOFTMAX, LINEAR].contains(&&*one.variant.name)).filter_map(|one| Some(one.metric?.mean)).collect();
    let limit = references.iter().copied().fold(f64::NEG_INFINITY, f64::max) + BEYOND;
    let (shown, beyond): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| one.metric.is_some_and(|found| found.mean <= limit));
    if shown.len() < 3 {
        return None;
    }
    let mut families: BTreeMap<usize, (&str, Vec<Point>)> = BTreeMap::new();
    for outcome in &shown {
        let (name, color, short) = family(&outcome.variant.name);
        let (Some(bytes), Some(found)) = (outcome.state_bytes, outcome.metric) else { continue };
        let point = Point::new(bytes as f64, found.mean).within(found.least.unwrap_or(found.mean), found.greatest.unwrap_or(found.mean));
        families.entry(color).or_insert((name, Vec::new())).1.push(point.named(short));
    }
    let front = pareto(&shown);
    let place = |outcome: &&VariantOutcome| Some((outcome.state_bytes? as f64, outcome.metric?.mean));
    let mut layers =
        vec![Layer::Line(Line { name: "Pareto front".into(), color: 0, dashed: true, points: front.iter().filter_map(place).collect() })];
    layers.extend(families.into_iter().map(|(color, (name, points))| Layer::Points(Points { name: name.into(), color, points })));
    let chart = Chart {
        title: "held-out loss, nats per byte".into(),
        x: Axis::new("recurrent state, or cache at 512 tokens", AxisScale::Log, Unit::Bytes),
        y: Axis::new("", AxisScale::Linear, Unit::Number),
        layers,
    };
    let names: Vec<&str> = front.iter().map(|outcome| outcome.variant.name.as_str()).collect();
    let mut caption = format!("On the Pareto front: {}.", names.join("; "));
    if !beyond.is_empty() {
        let names: Vec<&str> = beyond.iter().map(|outcome| outcome.variant.name.as_str()).collect();
        caption += &format!(" Not shown, because they are far above: {}.", names.join("; "));
    }
    let which = if conv { "conv=4 in every variant" } else { "no short convolution" };
    Some((
        Figure {
            title: format!("Held-out loss against bytes of state, {which}"),
            description: "One point per variant: bytes of recurrent state or KV cache, and mean held-out loss, in families.".into(),
            panels: vec![chart.into()],
        },
        caption,
    ))
}

/// The gap to softmax by training tokens, one panel per tokenization.
fn gaps(results: &Results) -> Option<Figure> {
    let outcome = of(results, Id::Tokenization)?;
    let tokens = results.tokens.unwrap_or(TOKENS) as f64;
    let mut panels = Vec::new();
    for task in &outcome.tasks {
        // The mean curve of a variant, by step.
        let curve = |found: &VariantOutcome| -> BTreeMap<u64, f64> {
            let mut by_step: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
            for run in found.runs.iter().map(|&run| &results.runs[run]).filter(|run| run.status == "finished") {
                run.curve.iter().for_each(|point| by_step.entry(point.step).or_default().push(point.loss));
            }
            by_step.into_iter().map(|(step, losses)| (step, losses.iter().sum::<f64>() / losses.len() as f64)).collect()
        };
        let Some(softmax) = task.variants.iter().find(|outcome| outcome.variant.name == SOFTMAX).map(curve) else { continue };
        let Some(&last) = softmax.keys().next_back() else { continue };
        let mut layers = Vec::new();
        for (color, found) in task.variants.iter().filter(|outcome| outcome.variant.name != SOFTMAX).enumerate() {
            let gap = |(step, loss): (u64, f64)| Some((step as f64 / last as f64 * tokens, loss - softmax.get(&step)?));
            let points = curve(found).into_iter().filter_map(gap).collect();
            layers.push(Layer::Line(Line { name: found.variant.name.clone(), color: color + 1, dashed: false, points }));
        }
        panels.push(
            Chart {
                title: format!("{}: loss above that of softmax, nats per token", task.task),
                x: Axis::new("training tokens", AxisScale::Linear, Unit::Number),
                y: Axis::new("", AxisScale::Linear, Unit::Number),
                layers,
            }
            .into(),
        );
    }
    (!panels.is_empty()).then(|| Figure {
        title: "The gap to softmax against training tokens, for each tokenization".into(),
        description: "One panel per tokenization: mean held-out loss of each variant less that of softmax, by training tokens.".into(),
        panels,
    })
}

/// The slices of each variant of an experiment, over its seeds.
fn slices_of<'a>(results: &'a Results, outcome: &'a VariantOutcome, n: usize) -> Vec<&'a Slices> {
    let own = results.recall.iter().filter(|found| outcome.runs.contains(&found.run));
    own.filter_map(|found| found.slices.iter().find(|slices| slices.ngram == n)).collect()
}

/// Mean over seeds of a part of the slices.
fn mean(all: &[&Slices], part: impl Fn(&Slices) -> Option<Part>) -> Option<Part> {
    let parts: Vec<Part> = all.iter().filter_map(|slices| part(slices)).collect();
    let first = parts.first()?;
    Some(Part { tokens: first.tokens, loss: parts.iter().map(|part| part.loss).sum::<f64>() / parts.len() as f64 })
}

/// Loss on recall hits and elsewhere, and the share of the gap between linear attention and softmax on hits.
fn recall_blocks(results: &Results, id: Id) -> Vec<Block> {
    let Some(task) = of(results, id).and_then(|outcome| outcome.tasks.first()) else { return Vec::new() };
    let mut blocks = Vec::new();
    let named =
        |name: &str, n| task.variants.iter().find(|outcome| outcome.variant.name == name).map(|outcome| slices_of(results, outcome, n));
    for n in recall::NGRAMS {
        let columns = ["variant", "hits", "loss on hits", "rest", "loss on the rest"];
        let mut table =
            Table::new(format!("{}: loss where the last {n} tokens occurred earlier in the context, and elsewhere", task.task), columns);
        for outcome in &task.variants {
            let all = slices_of(results, outcome, n);
            let (Some(hits), Some(rest)) = (mean(&all, |found| Some(found.hits)), mean(&all, |found| Some(found.rest))) else { continue };
            let cells = [hits, rest].map(|part| [Cell::Count(part.tokens), Cell::Number(part.loss, 4)]);
            table.rows.push([Cell::text(&outcome.variant.name)].into_iter().chain(cells.into_iter().flatten()).collect());
        }
        if table.rows.is_empty() {
            continue;
        }
        blocks.push(Block::Table { name: format!("{}-recall-{n}", id.name()), table });
        let (Some(softmax), Some(linear)) = (named(SOFTMAX, n), named(LINEAR, n)) else { continue };
        let gap = |part: &dyn Fn(&Slices) -> Option<Part>| {
            let (one, other) = (mean(&softmax, part)?, mean(&linear, part)?);
            Some((one.tokens, (other.loss - one.loss) * one.tokens as f64))
        };
        let (Some(hits), Some(rest)) = (gap(&|found| Some(found.hits)), gap(&|found| Some(found.rest))) else { continue };
        let share = |part: f64, all: f64| 100.0 * part / all;
        blocks.push(Block::Text(format!(
            "**Share of the gap between linear attention and softmax on hits of {n}-grams: {:.0} %**, of {:.0} % of the tokens.",
            share(hits.1, hits.1 + rest.1),
            share(hits.0 as f64, (hits.0 + rest.0) as f64)
        )));
        let mut table = Table::new(
            format!("{}: gap by count of the {n}-gram in the training text", task.task),
            ["count in training", "hits", "share of the gap on hits", "rest", "share of the gap on the rest"],
        );
        let groups = softmax.first().map_or(0, |slices| slices.frequencies.len());
        for group in 0..groups {
            let Some(range) = softmax.first().and_then(|slices| slices.frequencies.get(group)) else { continue };
            let name = range.to.map_or(format!("{} or more", range.from), |to| format!("{}–{to}", range.from));
            let parts = [gap(&|found| Some(found.frequencies.get(group)?.hits)), gap(&|found| Some(found.frequencies.get(group)?.rest))];
            let cells = parts.map(|part| {
                let (tokens, gap) = part.unwrap_or((0, 0.0));
                [Cell::Count(tokens), Cell::text(format!("{:.1} %", share(gap, hits.1 + rest.1)))]
            });
            table.rows.push([Cell::text(name)].into_iter().chain(cells.into_iter().flatten()).collect());
        }
        if !table.rows.is_empty() {
            blocks.push(Block::Table { name: format!("{}-frequency-{n}", id.name()), table });
        }
    }
    blocks.extend(positions(results, id, task));
    blocks
}

/// Loss by position.
fn positions(results: &Results, id: Id, task: &TaskOutcome) -> Option<Block> {
    let mut layers = Vec::new();
    for (color, outcome) in task.variants.iter().filter(|outcome| !slices_of(results, outcome, recall::NGRAMS[0]).is_empty()).enumerate() {
        let all = slices_of(results, outcome, recall::NGRAMS[0]);
        let groups = all.first().map_or(0, |slices| slices.positions.len());
        let point = |group: usize| {
            let at = all.first()?.positions.get(group)?;
            Some((((at.from + at.to) as f64 / 2.0).max(0.5), mean(&all, |found| Some(found.positions.get(group)?.part))?.loss))
        };
        let points = (0..groups).filter_map(point).collect();
        layers.push(Layer::Line(Line { name: outcome.variant.name.clone(), color, dashed: false, points }));
    }
    if layers.is_empty() {
        return None;
    }
    let chart = Chart {
        title: "held-out loss, nats per byte".into(),
        x: Axis::new("position in the context", AxisScale::Log, Unit::Number),
        y: Axis::new("", AxisScale::Linear, Unit::Number),
        layers,
    };
    let figure = Figure {
        title: format!("Loss by position, {}", task.task),
        description: "Mean held-out loss of each variant by position in the context, in groups that double in length.".into(),
        panels: vec![chart.into()],
    };
    Some(Block::Figure { name: format!("{}-positions", id.name()), figure, caption: "Mean over seeds and over groups of positions".into() })
}

/// Sections before those of the experiments.
pub fn sections(results: &Results) -> Vec<Section> {
    let mut sections = Vec::new();
    let mut blocks = Vec::new();
    for (conv, name) in [(false, "loss-by-state"), (true, "loss-by-state-conv")] {
        if let Some((figure, caption)) = loss_by_state(results, conv) {
            let caption = format!("Mean, and smallest to largest over seeds. {caption} {}", setting(results));
            blocks.push(Block::Figure { name: name.into(), figure, caption });
        }
    }
    if !blocks.is_empty() {
        sections.push(Section { heading: "Loss per byte of state".into(), blocks });
    }
    if let Some(figure) = gaps(results) {
        let caption = "Mean over seeds; below 0 a variant is better than softmax".into();
        let blocks = vec![Block::Figure { name: "gap".into(), figure, caption }];
        sections.push(Section { heading: "When the gap appears".into(), blocks });
    }
    let blocks: Vec<Block> = [Id::Orders, Id::OrdersConv].into_iter().flat_map(|id| recall_blocks(results, id)).collect();
    if !blocks.is_empty() {
        sections.push(Section { heading: "Where the gap is: associative-recall hits and position".into(), blocks });
    }
    sections
}
