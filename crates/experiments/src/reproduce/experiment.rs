//! Experiments, tasks, variants and metrics.

use serde::{Deserialize, Serialize};
use termwise_base::nearest;
use termwise_train::eval::Evaluation;
use toml::Table;

use super::claim::Claim;
use super::scale::Scale;
use super::text;
use crate::Error;

/// The experiments by name, in the order in which they are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Id {
    /// Softmax, Norm and Gate.
    E1,
    /// The same wider and longer.
    E2,
    /// Linear attentions.
    E3,
    /// Orders of the series.
    E4,
    /// Ablations: one part removed or replaced.
    E5,
    /// Terms inside trained models.
    E6,
    /// The series of many terms.
    E7,
    /// The theorem that separates softmax from linear attention.
    Separation,
    /// The Taylor order that the inputs of the theorem need.
    Bridge,
    /// Orders, the delta rule and decay on overwritten facts.
    Overwrite,
    /// The same on parity, beyond the training length.
    Parity,
    /// A state of far keys against a longer window.
    Distance,
    /// On text: loss against the highest order.
    Orders,
    /// The same with a short convolution in every variant.
    OrdersConv,
    /// On text: loss against bytes of state, windows, Taylor and delta states.
    State,
    /// The same with a short convolution in every variant.
    StateConv,
    /// On text: orders with the delta rule.
    Delta,
    /// The same with a short convolution in every variant.
    DeltaConv,
    /// On text: the gap to softmax by training tokens for three tokenizations.
    Tokenization,
    /// On text: loss against bytes of state, the other families.
    Families,
    /// The same with a short convolution in every variant.
    FamiliesConv,
    /// Multi-query associative recall.
    Mqar,
}

impl Id {
    /// All of them.
    pub const ALL: [Id; 22] = [
        Id::E1,
        Id::E2,
        Id::E3,
        Id::E4,
        Id::E5,
        Id::E6,
        Id::E7,
        Id::Separation,
        Id::Bridge,
        Id::Overwrite,
        Id::Parity,
        Id::Distance,
        Id::Orders,
        Id::OrdersConv,
        Id::State,
        Id::StateConv,
        Id::Delta,
        Id::DeltaConv,
        Id::Tokenization,
        Id::Families,
        Id::FamiliesConv,
        Id::Mqar,
    ];

    /// The experiments that `all` selects at this scale.
    pub fn of_scale(scale: Scale) -> Vec<Id> {
        let requested = |id: &Id| match scale {
            Scale::Text => text::is_text(*id),
            Scale::Mini | Scale::Zoology => *id == Id::Mqar,
            Scale::Test | Scale::Minute | Scale::Laptop | Scale::Paper => !text::is_text(*id) && *id != Id::Mqar,
        };
        Id::ALL.into_iter().filter(requested).collect()
    }

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Id::E1 => "e1",
            Id::E2 => "e2",
            Id::E3 => "e3",
            Id::E4 => "e4",
            Id::E5 => "e5",
            Id::E6 => "e6",
            Id::E7 => "e7",
            Id::Separation => "separation",
            Id::Bridge => "bridge",
            Id::Overwrite => "overwrite",
            Id::Parity => "parity",
            Id::Distance => "distance",
            Id::Orders => "orders",
            Id::OrdersConv => "orders-conv",
            Id::State => "state",
            Id::StateConv => "state-conv",
            Id::Delta => "delta",
            Id::DeltaConv => "delta-conv",
            Id::Tokenization => "tokenization",
            Id::Families => "families",
            Id::FamiliesConv => "families-conv",
            Id::Mqar => "mqar",
        }
    }

    /// Whether the experiment is from one of the two papers.
    pub fn is_of_a_paper(self) -> bool {
        self <= Id::Bridge
    }

    /// The experiments with these names, each once and in order; `all` or an empty list selects all of the scale.
    ///
    /// # Errors
    /// If a word is not the name of an experiment.
    pub fn parse(words: &[String], scale: Scale) -> Result<Vec<Id>, Error> {
        let mut ids = Vec::new();
        for word in words.iter().map(|word| word.to_lowercase()) {
            match Id::ALL.into_iter().find(|id| id.name() == word) {
                Some(id) => ids.push(id),
                None if word == "all" => ids.extend(Id::of_scale(scale)),
                None => {
                    let known = || Id::ALL.iter().map(|id| id.name()).chain(["all"]);
                    let suggestion = nearest(&word, known()).map(str::to_owned);
                    let known = known().collect::<Vec<_>>().join(", ");
                    return Err(Error::Unknown { what: "experiment", name: word, suggestion, known });
                }
            }
        }
        if ids.is_empty() {
            ids.extend(Id::of_scale(scale));
        }
        ids.sort();
        ids.dedup();
        Ok(ids)
    }
}

/// An experiment that trains models.
#[derive(Clone, Debug, PartialEq)]
pub struct Experiment {
    /// The name.
    pub id: Id,
    /// The question.
    pub question: &'static str,
    /// The paper's result, or earlier results.
    pub paper: &'static str,
    /// The compared variants.
    pub variants: Vec<Variant>,
    /// The tasks; every claim is decided on each.
    pub tasks: Vec<Task>,
    /// The claims.
    pub claims: Vec<Claim>,
}

/// An attention with its name in claims and tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Variant {
    /// The name.
    pub name: String,
    /// The variant string.
    pub attention: String,
    /// Its own settings, such as a number of heads that makes states equally large.
    #[serde(default, skip_serializing_if = "Table::is_empty")]
    pub settings: Table,
    /// Number of seeds, if smaller than for the other variants because no claim needs this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seeds: Option<usize>,
}

/// Data, sizes and recipe that all variants share.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// The name in tables.
    pub name: String,
    /// The settings of every run, without attention and seed.
    pub base: Table,
    /// Words added to every variant string, such as a short convolution.
    pub words: &'static str,
    /// The compared metric.
    pub metric: Metric,
    /// The grid from which each variant gets its best learning rate, with [`TUNING_SEED`] and on held-out documents that the comparison does not
    /// use. If empty, all variants have the learning rate of the base.
    pub rates: Vec<f64>,
    /// Settings that override the base in tuning runs: other held-out data, and possibly fewer steps.
    pub tuning: Table,
}

/// The seed of tuning runs. The comparison uses other seeds.
pub const TUNING_SEED: usize = 0;

/// The metric of a comparison; lower is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Held-out loss on recall tokens; the optimum is 0.
    Recall,
    /// Held-out loss on all tokens.
    Loss,
    /// Held-out loss beyond the training length.
    Beyond,
    /// Share of wrong answers.
    Error,
}

impl Metric {
    /// The key among the metrics of a run.
    pub fn key(self) -> &'static str {
        match self {
            Metric::Recall => "held_out.recall.loss",
            Metric::Loss => "held_out.loss",
            Metric::Beyond => "held_out.beyond.loss",
            Metric::Error => "held_out.accuracy",
        }
    }

    /// The name with its unit.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Recall => "held-out loss on recall tokens, nats",
            Metric::Loss => "held-out loss, nats per token",
            Metric::Beyond => "held-out loss beyond the training length, nats per token",
            Metric::Error => "share of wrong answers",
        }
    }

    /// A short name, for titles of figures.
    pub fn short(self) -> &'static str {
        match self {
            Metric::Recall => "loss on recall tokens",
            Metric::Loss => "held-out loss",
            Metric::Beyond => "loss beyond the training length",
            Metric::Error => "wrong answers",
        }
    }

    /// The metric of an evaluation.
    pub fn of(self, found: &Evaluation) -> Option<f64> {
        match self {
            Metric::Recall => Some(found.recall?.loss),
            Metric::Loss => Some(found.loss),
            Metric::Beyond => Some(found.beyond?.loss),
            Metric::Error => Some(1.0 - found.accuracy?),
        }
    }
}

impl Task {
    /// The variant string of a variant on this task.
    pub fn attention(&self, variant: &Variant) -> String {
        format!("{} {}", variant.attention, self.words).trim_end().to_owned()
    }
}
