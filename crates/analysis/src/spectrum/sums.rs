//! Sums over the sampled rows of a head. Parts are merged in a fixed order.

use super::powers::Powers;

/// All sums of one head.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    pub scores: Scores,
    /// Powers of nonnegative scores.
    pub positive: Powers,
    /// Powers of the absolute values of negative scores.
    pub negative: Powers,
    pub entropy: Entropy,
    /// Σ over rows of z_p/z, for each truncation order.
    pub shares: Vec<f64>,
    /// Σ |y_p − y|² over rows, likewise.
    pub errors: Vec<f64>,
    /// The same with the series around the mean score of each row; zeros if a shift of the scores does not cancel.
    pub centered_errors: Vec<f64>,
    /// Σ |y|²
    pub outputs: f64,
    /// Rows.
    pub rows: u64,
}

impl Sums {
    /// Zeros for this number of orders.
    pub fn new(orders: usize) -> Sums {
        Sums { shares: vec![0.0; orders], errors: vec![0.0; orders], centered_errors: vec![0.0; orders], ..Sums::default() }
    }

    /// The sums as sent to other ranks.
    pub fn to_words(&self) -> Vec<u64> {
        let Scores { count, mean, squares, min, max } = self.scores;
        let Entropy { nats, shares, rows, choices } = self.entropy;
        let mut words = vec![count, mean.to_bits(), squares.to_bits(), min.to_bits(), max.to_bits()];
        words.extend([nats.to_bits(), shares.to_bits(), rows, choices, self.outputs.to_bits(), self.rows, self.shares.len() as u64]);
        words.extend(self.shares.iter().chain(&self.errors).chain(&self.centered_errors).map(|x| x.to_bits()));
        words.extend(self.positive.to_words().into_iter().chain(self.negative.to_words()));
        words
    }

    /// Reads sums and advances; `None` if they are incomplete.
    pub fn of_words(words: &mut &[u64]) -> Option<Sums> {
        let mut next = || words.split_off_first().copied();
        let mut number = || next().map(f64::from_bits);
        let (count, mean, squares, min, max) = (number()?.to_bits(), number()?, number()?, number()?, number()?);
        let (nats, shares, rows, choices) = (number()?, number()?, number()?.to_bits(), number()?.to_bits());
        let (outputs, looked, orders) = (number()?, number()?.to_bits(), number()?.to_bits());
        let mut list = || (0..orders).map(|_| number()).collect::<Option<Vec<f64>>>();
        Some(Sums {
            scores: Scores { count, mean, squares, min, max },
            entropy: Entropy { nats, shares, rows, choices },
            shares: list()?,
            errors: list()?,
            centered_errors: list()?,
            outputs,
            rows: looked,
            positive: Powers::of_words(words)?,
            negative: Powers::of_words(words)?,
        })
    }

    /// Adds another accumulator of the same head.
    pub fn merge(&mut self, other: &Sums) {
        self.scores.merge(&other.scores);
        self.positive.merge(&other.positive);
        self.negative.merge(&other.negative);
        self.entropy.merge(&other.entropy);
        let add = |own: &mut Vec<f64>, other: &[f64]| {
            own.resize(other.len().max(own.len()), 0.0);
            own.iter_mut().zip(other).for_each(|(own, other)| *own += other);
        };
        add(&mut self.shares, &other.shares);
        add(&mut self.errors, &other.errors);
        add(&mut self.centered_errors, &other.centered_errors);
        self.outputs += other.outputs;
        self.rows += other.rows;
    }
}

/// Mean and standard deviation without cancellation: stores Σ (x − mean)², not Σ x².
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    pub count: u64,
    pub mean: f64,
    pub squares: f64,
    pub min: f64,
    pub max: f64,
}

impl Default for Scores {
    fn default() -> Scores {
        Scores { count: 0, mean: 0.0, squares: 0.0, min: f64::INFINITY, max: f64::NEG_INFINITY }
    }
}

impl Scores {
    /// Adds another accumulator, by the formula for two samples.
    pub fn merge(&mut self, other: &Scores) {
        if other.count == 0 {
            return;
        }
        let (own, others) = (self.count as f64, other.count as f64);
        let difference = other.mean - self.mean;
        let share = others / (own + others);
        self.mean += difference * share;
        self.squares += other.squares + difference * difference * own * share;
        self.count += other.count;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// Standard deviation over all pairs.
    pub fn deviation(&self) -> f64 {
        (self.squares / self.count.max(1) as f64).sqrt()
    }
}

/// Entropies of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Entropy {
    /// Σ H_t
    pub nats: f64,
    /// Σ H_t/ln S_t over rows with more than one visible key.
    pub shares: f64,
    pub rows: u64,
    /// Rows with more than one visible key.
    pub choices: u64,
}

impl Entropy {
    /// Adds one row.
    pub fn add(&mut self, nats: f64, keys: usize) {
        self.nats += nats;
        self.rows += 1;
        if keys > 1 {
            self.shares += nats / (keys as f64).ln();
            self.choices += 1;
        }
    }

    fn merge(&mut self, other: &Entropy) {
        self.nats += other.nats;
        self.shares += other.shares;
        self.rows += other.rows;
        self.choices += other.choices;
    }
}
