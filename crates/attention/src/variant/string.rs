//! Variant strings: the form of a variant on a command line, in settings and in checkpoints.
//!
//! ```text
//! exp clamp=5 denominator=length in out norm=layer
//! taylor=0..4 norm=l2            gated_softmax norm=rms            feature=elu scale=1
//! softmax window=64 sinks=4 far(taylor=0..2 dim=4)
//! ```
//!
//! A variant string is a list of words in any order, separated by spaces or `+`: a kernel (`exp`, `taylor=0..4`, `power=2`, `feature=elu`) and
//! `key=value` settings. Defaults: `exp`, `denominator=sum`, RoPE on, no other part. `far(…)` contains a second kernel with its own settings,
//! for keys that are neither in the window nor sinks.
//!
//! A preset stands for its words, and further words replace all of them but the kernel. Parentheses and braces may replace `=`:
//! `taylor{0..4}`, `power(2)`. Printing gives the words in a fixed order without defaults, except the kernel and the denominator; parsing the
//! result gives the same variant. Three keys have a long form, which parses to the same variant: `denominator` (printed as `over`),
//! `heavy_hitters` (`chosen`) and `kv_bits` (`bits`). Stored variant strings contain the printed form.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use termwise_base::nearest;

use crate::error::TextError;
use crate::parts::gate::{InGate, OutGate, PostGate};
use crate::parts::heavy_hitters::HeavyHitters;
use crate::parts::qk_norm::QkNorm;
use crate::parts::quantize::CacheBits;
use crate::parts::slot::{Info, number, short};
use crate::parts::write::Delta;
use crate::variant::presets;
use crate::{Decay, Denominator, Error, Kernel, KeyRange, Norm, ScoreFn, Variant};

/// A key of a variant string.
#[derive(Debug)]
pub struct Key {
    /// The word before `=`.
    pub word: &'static str,
    /// The part of the bare word, if the key needs no value.
    pub bare: Option<&'static str>,
    /// Whether `off` removes it.
    pub off: bool,
    /// A description.
    pub about: &'static str,
    /// Its possible parts; empty if its value is a number or a switch.
    pub parts: &'static [&'static Info],
    /// Whether `far(…)` accepts it.
    pub far: bool,
    read: fn(&mut Variant, &str, &str) -> Option<Result<(), String>>,
    write: fn(&Variant) -> Option<String>,
}

/// Long forms of keys, and the words under which they are printed and stored.
pub const LONG_FORMS: [(&str, &str); 3] = [("denominator", "over"), ("heavy_hitters", "chosen"), ("kv_bits", "bits")];

/// Removed parts and their descriptions: keys, and arguments of kernels.
const REMOVED: [(&str, &str); 2] =
    [("centre", "keys shifted by their mean, with or without `gauss`"), ("at", "a series around another score than zero")];

/// The last commit that supports the parts of [`REMOVED`].
const LAST_SUPPORT: &str = "12bd7e8";

/// The problem of a word that uses a removed part, as a key or as an argument.
fn removed(word: &str) -> Option<String> {
    let (head, value) = head_and_value(word);
    let arguments = value.filter(|_| head != "far").into_iter().flat_map(|value| value.split(','));
    let mut names = std::iter::once(head).chain(arguments.filter_map(|argument| Some(argument.split_once('=')?.0.trim())));
    let (name, about) = names.find_map(|name| REMOVED.iter().find(|(removed, _)| *removed == name))?;
    Some(format!("`{name}` ({about}) was removed; the last commit that supports it is {LAST_SUPPORT}"))
}

/// The most frequent fields of a key: a value or `off`, near keys only.
const KEY: Key = Key { word: "", bare: None, off: true, about: "", parts: &[], far: false, read: |_, _, _| None, write: |_| None };

/// The keys, in the order in which they are printed, after the kernel.
pub static KEYS: &[Key] = &[
    Key {
        word: "clamp",
        about: "scores are replaced by min(x, c) before the kernel",
        far: true,
        read: |v, value, _| Some(optional(value, |value| number("clamp", value, false)).map(|c| v.near.clamp = c)),
        write: |v| v.near.clamp.map(short),
        ..KEY
    },
    Key {
        word: "scale",
        about: "the factor of q·k; default: 1/√d",
        far: true,
        read: |v, value, _| Some(optional(value, |value| number("scale", value, false)).map(|c| v.near.scale = c)),
        write: |v| v.near.scale.map(short),
        ..KEY
    },
    Key {
        word: "cap",
        about: "soft cap: scores become c·tanh(x/c), before a clamp",
        far: true,
        read: |v, value, _| Some(optional(value, |value| number("cap", value, true)).map(|c| v.near.cap = c)),
        write: |v| v.near.cap.map(short),
        ..KEY
    },
    Key {
        word: "dim",
        about: "q and k are projected to this many dimensions by learned matrices, last before the scores; the scale becomes 1/√dim",
        far: true,
        read: |v, value, _| Some(optional(value, |value| count("dim", value)).map(|n| v.near.dim = n)),
        write: |v| v.near.dim.map(|n| n.to_string()),
        ..KEY
    },
    Key {
        word: "window",
        about: "keys with t − s < W are near; far keys are masked unless `far` gives them a kernel",
        read: |v, value, _| Some(optional(value, |value| count("window", value)).map(|n| v.window = n)),
        write: |v| v.window.map(|n| n.to_string()),
        ..KEY
    },
    Key {
        word: "sinks",
        about: "keys with s < S are also near",
        read: |v, value, _| Some(optional(value, |value| count("sinks", value)).map(|n| v.sinks = n)),
        write: |v| v.sinks.map(|n| n.to_string()),
        ..KEY
    },
    Key {
        word: "chosen",
        about: "heavy hitters: outside the window, the N keys with the largest accumulated attention are near; with `fade=L` over about the last L queries; long form `heavy_hitters=N`",
        read: |v, value, _| Some(optional(value, HeavyHitters::read).map(|found| v.heavy_hitters = found)),
        write: |v| v.heavy_hitters.map(HeavyHitters::text),
        ..KEY
    },
    Key {
        word: "bits",
        about: "KV cache of the window in 16 (bfloat16), 8 or 4 bits, with a scale per 32 values and at 4 bits a Hadamard rotation; `bits=8,4` for keys and values; long form `kv_bits=N`",
        read: |v, value, _| Some(optional(value, CacheBits::read).map(|bits| v.bits = bits)),
        write: |v| v.bits.map(CacheBits::text),
        ..KEY
    },
    Key {
        word: "far",
        about: "a second kernel for far keys, with its own settings: `far(taylor=0..2 dim=4)`; one denominator over all keys",
        read: |v, value, _| Some(optional(value, far).map(|far| v.far = far)),
        write: |v| v.far.clone().map(|far| Words { variant: &Variant::new(far), range: KeyRange::Far }.to_string()),
        ..KEY
    },
    Key {
        word: "write",
        about: "u, the write rule of values",
        parts: &[&Delta::INFO],
        read: |v, word, args| (word == Delta::INFO.word).then(|| Delta::parse(args).map(|delta| v.write = Some(delta))),
        write: |v| v.write.map(|delta| joined(&Delta::INFO, &delta.args())),
        ..KEY
    },
    Key {
        word: "over",
        off: false,
        about: "D, the denominator of the weighted sum; long form `denominator=…`",
        parts: Denominator::PARTS,
        read: |v, word, args| Some(Denominator::parse(word, args)?.map(|part| v.denominator = part)),
        write: |v| Some(joined(v.denominator.info(), &v.denominator.args())),
        ..KEY
    },
    Key {
        word: "in",
        bare: Some("sigmoid"),
        about: "I, a gate on each key's value",
        parts: InGate::PARTS,
        read: |v, word, args| Some(InGate::parse(word, args)?.map(|part| v.in_gate = Some(part))),
        write: |v| v.in_gate.as_ref().map(|part| joined(part.info(), &part.args())),
        ..KEY
    },
    Key {
        word: "out",
        bare: Some("sigmoid"),
        about: "O, a gate on each query's output, before the norm",
        parts: OutGate::PARTS,
        read: |v, word, args| Some(OutGate::parse(word, args)?.map(|part| v.out_gate = Some(part))),
        write: |v| v.out_gate.as_ref().map(|part| joined(part.info(), &part.args())),
        ..KEY
    },
    Key {
        word: "post",
        bare: Some("sigmoid"),
        about: "P, a gate on each query's output, after the norm",
        parts: PostGate::PARTS,
        read: |v, word, args| Some(PostGate::parse(word, args)?.map(|part| v.post_gate = Some(part))),
        write: |v| v.post_gate.as_ref().map(|part| joined(part.info(), &part.args())),
        ..KEY
    },
    Key {
        word: "decay",
        off: true,
        about: "M, reduces the weights of older keys",
        parts: Decay::PARTS,
        read: |v, word, args| Some(Decay::parse(word, args)?.map(|part| v.decay = Some(part))),
        write: |v| v.decay.as_ref().map(|part| joined(part.info(), &part.args())),
        ..KEY
    },
    Key {
        word: "qk_norm",
        about: "the norm of q and k, after the convolution and before RoPE",
        parts: QkNorm::PARTS,
        read: |v, word, args| Some(QkNorm::parse(word, args)?.map(|part| v.qk_norm = Some(part))),
        write: |v| v.qk_norm.as_ref().map(|part| joined(part.info(), &part.args())),
        ..KEY
    },
    Key {
        word: "norm",
        off: false,
        about: "N, the norm of each head's output",
        parts: Norm::PARTS,
        read: |v, word, args| Some(Norm::parse(word, args)?.map(|part| v.norm = part)),
        write: |v| (!matches!(v.norm, Norm::NoNorm(_))).then(|| joined(v.norm.info(), &v.norm.args())),
        ..KEY
    },
    Key {
        word: "rope",
        off: false,
        about: "rotary positions: on or off",
        read: |v, value, _| {
            v.rope = match value {
                "on" => true,
                "off" => false,
                _ => return Some(Err(format!("`rope` is `on` or `off`, found `{value}`"))),
            };
            Some(Ok(()))
        },
        write: |v| (!v.rope).then(|| "off".to_string()),
        ..KEY
    },
    Key {
        word: "conv",
        about: "width of a short causal convolution over q, k and v",
        read: |v, value, _| {
            let width = |value: &str| value.parse().map_err(|_| format!("`conv` takes a width, as in `conv=3`, found `{value}`"));
            Some(optional(value, width).map(|w| v.conv = w))
        },
        write: |v| v.conv.map(|w| w.to_string()),
        ..KEY
    },
];

fn joined(info: &Info, args: &str) -> String {
    if args.is_empty() { info.word.to_string() } else { format!("{},{args}", info.word) }
}

fn count(what: &str, value: &str) -> Result<usize, String> {
    value.parse().map_err(|_| format!("`{what}` takes a whole number, as in `{what}=4`, found `{value}`"))
}

/// Parses the parentheses of `far`.
fn far(text: &str) -> Result<ScoreFn, String> {
    let words = split(text);
    let allowed = |word: &str| {
        let (head, _) = head_and_value(word);
        KEYS.iter().any(|key| key.word == head && key.far) || Kernel::PARTS.iter().any(|info| info.word == head)
    };
    if let Some(problem) = words.iter().find_map(|span| removed(&text[span.clone()])) {
        return Err(format!("in `far`: {problem}"));
    }
    if let Some(span) = words.iter().find(|span| !allowed(&text[(*span).clone()])) {
        let keys: Vec<&str> = KEYS.iter().filter(|key| key.far).map(|key| key.word).collect();
        return Err(format!("`far` takes a kernel and {}, found `{}`", keys.join(", "), &text[span.clone()]));
    }
    if !words.iter().any(|span| Kernel::PARTS.iter().any(|info| info.word == head_and_value(&text[span.clone()]).0)) {
        return Err("`far` needs a kernel in its parentheses, as in `far(taylor=0..2)`".into());
    }
    read(text).map(|variant| variant.near).map_err(|error| match error {
        Error::Text(error) => match error.help {
            Some(help) => format!("in `far`: {}; {help}", error.problem),
            None => format!("in `far`: {}", error.problem),
        },
        error => error.to_string(),
    })
}

fn optional<T>(value: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, String> {
    if value == "off" { Ok(None) } else { read(value).map(Some) }
}

impl Key {
    fn remove(&self, v: &mut Variant) {
        match self.word {
            "in" => v.in_gate = None,
            "out" => v.out_gate = None,
            "post" => v.post_gate = None,
            "decay" => v.decay = None,
            "qk_norm" => v.qk_norm = None,
            "write" => v.write = None,
            _ => {}
        }
    }

    /// Sets `key=value`; the error describes the problem.
    fn apply(&self, v: &mut Variant, value: &str) -> Result<(), (String, Option<String>)> {
        if self.parts.is_empty() {
            let unread = Err(format!("`{}` cannot be read", self.word));
            return (self.read)(v, value, "").unwrap_or(unread).map_err(|problem| (problem, None));
        }
        if self.off && value == "off" {
            self.remove(v);
            return Ok(());
        }
        let (word, args) = value.split_once(',').unwrap_or((value, ""));
        match (self.read)(v, word, args) {
            Some(result) => result.map_err(|problem| (problem, None)),
            None => {
                let words: Vec<&str> = self.parts.iter().map(|info| info.word).collect();
                let help = nearest(word, words.iter().copied()).map(|word| format!("did you mean `{}={word}`?", self.word));
                Err((format!("`{}` takes one of {}, found `{word}`", self.word, words.join(", ")), help))
            }
        }
    }
}

impl FromStr for Variant {
    type Err = Error;

    fn from_str(text: &str) -> Result<Variant, Error> {
        let variant = read(text)?;
        variant.validate()?;
        Ok(variant)
    }
}

/// Parses the words without checking their combination.
fn read(text: &str) -> Result<Variant, Error> {
    let fail = |span: Range<usize>, problem: String, help: Option<String>| {
        Err(Error::Text(TextError { text: text.to_string(), span, problem, help }))
    };
    if text.trim_start().starts_with('{') {
        let help = Some("a map per layer and head is for whole models: settings of a run, or config.json".to_string());
        return fail(0..text.len(), "this is a map, and one variant for all heads is required".into(), help);
    }
    let words = split(text);
    if words.is_empty() {
        let help = Some("write a preset such as `softmax`, or parts such as `exp over=sum`".to_string());
        return fail(0..text.len(), "an attention variant is empty".into(), help);
    }
    let mut variant = Variant::default();
    let mut seen: Vec<(&str, Range<usize>)> = Vec::new();
    let mut base: Option<(&str, Kernel)> = None;
    // The preset first, whatever its position: the other words change it.
    for span in &words {
        if let Some(preset) = presets::find(&text[span.clone()]) {
            if let Some((other, _)) = seen.first() {
                return fail(span.clone(), format!("a second preset after `{other}`: only one can be the starting point"), None);
            }
            variant = preset.parts();
            base = Some((preset.name, variant.near.kernel.clone()));
            seen.push((preset.name, span.clone()));
        }
    }
    for span in &words {
        let word = &text[span.clone()];
        if presets::find(word).is_some() {
            continue;
        }
        let count = |brackets: [char; 2]| word.matches(brackets).count();
        if count(['(', '{']) != count([')', '}']) {
            return fail(span.clone(), "brackets are not balanced".into(), None);
        }
        if let Some(problem) = removed(word) {
            return fail(span.clone(), problem, Some("remove it, or use that version".into()));
        }
        let (head, value) = head_and_value(word);
        let head = LONG_FORMS.iter().find(|(long, _)| *long == head).map_or(head, |(_, word)| word);
        let key = KEYS.iter().find(|key| key.word == head);
        let kernel = Kernel::PARTS.iter().find(|info| info.word == head);
        let slot = match (key, kernel) {
            (Some(key), _) => key.word,
            (None, Some(_)) => "kernel",
            (None, None) => return fail(span.clone(), format!("`{head}` is not a part, key or preset"), suggestion(head)),
        };
        if let Some((_, earlier)) = seen.iter().find(|(other, _)| *other == slot) {
            let problem = format!("`{word}` and `{}` both set the {slot}: keep one", &text[earlier.clone()]);
            return fail(span.clone(), problem, None);
        }
        seen.push((slot, span.clone()));
        let applied = match (key, value) {
            (Some(key), Some(value)) => key.apply(&mut variant, value),
            (Some(key), None) => match key.bare {
                Some(bare) => key.apply(&mut variant, bare),
                None => Err((format!("`{head}` needs a value"), Some(format!("as in `{}`", example(key))))),
            },
            (None, _) => match Kernel::parse(head, value.unwrap_or_default()) {
                Some(result) => result.map(|kernel| variant.near.kernel = kernel).map_err(|problem| (problem, None)),
                None => Err((format!("`{head}` is not a kernel"), None)),
            },
        };
        if let Err((problem, help)) = applied {
            return fail(span.clone(), problem, help);
        }
        if let Some((preset, kernel)) = base.as_ref().filter(|(_, kernel)| *kernel != variant.near.kernel) {
            let problem = format!("`{word}` contradicts the preset `{preset}`, whose kernel is `{}`", kernel_text(kernel));
            let help = format!("keep one of them, or write the parts out: `{variant}`");
            return fail(span.clone(), problem, Some(help));
        }
    }
    Ok(variant)
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Words { variant: self, range: KeyRange::Near }.fmt(f)
    }
}

fn kernel_text(kernel: &Kernel) -> String {
    let (word, args) = (kernel.info().word, kernel.args());
    if args.is_empty() { word.to_string() } else { format!("{word}={args}") }
}

/// The words of a variant, or those that `far(…)` accepts.
struct Words<'a> {
    variant: &'a Variant,
    range: KeyRange,
}

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&kernel_text(&self.variant.near.kernel))?;
        for key in KEYS.iter().filter(|key| key.far || !self.range.is_far()) {
            match (key.write)(self.variant) {
                Some(value) if key.bare == Some(value.as_str()) => write!(f, " {}", key.word)?,
                Some(value) if key.word == "far" => write!(f, " far({value})")?,
                Some(value) => write!(f, " {}={value}", key.word)?,
                None => {}
            }
        }
        Ok(())
    }
}

impl serde::Serialize for Variant {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Variant {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Variant, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The spans of the words. `+` separates like a space, except inside brackets and in an exponent such as `1e+5`.
fn split(text: &str) -> Vec<Range<usize>> {
    let mut words = Vec::new();
    let mut start = None;
    let mut depth = 0i32;
    let bytes = text.as_bytes();
    for (i, c) in text.char_indices() {
        match c {
            '{' | '(' => depth += 1,
            '}' | ')' => depth -= 1,
            _ => {}
        }
        let exponent = c == '+' && i >= 2 && matches!(bytes[i - 1], b'e' | b'E') && (bytes[i - 2].is_ascii_digit() || bytes[i - 2] == b'.');
        let separates = (c.is_whitespace() && depth <= 0) || (c == '+' && depth <= 0 && !exponent);
        match (separates, start) {
            (true, Some(begin)) => {
                words.push(begin..i);
                start = None;
            }
            (false, None) => start = Some(i),
            _ => {}
        }
    }
    words.extend(start.map(|begin| begin..text.len()));
    words
}

/// Splits `key=value`, `key(value)` or `key{value}`.
fn head_and_value(word: &str) -> (&str, Option<&str>) {
    let Some(at) = word.find(['=', '(', '{']) else { return (word, None) };
    let (head, rest) = word.split_at(at);
    let value = match rest.as_bytes()[0] {
        b'(' => rest[1..].strip_suffix(')'),
        b'{' => rest[1..].strip_suffix('}'),
        _ => None,
    };
    (head, Some(value.unwrap_or(&rest[1..])))
}

fn suggestion(word: &str) -> Option<String> {
    let keys = KEYS.iter().map(|key| key.word).chain(LONG_FORMS.map(|(long, _)| long));
    let kernels = Kernel::PARTS.iter().map(|info| info.word);
    let names = presets::all().iter().map(|preset| preset.name);
    if let Some(near) = nearest(word, keys.chain(kernels).chain(names)) {
        return Some(format!("did you mean `{near}`?"));
    }
    // A part's word without its key, such as `layer` for `norm=layer`.
    let key = KEYS.iter().find(|key| key.parts.iter().any(|info| info.word == word && word != "none"))?;
    Some(format!("did you mean `{}={word}`?", key.word))
}

fn example(key: &Key) -> String {
    match key.parts.first() {
        Some(info) => format!("{}={}", key.word, info.word),
        None => match key.word {
            "rope" => "rope=off".into(),
            "conv" => "conv=3".into(),
            "far" => "far(taylor=0..2)".into(),
            "window" | "sinks" | "dim" | "bits" => format!("{}=4", key.word),
            "chosen" => "chosen=32".into(),
            word => format!("{word}=5"),
        },
    }
}
