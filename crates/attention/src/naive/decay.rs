//! Step 4: the decay. c_t per head or per channel, and the gradients of its logits and of its rate.

use crate::naive::add_to;
use crate::naive::head_slice::HeadSlice;
use crate::{AuxKind, Grads, Inputs, Real, Variant};

/// c_t of a head, [length, channels]; zero without a decay.
pub(crate) fn log_decays<R: Real>(variant: &Variant, inputs: &Inputs<R>, slice: HeadSlice, channels: usize) -> Vec<f64> {
    let mut c = vec![0.0; slice.length * channels];
    if let Some(decay) = &variant.decay {
        let logits = if decay.has_logits() { slice.logits(inputs, AuxKind::DecayGate, channels) } else { Vec::new() };
        let mut one = vec![0.0; slice.length];
        for channel in 0..channels {
            let own: Vec<R> = logits.iter().skip(channel).step_by(channels).copied().collect();
            decay.forward(&own, variant.decay_params(inputs, slice.head), &mut one, &mut 0.0);
            one.iter().enumerate().for_each(|(t, &value)| c[t * channels + channel] = value);
        }
    }
    c
}

/// Adds the gradients of the logits and of the rate, given those of c_t.
pub(crate) fn backward<R: Real>(
    variant: &Variant,
    inputs: &Inputs<R>,
    slice: HeadSlice,
    (dc, channels): (&[f64], usize),
    grads: &mut Grads<R>,
) {
    let Some(decay) = &variant.decay else { return };
    let params = variant.decay_params(inputs, slice.head);
    let logits = if decay.has_logits() { slice.logits(inputs, AuxKind::DecayGate, channels) } else { Vec::new() };
    let mut dlogits = vec![R::zero(); logits.len()];
    let mut drate = 0.0;
    for channel in 0..channels {
        let own: Vec<R> = logits.iter().skip(channel).step_by(channels).copied().collect();
        let dc: Vec<f64> = dc.iter().skip(channel).step_by(channels).copied().collect();
        let mut dg = vec![R::zero(); own.len()];
        drate += decay.backward(&own, params, &dc, &mut dg);
        dg.iter().enumerate().for_each(|(t, &dg)| dlogits[t * channels + channel] = dg);
    }
    if decay.has_logits() {
        slice.add_logits(&dlogits, AuxKind::DecayGate, channels, grads);
    }
    if decay.has_rate() {
        add_to(grads, AuxKind::DecayRate, slice.head, &[R::of(drate)]);
    }
}
