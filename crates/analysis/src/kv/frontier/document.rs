//! HTML report of the frontier.

use serde_json::Value;
use termwise_report::{
    Axis, Block, Cell, Chart, Document, Documented, Figure, Layer, Line, Panel, SERIES, Scale, Section, Table, Tone, Unit, thousands,
};

use super::best::Bound;
use super::{Frontier, METHODS, Point};
use crate::kv::meter::BUCKETS;

/// Maximum length of a context; sums over contexts do not overflow.
const MAX_POSITIONS: u64 = 1 << 40;

impl Documented for Frontier {
    const KIND: &'static str = "frontier";

    fn validate(&self, _: &Value) -> Result<(), String> {
        let sums = || self.points.iter().flat_map(|point| &point.contexts);
        if sums().any(|buckets| buckets.len() > BUCKETS.len()) {
            return Err(format!("a context has more than {} buckets of positions", BUCKETS.len()));
        }
        if sums().flatten().any(|sums| sums.count > MAX_POSITIONS) {
            return Err(format!("a bucket has more than {MAX_POSITIONS} positions"));
        }
        Ok(())
    }

    fn document(&self) -> Document {
        let texts: Vec<String> = self
            .texts
            .iter()
            .zip(&self.original)
            .map(|((name, contexts, calibrated), loss)| {
                let seen = if *calibrated { "calibrated on other parts of it" } else { "not used for calibration" };
                format!("{name}: up to {contexts} contexts, {seen}; loss of the original {loss:.4}")
            })
            .collect();
        let facts = vec![
            ("model".to_owned(), self.model.clone()),
            ("contexts".to_owned(), format!("{} tokens; calibrated on {} tokens", self.length, thousands(self.calibration_tokens as u64))),
            (
                "budgets".to_owned(),
                format!("16-bit key/value pairs per KV head ({} KV heads, {} bytes per pair); bytes are those of the buffers", self.kv_heads, self.key_bytes),
            ),
            (
                "rule".to_owned(),
                "better or worse if the 95 % interval of the mean paired difference of losses over contexts excludes zero; at least three contexts".to_owned(),
            ),
        ];
        let mut lead = vec![Block::Facts(facts), Block::List(texts)];
        if !self.finished {
            lead.push(Block::badge(Tone::Open, "unfinished", "the same command resumes"));
        }
        let mut sections = vec![
            Section::new("Verdicts", self.verdict_blocks()),
            Section::new("Best combination against best single method", self.best_blocks()),
        ];
        for (text, ..) in &self.texts {
            sections.push(Section::new(format!("Loss and KL on {text}"), self.text_blocks(text)));
        }
        let name = self.model.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        Document { title: format!("Fixed-size KV memory of {name}: loss against bytes"), lead, sections }
    }
}

impl Frontier {
    fn verdict_blocks(&self) -> Vec<Block> {
        let columns = ["method", "against", "keys", "contexts", "difference of losses", "95 % interval", "verdict"];
        let mut table = Table::new("Difference of losses in nats per token, over contexts of all texts; negative is better", columns);
        for found in &self.comparisons {
            table.rows.push(vec![
                Cell::text(&found.a),
                Cell::text(&found.b),
                Cell::count(found.keys),
                Cell::count(found.contexts),
                Cell::Number(found.difference, 4),
                Cell::maybe(found.interval, |(low, high)| Cell::text(format!("{low:+.4} … {high:+.4}"))),
                Cell::text(found.verdict.word()),
            ]);
        }
        vec![Block::table("verdicts", table)]
    }

    /// The best combination against the best single method, and bytes at equal loss.
    fn best_blocks(&self) -> Vec<Block> {
        let names = |list: &[(String, usize)]| {
            let words: Vec<String> = list.iter().map(|(name, count)| format!("{name} ({count})")).collect();
            words.join(", ")
        };
        let columns = ["keys", "contexts", "best combination", "best single method", "difference of losses", "95 % interval", "verdict"];
        let title = "The best combination against the best single method, each selected for a context by the mean over all other contexts (number of contexts)";
        let mut best = Table::new(title, columns);
        for found in &self.best {
            best.rows.push(vec![
                Cell::count(found.keys),
                Cell::count(found.contexts),
                Cell::text(names(&found.combinations)),
                Cell::text(names(&found.singles)),
                Cell::Number(found.difference, 4),
                Cell::maybe(found.interval, |(low, high)| Cell::text(format!("{low:+.4} … {high:+.4}"))),
                Cell::text(found.verdict.word()),
            ]);
        }
        let title = "Bytes saved at equal loss, interpolated in log bytes; bootstrap intervals over 1,000 draws of contexts, with the best methods selected again in each draw";
        let mut savings = Table::new(title, ["method", "against", "keys", "bytes saved", "95 % interval"]);
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        for found in &self.savings {
            let saved = match found.bound {
                // Its loss is lower than that of the other method at every budget, the largest of which is no larger.
                Some(Bound::AtLeast) if found.share < 0.005 => "not measured: needs larger budgets".to_owned(),
                Some(Bound::AtLeast) => format!("at least {}", percent(found.share)),
                Some(Bound::AtMost) => format!("at most {}", percent(found.share)),
                None => percent(found.share),
            };
            // Draws are clipped to the measured budgets, so a bound has no interval.
            let interval = found.interval.filter(|_| found.bound.is_none());
            savings.rows.push(vec![
                Cell::text(&found.a),
                Cell::text(&found.b),
                Cell::count(found.keys),
                Cell::text(saved),
                Cell::maybe(interval, |(low, high)| Cell::text(format!("{} … {}", percent(low), percent(high)))),
            ]);
        }
        let mut kinds = Table::new("Memory of uniform methods", ["method", "keys", "per KV head"]);
        kinds.rows.extend(self.kinds.iter().map(|(method, keys, kind)| vec![Cell::text(method), Cell::count(*keys), Cell::text(kind)]));
        let mut blocks = vec![Block::table("best", best), Block::table("savings", savings)];
        if !self.too_small.is_empty() {
            let words: Vec<String> = self.too_small.iter().map(|(method, keys)| format!("{method} at {keys} keys")).collect();
            blocks.push(Block::List(vec![format!("does not fit: {}", words.join(", "))]));
        }
        blocks.push(Block::Details { summary: "Memory of uniform methods".into(), blocks: vec![Block::table("kinds", kinds)] });
        blocks
    }

    fn text_blocks(&self, text: &str) -> Vec<Block> {
        let points: Vec<&Point> = self.points.iter().filter(|point| point.text == text && !point.contexts.is_empty()).collect();
        let mut keys: Vec<u64> = points.iter().map(|point| point.keys).collect();
        keys.sort_unstable();
        keys.dedup();
        // Methods of this build in their order, then those of earlier builds.
        let known = METHODS.iter().map(|method| method.name).filter(|name| points.iter().any(|point| point.method == *name));
        let mut methods: Vec<&str> = known.collect();
        for point in &points {
            if !methods.contains(&point.method.as_str()) {
                methods.push(&point.method);
            }
        }
        let names = ["method".to_owned()].into_iter().chain(keys.iter().map(|keys| format!("{keys} keys")));
        let mut losses = Table::new("Loss increase in nats per token ± standard error over contexts", names.clone());
        let mut kls = Table::new("KL to the original in nats per token ± standard error over contexts", names);
        let cell = |(mean, error): (f64, Option<f64>)| match error {
            Some(error) => Cell::text(format!("{mean:.4} ± {error:.4}")),
            None => Cell::Number(mean, 4),
        };
        for method in &methods {
            let own = |keys: u64| points.iter().find(|point| point.method == *method && point.keys == keys);
            let row = |value: fn(&Point) -> (f64, Option<f64>)| {
                let cells = keys.iter().map(|&keys| own(keys).map_or(Cell::Empty, |point| cell(value(point))));
                [Cell::text(*method)].into_iter().chain(cells).collect::<Vec<Cell>>()
            };
            losses.rows.push(row(Point::rise));
            kls.rows.push(row(Point::kl));
        }
        let reached = points.iter().map(|point| point.buckets().len()).max().unwrap_or(0);
        let columns = ["method".to_owned(), "keys".into(), "bytes".into()].into_iter();
        let columns = columns.chain(BUCKETS[..reached].iter().map(|first| format!("from {first}")));
        let mut buckets = Table::new("Loss increase by position", columns);
        for point in &points {
            let first = [Cell::text(&point.method), Cell::count(point.keys), Cell::bytes(point.bytes)];
            buckets.rows.push(first.into_iter().chain(point.buckets().iter().map(|sums| Cell::Number(sums.rise(), 4))).collect());
        }
        // Colors are assigned in order of the drawn lines, separately for dashed and solid lines if there are more lines than colors.
        let many = methods.len() >= SERIES;
        let mut drawn = [0; 2];
        let line = |method: &&str| {
            let own = points.iter().filter(|point| point.method == *method);
            let mut points: Vec<(f64, f64)> = own.map(|point| (point.bytes as f64, point.rise().0)).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let per_head = method.ends_with(" head");
            let color = &mut drawn[usize::from(many && per_head)];
            *color += 1;
            Layer::Line(Line { name: (*method).into(), color: *color, dashed: !per_head, points })
        };
        let chart = Chart {
            title: "Loss increase against bytes".into(),
            x: Axis::new("bytes per sequence", Scale::Log, Unit::Bytes),
            y: Axis::new("nats per token", Scale::Linear, Unit::Number),
            layers: methods.iter().map(line).collect(),
        };
        let panels: Vec<Panel> = vec![chart.into()];
        let description = "Loss increase against the bytes of the memory, one line per method.".into();
        let figure = Figure { title: format!("Loss with fixed-size KV memory on {text}"), description, panels };
        let anchor: String = text.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }).collect();
        let details = Block::Details { summary: "By position".into(), blocks: vec![Block::table(format!("positions-{anchor}"), buckets)] };
        vec![
            Block::figure(format!("loss-{anchor}"), figure),
            Block::table(format!("loss-{anchor}"), losses),
            Block::table(format!("kl-{anchor}"), kls),
            details,
        ]
    }
}
