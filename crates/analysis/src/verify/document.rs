//! A verification for people: counts by check, every miss, and all cases for whoever asks.

use termwise_report::{Block, Cell, Document, Documented, Section, Table, Tone, Unit as Amount};

use super::{Case, Identity, Measure, Summary, Unit, Verification};

/// Misses of a case that are named before the rest is counted.
const NAMED: usize = 4;

impl Documented for Verification {
    const KIND: &'static str = "verification";

    fn document(&self) -> Document {
        let Summary { cases, missed, left_out } = self.summary;
        let seed = self.seed;
        let besides = if left_out > 0 { format!(", {left_out} left out") } else { String::new() };
        let all = match missed {
            0 => Block::badge(Tone::Good, "all pass", format!("{cases} cases{besides} (seed {seed})")),
            _ => Block::badge(Tone::Bad, format!("{missed} missed"), format!("of {cases} cases{besides} (seed {seed})")),
        };
        let mut table =
            Table::new("Largest: the share of its bound that the worst comparison takes", ["check", "cases", "missed", "largest", ""]);
        let mut sections = Vec::new();
        let mut details = Vec::new();
        for identity in Identity::ALL {
            let cases: Vec<&Case> = self.cases.iter().filter(|case| case.identity == identity).collect();
            if cases.is_empty() {
                continue;
            }
            let missed: Vec<&&Case> = cases.iter().filter(|case| !case.passed()).collect();
            let worst = cases.iter().filter_map(|case| case.worst()).map(Measure::strain).fold(0.0, f64::max);
            table.rows.push(vec![
                Cell::code(identity.name()),
                Cell::count(cases.len()),
                Cell::count(missed.len()),
                Cell::Amount(worst, Amount::Percent),
                Cell::text(identity.statement()),
            ]);
            if !missed.is_empty() {
                let miss = |case: &&&Case| {
                    let text = format!("{} {}", case.subject, case.detail);
                    [Block::Badge { tone: Tone::Bad, label: "MISS".into(), text }, Block::Code(errors(case))]
                };
                sections.push(Section::new(format!("Missed: {}", identity.name()), missed.iter().flat_map(miss).collect()));
            }
            let left_out: Vec<Block> = cases.iter().filter_map(|case| Some((case, case.left_out.as_ref()?))).map(left_out_block).collect();
            if !left_out.is_empty() {
                sections.push(Section::new(format!("Left out: {}", identity.name()), left_out));
            }
            let mut all = Table::new(identity.statement(), ["", "case", "sizes", "errors"]);
            let mark = |case: &Case| match (case.passed(), &case.left_out) {
                (_, Some(_)) => Cell::text("-"),
                (true, _) => Cell::text("ok"),
                (false, _) => Cell::text("MISS"),
            };
            all.rows.extend(
                cases.iter().map(|case| vec![mark(case), Cell::code(&case.subject), Cell::text(&case.detail), Cell::text(errors(case))]),
            );
            let blocks = vec![Block::table(format!("cases-{}", identity.name()), all)];
            details.push(Block::Details { summary: format!("Every case of {}", identity.name()), blocks });
        }
        sections.push(Section::new("All cases", details));
        Document { title: "Does this build compute what it says?".into(), lead: vec![Block::table("checks", table), all], sections }
    }
}

fn left_out_block((case, why): (&&Case, &String)) -> Block {
    Block::badge(Tone::Open, &case.subject, why)
}

fn errors(case: &Case) -> String {
    if let Some(problem) = case.left_out.as_ref().or(case.problem.as_ref()) {
        return problem.clone();
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
    let outputs = case.measures.iter().filter(|measure| {
        let what = measure.what.as_str();
        ["y", "logits", "loss"].contains(&what) || what.ends_with(": y")
    });
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

#[cfg(test)]
mod tests {
    use super::*;
    use termwise_report::Terminal;

    #[test]
    fn misses_are_named_and_read_again() {
        let mut cases = vec![Case::new(Identity::Fused, "softmax"), Case::new(Identity::Golden, "a [b](c)\u{1b}.safetensors")];
        cases[0].measure("y", 1e-7, 1e-5, Unit::RelativeRms);
        cases[1].measure("logits", f64::NAN, 1e-4, Unit::RelativeRms);
        let found = Verification { seed: 3, summary: Summary { cases: 2, missed: 1, left_out: 0 }, cases };
        let text = found.document().to_terminal(&Terminal::default());
        assert!(text.contains("✗ 1 missed: of 2 cases (seed 3)") && text.contains("  logits NaN of 1e-4"), "{text}");
        assert!(!text.contains("y 1.0e-7"), "{text}");
        let text = found.document().to_terminal(&Terminal { details: true, ..Terminal::default() });
        assert!(text.contains("y 1.0e-7"), "{text}");
        termwise_report::reads_again(&found);
    }

    #[test]
    fn what_is_left_out_is_said_and_no_miss() {
        let case = Case { left_out: Some("nobody computes it".into()), ..Case::new(Identity::Golden, "levels.safetensors") };
        let mut summary = Summary::default();
        summary.count(&case);
        assert_eq!(summary, Summary { cases: 1, missed: 0, left_out: 1 });
        let found = Verification { seed: 3, summary, cases: vec![case] };
        let text = found.document().to_terminal(&Terminal::default());
        assert!(text.contains("1 left out") && text.contains("nobody computes it"), "{text}");
        termwise_report::reads_again(&found);
    }
}
