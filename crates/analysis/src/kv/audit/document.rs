//! The audit as a page.

use serde_json::Value;
use termwise_report::{Block, Cell, Document, Documented, Figure, HeatMap, Names, Panel, Section, Shade, Table, Tone, Unit};

use super::{Audit, Share};

/// Heads of a model at most.
const MOST_HEADS: usize = 1 << 20;

impl Documented for Audit {
    const KIND: &'static str = "audit";

    fn validate(&self, _: &Value) -> Result<(), String> {
        let heads = self.shares.iter().map(|share| share.head).max().map_or(0, |head| head.saturating_add(1));
        if let Some(share) = self.shares.iter().find(|share| share.layer >= self.layers) {
            return Err(format!("it has a share of layer {}, and {} layers", share.layer, self.layers));
        }
        if self.layers.saturating_mul(heads) > MOST_HEADS {
            return Err(format!("it has {} layers of {heads} heads; results have at most {MOST_HEADS} heads", self.layers));
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
                Some(true) => (Tone::Good, "holds"),
                Some(false) => (Tone::Bad, "fails"),
                None => (Tone::Open, "to know"),
            };
            Block::badge(tone, label, format!("{}: {}", check.name, check.found))
        });
        let mut rules = Table::new("When a check holds", ["check", "rule"]);
        rules.rows.extend(self.checks.iter().map(|check| vec![Cell::text(&check.name), Cell::text(&check.rule)]));
        let rules = Block::Details { summary: "Rules".into(), blocks: vec![Block::table("rules", rules)] };
        let mut sections = vec![Section::new("Checks", checks.chain([rules]).collect())];
        if !self.parts.is_empty() {
            sections.push(Section::new("What each part is worth", vec![self.part_table()]));
        }
        if !self.shares.is_empty() {
            sections.push(Section::new("What each part gives to the heads' outputs", self.share_blocks()));
        }
        if let Some(found) = &self.generation {
            let mut table = Table::new("Greedy continuations", ["", ""]);
            for (name, value) in [
                ("prompts", Cell::count(found.prompts)),
                ("tokens of each", Cell::count(found.prompt)),
                ("tokens written", Cell::count(found.tokens)),
                ("tokens until the two part", Cell::Number(found.agree, 1)),
                ("same token after the original's own text", Cell::text(format!("{:.1} %", 100.0 * found.same))),
                ("the original's loss on its own, nats per token", Cell::Number(found.own, 4)),
                ("its loss on the converted model's", Cell::Number(found.converted, 4)),
            ] {
                table.rows.push(vec![Cell::text(name), value]);
            }
            sections.push(Section::new("What it writes", vec![Block::table("generation", table)]));
        }
        if !self.recall.is_empty() {
            let title = "Facts found by generation; the converted model is asked where the original finds them";
            let columns = ["task", "distance", "reach", "asked", "original", "converted"];
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
        Document { title: format!("{name}: an audit"), lead: vec![Block::Facts(facts)], sections }
    }
}

impl Audit {
    fn part_table(&self) -> Block {
        let columns = ["without", "heads", "loss", "KL to the original", "KL to the model"];
        let mut table = Table::new("With a part switched off, nats per token", columns);
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
            [map("First keys", |share| share.sinks), map("Window", |share| share.window), map("Chosen keys", |share| share.chosen)];
        let description = "Share of the sum of the norms of the parts of each head's output, under one denominator.".into();
        let figure = Figure { title: "Shares of outputs".into(), description, panels: panels.into_iter().flatten().collect() };
        let mut table = Table::new("Shares of each head's output", ["layer", "head", "first keys", "window", "chosen"]);
        for share in &self.shares {
            let cell = |value: Option<f64>| Cell::maybe(value, |value| Cell::Number(value, 3));
            let places = [Cell::count(share.layer), Cell::count(share.head)];
            table.rows.push(places.into_iter().chain([share.sinks, share.window, share.chosen].map(cell)).collect());
        }
        let details = Block::Details { summary: "Every head".into(), blocks: vec![Block::table("shares", table)] };
        vec![Block::figure("shares", figure), details]
    }
}
