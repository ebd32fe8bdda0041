//! Stop strings in streamed text.

/// Passes streamed text through up to the first stop string.
///
/// Text that could be the beginning of a stop string is buffered until that is decided. If several stop strings occur, the one that is complete
/// first ends the text; of those complete at the same position, the longest.
///
/// ```
/// use termwise_model::decode::StopStrings;
///
/// let mut stops = StopStrings::new(["\n\n".to_string()]);
/// assert_eq!(stops.push("one\n"), ("one".to_string(), None));
/// assert_eq!(stops.push("two\n"), ("\ntwo".to_string(), None));
/// assert_eq!(stops.push("\nthree"), (String::new(), Some(0)));
/// ```
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    strings: Vec<String>,
    /// Buffered text that may be the beginning of a stop string.
    held: String,
}

impl StopStrings {
    /// Ends the text at any of these strings. Empty strings are ignored.
    pub fn new(strings: impl IntoIterator<Item = String>) -> StopStrings {
        StopStrings { strings: strings.into_iter().collect(), held: String::new() }
    }

    /// Returns the text that cannot be part of a stop string, and the index of the stop string that ended it. Nothing may be pushed after the end.
    pub fn push(&mut self, text: &str) -> (String, Option<usize>) {
        self.held += text;
        let found = self.strings.iter().enumerate().filter(|(_, stop)| !stop.is_empty()).filter_map(|(index, stop)| {
            let begin = self.held.find(stop.as_str())?;
            Some((begin + stop.len(), begin, index))
        });
        if let Some((_, begin, index)) = found.min() {
            self.held.truncate(begin);
            return (std::mem::take(&mut self.held), Some(index));
        }
        let undecided =
            |at: &usize| self.strings.iter().any(|stop| stop.len() > self.held.len() - at && stop.starts_with(&self.held[*at..]));
        let open = self.held.char_indices().map(|(at, _)| at).find(undecided).unwrap_or(self.held.len());
        let rest = self.held.split_off(open);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// The buffered text, at the end of a text without a stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reference: the text before the first complete stop string, searched character by character.
    fn plain(text: &str, strings: &[String]) -> (String, bool) {
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let longest = strings.iter().filter(|stop| !stop.is_empty() && text[..end].ends_with(stop.as_str())).map(String::len).max();
            if let Some(length) = longest {
                return (text[..end - length].to_string(), true);
            }
        }
        (text.to_string(), false)
    }

    proptest! {
        #[test]
        fn splitting_the_text_does_not_change_the_result(
            text in "[abé]{0,30}",
            strings in prop::collection::vec("[abé]{0,4}", 0..4),
            cuts in prop::collection::vec(0usize..30, 0..8),
        ) {
            let mut stops = StopStrings::new(strings.clone());
            let mut shown = String::new();
            let mut ended = false;
            let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at.min(text.len())).filter(|&at| text.is_char_boundary(at)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            for piece in cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]) {
                let (now, stop) = stops.push(piece);
                shown += &now;
                // The text so far is always a prefix of the result.
                prop_assert!(plain(&text, &strings).0.starts_with(&shown));
                if stop.is_some() {
                    ended = true;
                    break;
                }
            }
            if !ended {
                shown += &stops.finish();
            }
            prop_assert_eq!((shown, ended), plain(&text, &strings));
        }
    }

    #[test]
    fn text_is_buffered_only_while_it_may_be_a_stop_string() {
        let mut stops = StopStrings::new(["END".to_string()]);
        assert_eq!(stops.push("the E"), ("the ".to_string(), None));
        assert_eq!(stops.push("N"), (String::new(), None));
        assert_eq!(stops.push("E"), ("EN".to_string(), None));
        assert_eq!(stops.finish(), "E");
    }
}
