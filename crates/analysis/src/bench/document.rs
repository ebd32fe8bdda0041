//! Documents of benchmark results.

use termwise_report::{Block, Cell, Document, Documented, Section, Table, Unit, counted, sig3, thousands};

use super::{AttentionBench, ChunkBench, DecodeBench, GemmBench, Machine, Speed, StepBench};

impl Machine {
    fn block(&self, also: &str) -> Block {
        let Machine { threads, instructions, peak_gflops, read_gb_per_s } = self;
        let threads = counted(*threads, "thread");
        let (peak, read) = (sig3(*peak_gflops), sig3(*read_gb_per_s));
        Block::text(format!("Machine: {threads}, {instructions}: {peak} GFLOP/s float32 in registers, {read} GB/s from memory. {also}"))
    }
}

/// Milliseconds, GFLOP/s and share of the peak.
fn speed(speed: &Speed) -> [Cell; 3] {
    [Cell::Number(speed.ms, 3), Cell::sig3(speed.gflops), Cell::Amount(speed.share_of_peak, Unit::Percent)]
}

fn tokens(speed: &Speed) -> Cell {
    Cell::count(speed.tokens_per_s.unwrap_or_default() as u64)
}

impl Documented for AttentionBench {
    const KIND: &'static str = "bench-attention";

    fn document(&self) -> Document {
        let passes = ["forward", "with backward"];
        let columns =
            passes.iter().flat_map(|pass| ["ms", "GFLOP/s", "of peak", "tokens/s", "× softmax"].map(|unit| format!("{pass} {unit}")));
        let columns: Vec<String> = std::iter::once("variant".to_owned()).chain(columns).collect();
        let shape = |row: &super::AttentionRow| (row.batch, row.heads, row.kv_heads, row.time, row.head_dim);
        let section = |rows: &[super::AttentionRow]| {
            let (batch, heads, kv_heads, time, d) = shape(&rows[0]);
            let mut table = Table::new("", columns.clone());
            for row in rows {
                let mut cells = vec![Cell::code(&row.variant)];
                for (one, against) in
                    [(&row.forward, row.forward_against_softmax), (&row.forward_backward, row.forward_backward_against_softmax)]
                {
                    cells.extend(speed(one));
                    cells.extend([tokens(one), Cell::Number(against, 2)]);
                }
                table.rows.push(cells);
            }
            let name = format!("attention-{batch}x{heads}x{time}");
            Section::new(format!("B {batch}, H {heads}, G {kv_heads}, T {time}, d {d}"), vec![Block::table(name, table)])
        };
        Document {
            title: "Speed of the fused attention".into(),
            lead: vec![self.machine.block(&format!("Operations: {}. Times are the best of several.", self.flop_count))],
            sections: self.rows.chunk_by(|a, b| shape(a) == shape(b)).map(section).collect(),
        }
    }
}

impl Documented for ChunkBench {
    const KIND: &'static str = "bench-chunk";

    fn document(&self) -> Document {
        let section = |case: &super::ChunkTable| {
            let columns = [
                "T",
                "forward parallel",
                "forward chunk",
                "forward ratio",
                "with backward parallel",
                "with backward chunk",
                "with backward ratio",
                "auto takes",
            ];
            let mut table = Table::new("Milliseconds", columns);
            for row in &case.rows {
                let times = [row.parallel_forward_ms, row.chunk_forward_ms, row.forward_ratio, row.parallel_ms, row.chunk_ms, row.ratio];
                let cells = std::iter::once(Cell::count(row.time)).chain(times.map(Cell::sig3)).chain([Cell::text(&row.auto)]);
                table.rows.push(cells.collect());
            }
            let length = |length: Option<usize>| length.map_or("–".into(), thousands);
            let even =
                format!("Chunks are faster from T = {} as predicted, {} as measured.", length(case.predicted), length(case.measured));
            let heading = format!("`{}`, d {}, H {}", case.variant, case.head_dim, case.heads);
            Section::new(heading, vec![Block::table("chunk", table), Block::text(even)])
        };
        Document {
            title: "Chunk mode against parallel mode".into(),
            lead: vec![self.machine.block("Times are the best of several.")],
            sections: self.cases.iter().map(section).collect(),
        }
    }
}

impl Documented for DecodeBench {
    const KIND: &'static str = "bench-decode";

    fn document(&self) -> Document {
        let columns = ["variant", "d", "H", "state bytes", "µs per token", "GB/s", "plain µs", "plain GB/s", "of plain"];
        let mut table = Table::new("", columns);
        for row in &self.rows {
            let sizes = [row.head_dim, row.heads, row.state_bytes].map(Cell::count);
            let times = [row.us, row.gb_per_s, row.sweep_us, row.sweep_gb_per_s].map(Cell::sig3);
            let share = Cell::Amount(row.share_of_sweep, Unit::Percent);
            table.rows.push(std::iter::once(Cell::code(&row.variant)).chain(sizes).chain(times).chain([share]).collect());
        }
        let plain = "Plain: one thread reads, changes and writes the same number of bytes. Times are the best of several.";
        let mut sections = Vec::new();
        if !self.curve.is_empty() {
            let mut curve = Table::new("", ["variant", "position", "µs per token", "bytes kept"]);
            for point in &self.curve {
                curve.rows.push(vec![
                    Cell::code(&point.variant),
                    Cell::count(point.position),
                    Cell::sig3(point.us),
                    Cell::count(point.bytes),
                ]);
            }
            sections.push(Section::new("Time per token by position", vec![Block::table("curve", curve)]));
        }
        Document {
            title: "One token at a time with a constant state".into(),
            lead: vec![self.machine.block(plain), Block::table("decode", table)],
            sections,
        }
    }
}

impl Documented for GemmBench {
    const KIND: &'static str = "bench-gemm";

    fn document(&self) -> Document {
        let mut table = Table::new("", ["M", "K", "N", "product", "ms", "GFLOP/s", "of peak"]);
        for row in &self.rows {
            let sizes = [row.m, row.k, row.n].map(Cell::count);
            table.rows.push(sizes.into_iter().chain([Cell::text(&row.product)]).chain(speed(&row.speed)).collect());
        }
        let also = format!("Operations: {}. Times are the best of several.", self.flop_count);
        Document {
            title: "Matrix products of a linear layer".into(),
            lead: vec![self.machine.block(&also), Block::table("gemm", table)],
            sections: vec![],
        }
    }
}

impl Documented for StepBench {
    const KIND: &'static str = "bench-step";

    fn document(&self) -> Document {
        let StepBench { vocab, hidden, heads, kv_heads, layers, mlp, batch, length, attention, .. } = self;
        let Speed { ms, gflops, share_of_peak, tokens_per_s } = self.speed;
        let facts = [
            (
                "model",
                format!(
                    "{}, width {hidden}, H {heads}, G {kv_heads}, MLP {mlp}, vocabulary {vocab}, `{attention}`",
                    counted(*layers, "layer")
                ),
            ),
            ("", format!("{} parameters; batch {batch} × {length} tokens", thousands(self.parameters))),
            ("operations", self.flop_count.clone()),
            (
                "step",
                format!(
                    "best {ms:.2} ms, median {:.2} ms, {} tokens/s, {} GFLOP/s, {} of peak",
                    self.median_ms,
                    thousands(tokens_per_s.unwrap_or_default() as u64),
                    sig3(gflops),
                    Unit::Percent.format(share_of_peak)
                ),
            ),
            ("loss", format!("{:.4} at the first step, {:.4} at the last", self.losses[0], self.losses[1])),
        ];
        let mut table = Table::new("Milliseconds, on average", ["stage", "forward", "backward"]);
        for stage in &self.times.stages {
            table.rows.push(vec![Cell::text(&stage.stage), Cell::Number(stage.forward_ms, 2), Cell::Number(stage.backward_ms, 2)]);
        }
        let rest = [("gradients to zero", self.times.zero_ms), ("gradient norm", self.times.norm_ms), ("AdamW", self.times.optimizer_ms)];
        table.rows.extend(rest.map(|(what, ms)| vec![Cell::text(what), Cell::Empty, Cell::Number(ms, 2)]));
        Document {
            title: "A training step".into(),
            lead: vec![
                self.machine.block(""),
                Block::Facts(facts.map(|(name, text)| (name.into(), text)).into()),
                Block::table("stages", table),
            ],
            sections: vec![],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{GemmOptions, GemmShape, gemm};

    #[test]
    fn saved_results_render_the_same() {
        let found = gemm(&GemmOptions { shapes: vec![GemmShape { m: 5, k: 3, n: 2 }], threads: 1, repeat: 1 }).expect("three products");
        termwise_report::reads_again(&found);
    }
}
