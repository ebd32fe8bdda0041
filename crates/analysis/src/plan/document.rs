//! The document of a plan.

use serde_json::Value;
use termwise_report::{Block, Cell, Document, Documented, Section, Table, Unit, counted, duration, thousands};

use super::{BreakEven, Column, Cost, Fits, Plan, Shared, TrainingTime};

/// A table row: its name, and its cell per column.
type Row<'a> = (&'a str, &'a dyn Fn(&Column) -> Cell);
/// A mode: its file name, its title, and its cost.
type Mode = (&'static str, &'static str, fn(&Column) -> Option<Cost>);

/// Maximum size for which sums and products do not overflow.
const MAX_SIZE: u64 = 1 << 50;

impl Documented for Plan {
    const KIND: &'static str = "plan";

    fn validate(&self, _: &Value) -> Result<(), String> {
        if self.hardware.is_empty() || self.columns.is_empty() {
            return Err("it has no hardware or no columns".into());
        }
        if self.chunk == 0 {
            return Err("its chunk is 0".into());
        }
        let counted = self.columns.iter().flat_map(|column| {
            let (counts, even) = (&column.counts, &column.break_even);
            let rows = [counts.state, counts.ring, counts.cache, counts.cache_columns, counts.tile];
            rows.into_iter().chain([even.memory, even.decode, even.chunk, even.auto].into_iter().flatten())
        });
        if let Some(number) = counted.chain([self.context, self.batch, self.chunk]).find(|number| *number > MAX_SIZE) {
            return Err(format!("it has the size {number}, and the maximum is {MAX_SIZE}"));
        }
        let within = |(part, whole): (u64, u64)| part <= whole;
        let counts = self.columns.iter().map(|column| &column.counts);
        if !counts.flat_map(|c| [(c.endless_cache, c.cache), (c.endless_columns, c.cache_columns), (c.endless_tile, c.tile)]).all(within) {
            return Err("a part of its cache is larger than the cache".into());
        }
        Ok(())
    }

    fn document(&self) -> Document {
        let mut lead = vec![self.facts()];
        lead.extend(self.fits.iter().map(|fits| Block::Text(fit(fits, self.batch))));
        Document {
            title: format!("Cost estimate of {}", self.short_name()),
            lead,
            sections: vec![
                Section::new("State and KV cache", self.modes()),
                Section::new("Training", self.training_blocks()),
                Section::new("Assumed", vec![Block::List(self.assumptions.clone())]),
            ],
        }
    }
}

impl Plan {
    fn facts(&self) -> Block {
        let model = &self.model;
        let (vocabulary, hidden) = (thousands(model.vocabulary), model.hidden);
        let (layers, mlp, heads, kv_heads, d) = (counted(model.layers, "layer"), model.mlp, model.heads, model.kv_heads, model.head_dim);
        let kinds: Vec<String> =
            model.parameters_by_kind.iter().map(|kind| format!("{} {}", kind.kind, number(kind.count as f64))).collect();
        let rows = counted(self.batch, "row");
        let facts = [
            (
                "model",
                format!("{}: {layers}, width {hidden}, MLP {mlp}, H {heads}, G {kv_heads}, d {d}, vocabulary {vocabulary}", model.name),
            ),
            ("parameters", format!("{} ({}): {}", number(model.parameters as f64), thousands(model.parameters), kinds.join(", "))),
            ("context", format!("{}, {rows}, chunks of {}", thousands(self.context), thousands(self.chunk))),
            ("times on", self.hardware[0].title.clone()),
        ];
        Block::Facts(facts.map(|(name, text)| (name.into(), text)).into())
    }

    fn modes(&self) -> Vec<Block> {
        let columns = &self.columns;
        let mut blocks = Vec::new();
        let warned = |column: &Column| if column.warnings.is_empty() { "" } else { "*" };
        let mut table = |name: &str, caption: &str, rows: &[Row]| {
            let names = std::iter::once(String::new()).chain(columns.iter().map(|column| format!("{}{}", column.label, warned(column))));
            let mut table = Table::new(caption, names);
            let row = |(name, cell): &(&str, &dyn Fn(&Column) -> Cell)| {
                std::iter::once(Cell::text(*name)).chain(columns.iter().map(cell)).collect()
            };
            table.rows.extend(rows.iter().map(row));
            if table.rows.iter().any(|row: &Vec<Cell>| row[1..].iter().any(|cell| *cell != Cell::Empty)) {
                blocks.push(Block::table(name, table));
            }
        };
        table(
            "memory",
            "State or KV cache",
            &[
                // Full windows are a state of constant size, and have no other cache.
                ("state", &|column| {
                    if column.recurrent.is_some() || column.constant { Cell::bytes(column.state_bytes) } else { Cell::Empty }
                }),
                ("KV cache", &|column| if column.cache_bytes > 0 { Cell::bytes(column.cache_bytes) } else { Cell::Empty }),
            ],
        );
        let modes: [Mode; 4] = [
            ("parallel", "Prompt, parallel: per token", |column| Some(column.parallel)),
            ("chunks", "Prompt, in chunks: per token", |column| column.chunk),
            ("recurrent", "Decoding with the state: per token", |column| column.recurrent),
            ("cached", "Decoding with the KV cache: per token", |column| Some(column.cached)),
        ];
        for (name, caption, of) in modes {
            let cost =
                |column: &Column, unit: Unit, value: fn(Cost) -> f64| Cell::maybe(of(column), |cost| Cell::Amount(value(cost), unit));
            table(
                name,
                caption,
                &[
                    ("operations", &|column| cost(column, Unit::Number, |cost| cost.flops)),
                    ("of attention", &|column| cost(column, Unit::Number, |cost| cost.attention_flops)),
                    ("bytes moved", &|column| cost(column, Unit::Bytes, |cost| cost.bytes)),
                    ("time", &|column| cost(column, Unit::Seconds, |cost| cost.seconds)),
                ],
            );
        }
        if columns.iter().any(|column| column.recurrent.is_some()) {
            let even = |column: &Column, of: fn(&BreakEven) -> Option<u64>| Cell::maybe(of(&column.break_even), Cell::Count);
            table(
                "break-even",
                "Break-even context",
                &[
                    ("memory: state = cache", &|column| even(column, |even| even.memory)),
                    ("decoding: state = cache", &|column| even(column, |even| even.decode)),
                    ("prompt: chunks = parallel", &|column| even(column, |even| even.chunk)),
                    ("training here: auto", &|column| even(column, |even| even.auto)),
                ],
            );
        }
        let warnings = columns.iter().flat_map(|column| column.warnings.iter().map(move |warning| format!("{}*: {warning}", column.label)));
        let warnings: Vec<String> = warnings.collect();
        if !warnings.is_empty() {
            blocks.push(Block::List(warnings));
        }
        blocks.push(Block::figure("state-or-cache", self.figure()));
        blocks
    }

    fn training_blocks(&self) -> Vec<Block> {
        let training = &self.training;
        let (tokens, step) = (number(training.tokens as f64), thousands(training.tokens_a_step));
        let memory = Unit::Bytes.format(training.parameter_bytes as f64);
        let text = format!("On {tokens} tokens, {step} per step; weights, gradients and moments take {memory}.");
        let columns = self.columns.iter().map(|column| column.label.clone());
        let mut table = Table::new("", std::iter::once("on".to_owned()).chain(columns).chain(["memory".into(), String::new()]));
        for machine in &self.hardware {
            let own: Vec<&TrainingTime> = training.times.iter().filter(|time| time.hardware == machine.name).collect();
            let time =
                |time: &&TrainingTime| Cell::text(format!("{}{}", duration(time.seconds), if time.mode == "chunk" { " c" } else { "" }));
            let memory = Cell::maybe(own.first(), |time| Cell::bytes(time.memory));
            let note = if own.first().is_some_and(|time| time.too_large) { "exceeds its memory" } else { "" };
            table
                .rows
                .push(std::iter::once(Cell::code(&machine.name)).chain(own.iter().map(time)).chain([memory, Cell::text(note)]).collect());
        }
        let mut blocks = vec![Block::Text(text), Block::table("training", table)];
        if training.times.iter().any(|time| time.mode == "chunk") {
            blocks.push(Block::text("c: chunk mode, which is faster there."));
        }
        if let Some(Shared { network, bytes, seconds, steps }) = &self.network {
            let text = format!(
                "A step of {} ranks at {} per second and {} latency: each sends {}, which takes {}.",
                thousands(network.ranks),
                Unit::Bytes.format(network.bandwidth),
                Unit::Seconds.format(network.latency),
                Unit::Bytes.format(*bytes as f64),
                Unit::Seconds.format(*seconds)
            );
            let mut table = Table::new("", ["on", "step, one rank", "step, all ranks", "speedup"]);
            for step in steps {
                let time = |seconds| Cell::Amount(seconds, Unit::Seconds);
                table.rows.push(vec![Cell::code(&step.hardware), time(step.alone), time(step.shared), Cell::Number(step.speedup, 2)]);
            }
            blocks.extend([Block::Text(text), Block::table("network", table)]);
        }
        blocks
    }
}

fn fit(fits: &Fits, batch: u64) -> String {
    let order = |order: Option<usize>| match order {
        Some(0) => "order 0".to_owned(),
        Some(p) => format!("orders 0..{p}"),
        None => "no order".to_owned(),
    };
    let rows = if batch == 1 { String::new() } else { format!(" of {} rows", thousands(batch)) };
    let high = fits.order.is_some_and(|order| order > 8);
    let high = if high { " Above order 8, float32 states lose negative scores to cancellation." } else { "" };
    format!(
        "In {}: states{rows} of {} (with the {} of weights: {}), or a cache of {} tokens (with the weights: {}). Only even orders are \
         considered: weights of odd orders can be negative.{high}",
        requested_bytes(fits.memory),
        order(fits.order),
        Unit::Bytes.format(fits.weights as f64),
        order(fits.order_beside_weights),
        thousands(fits.cache_tokens),
        thousands(fits.cache_tokens_beside_weights)
    )
}

/// A count with a unit, such as 275M.
fn number(x: f64) -> String {
    Unit::Number.format(x)
}

/// In the units of the request: 2 GiB, 80 GB.
fn requested_bytes(n: u64) -> String {
    match n {
        n if n >= 1 << 30 && n.is_multiple_of(1 << 30) => format!("{} GiB", thousands(n >> 30)),
        n if n >= 1 << 20 && n.is_multiple_of(1 << 20) => format!("{} MiB", n >> 20),
        n => Unit::Bytes.format(n as f64),
    }
}
