//! What `cut` found, as it is written to `cut.json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::choice::Choice;
use super::text::Tokens;

/// Everything, filled in as it is measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// The model, as it was asked for.
    pub model: String,
    /// Its data, as they were asked for.
    pub data: Vec<String>,
    /// How documents become windows: `packed` or `padded`.
    #[serde(default)]
    pub layout: String,
    /// Calibration text of its own, where there is any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<String>,
    /// Windows computed at once.
    pub batch: usize,
    /// Positions of a window.
    pub length: usize,
    /// Tokens of each part of the text.
    pub tokens: Option<Tokens>,
    /// Whether layers were calibrated one after the other, each on what the cut ones below it give.
    pub sequential: bool,
    /// Layers.
    pub layers: usize,
    /// Query heads of a layer.
    pub heads: usize,
    /// Key-value heads of a layer.
    pub kv_heads: usize,
    /// Heads with an exponential that can be cut, in all layers.
    pub cuttable: usize,
    /// Tokens of context that bytes are counted at.
    pub context: u64,
    /// Bytes kept between tokens by the uncut model at that context.
    pub cache_bytes: u64,
    /// The model as it is, on the evaluation text.
    pub uncut: Option<Measured>,
    /// All layers cut.
    pub curves: Vec<Curve>,
    /// How many heads of `calibrated` kept which coefficients.
    pub kept: Vec<Kept>,
    /// One layer cut at a time.
    pub map: Option<Map>,
    /// Which heads to cut, and at which order.
    pub plan: Option<Plan>,
    /// What a user should know.
    pub warnings: Vec<String>,
    /// Whether everything that was asked for is here.
    pub finished: bool,
}

/// A loss that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Measured {
    /// Cross-entropy in nats per token; absent where it is not finite.
    pub loss: Option<f64>,
    /// Bits for each byte of text, where the data are text and the loss is finite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// The first denominator that was not positive, or what else went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// One kind of coefficients over the orders.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Curve {
    /// Which.
    pub coefficients: Choice,
    /// By order.
    pub points: Vec<Point>,
}

/// One order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Point {
    /// p
    pub order: usize,
    /// Bytes kept between tokens by the cut model at the context; absent where the engine would not build such a state.
    pub state_bytes: Option<u64>,
    /// Its loss.
    #[serde(flatten)]
    pub measured: Measured,
}

/// Which coefficients the heads of `calibrated` have at an order, by text that was held back from the fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Kept {
    /// p
    pub order: usize,
    /// Heads with fitted ones.
    pub fitted: usize,
    /// Heads with Taylor's.
    pub taylor: usize,
    /// Relative error of the heads' outputs, the median over heads: Taylor's.
    #[serde(deserialize_with = "termwise_report::nan")]
    pub taylor_error: f64,
    /// Of what was kept.
    #[serde(deserialize_with = "termwise_report::nan")]
    pub kept_error: f64,
    /// The largest factor by which a state amplifies rounding when it sums what was kept in powers of the score.
    #[serde(deserialize_with = "termwise_report::nan")]
    pub state_condition: f64,
}

/// One layer cut at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Map {
    /// With these coefficients.
    pub coefficients: Choice,
    /// Orders, ascending.
    pub orders: Vec<usize>,
    /// By layer, then by order; layers that come to an end early were not finished.
    pub layers: Vec<Vec<Measured>>,
}

/// Cuts that stay within a budget.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Plan {
    /// What the loss may rise to, as a factor of the uncut one.
    pub budget: f64,
    /// Loss of the uncut model on the tuning text.
    pub tuning_uncut: f64,
    /// Loss with the plan there.
    pub tuning_loss: f64,
    /// The cuts.
    pub cuts: Vec<PlannedCut>,
    /// Kv heads in all.
    pub units: usize,
    /// Pairs of kv head and order whose state would not be smaller than the cache at this context; these are not proposed.
    pub too_large: usize,
    /// Bytes between tokens without any cut.
    pub bytes_before: u64,
    /// Bytes with the plan.
    pub bytes_after: u64,
    /// The plan on the evaluation text.
    pub measured: Option<Measured>,
    /// Whether the budget is kept there too.
    pub within_budget: Option<bool>,
}

/// All query heads of one kv head cut at one order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlannedCut {
    /// Layer.
    pub layer: usize,
    /// Kv head.
    pub kv_head: usize,
    /// p
    pub order: usize,
    /// Rise of the loss on the tuning text with this cut alone.
    pub increase: f64,
    /// Bytes that it saves at the context.
    pub saved: u64,
}

/// A relative change of the loss above rounding and above the noise of equal models.
const GAIN: f64 = 1e-3;

impl Report {
    /// The points of a kind of coefficients.
    pub fn curve(&self, choice: Choice) -> Option<&Curve> {
        self.curves.iter().find(|curve| curve.coefficients == choice)
    }

    /// A warning where truncation lowers the loss by more than rounding: the text or its layout then decides the sign.
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
            _ => "the text can decide the sign: measure again on other text before you rely on it",
        };
        Some(format!("truncation lowers the loss by {:.2} % ({place}); {cause}", -100.0 * change))
    }

    /// The loss of the uncut model on the evaluation text.
    pub fn uncut_loss(&self) -> Option<f64> {
        self.uncut.as_ref()?.loss
    }
}

/// The JSON schema of [`Report`].
pub fn schema() -> serde_json::Value {
    termwise_report::tagged_schema::<Report>(schemars::schema_for!(Report).to_value())
}
