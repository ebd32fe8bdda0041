//! The trait of parts, and the macro that declares a slot of the formula from a list of parts.

use std::fmt::Debug;

/// The description of a part, for help, documentation and tests.
#[derive(Debug)]
pub struct Info {
    /// Its word in a variant string.
    pub word: &'static str,
    /// Its syntax, including arguments.
    pub usage: &'static str,
    /// Its formula in the symbols of the legend.
    pub formula: &'static str,
    /// One sentence.
    pub about: &'static str,
    /// Valid values, for documentation and tests.
    pub examples: &'static [&'static str],
}

/// One choice for one slot of the formula.
pub trait Part: Sized + Clone + PartialEq + Debug {
    /// Its description.
    const INFO: Info;

    /// Parses the arguments that follow the word; the error states what was expected.
    fn parse(args: &str) -> Result<Self, String>;

    /// The arguments as `parse` reads them; empty for a bare word.
    fn args(&self) -> String;
}

/// For parts without arguments.
pub(crate) fn no_args(word: &str, args: &str) -> Result<(), String> {
    if args.is_empty() { Ok(()) } else { Err(format!("`{word}` takes no argument, found `{args}`")) }
}

/// Parses a finite number, which must be positive if `positive` is set.
pub(crate) fn number(what: &str, text: &str, positive: bool) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(x) if x.is_finite() && (!positive || x > 0.0) => Ok(x),
        _ => Err(format!("{what} must be a {} number, found `{text}`", if positive { "positive" } else { "finite" })),
    }
}

/// The shortest form of a number that parses to the same value: `5`, `0.0001`, `1e-8`.
pub(crate) fn short(x: f64) -> String {
    let (plain, scientific) = (x.to_string(), format!("{x:e}"));
    if scientific.len() < plain.len() { scientific } else { plain }
}

/// Declares a unit part: a part without arguments.
macro_rules! unit_part {
    ($(#[$doc:meta])* $Part:ident, $info:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $Part;

        impl $crate::parts::slot::Part for $Part {
            const INFO: $crate::parts::slot::Info = $info;
            fn parse(args: &str) -> Result<Self, String> {
                $crate::parts::slot::no_args(Self::INFO.word, args).map(|()| $Part)
            }
            fn args(&self) -> String {
                String::new()
            }
        }
    };
}
pub(crate) use unit_part;

/// Declares a part of this slot whose only argument is `channel`: one gate per channel.
macro_rules! channel_part {
    ($(#[$doc:meta])* $Part:ident, $slot:literal, $info:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $Part {
            /// One gate per channel.
            pub channel: bool,
        }

        impl $crate::parts::slot::Part for $Part {
            const INFO: $crate::parts::slot::Info = $info;
            fn parse(args: &str) -> Result<Self, String> {
                match args {
                    "" => Ok($Part { channel: false }),
                    "channel" => Ok($Part { channel: true }),
                    _ => Err(format!("`{}={}` takes `channel`, found `{args}`", $slot, Self::INFO.word)),
                }
            }
            fn args(&self) -> String {
                if self.channel { "channel".into() } else { String::new() }
            }
        }
    };
}
pub(crate) use channel_part;

/// Declares a slot: an enum over its parts that forwards every listed method to its part. To add a part,
/// write its file and add it to this list.
macro_rules! slot {
    ($(#[$doc:meta])* $Slot:ident { $($module:ident::$Part:ident),+ $(,)? } $($methods:tt)*) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs, reason = "each part documents itself")]
        pub enum $Slot { $($Part($module::$Part)),+ }

        impl $Slot {
            /// The parts of this slot.
            pub const PARTS: &'static [&'static $crate::parts::slot::Info] =
                &[$(&<$module::$Part as $crate::parts::slot::Part>::INFO),+];

            /// The part of this word with these arguments; `None` if no part has this word.
            pub fn parse(word: &str, args: &str) -> Option<Result<Self, String>> {
                $(if word == <$module::$Part as $crate::parts::slot::Part>::INFO.word {
                    return Some(<$module::$Part as $crate::parts::slot::Part>::parse(args).map($Slot::$Part));
                })+
                None
            }

            /// The description of the part.
            pub fn info(&self) -> &'static $crate::parts::slot::Info {
                match self { $($Slot::$Part(_) => &<$module::$Part as $crate::parts::slot::Part>::INFO),+ }
            }

            /// Its arguments as a string.
            pub fn args(&self) -> String {
                match self { $($Slot::$Part(part) => $crate::parts::slot::Part::args(part)),+ }
            }
        }

        $crate::parts::slot::slot!(@methods $Slot [$($Part)+] $($methods)*);
    };
    (@methods $Slot:ident [$($Part:ident)+]) => {};
    (@methods $Slot:ident [$($Part:ident)+]
        $(#[$doc:meta])* fn $name:ident $(<$G:ident: $bound:path>)? ($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)?; $($rest:tt)*
    ) => {
        $crate::parts::slot::slot!(@method $Slot [$($Part)+] [$(#[$doc])*] $name [$(<$G: $bound>)?] [$($arg: $type),*] [$(-> $ret)?] ($($arg),*));
        $crate::parts::slot::slot!(@methods $Slot [$($Part)+] $($rest)*);
    };
    (@method $Slot:ident [$($Part:ident)+] [$($doc:tt)*] $name:ident [$($generics:tt)*] [$($params:tt)*] [$($ret:tt)*] $call:tt) => {
        impl $Slot {
            $($doc)*
            #[inline(always)]
            pub fn $name $($generics)* (&self, $($params)*) $($ret)* {
                match self { $($Slot::$Part(part) => part.$name $call),+ }
            }
        }
    };
}
pub(crate) use slot;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_finite() {
        assert_eq!(number("x", " 2.5 ", true), Ok(2.5));
        assert_eq!(number("x", "-1e-3", false), Ok(-1e-3));
        for text in ["", "nan", "inf", "1e999", "one", "0x1"] {
            assert!(number("x", text, false).is_err_and(|error| error.contains(&format!("`{text}`"))), "{text}");
        }
        assert!(number("x", "0", true).is_err() && number("x", "-1", true).is_err());
    }

    #[test]
    fn unit_parts_take_no_argument() {
        assert_eq!(no_args("l2", ""), Ok(()));
        assert!(no_args("l2", "3").is_err());
    }
}
