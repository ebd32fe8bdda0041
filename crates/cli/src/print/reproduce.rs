//! Verdicts and tables of a reproduction.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use termwise_papers::reproduce::paper::PaperPlan;
use termwise_papers::reproduce::{ClaimOutcome, Declared, FILE, Id, Metric, Options, Results, Scale, TaskOutcome, Verdict};
use termwise_report::Unit;

use crate::commands::sweep::duration;
use crate::text::{Align, Table, WIDTH, thousands, wrap};

const NONE: &str = "–";

/// What is about to be run.
pub fn announce(options: &Options, declared: &Declared, out: &mut impl Write) -> io::Result<()> {
    let names: Vec<&str> = declared.experiments.iter().map(|experiment| experiment.id.name()).collect();
    let runs = declared.schedule.plan.jobs.len();
    let seeds = options.seeds.unwrap_or(options.scale.seeds());
    let seeds = if seeds == 1 { "1 seed".into() } else { format!("{seeds} seeds") };
    let line = format!(
        "{} at scale {}: {runs} runs with {seeds} each, {} at a time, in {}",
        names.join(", "),
        options.scale.name(),
        options.threads.min(runs.max(1)),
        options.out.display()
    );
    writeln!(out, "{}", wrap(&line, 2, WIDTH))?;
    if options.scale == Scale::Minute && !options.data.is_empty() {
        writeln!(out, "note: --data is used at scale laptop and paper; this scale has no time for text")?;
    }
    out.flush()
}

/// One line for every claim, a table for every task, and where the rest is.
pub fn results(results: &Results, folder: &Path, out: &mut impl Write) -> io::Result<()> {
    for outcome in &results.experiments {
        writeln!(out, "\n{}  {}", outcome.id.name().to_uppercase(), outcome.question)?;
        writeln!(out, "  the paper: {}", wrap(&outcome.paper, 13, WIDTH))?;
        if let Some(inside) = results.inside.as_ref().filter(|_| outcome.id == Id::E6) {
            writeln!(out, "\n{}", inside.table().to_text(WIDTH))?;
            inside.claims.iter().try_for_each(|claim| writeln!(out, "  {}", wrap(&claim_line(claim), 4, WIDTH)))?;
            continue;
        }
        for task in &outcome.tasks {
            writeln!(out, "\n  {}, mean ± standard deviation over seeds, nats", task.task)?;
            variants(task, results).iter().try_for_each(|line| writeln!(out, "    {line}"))?;
            writeln!(out)?;
            task.claims.iter().try_for_each(|claim| writeln!(out, "  {}", wrap(&claim_line(claim), 4, WIDTH)))?;
        }
    }
    for theorem in &results.theorems {
        writeln!(out, "\n{}  {}", theorem.id.name().to_uppercase(), wrap(&theorem.question, 4, WIDTH))?;
        writeln!(out, "  the paper: {}", wrap(&theorem.paper, 13, WIDTH))?;
        writeln!(out, "  {}\n", wrap(&theorem.basis, 2, WIDTH))?;
        theorem.claims.iter().try_for_each(|claim| writeln!(out, "  {}", wrap(&claim_line(claim), 4, WIDTH)))?;
    }
    for left_out in &results.left_out {
        writeln!(out, "\n{}  left out: {}", left_out.id.name().to_uppercase(), wrap(&left_out.reason, 4, WIDTH))?;
    }
    for run in results.runs.iter().filter(|run| run.status == "failed") {
        writeln!(out, "\nfailed: {} on {}, seed {}: {}", run.attention, run.task, run.seed, wrap(&run.note, 4, WIDTH))?;
    }
    let [reproduced, not_visible, contradicted] =
        [Verdict::Reproduced, Verdict::NotVisible, Verdict::Contradicted].map(|verdict| results.count(verdict));
    let timing = &results.timing;
    writeln!(out, "\nclaims: {reproduced} reproduced, {not_visible} not visible at this scale, {contradicted} contradicted")?;
    let took = duration(Duration::from_secs_f64(timing.seconds));
    writeln!(out, "{} of {} runs finished; this session took {took} on {} cores", timing.finished, timing.runs, results.environment.cores)?;
    if results.environment.debug {
        writeln!(out, "note: this program was compiled for debugging; `cargo run --release` is faster")?;
    }
    writeln!(out, "{}\n{}", folder.join(FILE).display(), folder.join("index.html").display())
}

fn claim_line(claim: &ClaimOutcome) -> String {
    format!("{}: {}", claim.decision.verdict.name(), claim.with_numbers())
}

fn variants(task: &TaskOutcome, results: &Results) -> Vec<String> {
    let recall = task.metric == Metric::Recall;
    let mut table = Table::new([Align::Left, Align::Right, Align::Right, Align::Right, Align::Right, Align::Left]);
    let heads = if recall { ["recall", "rest", "excess"] } else { ["loss", "", ""] };
    table.row(["", heads[0], heads[1], heads[2], "state", "runs"]);
    for outcome in &task.variants {
        let number = |spread: Option<termwise_papers::reproduce::Spread>| spread.map_or(NONE.to_owned(), |spread| spread.to_string());
        let numbers = if recall {
            [outcome.recall, outcome.rest, outcome.excess].map(number)
        } else {
            [number(outcome.loss), String::new(), String::new()]
        };
        let state = outcome.state_bytes.map_or(NONE.into(), |bytes| {
            format!("{}{}", Unit::Bytes.format(bytes as f64), if outcome.constant_state { "" } else { ", grows" })
        });
        let runs: Vec<&str> = outcome.runs.iter().map(|&run| &results.runs[run].hash[..6]).collect();
        let [a, b, c] = numbers;
        table.row([outcome.variant.name.clone(), a, b, c, state, runs.join(" ")]);
    }
    table.lines()
}

/// What the paper's own runs would cost.
pub fn paper(plan: &PaperPlan, folder: &Path, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "The paper's own runs, planned and not started; --run-paper starts them\n")?;
    let mut table = Table::new([Align::Left, Align::Left, Align::Right, Align::Right, Align::Right, Align::Right, Align::Left]);
    table.row(["task", "variant", "parameters", "tokens", "FLOPs", "time here", "settings"]);
    for run in &plan.runs {
        let time = format!("{:.1} days", run.seconds_here / 86_400.0);
        table.row([
            run.task.clone(),
            run.variant.clone(),
            thousands(run.parameters),
            format!("{:.1e}", run.tokens as f64),
            format!("{:.1e}", run.flops),
            time,
            format!("runs/{}.toml", run.hash),
        ]);
    }
    table.lines().iter().try_for_each(|line| writeln!(out, "  {line}"))?;
    writeln!(out)?;
    for total in &plan.totals {
        writeln!(out, "  on {}: {:.0} days for all {} runs one after the other", total.title, total.seconds / 86_400.0, plan.runs.len())?;
    }
    writeln!(out, "\nAssumed")?;
    plan.assumptions.iter().try_for_each(|line| writeln!(out, "  · {}", wrap(line, 4, WIDTH)))?;
    writeln!(out, "\nsettings of every run, for `termwise train --config`: {}", folder.join("runs").display())?;
    plan.sweeps.iter().try_for_each(|sweep| writeln!(out, "for `termwise sweep`: {}", folder.join(sweep).display()))
}
