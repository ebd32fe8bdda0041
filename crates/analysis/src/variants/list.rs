//! Lists of variants in one string.

use termwise_attention::Variant;
use termwise_attention::presets;

use crate::Error;

/// The variants of a list such as `softmax,norm,exp over=sum,floor=1`, each with its variant string; `all` means every preset.
///
/// A comma also separates the arguments of a part: an item that is not a variant belongs to the previous one.
pub fn split_list(list: &str) -> Result<Vec<(String, Variant)>, Error> {
    if list.trim() == "all" {
        return Ok(presets::all().iter().map(|preset| (preset.name.to_string(), preset.parts())).collect());
    }
    let mut found: Vec<(String, Variant)> = Vec::new();
    for piece in list.split(',') {
        let alone = piece.parse::<Variant>();
        match (alone, found.last_mut()) {
            (Ok(variant), _) => found.push((piece.trim().to_string(), variant)),
            (Err(error), None) => return Err(error.into()),
            (Err(error), Some((text, variant))) => {
                let joined = format!("{text},{piece}");
                *variant = joined.parse().map_err(|_| error)?;
                *text = joined;
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(list: &str) -> Vec<String> {
        split_list(list).expect("a list").into_iter().map(|(text, _)| text).collect()
    }

    #[test]
    fn commas_separate_variants_and_arguments() {
        assert_eq!(texts("softmax,norm"), ["softmax", "norm"]);
        assert_eq!(
            texts("exp over=sum,floor=1,eps=0.1 norm=l2, taylor=0..2,5,coef=learned,gate"),
            ["exp over=sum,floor=1,eps=0.1 norm=l2", "taylor=0..2,5,coef=learned", "gate"]
        );
        assert_eq!(texts("all").len(), presets::all().len());
    }

    #[test]
    fn a_misspelled_name_is_the_error_at_any_position() {
        for list in ["sofmax,norm", "norm,sofmax"] {
            let error = split_list(list).expect_err("no variant").to_string();
            assert!(error.contains("`sofmax`") && error.contains("did you mean `softmax`?"), "{error}");
        }
        assert!(split_list("").is_err());
    }
}
