//! Computation modes: all keys at once, or in chunks with a state between them.

use std::fmt;
use std::str::FromStr;

use termwise_base::nearest;

use crate::Error;
use crate::error::TextError;

/// A computation mode. Results are the same up to rounding.
///
/// ```
/// use termwise_attention::Mode;
///
/// assert_eq!("chunk=64".parse::<Mode>()?, Mode::Chunk(Some(64)));
/// assert_eq!("fused_chunk".parse::<Mode>()?.to_string(), "chunk");
/// assert!("chunks".parse::<Mode>().is_err());
/// # Ok::<(), termwise_attention::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Every query scores every key before it: O(T²).
    #[default]
    Parallel,
    /// Queries read the keys before their chunk from a state: O(T). Without a length the engine chooses one. Heads without a finite state run in parallel mode; at least one head must have one.
    Chunk(Option<usize>),
    /// The cheaper of the two per head, by a cost model.
    Auto,
}

const WORDS: [(&str, Mode); 6] = [
    ("parallel", Mode::Parallel),
    ("chunk", Mode::Chunk(None)),
    ("auto", Mode::Auto),
    ("fused_chunk", Mode::Chunk(None)),
    ("recurrent", Mode::Chunk(Some(1))),
    ("fused_recurrent", Mode::Chunk(Some(1))),
];

impl FromStr for Mode {
    type Err = Error;

    /// `parallel`, `chunk`, `chunk=LENGTH` or `auto`. Aliases: `fused_chunk` is `chunk`; `recurrent` and
    /// `fused_recurrent` are chunks of one position.
    fn from_str(text: &str) -> Result<Mode, Error> {
        let fail =
            |problem: String, help: Option<String>| Error::Text(TextError { text: text.to_string(), span: 0..text.len(), problem, help });
        if let Some(length) = text.strip_prefix("chunk=") {
            let length = length.parse().ok().filter(|&length: &usize| length > 0);
            return length
                .map(|length| Mode::Chunk(Some(length)))
                .ok_or_else(|| fail("the length of a chunk must be a whole number of at least 1, as in `chunk=64`".into(), None));
        }
        let known = WORDS.iter().find(|(word, _)| *word == text).map(|(_, mode)| *mode);
        known.ok_or_else(|| {
            let help = nearest(text, WORDS.map(|(word, _)| word)).map(|word| format!("did you mean `{word}`?"));
            fail("a mode must be `parallel`, `chunk`, `chunk=LENGTH` or `auto`".into(), help)
        })
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::Parallel => write!(f, "parallel"),
            Mode::Chunk(None) => write!(f, "chunk"),
            Mode::Chunk(Some(length)) => write!(f, "chunk={length}"),
            Mode::Auto => write!(f, "auto"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_strings_round_trip() {
        for mode in [Mode::Parallel, Mode::Chunk(None), Mode::Chunk(Some(7)), Mode::Auto] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert_eq!("fused_recurrent".parse(), Ok(Mode::Chunk(Some(1))));
        assert_eq!("recurrent".parse(), Ok(Mode::Chunk(Some(1))));
        assert_eq!("fused_chunk".parse(), Ok(Mode::Chunk(None)));
        for wrong in ["", "chunk=0", "chunk=-1", "chunk=x", "Parallel ", "para"] {
            assert!(wrong.parse::<Mode>().is_err(), "{wrong}");
        }
        assert!("paralel".parse::<Mode>().is_err_and(|error| error.to_string().contains("`parallel`?")));
    }
}
