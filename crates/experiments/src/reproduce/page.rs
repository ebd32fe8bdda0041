//! The HTML report of results: answer and figure, verdicts, then figures and tables of each experiment, runs and settings.

use std::path::Path;

use termwise_report::{Block, Cell, Document, Documented, Section, Table, Tone};
use termwise_train::provenance;

use super::declaration::{Declaration, FILE as CLAIMS_FILE};
use super::interval::Numbers;
use super::list::series;
use super::mqar::SOLVED;
use super::results::{ClaimOutcome, Outcome, Results, Run, Summary, TaskOutcome};
use super::text::TOKENS as TEXT_TOKENS;
use super::theorem::Theorem;
use super::{FILE, FORMAT, Id, LINEAR, Metric, SOFTMAX, Scale, Verdict};
use super::{figures, text_page};
use crate::{Error, separation};

/// Writes `index.html` with its figures and tables into the folder of results.
pub fn write(results: &Results, folder: &Path) -> Result<std::path::PathBuf, Error> {
    Ok(page(results, Some(folder)).write(folder)?)
}

impl Documented for Results {
    const KIND: &'static str = "results";
    const VERSION: u32 = FORMAT;

    /// Without the settings of runs, which are stored next to the file.
    fn document(&self) -> Document {
        page(&self.decided(), None)
    }

    /// Verdicts per experiment, and the claims that were contradicted or could not be decided.
    fn summary(&self) -> Document {
        let decided = self.decided();
        let mut lead = vec![totals(&decided), Block::Table { name: "claims".into(), table: tally(&decided) }];
        let notable = |claim: &ClaimOutcome| matches!(claim.decision.verdict, Verdict::Contradicted | Verdict::Undecided);
        let mut notable: Vec<_> = decided.distinct().into_iter().filter(|(_, _, claim)| notable(claim)).collect();
        let rows = decided.claims().map(|(id, _, _)| id).collect::<std::collections::BTreeSet<Id>>().len();
        let more = notable.split_off(notable.len().min((LINES.saturating_sub(rows + 10) / LINES_OF_CLAIM).max(1))).len();
        let place = places(&decided);
        for (id, task, claim) in notable {
            lead.push(badge(claim.decision.verdict, format!("**{}**{} {}", id.name().to_uppercase(), place(task), claim.with_numbers())));
        }
        if more > 0 {
            lead.push(Block::Text(format!("{more} more claims that were contradicted or could not be decided are in the report.")));
        }
        Document { title: String::new(), lead, sections: Vec::new() }
    }

    fn validate(&self, _: &serde_json::Value) -> Result<(), String> {
        let variants = self.experiments.iter().flat_map(|experiment| &experiment.tasks).flat_map(|task| &task.variants);
        match variants.flat_map(|outcome| outcome.runs.iter().chain(&outcome.tuning)).find(|run| **run >= self.runs.len()) {
            Some(run) => Err(format!("a variant names run {run} of {}", self.runs.len())),
            None => Ok(()),
        }
    }
}

/// The report. Settings of runs are read from the folder, and runs without files are not linked.
pub fn page(results: &Results, folder: Option<&Path>) -> Document {
    let results = &match folder {
        Some(folder) => without_missing(results, folder),
        None => results.clone(),
    };
    let mut sections = text_page::sections(results);
    sections.extend(more_figures(results));
    sections.extend(results.experiments.iter().map(|outcome| experiment(outcome, results)));
    sections.extend(results.theorems.iter().map(theorem));
    sections.extend(left_out(results));
    sections.extend(failed(results));
    let settings = |run: &Run| std::fs::read_to_string(folder?.join(format!("{}.toml", run.folder))).ok();
    let own = if results.runs.iter().any(|run| run.tuning) { ", and in the learning rate if it is tuned per variant" } else { "" };
    let text = format!("[{FILE}]({FILE}) contains everything in this report. Runs of a task differ only in attention and seed{own}.");
    let blocks = std::iter::once(Block::Text(text)).chain(all_runs(&results.runs, settings)).collect();
    sections.push(Section { heading: "Runs and settings".into(), blocks });
    sections.push(conditions(results));
    let title = match results.scale {
        _ if of_papers(results) => "Softmax and linear attention, order by order",
        Scale::Text => "Loss on text by Taylor order and by bytes of state",
        Scale::Mini | Scale::Zoology => "Multi-query associative recall",
        _ => "Orders, write rules, decays and windows",
    };
    Document { title: title.into(), lead: lead(results), sections }
}

/// Whether any experiment is from a paper.
fn of_papers(results: &Results) -> bool {
    !results.theorems.is_empty() || results.experiments.iter().any(|outcome| outcome.id.is_of_a_paper())
}

/// Results may have been copied without their runs.
fn without_missing(results: &Results, folder: &Path) -> Results {
    let mut results = results.clone();
    for run in &mut results.runs {
        if !folder.join(format!("{}.toml", run.folder)).is_file() {
            run.folder.clear();
        }
    }
    results
}

fn badge(verdict: Verdict, claim: String) -> Block {
    let tone = match verdict {
        Verdict::Reproduced => Tone::Good,
        Verdict::Inconclusive | Verdict::Undecided => Tone::Open,
        Verdict::Contradicted => Tone::Bad,
    };
    Block::badge(tone, verdict.name(), claim)
}

/// Verdicts with their numbers, and the rules in a collapsed section.
fn verdicts(claims: &[ClaimOutcome]) -> impl Iterator<Item = Block> {
    let rules: Vec<String> = claims.iter().map(|claim| format!("{}. {}", claim.text, claim.with_rule())).collect();
    let rules = (!rules.is_empty()).then(|| Block::Fold { summary: "Rules of these claims".into(), blocks: vec![Block::List(rules)] });
    claims.iter().map(|claim| badge(claim.decision.verdict, claim.with_numbers())).chain(rules)
}

/// The answer in two sentences and one figure, the counts of verdicts, and the claims in a collapsed section.
fn lead(results: &Results) -> Vec<Block> {
    let mut blocks = text_page::lead(results);
    if blocks.is_empty() {
        blocks = match results.scale {
            Scale::Text => Vec::new(),
            Scale::Mini | Scale::Zoology => text_page::mqar_lead(results),
            _ if of_papers(results) => recall_lead(results),
            _ => vec![Block::Text(ABOUT_OWN.into())],
        };
    }
    blocks.push(totals(results));
    if let builds @ [_, _, ..] = &results.builds()[..] {
        blocks.push(Block::Text(runs_made_by(builds)));
    }
    let distinct = results.distinct();
    let many = distinct.len() > MAX_LISTED_CLAIMS;
    let mut decided = Vec::new();
    if many {
        decided.push(Block::Table { name: "claims".into(), table: tally(results) });
    }
    let place = places(results);
    for (id, task, claim) in distinct.into_iter().filter(|(_, _, claim)| !many || claim.decision.verdict != Verdict::Reproduced) {
        let ids: Vec<String> = [id].iter().chain(&claim.also).map(|id| id.name().to_uppercase()).collect();
        let claim_text = format!("**{}**{} {}", ids.join(", "), place(task), claim.with_numbers());
        decided.push(badge(claim.decision.verdict, claim_text));
    }
    decided.push(Block::Text(format!("{} {STATISTICAL_RULES} The section of each claim states its rule.", fixed_in_advance(results))));
    blocks.push(Block::Fold { summary: "Claims and verdicts".into(), blocks: decided });
    blocks
}

/// The task of a claim in parentheses; empty if every experiment has one task.
fn places(results: &Results) -> impl Fn(Option<&str>) -> String {
    let several = results.experiments.iter().any(|outcome| outcome.tasks.len() > 1);
    move |task| task.filter(|_| several).map_or(String::new(), |task| format!(" ({task})"))
}

/// The summary at the top of the report on associative recall.
fn recall_lead(results: &Results) -> Vec<Block> {
    let (Some((task, seen)), Some(figure)) = (figures::recalling(results), figures::overview(results)) else {
        return vec![Block::Text(ABOUT_PAPERS.into())];
    };
    let mean = |name: &str| seen.iter().find(|outcome| outcome.variant.name == name)?.metric.map(|found| found.mean.max(0.0));
    let chance = results.scale.chance().map_or(String::new(), |chance| format!("; uniform predictions have {chance:.2}"));
    let mut sentences = Vec::new();
    if let (Some(softmax), Some(linear)) = (mean(SOFTMAX), mean(LINEAR)) {
        sentences.push(format!(
            "On synthetic associative recall, softmax attention has a loss of {softmax:.3} nats per recall token and linear attention (ELU + 1) \
             {linear:.2}{chance}."
        ));
    }
    let orders = [1, 2, 4, 10].into_iter().filter_map(|order| Some((order, mean(&series(order))?)));
    let orders: Vec<String> = orders.map(|(order, loss)| format!("{loss:.3} up to order {order}")).collect();
    if !orders.is_empty() {
        sentences.push(format!("The Taylor series of exp has a loss of {}.", orders.join(", ")));
    }
    let seeds = task.variants.iter().map(|outcome| outcome.runs.len()).max().unwrap_or(0);
    let chosen = if results.scale == Scale::Minute { format!(" {MINUTE_SETTING}") } else { String::new() };
    let caption = format!("Mean, minimum and maximum over {}. {STATES}{chosen}", termwise_report::counted(seeds, "seed"));
    vec![Block::Text(sentences.join(" ")), Block::Figure { name: "overview".into(), figure, caption }]
}

/// Figures after the summary of the experiments on associative recall.
fn more_figures(results: &Results) -> Option<Section> {
    let all = [("orders", figures::orders(results), ORDERS), ("memory", figures::memory(results), STATES)];
    let block = |(name, figure, caption): (&str, Option<termwise_report::Figure>, &str)| {
        Some(Block::Figure { name: name.into(), figure: figure?, caption: caption.into() })
    };
    let blocks: Vec<Block> = all.into_iter().filter(|_| of_papers(results)).filter_map(block).collect();
    (!blocks.is_empty()).then(|| Section::new("Training curves and bytes of state", blocks))
}

const ABOUT_PAPERS: &str = "Softmax attention is a sum of recurrent networks, one for each order of the Taylor series of exp; linear attention is the \
    first of them.";
const MINUTE_SETTING: &str = "**The settings of this synthetic experiment were chosen so that the effect is visible.**";
const STATES: &str = "Bytes: recurrent state, and for softmax and Norm the KV cache at the length of training.";
const ABOUT_OWN: &str = "The effect of single orders, a write rule, a decay and a state of far keys at equal bytes of state. Models have one layer, and \
    each variant has its own learning rate.";
const ORDERS: &str = "Mean, range and single runs over seeds.";

/// The statistical rules.
const STATISTICAL_RULES: &str = "A verdict needs every declared seed: a run that failed or whose last evaluation was not finite leaves its claims \
    undecided. Runs with the same seed see the same data and start from the same weights, so differences are taken seed by seed (paired t); if \
    seeds differ, Welch's interval for unequal variances is used. Variances are never pooled. Holm's correction treats the claims of an \
    experiment, over all its tasks, as one family.";

/// Counts of verdicts, and the cost of the runs.
fn totals(results: &Results) -> Block {
    let timing = &results.timing;
    let distinct = results.distinct().len();
    let shared = if distinct < results.claims().count() { " Claims that experiments share are counted once." } else { "" };
    let claims = match distinct {
        0 => "**No claims were declared.**".into(),
        _ => format!(
            "**{distinct} claims: {}.** With Holm's correction within each experiment: {}.{shared}",
            counts(|verdict| results.count(verdict)),
            counts(|verdict| results.count_corrected(verdict)),
        ),
    };
    Block::Text(format!(
        "{claims} {} of {} runs finished, in {} of total run time.",
        timing.finished,
        timing.runs,
        termwise_report::duration(timing.run_seconds),
    ))
}

/// `16 reproduced, 7 inconclusive, 0 contradicted, 0 undecided`
fn counts(count: impl Fn(Verdict) -> usize) -> String {
    Verdict::ALL.map(|verdict| format!("{} {}", count(verdict), verdict.name())).join(", ")
}

/// Whether claims, rules, seeds and settings were written before the runs, and whether they changed afterwards.
fn fixed_in_advance(results: &Results) -> String {
    if results.experiments.is_empty() {
        return String::new();
    }
    if results.declarations.is_empty() {
        return "This file does not record whether claims and rules were fixed before the runs.".into();
    }
    let named = |declaration: &Declaration| {
        format!("{} (blake3 {})", declaration.experiment.name().to_uppercase(), declaration.hash.chars().take(12).collect::<String>())
    };
    let (before, after): (Vec<&Declaration>, Vec<&Declaration>) = results.declarations.iter().partition(|found| found.is_in_advance());
    let mut text = Vec::new();
    if !before.is_empty() {
        let names: Vec<String> = before.iter().map(|declaration| named(declaration)).collect();
        text.push(format!(
            "Claims, rules, seeds and settings were written to {CLAIMS_FILE} before the first run had ended and have not changed since: {}.",
            names.join(", ")
        ));
    }
    for declaration in after {
        let how = if declaration.changed { "changed" } else { "written" };
        let runs = termwise_report::counted(declaration.ended_before, "run");
        text.push(format!("**Those of {} were {how} after {runs} in this folder had ended.**", named(declaration)));
    }
    text.join(" ")
}

/// Maximum lines of the command's output, and lines of a claim with its numbers.
const LINES: usize = 25;
const LINES_OF_CLAIM: usize = 3;

/// Claims that are listed at the top of a report. If there are more, they are counted, and only those that were not reproduced are listed.
const MAX_LISTED_CLAIMS: usize = 30;

fn tally(results: &Results) -> Table {
    let columns = ["", "claims", "reproduced", "inconclusive", "contradicted", "undecided", "reproduced (Holm)", "contradicted (Holm)"];
    let mut table = Table::new("Verdicts per experiment", columns);
    let mut ids: Vec<Id> = results.claims().map(|(id, _, _)| id).collect();
    ids.dedup();
    for id in ids {
        let own: Vec<&ClaimOutcome> = results.claims().filter(|(other, _, _)| *other == id).map(|(_, _, claim)| claim).collect();
        table.rows.push(tally_row(id.name().to_uppercase(), &own));
    }
    if table.rows.len() > 1 {
        let once: Vec<&ClaimOutcome> = results.distinct().into_iter().map(|(_, _, claim)| claim).collect();
        table.rows.push(tally_row("each once".into(), &once));
    }
    table
}

fn tally_row(name: String, claims: &[&ClaimOutcome]) -> Vec<Cell> {
    let raw = |verdict| claims.iter().filter(|claim| claim.decision.verdict == verdict).count();
    let corrected = |verdict| claims.iter().filter(|claim| claim.decision.corrected.unwrap_or(claim.decision.verdict) == verdict).count();
    let holm = [Verdict::Reproduced, Verdict::Contradicted].map(corrected);
    let counts = [claims.len()].into_iter().chain(Verdict::ALL.map(raw)).chain(holm).map(|count| Cell::Number(count as f64, 0));
    [Cell::text(name)].into_iter().chain(counts).collect()
}

fn experiment(outcome: &Outcome, results: &Results) -> Section {
    let id = outcome.id.name();
    let colours = figures::Colours::of_results(results);
    let before = if outcome.id.is_of_a_paper() { "The paper" } else { "Known results" };
    let mut blocks = vec![Block::Text(format!("{before}: {}", outcome.paper))];
    if let Some(inside) = results.inside.as_ref().filter(|_| outcome.id == Id::E6) {
        blocks.extend(verdicts(&inside.claims));
        blocks.extend(inside.blocks());
        return Section { heading: format!("{} {}", id.to_uppercase(), outcome.question), blocks };
    }
    for (index, task) in outcome.tasks.iter().enumerate() {
        let name = |what: &str| if outcome.tasks.len() > 1 { format!("{id}-{}-{what}", index + 1) } else { format!("{id}-{what}") };
        if outcome.tasks.len() > 1 {
            blocks.push(Block::Text(format!("**On {}**", task.task)));
        }
        blocks.extend(verdicts(&task.claims));
        if let Some(figure) = figures::curves(&id.to_uppercase(), task, &results.runs, &colours) {
            let caption = format!("{}: mean, and smallest to largest over seeds", task.metric.name());
            blocks.push(Block::Figure { name: name("curves"), figure, caption });
        }
        if let Some(figure) = figures::dot_plot(&id.to_uppercase(), task, &colours) {
            let caption = "mean, and smallest to largest over seeds".into();
            blocks.push(Block::Figure { name: name("dots"), figure, caption });
        }
        blocks.push(Block::Table { name: name("table"), table: variants(task, &results.runs) });
        blocks.extend(rates(task, &results.runs).map(|table| Block::Table { name: name("rates"), table }));
    }
    Section { heading: format!("{} {}", id.to_uppercase(), outcome.question), blocks }
}

fn theorem(theorem: &Theorem) -> Section {
    let mut blocks = vec![Block::Text(format!("The paper: {} This is {}.", theorem.paper, theorem.basis))];
    blocks.extend(verdicts(&theorem.claims));
    let figure = match theorem.id {
        Id::Bridge => separation::bridge_figure(&theorem.bridge),
        _ => separation::success_figure(&theorem.points),
    };
    blocks.push(Block::Figure { name: theorem.id.name().into(), figure, caption: String::new() });
    Section { heading: format!("{} {}", theorem.id.name().to_uppercase(), theorem.question), blocks }
}

fn mean_sd(summary: Option<Summary>) -> Cell {
    // Rounding can make a loss of zero slightly negative.
    let mean = |mean: f64| if mean > -5e-4 { mean.max(0.0) } else { mean };
    summary.map_or(Cell::Empty, |summary| Cell::MeanSd(mean(summary.mean), summary.deviation.unwrap_or(f64::NAN), 3))
}

pub(super) fn variants(task: &TaskOutcome, runs: &[Run]) -> Table {
    let seeds = task.variants.iter().map(|outcome| outcome.runs.len()).max().unwrap_or(0);
    let numbers: &[&str] = match task.metric {
        Metric::Recall => &["recall", "rest", "excess over the optimum"],
        Metric::Loss => &["loss"],
        Metric::Beyond => &["within the length of training", "beyond it"],
        Metric::Error => &["accuracy", "solved"],
    };
    let tuned: &[&str] = if task.variants.iter().any(|outcome| !outcome.tuning.is_empty()) { &["learning rate"] } else { &[] };
    // Small states are padded to whole vectors.
    let counted: &[&str] = if tuned.is_empty() { &[] } else { &["numbers in it"] };
    let columns = ["variant", "attention"].iter().chain(numbers).chain(&["state"]).chain(counted).chain(tuned);
    let mut columns: Vec<String> = columns.map(|&name| name.to_owned()).collect();
    columns.extend((1..=seeds).map(|seed| format!("seed {seed}")));
    let linked = task.variants.iter().flat_map(|outcome| &outcome.runs).any(|&run| !runs[run].folder.is_empty());
    let leads = if linked { "; each number links to its run" } else { "" };
    let unit = if task.metric == Metric::Error { "seeds are listed by their share of wrong answers" } else { "nats" };
    let mut table = Table::new(format!("{}: mean ± standard deviation over seeds, {unit}{leads}", task.task), columns);
    for outcome in &task.variants {
        let settings: String = outcome.variant.settings.iter().map(|(key, value)| format!(", {key} = {value}")).collect();
        let mut row = vec![Cell::text(&outcome.variant.name), Cell::code(format!("{}{settings}", outcome.variant.attention))];
        match task.metric {
            Metric::Recall => row.extend([outcome.recall, outcome.rest, outcome.excess].map(mean_sd)),
            Metric::Loss => row.push(mean_sd(outcome.loss)),
            Metric::Beyond => row.extend([outcome.within, outcome.beyond].map(mean_sd)),
            Metric::Error => {
                let accuracy = |error: Summary| Summary { mean: 1.0 - error.mean, ..error };
                row.push(mean_sd(outcome.metric.map(accuracy)));
                let solved = outcome.numbers.iter().filter(|(_, error)| 1.0 - error >= SOLVED).count();
                row.push(Cell::text(format!("{solved} of {}", outcome.runs.len())));
            }
        }
        row.push(outcome.state_bytes.map_or(Cell::Empty, |bytes| Cell::Amount(bytes as f64, termwise_report::Unit::Bytes)));
        if !tuned.is_empty() {
            row.push(outcome.state_numbers.map_or(Cell::Empty, |numbers| Cell::count(numbers as usize)));
            row.push(outcome.rate.map_or(Cell::Empty, |rate| Cell::text(rate.to_string())));
        }
        row.extend(outcome.runs.iter().map(|&run| link(&runs[run], &outcome.numbers)));
        table.rows.push(row);
    }
    table
}

/// Every tuning run; `None` if all variants have the same learning rate.
fn rates(task: &TaskOutcome, runs: &[Run]) -> Option<Table> {
    let mut all: Vec<f64> = task.variants.iter().flat_map(|outcome| &outcome.tuning).filter_map(|&run| runs[run].rate).collect();
    all.sort_by(f64::total_cmp);
    all.dedup();
    if all.is_empty() {
        return None;
    }
    let columns = ["variant".to_owned()].into_iter().chain(all.iter().map(|rate| format!("lr {rate}"))).chain(["chosen".to_owned()]);
    let data = match task.separate_tuning {
        true => "on other held-out documents",
        false => "on the held-out data of the comparison",
    };
    let title = format!("{}: choice of learning rates by {} of one run with another seed, {data}", task.task, task.metric.short());
    let mut table = Table::new(title, columns.collect::<Vec<_>>());
    for outcome in &task.variants {
        let cell = |rate: &f64| {
            let run = outcome.tuning.iter().map(|&run| &runs[run]).find(|run| run.rate == Some(*rate));
            run.map_or(Cell::Empty, |run| link(run, &run.number(task.metric).into_iter().collect()))
        };
        let chosen = outcome.rate.map_or(Cell::Empty, |rate| Cell::text(rate.to_string()));
        table.rows.push([Cell::text(&outcome.variant.name)].into_iter().chain(all.iter().map(cell)).chain([chosen]).collect());
    }
    Some(table)
}

/// The number of a run, linked to its folder.
fn link(run: &Run, numbers: &Numbers) -> Cell {
    let number = numbers.iter().find(|(seed, _)| *seed == run.seed);
    let text = number.map_or(run.status.clone(), |(_, x)| format!("{x:.3}"));
    if run.folder.is_empty() { Cell::text(text) } else { Cell::Link(text, format!("{}/metrics.jsonl", run.folder)) }
}

fn left_out(results: &Results) -> Option<Section> {
    let list: Vec<String> = results.left_out.iter().map(|left| format!("**{}**: {}", left.id.name().to_uppercase(), left.reason)).collect();
    (!list.is_empty()).then(|| Section { heading: "Left out".into(), blocks: vec![Block::List(list)] })
}

fn failed(results: &Results) -> Option<Section> {
    let failed = results.runs.iter().filter(|run| run.status == "failed");
    let badge =
        |run: &Run| Block::badge(Tone::Bad, "failed", format!("`{}` on {}, seed {}: {}", run.attention, run.task, run.seed, run.note));
    let blocks: Vec<Block> = failed.map(badge).collect();
    (!blocks.is_empty()).then(|| Section::new("Failed runs", blocks))
}

pub(super) fn all_runs(runs: &[Run], settings_of: impl Fn(&Run) -> Option<String>) -> Vec<Block> {
    let mut table = Table::new("Every run once", ["run", "task", "attention", "seed", "status", "loss", "seconds", "build"]);
    let mut settings = Vec::new();
    for run in runs {
        let loss = run.held_out.map_or(Cell::Empty, |found| Cell::Number(found.loss, 4));
        table.rows.push(vec![
            if run.folder.is_empty() {
                Cell::text(&run.hash)
            } else {
                Cell::Link(run.hash.clone(), format!("{}/metrics.jsonl", run.folder))
            },
            Cell::text(&run.task),
            Cell::code(&run.attention),
            Cell::Number(run.seed as f64, 0),
            Cell::text(if run.note.is_empty() { run.status.clone() } else { format!("{}: {}", run.status, run.note) }),
            loss,
            Cell::Number(run.seconds, 1),
            Cell::text(provenance::names(&run.provenance)),
        ]);
        if let Some(text) = settings_of(run) {
            let summary = format!("{}, {}, seed {}", run.task, run.attention, run.seed);
            settings.push(Block::Details { summary, blocks: vec![Block::Code(text)] });
        }
    }
    vec![
        Block::Details { summary: "All runs".into(), blocks: vec![Block::Table { name: "runs".into(), table }] },
        Block::Details { summary: "Settings of every run, for `termwise train --config`".into(), blocks: settings },
    ]
}

/// The builds of finished runs, with a warning if there are several.
pub(super) fn runs_made_by(builds: &[(String, usize)]) -> String {
    let list: Vec<String> = builds.iter().map(|(name, count)| format!("{count} by {name}")).collect();
    match builds {
        [] => "no run is finished".into(),
        [(name, _)] => format!("build of all finished runs: {name}"),
        _ => format!("**runs of several builds are mixed here; their results may differ: {}**", list.join("; ")),
    }
}

fn conditions(results: &Results) -> Section {
    let environment = &results.environment;
    let made_by = &environment.provenance;
    let memory = environment.memory.map_or(String::new(), |bytes| format!("{:.0} GB of memory, ", bytes as f64 / 1e9));
    let mut list = vec![
        format!("results of termwise {}{}", made_by.build, if environment.debug { ", debug build" } else { "" }),
        runs_made_by(&results.builds()),
        format!("{} ({}), {} cores, {memory}{}", made_by.processor, made_by.instructions, environment.cores, environment.system),
        format!("this session took {:.0} s, excluding runs finished in earlier sessions", results.timing.seconds),
    ];
    if !made_by.command.is_empty() {
        list.push(format!("command: `{}`", made_by.command));
    }
    list.push(format!("scale: `--scale {}`", results.scale.name()));
    if results.runs.iter().any(|run| run.attention.contains("conv=") && !run.tuning && run.rate.is_none()) {
        list.push(
            "on synthetic recall every variant has the same short convolution over q, k and v and the same recipe; the paper has no \
             convolution"
                .into(),
        );
    }
    let of_a_paper = results.experiments.iter().any(|outcome| outcome.id.is_of_a_paper());
    if matches!(results.scale, Scale::Mini | Scale::Zoology) {
        list.push("learning rates were chosen with seed 0 on test examples that the comparison does not use".into());
    } else if results.scale == Scale::Text {
        let tokens = results.tokens.unwrap_or(TEXT_TOKENS);
        list.push(format!("{tokens} training tokens per run; learning rates were chosen at a third of them, with seed 0, on another part of the held-out text"));
    } else if results.runs.iter().any(|run| run.tuning) {
        list.push(
            "tasks, sizes and step counts were chosen so that softmax, order 2 with the delta rule and far orders 0..2 learn within the budget; \
             each learning rate was chosen from one run per rate"
                .into(),
        );
        if results
            .experiments
            .iter()
            .flat_map(|outcome| &outcome.tasks)
            .any(|task| !task.separate_tuning && task.variants.iter().any(|one| one.rate.is_some()))
        {
            list.push("these learning rates were chosen on the held-out data of the comparison, with another seed".into());
        }
    }
    if matches!(results.scale, Scale::Minute | Scale::Laptop) && of_a_paper {
        list.push(
            "task, sizes, learning rate and initialization were chosen so that softmax, Norm and the Taylor orders learn within the budget; \
             linear attention, gates and other ablations were not tuned, which may explain part of their distance"
                .into(),
        );
    }
    list.push(
        "a difference counts if its 95 % interval is above 0 (Student's t, paired by seed or Welch's) and it exceeds both standard \
         deviations and a stated minimum"
            .into(),
    );
    list.extend((!results.note.is_empty()).then(|| results.note.clone()));
    Section { heading: "Machine, time and settings".into(), blocks: vec![Block::List(list)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edited_results_are_refused_or_shown() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results/laptop/results.json");
        let text = std::fs::read_to_string(file).expect("results");
        let mut value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        // Fewer experiments take less time.
        value["experiments"].as_array_mut().expect("experiments").truncate(3);
        let results: Results = termwise_report::read(value).expect("results");
        termwise_report::survives_edits(&results, 300);
        let places = results.experiments.iter().flat_map(|experiment| &experiment.tasks).flat_map(|task| &task.variants);
        let last = places.flat_map(|outcome| &outcome.runs).max().expect("runs");
        let mut none = results.clone();
        none.runs.truncate(*last);
        let saved = serde_json::from_str(&termwise_report::to_json(&none, None)).expect("JSON");
        let error = termwise_report::read::<Results>(saved).map(drop).expect_err("a run is missing").to_string();
        assert!(error.contains(&format!("names run {last} of {last}")), "{error}");
    }
}
