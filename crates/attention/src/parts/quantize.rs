//! Storage of the KV cache of a window in 16, 8 or 4 bits
//!
//! ```text
//! 16 bits   bfloat16, rounded to nearest even
//! 8 bits    x → s·round(x/s) in −127..127,   s = max|x| / 127          s in bfloat16, one per 32 consecutive values of a key or value
//! 4 bits    x → s·round(x/s) in −8..7,       s = −x_i / 8              x_i the value of largest magnitude; of the rotated key or value
//! rotation  x → H·x/√n                                                 H a Hadamard matrix, n the largest power of two that divides the dimension
//! ```
//!
//! Scales are computed when a key is stored, so there is nothing to calibrate. Keys are stored after RoPE. Keys and values have separate numbers of bits.
//! Sinks are stored in bfloat16 at every number of bits. The rotation spreads channels of large magnitude over all channels; it is orthogonal, so scores
//! do not change if the query is rotated too, and the output of rotated values is rotated back.

use half::bf16;

/// Numbers of bits of a stored value.
pub const WIDTHS: [u32; 3] = [16, 8, 4];
/// Consecutive values with one scale.
pub(crate) const GROUP: usize = 32;

/// The numbers of bits of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheBits {
    /// Of keys.
    pub keys: u32,
    /// Of values.
    pub values: u32,
}

impl CacheBits {
    /// The same number for keys and values.
    pub const fn both(bits: u32) -> CacheBits {
        CacheBits { keys: bits, values: bits }
    }

    /// The value in a variant string.
    pub fn text(self) -> String {
        if self.keys == self.values { self.keys.to_string() } else { format!("{},{}", self.keys, self.values) }
    }

    /// Parses `BITS` or `KEYS,VALUES`.
    pub fn read(text: &str) -> Result<CacheBits, String> {
        let number = |text: &str| {
            let bits = text.trim().parse::<u32>().ok();
            bits.ok_or_else(|| format!("`bits` takes 16, 8 or 4, or a pair for keys and values as in `bits=8,4`, found `{text}`"))
        };
        match text.split_once(',') {
            Some((keys, values)) => Ok(CacheBits { keys: number(keys)?, values: number(values)? }),
            None => number(text).map(CacheBits::both),
        }
    }

    /// The format of keys: of the sinks, or of all others.
    pub(crate) fn key_format(self, sink: bool) -> RowFormat {
        RowFormat { bits: if sink { 16 } else { self.keys }, rotated: self.keys == 4 }
    }

    /// The format of values: of the sinks, or of all others.
    pub(crate) fn value_format(self, sink: bool) -> RowFormat {
        RowFormat { bits: if sink { 16 } else { self.values }, rotated: self.values == 4 }
    }
}

/// How a key or value is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowFormat {
    pub bits: u32,
    /// Whether the stored vector is H·x/√n.
    pub rotated: bool,
}

impl RowFormat {
    /// Bytes of the codes of n values.
    pub fn code_bytes(self, n: usize) -> usize {
        match self.bits {
            16 => 2 * n,
            8 => n,
            _ => n.div_ceil(2),
        }
    }

    /// Number of scales of a vector of n values.
    pub fn scales(self, n: usize) -> usize {
        if self.bits == 16 { 0 } else { n.div_ceil(GROUP) }
    }

    /// Rounds a vector to the values that storage restores; its basis does not change.
    pub fn round(self, row: &mut [f32]) {
        for group in row.chunks_mut(GROUP) {
            let scale = scale(self.bits, group);
            group.iter_mut().for_each(|x| *x = value(self.bits, code(self.bits, *x, scale), scale));
        }
    }

    /// Rounds a vector in the basis of storage; the result is in the basis of the input.
    pub fn round_in_basis(self, row: &mut [f32]) {
        if self.rotated {
            rotate(row);
        }
        self.round(row);
        if self.rotated {
            rotate(row);
        }
    }
}

/// s of a group, a bfloat16 value; 1 for 16 bits.
#[inline(always)]
pub(crate) fn scale(bits: u32, group: &[f32]) -> f32 {
    if bits == 16 {
        return 1.0;
    }
    let mut largest = 0.0f32;
    for &x in group {
        if x.abs() > largest.abs() || x.is_nan() {
            largest = x;
        }
    }
    bf16::from_f32(if bits == 8 { largest.abs() / 127.0 } else { -largest / 8.0 }).to_f32()
}

/// The code of a value: the bits of a bfloat16, or an integer in two's complement.
#[inline(always)]
pub(crate) fn code(bits: u32, x: f32, scale: f32) -> u16 {
    if bits == 16 {
        return bf16::from_f32(x).to_bits();
    }
    let limit = if bits == 8 { (-127.0, 127.0) } else { (-8.0, 7.0) };
    // A scale of zero belongs to a group of zeros, or of values too small for a bfloat16.
    if scale == 0.0 { 0 } else { (x / scale).round().clamp(limit.0, limit.1) as i16 as u16 }
}

/// The value of a code.
#[inline(always)]
pub(crate) fn value(bits: u32, code: u16, scale: f32) -> f32 {
    match bits {
        16 => f32::from_bits(u32::from(code) << 16),
        8 => f32::from(code as u8 as i8) * scale,
        _ => f32::from((((code & 15) ^ 8) as i16) - 8) * scale,
    }
}

/// x ← H·x/√n in each of the blocks of n values, n the largest power of two that divides the dimension. It is its own inverse.
pub(crate) fn rotate(row: &mut [f32]) {
    let n = 1usize << row.len().trailing_zeros().min(usize::BITS - 1);
    if row.is_empty() || n == 1 {
        return;
    }
    let factor = 1.0 / (n as f32).sqrt();
    for block in row.chunks_exact_mut(n) {
        let mut half = 1;
        while half < n {
            for pair in block.chunks_exact_mut(2 * half) {
                let (a, b) = pair.split_at_mut(half);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        block.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Reads code `at` of a row of codes.
#[inline(always)]
pub(crate) fn read_code(bits: u32, codes: &[u8], at: usize) -> u16 {
    match bits {
        16 => u16::from_le_bytes([codes[2 * at], codes[2 * at + 1]]),
        8 => u16::from(codes[at]),
        _ => u16::from((codes[at / 2] >> (4 * (at % 2))) & 15),
    }
}

/// Writes code `at` of a row of codes.
#[inline(always)]
pub(crate) fn write_code(bits: u32, codes: &mut [u8], at: usize, code: u16) {
    match bits {
        16 => codes[2 * at..2 * at + 2].copy_from_slice(&code.to_le_bytes()),
        8 => codes[at] = code as u8,
        _ => {
            let shift = 4 * (at % 2);
            codes[at / 2] = (codes[at / 2] & !(15 << shift)) | (((code & 15) as u8) << shift);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| (((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0) * if i % 13 == 5 { 6.0 } else { 1.0 }).collect()
    }

    #[test]
    fn rounding_is_to_the_nearest_level_and_idempotent() {
        for bits in WIDTHS {
            let format = RowFormat { bits, rotated: false };
            for (n, seed) in [(64, 1), (32, 2), (20, 3), (80, 4), (5, 5), (1, 6)] {
                let x = row(n, seed);
                let mut rounded = x.clone();
                format.round(&mut rounded);
                let mut again = rounded.clone();
                format.round(&mut again);
                assert_eq!(rounded, again, "{bits} bits, {n} values");
                for (x, rounded) in x.chunks(GROUP).zip(rounded.chunks(GROUP)) {
                    let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                    // Half a step; at 4 bits the end without a level has one step more.
                    let bound =
                        largest * [1.0 / 256.0, 0.51 / 127.0, 1.01 / 8.0][WIDTHS.iter().position(|&width| width == bits).unwrap_or(0)];
                    assert!(x.iter().zip(rounded).all(|(x, y)| (x - y).abs() <= bound), "{bits} bits: {x:?} became {rounded:?}");
                }
            }
            let mut zeros = [0.0f32; 40];
            format.round_in_basis(&mut zeros);
            assert_eq!(zeros, [0.0; 40]);
        }
    }

    #[test]
    fn codes_round_trip_through_bytes() {
        for bits in WIDTHS {
            let format = RowFormat { bits, rotated: false };
            let x = row(33, 7);
            let mut codes = vec![0u8; format.code_bytes(33)];
            for (i, &x) in x.iter().enumerate() {
                write_code(bits, &mut codes, i, code(bits, x, 0.05));
            }
            for (i, &x) in x.iter().enumerate() {
                assert_eq!(value(bits, read_code(bits, &codes, i), 0.05), value(bits, code(bits, x, 0.05), 0.05));
            }
        }
    }

    #[test]
    fn the_rotation_is_orthogonal_and_its_own_inverse() {
        for n in [1, 2, 8, 64, 80, 7] {
            let (x, y) = (row(n, 1), row(n, 2));
            let (mut a, mut b) = (x.clone(), y.clone());
            rotate(&mut a);
            rotate(&mut b);
            let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(x * y)).sum::<f64>();
            assert!((dot(&x, &y) - dot(&a, &b)).abs() < 1e-4, "{n}");
            rotate(&mut a);
            assert!(x.iter().zip(&a).all(|(x, a)| (x - a).abs() < 1e-5), "{n}");
        }
        // One large channel is spread over all channels: 4 bits lose less of the others.
        let mut x: Vec<f32> = row(64, 3).iter().map(|x| x.clamp(-1.0, 1.0)).collect();
        x[9] = 20.0;
        let error = |rotated: bool| {
            let mut y = x.clone();
            RowFormat { bits: 4, rotated }.round_in_basis(&mut y);
            x.iter().zip(&y).map(|(x, y)| (x - y) * (x - y)).sum::<f32>()
        };
        assert!(error(true) < 0.3 * error(false), "{} {}", error(true), error(false));
    }

    #[test]
    fn bits_are_read_as_one_number_or_a_pair() {
        for (text, bits) in [("8", CacheBits::both(8)), ("8,4", CacheBits { keys: 8, values: 4 }), ("16", CacheBits::both(16))] {
            assert_eq!(CacheBits::read(text), Ok(bits));
            assert_eq!(bits.text(), text);
        }
        assert!(CacheBits::read("x").is_err_and(|error| error.contains("16, 8 or 4")));
    }
}
