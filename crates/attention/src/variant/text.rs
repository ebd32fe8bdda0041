//! The text form of a variant, as written on a command line or in a config.
//!
//! ```text
//! exp clamp=5 over=length in out norm=layer
//! taylor=0..4 over=sum            gated_softmax norm=rms            feature=elu scale=1
//! softmax window=64 sinks=4 far(taylor=0..2 dim=4)
//! ```
//!
//! A text is a list of words, separated by spaces or `+`, in any order: a kernel (`exp`, `taylor=0..4`, `power=2`,
//! `feature=elu`) and `key=value` settings. What is left out has its default: `exp`, `over=sum`, RoPE on, nothing else.
//! `denominator=` is another name of `over=`. `far(…)` holds the words of a second kernel, for keys that are neither in the window nor sinks; nothing
//! passes from outside into its parentheses.
//! The name of a preset stands for its words, and further words change all of it but the kernel. Parentheses and braces may stand for `=`:
//! `taylor{0..4}`, `power(2)`. Printing gives the words in a fixed order with defaults left out, except the kernel and
//! the denominator; parsing that gives the same variant.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use termwise_base::nearest;

use crate::error::TextError;
use crate::parts::chosen::Chosen;
use crate::parts::denominator::sum::Sum;
use crate::parts::gate::{InGate, OutGate, PostGate};
use crate::parts::kernel::exp::Exp;
use crate::parts::norm::none::NoNorm;
use crate::parts::qk_norm::QkNorm;
use crate::parts::slot::{Info, number, short};
use crate::parts::write::Delta;
use crate::variant::presets;
use crate::{Decay, Denominator, Error, Kernel, Norm, Variant, Weighing};

/// A key of the text form.
#[derive(Debug)]
pub struct Key {
    /// The word before `=`.
    pub word: &'static str,
    /// The part that its bare word stands for, if it can stand alone.
    pub bare: Option<&'static str>,
    /// Whether `off` removes it.
    pub off: bool,
    /// What it sets, for people.
    pub about: &'static str,
    /// The parts that it chooses from; empty where its value is a number or a switch.
    pub parts: &'static [&'static Info],
    /// Whether it can stand in `far(…)`.
    pub far: bool,
    read: fn(&mut Variant, &str, &str) -> Option<Result<(), String>>,
    write: fn(&Variant) -> Option<String>,
}

/// Other names of keys, as people may know them.
const ALIASES: [(&str, &str); 1] = [("denominator", "over")];

/// Parts that earlier versions had, with what they were: keys, and arguments of kernels.
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

/// The keys, in the order in which they are printed, after the kernel.
pub static KEYS: &[Key] = &[
    Key {
        word: "clamp",
        bare: None,
        off: true,
        about: "scores are cut to min(x, c) before the kernel",
        parts: &[],
        far: true,
        read: |v, value, _| Some(optional(value, |value| number("clamp", value, false)).map(|c| v.clamp = c)),
        write: |v| v.clamp.map(short),
    },
    Key {
        word: "scale",
        bare: None,
        off: true,
        about: "what q·k is multiplied by; 1/√d unless given",
        parts: &[],
        far: true,
        read: |v, value, _| Some(optional(value, |value| number("scale", value, false)).map(|c| v.scale = c)),
        write: |v| v.scale.map(short),
    },
    Key {
        word: "cap",
        bare: None,
        off: true,
        about: "soft cap: scores become c·tanh(x/c), before a clamp",
        parts: &[],
        far: true,
        read: |v, value, _| Some(optional(value, |value| number("cap", value, true)).map(|c| v.cap = c)),
        write: |v| v.cap.map(short),
    },
    Key {
        word: "dim",
        bare: None,
        off: true,
        about: "q and k are projected to this many dimensions by learned matrices, last before the scores; the scale becomes 1/√dim",
        parts: &[],
        far: true,
        read: |v, value, _| Some(optional(value, |value| count("dim", value)).map(|n| v.dim = n)),
        write: |v| v.dim.map(|n| n.to_string()),
    },
    Key {
        word: "window",
        bare: None,
        off: true,
        about: "keys with t − s < W are near; far keys are not seen unless `far` weighs them",
        parts: &[],
        far: false,
        read: |v, value, _| Some(optional(value, |value| count("window", value)).map(|n| v.window = n)),
        write: |v| v.window.map(|n| n.to_string()),
    },
    Key {
        word: "sinks",
        bare: None,
        off: true,
        about: "keys with s < S are near, too",
        parts: &[],
        far: false,
        read: |v, value, _| Some(optional(value, |value| count("sinks", value)).map(|n| v.sinks = n)),
        write: |v| v.sinks.map(|n| n.to_string()),
    },
    Key {
        word: "chosen",
        bare: None,
        off: true,
        about: "behind the window, so many keys that received the most attention are near, too; with `fade=L` from about the last L queries",
        parts: &[],
        far: false,
        read: |v, value, _| Some(optional(value, Chosen::read).map(|chosen| v.chosen = chosen)),
        write: |v| v.chosen.map(Chosen::text),
    },
    Key {
        word: "bits",
        bare: None,
        off: true,
        about: "keys and values of the window are kept as codes of 8 or 4 bits: keys by channel, values by token",
        parts: &[],
        far: false,
        read: |v, value, _| Some(optional(value, |value| count("bits", value)).map(|n| v.bits = n.map(|n| n.min(64) as u32))),
        write: |v| v.bits.map(|n| n.to_string()),
    },
    Key {
        word: "far",
        bare: None,
        off: true,
        about: "a second kernel for far keys, with words of its own: `far(taylor=0..2 dim=4)`; one denominator over all keys",
        parts: &[],
        far: false,
        read: |v, value, _| Some(optional(value, far).map(|far| v.far = far)),
        write: |v| v.far.as_ref().map(far_text),
    },
    Key {
        word: "write",
        bare: None,
        off: true,
        about: "u, how values are written",
        parts: &[&Delta::INFO],
        far: false,
        read: |v, word, args| (word == Delta::INFO.word).then(|| Delta::parse(args).map(|delta| v.write = Some(delta))),
        write: |v| v.write.map(|delta| joined(&Delta::INFO, &delta.args())),
    },
    Key {
        word: "over",
        bare: None,
        off: false,
        about: "D, what the weighted sum is divided by",
        parts: Denominator::PARTS,
        far: false,
        read: |v, word, args| Some(Denominator::parse(word, args)?.map(|part| v.denominator = part)),
        write: |v| Some(joined(v.denominator.info(), &v.denominator.args())),
    },
    Key {
        word: "in",
        bare: Some("sigmoid"),
        off: true,
        about: "I, a gate on each key's value",
        parts: InGate::PARTS,
        far: false,
        read: |v, word, args| Some(InGate::parse(word, args)?.map(|part| v.in_gate = Some(part))),
        write: |v| v.in_gate.as_ref().map(|part| joined(part.info(), &part.args())),
    },
    Key {
        word: "out",
        bare: Some("sigmoid"),
        off: true,
        about: "O, a gate on each query's output, before the norm",
        parts: OutGate::PARTS,
        far: false,
        read: |v, word, args| Some(OutGate::parse(word, args)?.map(|part| v.out_gate = Some(part))),
        write: |v| v.out_gate.as_ref().map(|part| joined(part.info(), &part.args())),
    },
    Key {
        word: "post",
        bare: Some("sigmoid"),
        off: true,
        about: "P, a gate on each query's output, after the norm",
        parts: PostGate::PARTS,
        far: false,
        read: |v, word, args| Some(PostGate::parse(word, args)?.map(|part| v.post_gate = Some(part))),
        write: |v| v.post_gate.as_ref().map(|part| joined(part.info(), &part.args())),
    },
    Key {
        word: "decay",
        bare: None,
        off: true,
        about: "M, older keys count less",
        parts: Decay::PARTS,
        far: false,
        read: |v, word, args| Some(Decay::parse(word, args)?.map(|part| v.decay = Some(part))),
        write: |v| v.decay.as_ref().map(|part| joined(part.info(), &part.args())),
    },
    Key {
        word: "qk_norm",
        bare: None,
        off: true,
        about: "the norm of q and k, after the convolution and before RoPE",
        parts: QkNorm::PARTS,
        far: false,
        read: |v, word, args| Some(QkNorm::parse(word, args)?.map(|part| v.qk_norm = Some(part))),
        write: |v| v.qk_norm.as_ref().map(|part| joined(part.info(), &part.args())),
    },
    Key {
        word: "norm",
        bare: None,
        off: false,
        about: "N, the norm of each head's output",
        parts: Norm::PARTS,
        far: false,
        read: |v, word, args| Some(Norm::parse(word, args)?.map(|part| v.norm = part)),
        write: |v| (!matches!(v.norm, Norm::NoNorm(_))).then(|| joined(v.norm.info(), &v.norm.args())),
    },
    Key {
        word: "rope",
        bare: None,
        off: false,
        about: "rotary positions: on or off",
        parts: &[],
        far: false,
        read: |v, value, _| {
            v.rope = match value {
                "on" => true,
                "off" => false,
                _ => return Some(Err(format!("`rope` is `on` or `off`, found `{value}`"))),
            };
            Some(Ok(()))
        },
        write: |v| (!v.rope).then(|| "off".to_string()),
    },
    Key {
        word: "conv",
        bare: None,
        off: true,
        about: "width of a short causal convolution over q, k and v",
        parts: &[],
        far: false,
        read: |v, value, _| {
            let width = |value: &str| value.parse().map_err(|_| format!("`conv` takes a width, as in `conv=3`, found `{value}`"));
            Some(optional(value, width).map(|w| v.conv = w))
        },
        write: |v| v.conv.map(|w| w.to_string()),
    },
];

fn joined(info: &Info, args: &str) -> String {
    if args.is_empty() { info.word.to_string() } else { format!("{},{args}", info.word) }
}

fn count(what: &str, value: &str) -> Result<usize, String> {
    value.parse().map_err(|_| format!("`{what}` takes a whole number, as in `{what}=4`, found `{value}`"))
}

/// The words in the parentheses of `far`.
fn far(text: &str) -> Result<Weighing, String> {
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
    read(text).map(|variant| variant.near()).map_err(|error| match error {
        Error::Text(error) => match error.help {
            Some(help) => format!("in `far`: {}; {help}", error.problem),
            None => format!("in `far`: {}", error.problem),
        },
        error => error.to_string(),
    })
}

fn far_text(far: &Weighing) -> String {
    let Weighing { kernel, clamp, scale, cap, dim } = far.clone();
    Words { variant: &Variant { kernel, clamp, scale, cap, dim, ..Variant::default() }, far: true }.to_string()
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

    /// Takes `key=value` in; the error says what is wrong.
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

impl Default for Variant {
    /// Softmax.
    fn default() -> Self {
        Variant {
            kernel: Kernel::Exp(Exp),
            clamp: None,
            scale: None,
            cap: None,
            dim: None,
            window: None,
            sinks: None,
            chosen: None,
            bits: None,
            far: None,
            write: None,
            denominator: Denominator::Sum(Sum::default()),
            in_gate: None,
            out_gate: None,
            post_gate: None,
            decay: None,
            qk_norm: None,
            norm: Norm::NoNorm(NoNorm),
            rope: true,
            conv: None,
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

/// The parts that the words say, not yet checked together.
fn read(text: &str) -> Result<Variant, Error> {
    let fail = |span: Range<usize>, problem: String, help: Option<String>| {
        Err(Error::Text(TextError { text: text.to_string(), span, problem, help }))
    };
    if text.trim_start().starts_with('{') {
        let help = Some("a map by layer and head is for whole models: settings of a run, or config.json".to_string());
        return fail(0..text.len(), "this is a map, and one attention for all heads is asked for".into(), help);
    }
    let words = split(text);
    if words.is_empty() {
        let help = Some("write a preset such as `softmax`, or parts such as `exp over=sum`".to_string());
        return fail(0..text.len(), "an attention variant is empty".into(), help);
    }
    let mut variant = Variant::default();
    let mut seen: Vec<(&str, Range<usize>)> = Vec::new();
    let mut base: Option<(&str, Kernel)> = None;
    // A preset first, wherever it stands, so that the other words change it.
    for span in &words {
        if let Some(preset) = presets::find(&text[span.clone()]) {
            if let Some((other, _)) = seen.first() {
                return fail(span.clone(), format!("a second preset after `{other}`: only one can be the starting point"), None);
            }
            variant = preset.parts();
            base = Some((preset.name, variant.kernel.clone()));
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
            return fail(span.clone(), "as many brackets must be closed as are opened".into(), None);
        }
        if let Some(problem) = removed(word) {
            return fail(span.clone(), problem, Some("leave it out, or use that version".into()));
        }
        let (head, value) = head_and_value(word);
        let head = ALIASES.iter().find(|(alias, _)| *alias == head).map_or(head, |(_, word)| word);
        let key = KEYS.iter().find(|key| key.word == head);
        let kernel = Kernel::PARTS.iter().find(|info| info.word == head);
        let slot = match (key, kernel) {
            (Some(key), _) => key.word,
            (None, Some(_)) => "kernel",
            (None, None) => return fail(span.clone(), format!("`{head}` is no part, key or preset"), suggestion(head)),
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
                Some(result) => result.map(|kernel| variant.kernel = kernel).map_err(|problem| (problem, None)),
                None => Err((format!("`{head}` is no kernel"), None)),
            },
        };
        if let Err((problem, help)) = applied {
            return fail(span.clone(), problem, help);
        }
        if let Some((preset, kernel)) = base.as_ref().filter(|(_, kernel)| *kernel != variant.kernel) {
            let problem = format!("`{word}` contradicts the preset `{preset}`, whose kernel is `{}`", kernel_text(kernel));
            let help = format!("keep one of them, or write the parts out: `{variant}`");
            return fail(span.clone(), problem, Some(help));
        }
    }
    Ok(variant)
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Words { variant: self, far: false }.fmt(f)
    }
}

fn kernel_text(kernel: &Kernel) -> String {
    let (word, args) = (kernel.info().word, kernel.args());
    if args.is_empty() { word.to_string() } else { format!("{word}={args}") }
}

/// The words of a variant, or those of them that can stand in `far(…)`.
struct Words<'a> {
    variant: &'a Variant,
    far: bool,
}

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&kernel_text(&self.variant.kernel))?;
        for key in KEYS.iter().filter(|key| key.far || !self.far) {
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

/// `key=value`, `key(value)` or `key{value}` taken apart.
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
    let keys = KEYS.iter().map(|key| key.word);
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
