//! How a command ends.

use std::io;
use std::process::ExitCode;

/// An exit code, see the head of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Success = 0,
    Failure = 1,
    Usage = 2,
    Interrupted = 130,
}

impl Exit {
    /// Nothing more to say.
    pub fn done((): ()) -> Exit {
        Exit::Success
    }

    /// Whether everything that was checked holds.
    pub fn passed(passed: bool) -> Exit {
        if passed { Exit::Success } else { Exit::Failure }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// Why a command could not go on.
#[derive(Debug)]
pub enum Failure {
    /// What went wrong in a library, and how to end.
    Library(String, Exit),
    /// Standard output is gone or full.
    Output(io::Error),
}

impl Failure {
    /// What was asked for makes no sense.
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure::Library(message.into(), Exit::Usage)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Output(error)
    }
}

macro_rules! failures {
    ($($($library:ident)::+: $usage:expr,)*) => {$(
        impl From<$($library::)+Error> for Failure {
            fn from(error: $($library::)+Error) -> Failure {
                let usage: fn(&$($library::)+Error) -> bool = $usage;
                Failure::Library(error.to_string(), if usage(&error) { Exit::Usage } else { Exit::Failure })
            }
        }
    )*};
}

failures! {
    termwise_attention: |_| true,
    termwise_base::files: |_| false,
    termwise_base::threads: |_| false,
    termwise_data: |_| false,
    termwise_generate: |_| false,
    termwise_inspect: termwise_inspect::Error::is_usage,
    termwise_lab: termwise_lab::Error::is_usage,
    termwise_llama: |_| false,
    termwise_papers: termwise_papers::Error::is_usage,
    termwise_report: |_| false,
    termwise_train: in_settings,
}

/// Settings and names of models are the user's own words, wherever they stand.
fn in_settings(error: &termwise_train::Error) -> bool {
    use termwise_llama::Error as Model;
    use termwise_train::Error as Train;
    matches!(
        error,
        Train::Attention(_)
            | Train::NoModel { .. }
            | Train::Setting { .. }
            | Train::Toml { .. }
            | Train::UnknownSetting { .. }
            | Train::Model(Model::Attention(_) | Model::AttentionEntry { .. })
    )
}
