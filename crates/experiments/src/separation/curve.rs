//! Success probabilities over grids of settings.

use serde::{Deserialize, Serialize};

use super::{DRAWS, Network, Pair, Setting, Share, default_m};
use crate::Error;

/// The success of one network in one setting.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The network.
    pub network: Network,
    /// The setting.
    #[serde(flatten)]
    pub setting: Setting,
    /// The simulated success rate.
    #[serde(flatten)]
    pub share: Share,
    /// The probability in closed form.
    pub exact: f64,
}

impl Point {
    /// Simulates this many draws and computes the probability.
    pub fn measure(network: Network, setting: &Setting, draws: u64, seed: u64) -> Result<Point, Error> {
        check_draws(draws)?;
        let pair = Pair::new(network, setting)?;
        Ok(Point { network, setting: *setting, share: pair.simulate(draws, seed), exact: pair.exact() })
    }
}

pub(super) fn check_draws(draws: u64) -> Result<(), Error> {
    if draws == 0 {
        return Err(Error::Sizes("the number of draws is 0; it must be at least 1".into()));
    }
    Ok(())
}

/// Every combination of these lists.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    /// Networks.
    pub networks: Vec<Network>,
    /// Rows.
    pub n: Vec<u64>,
    /// Columns.
    pub d: Vec<usize>,
    /// Vectors of the readout; if empty, [`default_m`] of each n.
    pub m: Vec<usize>,
    /// Spikes of D_1.
    pub a1: Vec<f64>,
    /// The rest of a setting; its n, d, m and a_1 are ignored.
    pub rest: Setting,
    /// Draws per point.
    pub draws: u64,
    /// Seed of the draws.
    pub seed: u64,
}

impl Sweep {
    /// Networks over n, otherwise as in the reference figures.
    pub fn over_n(networks: Vec<Network>, n: Vec<u64>, a1: f64) -> Sweep {
        Sweep { networks, n, d: vec![12], m: Vec::new(), a1: vec![a1], rest: Setting::of(1000), draws: DRAWS, seed: 1 }
    }

    /// Success over n from 10 to 10⁶ for softmax, linear, powers and series, at a_1 = 1: the figure of the theorem.
    pub fn theorem() -> Sweep {
        let n = (0..=20).map(|i| 10f64.powf(1.0 + i as f64 / 4.0).round() as u64).collect();
        let networks = [Network::Softmax, Network::Linear, Network::Power(4), Network::Taylor(4), Network::Power(8), Network::Taylor(8)];
        Sweep::over_n(networks.to_vec(), n, 1.0)
    }

    /// Networks and settings in order: networks, a_1, d, m, n, the last one fastest. Invalid settings fail before any computation.
    pub fn grid(&self) -> Result<Vec<(Network, Setting)>, Error> {
        check_draws(self.draws)?;
        for (name, length) in [("network", self.networks.len()), ("n", self.n.len()), ("d", self.d.len()), ("a_1", self.a1.len())] {
            if length == 0 {
                return Err(Error::Sizes(format!("no {name} was given; give at least one")));
            }
        }
        let choices: Vec<Option<usize>> = if self.m.is_empty() { vec![None] } else { self.m.iter().copied().map(Some).collect() };
        let mut grid = Vec::new();
        for &network in &self.networks {
            for &a1 in &self.a1 {
                for &d in &self.d {
                    for &m in &choices {
                        grid.extend(
                            self.n.iter().map(|&n| (network, Setting { n, d, m: m.unwrap_or_else(|| default_m(n)), a1, ..self.rest })),
                        );
                    }
                }
            }
        }
        grid.iter().try_for_each(|(_, setting)| setting.check())?;
        Ok(grid)
    }

    /// Measures all points; `report` receives each point when it is complete, and the total number.
    pub fn run(&self, report: &mut dyn FnMut(&Point, usize)) -> Result<Vec<Point>, Error> {
        let grid = self.grid()?;
        let measure = |(network, setting): &(Network, Setting)| {
            let point = Point::measure(*network, setting, self.draws, self.seed)?;
            report(&point, grid.len());
            Ok(point)
        };
        grid.iter().map(measure).collect()
    }
}
