//! The two kinds of coefficients, and models with truncated heads.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use termwise_attention::parts::kernel::taylor::Taylor;
use termwise_attention::{Kernel, ScaledSums, Variant, View};
use termwise_model::Config;
use termwise_model::config::AttentionMap;

use super::chebyshev::Interval;
use super::rows::scores;
use crate::Error;

/// The coefficients of a truncated exponential.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Choice {
    /// a_n = 1.
    Taylor,
    /// Fitted to the head's output on calibration text; Taylor coefficients if they are better on validation text.
    Calibrated,
}

impl Choice {
    /// Both.
    pub const ALL: [Choice; 2] = [Choice::Taylor, Choice::Calibrated];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Choice::Taylor => "taylor",
            Choice::Calibrated => "calibrated",
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Choice, String> {
        let found = Choice::ALL.into_iter().find(|choice| choice.name() == text);
        found.ok_or_else(|| format!("coefficients are taylor or calibrated, found `{text}`"))
    }
}

/// One order of one head.
#[derive(Clone, Debug, PartialEq)]
pub struct OrderFit {
    /// Truncation order p.
    pub order: usize,
    /// Relative error of the head's output on validation text: Taylor, fitted. Infinite if undefined.
    pub errors: [f64; 2],
    /// Which of the two `calibrated` uses.
    pub kept: Choice,
    /// The fitted series.
    pub series: Option<Taylor>,
    /// For each of the two, mean Σ|terms| divided by mean weight if a state sums it in powers of x: the amplification of rounding errors.
    pub conditions: [f64; 2],
}

impl OrderFit {
    /// The error of the selected coefficients.
    pub fn error(&self) -> f64 {
        self.errors[self.kept as usize]
    }

    /// The amplification of rounding errors in a state with the selected coefficients.
    pub fn state_condition(&self) -> f64 {
        self.conditions[self.kept as usize]
    }
}

/// One head.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadFit {
    /// The interval of its scores.
    pub interval: Interval,
    /// By order, ascending.
    pub orders: Vec<OrderFit>,
}

impl HeadFit {
    /// The series of an order.
    pub fn series(&self, order: usize, choice: Choice) -> Result<Taylor, String> {
        let fit = self.orders.iter().find(|fit| fit.order == order).ok_or_else(|| format!("order {order} was not calibrated"))?;
        let kind = if choice == Choice::Calibrated { fit.kept } else { choice };
        self.candidate(order, kind, fit.series.as_ref()).ok_or_else(|| format!("order {order} has no {kind} series in float64"))
    }

    /// The series of a kind, where `Calibrated` means the fit.
    pub(super) fn candidate(&self, order: usize, kind: Choice, fitted: Option<&Taylor>) -> Option<Taylor> {
        match kind {
            Choice::Taylor => Taylor::up_to(order).ok(),
            Choice::Calibrated => fitted.cloned(),
        }
    }

    /// Σ ‖y‖² of these queries of a window, then for every order Σ ‖y' − y‖² of both kinds, by the formula.
    pub(super) fn squared_errors(&self, view: &View, queries: impl Iterator<Item = usize>) -> Vec<f64> {
        let own = |fit: &OrderFit| Choice::ALL.map(|kind| self.candidate(fit.order, kind, fit.series.as_ref()).map(Kernel::Taylor));
        let kernels: Vec<Option<Kernel>> = self.orders.iter().flat_map(own).collect();
        let mut sums = vec![0.0; 1 + kernels.len()];
        let (mut exact, mut cut) = (vec![0.0; view.e], vec![0.0; view.e]);
        for t in queries {
            let scores = scores(view, t);
            output(view, t, &scores, &view.variant.near.kernel, &mut exact);
            sums[0] += exact.iter().map(|y| y * y).sum::<f64>();
            for (sum, kernel) in sums[1..].iter_mut().zip(&kernels) {
                *sum += match kernel {
                    Some(kernel) if output(view, t, &scores, kernel, &mut cut) => {
                        exact.iter().zip(&cut).map(|(a, b)| (a - b) * (a - b)).sum::<f64>()
                    }
                    _ => f64::INFINITY,
                };
            }
        }
        sums
    }

    /// Selects coefficients from the sums of [`HeadFit::squared_errors`] over all validation text; of equal errors the simpler kind.
    pub(super) fn judge(&mut self, sums: &[f64]) {
        let size = sums.first().copied().unwrap_or(0.0).max(f64::MIN_POSITIVE);
        for (i, fit) in self.orders.iter_mut().enumerate() {
            for (k, error) in fit.errors.iter_mut().enumerate() {
                let sum = sums.get(1 + Choice::ALL.len() * i + k).copied().unwrap_or(f64::INFINITY);
                *error = if sum.is_nan() { f64::INFINITY } else { (sum / size).sqrt() };
            }
            let better = |best: Choice, kind: Choice| if fit.errors[kind as usize] < fit.errors[best as usize] { kind } else { best };
            fit.kept = Choice::ALL.into_iter().fold(Choice::Taylor, better);
        }
    }
}

/// y_t of a head with this kernel, and whether its denominator is positive.
fn output(view: &View, t: usize, scores: &[(usize, f64)], kernel: &Kernel, y: &mut [f64]) -> bool {
    let variant = view.variant.clone().with_kernel(kernel.clone());
    let rho = if variant.shifts() { scores.iter().map(|&(_, x)| x).fold(f64::NEG_INFINITY, f64::max) } else { 0.0 };
    let (mut u, mut z) = (vec![0.0; view.e], 0.0);
    for &(s, x) in scores {
        let weight = (view.log_decay[t] - view.log_decay[s]).exp() * kernel.value(x - rho);
        z += weight;
        u.iter_mut().zip(&view.v[s * view.e..]).for_each(|(u, v)| *u += weight * v);
    }
    let denominator = view.finish(&variant, t, ScaledSums { u: &u, z, rho }, y);
    !variant.denominator.sums() || denominator > 0.0
}

/// The fits of a model's heads.
#[derive(Clone, Debug, Default)]
pub struct Calibration {
    /// [layers, heads]; `None` if a head has no exponential that can be truncated.
    pub heads: Vec<Option<HeadFit>>,
    /// H
    pub per_layer: usize,
}

impl Calibration {
    /// The fit of a head.
    pub fn head(&self, layer: usize, head: usize) -> Option<&HeadFit> {
        self.heads.get(layer * self.per_layer + head)?.as_ref()
    }

    /// Number of heads that can be truncated.
    pub fn cuttable(&self) -> usize {
        self.heads.iter().flatten().count()
    }

    /// Number of heads of an order that use each kind: Taylor, fitted.
    pub fn kept(&self, order: usize) -> [usize; 2] {
        let fits = self.heads.iter().flatten().flat_map(|head| &head.orders).filter(|fit| fit.order == order);
        let mut counts = [0; 2];
        fits.for_each(|fit| counts[fit.kept as usize] += 1);
        counts
    }

    /// Truncates a head of a map, if possible.
    pub fn cut(&self, map: &mut AttentionMap, layer: usize, head: usize, order: usize, choice: Choice) -> Result<(), Error> {
        let Some(fit) = self.head(layer, head) else { return Ok(()) };
        let variant = map.head(layer, head).clone();
        let impossible = |reason| Error::Attention(termwise_attention::Error::Combination { variant: variant.to_string(), reason });
        let series = fit.series(order, choice).map_err(impossible)?;
        map.set_head(layer, head, variant.with_kernel(Kernel::Taylor(series)));
        Ok(())
    }

    /// The attention of a model with these layers truncated.
    pub fn cut_layers(
        &self,
        config: &Config,
        layers: impl IntoIterator<Item = usize>,
        order: usize,
        choice: Choice,
    ) -> Result<AttentionMap, Error> {
        let mut map = config.attention.clone();
        for layer in layers {
            for head in 0..self.per_layer {
                self.cut(&mut map, layer, head, order, choice)?;
            }
        }
        Ok(map)
    }
}

/// Whether a head has an exponential that can be truncated to a finite state.
pub fn can_cut(variant: &Variant) -> bool {
    matches!(variant.near.kernel, Kernel::Exp(_)) && variant.near.clamp.is_none()
}
