//! Results as a page: what was asked and found, then figures, tables, and everything that is needed to doubt it.

use std::path::Path;

use termwise_report::{Block, Cell, Document, Documented, Section, Table, Tone};
use termwise_train::provenance;

use super::declaration::{Declaration, FILE as CLAIMS_FILE};
use super::interval::Numbers;
use super::mqar::SOLVED;
use super::results::{ClaimOutcome, Outcome, Results, Run, Summary, TaskOutcome};
use super::text::TOKENS as TEXT_TOKENS;
use super::theorem::Theorem;
use super::{FILE, FORMAT, Id, Metric, Scale, Verdict};
use super::{figures, text_page};
use crate::{Error, separation};

/// Writes `index.html` with its figures and tables into the folder of results.
pub fn write(results: &Results, folder: &Path) -> Result<std::path::PathBuf, Error> {
    Ok(page(results, Some(folder)).write(folder)?)
}

impl Documented for Results {
    const KIND: &'static str = "results";
    const VERSION: u32 = FORMAT;

    /// Without the settings of runs, which lie beside the file.
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
        for (id, _, claim) in notable {
            lead.push(badge(claim.decision.verdict, format!("**{}** {}", id.name().to_uppercase(), claim.with_numbers())));
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

/// The page; settings of runs are read from the folder where they are there, and runs that are not there are not linked.
pub fn page(results: &Results, folder: Option<&Path>) -> Document {
    let results = &match folder {
        Some(folder) => without_missing(results, folder),
        None => results.clone(),
    };
    let mut sections = text_page::sections(results);
    sections.extend(results.experiments.iter().map(|outcome| experiment(outcome, results)));
    sections.extend(results.theorems.iter().map(theorem));
    sections.extend(left_out(results));
    sections.extend(failed(results));
    let settings = |run: &Run| std::fs::read_to_string(folder?.join(format!("{}.toml", run.folder))).ok();
    let own = if results.runs.iter().any(|run| run.tuning) { "; where variants have their own, also by learning rate" } else { "" };
    let text = format!("Everything on this page stands in [{FILE}]({FILE}); on each task runs differ by attention and seed alone{own}.");
    let blocks = std::iter::once(Block::Text(text)).chain(all_runs(&results.runs, settings)).collect();
    sections.push(Section { heading: "Runs and settings".into(), blocks });
    sections.push(conditions(results));
    let about = match results.scale {
        _ if of_papers(results) => "Softmax attention and linear attention, term by term",
        Scale::Text => "Loss on text by Taylor order and by bytes of state",
        Scale::Mini | Scale::Zoology => "Multi-query associative recall",
        _ => "Orders, write rules, decays, windows",
    };
    Document { title: format!("{about}: scale {}", results.scale.name()), lead: lead(results), sections }
}

/// Whether anything in it repeats a paper.
fn of_papers(results: &Results) -> bool {
    !results.theorems.is_empty() || results.experiments.iter().any(|outcome| outcome.id.is_of_a_paper())
}

/// A file of results may have been copied without its runs.
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

fn verdicts(claims: &[ClaimOutcome]) -> impl Iterator<Item = Block> {
    claims.iter().map(|claim| badge(claim.decision.verdict, format!("{}. {}", claim.with_numbers(), claim.with_rule())))
}

/// The story in three pictures with a sentence each; what was claimed and decided folds away below it.
fn lead(results: &Results) -> Vec<Block> {
    let of_papers = of_papers(results);
    let mut blocks = text_page::lead(results);
    if matches!(results.scale, Scale::Mini | Scale::Zoology) {
        blocks.push(Block::Text(format!(
            "{ABOUT_MQAR} A run has solved the task if its accuracy on the test examples is at least {SOLVED}."
        )));
    } else if blocks.is_empty() && results.scale != Scale::Text {
        blocks.push(Block::Text(if of_papers { ABOUT_PAPERS } else { ABOUT_OWN }.into()));
        if of_papers && results.scale == Scale::Minute {
            blocks.push(Block::Text(MINUTE_SETTING.into()));
        }
    }
    let pictures = [
        ("overview", figures::overview(results), OVERVIEW),
        ("orders", figures::orders(results), ORDERS),
        ("memory", figures::memory(results), MEMORY),
    ];
    // They tell the story of the papers.
    let pictures = pictures.into_iter().filter(|_| of_papers);
    blocks.extend(
        pictures
            .filter_map(|(name, figure, sentence)| Some(Block::Figure { name: name.into(), figure: figure?, caption: sentence.into() })),
    );
    blocks.push(totals(results));
    if let builds @ [_, _, ..] = &results.builds()[..] {
        blocks.push(Block::Text(runs_made_by(builds)));
    }
    let distinct = results.distinct();
    let many = distinct.len() > AT_ONCE;
    let mut decided = Vec::new();
    if many {
        decided.push(Block::Table { name: "claims".into(), table: tally(results) });
    }
    let several = results.experiments.iter().any(|outcome| outcome.tasks.len() > 1);
    for (id, task, claim) in distinct.into_iter().filter(|(_, _, claim)| !many || claim.decision.verdict != Verdict::Reproduced) {
        let ids: Vec<String> = [id].iter().chain(&claim.also).map(|id| id.name().to_uppercase()).collect();
        let place = task.filter(|_| several).map_or(String::new(), |task| format!(" ({task})"));
        let claim_text = format!("**{}**{place} {}", ids.join(", "), claim.with_numbers());
        decided.push(badge(claim.decision.verdict, claim_text));
    }
    decided.push(Block::Text(format!("{} {WHAT_COUNTS} The section of each claim states its rule.", fixed_in_advance(results))));
    blocks.push(Block::Fold { summary: "What was claimed, and what became of it".into(), blocks: decided });
    blocks
}

const ABOUT_PAPERS: &str = "Softmax attention is a sum of recurrent networks, one for each order of the Taylor series of exp; linear attention is the \
    first of them. Documents of the built-in language state facts and ask for them later. Answers can only be recalled, and that is \
    where attentions differ.";
const MINUTE_SETTING: &str = "The settings of this synthetic experiment were chosen so that the effect is visible. Uniform predictions over its 32 values have a loss of \
    ln 32 = 3.466 nats on recall tokens. The tables list the bytes of state of every variant.";
const ABOUT_OWN: &str = "What single orders, a write rule, a decay and a state of far keys do in memories of equal size. Models have one layer, so that \
    the memory does the work and nothing is passed on from layer to layer; each variant has a learning rate of its own.";
const ABOUT_MQAR: &str = "Keys and values are stated once and queried later (MQAR, arXiv 2312.04927). Runs either learn the task or do not, so claims are decided by \
    the number of seeds that solve it, with Fisher's exact two-sided test.";
const OVERVIEW: &str = "**What is lost.** 0 is perfect recall; softmax, the dashed line, recalls, and linear attention does not. Mean, and smallest \
    to largest over seeds";
const ORDERS: &str = "**What brings it back.** Every further order of the series is one more recurrent network. Higher orders approach softmax; the verdicts \
    below state which differences are larger than the spread over seeds. Mean, smallest to largest, and a dot for each seed";
const MEMORY: &str =
    "**What it costs.** A cache grows with the context and is shown at the length of training; a state is the same at any length";

/// How claims over seeds are decided.
const WHAT_COUNTS: &str = "A verdict needs every declared seed: a run that failed or whose last evaluation was not finite leaves its claims \
    undecided. Runs with the same seed see the same data and start from the same weights, so differences are taken seed by seed (paired t); if \
    seeds differ, Welch's interval for unequal variances is used. Variances are never pooled. Holm's correction treats the claims of an \
    experiment, over all its tasks, as one family.";

/// Counts of verdicts, and the cost of the runs.
fn totals(results: &Results) -> Block {
    let timing = &results.timing;
    Block::Text(format!(
        "**{} claims: {}.** With Holm's correction within each experiment: {}. Claims that several experiments share are counted once. {} of {} \
         runs finished, {:.0} s of computing, {} at a time.",
        results.distinct().len(),
        counts(|verdict| results.count(verdict)),
        counts(|verdict| results.count_corrected(verdict)),
        timing.finished,
        timing.runs,
        timing.run_seconds,
        timing.parallel
    ))
}

/// `16 reproduced, 7 inconclusive, 0 contradicted, 0 undecided`
fn counts(count: impl Fn(Verdict) -> usize) -> String {
    Verdict::ALL.map(|verdict| format!("{} {}", count(verdict), verdict.name())).join(", ")
}

/// Whether claims, rules, seeds and settings were written before the runs, and whether they changed.
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

/// Lines that the command prints at most, and lines of a claim with its numbers.
const LINES: usize = 25;
const LINES_OF_CLAIM: usize = 3;

/// Claims that a reader takes in at the top of a page. Where there are more, they are counted, and only those that were not reproduced are
/// listed.
const AT_ONCE: usize = 30;

fn tally(results: &Results) -> Table {
    let columns = ["", "claims", "reproduced", "inconclusive", "contradicted", "undecided", "reproduced (Holm)", "contradicted (Holm)"];
    let mut table = Table::new("Verdicts per experiment", columns);
    let mut ids: Vec<Id> = results.claims().map(|(id, _, _)| id).collect();
    ids.dedup();
    for id in ids {
        let own: Vec<&ClaimOutcome> = results.claims().filter(|(other, _, _)| *other == id).map(|(_, _, claim)| claim).collect();
        table.rows.push(tally_row(id.name().to_uppercase(), &own));
    }
    let once: Vec<&ClaimOutcome> = results.distinct().into_iter().map(|(_, _, claim)| claim).collect();
    table.rows.push(tally_row("each once".into(), &once));
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
    let before = if outcome.id.is_of_a_paper() { "The paper" } else { "Known before" };
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
    // A sum that rounding leaves below zero is none.
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
    // Bytes of small states are mostly those of whole vectors.
    let counted: &[&str] = if tuned.is_empty() { &[] } else { &["numbers in it"] };
    let columns = ["variant", "attention"].iter().chain(numbers).chain(&["state"]).chain(counted).chain(tuned);
    let mut columns: Vec<String> = columns.map(|&name| name.to_owned()).collect();
    columns.extend((1..=seeds).map(|seed| format!("seed {seed}")));
    let linked = task.variants.iter().flat_map(|outcome| &outcome.runs).any(|&run| !runs[run].folder.is_empty());
    let leads = if linked { "; each number leads to its run" } else { "" };
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

/// Every run that chose a learning rate; none where all variants have the same.
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
        false => "on the held-out data that variants are compared on as well",
    };
    let title =
        format!("{}: how each learning rate was chosen, by {} with one run of another seed, {data}", task.task, task.metric.short());
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

/// The number of a run, which leads to its folder where that is known.
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

/// Which builds made finished runs, with a warning where they are several.
pub(super) fn runs_made_by(builds: &[(String, usize)]) -> String {
    let list: Vec<String> = builds.iter().map(|(name, count)| format!("{count} by {name}")).collect();
    match builds {
        [] => "no run is finished".into(),
        [(name, _)] => format!("build of all finished runs: {name}"),
        _ => format!("**runs of several builds are mixed here, and their numbers may differ: {}**", list.join("; ")),
    }
}

fn conditions(results: &Results) -> Section {
    let environment = &results.environment;
    let made_by = &environment.provenance;
    let memory = environment.memory.map_or(String::new(), |bytes| format!("{:.0} GB of memory, ", bytes as f64 / 1e9));
    let mut list = vec![
        format!("results of termwise {}{}", made_by.build, if environment.debug { ", compiled for debugging" } else { "" }),
        runs_made_by(&results.builds()),
        format!("{} ({}), {} cores, {memory}{}", made_by.processor, made_by.instructions, environment.cores, environment.system),
        format!("this session took {:.0} s; finished runs of earlier sessions are not counted in it", results.timing.seconds),
    ];
    if !made_by.command.is_empty() {
        list.push(format!("command: `{}`", made_by.command));
    }
    if results.runs.iter().any(|run| run.attention.contains("conv=") && !run.tuning && run.rate.is_none()) {
        list.push(
            "on the built-in language every variant, linear attention too, has the same short convolution over q, k and v, and the \
             same recipe; the paper has none"
                .into(),
        );
    }
    let of_a_paper = results.experiments.iter().any(|outcome| outcome.id.is_of_a_paper());
    if matches!(results.scale, Scale::Mini | Scale::Zoology) {
        list.push("learning rates were chosen with seed 0 on other test examples than those of the comparison".into());
    } else if results.scale == Scale::Text {
        let tokens = results.tokens.unwrap_or(TEXT_TOKENS);
        list.push(format!("{tokens} training tokens per run; learning rates were chosen at a third of them, with seed 0, on another part of the held-out text"));
    } else if results.runs.iter().any(|run| run.tuning) {
        list.push(
            "where variants have learning rates of their own, tasks, sizes and numbers of steps were chosen by looking at softmax, order 2 with the \
             write rule and far orders 0..2, so that these learn within the time; a rate is chosen by one run"
                .into(),
        );
        if results
            .experiments
            .iter()
            .flat_map(|outcome| &outcome.tasks)
            .any(|task| !task.separate_tuning && task.variants.iter().any(|one| one.rate.is_some()))
        {
            list.push("these rates were chosen on the held-out data that decide the claims, with another seed".into());
        }
    }
    if matches!(results.scale, Scale::Minute | Scale::Laptop) && of_a_paper {
        list.push(
            "language, sizes, learning rate and initial weights were chosen by looking at softmax, Norm and the orders of the series, so that \
             these learn within the time; linear attention, gates and the other ablations had no tuning of their own, and part of their \
             distance may be that"
                .into(),
        );
    }
    list.push(
        "a difference counts where its 95 % interval is above 0 (Student's t, paired by seed or Welch's) and it is above both standard \
         deviations and a stated least"
            .into(),
    );
    list.extend((!results.note.is_empty()).then(|| results.note.clone()));
    Section { heading: "Machine, time and conditions".into(), blocks: vec![Block::List(list)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edited_results_are_refused_or_shown() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results/laptop/results.json");
        let text = std::fs::read_to_string(file).expect("results");
        let mut value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        // A page of three experiments takes less time.
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
