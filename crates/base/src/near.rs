//! Suggestions for misspelled names.

/// The closest of `words` to `word`, or `None` if none is similar enough to be a suggestion.
pub fn nearest<'a>(word: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = word.to_lowercase();
    words
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&lower, &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.chars().count() / 3).max(1) || candidate.to_lowercase().starts_with(&lower))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}
