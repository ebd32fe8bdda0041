//! Words that were probably meant.

/// The closest of `words` to `word`, if any is close enough to be what was meant.
pub fn nearest<'a>(word: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = word.to_lowercase();
    words
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&lower, &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.chars().count() / 3).max(1) || candidate.to_lowercase().starts_with(&lower))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}
