//! The order of the exponential series that is needed to match the success of softmax.
//!
//! Rule: orders are tried upwards from 0, and the first whose success probability in closed form reaches [`REQUIRED_PROBABILITY`] is taken. It
//! does not depend on draws, which are reported in addition. Success does not increase with the order indefinitely: from
//! (1 + a_0)^p ≈ n on, a power also detects the spike of D_0.

use serde::{Deserialize, Serialize};

use super::curve::check_draws;
use super::{DRAWS, Network, Pair, Point, Setting, default_m};
use crate::Error;

/// The required success probability.
pub const REQUIRED_PROBABILITY: f64 = 0.9;
/// The highest order that is tried.
pub const MAX_BRIDGE_ORDER: u32 = 4096;

/// A family of networks, one per order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Series {
    /// The exponential series up to an order.
    Taylor,
    /// A single power.
    Power,
}

impl Series {
    /// Both.
    pub const ALL: [Series; 2] = [Series::Taylor, Series::Power];

    /// The network of this order.
    pub fn network(self, order: u32) -> Network {
        match self {
            Series::Taylor => Network::Taylor(order),
            Series::Power => Network::Power(order),
        }
    }

    /// Name in files.
    pub fn name(self) -> &'static str {
        match self {
            Series::Taylor => "taylor",
            Series::Power => "power",
        }
    }
}

/// The smallest order that reaches [`REQUIRED_PROBABILITY`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BridgePoint {
    /// The family of networks.
    pub series: Series,
    /// The setting.
    pub setting: Setting,
    /// ln n / ln(1 + a_1): from this order on, a power gives row j3 half of the total weight.
    pub predicted: f64,
    /// `None` if no order up to [`MAX_BRIDGE_ORDER`] reaches it.
    pub order: Option<u32>,
    /// Success at this order.
    pub point: Option<Point>,
    /// The success probability one order below.
    pub below: Option<f64>,
}

/// The smallest orders over grids of a_1 and n.
#[derive(Clone, Debug, PartialEq)]
pub struct Bridge {
    /// Rows.
    pub n: Vec<u64>,
    /// Spikes of D_1.
    pub a1: Vec<f64>,
    /// Vectors of the readout, or [`default_m`] of each n.
    pub m: Option<usize>,
    /// The rest of a setting; its n, m and a_1 are ignored.
    pub rest: Setting,
    /// Number of draws at the selected order.
    pub draws: u64,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for Bridge {
    /// Powers of ten from 10² to 10⁶, and the a_1 of the reference figures.
    fn default() -> Bridge {
        let n = (2..=6).map(|k| 10u64.pow(k)).collect();
        Bridge { n, a1: vec![0.7, 1.0, 3.0], m: None, rest: Setting::of(1000), draws: DRAWS, seed: 1 }
    }
}

impl Bridge {
    /// By a_1, then n, then series. Invalid settings fail before any computation.
    pub fn run(&self) -> Result<Vec<BridgePoint>, Error> {
        check_draws(self.draws)?;
        let setting = |a1, n| Setting { n, a1, m: self.m.unwrap_or_else(|| default_m(n)), ..self.rest };
        let settings: Vec<Setting> = self.a1.iter().flat_map(|&a1| self.n.iter().map(move |&n| setting(a1, n))).collect();
        settings.iter().try_for_each(Setting::check)?;
        let cases = settings.iter().flat_map(|setting| Series::ALL.map(|series| (series, setting)));
        cases.map(|(series, setting)| BridgePoint::find(series, setting, self.draws, self.seed)).collect()
    }
}

impl BridgePoint {
    /// Finds the order by the rule above, then simulates this many draws.
    pub fn find(series: Series, setting: &Setting, draws: u64, seed: u64) -> Result<BridgePoint, Error> {
        let mut below = None;
        let mut order = None;
        for p in 0..=MAX_BRIDGE_ORDER {
            let exact = Pair::new(series.network(p), setting)?.exact();
            if exact >= REQUIRED_PROBABILITY {
                order = Some(p);
                break;
            }
            below = Some(exact);
        }
        let point = order.map(|p| Point::measure(series.network(p), setting, draws, seed)).transpose()?;
        let predicted = (setting.n as f64).ln() / setting.a1.ln_1p();
        Ok(BridgePoint { series, setting: *setting, predicted, order, point, below: if order.is_some() { below } else { None } })
    }
}
