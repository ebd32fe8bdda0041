//! Attention distance per head.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use termwise_attention::View;
use termwise_model::{Config, Model};
use termwise_report::{Block, Cell, Document, Documented, Figure, HeatMap, Names, Section, Shade, Table, Unit};

use crate::kv::assemble::assemble;
use crate::kv::calibrate::{Gathered, NEAR};
use crate::kv::journal::{Journal, digest};
use crate::kv::kinds::{Kind, SINKS};
use crate::kv::recall::{self, Facts};
use crate::kv::sensitivity::{self, PROBE};
use crate::kv::{Error, ProgressFn};

/// Sums over the sampled queries of a head.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeadSums {
    rows: f64,
    /// Attention on sinks, attention on far keys, and mean distance.
    sink: f64,
    far: f64,
    distance: f64,
    /// Rows with at least two far keys; standard deviation of their scores, maximum above their mean, and share of far keys with half of the far attention.
    far_rows: f64,
    spread: f64,
    largest: f64,
    half: f64,
}

impl HeadSums {
    /// Adds query t.
    pub fn add(&mut self, view: &View, t: usize) {
        let d = view.d;
        let q = &view.q[t * d..][..d];
        let scores: Vec<f64> = view.k[..(t + 1) * d].chunks_exact(d).map(|k| q.iter().zip(k).map(|(q, k)| q * k).sum()).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|x| (x - most).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let sinks = SINKS.min(t + 1);
        let far = sinks..(t + 1).saturating_sub(NEAR).max(sinks);
        self.rows += 1.0;
        self.sink += weights[..sinks].iter().sum::<f64>() / sum;
        self.far += weights[far.clone()].iter().sum::<f64>() / sum;
        self.distance += weights.iter().enumerate().map(|(s, w)| w * (t - s) as f64).sum::<f64>() / sum;
        if far.len() >= 2 {
            let (n, scores) = (far.len() as f64, &scores[far.clone()]);
            let mean = scores.iter().sum::<f64>() / n;
            self.far_rows += 1.0;
            self.spread += (scores.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n).sqrt();
            self.largest += scores.iter().copied().fold(f64::NEG_INFINITY, f64::max) - mean;
            let mut sorted = weights[far.clone()].to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let all: f64 = sorted.iter().sum();
            let mut covered = 0.0;
            let count = sorted.iter().take_while(|w| {
                let before = covered;
                covered += **w;
                before < 0.5 * all
            });
            self.half += count.count() as f64 / n;
        }
    }
}

/// One head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeadFacts {
    /// From 0.
    pub layer: usize,
    /// From 0.
    pub head: usize,
    /// Share of its attention on the first keys.
    pub sink_mass: f64,
    /// Share of its attention on keys that are neither the first nor the last.
    pub far_mass: f64,
    /// Mean attention distance in tokens.
    pub look_back: f64,
    /// Standard deviation of the scores of far keys within a row.
    pub far_spread: f64,
    /// The largest of them above their mean.
    pub far_largest: f64,
    /// Share of the far keys with half of the far attention.
    pub half_of_far: f64,
    /// KL in nats per token if its KV head keeps only a short window; `None` if it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// The loss increase, in nats per token.
    #[serde(default, alias = "rise", skip_serializing_if = "Option::is_none")]
    pub loss_increase: Option<f64>,
    /// Share of recalled facts beyond that window, among those that the original recalls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<f64>,
}

/// Tokens between a fact and its question.
const RECALL_DISTANCE: usize = 192;

/// Number of facts and of removed KV heads.
#[derive(Clone, Copy, Debug)]
pub struct Recalls {
    /// Maximum number of facts that the original recalls.
    pub facts: usize,
    /// Number of KV heads, those with the largest effect of removal.
    pub heads: usize,
}

/// All heads of a model on a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Atlas {
    /// Name of the model, as given.
    pub model: String,
    /// The text.
    pub data: Vec<String>,
    /// Contexts and their length.
    pub contexts: usize,
    /// Tokens of each.
    pub length: usize,
    /// Keys at the start that count as sinks, and last ones that count as near.
    pub sinks: usize,
    /// The others are far.
    pub near: usize,
    /// Number of facts in the recall test.
    #[serde(default)]
    pub facts: usize,
    /// By layer and head.
    pub heads: Vec<HeadFacts>,
}

impl Atlas {
    /// From the statistics of a calibration pass.
    pub fn new(model: &str, data: Vec<String>, config: &Config, gathered: &Gathered, length: usize) -> Atlas {
        let heads = gathered.heads.iter().enumerate().map(|(index, sums)| {
            let (rows, far) = (sums.rows.max(1.0), sums.far_rows.max(1.0));
            HeadFacts {
                layer: index / config.num_attention_heads,
                head: index % config.num_attention_heads,
                sink_mass: sums.sink / rows,
                far_mass: sums.far / rows,
                look_back: sums.distance / rows,
                far_spread: sums.spread / far,
                far_largest: sums.largest / far,
                half_of_far: sums.half / far,
                kl: None,
                loss_increase: None,
                recall: None,
            }
        });
        let heads = heads.collect();
        Atlas { model: model.into(), data, contexts: gathered.contexts, length, sinks: SINKS, near: NEAR, facts: 0, heads }
    }

    /// Adds the effect of removing the memory of each KV head: KL and loss increase on a context. Recall is measured for the KV heads with the largest
    /// KL only, since each question is a separate text.
    pub fn add_removals(
        &mut self,
        model: &Arc<Model>,
        (gathered, context): (&Gathered, &[u32]),
        recall: Option<(Facts, Recalls)>,
        journal: &mut Journal,
        stop: &AtomicBool,
        progress: ProgressFn,
    ) -> Result<(), Error> {
        let removals = sensitivity::measure(model, &gathered.identity, &[context.to_vec()], journal, stop, progress)?;
        let (h, g) = (model.config.num_attention_heads, model.config.num_key_value_heads);
        let unit = |head: &HeadFacts| head.layer * g + head.head / (h / g);
        for head in &mut self.heads {
            let removal = removals[unit(head)];
            (head.kl, head.loss_increase) = (Some(removal.kl), Some(removal.loss_increase));
        }
        let Some((mut facts, recalls)) = recall else { return Ok(()) };
        progress(0, recalls.heads as u64, "recall of the original");
        let questions = facts.answered_by(&mut recall::decoder(model)?, RECALL_DISTANCE, recalls.facts)?;
        self.facts = questions.len();
        let mut order: Vec<usize> = (0..removals.len()).collect();
        order.sort_by(|&a, &b| removals[b].kl.total_cmp(&removals[a].kl));
        order.truncate(if questions.is_empty() { 0 } else { recalls.heads });
        for (done, &cut) in order.iter().enumerate() {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            let mut kinds = vec![None; removals.len()];
            kinds[cut] = Some(Kind::window(PROBE));
            let key = digest(&format!("recall {} {cut} {RECALL_DISTANCE} {recalls:?}", gathered.identity));
            let found: usize = match journal.get(&key) {
                Some(known) => known,
                None => {
                    let mut decoder = recall::decoder(&Arc::new(assemble(model, &kinds)?))?;
                    let mut found = 0;
                    for question in &questions {
                        found += usize::from(question.is_answered(facts.tokenizer(), &mut decoder)?);
                    }
                    journal.put(&key, &format!("facts without the memory of KV head {cut}"), &found);
                    found
                }
            };
            let share = found as f64 / questions.len() as f64;
            self.heads.iter_mut().filter(|head| unit(head) == cut).for_each(|head| head.recall = Some(share));
            progress(done as u64 + 1, order.len() as u64, "recall without the memory of a KV head");
        }
        Ok(())
    }

    fn map(&self, title: &str, shade: Shade, value: fn(&HeadFacts) -> Option<f64>) -> HeatMap {
        let layers = self.heads.iter().map(|head| head.layer + 1).max().unwrap_or(0);
        let per_layer = self.heads.len() / layers.max(1);
        HeatMap {
            title: title.into(),
            x: Names::count("head", per_layer),
            y: Names::count("layer", layers),
            values: self.heads.chunks(per_layer.max(1)).map(|row| row.iter().map(value).collect()).collect(),
            shade,
            range: None,
            unit: Unit::Number,
        }
    }

    fn median(&self, value: fn(&HeadFacts) -> f64) -> f64 {
        let mut values: Vec<f64> = self.heads.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

impl Documented for Atlas {
    const KIND: &'static str = "atlas";

    fn validate(&self, _: &Value) -> Result<(), String> {
        let per_layer = self.heads.iter().take_while(|head| head.layer == 0).count().max(1);
        let ordered = self.heads.iter().enumerate().all(|(i, head)| (head.layer, head.head) == (i / per_layer, i % per_layer));
        if !ordered || !self.heads.len().is_multiple_of(per_layer) {
            return Err("its heads are not in order of layer and head, or layers have different numbers of heads".into());
        }
        Ok(())
    }

    fn document(&self) -> Document {
        let Atlas { contexts, length, sinks, near, .. } = self;
        let mut facts = vec![
            ("model".to_owned(), self.model.clone()),
            ("text".to_owned(), format!("{}; {contexts} contexts of {length} tokens", self.data.join(", "))),
            ("far keys".to_owned(), format!("all keys except the first {sinks} and the last {near}")),
            (
                "median attention".to_owned(),
                format!(
                    "{:.1} % on far keys, {:.1} % on the first keys, at a mean distance of {:.0} tokens",
                    100.0 * self.median(|head| head.far_mass),
                    100.0 * self.median(|head| head.sink_mass),
                    self.median(|head| head.look_back)
                ),
            ),
            (
                "median scores".to_owned(),
                format!(
                    "standard deviation {:.2} over far keys, largest {:.1} above the mean; {:.1} % of the far keys get half of the attention on far keys",
                    self.median(|head| head.far_spread),
                    self.median(|head| head.far_largest),
                    100.0 * self.median(|head| head.half_of_far)
                ),
            ),
        ];
        if self.heads.iter().any(|head| head.kl.is_some()) {
            let text =
                format!("KL and loss increase in nats per token if one KV head keeps only the first {sinks} and the last {PROBE} keys");
            facts.push(("removal of a head".to_owned(), text));
        }
        if self.facts > 0 {
            let text = format!(
                "share of {} facts recalled without the memory of a KV head, at a distance of {RECALL_DISTANCE} tokens; the original recalls all of them",
                self.facts
            );
            facts.push(("recall".to_owned(), text));
        }
        let mut panels = vec![
            self.map("Attention on far keys", Shade::Linear, |head| Some(head.far_mass)).into(),
            self.map("Attention on the first keys", Shade::Linear, |head| Some(head.sink_mass)).into(),
            self.map("Spread of far scores", Shade::Linear, |head| Some(head.far_spread)).into(),
        ];
        if self.heads.iter().any(|head| head.kl.is_some()) {
            panels.push(self.map("KL without the memory of the KV head", Shade::Linear, |head| head.kl).into());
            panels.push(self.map("Loss increase", Shade::Linear, |head| head.loss_increase).into());
        }
        if self.heads.iter().any(|head| head.recall.is_some()) {
            panels.push(self.map("Facts recalled without the memory of the KV head", Shade::Linear, |head| head.recall).into());
        }
        let figure = Figure { title: "Heads".into(), description: "Layers by heads.".into(), panels };
        let columns = [
            "layer",
            "head",
            "far mass",
            "sink mass",
            "mean distance",
            "far spread",
            "far largest",
            "half of far on",
            "KL",
            "loss",
            "recall",
        ];
        let mut table = Table::new("Every head", columns);
        for head in &self.heads {
            table.rows.push(vec![
                Cell::count(head.layer),
                Cell::count(head.head),
                Cell::Number(head.far_mass, 3),
                Cell::Number(head.sink_mass, 3),
                Cell::Number(head.look_back, 0),
                Cell::Number(head.far_spread, 2),
                Cell::Number(head.far_largest, 1),
                Cell::Number(head.half_of_far, 3),
                Cell::maybe(head.kl, |kl| Cell::Number(kl, 5)),
                Cell::maybe(head.loss_increase, |increase| Cell::Number(increase, 5)),
                Cell::maybe(head.recall, |recall| Cell::Number(recall, 2)),
            ]);
        }
        let details = Block::Details { summary: "Every head".into(), blocks: vec![Block::table("heads", table)] };
        let name = self.model.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        Document {
            title: format!("Attention distance per head: {name}"),
            lead: vec![Block::Facts(facts)],
            sections: vec![Section::new("Heads", vec![Block::figure("heads", figure), details])],
        }
    }
}
