//! Cases of a verification, one line each.

use std::io::{self, Write};

use serde::Serialize;
use termwise_lab::verify::{Case, Identity, Measure, Summary, Unit};

use crate::text::{Align, pad};

/// The JSON form.
#[derive(Serialize)]
pub struct Verified<'a> {
    pub seed: u64,
    pub summary: Summary,
    pub cases: &'a [Case],
}

/// Prints cases as they come, under the statement that they are cases of.
#[derive(Default)]
pub struct CasePrinter {
    identity: Option<Identity>,
}

/// Misses that a line names before it counts the rest.
const NAMED: usize = 4;

impl CasePrinter {
    pub fn case(&mut self, case: &Case, out: &mut impl Write) -> io::Result<()> {
        if self.identity.replace(case.identity) != Some(case.identity) {
            writeln!(out, "{}: {}", case.identity.name(), case.identity.statement())?;
        }
        let verdict = match (case.passed(), &case.left_out) {
            (_, Some(_)) => "-   ",
            (true, _) => "ok  ",
            (false, _) => "MISS",
        };
        // File names carry their ending; an expression that is longer pushes its own line only.
        let width = if case.identity == Identity::Golden { 61 } else { 49 };
        writeln!(out, "  {verdict}  {}  {}  {}", pad(&case.subject, width, Align::Left), pad(&case.detail, 28, Align::Left), errors(case))
    }
}

fn errors(case: &Case) -> String {
    if let Some(problem) = case.left_out.as_ref().or(case.problem.as_ref()) {
        return problem.replace('\n', "\n        ");
    }
    let missed: Vec<String> = case.measures.iter().filter(|measure| !measure.passed()).map(beside_bound).collect();
    if !missed.is_empty() {
        let more = if missed.len() > NAMED { format!(" and {} more", missed.len() - NAMED) } else { String::new() };
        return format!("{}{more}", missed[..missed.len().min(NAMED)].join(", "));
    }
    if case.measures.iter().all(|measure| measure.unit == Unit::Count) {
        return "bit-identical".into();
    }
    // Outputs and the worst of everything else.
    let shown = |measure: &Measure| format!("{} {}", measure.what, number(measure));
    let outputs =
        case.measures.iter().filter(|measure| ["y", "logits", "loss"].contains(&measure.what.as_str()) || measure.what.ends_with(": y"));
    let mut parts: Vec<String> = outputs.map(shown).collect();
    match case.worst() {
        Some(worst) if parts.iter().all(|part| *part != shown(worst)) => parts.push(format!("worst {}", beside_bound(worst))),
        _ => {}
    }
    parts.join("  ")
}

fn beside_bound(measure: &Measure) -> String {
    match measure.unit {
        Unit::Count => format!("{} {}", measure.what, number(measure)),
        _ => format!("{} {} of {:.0e}", measure.what, number(measure), measure.bound),
    }
}

fn number(measure: &Measure) -> String {
    match measure.unit {
        Unit::Count => format!("{}", measure.error),
        _ => format!("{:.1e}", measure.error),
    }
}

/// The last line.
pub fn summary(summary: Summary, seed: u64, out: &mut impl Write) -> io::Result<()> {
    let Summary { cases, missed, left_out } = summary;
    let besides = if left_out > 0 { format!(", {left_out} left out") } else { String::new() };
    match missed {
        0 => writeln!(out, "{cases} cases, all pass{besides} (seed {seed})"),
        _ => writeln!(out, "{cases} cases, {missed} MISSED{besides} (seed {seed})"),
    }
}
