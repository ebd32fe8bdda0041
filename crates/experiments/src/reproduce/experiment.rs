//! What an experiment is.

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
    /// One part removed or exchanged.
    E5,
    /// Terms inside trained models.
    E6,
    /// The series of many terms.
    E7,
    /// The theorem that separates softmax from linear attention.
    Separation,
    /// The order that the theorem's data need.
    Bridge,
    /// Orders, the write rule and decay on facts that are overwritten.
    Overwrite,
    /// The same on parity, at lengths beyond those of training.
    Parity,
    /// Far keys in a state against a longer window.
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

    /// Those that `all` stands for at this scale.
    pub fn of_scale(scale: Scale) -> Vec<Id> {
        let asked = |id: &Id| match scale {
            Scale::Text => text::is_text(*id),
            Scale::Mini | Scale::Zoology => *id == Id::Mqar,
            Scale::Test | Scale::Minute | Scale::Laptop | Scale::Paper => !text::is_text(*id) && *id != Id::Mqar,
        };
        Id::ALL.into_iter().filter(asked).collect()
    }

    /// As it is written on the command line.
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

    /// Whether it repeats what one of the two papers did; the others ask something new.
    pub fn is_of_a_paper(self) -> bool {
        self <= Id::Bridge
    }

    /// The experiments of these words, each once, in their order; `all`, or no word, stands for all of the scale.
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

/// Something to be found out by training.
#[derive(Clone, Debug, PartialEq)]
pub struct Experiment {
    /// Its name.
    pub id: Id,
    /// What is asked.
    pub question: &'static str,
    /// What the paper found, or what was known before.
    pub paper: &'static str,
    /// What is compared.
    pub variants: Vec<Variant>,
    /// What each is trained on; every claim is decided for each.
    pub tasks: Vec<Task>,
    /// What is to be decided.
    pub claims: Vec<Claim>,
}

/// An attention under the name that claims and tables give it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Variant {
    /// In claims and tables.
    pub name: String,
    /// A preset or expression.
    pub attention: String,
    /// Other settings of its own, such as heads that make states of one size.
    #[serde(default, skip_serializing_if = "Table::is_empty")]
    pub settings: Table,
    /// Seeds, where they are fewer than those of the others: of a variant that no claim needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seeds: Option<usize>,
}

/// Data, sizes and recipe that all variants share.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// In tables.
    pub name: String,
    /// Settings of every run but attention and seed.
    pub base: Table,
    /// Words that every attention gets, such as a short convolution.
    pub words: &'static str,
    /// What is compared.
    pub metric: Metric,
    /// Learning rates of which each variant gets the one that is best for it with [`TUNING_SEED`], on other held-out documents than those of the
    /// comparison; if empty, all have that of the base.
    pub rates: Vec<f64>,
    /// Settings of the runs that choose a learning rate, above the others: other held-out data, maybe fewer steps.
    pub tuning: Table,
}

/// The seed of the runs that choose a learning rate. Those that are compared have others.
pub const TUNING_SEED: usize = 0;

/// What runs are compared by; lower is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Held-out loss on tokens that can only be recalled; the best possible is 0.
    Recall,
    /// Held-out loss on all tokens.
    Loss,
    /// Held-out loss on positions beyond those that rows of training have.
    Beyond,
    /// Share of wrong answers.
    Error,
}

impl Metric {
    /// Its name among the metrics of a run.
    pub fn key(self) -> &'static str {
        match self {
            Metric::Recall => "held_out.recall.loss",
            Metric::Loss => "held_out.loss",
            Metric::Beyond => "held_out.beyond.loss",
            Metric::Error => "held_out.accuracy",
        }
    }

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Recall => "held-out loss on recall tokens, nats",
            Metric::Loss => "held-out loss, nats per token",
            Metric::Beyond => "held-out loss beyond the length of training, nats per token",
            Metric::Error => "share of wrong answers",
        }
    }

    /// In a few words, for titles of figures.
    pub fn short(self) -> &'static str {
        match self {
            Metric::Recall => "loss on recall tokens",
            Metric::Loss => "held-out loss",
            Metric::Beyond => "loss beyond the length of training",
            Metric::Error => "wrong answers",
        }
    }

    /// Of an evaluation.
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
    /// The attention of a variant here.
    pub fn attention(&self, variant: &Variant) -> String {
        format!("{} {}", variant.attention, self.words).trim_end().to_owned()
    }
}
