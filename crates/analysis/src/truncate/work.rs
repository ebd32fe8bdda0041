//! The measurements in order.

use std::sync::atomic::{AtomicBool, Ordering};

use termwise_model::config::AttentionMap;

use super::Progress;
use super::budget::{self, Budget};
use super::bytes::Heads;
use super::calibrate::{self, Settings};
use super::choice::{Calibration, Choice};
use super::meter::Meter;
use super::report::{Curve, Kept, Map, Measured, Plan, Point, Report};
use super::text::{Split, Texts};
use crate::Error;
use crate::spectrum::check_scores;

/// A state that amplifies rounding errors by more than this has a relative error above one percent in float32.
const ILL_CONDITIONED: f64 = 1e5;

pub(super) struct Work<'a, 'b> {
    pub report: Report,
    pub meter: Meter,
    pub texts: &'a Texts<'a>,
    pub stop: &'a AtomicBool,
    pub observe: &'b mut dyn FnMut(&Report, Progress),
    pub done: u64,
    pub total: u64,
}

impl Work<'_, '_> {
    /// Whether any rank received a stop request.
    pub fn stopped(&self) -> Result<bool, Error> {
        Ok(self.meter.collective().agree(self.stop.load(Ordering::Relaxed))?)
    }

    pub fn report_progress(&mut self, now: &str) {
        (self.observe)(&self.report, Progress { done: self.done, total: self.total.max(self.done), now });
    }

    pub fn measure(&mut self, now: &str, attention: &AttentionMap, text: &Split) -> Result<Measured, Error> {
        self.report_progress(now);
        let measured = self.meter.measure(attention, text)?;
        self.done += 1;
        Ok(measured)
    }

    pub fn calibrate(&mut self, settings: &Settings, orders: &[usize]) -> Result<Calibration, Error> {
        check_scores(self.meter.model(), "truncation")?;
        self.report_progress("calibration");
        let (report, observe, done, total) = (&self.report, &mut self.observe, &mut self.done, self.total);
        let calibration = calibrate::calibrate(self.meter.model(), &self.texts.calibration, settings, &mut || {
            *done += 1;
            observe(report, Progress { done: *done, total, now: "calibration" });
        })?;
        self.report.cuttable = calibration.cuttable();
        if self.report.cuttable == 0 {
            return Err(Error::Sizes("no head of this model has an exponential without clamp, so there is nothing to truncate".into()));
        }
        let all = self.report.layers * self.report.heads;
        if self.report.cuttable < all {
            let left = all - self.report.cuttable;
            self.report.warnings.push(format!("{left} of {all} heads have no exponential, or a clamp, and are not truncated"));
        }
        for &order in orders {
            let kept = kept(&calibration, order);
            if kept.state_condition > ILL_CONDITIONED {
                self.report.warnings.push(format!(
                    "order {order}: a state sums powers of the score, which amplifies rounding errors up to {:.0e} times here; up to about {ILL_CONDITIONED:.0e} the float32 error is below one percent. Losses are those of the parallel form in float64; `generate` may differ",
                    kept.state_condition
                ));
            }
            self.report.kept.push(kept);
        }
        Ok(calibration)
    }

    /// All layers truncated, order by order, so both kinds can be compared early.
    pub fn curves(
        &mut self,
        calibration: &Calibration,
        uncut: &AttentionMap,
        sizes: Heads,
        orders: &[usize],
        choices: &[Choice],
    ) -> Result<(), Error> {
        self.report.curves = choices.iter().map(|&coefficients| Curve { coefficients, points: Vec::new() }).collect();
        for &order in orders {
            for (i, &choice) in choices.iter().enumerate() {
                if self.stopped()? {
                    return Ok(());
                }
                let mut config = self.meter.model().config.clone();
                let map = calibration.cut_layers(&config, 0..sizes.layers, order, choice)?;
                let measured = self.measure(&format!("all layers at order {order}, {choice}"), &map, &self.texts.evaluation)?;
                config.set_attention(map)?;
                let buildable = sizes.state(order, true).is_some();
                let state_bytes = buildable.then(|| sizes.model(&config, self.report.context));
                self.report.curves[i].points.push(Point { order, state_bytes, measured });
            }
        }
        debug_assert_eq!(*uncut, self.meter.model().config.attention);
        Ok(())
    }

    /// One layer truncated at a time.
    pub fn map(&mut self, calibration: &Calibration, orders: &[usize], choice: Option<Choice>) -> Result<(), Error> {
        let coefficients = choice.or_else(|| best(&self.report)).unwrap_or(Choice::Calibrated);
        self.report.map = Some(Map { coefficients, orders: orders.to_vec(), layers: Vec::new() });
        for layer in 0..self.report.layers {
            let mut row = Vec::new();
            for &order in orders {
                if self.stopped()? {
                    break;
                }
                let config = self.meter.model().config.clone();
                let map = calibration.cut_layers(&config, [layer], order, coefficients)?;
                row.push(self.measure(&format!("layer {layer} at order {order}"), &map, &self.texts.evaluation)?);
            }
            if let Some(map) = &mut self.report.map {
                map.layers.push(row);
            }
        }
        Ok(())
    }

    /// The attention of the plan, if it truncates any head.
    pub fn plan(
        &mut self,
        calibration: &Calibration,
        uncut: &AttentionMap,
        sizes: Heads,
        orders: &[usize],
        budget: Budget,
    ) -> Result<Option<AttentionMap>, Error> {
        let context = self.report.context;
        let (mut candidates, too_large) = budget::candidates(uncut, calibration, sizes, orders, context)?;
        self.total += candidates.len() as u64 + 8;
        let before = self.measure("the original model on tuning text", uncut, &self.texts.tuning)?;
        let Some(uncut_loss) = before.loss else { return Ok(None) };
        for candidate in &mut candidates {
            if self.stopped()? {
                return Ok(None);
            }
            let map = budget::applied(uncut, calibration, sizes, std::slice::from_ref(candidate))?;
            let now = format!("KV head {} of layer {} at order {}", candidate.kv_head, candidate.layer, candidate.order);
            let measured = self.measure(&now, &map, &self.texts.tuning)?;
            candidate.increase = measured.loss.map_or(f64::NAN, |loss| loss - uncut_loss);
        }
        let (cuts, tuning_loss) = budget::choose(candidates, uncut_loss, budget, |cuts| {
            if self.stopped()? {
                return Ok(None);
            }
            let map = budget::applied(uncut, calibration, sizes, cuts)?;
            Ok(self.measure(&format!("{} truncations together", cuts.len()), &map, &self.texts.tuning)?.loss)
        })?;
        let bytes_before = self.report.cache_bytes;
        let saved: u64 = cuts.iter().map(|cut| cut.saved).sum();
        let map = budget::applied(uncut, calibration, sizes, &cuts)?;
        let measured = match self.stopped()? {
            true => None,
            false => Some(self.measure("the plan", &map, &self.texts.evaluation)?),
        };
        let allowed = self.report.uncut_loss().map(|loss| loss * (1.0 + budget.share));
        let within_budget = measured.as_ref().map(|found| found.loss.zip(allowed).is_some_and(|(loss, allowed)| loss <= allowed));
        let any = !cuts.is_empty();
        self.report.plan = Some(Plan {
            budget: 1.0 + budget.share,
            tuning_uncut: uncut_loss,
            tuning_loss,
            cuts,
            units: sizes.layers * sizes.kv_heads,
            too_large,
            bytes_before,
            bytes_after: bytes_before - saved,
            measured,
            within_budget,
        });
        Ok(any.then_some(map))
    }
}

/// The kind of coefficients with the lowest sum of losses over the common orders.
fn best(report: &Report) -> Option<Choice> {
    let sum = |curve: &Curve| curve.points.iter().map(|point| point.measured.loss.unwrap_or(f64::INFINITY)).sum::<f64>();
    report.curves.iter().filter(|curve| !curve.points.is_empty()).min_by(|a, b| sum(a).total_cmp(&sum(b))).map(|curve| curve.coefficients)
}

fn kept(calibration: &Calibration, order: usize) -> Kept {
    let fits: Vec<_> = calibration.heads.iter().flatten().flat_map(|head| &head.orders).filter(|fit| fit.order == order).collect();
    let [taylor, fitted] = calibration.kept(order);
    let median = |value: &dyn Fn(&super::choice::OrderFit) -> f64| {
        let mut values: Vec<f64> = fits.iter().map(|fit| value(fit)).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    };
    Kept {
        order,
        fitted,
        taylor,
        taylor_error: median(&|fit| fit.errors[Choice::Taylor as usize]),
        kept_error: median(&super::choice::OrderFit::error),
        state_condition: fits.iter().map(|fit| fit.state_condition()).fold(0.0, f64::max),
    }
}
