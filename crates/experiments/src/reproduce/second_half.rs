//! Experiments on the delta rule, decay, windows and far keys. They are not from a paper; each claim states an expectation.
//!
//! The learning rate of each variant is chosen from one grid ([`RATES`]) with one run of another seed; variants are then compared over seeds.
//! Models have one layer, so all recall uses one state.

use toml::{Table, Value};

use super::claim::{Claim, Rule};
use super::experiment::{Experiment, Id, Metric, Task, Variant};
use super::list::{SOFTMAX, lower, variant};
use super::scale::{ONE_LAYER, Scale, table};

/// Each a factor of 2.5 from the next.
const RATES: [f64; 4] = [1.6e-3, 4e-3, 1e-2, 2.5e-2];

/// The first held-out document on which learning rates are chosen, beyond those of every task.
const TUNING_DOCUMENTS: usize = 1 << 20;

/// The settings of tuning runs: other documents of the task of these settings.
pub(super) fn tuning_documents(base: &Table) -> Table {
    let language = base.get("language").and_then(Value::as_str).unwrap_or_default();
    let other = format!("{language} held_out_from={TUNING_DOCUMENTS}").trim_start().to_owned();
    Table::from_iter([("language".to_owned(), Value::String(other))])
}

/// Orders that are compared, each with a head dimension d that makes all states about equal: C(d + n − 1, n)·d is 324, 288 and 336.
const ORDERS: [(usize, i64); 3] = [(1, 18), (2, 8), (3, 6)];

/// Shared by all, in addition to [`ONE_LAYER`].
const BASE: &str = "init_std = 0.2\nlog_every = 100\n";

/// Eight facts are stated twice, then queried.
const OVERWRITTEN: &str = r#"
language = "length=64 facts=8 updates=8 keys=16 values=16 words=4 branching=2 fact_rate=0.95 question_rate=0.95 held_out=256"
length = 64
steps = 1200
eval_every = 300
"#;

const BITS: &str = r#"
data = ["builtin:parity"]
language = "held_out=64"
recipe = "default"
length = 32
eval_length = 128
steps = 1200
eval_every = 300
"#;

/// Each fact is queried once, farther away than any window reaches. More steps, because fewer tokens are queries.
const FAR: &str = r#"
language = "length=80 facts=8 gap=40 keys=16 values=16 words=4 branching=2 fact_rate=1 question_rate=1 held_out=192"
length = 80
steps = 2500
eval_every = 625
"#;

/// A few steps, for tests.
const SHORT: &str = "steps = 4\nwarmup = 1\neval_every = 2\nlog_every = 2\nhidden = 8\nmlp = 8\n";

/// Empty at scales without time for a grid of learning rates.
fn tasks(scale: Scale, name: &str, base: &str, words: &'static str, metric: Metric) -> Vec<Task> {
    let task = |above: &[&str], rates: &[f64]| {
        let texts: Vec<&str> = [ONE_LAYER, BASE, base].iter().chain(above).copied().collect();
        let base = table(&texts);
        let tuning = tuning_documents(&base);
        vec![Task { name: name.into(), base, words, metric, rates: rates.into(), tuning }]
    };
    match scale {
        Scale::Test => task(&[SHORT], &RATES[..2]),
        Scale::Laptop => task(&[], &RATES),
        _ => Vec::new(),
    }
}

/// A single order with unit queries and keys, which make the delta rule stable, an output norm instead of a denominator, and no RoPE, as in
/// DeltaNet.
fn orders(scale: Scale, writes: &[(&str, &str)]) -> Vec<Variant> {
    let mut variants = vec![variant(SOFTMAX, "softmax")];
    for (order, head_dim) in ORDERS.into_iter().filter(|(order, _)| *order == 1 || !scale.is_short()) {
        for (write, word) in writes {
            for (decay, more) in [("", ""), (", decay", " decay=mamba")] {
                let attention = format!("power={order} qk_norm=l2 rope=off over=none norm=rms{word}{more}");
                let settings = Table::from_iter([("head_dim".to_owned(), Value::Integer(head_dim))]);
                variants.push(Variant { name: format!("{}{decay}", named(order, write)), attention, settings, seeds: None });
            }
        }
    }
    variants
}

/// `order 2`, `order 2, delta`
fn named(order: usize, write: &str) -> String {
    format!("order {order}{write}")
}

fn claim(text: String, rule: Rule) -> Claim {
    Claim { text, rule }
}

fn below(one: String, bound: f64, text: String) -> Claim {
    claim(text, Rule::Below { one, bound })
}

fn above(one: String, bound: f64, text: String) -> Claim {
    claim(text, Rule::Above { one, bound })
}

/// The claims about each order of this scale.
fn for_orders(scale: Scale, claims: impl Fn(usize) -> Vec<Claim>) -> Vec<Claim> {
    let orders = ORDERS.iter().map(|(order, _)| *order).filter(|order| *order == 1 || !scale.is_short());
    orders.flat_map(claims).collect()
}

const DELTA: &str = ", delta";
const DELTA_2: &str = ", delta to 2";

pub fn overwrite(scale: Scale) -> Experiment {
    let of_order = |order: usize| {
        let (plain, delta) = (named(order, ""), named(order, DELTA));
        let decay = format!("{plain}, decay");
        let mut claims = vec![
            lower(&delta, &plain, &format!("the write rule recalls overwritten facts better than plain writing, order {order}")),
            lower(&decay, &plain, &format!("decay recalls them better than no decay, order {order}")),
            lower(&delta, &decay, &format!("the write rule recalls them better than decay, order {order}")),
        ];
        if order > 1 {
            for write in ["", DELTA] {
                let [this, first] = [order, 1].map(|order| named(order, write));
                claims.push(lower(&this, &first, &format!("{this} recalls them better than {first} in a state of the same size")));
            }
        }
        claims
    };
    Experiment {
        id: Id::Overwrite,
        question: "How do Taylor orders, the delta rule and decay compare at equal state size when facts are overwritten?",
        paper: "At order 1 the write rule is DeltaNet and with decay Gated DeltaNet, made for this; of other orders nothing is published.",
        variants: orders(scale, &[("", ""), (DELTA, " write=delta")]),
        tasks: tasks(scale, "overwritten facts", OVERWRITTEN, "conv=3", Metric::Recall),
        claims: for_orders(scale, of_order),
    }
}

/// Parity is tracked if the loss is below the first, and not tracked if it is above the second; chance is 0.693.
const TRACKED_BELOW: f64 = 0.1;
const UNTRACKED_ABOVE: f64 = 0.5;

pub fn parity(scale: Scale) -> Experiment {
    let of_order = |order: usize| {
        vec![
            below(
                named(order, DELTA_2),
                TRACKED_BELOW,
                format!("with β up to 2, order {order} keeps parity beyond the length of training"),
            ),
            above(named(order, DELTA), UNTRACKED_ABOVE, format!("with β up to 1, order {order} cannot")),
            above(named(order, ""), UNTRACKED_ABOVE, format!("with plain writing, order {order} cannot")),
            above(format!("{}, decay", named(order, "")), UNTRACKED_ABOVE, format!("with decay, order {order} cannot")),
        ]
    };
    let mut claims = for_orders(scale, of_order);
    claims.push(above(SOFTMAX.into(), UNTRACKED_ABOVE, "softmax cannot".into()));
    Experiment {
        id: Id::Parity,
        question: "Which of them track parity at four times the training length?",
        paper: "With β in (0, 2) the delta rule learns parity and keeps it beyond the length of training, with β in (0, 1) it cannot \
            (arXiv 2411.12537, order 1).",
        variants: orders(scale, &[("", ""), (DELTA, " write=delta"), (DELTA_2, " write=delta,2")]),
        tasks: tasks(scale, "parity", BITS, "", Metric::Beyond),
        claims,
    }
}

/// Far orders up to n, the dimension to which queries and keys are projected, and the window that makes all memories about as large as
/// [`LONGER`]: a key takes 32 numbers, a row of the state 17, and there are 17, 45 and 35 rows.
const FAR_ORDERS: [(usize, usize, usize); 3] = [(1, 16, 23), (2, 8, 8), (3, 4, 14)];
const LONGER: &str = "window 33";

pub fn distance(scale: Scale) -> Experiment {
    let far = |order: usize| format!("far orders 0..{order}");
    let attention =
        |(order, dim, window): (usize, usize, usize)| format!("softmax window={window} sinks=1 far(taylor=0..{order} dim={dim})");
    let mut variants = vec![variant(SOFTMAX, "softmax"), variant(LONGER, "softmax window=33")];
    variants.extend(FAR_ORDERS.map(|sizes| variant(&far(sizes.0), &attention(sizes))));
    let mut claims: Vec<Claim> = FAR_ORDERS
        .map(|(order, _, _)| {
            lower(&far(order), LONGER, &format!("far orders 0..{order} recall what a longer window of the same bytes does not"))
        })
        .into();
    claims.push(lower(&far(2), &far(1), "far orders 0..2 recall better than 0..1 in as many bytes"));
    claims.push(lower(&far(3), &far(2), "far orders 0..3 recall better than 0..2 in as many bytes"));
    let (one, other) = (far(2), SOFTMAX.to_owned());
    let rule = Rule::Equal { one, other: other.clone(), low: other, high: LONGER.into(), share: 0.1 };
    claims.push(claim("far orders 0..2 come as close to all keys as a tenth of what the longer window misses".into(), rule));
    Experiment {
        id: Id::Distance,
        question: "Does a window with a sink and far orders recall what a longer window of the same bytes cannot see?",
        paper: "Based and LoLCATs join a window with a linear attention over all or older keys; at equal bytes of state, and for orders under one \
            denominator, nothing is published.",
        variants,
        tasks: tasks(scale, "facts beyond the window", FAR, "conv=3", Metric::Recall),
        claims,
    }
}
