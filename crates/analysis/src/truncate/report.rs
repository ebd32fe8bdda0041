//! The result of `truncate`, as written to `cut.json`.

use serde::{Deserialize, Serialize};

use super::choice::Choice;
use super::text::Tokens;

/// All results, filled in as they are measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The model as requested.
    pub model: String,
    /// The data as requested.
    pub data: Vec<String>,
    /// How documents are arranged in windows: `packed` or `padded`.
    #[serde(default)]
    pub layout: String,
    /// Separate calibration text, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<String>,
    /// Windows per batch.
    pub batch: usize,
    /// Positions per window.
    pub length: usize,
    /// Tokens of each split of the text.
    pub tokens: Option<Tokens>,
    /// Whether layers were calibrated sequentially, each on the outputs of the truncated layers below.
    pub sequential: bool,
    /// Number of layers.
    pub layers: usize,
    /// Query heads per layer.
    pub heads: usize,
    /// Key-value heads per layer.
    pub kv_heads: usize,
    /// Number of heads in all layers that can be truncated.
    pub cuttable: usize,
    /// Context length at which bytes are counted.
    pub context: u64,
    /// Bytes of the original model's KV cache at that context.
    pub cache_bytes: u64,
    /// The original model on the evaluation text.
    pub uncut: Option<Measured>,
    /// All layers truncated.
    pub curves: Vec<Curve>,
    /// Number of heads of `calibrated` per kind of coefficients.
    pub kept: Vec<Kept>,
    /// One layer truncated at a time.
    pub map: Option<Map>,
    /// Heads to truncate, and their orders.
    pub plan: Option<Plan>,
    /// Warnings.
    pub warnings: Vec<String>,
    /// Whether all requested measurements are complete.
    pub finished: bool,
}

/// A measured loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Cross-entropy in nats per token; absent if NaN or infinite.
    pub loss: Option<f64>,
    /// Bits per byte, if the data are text and the loss is finite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// The first nonpositive denominator, or another problem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// One kind of coefficients over the orders.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// The kind.
    pub coefficients: Choice,
    /// Points by order.
    pub points: Vec<Point>,
}

/// The loss at one order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Truncation order p.
    pub order: usize,
    /// Bytes of state and KV cache of the truncated model at the context; absent if the engine does not support such a state.
    pub state_bytes: Option<u64>,
    /// Its loss.
    #[serde(flatten)]
    pub measured: Measured,
}

/// The coefficients that the heads of `calibrated` have at an order, selected on validation text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// Truncation order p.
    pub order: usize,
    /// Heads with fitted coefficients.
    pub fitted: usize,
    /// Heads with Taylor coefficients.
    pub taylor: usize,
    /// Median relative error of the heads' outputs with Taylor coefficients.
    #[serde(deserialize_with = "termwise_report::nan")]
    pub taylor_error: f64,
    /// The same with the selected coefficients.
    #[serde(deserialize_with = "termwise_report::nan")]
    pub kept_error: f64,
    /// The largest amplification of rounding errors in a state that sums the selected series in powers of the score.
    #[serde(deserialize_with = "termwise_report::nan")]
    pub state_condition: f64,
}

/// Losses with one layer truncated at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Map {
    /// The coefficients.
    pub coefficients: Choice,
    /// Orders, ascending.
    pub orders: Vec<usize>,
    /// Per layer, then per order; shorter rows are unfinished.
    pub layers: Vec<Vec<Measured>>,
}

/// Truncations within a budget.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Maximum loss as a factor of the original loss.
    pub budget: f64,
    /// Loss of the original model on the tuning text.
    pub tuning_uncut: f64,
    /// Loss with the plan on the tuning text.
    pub tuning_loss: f64,
    /// The truncations.
    pub cuts: Vec<PlannedCut>,
    /// Total number of KV heads.
    pub units: usize,
    /// Pairs of KV head and order whose state is not smaller than the cache at this context; these are not proposed.
    pub too_large: usize,
    /// Bytes of the original model's KV cache.
    pub bytes_before: u64,
    /// Bytes with the plan.
    pub bytes_after: u64,
    /// Loss with the plan on the evaluation text.
    pub measured: Option<Measured>,
    /// Whether the budget is also met there.
    pub within_budget: Option<bool>,
}

/// All query heads of one KV head truncated at one order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedCut {
    /// Layer.
    pub layer: usize,
    /// Kv head.
    pub kv_head: usize,
    /// Truncation order p.
    pub order: usize,
    /// Loss increase on the tuning text with this truncation alone.
    pub increase: f64,
    /// Bytes that it saves at the context.
    pub saved: u64,
}

/// Relative change of the loss that exceeds rounding and the noise between equal models.
const GAIN: f64 = 1e-3;

impl Report {
    /// The points of a kind of coefficients.
    pub fn curve(&self, choice: Choice) -> Option<&Curve> {
        self.curves.iter().find(|curve| curve.coefficients == choice)
    }

    /// A warning if truncation lowers the loss by more than rounding: the text or its layout then determines the sign.
    pub fn gain(&self) -> Option<String> {
        let uncut = self.uncut_loss()?;
        let curves = self.curves.iter().flat_map(|curve| {
            let place = move |point: &Point| (format!("all layers at order {}, {}", point.order, curve.coefficients), point.measured.loss);
            curve.points.iter().map(place)
        });
        let map = self.map.iter().flat_map(|map| {
            let orders = |layer: usize| move |(order, found): (&usize, &Measured)| (format!("layer {layer} at order {order}"), found.loss);
            map.layers.iter().enumerate().flat_map(move |(layer, row)| map.orders.iter().zip(row).map(orders(layer)))
        });
        let plan = self.plan.iter().map(|plan| ("the plan".to_owned(), plan.measured.as_ref().and_then(|found| found.loss)));
        let found = curves.chain(map).chain(plan).filter_map(|(place, loss)| Some((place, loss? / uncut - 1.0)));
        let (place, change) = found.min_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, change)| *change < -GAIN)?;
        let built_in = self.data.iter().any(|name| name.starts_with("builtin"));
        let cause = match self.layout.as_str() {
            "packed" if !built_in => {
                "windows of packed text cross the ends of documents, which can decide the sign: measure again with --layout padded, \
                 and with --documents if files contain several documents"
            }
            _ => "the text can determine the sign: measure again on other text before relying on it",
        };
        Some(format!("truncation lowers the loss by {:.2} % ({place}); {cause}", -100.0 * change))
    }

    /// The loss of the original model on the evaluation text.
    pub fn uncut_loss(&self) -> Option<f64> {
        self.uncut.as_ref()?.loss
    }
}
