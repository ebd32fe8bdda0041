//! Figures and tables of the experiments on text.

use std::collections::BTreeMap;

use termwise_report::{
    Axis, Band, Block, Cell, Chart, Figure, Layer, Line, Point, Points, Rule, Scale as AxisScale, Section, Table, Unit, counted, ramp,
};
use termwise_train::eval::Part;
use termwise_train::slices::Slices;

use super::figures::highest_order;
use super::list::{LINEAR, SOFTMAX, series};
use super::mqar::SOLVED;
use super::results::{Outcome, Results, Run, Summary, TaskOutcome, VariantOutcome};
use super::text::{ORDERS, TOKENS, plain};
use super::{Id, recall};

/// Losses further above all references than this are left out of a figure, and named in its caption.
const MAX_ABOVE_REFERENCES: f64 = 1.0;

fn of(results: &Results, id: Id) -> Option<&Outcome> {
    results.experiments.iter().find(|outcome| outcome.id == id)
}

fn metric(task: &TaskOutcome, name: &str) -> Option<Summary> {
    task.variants.iter().find(|outcome| outcome.variant.name == name)?.metric
}

/// Model and tokens, for captions.
fn model(results: &Results) -> String {
    let tokens = results.tokens.unwrap_or(TOKENS) as f64;
    let tokens = if tokens < 1e5 { format!("{tokens}") } else { format!("{:.1} M", tokens / 1e6) };
    format!("Llama with 4 layers and width 128, context 512, {tokens} training tokens")
}

/// A warning while runs are missing.
fn preliminary(results: &Results) -> String {
    let open = results.runs.iter().filter(|run| run.status == "open").count();
    if open > 0 { format!(" **Preliminary: {open} of {} runs have not finished.**", results.runs.len()) } else { String::new() }
}

/// Model, tokens and chance level of experiments on bytes, for captions.
fn setting(results: &Results) -> String {
    format!(
        "{}, about 0.9 M parameters, bytes as tokens; uniform predictions have a loss of ln 257 = 5.549 nats. Bytes were chosen because the gap \
         appears within this budget.{}",
        model(results),
        preliminary(results)
    )
}

/// `Mean, minimum and maximum over 3 seeds.`
fn spread(task: &TaskOutcome) -> String {
    let seeds = task.variants.iter().filter_map(|outcome| Some(outcome.metric?.count)).max().unwrap_or(0);
    format!("Mean, minimum and maximum over {}.", counted(seeds, "seed"))
}

/// The summary at the top of the report: two sentences and one figure.
pub fn lead(results: &Results) -> Vec<Block> {
    let both = || [false, true].into_iter();
    let orders = || both().find_map(|conv| Some((answer(results), order_block(results, conv)?)));
    let states = || both().find_map(|conv| Some((best_state(results, conv)?, state_block(results, conv)?)));
    let gap = || Some((gap_at_the_end(results)?, gap_block(results)?));
    orders().or_else(states).or_else(gap).map_or(Vec::new(), |(text, figure)| vec![Block::Text(text), figure])
}

/// The variant with the lowest loss in Figure 2, and the Taylor states on the Pareto front, in two sentences.
fn best_state(results: &Results, conv: bool) -> Option<String> {
    let mut all = points(results, conv);
    let cache = all.iter().find(|outcome| outcome.variant.name == SOFTMAX).and_then(|outcome| outcome.state_bytes);
    all.retain(|outcome| outcome.state_bytes <= cache.or(outcome.state_bytes));
    let front = pareto(&all);
    let best = front.last()?;
    let with_bytes = |outcome: &VariantOutcome| {
        let (bytes, found) = (outcome.state_bytes?, outcome.metric?);
        Some(format!("{} ({:.3} nats per byte, {})", outcome.variant.name, found.mean, Unit::Bytes.format(bytes as f64)))
    };
    let softmax = all.iter().find(|outcome| outcome.variant.name == SOFTMAX && outcome.variant.name != best.variant.name);
    let softmax = softmax.and_then(|outcome| with_bytes(outcome)).map_or(String::new(), |softmax| format!(", against {softmax}"));
    let taylor = |outcome: &&VariantOutcome| {
        let family = family(&outcome.variant.name).name;
        let higher = family.starts_with("order n") && !outcome.variant.name.starts_with("order 1");
        family.starts_with("Taylor") || higher || family.ends_with("far orders")
    };
    let taylor: Vec<&VariantOutcome> = front.iter().copied().filter(taylor).collect();
    let front = match taylor.is_empty() {
        true => "No Taylor state is on the Pareto front of loss and bytes.".into(),
        false => format!("Taylor states on the Pareto front of loss and bytes: {}.", names(&taylor)),
    };
    let conv = if conv { "With a short convolution in every variant" } else { "Without a short convolution" };
    Some(format!("{conv}, {} has the lowest loss{softmax}. {front}", with_bytes(best)?))
}

fn names(outcomes: &[&VariantOutcome]) -> String {
    outcomes.iter().map(|outcome| outcome.variant.name.as_str()).collect::<Vec<_>>().join("; ")
}

/// Figure 2, with or without a short convolution.
fn state_block(results: &Results, conv: bool) -> Option<Block> {
    let (figure, sentences) = loss_by_state(results, conv)?;
    let name = if conv { "loss-by-state-conv" } else { "loss-by-state" };
    let caption = format!("Mean, minimum and maximum over seeds. {sentences} {}", setting(results));
    Some(Block::Figure { name: name.into(), figure, caption })
}

/// Figure 1, with or without a short convolution.
fn order_block(results: &Results, conv: bool) -> Option<Block> {
    let (id, name) = if conv { (Id::OrdersConv, "loss-by-order-conv") } else { (Id::Orders, "loss-by-order") };
    let task = of(results, id)?.tasks.first()?;
    let (figure, left_out) = loss_by_order(task)?;
    let conv = if conv { "Every variant has a short convolution (conv=4)." } else { "No variant has a short convolution." };
    let caption = format!("{} {conv} {}{left_out}", spread(task), setting(results));
    Some(Block::Figure { name: name.into(), figure, caption })
}

/// How far orders close the gap, and the highest order with less state than the cache, in two sentences.
fn answer(results: &Results) -> String {
    let closed = |id: Id| {
        let task = of(results, id)?.tasks.first()?;
        let (softmax, linear) = (metric(task, SOFTMAX)?.mean, metric(task, LINEAR)?.mean);
        let closed = |order: usize| {
            let share = (linear - metric(task, &series(order))?.mean) / (linear - softmax);
            Some(format!("orders 0..{order} close {:.0} %", 100.0 * share))
        };
        let closed: Vec<String> = [2, 4, 10].into_iter().filter_map(closed).collect();
        let closed = if closed.is_empty() { String::new() } else { format!(", of which {}", closed.join(", ")) };
        Some((linear - softmax, closed))
    };
    let mut sentences = Vec::new();
    if let Some((gap, closed)) = closed(Id::Orders) {
        sentences.push(format!("Without a short convolution, linear attention is {gap:.3} nats per byte above softmax{closed}."));
    }
    if let Some((gap, closed)) = closed(Id::OrdersConv) {
        sentences.push(match sentences.is_empty() {
            true => format!("With a short convolution in every variant, linear attention is {gap:.3} nats per byte above softmax{closed}."),
            false => format!("With a short convolution in every variant, the gap is {gap:.3} nats{closed}."),
        });
    }
    if sentences.len() < 2 {
        sentences.extend([Id::Orders, Id::OrdersConv].into_iter().find_map(|id| smaller_than_the_cache(of(results, id)?.tasks.first()?)));
    }
    sentences.join(" ")
}

/// The highest order whose state is smaller than the cache of softmax.
fn smaller_than_the_cache(task: &TaskOutcome) -> Option<String> {
    let bytes = |name: &str| task.variants.iter().find(|outcome| outcome.variant.name == name)?.state_bytes;
    let cache = bytes(SOFTMAX)?;
    let (order, state) = ORDERS.into_iter().filter_map(|order| Some((order, bytes(&series(order))?))).rfind(|(_, state)| *state < cache)?;
    let [state, cache] = [state, cache].map(|bytes| Unit::Bytes.format(bytes as f64));
    Some(format!("Orders 0..{order} are the highest whose state ({state}) is smaller than the KV cache of softmax ({cache})."))
}

/// Figure 1, and a sentence about points that are not in it.
fn loss_by_order(task: &TaskOutcome) -> Option<(Figure, String)> {
    let known: Vec<(&str, f64)> =
        [SOFTMAX, LINEAR, "Norm", "Gate"].into_iter().filter_map(|name| Some((name, metric(task, name)?.mean))).collect();
    let limit = known.iter().map(|known| known.1).fold(f64::NEG_INFINITY, f64::max) + MAX_ABOVE_REFERENCES;
    let all: Vec<(usize, Summary)> = ORDERS.into_iter().filter_map(|order| Some((order, metric(task, &series(order))?))).collect();
    let (shown, beyond): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, found)| found.greatest.unwrap_or(found.mean) <= limit);
    if shown.is_empty() {
        return None;
    }
    let color = |name: &str| family(name).color;
    let points = shown.iter().map(|(order, found)| (*order as f64, found.mean)).collect();
    // The line has the middle of the ramp.
    let name = "Taylor orders 0..p".to_owned();
    let mut layers = vec![Layer::Line(Line { name, color: ramp(ORDERS.len() / 2, ORDERS.len()), dashed: false, points })];
    layers.extend(shown.iter().map(|(order, found)| {
        let point = Point::new(*order as f64, found.mean).within(found.least.unwrap_or(found.mean), found.greatest.unwrap_or(found.mean));
        Layer::Points(Points { name: String::new(), color: color(&series(*order)), points: vec![point] })
    }));
    layers.extend(known.into_iter().map(|(name, y)| Layer::Rule(Rule { y, label: name.into(), color: color(name) })));
    let chart = Chart {
        title: "held-out loss, nats per byte".into(),
        x: Axis::new("highest Taylor order p", AxisScale::Linear, Unit::Number).at(ORDERS.map(|order| order as f64)),
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

/// The name of a variant in figures. A family has one colour, and Taylor orders have a sequential ramp. Norm and Gate, which have no state, share theirs with
/// families that they are never shown with.
pub(super) struct Family {
    name: &'static str,
    pub(super) color: usize,
    /// The variant within its family.
    member: String,
}

pub(super) fn family(name: &str) -> Family {
    let of = |family: &'static str, color: usize, member: &str| Family { name: family, color, member: member.to_owned() };
    let after = |prefix: &str| name.strip_prefix(prefix).unwrap_or(name).trim_start_matches([',', ' ']).to_owned();
    match name {
        SOFTMAX => of("softmax, full cache", 0, ""),
        "Norm" => of("Norm", 1, ""),
        "Gate" => of("Gate", 8, ""),
        _ if name.starts_with("window") && name.contains("far") => of("window + far orders", 7, &after("window 32 and far orders ")),
        _ if name.starts_with("Based") => of("window + far orders", 7, "Based"),
        _ if name.starts_with("window") => of("sliding window", 1, &after("window ")),
        _ if name.starts_with(LINEAR) => of("linear ELU + 1", 3, &after(LINEAR)),
        // Unit queries and keys: order 1 is DeltaNet with another norm, higher orders are new.
        _ if name.contains(", unit keys") || name.starts_with("order ") => {
            let member = name.replace(", unit keys", "").replace(", delta", "");
            let member = member.trim_start_matches("orders ").trim_start_matches("order ");
            if name.contains(", delta") { of("order n, delta rule", 4, member) } else { of("order n, no delta rule", 5, member) }
        }
        _ if name.ends_with("DeltaNet") || name.contains("DeltaNet,") => {
            of("DeltaNet", 6, name.replace("Gated DeltaNet", "gated").trim_start_matches("DeltaNet").trim_start_matches([',', ' ']))
        }
        _ => match highest_order(name) {
            Some(order) => {
                let step = ORDERS.iter().position(|known| *known >= order).unwrap_or(ORDERS.len() - 1);
                of("Taylor orders 0..p", ramp(step, ORDERS.len()), &after("orders "))
            }
            None => of("decay", 8, name),
        },
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

/// The Pareto front of state against loss, in order of bytes.
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

/// Figure 2, and sentences about it.
fn loss_by_state(results: &Results, conv: bool) -> Option<(Figure, String)> {
    let (chart, sentences) = by_state(points(results, conv), "held-out loss, nats per byte", "recurrent state, or KV cache at 512 tokens")?;
    let which = if conv { "conv=4 in every variant" } else { "no short convolution" };
    let figure = Figure {
        title: format!("Held-out loss against bytes of state, {which}"),
        description: "One point per variant: bytes of recurrent state or KV cache, and mean held-out loss, in families.".into(),
        panels: vec![chart.into()],
    };
    Some((figure, sentences))
}

/// The metric against bytes of state, with the Pareto front, and sentences that name its variants and those that are not shown.
fn by_state(all: Vec<&VariantOutcome>, y: &str, x: &str) -> Option<(Chart, String)> {
    let mean = |name: &str| Some(all.iter().find(|one| one.variant.name.starts_with(name))?.metric?.mean);
    let limit = [SOFTMAX, LINEAR].into_iter().filter_map(mean).fold(f64::NEG_INFINITY, f64::max) + MAX_ABOVE_REFERENCES;
    let cache = all.iter().find(|one| one.variant.name == SOFTMAX).and_then(|one| one.state_bytes).unwrap_or(u64::MAX);
    let (all, larger): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| one.state_bytes.is_some_and(|bytes| bytes <= cache));
    let (shown, beyond): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| one.metric.is_some_and(|found| found.mean <= limit));
    if shown.len() < 3 {
        return None;
    }
    let place = |outcome: &&VariantOutcome| Some((outcome.state_bytes? as f64, outcome.metric?.mean));
    let front = pareto(&shown);
    let line = Line { name: "Pareto front".into(), color: 0, dashed: true, points: front.iter().filter_map(place).collect() };
    let mut layers = vec![Layer::Line(line)];
    let mut members: Vec<(Family, &VariantOutcome)> = shown.iter().map(|outcome| (family(&outcome.variant.name), *outcome)).collect();
    members.sort_by_key(|(family, _)| family.color);
    // The legend is in the order of families.
    layers.extend(
        members.iter().map(|(family, _)| Layer::Points(Points { name: family.name.into(), color: family.color, points: Vec::new() })),
    );
    // Points of the front choose the places of their labels first.
    members.sort_by_key(|(_, outcome)| !front.iter().any(|other| other.variant.name == outcome.variant.name));
    for (family, outcome) in members {
        let (Some((bytes, value)), Some(found)) = (place(&outcome), outcome.metric) else { continue };
        let point = Point::new(bytes, value).within(found.least.unwrap_or(value), found.greatest.unwrap_or(value)).named(family.member);
        layers.push(Layer::Points(Points { name: family.name.into(), color: family.color, points: vec![point] }));
    }
    let mut sentences = format!("On the Pareto front: {}.", names(&front));
    for (outcomes, reason) in [(beyond, "their loss is far above"), (larger, "their state is larger than the cache")] {
        if !outcomes.is_empty() {
            sentences += &format!(" Not shown, because {reason}: {}.", names(&outcomes));
        }
    }
    let (x, axis) = (Axis::new(x, AxisScale::Log, Unit::Bytes), Axis::new("", AxisScale::Linear, Unit::Number));
    Some((Chart { title: y.into(), x, y: axis, layers }, sentences))
}

/// The summary at the top of the report on MQAR.
pub fn mqar_lead(results: &Results) -> Vec<Block> {
    let about = format!(
        "{ABOUT_MQAR} A run has solved the task if its accuracy on the test examples is at least {SOLVED}.{}",
        preliminary(results)
    );
    let Some(task) = of(results, Id::Mqar).and_then(|outcome| outcome.tasks.first()) else { return vec![Block::Text(about)] };
    let shown: Vec<&VariantOutcome> = task.variants.iter().filter(|outcome| outcome.metric.is_some()).collect();
    let bytes = "recurrent state, or KV cache at the length of training";
    let Some((errors, sentences)) = by_state(shown.clone(), task.metric.name(), bytes) else { return vec![Block::Text(about)] };
    let cache = shown.iter().find(|one| one.variant.name == SOFTMAX).and_then(|one| one.state_bytes);
    let mut panels = vec![errors.into()];
    panels.extend(solved_by_state(&shown, bytes, cache.unwrap_or(u64::MAX)).map(Into::into));
    let figure = Figure {
        title: format!("{}: wrong answers, and seeds that solve it, against bytes of state", task.task),
        description:
            "One point per variant: bytes of recurrent state or KV cache, with the mean share of wrong answers, and with the share \
            of seeds that solve the task, in families."
                .into(),
        panels,
    };
    let caption = format!("{} {sentences} {about}", spread(task));
    vec![Block::Text(solvers(&shown)), Block::Figure { name: "errors-by-state".into(), figure, caption }]
}

/// The number of seeds that solve the task.
fn solved(outcome: &VariantOutcome) -> usize {
    outcome.numbers.iter().filter(|(_, error)| 1.0 - error >= SOLVED).count()
}

/// The variants of which every seed solves the task, and the smallest of their states, in two sentences.
fn solvers(shown: &[&VariantOutcome]) -> String {
    let mut all: Vec<&VariantOutcome> = shown.iter().copied().filter(|outcome| solved(outcome) == outcome.runs.len()).collect();
    all.sort_by_key(|outcome| outcome.state_bytes);
    let some = shown.iter().filter(|outcome| solved(outcome) > 0).count();
    let Some(smallest) = all.first() else {
        return format!(
            "No variant solves multi-query associative recall with every seed. {some} of {} solve it with some seeds.",
            shown.len()
        );
    };
    let bytes = |outcome: &VariantOutcome| outcome.state_bytes.map_or("unknown".into(), |bytes| Unit::Bytes.format(bytes as f64));
    let cache = shown.iter().find(|outcome| outcome.variant.name == SOFTMAX).map_or("unknown".into(), |cache| bytes(cache));
    let least = match smallest.variant.name == SOFTMAX {
        true => format!("None of them has less state than the KV cache of softmax, {cache}."),
        false => {
            format!("The smallest state of these is {} ({}); the KV cache of softmax has {cache}.", bytes(smallest), smallest.variant.name)
        }
    };
    format!("Multi-query associative recall is solved by every seed of {} of {} variants: {}. {least}", all.len(), shown.len(), names(&all))
}

/// The share of seeds that solve the task against bytes of state.
fn solved_by_state(shown: &[&VariantOutcome], x: &str, cache: u64) -> Option<Chart> {
    let mut members: Vec<(Family, f64, f64)> = Vec::new();
    for outcome in shown {
        let Some(bytes) = outcome.state_bytes.filter(|bytes| *bytes <= cache) else { continue };
        let share = solved(outcome) as f64 / outcome.runs.len().max(1) as f64;
        members.push((family(&outcome.variant.name), bytes as f64, share));
    }
    members.sort_by_key(|(family, ..)| family.color);
    let layer = |(family, bytes, share): (Family, f64, f64)| {
        let points = vec![Point::new(bytes, share).named(family.member)];
        Layer::Points(Points { name: family.name.into(), color: family.color, points })
    };
    let (x, y) = (Axis::new(x, AxisScale::Log, Unit::Bytes), Axis::new("", AxisScale::Linear, Unit::Percent));
    let title = "share of seeds that solve the task".into();
    (!members.is_empty()).then(|| Chart { title, x, y, layers: members.into_iter().map(layer).collect() })
}

const ABOUT_MQAR: &str = "Keys and values are stated once and queried later (MQAR, arXiv 2312.04927); guessing among the values, half of the vocabulary, \
    answers less than 0.2 % correctly. Runs either learn the task or do not, so claims are decided by the number of seeds that solve it, with \
    Fisher's exact two-sided test.";

/// Bytes of text per token of the runs of a task: the loss per token over that per byte.
fn bytes_per_token(task: &TaskOutcome, results: &Results) -> Option<f64> {
    let runs = task.variants.iter().flat_map(|outcome| &outcome.runs).map(|&run| &results.runs[run]);
    let found = runs.filter_map(|run| run.held_out).find(|found| found.bits_per_byte.is_some_and(|bits| bits > 0.0))?;
    Some(found.loss / (found.bits_per_byte? * std::f64::consts::LN_2))
}

/// The name of a tokenization with its bytes per token, and the unit of losses: nats per byte, or per token without a number of bytes.
fn tokenization(task: &TaskOutcome, results: &Results) -> (String, &'static str, f64) {
    match bytes_per_token(task, results) {
        Some(bytes) if (bytes - 1.0).abs() > 0.01 => (format!("{}, {bytes:.2} bytes per token", task.task), "nats per byte", bytes),
        Some(bytes) => (task.task.clone(), "nats per byte", bytes),
        None => (task.task.clone(), "nats per token", 1.0),
    }
}

/// The gap of linear attention and of orders 0..2 to softmax at the end of training for each tokenization, in two sentences.
fn gap_at_the_end(results: &Results) -> Option<String> {
    let tasks = &of(results, Id::Tokenization)?.tasks;
    let sentence = |name: &str, start: &str| {
        let gap = |task: &TaskOutcome| {
            let (_, unit, bytes) = tokenization(task, results);
            let gap = (metric(task, name)?.mean - metric(task, SOFTMAX)?.mean) / bytes;
            // Without the sign of a gap that is rounded to 0.
            let sign = if gap <= -5e-4 { "−" } else { "" };
            Some((format!("{sign}{:.3} ({})", gap.abs(), task.task), unit))
        };
        let (gaps, units): (Vec<String>, Vec<&str>) = tasks.iter().filter_map(gap).unzip();
        let unit = units.first().filter(|first| units.iter().all(|unit| unit == *first))?;
        Some(format!("{start} {} {unit}.", gaps.join(", ")))
    };
    let first = sentence(LINEAR, "At the end of training the loss of linear attention minus that of softmax is")?;
    let second = sentence(&series(2), "That of orders 0..2 minus that of softmax is").unwrap_or_default();
    Some(format!("{first} {second}").trim_end().into())
}

/// The figure of the gap against training tokens.
fn gap_block(results: &Results) -> Option<Block> {
    let figure = gaps(results)?;
    let seeds = of(results, Id::Tokenization)?.tasks.first().map_or(String::new(), spread);
    let caption = format!(
        "{seeds} Differences are between runs of one seed; below 0 a variant is better than softmax. Losses per token were divided by the bytes \
         per token, so panels have one unit. All points of a line are from the same runs, so only the last has the final learning rate. \
         {}, 0.9 M parameters with bytes and more with a larger vocabulary. With the same number of tokens, BPE models read more text.{}",
        model(results),
        preliminary(results)
    );
    Some(Block::Figure { name: "gap".into(), figure, caption })
}

/// The gap to softmax by training tokens, one panel per tokenization: the mean and range over seeds of differences between runs of one seed.
fn gaps(results: &Results) -> Option<Figure> {
    let outcome = of(results, Id::Tokenization)?;
    let tokens = results.tokens.unwrap_or(TOKENS) as f64;
    let mut panels = Vec::new();
    for task in &outcome.tasks {
        let (title, unit, bytes) = tokenization(task, results);
        let finished = |found: &VariantOutcome| -> BTreeMap<u64, &Run> {
            let runs = found.runs.iter().map(|&run| &results.runs[run]).filter(|run| run.status == "finished");
            runs.map(|run| (run.seed, run)).collect()
        };
        let Some(softmax) = task.variants.iter().find(|outcome| outcome.variant.name == SOFTMAX).map(finished) else { continue };
        let Some(last) = softmax.values().filter_map(|run| Some(run.curve.last()?.step)).max() else { continue };
        let (mut bands, mut lines) = (Vec::new(), Vec::new());
        for found in task.variants.iter().filter(|outcome| outcome.variant.name != SOFTMAX) {
            let mut by_step: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
            for (seed, run) in finished(found) {
                for point in &run.curve {
                    let other = softmax.get(&seed).and_then(|other| other.curve.iter().find(|other| other.step == point.step));
                    by_step.entry(point.step).or_default().extend(other.map(|other| (point.loss - other.loss) / bytes));
                }
            }
            let at = |step: &u64| *step as f64 / last as f64 * tokens;
            let summary = |(step, gaps): (&u64, &Vec<f64>)| Some((at(step), Summary::of(gaps)?));
            let gaps: Vec<(f64, Summary)> = by_step.iter().filter_map(summary).collect();
            let (name, color) = (found.variant.name.clone(), family(&found.variant.name).color);
            let band = |(at, gap): &(f64, Summary)| Some((*at, gap.least?, gap.greatest?)).filter(|_| gap.count > 1);
            bands.push(Layer::Band(Band { name: name.clone(), color, points: gaps.iter().filter_map(band).collect() }));
            lines.push(Layer::Line(Line { name, color, dashed: false, points: gaps.iter().map(|(at, gap)| (*at, gap.mean)).collect() }));
        }
        bands.append(&mut lines);
        bands.push(Layer::Rule(Rule { y: 0.0, label: SOFTMAX.into(), color: 0 }));
        panels.push(
            Chart {
                title,
                x: Axis::new("training tokens", AxisScale::Linear, Unit::Number),
                y: Axis::new(format!("loss minus that of softmax, {unit}"), AxisScale::Linear, Unit::Number),
                layers: bands,
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
    for outcome in task.variants.iter().filter(|outcome| !slices_of(results, outcome, recall::NGRAMS[0]).is_empty()) {
        let all = slices_of(results, outcome, recall::NGRAMS[0]);
        let groups = all.first().map_or(0, |slices| slices.positions.len());
        let point = |group: usize| {
            let at = all.first()?.positions.get(group)?;
            Some((((at.from + at.to) as f64 / 2.0).max(0.5), mean(&all, |found| Some(found.positions.get(group)?.part))?.loss))
        };
        let points = (0..groups).filter_map(point).collect();
        let (name, color) = (outcome.variant.name.clone(), family(&outcome.variant.name).color);
        layers.push(Layer::Line(Line { name, color, dashed: false, points }));
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
    // Without a convolution it is the figure of the summary.
    if of(results, Id::Orders).is_some() {
        let blocks: Vec<Block> = order_block(results, true).into_iter().collect();
        if !blocks.is_empty() {
            sections.push(Section { heading: "Loss against order with a short convolution".into(), blocks });
        }
    }
    let shown = lead(results);
    let mut rest = |heading: &str, blocks: Vec<Block>| {
        let blocks: Vec<Block> = blocks.into_iter().filter(|block| !shown.contains(block)).collect();
        if !blocks.is_empty() {
            sections.push(Section { heading: heading.into(), blocks });
        }
    };
    rest("Loss per byte of state", [false, true].into_iter().filter_map(|conv| state_block(results, conv)).collect());
    rest("When the gap appears", gap_block(results).into_iter().collect());
    let blocks: Vec<Block> = [Id::Orders, Id::OrdersConv].into_iter().flat_map(|id| recall_blocks(results, id)).collect();
    if !blocks.is_empty() {
        sections.push(Section { heading: "Where the gap is: associative-recall hits and position".into(), blocks });
    }
    sections
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::reproduce::{Options, Scale, declare};

    #[test]
    fn a_family_has_one_colour_and_orders_have_a_ramp() {
        let options = Options { data: vec!["corpus.txt".into()], ..Options::new(Scale::Text) };
        let declared = declare(&options).unwrap_or_else(|error| panic!("{error}"));
        let mqar = declare(&Options::new(Scale::Mini)).unwrap_or_else(|error| panic!("{error}"));
        let variants = declared.experiments.iter().chain(&mqar.experiments).flat_map(|experiment| &experiment.variants);
        let families: Vec<(String, Family)> = variants.map(|variant| (variant.name.clone(), family(&variant.name))).collect();
        let members = |wanted: &str| {
            let found = families.iter().filter(|(_, family)| family.name == wanted).map(|(name, _)| name.split(',').next().unwrap_or(name));
            found.collect::<BTreeSet<&str>>()
        };
        assert_eq!(members("decay"), BTreeSet::from(["GLA", "Mamba-2", "RetNet"]), "no variant falls through");
        assert_eq!(members("DeltaNet"), BTreeSet::from(["DeltaNet", "Gated DeltaNet"]));
        assert!(members("order n, delta rule").contains("order 2") && members("order n, no delta rule").contains("orders 0..2"));
        let is_taylor = |family: &Family| family.name == "Taylor orders 0..p";
        let colors: BTreeSet<(&str, usize)> = families
            .iter()
            .filter(|(_, family)| !is_taylor(family) && !["Norm", "Gate"].contains(&family.name))
            .map(|(_, family)| (family.name, family.color))
            .collect();
        let distinct: BTreeSet<usize> = colors.iter().map(|(_, color)| *color).collect();
        assert_eq!((colors.len(), distinct.len()), (8, 8), "{colors:?}");
        let ramp: Vec<usize> = ORDERS.iter().map(|&order| family(&series(order)).color).collect();
        assert!(ramp.is_sorted_by(|one, next| one < next) && ramp.iter().all(|color| !distinct.contains(color)), "{ramp:?}");
        // The same order has the same colour at every head dimension, and members of a family have distinct names.
        assert_eq!(family("orders 0..2, d 8").color, family("orders 0..2").color);
        let text = declared.experiments.iter().flat_map(|experiment| &experiment.variants);
        let variants: BTreeSet<&str> = text.map(|variant| variant.name.as_str()).collect();
        let names: BTreeSet<(&str, String)> = variants.iter().map(|name| (family(name).name, family(name).member)).collect();
        assert_eq!(names.len(), variants.len());
    }
}
