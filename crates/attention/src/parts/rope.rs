//! RoPE in Llama's half-split form: coordinates i and i + r/2 are rotated by the angle position·ω_i, for the first r coordinates of a head. A partial
//! rotary embedding has r < d and does not change the other coordinates.

use std::sync::Arc;

use crate::{Error, Real};

/// Rotary frequencies of a head. Clones share the table of angles. Two are equal if their frequencies and factors are.
#[derive(Clone, Debug)]
pub struct Rope {
    /// ω_i [r/2]
    frequencies: Vec<f64>,
    /// Factor of rotated q and k.
    factor: f64,
    /// cos and sin of the angles at the first positions, [positions, 2, r/2]; empty if they are computed on every call.
    table: Arc<[f64]>,
}

impl PartialEq for Rope {
    fn eq(&self, other: &Rope) -> bool {
        self.frequencies == other.frequencies && self.factor == other.factor
    }
}

/// Scaling of the frequencies for contexts longer than the trained one.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Positions divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3: long wavelengths divided by the factor, short ones kept, a smooth ramp between.
    Llama3 {
        /// The factor for long wavelengths.
        factor: f64,
        /// Wavelengths above context / this are long.
        low_freq_factor: f64,
        /// Wavelengths below context / this are short.
        high_freq_factor: f64,
        /// The context of the original training.
        original_context: f64,
    },
    /// NTK-aware, for sequences longer than the context: theta grows with their length, for all positions. Within the context nothing changes.
    Dynamic {
        /// The stretch of a sequence of twice the context, minus one.
        factor: f64,
        /// The context of the original training.
        original_context: f64,
    },
    /// YaRN (arXiv 2309.00071): high frequencies are kept, low frequencies are divided by the factor, with a
    /// linear ramp over the pairs in between; q and k are multiplied by a separate factor.
    Yarn {
        /// The factor for long wavelengths.
        factor: f64,
        /// Minimum rotations in the original context of a pair that is kept.
        beta_fast: f64,
        /// Maximum rotations of a pair that is divided by the full factor.
        beta_slow: f64,
        /// Whether the ramp begins and ends at whole pairs.
        truncate: bool,
        /// The context of the original training.
        original_context: f64,
        /// Factor of q and k; see [`RopeScaling::yarn_attention`].
        attention_factor: f64,
    },
    /// LongRoPE (arXiv 2402.13753): every frequency has its own divisor, and another one in sequences longer than the original context, for
    /// all of their positions.
    Long {
        /// Within the original context, [r/2].
        short_factor: Vec<f64>,
        /// In longer sequences, [r/2].
        long_factor: Vec<f64>,
        /// The context of the original training.
        original_context: f64,
        /// Factor of q and k.
        attention_factor: f64,
    },
}

impl RopeScaling {
    /// The paper's factor of q and k for a scaling factor: 0.1·m·ln(factor) + 1.
    pub fn yarn_attention(factor: f64, m: f64) -> f64 {
        if factor > 1.0 { 0.1 * m * factor.ln() + 1.0 } else { 1.0 }
    }

    /// The longest sequence whose frequencies equal those of any shorter one, if there is such a bound.
    pub fn fixed_up_to(&self) -> Option<f64> {
        match self {
            RopeScaling::Dynamic { original_context, .. } | RopeScaling::Long { original_context, .. } => Some(*original_context),
            _ => None,
        }
    }
}

impl Rope {
    /// ω_i = theta^{−2i/r} with the scaling, for sequences within the original context. r is the head dimension, or less for a partial rotary embedding.
    pub fn new(r: usize, theta: f64, scaling: Option<&RopeScaling>) -> Result<Rope, Error> {
        Rope::for_length(r, theta, scaling, 0)
    }

    /// Like [`Rope::new`], for sequences of this length, on which some scalings depend.
    pub fn for_length(r: usize, theta: f64, scaling: Option<&RopeScaling>, length: usize) -> Result<Rope, Error> {
        if !(theta.is_finite() && theta > 0.0) {
            return Err(Error::Shape(format!("rope theta must be a positive number, found {theta}")));
        }
        if let Some(RopeScaling::Long { short_factor, long_factor, .. }) = scaling {
            for (name, list) in [("short", short_factor), ("long", long_factor)] {
                if list.len() != r / 2 {
                    let (found, expected) = (list.len(), r / 2);
                    return Err(Error::Shape(format!(
                        "{found} {name} factors of the rotary frequencies, expected {expected}, half the rotated coordinates"
                    )));
                }
            }
        }
        let (width, length) = (r as f64, length as f64);
        let plain = |theta: f64, i: usize| theta.powf(-2.0 * i as f64 / width);
        let stretched = |i: usize| {
            let frequency = plain(theta, i);
            match scaling {
                None => frequency,
                Some(RopeScaling::Linear { factor }) => frequency / factor,
                Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => {
                    let wavelength = std::f64::consts::TAU / frequency;
                    let turns = original_context / wavelength;
                    let short = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    short * frequency + (1.0 - short) * frequency / factor
                }
                Some(RopeScaling::Dynamic { factor, original_context }) => {
                    let more = factor * length.max(*original_context) / original_context - (factor - 1.0);
                    // A single pair has frequency 1 for any theta.
                    if r > 2 { plain(theta * more.powf(width / (width - 2.0)), i) } else { frequency }
                }
                Some(RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_context, .. }) => {
                    // The fractional pair that rotates this often in the original context.
                    let pair = |turns: f64| width * (original_context / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln());
                    let (mut low, mut high) = (pair(*beta_fast), pair(*beta_slow));
                    if *truncate {
                        (low, high) = (low.floor(), high.ceil());
                    }
                    (low, high) = (low.max(0.0), high.min(width - 1.0));
                    if low == high {
                        high += 0.001;
                    }
                    let stretch = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    stretch * frequency / factor + (1.0 - stretch) * frequency
                }
                Some(RopeScaling::Long { short_factor, long_factor, original_context, .. }) => {
                    frequency / if length > *original_context { long_factor[i] } else { short_factor[i] }
                }
            }
        };
        let factor = match scaling {
            Some(RopeScaling::Yarn { attention_factor, .. } | RopeScaling::Long { attention_factor, .. }) => *attention_factor,
            _ => 1.0,
        };
        Ok(Rope { frequencies: (0..r / 2).map(stretched).collect(), factor, table: Arc::default() })
    }

    /// ω_i [r/2].
    pub fn frequencies(&self) -> &[f64] {
        &self.frequencies
    }

    /// Factor of rotated q and k.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// The same frequencies with a table of the angles of the first positions, to rotate many heads.
    pub fn with_table(mut self, positions: usize) -> Rope {
        let half = self.frequencies.len();
        let mut table = vec![0.0; positions * 2 * half];
        for (position, angles) in table.chunks_exact_mut((2 * half).max(1)).enumerate() {
            let (cos, sin) = angles.split_at_mut(half);
            self.angles(position, cos, sin);
        }
        self.table = table.into();
        self
    }

    /// cos and sin of the angles at one position, times the factor of q and k.
    pub fn angles<R: Real>(&self, position: usize, cos: &mut [R], sin: &mut [R]) {
        let half = self.frequencies.len();
        if let Some(known) = self.table.get(position * 2 * half..(position + 1) * 2 * half).filter(|known| !known.is_empty()) {
            cos.iter_mut().zip(&known[..half]).for_each(|(to, &from)| *to = R::of(from));
            sin.iter_mut().zip(&known[half..]).for_each(|(to, &from)| *to = R::of(from));
            return;
        }
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
            let angle = position as f64 * frequency;
            *cos = R::of(self.factor * angle.cos());
            *sin = R::of(self.factor * angle.sin());
        }
    }
}

/// The first 2·len(cos) coordinates of x [d], rotated forward.
#[inline(always)]
pub fn rotate<R: Real>(x: &mut [R], cos: &[R], sin: &[R]) {
    let (low, high) = x.split_at_mut(cos.len());
    for (((a, b), &cos), &sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// The reverse rotation: the gradient of [`rotate`], and its inverse if cos² + sin² = 1.
#[inline(always)]
pub fn rotate_back<R: Real>(x: &mut [R], cos: &[R], sin: &[R]) {
    let (low, high) = x.split_at_mut(cos.len());
    for (((a, b), &cos), &sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos + *b * sin, *b * cos - *a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, assert_close, numbers};

    #[test]
    fn halves_are_rotated_together() {
        let rope = Rope::new(4, 100.0, None).expect("a possible theta");
        assert_all_close(rope.frequencies(), &[1.0, 0.1], 1e-15);
        let (mut cos, mut sin) = ([0.0f64; 2], [0.0f64; 2]);
        rope.angles(3, &mut cos, &mut sin);
        let mut x = [1.0, 0.0, 0.0, 1.0];
        rotate(&mut x, &cos, &sin);
        assert_all_close(&x, &[3f64.cos(), -0.3f64.sin(), 3f64.sin(), 0.3f64.cos()], 1e-15);
        rotate_back(&mut x, &cos, &sin);
        assert_all_close(&x, &[1.0, 0.0, 0.0, 1.0], 1e-15);
    }

    #[test]
    fn a_partial_rotation_does_not_change_other_coordinates() {
        let rope = Rope::new(2, 100.0, None).expect("a possible theta");
        let (mut cos, mut sin) = ([0.0f64], [0.0f64]);
        rope.angles(3, &mut cos, &mut sin);
        let mut x = [1.0, 0.5, 7.0, 8.0];
        rotate(&mut x, &cos, &sin);
        assert_all_close(&x, &[3f64.cos() - 0.5 * 3f64.sin(), 0.5 * 3f64.cos() + 3f64.sin(), 7.0, 8.0], 1e-15);
        rotate_back(&mut x, &cos, &sin);
        assert_all_close(&x, &[1.0, 0.5, 7.0, 8.0], 1e-15);
    }

    #[test]
    fn a_table_does_not_change_results() {
        let plain = Rope::new(6, 10_000.0, None).expect("a possible theta");
        let kept = plain.clone().with_table(5);
        for position in [0, 3, 4, 5, 90] {
            let of = |rope: &Rope| {
                let (mut cos, mut sin) = ([0.0f32; 3], [0.0f32; 3]);
                rope.angles(position, &mut cos, &mut sin);
                [cos, sin]
            };
            assert_eq!(of(&plain), of(&kept), "{position}");
        }
    }

    #[test]
    fn products_depend_only_on_distance() {
        let rope = Rope::new(6, 10_000.0, None).expect("a possible theta");
        let (q, k) = (numbers(6, 1), numbers(6, 2));
        let product = |t: usize, s: usize| {
            let turned = |x: &[f64], position: usize| {
                let (mut x, mut cos, mut sin) = (x.to_vec(), [0.0; 3], [0.0; 3]);
                rope.angles(position, &mut cos, &mut sin);
                rotate(&mut x, &cos, &sin);
                x
            };
            turned(&q, t).iter().zip(turned(&k, s)).map(|(q, k)| q * k).sum::<f64>()
        };
        assert_close(product(9, 4), product(105, 100), 1e-12);
        assert!((product(9, 4) - product(9, 5)).abs() > 1e-3);
    }

    #[test]
    fn scaled_frequencies() {
        let plain = Rope::new(8, 500_000.0, None).expect("a possible theta");
        let halved = Rope::new(8, 500_000.0, Some(&RopeScaling::Linear { factor: 2.0 })).expect("a possible theta");
        for (a, b) in plain.frequencies().iter().zip(halved.frequencies()) {
            assert_close(*b, a / 2.0, 1e-15);
        }
        let scaling = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
        let llama = Rope::new(8, 500_000.0, Some(&scaling)).expect("a possible theta");
        // Wavelengths: 6.3 and 167 are short, 4443 is on the ramp, 118 143 is long.
        let ratios: Vec<f64> = llama.frequencies().iter().zip(plain.frequencies()).map(|(a, b)| a / b).collect();
        let short = (8192.0 * plain.frequencies()[2] / std::f64::consts::TAU - 1.0) / 3.0;
        assert_all_close(&ratios, &[1.0, 1.0, short + (1.0 - short) / 8.0, 0.125], 1e-12);
        assert!(Rope::new(8, 0.0, None).is_err() && Rope::new(8, f64::NAN, None).is_err());
    }
}
