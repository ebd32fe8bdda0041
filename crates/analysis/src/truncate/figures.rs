//! The report of a truncation, with figures and tables.

use termwise_report::{
    Axis, Block, Cell, Chart, Document, Documented, Figure, HeatMap, Layer, Line, Names, Rule, Scale, Section, Shade, Table, Tone, Unit,
    counted, thousands,
};

use crate::request::short_name;

use super::Choice;
use super::report::{Map, Measured, Plan, Point, Report};

impl Documented for Report {
    const KIND: &'static str = "cut";

    fn document(&self) -> Document {
        let name = short_name(&self.model);
        let Report { layers, heads, kv_heads, cuttable, length, .. } = self;
        let mut facts = vec![(
            "model",
            format!(
                "{}: {}, {} over {}; {} can be truncated",
                self.model,
                counted(*layers, "layer"),
                counted(*heads, "head"),
                counted(*kv_heads, "KV head"),
                counted(*cuttable, "head")
            ),
        )];
        if let Some(tokens) = self.tokens {
            let [a, b, c] = [tokens.calibration, tokens.tuning, tokens.evaluation].map(thousands);
            let layout = if self.layout.is_empty() { String::new() } else { format!("{} ", self.layout) };
            facts.push((
                "text",
                format!("{layout}windows of {length}; calibrated on {a} tokens, the plan tuned on {b}, losses on {c} others"),
            ));
        }
        if let Some(uncut) = &self.uncut {
            let bits = uncut.bits_per_byte.map_or(String::new(), |bits| format!(", {bits:.4} bits per byte"));
            let loss = uncut.loss.map_or("not finite".into(), |loss| format!("{loss:.4}"));
            facts.push(("original", format!("loss {loss}{bits}")));
        }
        facts.push((
            "memory",
            format!("state and KV cache of the original model: {} at a context of {}", bytes(self.cache_bytes), thousands(self.context)),
        ));
        // The verdict first.
        let mut lead = self.verdict();
        lead.push(Block::Facts(facts.into_iter().map(|(name, text)| (name.into(), text)).collect()));
        if !self.finished {
            lead.push(Block::badge(
                Tone::Open,
                "interrupted",
                "this report contains the finished measurements; rerun the command with --out to resume",
            ));
        }
        let mut sections = Vec::new();
        if !self.warnings.is_empty() {
            sections.push(Section::new("Warnings", vec![Block::List(self.warnings.clone())]));
        }
        sections.push(Section::new("All layers truncated", self.curve_blocks()));
        if let Some(map) = &self.map {
            let table = Block::table("one-layer", self.map_table(map));
            let details = Block::Details { summary: "Losses with one layer truncated".into(), blocks: vec![table] };
            let figure = self.map_figure().map(|figure| Block::figure("one-layer", figure));
            sections.push(Section::new("One layer truncated", figure.into_iter().chain([details]).collect()));
        }
        if let Some(plan) = &self.plan {
            sections.push(Section::new("Plan", self.plan_blocks(plan)));
        }
        Document { title: format!("{name}: exp truncated to a finite order"), lead, sections }
    }

    /// The losses per order and the verdict on the plan.
    fn summary(&self) -> Document {
        let mut document = self.document();
        let mut lead: Vec<Block> = self.warnings.iter().map(|warning| Block::badge(Tone::Open, "warning", warning)).collect();
        let verdict = self.verdict();
        let facts = document.lead.split_off(verdict.len());
        lead.extend(verdict);
        lead.extend(self.curve_blocks().into_iter().find(|block| matches!(block, Block::Table { .. })));
        lead.extend(facts);
        Document { lead, sections: Vec::new(), ..document }
    }
}

const TAYLOR_RISES: &str = "The loss of the Taylor polynomial increases with the order: softmax ignores keys with large negative scores, and an even \
                            polynomial gives them the weight x^p/p!.";

impl Report {
    /// The verdict on the plan, if there is a plan.
    fn verdict(&self) -> Vec<Block> {
        self.plan.iter().flat_map(|plan| self.plan_blocks(plan)).filter(|block| matches!(block, Block::Badge { .. })).collect()
    }

    /// Loss against order and against bytes, for each kind of coefficients, with the uncut model to compare.
    pub fn curve_figures(&self) -> [Figure; 2] {
        let order = |point: &Point| Some(point.order as f64);
        let bytes = |point: &Point| point.state_bytes.map(|bytes| bytes as f64);
        let figure =
            |title: &str, chart: Chart| Figure { title: title.into(), description: self.description(), panels: vec![chart.into()] };
        [
            figure("All layers truncated: loss against order", self.chart(Axis::new("order", Scale::Linear, Unit::Number), &order)),
            figure(
                "All layers truncated: loss against memory",
                self.chart(Axis::new("state and KV cache", Scale::Log, Unit::Bytes), &bytes),
            ),
        ]
    }

    /// Lines with a marker at each measured order.
    fn chart(&self, x: Axis, at: &dyn Fn(&Point) -> Option<f64>) -> Chart {
        let place = |point: &Point| Some((at(point)?, point.measured.loss.unwrap_or(f64::NAN)));
        let uncut = self.uncut_loss().map(|y| Layer::Rule(Rule { y, label: "not truncated".into(), color: 0 }));
        let curves = self.curves.iter().flat_map(|curve| {
            let (name, color) = (curve.coefficients.to_string(), curve.coefficients as usize + 1);
            let points: Vec<(f64, f64)> = curve.points.iter().filter_map(place).collect();
            let marks = points.iter().map(|&(x, y)| termwise_report::Point::new(x, y)).collect();
            [
                Layer::Line(Line { name: name.clone(), color, dashed: false, points }),
                Layer::Points(termwise_report::Points { name, color, points: marks }),
            ]
        });
        let layers = uncut.into_iter().chain(curves).collect();
        Chart { title: "Loss".into(), x, y: Axis::new("nats per token", Scale::Linear, Unit::Number), layers }
    }

    /// The loss increase with one layer truncated, per layer and order.
    pub fn map_figure(&self) -> Option<Figure> {
        let (map, uncut) = (self.map.as_ref()?, self.uncut_loss()?);
        let rise = |found: Option<&Measured>| Some(found?.loss? - uncut);
        let row = |row: &Vec<Measured>| (0..map.orders.len()).map(|i| rise(row.get(i))).collect();
        let heat = HeatMap {
            title: format!("Loss increase, nats per token, {}", map.coefficients),
            x: Names::new("order", map.orders.iter().map(usize::to_string)),
            y: Names::count("layer", map.layers.len()),
            values: map.layers.iter().map(row).collect(),
            shade: Shade::Linear,
            range: None,
            unit: Unit::Number,
        };
        let description = format!("Loss increase with one layer truncated, {} layers by {} orders.", map.layers.len(), map.orders.len());
        Some(Figure { title: "One layer truncated".into(), description, panels: vec![heat.into()] })
    }

    /// Whether the loss of the Taylor polynomial increases from one order to the next.
    fn taylor_rises(&self) -> bool {
        let taylor = self.curves.iter().filter(|curve| curve.coefficients == Choice::Taylor);
        taylor.flat_map(|curve| curve.points.windows(2)).any(|pair| match [&pair[0], &pair[1]].map(|point| point.measured.loss) {
            [Some(lower), Some(higher)] => higher > lower,
            _ => false,
        })
    }

    fn curve_blocks(&self) -> Vec<Block> {
        let all = || self.curves.iter().flat_map(|curve| &curve.points).map(|point| &point.measured);
        let bits = all().any(|found| found.bits_per_byte.is_some());
        let kinds = self.curves.iter().map(|curve| curve.coefficients.to_string());
        let names = kinds.clone().chain(kinds.filter(|_| bits).map(|kind| format!("{kind} bits per byte")));
        let mut table = Table::new("Loss in nats per token", ["order".to_owned(), "state".into()].into_iter().chain(names));
        for (i, point) in self.curves.first().map_or(&[][..], |curve| &curve.points).iter().enumerate() {
            let of = |cell: fn(&Measured) -> Cell| {
                self.curves.iter().map(move |curve| curve.points.get(i).map_or(Cell::Empty, |point| cell(&point.measured)))
            };
            let also = of(|found| Cell::maybe(found.bits_per_byte, |bits| Cell::Number(bits, 4))).filter(|_| bits);
            let first = [Cell::count(point.order), Cell::maybe(point.state_bytes, Cell::bytes)];
            table.rows.push(first.into_iter().chain(of(loss)).chain(also).collect());
        }
        let columns = ["order", "fitted", "Taylor's", "error", "Taylor's error", "rounding in a state"];
        let mut kept =
            Table::new("Calibrated heads: selected coefficients, and the median error of their output on validation text", columns);
        for row in &self.kept {
            let counts = [row.order, row.fitted, row.taylor].map(Cell::count);
            let errors = [row.kept_error, row.taylor_error].map(|error| Cell::Number(error, 3));
            kept.rows.push(counts.into_iter().chain(errors).chain([Cell::text(format!("× {}", factor(row.state_condition)))]).collect());
        }
        let [by_order, by_memory] = self.curve_figures();
        let mut blocks = vec![
            Block::figure("loss-by-order", by_order),
            Block::figure("loss-by-memory", by_memory),
            Block::table("loss-by-order", table),
        ];
        // Finite losses of runs with a problem.
        let doubtful = all().filter(|found| found.loss.is_some()).find_map(|found| found.problem.as_ref());
        blocks.extend(doubtful.map(|problem| Block::Text(format!("Warning: {problem}"))));
        blocks.extend(self.taylor_rises().then(|| Block::Text(TAYLOR_RISES.into())));
        if !self.kept.is_empty() {
            blocks.push(Block::table("kept", kept));
        }
        blocks
    }

    fn map_table(&self, map: &Map) -> Table {
        let orders = map.orders.iter().map(|order| format!("order {order}"));
        let mut table = Table::new("Loss in nats per token with one layer truncated", ["layer".to_owned()].into_iter().chain(orders));
        for (layer, row) in map.layers.iter().enumerate() {
            table.rows.push([Cell::Number(layer as f64, 0)].into_iter().chain(row.iter().map(loss)).collect());
        }
        table
    }

    fn plan_blocks(&self, plan: &Plan) -> Vec<Block> {
        let percent = 100.0 * (plan.budget - 1.0);
        let percent = format!("{percent:.3}");
        let percent = percent.trim_end_matches('0').trim_end_matches('.');
        let mut text = format!("Loss at most {percent} % above the original model, at a context of {}.", thousands(self.context));
        if plan.too_large > 0 {
            let all = plan.units * self.kept.len();
            text += &format!(
                " {} of {all} truncations (KV head and order) need a state that is not smaller than the cache at this context and are not proposed.",
                plan.too_large
            );
        }
        if plan.cuts.is_empty() {
            return vec![Block::Text(text), Block::badge(Tone::Open, "no truncations", "no KV head can be truncated within this budget")];
        }
        let mut table = Table::new("KV heads to truncate", ["layer", "KV head", "order", "rise alone", "saves"]);
        for cut in &plan.cuts {
            let place = [cut.layer, cut.kv_head, cut.order].map(Cell::count);
            table.rows.push(place.into_iter().chain([Cell::Number(cut.increase, 4), Cell::bytes(cut.saved)]).collect());
        }
        let (tone, kept) =
            if plan.within_budget == Some(true) { (Tone::Good, "within budget") } else { (Tone::Open, "not shown to be within budget") };
        vec![Block::Text(text), Block::table("plan", table), Block::badge(tone, kept, plan.summary(self.uncut_loss()))]
    }

    fn description(&self) -> String {
        let mut text = format!("Loss of {} with exp truncated to a finite order in every layer. ", self.model);
        for curve in &self.curves {
            let loss = |point: &Point| point.measured.loss.map_or("not finite".into(), |loss| format!("{loss:.4}"));
            let points = curve.points.iter().map(|point| format!("order {}: {}", point.order, loss(point)));
            text += &format!("{}: {}. ", curve.coefficients, points.collect::<Vec<_>>().join(", "));
        }
        text
    }
}

impl Plan {
    /// One sentence: the number of KV heads, the loss on both texts, the bytes saved.
    pub fn summary(&self, uncut: Option<f64>) -> String {
        let rise = |loss: f64, uncut: f64| format!("{loss:.4} ({:+.2} %)", 100.0 * (loss / uncut - 1.0));
        let (cuts, units) = (self.cuts.len(), self.units);
        let mut text = format!("{cuts} of {units} KV heads; loss on tuning text {}", rise(self.tuning_loss, self.tuning_uncut));
        if let (Some(found), Some(uncut)) = (self.measured.as_ref().and_then(|found| found.loss), uncut) {
            let kept = if self.within_budget == Some(true) { "" } else { ", beyond the budget there" };
            text += &format!(", on other text {}{kept}", rise(found, uncut));
        }
        let share = 100.0 * self.bytes_after as f64 / self.bytes_before.max(1) as f64;
        text + &format!("; state and KV cache take {} instead of {} ({share:.0} %).", bytes(self.bytes_after), bytes(self.bytes_before))
    }
}

fn loss(found: &Measured) -> Cell {
    found.loss.map_or(Cell::text("not finite"), |loss| Cell::Number(loss, 4))
}

/// 6, 120, 3e4
fn factor(x: f64) -> String {
    if x < 1e4 { format!("{x:.0}") } else { format!("{x:.0e}") }
}

fn bytes(n: u64) -> String {
    Unit::Bytes.format(n as f64)
}

#[cfg(test)]
mod tests {
    use super::super::{Curve, Kept, PlannedCut};
    use super::*;

    #[test]
    fn reports_survive_a_json_round_trip() {
        let measured = |loss| Measured { loss, bits_per_byte: Some(1.5), problem: Some("a denominator of 0".into()) };
        let point = |order, loss| Point { order, state_bytes: Some(1000), measured: measured(loss) };
        let report = Report {
            model: "runs/x".into(),
            layers: 1,
            uncut: Some(measured(Some(2.0))),
            curves: vec![Curve { coefficients: Choice::Taylor, points: vec![point(2, None), point(4, Some(2.25))] }],
            kept: vec![Kept { order: 2, fitted: 1, taylor: 3, taylor_error: f64::NAN, kept_error: 0.5, state_condition: 3e4 }],
            map: Some(Map { coefficients: Choice::Taylor, orders: vec![2, 4], layers: vec![vec![measured(None), measured(Some(2.5))]] }),
            plan: Some(Plan {
                budget: 1.01,
                tuning_uncut: 2.0,
                tuning_loss: 2.01,
                cuts: vec![PlannedCut { layer: 0, kv_head: 1, order: 2, increase: 0.01, saved: 5 }],
                units: 2,
                too_large: 1,
                bytes_before: 100,
                bytes_after: 50,
                measured: Some(measured(Some(2.02))),
                within_budget: Some(true),
            }),
            ..Report::default()
        };
        let text = report.document().to_terminal(&termwise_report::Terminal::default());
        for words in
            ["× 3e4", "at most 1 % above", "not finite", "2.2500", "Warning: a denominator of 0", "✓ within budget", "○ interrupted"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
        termwise_report::reads_again(&report);
    }

    #[test]
    fn a_loss_that_increases_with_the_order_is_explained() {
        let report = |losses: [Option<f64>; 3]| {
            let measured = |loss| Measured { loss, bits_per_byte: None, problem: None };
            let points = losses.into_iter().zip([2, 4, 8]);
            let points = points.map(|(loss, order)| Point { order, state_bytes: None, measured: measured(loss) }).collect();
            let report = Report { curves: vec![Curve { coefficients: Choice::Taylor, points }], ..Report::default() };
            report.document().to_markdown().contains("increases with the order")
        };
        assert!(report([Some(3.0), Some(2.5), Some(2.75)]));
        assert!(!report([Some(3.0), Some(2.5), Some(2.25)]) && !report([None, Some(2.5), None]));
    }

    #[test]
    fn a_truncation_that_lowers_the_loss_causes_a_warning() {
        let measured = |loss| Measured { loss: Some(loss), bits_per_byte: None, problem: None };
        let report = |loss, layout: &str, data: &str| Report {
            layout: layout.into(),
            data: vec![data.into()],
            uncut: Some(measured(2.0)),
            map: Some(Map { coefficients: Choice::Taylor, orders: vec![2, 4], layers: vec![vec![measured(2.1), measured(loss)]] }),
            ..Report::default()
        };
        let packed = report(1.9, "packed", "book.txt").gain().expect("a warning");
        assert!(packed.contains("5.00 % (layer 0 at order 4)") && packed.contains("--layout padded"), "{packed}");
        for other in [report(1.9, "padded", "book.txt"), report(1.9, "packed", "builtin")] {
            assert!(other.gain().is_some_and(|text| text.contains("other text")));
        }
        assert_eq!(report(1.9999, "packed", "book.txt").gain(), None);
    }
}
