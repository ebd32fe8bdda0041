//! E6: term spectra of the softmax models that were trained on synthetic recall.

use std::path::Path;

use serde::{Deserialize, Serialize};
use termwise_data::Prepare;
use termwise_model::Model;
use termwise_report::{Axis, Band, Block, Cell, Chart, Figure, Layer, Line, Scale as AxisScale, Table, Unit};
use termwise_train::Settings;

use super::claim::{Decision, Verdict};
use super::results::{ClaimOutcome, Run};
use super::{Metric, Task};
use crate::Error;
use termwise_analysis::spectrum::{self, LayerSpectrum, RowChoice};

/// Tokens per model.
const TOKENS: u64 = 4096;
/// The first order that linear attention does not have.
const BEYOND_LINEAR: usize = 2;
/// A truncation that changes an output by more is harmful.
const HARMFUL_INCREASE: f64 = 0.1;

/// Term spectra of trained models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Inside {
    /// The models.
    pub models: Vec<ModelTerms>,
    /// The claims.
    pub claims: Vec<ClaimOutcome>,
}

/// One model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelTerms {
    /// Training task.
    pub task: String,
    /// Seed of its run.
    pub seed: u64,
    /// Relative to the folder of results.
    pub checkpoint: String,
    /// The layers.
    pub layers: Vec<LayerTerms>,
}

/// One layer, by the metrics of [`termwise_analysis::spectrum`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerTerms {
    /// Counted from 0.
    pub layer: usize,
    /// log10 of the mean of |x^n/n!| by order; absent where it is zero.
    pub log10: Vec<Option<f64>>,
    /// Order of the largest term, over all scores.
    pub dominant: Option<usize>,
    /// Over nonnegative scores.
    pub dominant_positive: Option<usize>,
    /// Over negative scores.
    pub dominant_negative: Option<usize>,
    /// The largest score.
    pub largest: f64,
    /// The largest relative error of a head truncated at order 2.
    pub error_at_2: Option<f64>,
    /// The smallest even order at which every head is within 1 %.
    pub order_for_one_percent: Option<usize>,
}

/// Measures the newest checkpoint of every softmax run on synthetic recall; `None` if there is no such run. The claims need all of them.
pub fn look(tasks: &[Task], runs: &[Run], out: &Path) -> Result<Option<Inside>, Error> {
    let language = |run: &&Run| tasks.iter().any(|task| task.name == run.task && task.metric == Metric::Recall);
    let softmax = |run: &&Run| run.attention.split(' ').next() == Some(super::SOFTMAX);
    let (mut models, mut missing) = (Vec::new(), Vec::new());
    for run in runs.iter().filter(language).filter(softmax) {
        let checkpoint = newest(&format!("{}/checkpoints", run.folder), out);
        let reason = match (run.status.as_str(), checkpoint) {
            ("finished", Some(checkpoint)) => {
                let layers = layers(&out.join(&checkpoint))?;
                models.push(ModelTerms { task: run.task.clone(), seed: run.seed, checkpoint, layers });
                continue;
            }
            ("finished", None) => "has no checkpoint".to_owned(),
            ("failed", _) => format!("failed ({})", run.note),
            _ => "has not finished".into(),
        };
        missing.push(format!("seed {} on {} {reason}", run.seed, run.task));
    }
    let mut claims = vec![dominated(&models), needed(&models)];
    if !missing.is_empty() {
        claims.iter_mut().for_each(|claim| claim.decision = Decision::undecided(missing.join("; ")));
    }
    Ok((!models.is_empty() || !missing.is_empty()).then_some(Inside { models, claims }))
}

/// Names end with the step in eight digits, so the last by name is the newest.
pub(super) fn newest(folder: &str, out: &Path) -> Option<String> {
    let entries = std::fs::read_dir(out.join(folder)).ok()?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).filter(|name| name.starts_with("step-"));
    names.max().map(|name| format!("{folder}/{name}"))
}

fn layers(checkpoint: &Path) -> Result<Vec<LayerTerms>, Error> {
    let place = checkpoint.join(termwise_train::checkpoint::SETTINGS);
    let text = std::fs::read_to_string(&place).map_err(termwise_model::Error::io("read", &place))?;
    let settings = Settings::from_toml(&text, &place.display().to_string())?;
    // The built-in language is not tokenized, so nothing is kept in a cache.
    let source = settings.open_source(checkpoint, &Prepare::default())?;
    let windows = spectrum::windows(source.as_ref(), settings.length, TOKENS)?;
    let options = spectrum::Options { rows: RowChoice::All, ..spectrum::Options::default() };
    let found = spectrum::measure(&Model::read(checkpoint)?, &windows, &options, &mut |_| ())?;
    let at = found.orders.iter().position(|&order| order == BEYOND_LINEAR);
    Ok(found.layers.iter().map(|layer| terms(layer, at)).collect())
}

fn terms(layer: &LayerSpectrum, at: Option<usize>) -> LayerTerms {
    let terms = layer.terms.as_ref();
    let errors = layer.heads.iter().filter_map(|head| head.cut.as_ref()?.error[at?]);
    LayerTerms {
        layer: layer.layer,
        log10: terms.map_or(Vec::new(), |terms| terms.all.log10.clone()),
        dominant: terms.and_then(|terms| terms.all.dominant),
        dominant_positive: terms.and_then(|terms| terms.positive.dominant),
        dominant_negative: terms.and_then(|terms| terms.negative.dominant),
        largest: layer.heads.iter().map(|head| head.scores.max).fold(f64::NEG_INFINITY, f64::max),
        error_at_2: errors.reduce(f64::max),
        order_for_one_percent: layer.order_for().and_then(|[_, one, _]| one.worst),
    }
}

fn decided(text: &str, stated: &str, holds: &[bool], note: String) -> ClaimOutcome {
    let verdict = match holds {
        [] => Verdict::Undecided,
        holds if holds.iter().all(|&holds| holds) => Verdict::Reproduced,
        holds if holds.iter().all(|&holds| !holds) => Verdict::Contradicted,
        _ => Verdict::Inconclusive,
    };
    let decision = Decision { note, ..Decision::new(verdict) };
    ClaimOutcome { text: text.into(), rule: None, stated: stated.into(), also: Vec::new(), decision }
}

fn dominated(models: &[ModelTerms]) -> ClaimOutcome {
    let orders: Vec<usize> = models.iter().flat_map(|model| &model.layers).filter_map(|layer| layer.dominant).collect();
    let holds: Vec<bool> = orders.iter().map(|&order| order >= BEYOND_LINEAR).collect();
    let range = orders.iter().min().zip(orders.iter().max());
    let note = range.map_or("no layer".into(), |(low, high)| format!("dominant orders {low} to {high} over {} layers", orders.len()));
    let stated = "the dominant order of every layer of every model is 2 or more; where none is, that contradicts";
    decided("the dominant order is above 1", stated, &holds, note)
}

fn needed(models: &[ModelTerms]) -> ClaimOutcome {
    let errors = models.iter().map(|model| model.layers.iter().filter_map(|layer| layer.error_at_2).fold(0.0, f64::max));
    let errors: Vec<f64> = errors.collect();
    let holds: Vec<bool> = errors.iter().map(|&error| error > HARMFUL_INCREASE).collect();
    let range = errors.iter().copied().reduce(f64::min).zip(errors.iter().copied().reduce(f64::max));
    let note = range.map_or("no model".into(), |(low, high)| {
        format!("largest error of a head {:.0} to {:.0} % over models", 100.0 * low, 100.0 * high)
    });
    let stated = "in every model the output of at least one head changes by more than 10 % when its series is cut at order 2; where none does, that contradicts";
    decided("trained heads need more than two orders", stated, &holds, note)
}

impl Inside {
    /// Magnitudes by order, a line for each layer of each task: the mean over models, from the smallest to the largest as a band.
    pub fn figure(&self) -> Figure {
        let mut groups: Vec<(&str, usize, Vec<&LayerTerms>)> = Vec::new();
        for model in &self.models {
            for layer in &model.layers {
                match groups.iter_mut().find(|(task, number, _)| *task == model.task && *number == layer.layer) {
                    Some((_, _, layers)) => layers.push(layer),
                    None => groups.push((&model.task, layer.layer, vec![layer])),
                }
            }
        }
        let (mut bands, mut lines) = (Vec::new(), Vec::new());
        for (index, (task, number, layers)) in groups.iter().enumerate() {
            let numbers = |n: usize| {
                layers.iter().filter_map(|layer| layer.log10.get(n).copied().flatten()).filter(|&log| log > -6.0).collect::<Vec<f64>>()
            };
            let all: Vec<(f64, Vec<f64>)> =
                (0..spectrum::ORDERS).map(|n| (n as f64, numbers(n))).filter(|(_, found)| !found.is_empty()).collect();
            let mean = |found: &[f64]| found.iter().sum::<f64>() / found.len() as f64;
            let edge = |found: &[f64], pick: fn(f64, f64) -> f64| found.iter().copied().reduce(pick).unwrap_or(f64::NAN);
            let (name, color) = (format!("{task}, layer {number}"), index % 6);
            let band = all.iter().map(|(n, found)| (*n, edge(found, f64::min), edge(found, f64::max))).collect();
            bands.push(Layer::Band(Band { name: name.clone(), color, points: band }));
            lines.push(Layer::Line(Line {
                name,
                color,
                dashed: index >= 6,
                points: all.iter().map(|(n, found)| (*n, mean(found))).collect(),
            }));
        }
        bands.append(&mut lines);
        let chart = Chart {
            title: "log10 of the mean of |xⁿ/n!| over visible pairs".into(),
            x: Axis::new("order n", AxisScale::Linear, Unit::Number),
            y: Axis::new("", AxisScale::Linear, Unit::Number),
            layers: bands,
        };
        Figure {
            title: "E6: magnitude of the terms inside trained softmax models".into(),
            description: self.claims.iter().map(|claim| format!("{}: {}.", claim.text, claim.decision.note)).collect::<Vec<_>>().join(" "),
            panels: vec![chart.into()],
        }
    }

    /// Every layer of every model.
    pub fn table(&self) -> Table {
        let columns = ["task", "seed", "layer", "dominant", "x ≥ 0", "x < 0", "largest score", "error cut at 2", "order for 1 %"];
        let highest = spectrum::Options::default().orders.last().copied().unwrap_or(0);
        let mut table = Table::new("Dominant orders over all scores and by sign, and what cutting does to the worst head", columns);
        for model in &self.models {
            for layer in &model.layers {
                let order = |order: Option<usize>| order.map_or(Cell::Empty, |order| Cell::Number(order as f64, 0));
                table.rows.push(vec![
                    Cell::text(&model.task),
                    Cell::Link(model.seed.to_string(), model.checkpoint.clone()),
                    Cell::Number(layer.layer as f64, 0),
                    order(layer.dominant),
                    order(layer.dominant_positive),
                    order(layer.dominant_negative),
                    Cell::Number(layer.largest, 1),
                    layer.error_at_2.map_or(Cell::Empty, |error| Cell::Amount(error, Unit::Percent)),
                    layer.order_for_one_percent.map_or_else(|| Cell::text(format!("> {highest}")), |order| Cell::Number(order as f64, 0)),
                ]);
            }
        }
        table
    }

    /// Figure and table for a page.
    pub fn blocks(&self) -> Vec<Block> {
        if self.models.is_empty() {
            return Vec::new();
        }
        let caption = "mean over models, and smallest to largest".into();
        vec![
            Block::Figure { name: "e6-terms".into(), figure: self.figure(), caption },
            Block::Table { name: "e6-layers".into(), table: self.table() },
            Block::Text(
                "xⁿ/n! is largest at n ≈ |x|, so the dominant order follows the largest |score|, and large negative scores, which do nothing \
                 in a softmax, raise it. The error of cutting is what counts."
                    .into(),
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(layers: &[(usize, f64)]) -> ModelTerms {
        let layer = |(layer, &(dominant, error)): (usize, &(usize, f64))| LayerTerms {
            layer,
            log10: vec![Some(0.0)],
            dominant: Some(dominant),
            dominant_positive: None,
            dominant_negative: None,
            largest: 1.0,
            error_at_2: Some(error),
            order_for_one_percent: None,
        };
        let layers = layers.iter().enumerate().map(layer).collect();
        ModelTerms { task: "language".into(), seed: 1, checkpoint: "runs/x".into(), layers }
    }

    fn verdicts(models: &[ModelTerms]) -> [Verdict; 2] {
        [dominated(models), needed(models)].map(|claim| claim.decision.verdict)
    }

    #[test]
    fn every_layer_and_every_model_count() {
        use Verdict::{Contradicted, Inconclusive, Reproduced, Undecided};
        assert_eq!(verdicts(&[model(&[(2, 0.2), (9, 0.01)]), model(&[(5, 0.11), (3, 0.0)])]), [Reproduced, Reproduced]);
        // One layer below order 2, one model without a head that is harmed.
        assert_eq!(verdicts(&[model(&[(2, 0.2), (1, 0.3)]), model(&[(5, 0.1), (3, 0.0)])]), [Inconclusive, Inconclusive]);
        assert_eq!(verdicts(&[model(&[(1, 0.1)]), model(&[(0, 0.05)])]), [Contradicted, Contradicted]);
        assert_eq!(verdicts(&[]), [Undecided, Undecided]);
    }
}
