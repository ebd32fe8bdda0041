//! Loss and KL against bytes for all allocation methods, on the same contexts.
//!
//! Rule, declared in code: at a budget, one method is better than another if the 95 % interval (Student's t) of the mean paired difference of losses over
//! contexts excludes zero. There is no verdict with fewer than three contexts.

mod best;
mod document;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use termwise_base::statistics::t_quantile_975;
use termwise_model::{Config, Model};

use crate::kv::assemble::Bench;
use crate::kv::convert::{Prepared, SIZES, bytes_of, overhead};
use crate::kv::journal::{Journal, digest};
use crate::kv::kinds::{Family, Kind, key_bytes};
use crate::kv::meter::{ByPosition, Reference, Sums, known, whole};
use crate::kv::{Error, ProgressFn, Texts};

pub use best::{Best, Saving};

/// Budgets are smaller, keys per KV head.
const MAX_KEYS: u64 = 1 << 30;

/// A method of allocation within a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Method {
    /// Name in tables.
    pub name: &'static str,
    /// Candidate kinds of memory.
    families: &'static [Family],
    /// Whether each KV head has its own kind; otherwise all have the same, of the first family.
    per_head: bool,
    /// Whether it combines several techniques.
    combined: bool,
}

impl Method {
    /// One technique, the same for all heads.
    const fn one(name: &'static str, families: &'static [Family]) -> Method {
        Method { name, families, per_head: false, combined: false }
    }

    /// Several techniques, the same for all heads.
    const fn several(name: &'static str, families: &'static [Family]) -> Method {
        Method { name, families, per_head: false, combined: true }
    }

    /// Several techniques, chosen per KV head.
    const fn head_method(name: &'static str, families: &'static [Family]) -> Method {
        Method { name, families, per_head: true, combined: true }
    }
}

const WINDOW: Family = Family::WINDOW;
const HEAVY_HITTERS: Family = Family { heavy_hitters: true, ..WINDOW };
const RECENT_HEAVY_HITTERS: Family = Family { fade: true, ..HEAVY_HITTERS };
const BITS8: Family = Family { bits: [8, 8], ..WINDOW };
const BITS84: Family = Family { bits: [8, 4], ..WINDOW };
const BITS4: Family = Family { bits: [4, 4], ..WINDOW };
const BITS8_HEAVY_HITTERS: Family = Family { heavy_hitters: true, ..BITS8 };
const BITS84_HEAVY_HITTERS: Family = Family { heavy_hitters: true, ..BITS84 };
const BITS4_HEAVY_HITTERS: Family = Family { heavy_hitters: true, ..BITS4 };
const BITS8_RECENT: Family = Family { fade: true, ..BITS8_HEAVY_HITTERS };
const BITS84_RECENT: Family = Family { fade: true, ..BITS84_HEAVY_HITTERS };
const BITS4_RECENT: Family = Family { fade: true, ..BITS4_HEAVY_HITTERS };

/// The families that `convert` chooses from.
pub const ALL: &[Family] = &[
    WINDOW,
    BITS8,
    BITS8_HEAVY_HITTERS,
    BITS8_RECENT,
    BITS84,
    BITS84_HEAVY_HITTERS,
    BITS84_RECENT,
    BITS4,
    BITS4_HEAVY_HITTERS,
    BITS4_RECENT,
];

/// The methods, single techniques first.
pub const METHODS: &[Method] = &[
    Method::one("window", &[WINDOW]),
    Method { per_head: true, ..Method::one("window per head", &[WINDOW]) },
    Method::one("heavy hitters", &[HEAVY_HITTERS]),
    Method::one("recent heavy hitters", &[RECENT_HEAVY_HITTERS]),
    Method::one("8 bits", &[BITS8]),
    Method::one("8/4 bits", &[BITS84]),
    Method::one("4 bits", &[BITS4]),
    Method::several("8 bits + heavy hitters", &[BITS8_HEAVY_HITTERS]),
    Method::several("4 bits + heavy hitters", &[BITS4_HEAVY_HITTERS]),
    Method::head_method("heavy hitters per head", &[WINDOW, HEAVY_HITTERS]),
    Method::head_method("8 bits per head", &[BITS8, BITS8_HEAVY_HITTERS]),
    Method::head_method("all kinds per head", ALL),
];

/// Names of methods in earlier builds, and the current ones.
const EARLIER_NAMES: [(&str, &str); 8] = [
    ("window by head", "window per head"),
    ("chosen", "heavy hitters"),
    ("chosen lately", "recent heavy hitters"),
    ("8 bits + chosen", "8 bits + heavy hitters"),
    ("4 bits + chosen", "4 bits + heavy hitters"),
    ("chosen by head", "heavy hitters per head"),
    ("8 bits by head", "8 bits per head"),
    ("everything by head", "all kinds per head"),
];

/// Compared pairs of methods; the hypothesis is that the first is better.
pub const PAIRS: &[(&str, &str)] = &[
    ("window per head", "window"),
    ("heavy hitters", "window"),
    ("8 bits", "window"),
    ("4 bits + heavy hitters", "4 bits"),
    ("all kinds per head", "window"),
    ("all kinds per head", "8 bits"),
    ("all kinds per head", "4 bits"),
    ("all kinds per head", "8 bits per head"),
    ("all kinds per head", "8 bits + heavy hitters"),
];

impl Method {
    /// The methods of these names; all methods if there are no names. Names of earlier builds are accepted.
    pub fn named(names: &[String]) -> Result<Vec<&'static Method>, Error> {
        let names: Vec<String> = names
            .iter()
            .map(|name| EARLIER_NAMES.iter().find(|(old, _)| old == name).map_or(name.as_str(), |(_, new)| *new).to_owned())
            .collect();
        if let Some(unknown) = names.iter().find(|name| METHODS.iter().all(|method| method.name != **name)) {
            let all: Vec<&str> = METHODS.iter().map(|method| method.name).collect();
            return Err(Error::Request(format!("unknown method `{unknown}`; available: {}", all.join(", "))));
        }
        Ok(METHODS.iter().filter(|method| names.is_empty() || names.iter().any(|name| name == method.name)).collect())
    }

    /// The families whose errors these methods need: those of methods with a choice per KV head.
    pub fn families(methods: &[&Method]) -> Vec<Family> {
        let mut all: Vec<Family> = Vec::new();
        for family in methods.iter().filter(|method| method.per_head).flat_map(|method| method.families) {
            if !all.contains(family) {
                all.push(*family);
            }
        }
        all
    }

    /// The kinds of all KV heads within a byte budget; `None` if nothing fits.
    pub fn choose(&self, prepared: &Prepared, units: usize, d: usize, bytes: u64) -> Option<Vec<Kind>> {
        if self.per_head {
            return prepared.choose(self.families, 1, d, bytes);
        }
        Some(vec![self.families[0].largest(d, bytes.checked_sub(prepared.overhead)? / units as u64)?; units])
    }

    /// The smallest budget, in keys per KV head, within which one of these methods fits.
    pub fn least_keys(methods: &[&Method], config: &Config) -> Result<u64, Error> {
        let (units, d) = ((config.num_hidden_layers * config.num_key_value_heads) as u64, config.head_dim);
        let smallest = |method: &&Method| {
            let keys = if method.per_head { SIZES[0] } else { 1 };
            method.families.iter().map(|family| family.of(keys).bytes(d)).min()
        };
        let least = methods.iter().filter_map(smallest).min().unwrap_or(0) * units + overhead(config)?;
        Ok(least.div_ceil(key_bytes(d) * units))
    }

    /// Rejects budgets that are too small for all of these methods.
    pub fn check_budgets(methods: &[&Method], keys: &[u64], config: &Config) -> Result<(), Error> {
        let least = Method::least_keys(methods, config)?;
        match keys.iter().find(|&&keys| !(least..MAX_KEYS).contains(&keys)) {
            Some(keys) if *keys < least => Err(Error::Request(format!(
                "--keys {keys} is too small: the smallest memory of these methods takes {least} keys per KV head; use --keys {least} or more"
            ))),
            Some(keys) => Err(Error::Request(format!("--keys {keys} is too large: budgets are below {MAX_KEYS} keys per KV head"))),
            None if keys.is_empty() => Err(Error::Request(format!("no budget was given; set --keys to {least} or more"))),
            None => Ok(()),
        }
    }
}

/// One method at one budget on one text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The method.
    pub method: String,
    /// Budget in 16-bit key/value pairs per KV head.
    pub keys: u64,
    /// Bytes of the model's memory.
    pub bytes: u64,
    /// The text.
    pub text: String,
    /// Sums per context and bucket of positions.
    pub contexts: Vec<ByPosition>,
}

impl Point {
    /// Mean loss increase over contexts, and its standard error for two or more.
    pub fn rise(&self) -> (f64, Option<f64>) {
        mean_and_error(&self.contexts.iter().map(|buckets| whole(buckets).rise()).collect::<Vec<_>>())
    }

    /// Mean KL over contexts, and its standard error.
    pub fn kl(&self) -> (f64, Option<f64>) {
        mean_and_error(&self.contexts.iter().map(|buckets| whole(buckets).mean_kl()).collect::<Vec<_>>())
    }

    /// Sums over contexts by bucket.
    pub fn buckets(&self) -> Vec<Sums> {
        let count = self.contexts.iter().map(Vec::len).max().unwrap_or(0);
        let mut all = vec![Sums::default(); count];
        self.contexts.iter().for_each(|buckets| all.iter_mut().zip(buckets).for_each(|(all, one)| all.add(one)));
        all
    }
}

/// Two methods at one budget.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The first method, by hypothesis the better one.
    pub a: String,
    /// The second method.
    pub b: String,
    /// The budget.
    pub keys: u64,
    /// Common contexts of all texts.
    pub contexts: usize,
    /// Mean of loss(a) − loss(b) over contexts.
    pub difference: f64,
    /// Its 95 % interval; `None` for fewer than three contexts.
    pub interval: Option<(f64, f64)>,
    /// Verdict of the rule.
    pub verdict: Verdict,
}

/// Verdict of the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The first is better.
    Better,
    /// It is worse.
    Worse,
    /// The interval contains zero, or there is no interval.
    Open,
}

impl Verdict {
    fn of(interval: Option<(f64, f64)>) -> Verdict {
        match interval {
            Some((_, high)) if high < 0.0 => Verdict::Better,
            Some((low, _)) if low > 0.0 => Verdict::Worse,
            _ => Verdict::Open,
        }
    }

    /// Word in tables.
    fn word(self) -> &'static str {
        match self {
            Verdict::Better => "better",
            Verdict::Worse => "worse",
            Verdict::Open => "open",
        }
    }
}

/// Student's 95 % interval of the mean; `None` for fewer than three values.
fn interval(mean: f64, error: Option<f64>, count: usize) -> Option<(f64, f64)> {
    let half = t_quantile_975((count.max(2) - 1) as f64) * error.filter(|_| count >= 3)?;
    Some((mean - half, mean + half))
}

/// The result, filled in during the measurements.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Frontier {
    /// Name of the model, as given.
    pub model: String,
    /// Tokens per context.
    pub length: usize,
    /// Texts, number of contexts, and whether other parts of the text were used for calibration.
    pub texts: Vec<(String, usize, bool)>,
    /// Number of calibration tokens.
    pub calibration_tokens: usize,
    /// Bytes of one 16-bit key/value pair, the unit of budgets.
    pub key_bytes: u64,
    /// KV heads of the model.
    pub kv_heads: usize,
    /// Loss of the original by text, nats per token.
    pub original: Vec<f64>,
    /// Measurements.
    pub points: Vec<Point>,
    /// Verdicts of the rule.
    pub comparisons: Vec<Comparison>,
    /// The best combination against the best single method.
    #[serde(default)]
    pub best: Vec<Best>,
    /// Bytes at equal loss.
    #[serde(default)]
    pub savings: Vec<Saving>,
    /// Methods and budgets that are too small for them.
    #[serde(default)]
    pub too_small: Vec<(String, u64)>,
    /// Method, budget and kind, for methods with the same kind in all heads.
    #[serde(default)]
    pub kinds: Vec<(String, u64, String)>,
    /// Whether all requested measurements are complete.
    pub finished: bool,
}

/// Options of [`run`].
pub struct Options<'a> {
    /// Budgets in 16-bit key/value pairs per KV head.
    pub keys: Vec<u64>,
    /// Names of methods; empty: all.
    pub methods: Vec<String>,
    /// File of finished measurements.
    pub journal: Option<&'a Path>,
}

/// Runs the measurements and calls `show` with each intermediate result. Contexts alternate between texts, and all methods finish a context before the next
/// one, so every intermediate result can be compared.
#[allow(clippy::too_many_arguments, reason = "model, texts, options and the callback are separate")]
pub fn run(
    model: &Model,
    prepared: &Prepared,
    texts: &Texts,
    options: &Options,
    about: Frontier,
    stop: &AtomicBool,
    progress: ProgressFn,
    show: &mut dyn FnMut(&Frontier),
) -> Result<Frontier, Error> {
    let config = &model.config;
    let (units, d) = (config.num_hidden_layers * config.num_key_value_heads, config.head_dim);
    let methods = Method::named(&options.methods)?;
    Method::check_budgets(&methods, &options.keys, config)?;
    let (mut plans, mut too_small): (Vec<(&Method, u64, Vec<Kind>)>, _) = (Vec::new(), Vec::new());
    for &keys in &options.keys {
        let bytes = keys * key_bytes(d) * units as u64;
        for &method in &methods {
            match method.choose(prepared, units, d, bytes) {
                Some(kinds) => plans.push((method, keys, kinds)),
                None => too_small.push((method.name.to_owned(), keys)),
            }
        }
    }
    let mut journal = Journal::open(options.journal)?;
    let mut result = Frontier {
        length: texts.evaluation.first().and_then(|text| text.contexts.first()).map_or(0, Vec::len),
        texts: texts.evaluation.iter().map(|text| (text.name.clone(), text.contexts.len(), text.calibrated)).collect(),
        key_bytes: key_bytes(d),
        kv_heads: units,
        original: vec![f64::NAN; texts.evaluation.len()],
        points: Vec::new(),
        too_small,
        kinds: plans
            .iter()
            .filter(|(_, _, kinds)| kinds.iter().all(|kind| *kind == kinds[0]))
            .map(|(method, keys, kinds)| (method.name.to_owned(), *keys, kinds[0].label()))
            .collect(),
        ..about
    };
    for text in &texts.evaluation {
        for (method, keys, kinds) in &plans {
            let (bytes, text) = (bytes_of(kinds, d, prepared.overhead), text.name.clone());
            result.points.push(Point { method: method.name.into(), keys: *keys, bytes, text, contexts: Vec::new() });
        }
    }
    let most = texts.evaluation.iter().map(|text| text.contexts.len()).max().unwrap_or(0);
    let key = |kinds: &[Kind], context: &[u32]| digest(&format!("frontier {} {kinds:?} {context:?}", prepared.gathered.identity));
    // Progress counts missing measurements only.
    let all = texts.evaluation.iter().flat_map(|text| &text.contexts).flat_map(|context| plans.iter().map(move |plan| (plan, context)));
    let total = all.filter(|((_, _, kinds), context)| known(&journal, &key(kinds, context), context).is_none()).count() as u64;
    let mut bench = Bench::new(model);
    let mut done = 0;
    for index in 0..most {
        for (place, text) in texts.evaluation.iter().enumerate().filter(|(_, text)| index < text.contexts.len()) {
            let context = &text.contexts[index];
            let mut reference = None;
            for (at, (method, keys, kinds)) in plans.iter().enumerate() {
                let key = key(kinds, context);
                let found: ByPosition = match known(&journal, &key, context) {
                    Some(known) => known,
                    None => {
                        if stop.load(Ordering::Relaxed) {
                            result.compare();
                            show(&result);
                            return Ok(result);
                        }
                        let reference = match &reference {
                            Some(reference) => reference,
                            None => reference.insert(Reference::new(model, context)?),
                        };
                        let kinds: Vec<Option<Kind>> = kinds.iter().copied().map(Some).collect();
                        let found = reference.compare(bench.assemble(&kinds)?)?;
                        journal.put(&key, &format!("{}, {keys} keys, {} {index}", method.name, text.name), &found);
                        done += 1;
                        progress(done, total, &format!("{} at {keys} keys", method.name));
                        found
                    }
                };
                result.points[place * plans.len() + at].contexts.push(found);
            }
            let all: Vec<Sums> = (0..=index).filter_map(|i| Some(whole(result.points[place * plans.len()].contexts.get(i)?))).collect();
            let (loss, count) = all.iter().fold((0.0, 0), |(loss, count), sums| (loss + sums.original, count + sums.count));
            result.original[place] = loss / count.max(1) as f64;
            result.compare();
            show(&result);
        }
    }
    result.finished = true;
    result.compare();
    show(&result);
    Ok(result)
}

impl Frontier {
    /// Applies the rule to the measurements.
    pub fn compare(&mut self) {
        let keys = self.budgets();
        self.comparisons.clear();
        for &(a, b) in PAIRS {
            for &keys in &keys {
                let of = |name: &str, text: &str| {
                    self.points.iter().find(|point| point.method == name && point.keys == keys && point.text == text)
                };
                let mut differences = Vec::new();
                for (text, ..) in &self.texts {
                    let (Some(a), Some(b)) = (of(a, text), of(b, text)) else { continue };
                    differences.extend(a.contexts.iter().zip(&b.contexts).map(|(a, b)| whole(a).rise() - whole(b).rise()));
                }
                if differences.is_empty() {
                    continue;
                }
                let (difference, error) = mean_and_error(&differences);
                let interval = interval(difference, error, differences.len());
                let verdict = Verdict::of(interval);
                self.comparisons.push(Comparison {
                    a: a.into(),
                    b: b.into(),
                    keys,
                    contexts: differences.len(),
                    difference,
                    interval,
                    verdict,
                });
            }
        }
        self.best = best::best(self);
        self.savings = best::savings(self);
    }

    /// Loss increase of a method at a budget per context, over all texts; `None` if a text lacks the method.
    fn rises(&self, method: &str, keys: u64) -> Option<Vec<f64>> {
        let mut all = Vec::new();
        for (text, ..) in &self.texts {
            let point = self.points.iter().find(|point| point.method == method && point.keys == keys && point.text == *text)?;
            all.extend(point.contexts.iter().map(|buckets| whole(buckets).rise()));
        }
        Some(all)
    }

    /// The budgets, ascending.
    fn budgets(&self) -> Vec<u64> {
        let mut keys: Vec<u64> = self.points.iter().map(|point| point.keys).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }
}

/// Mean and standard error, for two or more values.
fn mean_and_error(values: &[f64]) -> (f64, Option<f64>) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n.max(1.0);
    let error = (values.len() > 1).then(|| (values.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / (n - 1.0) / n).sqrt());
    (mean, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(method: &str, losses: &[f64]) -> Point {
        let contexts = losses.iter().map(|&loss| vec![Sums { count: 10, loss: 10.0 * loss, original: 0.0, kl: 0.0 }]).collect();
        Point { method: method.into(), keys: 64, bytes: 1, text: "t".into(), contexts }
    }

    #[test]
    fn verdicts_follow_the_rule() {
        let compare = |a: &[f64], b: &[f64]| {
            let points = vec![point("heavy hitters", a), point("window", b)];
            let mut frontier = Frontier { texts: vec![("t".into(), 9, true)], points, ..Frontier::default() };
            frontier.compare();
            frontier
                .comparisons
                .into_iter()
                .find(|comparison| comparison.a == "heavy hitters" && comparison.b == "window")
                .expect("a comparison")
        };
        let found = compare(&[1.0, 2.0, 3.0, 4.0], &[1.1, 2.11, 3.09, 4.1]);
        assert_eq!(found.verdict, Verdict::Better);
        // Paired: contexts differ by far more than methods do.
        assert!(
            (found.difference + 0.1).abs() < 1e-9 && found.interval.is_some_and(|(low, high)| low < -0.1 && high > -0.1 && high < -0.08)
        );
        assert_eq!(compare(&[1.1, 2.11, 3.09], &[1.0, 2.0, 3.0]).verdict, Verdict::Worse);
        assert_eq!(compare(&[1.0, 2.0], &[1.1, 2.1]).verdict, Verdict::Open);
        assert_eq!(compare(&[1.0, 2.0, 3.0], &[1.1, 1.9, 3.1]).verdict, Verdict::Open);
    }

    #[test]
    fn every_method_that_is_compared_exists() {
        // Names are given in a list.
        assert!(METHODS.iter().all(|method| !method.name.contains(',')));
        for (a, b) in PAIRS {
            assert!([a, b].iter().all(|name| METHODS.iter().any(|method| method.name == **name)), "{a} {b}");
        }
    }
}
