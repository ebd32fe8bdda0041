//! What cutting costs and saves, as a page with figures and tables.

use termwise_report::{
    Axis, Block, Cell, Chart, Document, Figure, HeatMap, Layer, Line, Names, Panel, Rule, Scale, Section, Shade, Table, Unit,
};

use super::report::{Map, Measured, Plan, Point, Report};

impl Report {
    /// Everything on one page.
    pub fn page(&self) -> Document {
        let name = self.model.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        let tokens = self.tokens.map_or(String::new(), |tokens| {
            format!(
                "Calibrated on {} tokens, the plan tuned on {}, losses measured on {} others. ",
                tokens.calibration, tokens.tuning, tokens.evaluation
            )
        });
        let uncut = self.uncut_loss().map_or(String::new(), |loss| format!("Uncut loss {loss:.4}. "));
        let cache = Unit::Bytes.format(self.cache_bytes as f64);
        let lead = format!("{uncut}{tokens}At a context of {} the uncut model keeps {cache} between tokens.", self.context);
        let mut sections = vec![Section { heading: "All layers cut".into(), blocks: self.curve_blocks() }];
        if let Some(map) = &self.map {
            let mut blocks = vec![Block::Table { name: "one-layer".into(), table: self.map_table(map) }];
            if let Some(figure) = self.map_figure() {
                blocks.insert(0, Block::Figure { name: "one-layer".into(), figure, caption: String::new() });
            }
            sections.push(Section { heading: "One layer cut".into(), blocks });
        }
        if let Some(plan) = &self.plan {
            sections.push(Section { heading: "Plan".into(), blocks: self.plan_blocks(plan) });
        }
        if !self.warnings.is_empty() {
            sections.push(Section { heading: "To know".into(), blocks: vec![Block::List(self.warnings.clone())] });
        }
        Document { title: format!("{name}: exp cut to a finite order"), lead: vec![Block::Text(lead)], sections }
    }

    /// Loss against order and against bytes, for each kind of coefficients, with the uncut model to compare.
    pub fn curve_figure(&self) -> Figure {
        let order = |point: &Point| Some(point.order as f64);
        let bytes = |point: &Point| point.state_bytes.map(|bytes| bytes as f64);
        let panels: Vec<Panel> = vec![
            self.chart("Loss against order", Axis::new("order", Scale::Linear, Unit::Number), &order).into(),
            self.chart("Loss against what is kept between tokens", Axis::new("", Scale::Log, Unit::Bytes), &bytes).into(),
        ];
        Figure { title: "Every layer cut".into(), description: self.description(), panels }
    }

    fn chart(&self, title: &str, x: Axis, at: &dyn Fn(&Point) -> Option<f64>) -> Chart {
        let place = |point: &Point| Some((at(point)?, point.measured.loss.unwrap_or(f64::NAN)));
        let line = |curve: &super::Curve| Line {
            name: curve.coefficients.to_string(),
            color: curve.coefficients as usize + 1,
            dashed: false,
            points: curve.points.iter().filter_map(place).collect(),
        };
        let uncut = self.uncut_loss().map(|y| Layer::Rule(Rule { y, label: "uncut".into(), color: 0 }));
        let layers = uncut.into_iter().chain(self.curves.iter().map(line).map(Layer::Line)).collect();
        Chart { title: title.into(), x, y: Axis::new("nats a token", Scale::Linear, Unit::Number), layers }
    }

    /// The rise of the loss with one layer cut, by layer and order.
    pub fn map_figure(&self) -> Option<Figure> {
        let (map, uncut) = (self.map.as_ref()?, self.uncut_loss()?);
        let rise = |found: Option<&Measured>| Some(found?.loss? - uncut);
        let row = |row: &Vec<Measured>| (0..map.orders.len()).map(|i| rise(row.get(i))).collect();
        let heat = HeatMap {
            title: format!("Rise of the loss, nats a token, {}", map.coefficients),
            x: Names::new("order", map.orders.iter().map(usize::to_string)),
            y: Names::count("layer", map.layers.len()),
            values: map.layers.iter().map(row).collect(),
            shade: Shade::Linear,
            range: None,
            unit: Unit::Number,
        };
        let description = format!("Rise of the loss with one layer cut, {} layers by {} orders.", map.layers.len(), map.orders.len());
        Some(Figure { title: "One layer cut".into(), description, panels: vec![heat.into()] })
    }

    fn curve_blocks(&self) -> Vec<Block> {
        let mut table = Table::new(
            "Loss in nats a token",
            ["order".to_owned(), "state".into()].into_iter().chain(self.curves.iter().map(|curve| curve.coefficients.to_string())),
        );
        for (i, point) in self.curves.first().map_or(&[][..], |curve| &curve.points).iter().enumerate() {
            let state = point.state_bytes.map_or(Cell::Empty, |bytes| Cell::Amount(bytes as f64, Unit::Bytes));
            let losses = self.curves.iter().map(|curve| curve.points.get(i).map_or(Cell::Empty, |point| loss(&point.measured)));
            table.rows.push([Cell::Number(point.order as f64, 0), state].into_iter().chain(losses).collect());
        }
        let columns = ["order", "fitted", "centred", "Taylor's", "error", "centred's", "Taylor's error", "rounding in a state"];
        let mut kept =
            Table::new("Calibrated heads: which coefficients they kept, and the median error of their output on text held back", columns);
        for row in &self.kept {
            let counts = [row.order, row.fitted, row.centred, row.taylor].map(|n| Cell::Number(n as f64, 0));
            let errors = [row.kept_error, row.centred_error, row.taylor_error].map(|error| Cell::Number(error, 3));
            kept.rows.push(counts.into_iter().chain(errors).chain([Cell::text(format!("× {:.0e}", row.state_condition))]).collect());
        }
        vec![
            Block::Figure { name: "loss-by-order".into(), figure: self.curve_figure(), caption: String::new() },
            Block::Table { name: "loss-by-order".into(), table },
            Block::Table { name: "kept".into(), table: kept },
        ]
    }

    fn map_table(&self, map: &Map) -> Table {
        let orders = map.orders.iter().map(|order| format!("order {order}"));
        let mut table = Table::new("Loss in nats a token with one layer cut", ["layer".to_owned()].into_iter().chain(orders));
        for (layer, row) in map.layers.iter().enumerate() {
            table.rows.push([Cell::Number(layer as f64, 0)].into_iter().chain(row.iter().map(loss)).collect());
        }
        table
    }

    fn plan_blocks(&self, plan: &Plan) -> Vec<Block> {
        let mut table = Table::new("Kv heads to cut", ["layer", "kv head", "order", "rise alone", "saves"]);
        for cut in &plan.cuts {
            let place = [cut.layer, cut.kv_head, cut.order].map(|n| Cell::Number(n as f64, 0));
            table
                .rows
                .push(place.into_iter().chain([Cell::Number(cut.increase, 4), Cell::Amount(cut.saved as f64, Unit::Bytes)]).collect());
        }
        vec![Block::Text(plan.summary(self.uncut_loss())), Block::Table { name: "plan".into(), table }]
    }

    fn description(&self) -> String {
        let mut text = format!("Loss of {} with exp cut to a finite order in every layer. ", self.model);
        for curve in &self.curves {
            let loss = |point: &Point| point.measured.loss.map_or("not finite".into(), |loss| format!("{loss:.4}"));
            let points = curve.points.iter().map(|point| format!("order {}: {}", point.order, loss(point)));
            text += &format!("{}: {}. ", curve.coefficients, points.collect::<Vec<_>>().join(", "));
        }
        text
    }
}

impl Plan {
    /// In a sentence: how many kv heads, what it costs on either text, what it saves.
    pub fn summary(&self, uncut: Option<f64>) -> String {
        let rise = |loss: f64, uncut: f64| format!("{loss:.4} ({:+.2} %)", 100.0 * (loss / uncut - 1.0));
        let (cuts, units) = (self.cuts.len(), self.units);
        let mut text = format!("{cuts} of {units} kv heads; loss on tuning text {}", rise(self.tuning_loss, self.tuning_uncut));
        if let (Some(found), Some(uncut)) = (self.measured.as_ref().and_then(|found| found.loss), uncut) {
            let kept = if self.within_budget == Some(true) { "" } else { ", beyond the budget there" };
            text += &format!(", on other text {}{kept}", rise(found, uncut));
        }
        let share = 100.0 * self.bytes_after as f64 / self.bytes_before.max(1) as f64;
        let bytes = |n: u64| Unit::Bytes.format(n as f64);
        text + &format!("; {} between tokens instead of {} ({share:.0} %).", bytes(self.bytes_after), bytes(self.bytes_before))
    }
}

fn loss(found: &Measured) -> Cell {
    found.loss.map_or(Cell::text("not finite"), |loss| Cell::Number(loss, 4))
}
