//! What cutting costs and saves, in tables.

use std::io::{self, Write};

use termwise_inspect::cut::{Kept, Map, Measured, Plan, Report};
use termwise_report::Unit;

use crate::text::{Align, Table, WIDTH, thousands, wrap};

const NONE: &str = "–";

pub fn cut(report: &Report, out: &mut impl Write) -> io::Result<()> {
    heading(report, out)?;
    curves(report, out)?;
    kept(&report.kept, out)?;
    if let (Some(map), Some(uncut)) = (&report.map, report.uncut_loss()) {
        layers(map, uncut, out)?;
    }
    if let Some(plan) = &report.plan {
        planned(report, plan, out)?;
    }
    for warning in &report.warnings {
        writeln!(out, "\nwarning: {}", wrap(warning, 2, WIDTH))?;
    }
    if !report.finished {
        writeln!(out, "\ninterrupted: what is here is finished; the same command with --out goes on from there")?;
    }
    Ok(())
}

fn heading(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let Report { layers, heads, kv_heads, cuttable, length, .. } = report;
    writeln!(out, "{}: {layers} layers, H {heads}, G {kv_heads}; {cuttable} heads can be cut", report.model)?;
    if let Some(tokens) = report.tokens {
        let [a, b, c] = [tokens.calibration, tokens.tuning, tokens.evaluation].map(thousands);
        writeln!(out, "windows of {length}; calibrated on {a} tokens, plan tuned on {b}, losses on {c} others")?;
    }
    if let Some(uncut) = &report.uncut {
        let bits = uncut.bits_per_byte.map_or(String::new(), |bits| format!(", {bits:.4} bits a byte"));
        let cache = bytes(report.cache_bytes);
        writeln!(out, "uncut: loss {}{bits}; cache {cache} at a context of {}", loss(uncut), thousands(report.context))?;
    }
    Ok(())
}

fn curves(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let Some(first) = report.curves.first().filter(|curve| !curve.points.is_empty()) else { return Ok(()) };
    writeln!(out, "\nAll layers cut: loss, and bits a byte")?;
    let mut table = Table::new([vec![Align::Right; 2 + 2 * report.curves.len()], vec![Align::Left]].concat());
    let names = report.curves.iter().flat_map(|curve| [curve.coefficients.to_string(), String::new()]);
    table.row(["order".to_owned(), "state".to_owned()].into_iter().chain(names));
    for (i, point) in first.points.iter().enumerate() {
        let state = point.state_bytes.map_or(NONE.into(), bytes);
        let points: Vec<Option<&Measured>> = report.curves.iter().map(|curve| curve.points.get(i).map(|point| &point.measured)).collect();
        let cells = points.iter().flat_map(|found| match found {
            Some(found) => [loss(found), found.bits_per_byte.map_or(String::new(), |bits| format!("{bits:.4}"))],
            None => [NONE.to_owned(), String::new()],
        });
        let star = if points.iter().flatten().any(|found| found.loss.is_some() && found.problem.is_some()) { "*" } else { "" };
        table.row([point.order.to_string(), state].into_iter().chain(cells.collect::<Vec<_>>()).chain([star.to_owned()]));
    }
    table.lines().iter().try_for_each(|line| writeln!(out, "  {line}"))?;
    let first = report.curves.iter().flat_map(|curve| &curve.points).filter(|point| point.measured.loss.is_some());
    if let Some(problem) = first.filter_map(|point| point.measured.problem.as_ref()).next() {
        writeln!(out, "  * {}", wrap(problem, 4, WIDTH))?;
    }
    Ok(())
}

fn kept(kept: &[Kept], out: &mut impl Write) -> io::Result<()> {
    if kept.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nCalibrated heads, by text held back from the fit: what they kept, the median error of their output")?;
    let mut table = Table::new([Align::Right; 8]);
    table.row(["order", "fitted", "centred", "taylor", "error", "centred's", "taylor's", "rounding in a state"]);
    for row in kept {
        let Kept { order, fitted, centred, taylor, .. } = row;
        let error = |x: f64| if x.is_finite() { format!("{x:.3}") } else { NONE.into() };
        table.row([
            order.to_string(),
            fitted.to_string(),
            centred.to_string(),
            taylor.to_string(),
            error(row.kept_error),
            error(row.centred_error),
            error(row.taylor_error),
            format!("× {:.0e}", row.state_condition),
        ]);
    }
    table.lines().iter().try_for_each(|line| writeln!(out, "  {line}"))
}

fn layers(map: &Map, uncut: f64, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "\nOne layer cut, {}: rise of the loss", map.coefficients)?;
    let mut table = Table::new([vec![Align::Left], vec![Align::Right; map.orders.len()]].concat());
    table.row(["layer".to_owned()].into_iter().chain(map.orders.iter().map(|order| format!("order {order}"))));
    for (layer, row) in map.layers.iter().enumerate() {
        let rise = |found: &Measured| found.loss.map_or("not finite".into(), |loss| format!("{:+.4}", loss - uncut));
        table.row([layer.to_string()].into_iter().chain(row.iter().map(rise)));
    }
    table.lines().iter().try_for_each(|line| writeln!(out, "  {line}"))
}

fn planned(report: &Report, plan: &Plan, out: &mut impl Write) -> io::Result<()> {
    let percent = 100.0 * (plan.budget - 1.0);
    writeln!(out, "\nPlan: loss at most {percent:.3} % above the uncut model's, at a context of {}", thousands(report.context))?;
    if plan.too_large > 0 {
        let text = format!(
            "{} of {} cuts (kv head and order) would need a state that is not smaller than the cache at this context, and are not proposed.",
            plan.too_large,
            plan.units * report.kept.len()
        );
        writeln!(out, "  {}", wrap(&text, 2, WIDTH))?;
    }
    if plan.cuts.is_empty() {
        return writeln!(out, "  nothing can be cut within this budget");
    }
    let mut table = Table::new([Align::Left, Align::Right, Align::Right, Align::Right, Align::Right]);
    table.row(["layer", "kv head", "order", "alone", "saves"]);
    for cut in &plan.cuts {
        let (layer, kv_head, order) = (cut.layer.to_string(), cut.kv_head.to_string(), cut.order.to_string());
        table.row([layer, kv_head, order, format!("{:+.4}", cut.increase), bytes(cut.saved)]);
    }
    table.lines().iter().try_for_each(|line| writeln!(out, "  {line}"))?;
    writeln!(out, "  {}", wrap(&plan.summary(report.uncut_loss()), 2, WIDTH))
}

fn loss(found: &Measured) -> String {
    found.loss.map_or("not finite".into(), |loss| format!("{loss:.4}"))
}

fn bytes(n: u64) -> String {
    Unit::Bytes.format(n as f64)
}
