//! The results of a spectrum, as stored in `spectrum.json`.

use serde::{Deserialize, Serialize};

/// The term spectrum of a model on a text.
///
/// A pair is a query with a visible key. x is the score of a pair as the kernel receives it: scaled, after RoPE, φ and clamp. Everything is
/// computed in float64 from the float32 activations of the model, over the sampled rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spectrum {
    /// The model.
    pub model: ModelFacts,
    /// The input text.
    pub text: TextFacts,
    /// The measured queries.
    pub rows: RowFacts,
    /// Even truncation orders p, ascending: `share` and `error` of a head have one value for each.
    pub orders: Vec<usize>,
    /// One entry per layer.
    pub layers: Vec<LayerSpectrum>,
    /// Time of forward pass and analysis, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timing: Option<Timing>,
}

/// Sizes of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelFacts {
    /// Short name.
    pub name: String,
    /// Parameters.
    pub parameters: u64,
    /// Query heads per layer.
    pub heads: usize,
    /// KV heads per layer.
    pub kv_heads: usize,
    /// Head dimension.
    pub head_dim: usize,
}

/// The text of a spectrum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TextFacts {
    /// Sources, as given by the user.
    pub data: Vec<String>,
    /// Independent windows.
    pub windows: usize,
    /// Length of the longest window.
    pub length: usize,
    /// Tokens in all windows.
    pub tokens: u64,
}

/// The queries of a spectrum, the same in every head.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowFacts {
    /// Measured queries, over all windows.
    pub sampled: u64,
    /// All queries.
    pub of: u64,
    /// Seed of the sample.
    pub seed: u64,
}

/// Seconds of a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// The model's forward pass, without logits.
    pub forward: f64,
    /// Everything else.
    pub analysis: f64,
}

/// A layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerSpectrum {
    /// Index, from 0.
    pub layer: usize,
    /// The published metric: magnitudes averaged over the heads with a Taylor series. Null if no head has one.
    pub terms: Option<Terms>,
    /// One entry per head.
    pub heads: Vec<HeadSpectrum>,
}

/// A head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeadSpectrum {
    /// Index, from 0.
    pub head: usize,
    /// Its variant string.
    pub attention: String,
    /// Measured pairs.
    pub pairs: u64,
    /// Share of pairs with x ≥ 0; null if the kernel has no Taylor series.
    pub positive: Option<f64>,
    /// Statistics of the scores.
    pub scores: ScoreFacts,
    /// Entropy of the weights p = M·w/Σ M·w of a row; null if weights can be negative.
    pub entropy: Option<EntropyFacts>,
    /// Magnitudes of the terms; null if the kernel has no Taylor series.
    pub terms: Option<Terms>,
    /// Errors of truncation; null if the kernel has no Taylor series.
    pub cut: Option<CutFacts>,
}

/// Scores of all pairs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoreFacts {
    /// Mean of x.
    pub mean: f64,
    /// Standard deviation of x.
    pub sd: f64,
    /// Smallest x.
    pub min: f64,
    /// Largest x.
    pub max: f64,
}

/// Entropy of the rows of a head.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EntropyFacts {
    /// Mean over rows of −Σ p ln p.
    pub nats: f64,
    /// Mean of the entropy divided by ln S_t over rows with more than one visible key; null if there is no such row.
    pub share: Option<f64>,
}

/// Mean of |a_n·x^n/n!|, n = 0..99, over all visible pairs, and separately over those with x ≥ 0 and x < 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Terms {
    /// All pairs: the published metric, with absolute values and over visible pairs only.
    pub all: Magnitudes,
    /// Pairs with x ≥ 0, which dominate a softmax.
    pub positive: Magnitudes,
    /// Pairs with x < 0.
    pub negative: Magnitudes,
}

/// Magnitudes by order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Magnitudes {
    /// log10 of the magnitude of each order, null where it is zero. Magnitudes of large scores exceed the range of float64.
    pub log10: Vec<Option<f64>>,
    /// The order with the largest magnitude, the lowest of equals. 99, the last computed order, means 99 or more. Null if there are no pairs.
    pub dominant: Option<usize>,
}

/// A head whose series is truncated at orders p: w_p(x) = Σ_{n≤p} a_n·x^n/n!.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CutFacts {
    /// Mean over rows of Σ_s M·w_p / Σ_s M·w, M the decay factor, 1 without decay. Above 1 if negative scores get too much weight. Null outside the range of float64.
    pub share: Vec<Option<f64>>,
    /// RMS(y_p − y)/RMS(y) over rows and coordinates, with the head's own denominator, gates, decay and norm. Null outside the range of float64.
    pub error: Vec<Option<f64>>,
    /// The lowest orders with small errors.
    pub order_for: OrderFor,
    /// The same for the series around the mean score of each row; null if a shift of the scores changes the output.
    #[serde(default)]
    pub centered: Option<CenteredCut>,
}

/// A head whose series around the mean score of each row is truncated. Softmax is invariant to a shift of a row's scores; its series around 0 is not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CenteredCut {
    /// RMS(y_p − y)/RMS(y). Null outside the range of float64.
    pub error: Vec<Option<f64>>,
    /// The lowest orders with small errors.
    pub order_for: OrderFor,
}

/// The lowest even order with an error of at most a bound, null if no measured order is enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderFor {
    /// For an error of 10 %.
    pub ten_percent: Option<usize>,
    /// For an error of 1 %.
    pub one_percent: Option<usize>,
    /// For an error of 0.1 %.
    pub tenth_percent: Option<usize>,
}

impl OrderFor {
    /// For 10 %, 1 % and 0.1 %.
    pub fn all(&self) -> [Option<usize>; 3] {
        [self.ten_percent, self.one_percent, self.tenth_percent]
    }
}

/// An order over the heads of a layer; `None` if no measured order is enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverHeads {
    /// Median head; of an even number, the upper middle.
    pub median: Option<usize>,
    /// The head that needs the highest order.
    pub worst: Option<usize>,
}

impl OverHeads {
    /// Requires at least one head.
    fn of(heads: Vec<Option<usize>>) -> OverHeads {
        let mut orders: Vec<usize> = heads.into_iter().map(|order| order.unwrap_or(usize::MAX)).collect();
        orders.sort_unstable();
        let order = |at: usize| Some(orders[at]).filter(|&order| order < usize::MAX);
        OverHeads { median: order(orders.len() / 2), worst: order(orders.len() - 1) }
    }
}

impl LayerSpectrum {
    /// The orders for 10 %, 1 % and 0.1 % over the heads with a Taylor series; `None` if there are none.
    pub fn order_for(&self) -> Option<[OverHeads; 3]> {
        let heads: Vec<[Option<usize>; 3]> = self.heads.iter().filter_map(|head| Some(head.cut.as_ref()?.order_for.all())).collect();
        (!heads.is_empty()).then(|| std::array::from_fn(|which| OverHeads::of(heads.iter().map(|head| head[which]).collect())))
    }

    /// The order for 1 % with the series around the mean score of a row, over the heads that have it; `None` if there are none.
    pub fn centered_order(&self) -> Option<OverHeads> {
        let one = |head: &HeadSpectrum| Some(head.cut.as_ref()?.centered.as_ref()?.order_for.one_percent);
        let heads: Vec<Option<usize>> = self.heads.iter().filter_map(one).collect();
        (!heads.is_empty()).then(|| OverHeads::of(heads))
    }

    /// The error at the highest order of the median and of the worst head with a Taylor series; `None` if there are none.
    pub fn last_error(&self) -> Option<[f64; 2]> {
        // A value outside the range of float64 is worse than any number.
        let last = |head: &HeadSpectrum| Some(head.cut.as_ref()?.error.last().copied()?.unwrap_or(f64::INFINITY));
        let mut errors: Vec<f64> = self.heads.iter().filter_map(last).collect();
        errors.sort_by(f64::total_cmp);
        Some([*errors.get(errors.len() / 2)?, *errors.last()?])
    }

    /// Mean of a value over the heads that have it.
    pub fn mean(&self, value: impl Fn(&HeadSpectrum) -> Option<f64>) -> Option<f64> {
        let values: Vec<f64> = self.heads.iter().filter_map(value).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }
}
