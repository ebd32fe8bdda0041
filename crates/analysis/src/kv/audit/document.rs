//! HTML report of the audit.

use serde_json::Value;
use termwise_report::{Block, Cell, Document, Documented, Figure, HeatMap, Names, Panel, Section, Shade, Table, Tone, Unit};

use super::{Audit, Share};

/// Maximum number of heads.
const MAX_HEADS: usize = 1 << 20;

impl Documented for Audit {
    const KIND: &'static str = "audit";

    fn validate(&self, _: &Value) -> Result<(), String> {
        let heads = self.shares.iter().map(|share| share.head).max().map_or(0, |head| head.saturating_add(1));
        if let Some(share) = self.shares.iter().find(|share| share.layer >= self.layers) {
            return Err(format!("it has a share of layer {}, and {} layers", share.layer, self.layers));
        }
        if self.layers.saturating_mul(heads) > MAX_HEADS {
            return Err(format!("it has {} layers of {heads} heads; results have at most {MAX_HEADS} heads", self.layers));
        }
        Ok(())
    }

    fn document(&self) -> Document {
        let facts = vec![
            ("model".to_owned(), self.model.clone()),
            ("against".to_owned(), self.against.clone()),
            ("text".to_owned(), format!("{} contexts of {} tokens", self.contexts, self.length)),
            ("loss".to_owned(), format!("{:.4}, original {:.4}; KL to the original {:.5}", self.loss, self.original, self.kl)),
        ];
        let checks = self.checks.iter().map(|check| {
            let (tone, label) = match check.passed {
                Some(true) => (Tone::Good, "passed"),
                Some(false) => (Tone::Bad, "failed"),
                None => (Tone::Open, "not decided"),
            };
            Block::badge(tone, label, format!("{}: {}", check.name, check.found))
        });
        let mut rules = Table::new("Rules of the checks", ["check", "rule"]);
        rules.rows.extend(self.checks.iter().map(|check| vec![Cell::text(&check.name), Cell::text(&check.rule)]));
        let rules = Block::Details { summary: "Rules".into(), blocks: vec![Block::table("rules", rules)] };
        let mut sections = vec![Section::new("Checks", checks.chain([rules]).collect())];
        if !self.parts.is_empty() {
            sections.push(Section::new("Effect of each part", vec![self.part_table()]));
        }
        if !self.shares.is_empty() {
            sections.push(Section::new("Contribution of each part to the outputs", self.share_blocks()));
        }
        if let Some(found) = &self.generation {
            let mut table = Table::new("Greedy continuations", ["", ""]);
            for (name, value) in [
                ("prompts", Cell::count(found.prompts)),
                ("tokens per prompt", Cell::count(found.prompt)),
                ("generated tokens", Cell::count(found.tokens)),
                ("tokens before the first difference", Cell::Number(found.agree, 1)),
                ("same token after the text of the original", Cell::text(format!("{:.1} %", 100.0 * found.same))),
                ("loss of the original on its own text, nats per token", Cell::Number(found.own, 4)),
                ("loss of the original on the text of the converted model", Cell::Number(found.converted, 4)),
            ] {
                table.rows.push(vec![Cell::text(name), value]);
            }
            sections.push(Section::new("Generated text", vec![Block::table("generation", table)]));
        }
        if !self.recall.is_empty() {
            let title = "Facts recalled in generated answers; the converted model is tested on facts that the original recalls";
            let columns = ["task", "distance", "reach", "questions", "original", "converted"];
            let mut table = Table::new(title, columns);
            for found in &self.recall {
                table.rows.push(vec![
                    Cell::text(&found.task),
                    Cell::count(found.distance),
                    Cell::count(found.reach),
                    Cell::count(found.asked),
                    Cell::count(found.original),
                    if found.original > 0 { Cell::count(found.converted) } else { Cell::Empty },
                ]);
            }
            sections.push(Section::new("Recall", vec![Block::table("recall", table)]));
        }
        let name = self.model.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        Document { title: format!("Audit of {name}"), lead: vec![Block::Facts(facts)], sections }
    }
}

impl Audit {
    fn part_table(&self) -> Block {
        let columns = ["without", "heads", "loss", "KL to the original", "KL to the model"];
        let mut table = Table::new("Without one part, nats per token", columns);
        for part in &self.parts {
            table.rows.push(vec![
                Cell::text(&part.name),
                Cell::count(part.heads),
                Cell::Number(part.loss, 4),
                Cell::Number(part.kl, 5),
                Cell::Number(part.change, 5),
            ]);
        }
        Block::table("parts", table)
    }

    fn share_blocks(&self) -> Vec<Block> {
        let per_layer = self.shares.iter().map(|share| share.head + 1).max().unwrap_or(0);
        let map = |title: &str, of: fn(&Share) -> Option<f64>| -> Option<Panel> {
            self.shares.iter().any(|share| of(share).is_some()).then(|| {
                let mut values = vec![vec![None; per_layer]; self.layers];
                self.shares.iter().for_each(|share| values[share.layer][share.head] = of(share));
                HeatMap {
                    title: title.into(),
                    x: Names::count("head", per_layer),
                    y: Names::count("layer", self.layers),
                    values,
                    shade: Shade::Linear,
                    range: Some((0.0, 1.0)),
                    unit: Unit::Number,
                }
                .into()
            })
        };
        let panels =
            [map("Sinks", |share| share.sinks), map("Window", |share| share.window), map("Heavy hitters", |share| share.heavy_hitters)];
        let description = "Share of the sum of the norms of the parts of each head's output, under one denominator.".into();
        let figure = Figure { title: "Shares of outputs".into(), description, panels: panels.into_iter().flatten().collect() };
        let mut table = Table::new("Shares of each head's output", ["layer", "head", "sinks", "window", "heavy hitters"]);
        for share in &self.shares {
            let cell = |value: Option<f64>| Cell::maybe(value, |value| Cell::Number(value, 3));
            let places = [Cell::count(share.layer), Cell::count(share.head)];
            table.rows.push(places.into_iter().chain([share.sinks, share.window, share.heavy_hitters].map(cell)).collect());
        }
        let details = Block::Details { summary: "Every head".into(), blocks: vec![Block::table("shares", table)] };
        vec![Block::figure("shares", figure), details]
    }
}
