//! The networks: functions of the score, and their weights.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// The highest order of powers and series.
pub const MAX_ORDER: u32 = 1_000_000;

/// u as a function of the score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Network {
    /// exp(score)
    Softmax,
    /// score
    Linear,
    /// score^p
    Power(u32),
    /// Σ_{k≤p} score^k/k!
    Taylor(u32),
}

/// f of one query: the weights of the keys. All keys except row j3 have the same weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Weight of row j3.
    pub spike: f64,
    /// Weight of each other row.
    pub other: f64,
}

impl Network {
    /// f for a query whose row sum is `query`·√ln n, where one key has the row sum (1+a)·√ln n and the others √ln n. Computed from the
    /// logarithm of the ratio of u, since u itself overflows.
    pub fn weights(self, n: u64, a: f64, query: f64) -> Weights {
        let x = query * (n as f64).ln();
        let ratio = match self {
            Network::Softmax => a * x,
            Network::Linear => a.ln_1p(),
            Network::Power(p) => p as f64 * a.ln_1p(),
            Network::Taylor(p) => ln_series(p, (1.0 + a) * x) - ln_series(p, x),
        };
        // Dividing by the larger of the two keeps both in range: for a ≥ 0 the ratio is at least one.
        let other = (-ratio).exp();
        let sum = 1.0 + (n - 1) as f64 * other;
        Weights { spike: 1.0 / sum, other: other / sum }
    }

    /// The order, if there is one.
    pub fn order(self) -> Option<u32> {
        match self {
            Network::Softmax => None,
            Network::Linear => Some(1),
            Network::Power(p) | Network::Taylor(p) => Some(p),
        }
    }

    /// One network, or with `taylor=2..5` all orders in between.
    pub fn list(text: &str) -> Result<Vec<Network>, Error> {
        let Some((name, orders)) = text.split_once('=') else { return Ok(vec![text.parse()?]) };
        let Some((first, last)) = orders.split_once("..") else { return Ok(vec![text.parse()?]) };
        let first: Network = format!("{name}={first}").parse()?;
        let last: Network = format!("{name}={last}").parse()?;
        match (first, last) {
            (Network::Power(p), Network::Power(q)) if p <= q => Ok((p..=q).map(Network::Power).collect()),
            (Network::Taylor(p), Network::Taylor(q)) if p <= q => Ok((p..=q).map(Network::Taylor).collect()),
            _ => Err(Error::Sizes(format!("`{text}` is an empty range: write the lower order first, as in taylor=2..5"))),
        }
    }
}

/// ln Σ_{k≤p} x^k/k! for x ≥ 0.
pub(super) fn ln_series(p: u32, x: f64) -> f64 {
    const RESCALE_ABOVE: f64 = 1e200;
    let (mut sum, mut term, mut scale) = (1.0, 1.0, 0.0);
    for k in 1..=p {
        term *= x / k as f64;
        sum += term;
        if sum > RESCALE_ABOVE {
            sum /= RESCALE_ABOVE;
            term /= RESCALE_ABOVE;
            scale += RESCALE_ABOVE.ln();
        }
        // Terms decrease from k = x on, so the rest is negligible.
        if k as f64 > x && term < sum * 1e-20 {
            break;
        }
    }
    sum.ln() + scale
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Network::Softmax => write!(f, "softmax"),
            Network::Linear => write!(f, "linear"),
            Network::Power(p) => write!(f, "power={p}"),
            Network::Taylor(p) => write!(f, "taylor={p}"),
        }
    }
}

impl FromStr for Network {
    type Err = Error;

    fn from_str(text: &str) -> Result<Network, Error> {
        let (name, order) = text.split_once('=').map_or((text, None), |(name, order)| (name, Some(order)));
        let order = || match order.and_then(|order| order.parse().ok()) {
            Some(p) if p <= MAX_ORDER => Ok(p),
            _ => Err(Error::Sizes(format!("`{text}` has no valid order: write a whole number up to {MAX_ORDER}, as in {name}=4"))),
        };
        match name {
            "softmax" if name == text => Ok(Network::Softmax),
            "linear" if name == text => Ok(Network::Linear),
            "power" => Ok(Network::Power(order()?)),
            "taylor" => Ok(Network::Taylor(order()?)),
            _ => Err(Error::Unknown {
                what: "network",
                name: text.into(),
                suggestion: None,
                known: "softmax, linear, power=P and taylor=P".into(),
            }),
        }
    }
}

impl From<Network> for String {
    fn from(network: Network) -> String {
        network.to_string()
    }
}

impl TryFrom<String> for Network {
    type Error = Error;

    fn try_from(text: String) -> Result<Network, Error> {
        text.parse()
    }
}
