//! `termwise spectrum` as text.

use std::io::{self, Write};

use termwise_inspect::spectrum::{LayerSpectrum, ORDERS, OverHeads, Spectrum};

use crate::text::{Align, Table, WIDTH, thousands, three};

/// Layer by layer, then the order for 1 % head by head.
pub fn spectrum(spectrum: &Spectrum, out: &mut impl Write) -> io::Result<()> {
    let Spectrum { model, orders, .. } = spectrum;
    let kv = if model.kv_heads == model.heads { String::new() } else { format!(" over {} kv heads", model.kv_heads) };
    let sizes = format!("{} layers, {} heads{kv} of {}", spectrum.layers.len(), model.heads, model.head_dim);
    writeln!(out, "{}: {} parameters, {sizes}", model.name, thousands(model.parameters))?;
    writeln!(out, "{}\n", spectrum.scope())?;
    let mut table = Table::new([Align::Right; 11]);
    table.row(["", "dominant order", "", "", "score", "", "", "entropy", "order for", "", ""]);
    table.row(["layer", "all", "x ≥ 0", "x < 0", "mean ± sd", "min", "max", "share", "10 %", "1 %", "0.1 %"]);
    for layer in &spectrum.layers {
        table.row(cells(layer, orders.last().copied().unwrap_or(0)));
    }
    for line in table.lines() {
        writeln!(out, "{line}")?;
    }
    writeln!(out, "\nOrders for an error of the output: median head (worst head). Dominant order `all` is the published metric, but with")?;
    writeln!(out, "absolute values and over visible pairs only.\n")?;
    let reached = spectrum
        .layers
        .iter()
        .flat_map(|layer| &layer.heads)
        .any(|head| head.cut.as_ref().is_some_and(|cut| cut.order_for.one_percent.is_some()));
    match reached {
        true => write!(out, "{}", spectrum.order_map().to_text(WIDTH)),
        false => writeln!(out, "No head has an error of 1 % or less at an order up to {}.", orders.last().unwrap_or(&0)),
    }
}

fn cells(layer: &LayerSpectrum, most: usize) -> Vec<String> {
    let dash = || "–".to_owned();
    // The last order that is measured may be on the way to a peak beyond.
    let shown = |order: Option<usize>| match order {
        Some(order) if order + 1 == ORDERS => format!("≥{order}"),
        order => order.map_or_else(dash, |order| order.to_string()),
    };
    let terms = layer.terms.as_ref();
    let dominant = terms.map(|terms| [&terms.all, &terms.positive, &terms.negative].map(|magnitudes| shown(magnitudes.dominant)));
    let mean = |value: fn(&termwise_inspect::spectrum::HeadSpectrum) -> f64| layer.mean(|head| Some(value(head))).unwrap_or(f64::NAN);
    let scores = || layer.heads.iter().map(|head| head.scores);
    let mut cells = vec![layer.layer.to_string()];
    cells.extend(dominant.unwrap_or_else(|| [dash(), dash(), dash()]));
    cells.push(format!("{} ± {}", three(mean(|head| head.scores.mean)), three(mean(|head| head.scores.sd))));
    cells.push(three(scores().map(|scores| scores.min).fold(f64::INFINITY, f64::min)));
    cells.push(three(scores().map(|scores| scores.max).fold(f64::NEG_INFINITY, f64::max)));
    let share = layer.mean(|head| head.entropy.and_then(|entropy| entropy.share));
    cells.push(share.map_or_else(dash, |share| format!("{:.0} %", 100.0 * share)));
    let order = |order: Option<usize>| order.map_or_else(|| format!(">{most}"), |order| order.to_string());
    match layer.order_for() {
        Some(all) => cells.extend(all.map(|OverHeads { median, worst }| format!("{} ({})", order(median), order(worst)))),
        None => cells.extend([dash(), dash(), dash()]),
    }
    cells
}
