//! Where a text ends: strings of which nothing is ever shown.

/// Lets text through up to the first stop string, in pieces cut anywhere.
///
/// Text that could be the beginning of a stop string is held back until it is decided. Of several that could end the text, the one
/// that is complete first counts; of those complete at once, the longest.
///
/// ```
/// use termwise_llama::generate::Stops;
///
/// let mut stops = Stops::new(["\n\n".to_string()]);
/// assert_eq!(stops.push("one\n"), ("one".to_string(), None));
/// assert_eq!(stops.push("two\n"), ("\ntwo".to_string(), None));
/// assert_eq!(stops.push("\nthree"), (String::new(), Some(0)));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Stops {
    strings: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
}

impl Stops {
    /// Ends at any of these; empty ones are ignored.
    pub fn new(strings: impl IntoIterator<Item = String>) -> Stops {
        Stops { strings: strings.into_iter().collect(), held: String::new() }
    }

    /// The text that can be shown now, and which string has ended it; after that nothing more may be pushed.
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

    /// What was held back, at the end of a text that no string has ended.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The text before the first stop string to be complete, looked for from the front character by character.
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
        fn pieces_make_no_difference(
            text in "[abé]{0,30}",
            strings in prop::collection::vec("[abé]{0,4}", 0..4),
            cuts in prop::collection::vec(0usize..30, 0..8),
        ) {
            let mut stops = Stops::new(strings.clone());
            let mut shown = String::new();
            let mut ended = false;
            let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at.min(text.len())).filter(|&at| text.is_char_boundary(at)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            for piece in cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]) {
                let (now, stop) = stops.push(piece);
                shown += &now;
                // Nothing shown is ever taken back: it is a beginning of what remains in the end.
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
    fn text_is_held_back_only_while_it_is_undecided() {
        let mut stops = Stops::new(["END".to_string()]);
        assert_eq!(stops.push("the E"), ("the ".to_string(), None));
        assert_eq!(stops.push("N"), (String::new(), None));
        assert_eq!(stops.push("E"), ("EN".to_string(), None));
        assert_eq!(stops.finish(), "E");
    }
}
