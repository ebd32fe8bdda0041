//! Speeds in tables.

use std::io::{self, Write};

use termwise_lab::bench::{AttentionBench, ChunkBench, DecodeBench, GemmBench, Machine, Speed, StepBench};

use crate::text::{Align, Table, thousands, three};

fn machine(machine: &Machine, out: &mut impl Write) -> io::Result<()> {
    let Machine { threads, instructions, peak_gflops, read_gb_per_s } = machine;
    let s = if *threads == 1 { "" } else { "s" };
    let (peak, read) = (three(*peak_gflops), three(*read_gb_per_s));
    writeln!(out, "machine: {threads} thread{s}, {instructions}: {peak} GFLOP/s float32 in registers, {read} GB/s from memory")
}

fn percent(share: f64) -> String {
    format!("{:.0}%", 100.0 * share)
}

fn print(table: &Table, out: &mut impl Write) -> io::Result<()> {
    table.lines().iter().try_for_each(|line| writeln!(out, "{line}"))
}

pub fn attention(bench: &AttentionBench, out: &mut impl Write) -> io::Result<()> {
    machine(&bench.machine, out)?;
    writeln!(out, "operations: {}; times are the best of several", bench.flop_count)?;
    let mut shape = None;
    let mut table = None::<Table>;
    let columns = [vec![Align::Left], vec![Align::Right; 10]].concat();
    for row in &bench.rows {
        let here = (row.batch, row.heads, row.kv_heads, row.time, row.head_dim);
        if shape.replace(here) != Some(here) {
            if let Some(table) = table.take() {
                print(&table, out)?;
            }
            let (batch, heads, kv_heads, time, d) = here;
            writeln!(out, "\nB {batch}, H {heads}, G {kv_heads}, T {time}, d {d}")?;
            let mut new = Table::new(columns.clone());
            new.row(["", "forward", "", "", "", "", "with backward", "", "", "", ""]);
            new.row(["variant", "ms", "GFLOP/s", "peak", "tokens/s", "×softmax", "ms", "GFLOP/s", "peak", "tokens/s", "×softmax"]);
            table = Some(new);
        }
        let speed = |speed: &Speed, against: f64| {
            let tokens = thousands(speed.tokens_per_s.unwrap_or_default() as u64);
            [format!("{:.3}", speed.ms), three(speed.gflops), percent(speed.share_of_peak), tokens, format!("{against:.2}")]
        };
        if let Some(table) = &mut table {
            let forward = speed(&row.forward, row.forward_against_softmax);
            let both = speed(&row.forward_backward, row.forward_backward_against_softmax);
            table.row([row.variant.clone()].into_iter().chain(forward).chain(both));
        }
    }
    table.map_or(Ok(()), |table| print(&table, out))
}

pub fn chunk(bench: &ChunkBench, out: &mut impl Write) -> io::Result<()> {
    machine(&bench.machine, out)?;
    for case in &bench.cases {
        writeln!(out, "\n{}, d {}, H {}: milliseconds, the best of several", case.variant, case.head_dim, case.heads)?;
        let mut table = Table::new([vec![Align::Right; 7], vec![Align::Left]].concat());
        table.row(["", "forward", "", "", "with backward", "", "", ""]);
        table.row(["T", "parallel", "chunk", "ratio", "parallel", "chunk", "ratio", "auto takes"]);
        for row in &case.rows {
            let times = [row.parallel_forward_ms, row.chunk_forward_ms, row.forward_ratio, row.parallel_ms, row.chunk_ms, row.ratio];
            table.row([row.time.to_string()].into_iter().chain(times.map(three)).chain([row.auto.clone()]));
        }
        print(&table, out)?;
        let length = |length: Option<usize>| length.map_or("–".into(), |length| thousands(length as u64));
        writeln!(out, "chunks are faster from T = {} as predicted, {} as measured", length(case.predicted), length(case.measured))?;
    }
    Ok(())
}

pub fn decode(bench: &DecodeBench, out: &mut impl Write) -> io::Result<()> {
    machine(&bench.machine, out)?;
    writeln!(out, "sweep: one thread reads, changes and writes as many bytes; times are the best of several\n")?;
    let mut table = Table::new([vec![Align::Left], vec![Align::Right; 8]].concat());
    table.row(["variant", "d", "H", "state bytes", "µs a token", "GB/s", "sweep µs", "GB/s", "of sweep"]);
    for row in &bench.rows {
        let sizes = [row.head_dim.to_string(), row.heads.to_string(), thousands(row.state_bytes as u64)];
        let times = [row.us, row.gb_per_s, row.sweep_us, row.sweep_gb_per_s].map(three);
        table.row([row.variant.clone()].into_iter().chain(sizes).chain(times).chain([percent(row.share_of_sweep)]));
    }
    print(&table, out)?;
    if bench.curve.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    let mut table = Table::new([Align::Left, Align::Right, Align::Right, Align::Right]);
    table.row(["variant", "position", "µs a token", "bytes kept"]);
    for point in &bench.curve {
        table.row([point.variant.clone(), thousands(point.position as u64), three(point.us), thousands(point.bytes as u64)]);
    }
    print(&table, out)
}

pub fn gemm(bench: &GemmBench, out: &mut impl Write) -> io::Result<()> {
    machine(&bench.machine, out)?;
    writeln!(out, "operations: {}; times are the best of several\n", bench.flop_count)?;
    let mut table = Table::new([vec![Align::Right; 3], vec![Align::Left], vec![Align::Right; 3]].concat());
    table.row(["M", "K", "N", "product", "ms", "GFLOP/s", "peak"]);
    for row in &bench.rows {
        let sizes = [row.m, row.k, row.n].map(|n| n.to_string());
        let speed = [format!("{:.3}", row.speed.ms), three(row.speed.gflops), percent(row.speed.share_of_peak)];
        table.row(sizes.into_iter().chain([row.product.to_string()]).chain(speed));
    }
    print(&table, out)
}

pub fn step(bench: &StepBench, out: &mut impl Write) -> io::Result<()> {
    machine(&bench.machine, out)?;
    let StepBench { vocab, hidden, heads, kv_heads, layers, mlp, batch, length, .. } = bench;
    writeln!(out, "model: {layers} layers, width {hidden}, H {heads}, G {kv_heads}, MLP {mlp}, vocabulary {vocab}, {}", bench.attention)?;
    writeln!(out, "       {} parameters; batch {batch} × {length} tokens", thousands(bench.parameters as u64))?;
    writeln!(out, "operations: {}\n", bench.flop_count)?;
    let Speed { ms, gflops, share_of_peak, tokens_per_s } = bench.speed;
    let tokens = thousands(tokens_per_s.unwrap_or_default() as u64);
    let (gflops, share) = (three(gflops), percent(share_of_peak));
    writeln!(out, "step: best {ms:.2} ms, median {:.2} ms, {tokens} tokens/s, {gflops} GFLOP/s, {share} of peak", bench.median_ms)?;
    writeln!(out, "loss: {:.4} at the first step, {:.4} at the last\n", bench.losses[0], bench.losses[1])?;
    let mut table = Table::new([Align::Left, Align::Right, Align::Right]);
    table.row(["ms, on average", "forward", "backward"]);
    for stage in &bench.times.stages {
        table.row([stage.stage.clone(), format!("{:.2}", stage.forward_ms), format!("{:.2}", stage.backward_ms)]);
    }
    for (what, ms) in
        [("gradients to zero", bench.times.zero_ms), ("gradient norm", bench.times.norm_ms), ("AdamW", bench.times.optimizer_ms)]
    {
        table.row([what.to_string(), String::new(), format!("{ms:.2}")]);
    }
    print(&table, out)
}
