//! A plan in tables.

use std::io::{self, Write};

use termwise_lab::plan::{BreakEven, Column, Cost, Fits, Plan, TrainingTime};
use termwise_report::Unit;

use crate::text::{Align, Table, WIDTH, thousands, wrap};

const NONE: &str = "–";

pub fn plan(plan: &Plan, out: &mut impl Write) -> io::Result<()> {
    heading(plan, out)?;
    modes(plan, out)?;
    if let Some(fits) = &plan.fits {
        writeln!(out, "\n{}", wrap(&fit(fits, plan.batch), 2, WIDTH))?;
    }
    training(plan, out)?;
    writeln!(out, "\nAssumed")?;
    plan.assumptions.iter().try_for_each(|line| writeln!(out, "  · {}", wrap(line, 4, WIDTH)))
}

fn heading(plan: &Plan, out: &mut impl Write) -> io::Result<()> {
    let model = &plan.model;
    let (vocabulary, hidden) = (thousands(model.vocabulary as u64), model.hidden);
    let (layers, mlp, heads, kv_heads, d) = (model.layers, model.mlp, model.heads, model.kv_heads, model.head_dim);
    writeln!(out, "{}: {layers} layers, width {hidden}, MLP {mlp}, H {heads}, G {kv_heads}, d {d}, vocabulary {vocabulary}", model.name)?;
    let kinds: Vec<String> = model.parameters_by_kind.iter().map(|kind| format!("{} {}", kind.kind, number(kind.count as f64))).collect();
    let parameters = format!("{} parameters ({}): {}", number(model.parameters as f64), thousands(model.parameters), kinds.join(", "));
    writeln!(out, "{}", wrap(&parameters, 2, WIDTH))?;
    let rows = if plan.batch == 1 { "1 row".into() } else { format!("{} rows", thousands(plan.batch)) };
    let (context, chunk) = (thousands(plan.context), thousands(plan.chunk));
    writeln!(out, "context {context}, {rows}, chunks of {chunk}; times on {}\n", plan.hardware[0].title)
}

fn modes(plan: &Plan, out: &mut impl Write) -> io::Result<()> {
    let columns = &plan.columns;
    let mut table = Table::new([vec![Align::Left], vec![Align::Right; columns.len()]].concat());
    let warned = |column: &Column| if column.warnings.is_empty() { String::new() } else { "*".into() };
    row(&mut table, "", columns, |column| format!("{}{}", column.label, warned(column)));
    row(&mut table, "memory between tokens", columns, |_| String::new());
    row(&mut table, "  state", columns, |column| if column.recurrent.is_some() { bytes(column.state_bytes) } else { NONE.into() });
    row(&mut table, "  KV cache", columns, |column| bytes(column.cache_bytes));
    let mode = |table: &mut Table, name: &str, of: &dyn Fn(&Column) -> Option<Cost>| {
        if columns.iter().all(|column| of(column).is_none()) {
            return;
        }
        row(table, name, columns, |_| String::new());
        let cost = |column: &Column, show: &dyn Fn(Cost) -> String| of(column).map_or(NONE.into(), show);
        row(table, "  operations a token", columns, |column| cost(column, &|cost| number(cost.flops)));
        row(table, "    of attention", columns, |column| cost(column, &|cost| number(cost.attention_flops)));
        row(table, "  bytes moved a token", columns, |column| cost(column, &|cost| Unit::Bytes.format(cost.bytes)));
        row(table, "  time a token", columns, |column| cost(column, &|cost| Unit::Seconds.format(cost.seconds)));
    };
    mode(&mut table, "prompt, parallel", &|column| Some(column.parallel));
    mode(&mut table, "prompt, in chunks", &|column| column.chunk);
    mode(&mut table, "decoding with the state", &|column| column.recurrent);
    mode(&mut table, "decoding with the KV cache", &|column| Some(column.cached));
    if columns.iter().any(|column| column.recurrent.is_some()) {
        row(&mut table, "even at a context of", columns, |_| String::new());
        let even = |column: &Column, of: fn(&BreakEven) -> Option<u64>| of(&column.break_even).map_or(NONE.into(), thousands);
        row(&mut table, "  memory: state = cache", columns, |column| even(column, |even| even.memory));
        row(&mut table, "  decoding: state = cache", columns, |column| even(column, |even| even.decode));
        row(&mut table, "  prompt: chunks = parallel", columns, |column| even(column, |even| even.chunk));
        row(&mut table, "  training here: `auto`", columns, |column| even(column, |even| even.auto));
    }
    table.lines().iter().try_for_each(|line| writeln!(out, "{line}"))?;
    for column in columns {
        for warning in &column.warnings {
            writeln!(out, "{}", wrap(&format!("* {}: {warning}", column.label), 2, WIDTH))?;
        }
    }
    Ok(())
}

fn row(table: &mut Table, name: &str, columns: &[Column], cell: impl Fn(&Column) -> String) {
    table.row([name.to_owned()].into_iter().chain(columns.iter().map(cell)));
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
        "Into {} fit states{rows} of {} (beside the {} of weights: {}), or a cache of {} tokens (beside the weights: {}). Even orders alone are looked at: odd ones can turn negative.{high}",
        asked(fits.memory),
        order(fits.order),
        bytes(fits.weights),
        order(fits.order_beside_weights),
        thousands(fits.cache_tokens),
        thousands(fits.cache_tokens_beside_weights)
    )
}

fn training(plan: &Plan, out: &mut impl Write) -> io::Result<()> {
    let training = &plan.training;
    let (tokens, step) = (number(training.tokens as f64), thousands(training.tokens_a_step));
    writeln!(out, "\nTraining on {tokens} tokens, {step} a step; weights, gradients and moments take {}", bytes(training.parameter_bytes))?;
    let mut table = Table::new([vec![Align::Left], vec![Align::Right; plan.columns.len() + 1]].concat());
    row(&mut table, "", &plan.columns, |column| column.label.clone());
    for machine in &plan.hardware {
        let own: Vec<&TrainingTime> = training.times.iter().filter(|time| time.hardware == machine.name).collect();
        let cells = own.iter().map(|time| format!("{}{}", duration(time.seconds), if time.mode == "chunk" { " c" } else { "" }));
        let memory = own
            .first()
            .map_or(String::new(), |time| format!("{}{}", bytes(time.memory), if time.too_large { " (more than it has)" } else { "" }));
        table.row([format!("  {}", machine.name)].into_iter().chain(cells).chain([memory]));
    }
    table.lines().iter().try_for_each(|line| writeln!(out, "{line}"))?;
    if training.times.iter().any(|time| time.mode == "chunk") {
        writeln!(out, "  c: in chunks, which are cheaper there")?;
    }
    Ok(())
}

/// 275M
fn number(x: f64) -> String {
    Unit::Number.format(x)
}

/// 558 KB
fn bytes(n: u64) -> String {
    Unit::Bytes.format(n as f64)
}

/// In the units of whoever asked: 2 GiB, 80 GB
fn asked(n: u64) -> String {
    match n {
        n if n >= 1 << 30 && n.is_multiple_of(1 << 30) => format!("{} GiB", thousands(n >> 30)),
        n if n >= 1 << 20 && n.is_multiple_of(1 << 20) => format!("{} MiB", n >> 20),
        n => bytes(n),
    }
}

/// 45 s, 3.2 h, 12 days
fn duration(seconds: f64) -> String {
    const UNITS: [(f64, &str); 5] = [(365.25 * 86_400.0, "years"), (2.0 * 86_400.0, "days"), (7200.0, "h"), (120.0, "min"), (0.0, "s")];
    let (least, name) = UNITS.into_iter().find(|(least, _)| seconds >= *least).unwrap_or(UNITS[4]);
    // From two of a unit on, except for years.
    let unit = match name {
        "years" => least,
        "s" => return Unit::Seconds.format(seconds),
        _ => least / 2.0,
    };
    let x = seconds / unit;
    if x >= 1e6 {
        format!("{x:.0e} {name}")
    } else if x >= 100.0 {
        format!("{} {name}", thousands(x as u64))
    } else {
        format!("{x:.1} {name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit_that_fits() {
        for (seconds, text) in [
            (0.5, "500 ms"),
            (90.0, "90 s"),
            (150.0, "2.5 min"),
            (7200.0, "2.0 h"),
            (3.0 * 86_400.0, "3.0 days"),
            (365.25 * 86_400.0 * 1.5, "1.5 years"),
            (365.25 * 86_400.0 * 1234.0, "1,234 years"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }
}
