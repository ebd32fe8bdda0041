//! Successes and orders in tables.

use std::io::{self, Write};

use termwise_papers::separation::{BridgePoint, Compared, ComparedOrder, FEW, LEAST, MOST, Point, Reference, Series, Setting, Verdict};

use crate::commands::separation::Report;
use crate::text::{Align, Table, WIDTH, thousands, wrap};

pub fn separation(report: &Report, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{}{}.", report.note[..1].to_uppercase(), &report.note[1..])?;
    if let Some(reference) = &report.reference {
        return of_reference(reference, report.seed, out);
    }
    if !report.points.is_empty() {
        points(&report.points, report.seed, out)?;
    }
    if !report.bridge.is_empty() {
        bridge(&report.bridge, out)?;
    }
    Ok(())
}

/// n, m, a_1 and the rest are columns where they differ, and a heading where they do not.
fn points(points: &[Point], seed: u64, out: &mut impl Write) -> io::Result<()> {
    let first = &points[0];
    writeln!(out, "{}; {} draws, seed {seed}\n", common(&first.setting), thousands(first.share.draws))?;
    let mut table = Table::new([vec![Align::Left], vec![Align::Right; 6], vec![Align::Left]].concat());
    table.row(["network", "n", "d", "m", "a_1", "exact", "success", "95 %"]);
    for Point { network, setting, share, exact } in points {
        table.row([
            network.to_string(),
            thousands(setting.n),
            setting.d.to_string(),
            setting.m.to_string(),
            setting.a1.to_string(),
            format!("{exact:.4}"),
            format!("{:.4}", share.success),
            format!("{:.4} to {:.4}", share.low, share.high),
        ]);
    }
    lines(&table, out)
}

fn common(setting: &Setting) -> String {
    let Setting { a0, b, c, cross, .. } = setting;
    format!("a_0 = {a0}, b = {b}, c = {c}, {}-attention", if *cross { "cross" } else { "self" })
}

fn bridge(points: &[BridgePoint], out: &mut impl Write) -> io::Result<()> {
    let first = &points[0].setting;
    writeln!(out, "{}, d = {}\n\nSmallest order with a success of at least {LEAST}", common(first), first.d)?;
    let mut table = Table::new([vec![Align::Right; 11], vec![Align::Left]].concat());
    table.row(["a_1", "n", "m", "ln n/ln(1+a_1)", "Taylor", "exact", "success", "power", "exact", "success"]);
    for pair in points.chunks(2) {
        let Setting { n, m, a1, .. } = pair[0].setting;
        let mut cells = vec![a1.to_string(), thousands(n), m.to_string(), format!("{:.1}", pair[0].predicted)];
        for found in pair {
            let of = |show: &dyn Fn(&Point) -> f64| found.point.as_ref().map_or("–".into(), |point| format!("{:.3}", show(point)));
            cells.extend([order(found), of(&|point| point.exact), of(&|point| point.share.success)]);
        }
        table.row(cells);
    }
    lines(&table, out)?;
    rule(out)
}

fn order(point: &BridgePoint) -> String {
    point.order.map_or("none".into(), |order| order.to_string())
}

fn rule(out: &mut impl Write) -> io::Result<()> {
    let text = format!(
        "Orders are looked at upwards from 0; the first whose probability in closed form reaches {LEAST} is taken, none beyond {MOST}."
    );
    writeln!(out, "{}", wrap(&text, 0, WIDTH))
}

fn of_reference(reference: &Reference, seed: u64, out: &mut impl Write) -> io::Result<()> {
    let Some(first) = reference.figures.first() else { return Ok(()) };
    let (rest, draws) = (common(&first.point.setting), thousands(first.point.share.draws));
    writeln!(out, "{rest}, d = {}; {draws} draws, seed {seed}\n\nSuccess: F = 0 on D_0 and F > 0 on D_1", first.point.setting.d)?;
    let mut table = Table::new([vec![Align::Left], vec![Align::Right; 6], vec![Align::Left; 2]].concat());
    table.row(["network", "a_1", "n", "m", "reference", "exact", "success", "95 %", ""]);
    for Compared { reference, verdict, point } in &reference.figures {
        let Setting { n, m, a1, .. } = point.setting;
        table.row([
            point.network.to_string(),
            a1.to_string(),
            thousands(n),
            m.to_string(),
            format!("{reference:.2}"),
            format!("{:.4}", point.exact),
            format!("{:.4}", point.share.success),
            format!("{:.4} to {:.4}", point.share.low, point.share.high),
            say(*verdict).into(),
        ]);
    }
    lines(&table, out)?;
    writeln!(out, "\nThe bridge: smallest order with a success of at least {LEAST}, Taylor / power")?;
    let mut table = Table::new([vec![Align::Right; 6], vec![Align::Left; 2]].concat());
    table.row(["a_1", "n", "m", "ln n/ln(1+a_1)", "reference", "found", "exact there, one below", ""]);
    for pair in reference.orders.chunks(2) {
        let Setting { n, m, a1, .. } = pair[0].found.setting;
        let both = |show: &dyn Fn(&ComparedOrder) -> String| pair.iter().map(show).collect::<Vec<_>>().join(" / ");
        let exact = |row: &ComparedOrder| {
            let at = row.found.point.as_ref().map_or("–".into(), |point| format!("{:.3}", point.exact));
            format!("{at}, {}", row.found.below.map_or("–".into(), |x| format!("{x:.3}")))
        };
        let remark = |verdict: Verdict| {
            let rows = pair.iter().filter(|row| row.verdict == verdict);
            let names: Vec<&str> = rows.map(|row| if row.found.series == Series::Taylor { "Taylor" } else { "power" }).collect();
            (!names.is_empty()).then(|| format!("{}: {}", names.join(", "), say(verdict)))
        };
        let remarks: Vec<String> = [Verdict::Chance, Verdict::Differs].into_iter().filter_map(remark).collect();
        table.row([
            a1.to_string(),
            thousands(n),
            m.to_string(),
            format!("{:.1}", pair[0].found.predicted),
            both(&|row| row.reference.to_string()),
            both(&|row| order(&row.found)),
            both(&exact),
            remarks.join("; "),
        ]);
    }
    lines(&table, out)?;
    writeln!(out)?;
    rule(out)?;
    let text = format!(
        "Reference figures have two digits and an unknown number of draws: \"chance\" is outside the interval, or another order, but within what \
         {FEW} draws give in 95 % of cases; with 300, 0.70 at m = 5 would differ. All 24 orders are met by m = ⌊log₂(n/0.01)⌋, which was found by \
         looking for an m that fits them. exact is the probability in closed form."
    );
    writeln!(out, "{}", wrap(&text, 0, WIDTH))
}

fn say(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Agrees => "",
        Verdict::Chance => "chance",
        Verdict::Differs => "differs",
    }
}

fn lines(table: &Table, out: &mut impl Write) -> io::Result<()> {
    table.lines().iter().try_for_each(|line| writeln!(out, "{line}"))
}
