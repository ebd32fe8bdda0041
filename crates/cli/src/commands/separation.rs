//! `termwise separation`.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use termwise_papers::Error;
use termwise_papers::separation::{self, Bridge, BridgePoint, DRAWS, Network, Point, RECONSTRUCTION, Reference, Setting, Sweep};

use crate::print;

/// Tell a spike from none: where softmax attention succeeds and linear attention cannot
///
/// A reconstruction of the separation theorem of "Why Softmax Attention Outperforms Linear Attention" (arXiv 2310.11685), checked by algebra
/// and simulation, not quoted. Success is the share of random readouts y and places j3 with F = 0 on D_0 (spike a_0) and F > 0 on D_1
/// (spike a_1), with Wilson's interval of 95 %, beside the probability in closed form.
///
/// Without arguments: the reference figures beside what is computed. With any of --network, --n, --d, --m, --a1: every combination of
/// these. With --bridge: the smallest order of the exponential that succeeds, against n.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise separation
  termwise separation --network softmax --network linear --n 100,1000,1e6 --a1 1,3
  termwise separation --network taylor=0..12 --n 1000 --a1 0.7 --svg orders.svg
  termwise separation --bridge --n 100,1e4,1e6,1e8 --a1 0.7,1,3
  termwise separation --n 100,1000 --cross --csv cross.csv

The data have n rows of d numbers, L = √ln n: column 1 is a·L at row j3 and 0 elsewhere, columns 2 to d − 1 are b·L times a stacked identity,
column d is c·L. All scores are products of row sums. The readout is F = relu(Σ_j Σ_i relu(⟨c_j, y_i⟩ − (c + 0.1)·L)), i up to m.
The theorem is about a_0 < 0.1 and a_1 ≥ 0.7; smaller a_1 can be tried.")]
pub struct SeparationArgs {
    /// softmax, linear, power=P or taylor=P, or orders as in taylor=2..8; may be given several times [default: softmax and linear]
    #[arg(long, value_name = "NETWORK")]
    pub network: Vec<String>,
    /// Rows, as in 100,1e6 [default: 1000; with --bridge 1e2 to 1e6]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = whole)]
    pub n: Vec<u64>,
    /// Columns [default: 12]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = whole)]
    pub d: Vec<u64>,
    /// Vectors y of the readout [default: max(⌈ln(n/0.01)⌉, 15)]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = whole)]
    pub m: Vec<u64>,
    /// The spike of D_1 [default: 0.7; with --bridge 0.7,1,3]
    #[arg(long, value_name = "LIST", value_delimiter = ',', allow_negative_numbers = true)]
    pub a1: Vec<f64>,
    /// The spike of D_0 [default: 0.01]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub a0: Option<f64>,
    /// Size of the identity [default: 1 − c, or 0.1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub b: Option<f64>,
    /// Size of the constant column [default: 1 − b]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub c: Option<f64>,
    /// Cross-attention: the queries' row sums are all √ln n
    #[arg(long)]
    pub cross: bool,
    /// Look for the smallest order, Taylor and power, with a success of at least 0.9
    #[arg(long, conflicts_with = "network")]
    pub bridge: bool,
    /// Draws of y and j3 for each point
    #[arg(long, default_value_t = DRAWS, value_name = "N", value_parser = whole)]
    pub draws: u64,
    /// Seed of the draws
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Write the points into this file
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Draw success, or orders, into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// 100 or 1e6.
fn whole(text: &str) -> Result<u64, Error> {
    let value = text.trim().parse::<f64>().ok().filter(|x| x.fract() == 0.0 && (0.0..=2f64.powi(53)).contains(x));
    value
        .map(|x| x as u64)
        .ok_or_else(|| termwise_lab::Error::Size { text: text.into(), expected: "a whole number such as 1000 or 1e6" }.into())
}

/// What was computed.
#[derive(Serialize)]
pub struct Report {
    /// What it rests on.
    pub note: &'static str,
    pub seed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<Reference>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<Point>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bridge: Vec<BridgePoint>,
}

impl SeparationArgs {
    /// What lists leave open. Sizes beyond usize cannot come out of `whole` on 64 bits, and are refused by the setting.
    fn rest(&self) -> Setting {
        let usual = Setting::of(1000);
        let (b, c) = match (self.b, self.c) {
            (None, None) => (usual.b, usual.c),
            (Some(b), None) => (b, 1.0 - b),
            (None, Some(c)) => (1.0 - c, c),
            (Some(b), Some(c)) => (b, c),
        };
        Setting { a0: self.a0.unwrap_or(usual.a0), b, c, cross: self.cross, ..usual }
    }

    /// Whether nothing was said about networks and settings.
    fn is_reference(&self) -> bool {
        let lists = self.network.is_empty() && self.n.is_empty() && self.d.is_empty() && self.m.is_empty() && self.a1.is_empty();
        lists && self.a0.is_none() && self.b.is_none() && self.c.is_none() && !self.cross && !self.bridge
    }

    fn sweep(&self) -> Result<Sweep, Error> {
        let rest = self.rest();
        let or = |list: &[u64], usual: u64| if list.is_empty() { vec![usual] } else { list.to_vec() };
        let mut networks = Vec::new();
        for text in &self.network {
            networks.extend(Network::list(text)?);
        }
        if networks.is_empty() {
            networks = vec![Network::Softmax, Network::Linear];
        }
        Ok(Sweep {
            networks,
            n: or(&self.n, rest.n),
            d: or(&self.d, rest.d as u64).into_iter().map(|d| d as usize).collect(),
            m: self.m.iter().map(|&m| m as usize).collect(),
            a1: if self.a1.is_empty() { vec![rest.a1] } else { self.a1.clone() },
            rest,
            draws: self.draws,
            seed: self.seed,
        })
    }

    fn bridge(&self) -> Result<Bridge, Error> {
        let usual = Bridge::default();
        let one = |name: &str, list: &[u64]| match list {
            [] => Ok(None),
            [one] => Ok(Some(*one as usize)),
            _ => Err(Error::Sizes(format!("the bridge goes over n and a_1 alone; give one --{name}, not {}", list.len()))),
        };
        let rest = self.rest();
        Ok(Bridge {
            n: if self.n.is_empty() { usual.n } else { self.n.clone() },
            a1: if self.a1.is_empty() { usual.a1 } else { self.a1.clone() },
            m: one("m", &self.m)?,
            rest: Setting { d: one("d", &self.d)?.unwrap_or(rest.d), ..rest },
            draws: self.draws,
            seed: self.seed,
        })
    }
}

/// Computes in the global pool, writes files where asked, and prints.
pub fn run<E: From<Error> + From<io::Error>>(args: &SeparationArgs, out: &mut impl Write) -> Result<(), E> {
    let mut report = Report { note: RECONSTRUCTION, seed: args.seed, reference: None, points: Vec::new(), bridge: Vec::new() };
    if args.is_reference() {
        let reference = Reference::run(args.draws, args.seed)?;
        if args.svg.is_some() {
            report.points = Sweep { draws: args.draws, seed: args.seed, ..Sweep::theorem() }.run(&mut progress())?;
            report.bridge = Bridge { draws: args.draws, seed: args.seed, ..Bridge::default() }.run()?;
        }
        report.reference = Some(reference);
    } else if args.bridge {
        report.bridge = args.bridge()?.run()?;
    } else {
        report.points = args.sweep()?.run(&mut progress())?;
    }
    if let Some(path) = &args.svg {
        let (success, bridge) = (separation::success_figure(&report.points), separation::bridge_figure(&report.bridge));
        let figure = match (report.points.is_empty(), report.bridge.is_empty()) {
            (false, false) => separation::both(success, bridge),
            (true, false) => bridge,
            _ => success,
        };
        write(path, &figure.to_svg())?;
    }
    if let Some(path) = &args.csv {
        write(path, &csv(&report))?;
    }
    if args.json {
        print::json(&report, out)?;
    } else {
        print::separation(&report, out)?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    std::fs::write(path, text).map_err(termwise_llama::Error::io("write", path)).map_err(Error::from)
}

/// Time left, on a terminal, for sweeps of more than a moment.
fn progress() -> impl FnMut(&Point, usize) {
    let (start, mut done, terminal) = (Instant::now(), 0, io::stderr().is_terminal());
    let mut shown = false;
    move |_: &Point, count: usize| {
        done += 1;
        let spent = start.elapsed();
        if !terminal || spent < Duration::from_secs(2) {
            return;
        }
        let left = spent.as_secs_f64() / done as f64 * (count - done) as f64;
        // Where standard error is closed there is nobody to tell.
        let _ = match done == count {
            false => write!(io::stderr(), "\r{done}/{count} points, {left:.0} s left\x1b[K"),
            true if shown => write!(io::stderr(), "\r\x1b[K"),
            true => Ok(()),
        };
        shown = true;
    }
}

/// A row for each point; of an order that does not exist, its setting alone.
fn csv(report: &Report) -> String {
    let mut text = "part,network,n,d,m,a0,a1,b,c,cross,draws,success,low,high,exact,reference,predicted_order\n".to_owned();
    let mut row = |part: &str, network: String, s: &Setting, point: Option<&Point>, reference: String, predicted: String| {
        let Setting { n, d, m, a0, a1, b, c, cross } = s;
        let measured = point.map_or(",,,,".into(), |point| {
            let separation::Share { success, low, high, draws } = point.share;
            format!("{draws},{success},{low},{high},{}", point.exact)
        });
        text += &format!("{part},{network},{n},{d},{m},{a0},{a1},{b},{c},{cross},{measured},{reference},{predicted}\n");
    };
    let network = |point: &BridgePoint| match point.order {
        Some(order) => point.series.network(order).to_string(),
        None => point.series.name().to_owned(),
    };
    if let Some(reference) = &report.reference {
        for row_of in &reference.figures {
            let point = &row_of.point;
            row("reference", point.network.to_string(), &point.setting, Some(point), row_of.reference.to_string(), String::new());
        }
        for order in &reference.orders {
            let BridgePoint { setting, point, predicted, .. } = &order.found;
            let stated = order.found.series.network(order.reference).to_string();
            row("reference-bridge", network(&order.found), setting, point.as_ref(), stated, predicted.to_string());
        }
    }
    for point in &report.points {
        row("sweep", point.network.to_string(), &point.setting, Some(point), String::new(), String::new());
    }
    for point in &report.bridge {
        row("bridge", network(point), &point.setting, point.point.as_ref(), String::new(), point.predicted.to_string());
    }
    text
}
