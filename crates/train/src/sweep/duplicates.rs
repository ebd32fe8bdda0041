//! Detection of runs that compute the same under different names, before they are started.

use std::collections::HashMap;

use termwise_attention::Variant;
use toml::{Table, Value};

use super::plan::{Job, Plan, Role, hash, plain};

/// Two values of an attention axis with the same output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Equality {
    /// The axis.
    pub key: String,
    /// The earlier value on the axis.
    pub first: String,
    /// The later value.
    pub other: String,
    /// Whether they are the same variant; otherwise their outputs are equal up to eps.
    pub identical: bool,
}

impl std::fmt::Display for Equality {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Equality { key, first, other, identical } = self;
        let how = if *identical { "are the same attention" } else { "have the same output up to rounding and eps" };
        write!(f, "{key}: `{first}` and `{other}` {how}")
    }
}

/// Every value of an attention axis that equals an earlier one.
pub fn equalities(plan: &Plan) -> Vec<Equality> {
    let mut found = Vec::new();
    for axis in plan.axes.iter().filter(|axis| axis.role() == Role::Attention) {
        for (i, other) in axis.values.iter().enumerate() {
            let simplest = simplified(other);
            if let Some(first) = axis.values[..i].iter().find(|first| simplified(first) == simplest) {
                let identical = parsed(first) == parsed(other);
                found.push(Equality { key: axis.key.clone(), first: plain(first), other: plain(other), identical });
            }
        }
    }
    found
}

/// For each job the earlier job, if any, whose settings differ only by an attention with the same output.
pub(super) fn earlier_equals(jobs: &[Job]) -> Vec<Option<usize>> {
    let mut first: HashMap<String, usize> = HashMap::new();
    let known = |(index, job): (usize, &Job)| {
        let earlier = *first.entry(hash(&simplified_table(&job.settings))).or_insert(index);
        (earlier != index).then_some(earlier)
    };
    jobs.iter().enumerate().map(known).collect()
}

fn simplified_table(table: &Table) -> Table {
    let simplify = |(key, value): (&String, &Value)| {
        let value = match value {
            value if Role::of(key) == Role::Attention => simplified(value),
            Value::Table(inner) => Value::Table(simplified_table(inner)),
            value => value.clone(),
        };
        (key.clone(), value)
    };
    table.iter().map(simplify).collect()
}

/// Every variant in a value, in canonical form.
fn simplified(value: &Value) -> Value {
    each_variant(value, &|variant| variant.canonical())
}

/// Every variant in a value, fully expanded.
fn parsed(value: &Value) -> Value {
    each_variant(value, &|variant| variant.clone())
}

fn each_variant(value: &Value, change: &dyn Fn(&Variant) -> Variant) -> Value {
    match value {
        Value::String(text) => text.parse::<Variant>().map_or(value.clone(), |variant| Value::String(change(&variant).to_string())),
        Value::Table(table) => Value::Table(table.iter().map(|(key, value)| (key.clone(), each_variant(value, change))).collect()),
        other => other.clone(),
    }
}
