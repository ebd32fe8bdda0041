//! Chosen keys: behind the window, the N keys that received the most attention
//!
//! ```text
//! r_s ← e^{−1/L}·r_s + Σ_h w_ts / Σ_s' w_ts'        s' over the keys that are held, h over the heads that share them; L = ∞ unless given
//! ```
//!
//! A key that leaves the window takes a free place among the chosen, or that of the key with the least r, its own r being compared, too; who loses is
//! far from then on. Without `fade` all queries since a key was written count alike (heavy hitters, as in H2O); with it those of about the last L
//! (an observation window, as in SnapKV, that moves along).

/// How many keys are chosen, and by whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// N
    pub keys: usize,
    /// L
    pub fade: Option<usize>,
}

impl Chosen {
    /// What r is multiplied by at each position.
    pub fn factor(self) -> f32 {
        self.fade.map_or(1.0, |fade| (-1.0 / fade as f32).exp())
    }

    /// The text that `read` takes.
    pub fn text(self) -> String {
        match self.fade {
            Some(fade) => format!("{},fade={fade}", self.keys),
            None => self.keys.to_string(),
        }
    }

    /// Reads `N` or `N,fade=L`.
    pub fn read(text: &str) -> Result<Chosen, String> {
        let wrong =
            || format!("`chosen` takes a number of keys and perhaps a fade, as in `chosen=32` or `chosen=32,fade=64`, found `{text}`");
        let (keys, fade) = match text.split_once(',') {
            Some((keys, fade)) => (keys, Some(fade.trim().strip_prefix("fade=").ok_or_else(wrong)?)),
            None => (text, None),
        };
        let number = |text: &str| text.trim().parse::<usize>().ok().filter(|&n| n > 0).ok_or_else(wrong);
        Ok(Chosen { keys: number(keys)?, fade: fade.map(number).transpose()? })
    }

    /// Of these r, the place of the least, the first where several are equal; the last of them is that of the key that leaves the window.
    pub fn loser<R: PartialOrd + Copy>(received: &[R]) -> usize {
        let mut least = 0;
        for (i, r) in received.iter().enumerate() {
            if *r < received[least] {
                least = i;
            }
        }
        least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_as_they_are_written() {
        for text in ["1", "32", "32,fade=64"] {
            assert_eq!(Chosen::read(text).map(Chosen::text), Ok(text.to_string()));
        }
        for text in ["0", "", "x", "3,4", "3,fade=0", "3,fade=x", "-1"] {
            assert!(Chosen::read(text).is_err(), "{text}");
        }
        assert_eq!((Chosen::loser(&[3.0, 1.0, 1.0, 2.0]), Chosen::loser(&[0.0])), (1, 0));
    }
}
