//! RoPE, Llama's half-split form: coordinates i and i + d/2 are rotated by the angle position·ω_i

use std::sync::Arc;

use crate::{Error, Real};

/// Rotary frequencies of a head dimension. Clones share the table of angles; two are equal where their frequencies are.
#[derive(Clone, Debug)]
pub struct Rope {
    /// ω_i [d/2]
    frequencies: Vec<f64>,
    /// cos and sin of the angles at the first positions, [positions, 2, d/2]; empty where they are computed each time.
    table: Arc<[f64]>,
}

impl PartialEq for Rope {
    fn eq(&self, other: &Rope) -> bool {
        self.frequencies == other.frequencies
    }
}

/// How frequencies are stretched for contexts longer than the trained one.
#[derive(Clone, Copy, Debug, PartialEq)]
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
}

impl Rope {
    /// ω_i = theta^{−2i/d}, stretched as asked.
    pub fn new(d: usize, theta: f64, scaling: Option<RopeScaling>) -> Result<Rope, Error> {
        if !(theta.is_finite() && theta > 0.0) {
            return Err(Error::Shape(format!("rope theta must be a positive number, found {theta}")));
        }
        let stretch = |frequency: f64| match scaling {
            None => frequency,
            Some(RopeScaling::Linear { factor }) => frequency / factor,
            Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => {
                let wavelength = std::f64::consts::TAU / frequency;
                let turns = original_context / wavelength;
                let short = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                short * frequency + (1.0 - short) * frequency / factor
            }
        };
        let frequencies = (0..d / 2).map(|i| stretch(theta.powf(-2.0 * i as f64 / d as f64))).collect();
        Ok(Rope { frequencies, table: Arc::default() })
    }

    /// ω_i [d/2].
    pub fn frequencies(&self) -> &[f64] {
        &self.frequencies
    }

    /// The same frequencies with the angles of the first positions kept, for those who turn many heads.
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

    /// cos and sin of the angles at one position.
    pub fn angles<R: Real>(&self, position: usize, cos: &mut [R], sin: &mut [R]) {
        let half = self.frequencies.len();
        if let Some(known) = self.table.get(position * 2 * half..(position + 1) * 2 * half).filter(|known| !known.is_empty()) {
            cos.iter_mut().zip(&known[..half]).for_each(|(to, &from)| *to = R::of(from));
            sin.iter_mut().zip(&known[half..]).for_each(|(to, &from)| *to = R::of(from));
            return;
        }
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
            let angle = position as f64 * frequency;
            *cos = R::of(angle.cos());
            *sin = R::of(angle.sin());
        }
    }
}

/// x [d] rotated forward.
#[inline(always)]
pub fn rotate<R: Real>(x: &mut [R], cos: &[R], sin: &[R]) {
    let (low, high) = x.split_at_mut(x.len() / 2);
    for (((a, b), &cos), &sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// x [d] rotated back: the gradient of [`rotate`], and its inverse.
#[inline(always)]
pub fn rotate_back<R: Real>(x: &mut [R], cos: &[R], sin: &[R]) {
    let (low, high) = x.split_at_mut(x.len() / 2);
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
    fn a_table_changes_nothing() {
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
    fn products_depend_on_distance_alone() {
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
    fn stretched_frequencies() {
        let plain = Rope::new(8, 500_000.0, None).expect("a possible theta");
        let halved = Rope::new(8, 500_000.0, Some(RopeScaling::Linear { factor: 2.0 })).expect("a possible theta");
        for (a, b) in plain.frequencies().iter().zip(halved.frequencies()) {
            assert_close(*b, a / 2.0, 1e-15);
        }
        let scaling = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
        let llama = Rope::new(8, 500_000.0, Some(scaling)).expect("a possible theta");
        // Wavelengths: 6.3 and 167 are short, 4443 lies on the ramp, 118 143 is long.
        let ratios: Vec<f64> = llama.frequencies().iter().zip(plain.frequencies()).map(|(a, b)| a / b).collect();
        let short = (8192.0 * plain.frequencies()[2] / std::f64::consts::TAU - 1.0) / 3.0;
        assert_all_close(&ratios, &[1.0, 1.0, short + (1.0 - short) / 8.0, 0.125], 1e-12);
        assert!(Rope::new(8, 0.0, None).is_err() && Rope::new(8, f64::NAN, None).is_err());
    }
}
