//! Near and far keys: keys with t − s < W (the window) and keys with s < S (the sinks) are near, all others far

use std::ops::Range;

use termwise_kernels::score_rows::Visible;

/// One of the two branches of a variant: keys in the window and sinks, or all other keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KeyRange {
    /// Keys in the window, and sinks; all keys of a variant without a window.
    Near,
    /// Keys outside the window.
    Far,
}

impl KeyRange {
    /// Both branches.
    pub const ALL: [KeyRange; 2] = [KeyRange::Near, KeyRange::Far];

    /// Whether it is the far branch.
    pub fn is_far(self) -> bool {
        self == KeyRange::Far
    }
}

/// A window and its sinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Distance {
    /// W, including the position itself.
    pub window: usize,
    /// Number of sinks, S.
    pub sinks: usize,
}

impl Distance {
    /// All keys are near.
    pub const ALL: Distance = Distance { window: usize::MAX, sinks: 0 };

    /// Whether key s ≤ t is near at position t.
    #[inline(always)]
    pub fn is_near(self, t: usize, s: usize) -> bool {
        t - s < self.window || s < self.sinks
    }

    /// The far keys of position t: all between the sinks and the window.
    pub fn far(self, t: usize) -> Range<usize> {
        let end = (t + 1).saturating_sub(self.window);
        self.sinks.min(end)..end
    }

    /// The keys of the tile of this length from `start` on that are near at position t ≥ start.
    #[inline(always)]
    pub fn visible(self, t: usize, start: usize, tile: usize) -> Visible {
        let until = (t + 1 - start).min(tile);
        let from = (t + 1).saturating_sub(self.window).saturating_sub(start);
        Visible { from: from.min(until), until, sinks: self.sinks.saturating_sub(start).min(until) }
    }

    /// The keys of the tile that are far at position t ≥ start.
    #[inline(always)]
    pub fn far_visible(self, t: usize, start: usize, tile: usize) -> Visible {
        let far = self.far(t);
        let until = far.end.saturating_sub(start).min(tile);
        Visible { from: far.start.saturating_sub(start).min(until), until, sinks: 0 }
    }

    /// The first position at which no key of the tile is near.
    pub fn seen_until(self, start: usize, tile: usize) -> usize {
        if start < self.sinks { usize::MAX } else { (start + tile - 1).saturating_add(self.window) }
    }

    /// The same for positions that are counted from `first`.
    pub fn after(self, first: usize) -> Distance {
        Distance { sinks: self.sinks.saturating_sub(first), ..self }
    }

    /// The near keys of position t: the sinks outside the window, then the window.
    pub fn near(self, t: usize) -> impl DoubleEndedIterator<Item = usize> + Clone {
        let far = self.far(t);
        (0..far.start).chain(far.end..t + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_near_or_far() {
        for (window, sinks) in [(1, 0), (1, 2), (3, 0), (3, 2), (3, 9), (9, 1), (usize::MAX, 0)] {
            let distance = Distance { window, sinks };
            for t in 0..8 {
                let near: Vec<usize> = distance.near(t).collect();
                assert_eq!(near, (0..=t).filter(|&s| distance.is_near(t, s)).collect::<Vec<_>>());
                assert!(distance.far(t).all(|s| !distance.is_near(t, s)));
                assert_eq!(near.len() + distance.far(t).len(), t + 1);
            }
        }
        for (window, sinks) in [(1, 0), (3, 2), (3, 9), (usize::MAX, 0)] {
            let distance = Distance { window, sinks };
            for (start, t) in (0..6).flat_map(|start| (start..12).map(move |t| (start, t))) {
                let visible = distance.visible(t, start, 4);
                let seen: Vec<usize> = (0..4).filter(|&s| visible.contains(s)).collect();
                let expected: Vec<usize> = (0..4).filter(|s| start + s <= t && distance.is_near(t, start + s)).collect();
                assert_eq!(seen, expected, "{distance:?}, tile at {start}, position {t}");
                assert_eq!(t < distance.seen_until(start, 4), !expected.is_empty());
            }
        }
        let distance = Distance { window: 3, sinks: 2 };
        assert_eq!((distance.near(7).collect::<Vec<_>>(), distance.far(7)), (vec![0, 1, 5, 6, 7], 2..5));
        assert_eq!((distance.near(3).collect::<Vec<_>>(), distance.far(3)), (vec![0, 1, 2, 3], 1..1));
    }
}
