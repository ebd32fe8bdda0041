//! Quantized KV cache: keys per channel, values per token
//!
//! ```text
//! keys     code = round( (L/2)·(1 + (k_c − m_c)/r_c) ),   k_c → m_c + r_c·(2·code/L − 1)          L = 2^bits − 1; m, r per channel of a kv head
//! values   code = round( (v_c − low)/step ),              v_c → low + step·code                   low = min v, step = (max v − min v)/L
//! ```
//!
//! Keys are quantized after RoPE. Everything computed from a key or value, far features included, is computed from its quantized value, so
//! results do not depend on whether codes or rounded values are stored. Keys outside m ± r are clipped. Sinks are not quantized.

/// The supported numbers of bits.
pub const WIDTHS: [u32; 2] = [4, 8];

/// The quantization range of the keys of one kv head: its centre and half its width per channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantRange<'a> {
    pub centre: &'a [f32],
    pub range: &'a [f32],
}

/// L
#[inline(always)]
pub(crate) fn levels(bits: u32) -> f32 {
    ((1u32 << bits) - 1) as f32
}

/// The code of one channel of a key.
#[inline(always)]
pub(crate) fn key_code(k: f32, centre: f32, range: f32, levels: f32) -> f32 {
    (0.5 * levels * (1.0 + (k - centre) / range.max(f32::MIN_POSITIVE))).round().clamp(0.0, levels)
}

/// The value of a code.
#[inline(always)]
pub(crate) fn key_value(code: f32, centre: f32, range: f32, levels: f32) -> f32 {
    centre + range * (2.0 * code / levels - 1.0)
}

/// Rounds a key to its quantized values.
#[inline(always)]
pub(crate) fn round_key(bits: u32, channels: QuantRange, key: &mut [f32]) {
    let levels = levels(bits);
    for ((k, &centre), &range) in key.iter_mut().zip(channels.centre).zip(channels.range) {
        *k = key_value(key_code(*k, centre, range, levels), centre, range, levels);
    }
}

/// low and step of a value vector.
#[inline(always)]
pub(crate) fn value_scale(bits: u32, value: &[f32]) -> [f32; 2] {
    let (low, high) = value.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &v| (low.min(v), high.max(v)));
    [low, (high - low) / levels(bits)]
}

/// The code of one channel of a value vector.
#[inline(always)]
pub(crate) fn value_code(v: f32, [low, step]: [f32; 2], levels: f32) -> f32 {
    if step > 0.0 { ((v - low) / step).round().clamp(0.0, levels) } else { 0.0 }
}

/// Rounds a value vector to its quantized values.
#[inline(always)]
pub(crate) fn round_value(bits: u32, value: &mut [f32]) {
    let (scale, levels) = (value_scale(bits, value), levels(bits));
    value.iter_mut().for_each(|v| *v = scale[0] + scale[1] * value_code(*v, scale, levels));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_round_to_the_nearest_level_and_rounding_is_idempotent() {
        let (centre, range) = ([0.3f32, -2.0, 0.0], [1.5f32, 0.25, 4.0]);
        let channels = QuantRange { centre: &centre, range: &range };
        for bits in WIDTHS {
            for i in 0..200 {
                let key: [f32; 3] = std::array::from_fn(|c| centre[c] + range[c] * ((i * (c + 3)) % 97) as f32 / 48.0 - range[c]);
                let mut rounded = key;
                round_key(bits, channels, &mut rounded);
                let mut again = rounded;
                round_key(bits, channels, &mut again);
                assert_eq!(rounded, again);
                for c in 0..3 {
                    let step = 2.0 * range[c] / levels(bits);
                    let inside = (key[c] - centre[c]).abs() <= range[c];
                    assert!(!inside || (rounded[c] - key[c]).abs() <= 0.5001 * step, "{bits} bits: {} became {}", key[c], rounded[c]);
                    assert!((rounded[c] - centre[c]).abs() <= range[c] * 1.0001);
                }
                let mut value = key;
                round_value(bits, &mut value);
                let step = value_scale(bits, &key)[1];
                assert!(value.iter().zip(&key).all(|(a, b)| (a - b).abs() <= 0.5001 * step));
            }
            let mut constant = [0.7f32; 4];
            round_value(bits, &mut constant);
            assert_eq!(constant, [0.7; 4]);
        }
    }
}
