//! Windows of text, and their measured queries.

use termwise_data::{Rows, Source};

use crate::Error;
use termwise_base::rng::Rng;

/// Windows of at most `length` tokens from the held-out batches of a source, until there are `tokens` of them or the source ends.
pub fn windows(source: &dyn Source, length: usize, tokens: u64) -> Result<Vec<Vec<u32>>, Error> {
    let (mut found, mut windows, mut rows) = (0, Vec::new(), Rows::default());
    for index in 0.. {
        if found >= tokens || !source.held_out(index, 1, length, &mut rows)? {
            break;
        }
        // A shorter row ends with masked positions.
        let labelled = rows.labels.iter().rposition(|&label| label >= 0).map_or(0, |last| last + 1);
        let end = rows.lengths.first().map_or(labelled, |&length| length.min(rows.time));
        if labelled > 0 {
            found += end as u64;
            windows.push(rows.ids[..end].to_vec());
        }
    }
    Ok(windows)
}

/// The measured queries of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowChoice {
    /// All queries.
    All,
    /// At most this number per window.
    Sampled(usize),
}

/// Positions of a window, ascending: all, or one drawn from each of equal parts of the window. Depends only on seed and window.
pub fn sample(choice: RowChoice, length: usize, window: usize, seed: u64) -> Vec<usize> {
    match choice {
        RowChoice::Sampled(count) if count < length => {
            let mut rng = Rng::named(seed, &format!("rows of window {window}"));
            let bound = |i: usize| (i as u128 * length as u128 / count as u128) as usize;
            (0..count).map(|i| bound(i) + rng.below(bound(i + 1) - bound(i))).collect()
        }
        _ => (0..length).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_of_a_window_gives_one_row() {
        let rows = sample(RowChoice::Sampled(7), 100, 3, 1);
        assert_eq!(rows.len(), 7);
        for (i, row) in rows.iter().enumerate() {
            assert!((i * 100 / 7..(i + 1) * 100 / 7).contains(row), "{rows:?}");
        }
        assert_eq!(rows, sample(RowChoice::Sampled(7), 100, 3, 1));
        assert_ne!(rows, sample(RowChoice::Sampled(7), 100, 4, 1));
        assert_ne!(rows, sample(RowChoice::Sampled(7), 100, 3, 2));
        assert_eq!(sample(RowChoice::Sampled(100), 100, 0, 1), sample(RowChoice::All, 100, 0, 1));
        assert_eq!(sample(RowChoice::All, 3, 0, 0), [0, 1, 2]);
    }
}
