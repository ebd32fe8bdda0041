//! Bounds of the magnitude of a series.

use crate::parts::kernel::taylor::Taylor;
use termwise_kernels::score_rows::UNSCALED_LOG_LIMIT;

impl Taylor {
    /// log Σ|a_n|·|x|^n/n!, which bounds log |w| for all scores up to |x|.
    pub(super) fn log_magnitude(&self, x: f64) -> f64 {
        self.horner_magnitude(x).ln()
    }

    /// The largest |x| whose weights are guaranteed to be within e^[`UNSCALED_LOG_LIMIT`].
    pub(super) fn find_unscaled_limit(&self) -> f32 {
        let (mut low, mut high) = (0.0, 1e30);
        for _ in 0..200 {
            let middle = f64::midpoint(low, high);
            if self.log_magnitude(middle) <= UNSCALED_LOG_LIMIT as f64 { low = middle } else { high = middle }
        }
        low as f32
    }
}
