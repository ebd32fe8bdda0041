//! Multi-query associative recall (MQAR, arXiv 2312.04927), with the generator of Zoology.
//!
//! An example of length L with n pairs begins with n keys and values, `k1 v1 k2 v2 …`: keys from 1..V/2, values from V/2..V, each at most once.
//! Of the places that follow, every second one can be a query. Query i is key i at place 2n + 2·(g − 1), where the gaps g of the queries are
//! drawn from 1..=(L − 2n)/2 without replacement with probability p(g) ∝ a·g^(a−1). Its label is the value of the key. All other places are
//! random tokens from 0..V, and have no label.
//!
//! Training examples are a finite set in a random order that depends on the seed, once per epoch. Test examples come in the order of their groups;
//! examples longer than a row are omitted. Shorter examples are padded.

use serde::{Deserialize, Serialize};

use crate::builtin::SyntheticTask;
use crate::error::{Error, Result};
use crate::language::words_tokenizer;
use crate::{BestLoss, Rows, Source, rng, task_options};

/// Options of MQAR.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MqarConfig {
    /// Tokens V; the first half are keys, the second half values.
    pub vocabulary: usize,
    /// Exponent a of the gaps.
    pub a: f64,
    /// Training groups, each as LENGTH:PAIRS:EXAMPLES, separated by slashes.
    pub train: String,
    /// Test groups, likewise.
    pub test: String,
    /// Index of the first test example of each group. Another index selects other examples, for example to tune a learning rate.
    pub held_out_from: usize,
}

/// The sizes of Zoology.
impl Default for MqarConfig {
    fn default() -> MqarConfig {
        MqarConfig {
            vocabulary: 8192,
            a: 0.01,
            train: "64:4:100000/128:8:20000/256:16:20000/256:32:20000/256:64:20000".into(),
            test: "64:4:1000/64:8:1000/64:16:1000/128:32:1000/256:64:1000/512:128:1000/1024:256:1000".into(),
            held_out_from: 0,
        }
    }
}

/// The same with other defaults: a vocabulary of 1,024 and lengths up to 256.
const MINI: &str = "vocabulary=1024 train=64:4:60000/128:8:20000/128:16:20000/128:32:20000 \
    test=64:4:200/64:8:200/128:16:200/128:32:200/256:64:200";

task_options::text_form!(MqarConfig);

/// Examples of one length and number of pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Group {
    length: usize,
    pairs: usize,
    examples: u64,
}

/// MQAR as a source of batches.
#[derive(Clone, Debug)]
pub struct Mqar {
    config: MqarConfig,
    train: Vec<Group>,
    test: Vec<Group>,
}

/// Which examples.
#[derive(Clone, Copy)]
enum Set {
    Train,
    Test,
}

impl Mqar {
    /// MQAR with these options.
    ///
    /// # Errors
    /// If a group is invalid.
    pub fn new(config: MqarConfig) -> Result<Mqar> {
        let refuse = |problem: String| Error::DataSetting { key: "builtin_options", problem };
        if config.vocabulary < 4 || config.vocabulary > 1 << 24 || !config.vocabulary.is_multiple_of(2) {
            return Err(refuse(format!("gives vocabulary={}; it must be even and from 4 to 16777216", config.vocabulary)));
        }
        if !(config.a.is_finite() && config.a > 0.0) {
            return Err(refuse(format!("gives a={}; it must be a positive number", config.a)));
        }
        let groups = |key: &str, text: &str| -> Result<Vec<Group>> {
            let group = |word: &str| {
                let numbers: Option<Vec<u64>> = word.split(':').map(|number| number.parse().ok()).collect();
                let wrong = || refuse(format!("gives {key}={text}; write groups as LENGTH:PAIRS:EXAMPLES, such as 64:4:1000/128:8:1000"));
                let Some(&[length, pairs, examples]) = numbers.as_deref() else { return Err(wrong()) };
                // Every pair needs a place for its query, and keys and values are each at most half of the vocabulary.
                let half = (config.vocabulary / 2) as u64;
                if pairs == 0 || examples == 0 || length % 2 == 1 || length > 1 << 20 || 4 * pairs > length || pairs >= half {
                    let problem = format!(
                        "gives {key} the group {word}; the length must be even, at least four times the pairs and at most 1048576, and there must be \
                         fewer pairs than half of the vocabulary"
                    );
                    return Err(refuse(problem));
                }
                Ok(Group { length: length as usize, pairs: pairs as usize, examples: examples.min(1 << 40) })
            };
            text.split('/').map(group).collect()
        };
        let (train, test) = (groups("train", &config.train)?, groups("test", &config.test)?);
        Ok(Mqar { config, train, test })
    }

    /// The options of the mini version, with these above them.
    ///
    /// # Errors
    /// If the options are invalid.
    pub fn mini(options: &str) -> Result<Mqar> {
        let own: Vec<&str> = options.split([' ', ',']).filter_map(|word| word.split('=').next()).collect();
        let words = MINI.split(' ').filter(|word| !own.iter().any(|key| word.split('=').next() == Some(key)));
        Mqar::new(words.chain([options]).collect::<Vec<_>>().join(" ").parse()?)
    }

    /// The longest example of training.
    fn longest(&self) -> usize {
        self.train.iter().map(|group| group.length).max().unwrap_or(0)
    }

    /// Writes example `number` of a group into a row, which is at least as long.
    fn write(&self, set: Set, group: Group, number: u64, ids: &mut [u32], labels: &mut [i32]) {
        let Group { length, pairs, .. } = group;
        let set = match set {
            Set::Train => 6,
            Set::Test => 7,
        };
        let key = rng::hash(&[set, length as u64, pairs as u64, number]);
        let half = (self.config.vocabulary / 2) as u64;
        for (t, id) in ids[..length].iter_mut().enumerate() {
            *id = rng::below(rng::hash(&[key, 1, t as u64]), 2 * half) as u32;
        }
        let keys = |pair: u64| 1 + rng::permuted(rng::hash(&[key, 2]), half - 1, pair) as u32;
        let values = |pair: u64| (half + rng::permuted(rng::hash(&[key, 3]), half, pair)) as u32;
        let gaps = self.gaps(key, (length - 2 * pairs) / 2, pairs);
        for (pair, gap) in (0..pairs).zip(gaps) {
            let (k, v) = (keys(pair as u64), values(pair as u64));
            (ids[2 * pair], ids[2 * pair + 1]) = (k, v);
            let query = 2 * pairs + 2 * (gap - 1);
            (ids[query], labels[query]) = (k, v as i32);
        }
    }

    /// Distinct gaps from 1..=space, drawn one after another with p(g) ∝ a·g^(a−1) among those that are left: the order of independent exponential
    /// waiting times with rates p(g).
    fn gaps(&self, key: u64, space: usize, count: usize) -> Vec<usize> {
        let wait = |gap: usize| {
            let bits = rng::hash(&[key, 4, gap as u64]);
            // In (0, 1).
            let uniform = ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            -uniform.ln() / (self.config.a * (gap as f64).powf(self.config.a - 1.0))
        };
        let mut waits: Vec<(f64, usize)> = (1..=space).map(|gap| (wait(gap), gap)).collect();
        waits.sort_by(|one, other| one.0.total_cmp(&other.0));
        waits.into_iter().take(count).map(|(_, gap)| gap).collect()
    }
}

/// The group of a number, counted over all groups, and its number there.
fn place(groups: &[Group], mut number: u64) -> Option<(Group, u64)> {
    for &group in groups {
        if number < group.examples {
            return Some((group, number));
        }
        number -= group.examples;
    }
    None
}

impl Source for Mqar {
    fn vocabulary(&self) -> usize {
        self.config.vocabulary
    }

    fn fingerprint(&self) -> String {
        blake3::hash(format!("mqar 1: {:?}", self.config).as_bytes()).to_hex()[..16].to_string()
    }

    fn train(&self, seed: u64, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<()> {
        out.reset(rows, time);
        out.scored = true;
        if time < self.longest() {
            let problem =
                format!("has examples of {} tokens and rows have {time} positions; use --length {}", self.longest(), self.longest());
            return Err(Error::DataSetting { key: "builtin_options", problem });
        }
        let total: u64 = self.train.iter().map(|group| group.examples).sum();
        out.lengths.resize(rows, 1);
        for row in 0..rows {
            let number = index.wrapping_mul(rows as u64).wrapping_add(row as u64);
            let order = rng::hash(&[seed, number / total, 8]);
            let Some((group, number)) = place(&self.train, rng::permuted(order, total, number % total)) else { continue };
            let at = row * time..(row + 1) * time;
            self.write(Set::Train, group, number, &mut out.ids[at.clone()], &mut out.labels[at]);
            out.lengths[row] = group.length;
        }
        Ok(())
    }

    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<bool> {
        out.reset(rows, time);
        out.scored = true;
        let groups: Vec<Group> = self.test.iter().copied().filter(|group| group.length <= time).collect();
        if rows == 0 || place(&groups, index.saturating_mul(rows as u64)).is_none() {
            return Ok(false);
        }
        out.lengths.resize(rows, 1);
        for row in 0..rows {
            let Some((group, number)) = place(&groups, index * rows as u64 + row as u64) else { break };
            let at = row * time..(row + 1) * time;
            let number = self.config.held_out_from as u64 + number;
            self.write(Set::Test, group, number, &mut out.ids[at.clone()], &mut out.labels[at]);
            out.lengths[row] = group.length;
        }
        Ok(true)
    }

    fn best_loss(&self) -> Option<BestLoss> {
        Some(BestLoss { all: 0.0, recall: 0.0, rest: 0.0 })
    }
}

impl SyntheticTask for Mqar {
    fn tokenizer_json(&self) -> Vec<u8> {
        let (vocabulary, half) = (self.config.vocabulary, self.config.vocabulary / 2);
        words_tokenizer((1..vocabulary).map(|token| if token < half { format!("k{token}") } else { format!("v{token}") }))
    }

    fn document(&self) -> Option<usize> {
        Some(self.longest())
    }

    fn has_own_labels(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mqar(options: &str) -> Mqar {
        // The default test groups need a larger vocabulary.
        let test = if options.contains("test=") { "" } else { " test=16:2:3" };
        Mqar::new(format!("{options}{test}").parse().expect("options")).expect("groups")
    }

    fn rows(mqar: &Mqar, count: usize, time: usize) -> Rows {
        let mut rows = Rows::default();
        mqar.train(3, 0, count, time, &mut rows).expect("a batch");
        rows
    }

    #[test]
    fn labels_are_the_values_of_the_queried_keys_and_nothing_else_is_labelled() {
        let mqar = mqar("vocabulary=256 train=32:4:50/64:16:50");
        let rows = rows(&mqar, 100, 64);
        let mut groups = [0, 0];
        for row in 0..100 {
            let (ids, labels) = (&rows.ids[row * 64..][..64], &rows.labels[row * 64..][..64]);
            let pairs = if rows.lengths[row] == 32 { 4 } else { 16 };
            groups[usize::from(pairs == 16)] += 1;
            let keys: Vec<u32> = ids[..2 * pairs].iter().step_by(2).copied().collect();
            let values: Vec<u32> = ids[1..2 * pairs].iter().step_by(2).copied().collect();
            for pair in 0..pairs {
                assert!((1..128).contains(&keys[pair]) && (128..256).contains(&values[pair]));
                assert!(!keys[..pair].contains(&keys[pair]) && !values[..pair].contains(&values[pair]), "each once");
            }
            let labelled: Vec<usize> = (0..64).filter(|&t| labels[t] != -100).collect();
            assert_eq!(labelled.len(), pairs, "one query per pair");
            let mut queried_pairs = Vec::new();
            for t in labelled {
                assert!(t >= 2 * pairs && t < rows.lengths[row] && t % 2 == 0, "position {t}");
                let pair = keys.iter().position(|&key| key == ids[t]).expect("a key of this example");
                assert_eq!(labels[t] as u32, values[pair]);
                queried_pairs.push(pair);
            }
            queried_pairs.sort_unstable();
            assert!(queried_pairs.into_iter().eq(0..pairs), "every key is queried once");
        }
        // An epoch is every example once.
        assert_eq!(groups, [50, 50]);
    }

    /// χ² with 15 degrees of freedom of the first query's gap over 20,000 examples: p(g) ∝ a·g^(a−1). The 0.999 quantile is 37.7.
    #[test]
    fn gaps_follow_the_power_law() {
        for a in [0.01, 1.0] {
            let mqar = mqar(&format!("vocabulary=64 a={a} train=34:1:10"));
            let (space, draws) = (16, 20_000);
            let mut counts = vec![0.0; space];
            (0..draws).for_each(|key| counts[mqar.gaps(rng::hash(&[key]), space, 1)[0] - 1] += 1.0);
            let weights: Vec<f64> = (1..=space).map(|gap| a * (gap as f64).powf(a - 1.0)).collect();
            let total: f64 = weights.iter().sum();
            let expected = |weight: &f64| draws as f64 * weight / total;
            let chi: f64 = counts.iter().zip(&weights).map(|(count, weight)| (count - expected(weight)).powi(2) / expected(weight)).sum();
            assert!(chi < 37.7, "a = {a}: χ² = {chi}");
        }
    }

    /// Of two draws without replacement, the second has p(g₂ | g₁) = p(g₂)/(1 − p(g₁)).
    #[test]
    fn gaps_are_drawn_without_replacement() {
        let mqar = mqar("vocabulary=64 train=16:2:10");
        let p: Vec<f64> = {
            let weights: Vec<f64> = (1..=4).map(|gap| (gap as f64).powf(-0.99)).collect();
            weights.iter().map(|weight| weight / weights.iter().sum::<f64>()).collect()
        };
        let draws = 40_000;
        let mut counts = [[0.0; 4]; 4];
        for key in 0..draws {
            let gaps = mqar.gaps(rng::hash(&[key, 5]), 4, 2);
            counts[gaps[0] - 1][gaps[1] - 1] += 1.0;
        }
        for (i, j) in (0..4).flat_map(|i| (0..4).map(move |j| (i, j))) {
            let expected = if i == j { 0.0 } else { draws as f64 * p[i] * p[j] / (1.0 - p[i]) };
            assert!((counts[i][j] - expected).abs() <= 5.0 * expected.sqrt(), "{i} {j}: {} {expected}", counts[i][j]);
        }
    }

    #[test]
    fn test_examples_that_fit_come_in_order_and_bad_options_are_named() {
        let mqar = mqar("vocabulary=64 train=16:2:4 test=16:2:3/32:4:2");
        let mut out = Rows::default();
        let mut lengths = Vec::new();
        let mut index = 0;
        while mqar.held_out(index, 2, 32, &mut out).expect("a batch") {
            lengths.extend((0..2).filter(|row| out.labels[row * 32..][..32].iter().any(|&label| label >= 0)).map(|row| out.lengths[row]));
            index += 1;
        }
        assert_eq!(lengths, [16, 16, 16, 32, 32]);
        assert!(mqar.held_out(1, 2, 16, &mut out).expect("a batch") && !mqar.held_out(2, 2, 16, &mut out).expect("none"));
        assert!(mqar.train(1, 0, 1, 8, &mut out).is_err());
        for (options, expected) in [
            ("vocabulary=7", "even"),
            ("train=64:4", "LENGTH:PAIRS:EXAMPLES"),
            ("train=16:5:1", "four times the pairs"),
            ("a=-1", "positive"),
            ("pairs=3", "no option `pairs`"),
        ] {
            let error = options.parse().and_then(Mqar::new).expect_err(options).to_string();
            assert!(error.contains(expected), "{options}: {error}");
        }
        let mini = Mqar::mini("vocabulary=512").expect("options");
        assert_eq!((mini.vocabulary(), mini.longest()), (512, 128));
        assert_eq!(Mqar::new(MqarConfig::default()).expect("Zoology").train.iter().map(|group| group.examples).sum::<u64>(), 180_000);
    }
}
