//! F in closed form.
//!
//! With w the weight on row j3 and w' that on each other row, with ⟨u,1⟩ = 1 and b + c = 1,
//!
//! (⟨c_j, y⟩ − τ) / √ln n = ±w·a + b·(1 − 2W) ± c − c − 0.1,
//!
//! where W is the weight on rows whose column of the identity has y = −1: w' for each such row, w for row j3. There is no
//! cancellation: if b = 0.1 and all of y is +1, w·a is accurate to the last digit.

use super::draw::bit;
use super::{Draw, Network, Setting, Weights};
use crate::Error;

/// τ = (c + this)·√ln n.
pub(super) const SLACK: f64 = 0.1;

/// A network on D_0 and D_1.
#[derive(Clone, Debug)]
pub struct Pair {
    pub(super) setting: Setting,
    /// D_0 and D_1.
    pub(super) sides: [Side; 2],
    /// Columns of the identity, and the number of them that the truncated copy reaches.
    classes: Vec<u64>,
    long: Vec<u64>,
}

/// A network on one of the data sets.
#[derive(Clone, Copy, Debug)]
pub struct Side {
    a: f64,
    b: f64,
    c: f64,
    /// Queries other than row j3, and their number.
    ordinary: (Weights, f64),
    /// Row j3 as a query, unless it equals the others.
    spike: Option<Weights>,
}

/// The signs of a vector y: everything that F depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signs {
    /// Whether the column of the spike has −1.
    pub spike: bool,
    /// Whether the constant column has −1.
    pub constant: bool,
    /// Whether the identity column of row j3 has −1.
    pub own: bool,
    /// Number of rows other than j3 whose column of the identity has −1.
    pub others: u64,
}

impl Side {
    /// With this a.
    pub fn new(network: Network, setting: &Setting, a: f64) -> Side {
        let Setting { n, b, c, cross, .. } = *setting;
        let weights = |query| network.weights(n, a, query);
        let spike = (!cross).then(|| weights(1.0 + a));
        let count = if cross { n } else { n - 1 };
        Side { a, b, c, ordinary: (weights(1.0), count as f64), spike }
    }

    /// (⟨c_j, y⟩ − τ) / √ln n for a query with these weights.
    fn excess(&self, weights: Weights, signs: Signs) -> f64 {
        let spike = if signs.spike { -self.a } else { self.a };
        let own = if signs.own { weights.spike } else { 0.0 };
        let constant = if signs.constant { 2.0 * self.c } else { 0.0 };
        weights.spike * spike + (self.b - SLACK) - 2.0 * self.b * (weights.other * signs.others as f64 + own) - constant
    }

    /// Σ_j relu(⟨c_j, y⟩ − τ) / √ln n.
    pub fn response(&self, signs: Signs) -> f64 {
        let (weights, count) = self.ordinary;
        let own = self.spike.map_or(0.0, |weights| self.excess(weights, signs).max(0.0));
        count * self.excess(weights, signs).max(0.0) + own
    }
}

impl Pair {
    /// This network in this setting, if the setting is valid.
    pub fn new(network: Network, setting: &Setting) -> Result<Pair, Error> {
        setting.check()?;
        let columns = |count: usize| {
            let mut words = vec![0u64; setting.d.div_ceil(64)];
            (1..=count).for_each(|column| words[column / 64] |= 1 << (column % 64));
            words
        };
        let (_, extra) = setting.copies();
        Ok(Pair {
            setting: *setting,
            sides: [setting.a0, setting.a1].map(|a| Side::new(network, setting, a)),
            classes: columns(setting.d - 2),
            long: columns(extra),
        })
    }

    /// F on D_0 and on D_1.
    pub fn outputs(&self, draw: &Draw) -> [f64; 2] {
        let length = self.setting.length();
        let mut sums = [0.0; 2];
        for y in draw.vectors() {
            let signs = self.signs(y, draw.j3);
            for (sum, side) in sums.iter_mut().zip(&self.sides) {
                *sum += side.response(signs);
            }
        }
        sums.map(|sum| length * sum)
    }

    /// Whether F is zero on D_0 and positive on D_1.
    pub fn succeeds(&self, draw: &Draw) -> bool {
        let [null, spiked] = self.outputs(draw);
        null == 0.0 && spiked > 0.0
    }

    fn signs(&self, y: &[u64], j3: u64) -> Signs {
        let Setting { d, .. } = self.setting;
        let count = |mask: &[u64]| y.iter().zip(mask).map(|(y, mask)| (y & mask).count_ones() as u64).sum::<u64>();
        let own = bit(y, 1 + (j3 % (d as u64 - 2)) as usize);
        let (copies, _) = self.setting.copies();
        let rows = copies * count(&self.classes) + count(&self.long);
        Signs { spike: bit(y, 0), constant: bit(y, d - 1), own, others: rows - own as u64 }
    }
}

impl Setting {
    /// Complete copies of the identity, and rows of the truncated one.
    pub(super) fn copies(&self) -> (u64, usize) {
        let size = self.d as u64 - 2;
        (self.n / size, (self.n % size) as usize)
    }
}
