//! Documents of evaluations, finished runs and sweeps.

use serde::{Deserialize, Serialize};
use termwise_report::{Block, Cell, Document, Documented, Section, Table, Tone, thousands};

use crate::eval::{Evaluation, Excess, Part, Windows};
use crate::progress::compact;
use crate::run::Outcome;
use crate::slices::Slices;
use crate::sweep::{Point, Statistic, Summary};

/// The evaluation of a model on data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// The model as requested.
    pub model: String,
    /// The data as requested.
    pub data: Vec<String>,
    /// Whether only the held-out split was used.
    pub held_out_only: bool,
    /// Window length and stride.
    #[serde(flatten)]
    pub windows: Windows,
    /// The measurements.
    #[serde(flatten)]
    pub evaluation: Evaluation,
    /// The loss by associative-recall hit, training frequency and position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slices: Option<Slices>,
}

impl Documented for Evaluated {
    const KIND: &'static str = "evaluation";

    fn document(&self) -> Document {
        let Windows { length, stride, .. } = self.windows;
        let which = if self.held_out_only { "held-out tokens" } else { "tokens" };
        let text =
            format!("{} {which} of {} in windows of {length}, stride {stride}", thousands(self.evaluation.tokens), self.data.join(", "));
        let mut facts = vec![("model".to_owned(), self.model.clone()), ("text".into(), text)];
        facts.extend(facts_of(&self.evaluation));
        let mut lead = vec![Block::Facts(facts)];
        lead.extend(self.slices.iter().flat_map(slice_tables));
        Document { title: String::new(), lead, sections: Vec::new() }
    }
}

/// Tables of the loss by recall hit and frequency, and by position.
fn slice_tables(slices: &Slices) -> Vec<Block> {
    let gram = if slices.ngram == 2 { "bigram".to_owned() } else { format!("{}-gram", slices.ngram) };
    let counted = slices.training_tokens.map_or(String::new(), |tokens| format!(", by its count in {} training tokens", thousands(tokens)));
    let title = format!(
        "Loss where the {gram} that ends in the predicted token occurred earlier in the same context (hit), and elsewhere (rest){counted}"
    );
    let mut table = Table::new(title, ["count in training", "hits", "loss on hits", "rest", "loss on the rest"]);
    let loss = |part: &Part| if part.tokens == 0 { Cell::Empty } else { Cell::Number(part.loss, 4) };
    let mut row = |name: String, hits: &Part, rest: &Part| {
        table.rows.push(vec![Cell::text(name), Cell::Count(hits.tokens), loss(hits), Cell::Count(rest.tokens), loss(rest)]);
    };
    row("all".into(), &slices.hits, &slices.rest);
    for slice in &slices.frequencies {
        let name = match slice.to {
            Some(to) if to == slice.from => to.to_string(),
            Some(to) => format!("{}–{}", thousands(slice.from), thousands(to)),
            None => format!("{} or more", thousands(slice.from)),
        };
        row(name, &slice.hits, &slice.rest);
    }
    let mut positions = Table::new("Loss by position in the context", ["positions", "tokens", "loss"]);
    for slice in &slices.positions {
        let name = if slice.from == slice.to { slice.from.to_string() } else { format!("{}–{}", slice.from, slice.to) };
        positions.rows.push(vec![Cell::text(name), Cell::Count(slice.part.tokens), loss(&slice.part)]);
    }
    vec![Block::table("recall", table), Block::table("positions", positions)]
}

/// Losses in nats per token.
fn facts_of(evaluation: &Evaluation) -> Vec<(String, String)> {
    let Evaluation { loss, bits_per_byte, accuracy, recall, rest, excess, within, beyond, .. } = *evaluation;
    let bits = bits_per_byte.map_or(String::new(), |bits| format!(", {bits:.4} bits per byte"));
    // Computed from the loss: a JSON file has no infinity.
    let mut facts = vec![("loss".to_owned(), format!("{loss:.4}, perplexity {}{bits}", compact(loss.exp(), 3)))];
    let above = |of: Option<f64>| of.map_or(String::new(), |above| format!(", {above:.4} above the best possible"));
    let part = |part: Part, excess: Option<f64>| format!("{:.4} over {} tokens{}", part.loss, thousands(part.tokens), above(excess));
    let excess = excess.unwrap_or(Excess { all: f64::NAN, recall: None, rest: None });
    if excess.all.is_finite() {
        facts[0].1 += &above(Some(excess.all));
    }
    facts.extend(accuracy.map(|accuracy| ("accuracy".into(), format!("{:.1} %", 100.0 * accuracy))));
    facts.extend(recall.map(|recall| ("recall".into(), part(recall, excess.recall))));
    facts.extend(rest.map(|rest| ("rest".into(), part(rest, excess.rest))));
    facts.extend(within.map(|within| ("within the length of training".into(), part(within, None))));
    facts.extend(beyond.map(|beyond| ("beyond it".into(), part(beyond, None))));
    facts
}

impl Documented for Outcome {
    const KIND: &'static str = "run";

    fn document(&self) -> Document {
        let Outcome { folder, step, finished, checkpoint, loss, held_out, diverged, best, skipped, warnings, tokens_per_second } = self;
        let (tone, label) = match (*finished, *diverged) {
            (true, true) => (Tone::Bad, "finished, but diverged"),
            (false, true) => (Tone::Bad, "stopped, diverged"),
            (true, false) => (Tone::Good, "finished"),
            (false, false) => (Tone::Open, "stopped"),
        };
        let mut facts = Vec::new();
        let mut fact = |name: &str, text: String| facts.push((name.to_owned(), text));
        if let Some(loss) = loss {
            fact("training", format!("loss {loss:.4}, {} tokens/s", thousands(*tokens_per_second as u64)));
        }
        if let Some(evaluation) = held_out {
            let parts: Vec<String> = facts_of(evaluation).into_iter().map(|(name, text)| format!("{name} {text}")).collect();
            fact("held-out", parts.join("; "));
        }
        if *diverged {
            fact("held-out", "the loss of the last evaluation is not finite".into());
        }
        if let Some(best) = best {
            fact("best", format!("held-out loss {:.4} at step {}", best.loss, best.step));
        }
        if *skipped > 0 {
            fact("skipped", format!("{skipped} updates"));
        }
        if *warnings > 0 {
            fact("warnings", format!("{warnings}, kept in {}", folder.join(crate::progress::WARNINGS).display()));
        }
        fact("checkpoint", checkpoint.display().to_string());
        let mut lead = vec![Block::badge(tone, label, format!("after step {step}")), Block::Facts(facts)];
        let (text, command) = match finished {
            true => ("Generate text with it (eval, spectrum, truncate and report accept the same name):", "generate"),
            false => ("Continue with:", "train --resume"),
        };
        lead.extend([Block::text(text), Block::Code(format!("termwise {command} {}", folder.display()))]);
        Document { title: String::new(), lead, sections: Vec::new() }
    }
}

impl Documented for Summary {
    const KIND: &'static str = "sweep";

    fn document(&self) -> Document {
        let rates = self.best.iter().any(|best| best.learning_rate.is_some());
        let best = if rates { "At the best learning rate, best first" } else { "Best first" };
        let mut sections = vec![
            Section::new("Mean ± standard deviation over seeds", vec![Block::table("groups", self.groups_table())]),
            Section::new(best, vec![Block::table("best", self.best_table(rates))]),
        ];
        let failed = self.runs.iter().filter(|run| run.status == "failed");
        let failed: Vec<Block> = failed.map(|run| Block::badge(Tone::Bad, format!("run {}", run.hash), run.note.clone())).collect();
        if !failed.is_empty() {
            sections.push(Section::new("Failed", failed));
        }
        Document { title: format!("Sweep: {}", self.metric), lead: Vec::new(), sections }
    }
}

impl Summary {
    fn groups_table(&self) -> Table {
        let all: Vec<&Point> = self.groups.iter().map(|group| &group.point).collect();
        let mut table = Table::new("", ["settings", &self.metric, "runs", "failed", "open"]);
        for group in &self.groups {
            let number = Cell::maybe(group.metrics.get(&self.metric), statistic);
            let counts = [group.finished, group.failed, group.open].map(Cell::count);
            table.rows.push([Cell::text(words(&group.point, &all)), number].into_iter().chain(counts).collect());
        }
        table
    }

    /// With a column for the learning rate if it is an axis.
    fn best_table(&self, rates: bool) -> Table {
        let all: Vec<&Point> = self.best.iter().map(|best| &best.point).collect();
        let columns = ["settings"].into_iter().chain(rates.then_some("lr")).chain([self.metric.as_str(), "note"]);
        let mut table = Table::new("", columns.collect::<Vec<_>>());
        for (i, best) in self.best.iter().enumerate() {
            let behind = match best.beyond_deviation {
                _ if i == 0 => String::new(),
                Some(true) => format!("{:.4} behind", best.behind),
                Some(false) => "no difference beyond the standard deviation over seeds".into(),
                None => format!("{:.4} behind, with one seed", best.behind),
            };
            let edge = if best.at_edge { "the best learning rate is at the edge of the grid; extend the grid" } else { "" };
            let note = [behind.as_str(), edge].into_iter().filter(|note| !note.is_empty()).collect::<Vec<_>>().join("; ");
            let rate = rates.then(|| Cell::maybe(best.learning_rate.as_ref(), Cell::text));
            let cells = [Cell::text(words(&best.point, &all))].into_iter().chain(rate);
            table.rows.push(cells.chain([statistic(&best.metric), Cell::text(note)]).collect());
        }
        table
    }
}

fn statistic(of: &Statistic) -> Cell {
    match of.deviation {
        Some(deviation) => Cell::MeanSd(of.mean, deviation, 4),
        None => Cell::Number(of.mean, 4),
    }
}

/// The values on the axes with several values.
fn words(point: &Point, all: &[&Point]) -> String {
    let several = |key: &str, value: &str| all.iter().copied().flatten().any(|(k, v)| k == key && v != value);
    let words: Vec<String> = point.iter().filter(|(key, value)| several(key, value)).map(|(key, value)| format!("{key}={value}")).collect();
    if words.is_empty() { "the base".into() } else { words.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::{Best, Group, RunRow};

    #[test]
    fn documents_survive_a_json_round_trip() {
        let evaluation = Evaluation {
            tokens: 1000,
            loss: 800.0,
            perplexity: f64::INFINITY,
            bits_per_byte: Some(1.5),
            accuracy: Some(0.75),
            recall: Some(Part { tokens: 10, loss: 0.5 }),
            rest: Some(Part { tokens: 990, loss: 2.5 }),
            excess: Some(Excess { all: 0.25, recall: Some(0.5), rest: None }),
            within: None,
            beyond: Some(Part { tokens: 500, loss: 1.25 }),
        };
        let windows = Windows { batch: 8, length: 64, stride: 32 };
        let found = Evaluated { model: "m".into(), data: vec!["builtin".into()], held_out_only: true, windows, evaluation, slices: None };
        let outcome = Outcome {
            folder: "runs/x".into(),
            step: 7,
            finished: false,
            checkpoint: "runs/x/checkpoints/step-00000007".into(),
            loss: Some(3.0),
            held_out: Some(evaluation),
            diverged: false,
            best: None,
            skipped: 1,
            warnings: 2,
            tokens_per_second: 1234.5,
        };
        let diverged = Outcome { held_out: None, diverged: true, finished: true, ..outcome.clone() };
        let text = diverged.document().to_terminal(&termwise_report::Terminal::default());
        assert!(
            text.starts_with("✗ finished, but diverged: after step 7") && text.contains("the loss of the last evaluation is not finite"),
            "{text}"
        );
        termwise_report::reads_again(&diverged);
        let text = outcome.document().to_terminal(&termwise_report::Terminal::default());
        assert!(text.starts_with("○ stopped: after step 7") && text.ends_with("\n  termwise train --resume runs/x\n"), "{text}");
        let metric = Statistic { mean: 2.0, deviation: Some(0.5), count: 3 };
        let point = |value: &str| vec![("attention".to_owned(), value.to_owned()), ("model".into(), "tiny".into())];
        let summary = Summary {
            metric: "held_out.loss".into(),
            groups: ["softmax", "norm"]
                .map(|name| Group {
                    point: point(name),
                    finished: 3,
                    failed: 0,
                    open: 1,
                    metrics: [("held_out.loss".into(), metric)].into(),
                })
                .into(),
            best: vec![Best {
                point: point("norm"),
                learning_rate: Some("0.1".into()),
                at_edge: true,
                metric,
                failed: 0,
                behind: 0.0,
                beyond_deviation: None,
            }],
            runs: vec![RunRow {
                hash: "abc".into(),
                point: point("norm"),
                status: "failed".into(),
                note: "no memory".into(),
                build: "0.1.0 (0123456789ab)".into(),
                metrics: Default::default(),
            }],
        };
        let text = summary.document().to_terminal(&termwise_report::Terminal::default());
        assert!(text.contains("attention=softmax  2.0000 ± 0.5000") && text.contains("✗ run abc: no memory"), "{text}");
        termwise_report::reads_again(&found);
        termwise_report::reads_again(&outcome);
        termwise_report::reads_again(&summary);
    }
}
