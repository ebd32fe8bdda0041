//! How a command ends.

use std::io;

use termwise_train::run::{LOCKED, STOPPED};

/// An exit code. An input that is named and missing is a usage error in every command: a model, a text, a settings file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Success = 0,
    Failure = 1,
    Usage = 2,
    Partial = 3,
    Locked = LOCKED as isize,
    Interrupted = STOPPED as isize,
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
    ($($($library:ident)::+: $exit:expr,)*) => {$(
        impl From<$($library::)+Error> for Failure {
            fn from(error: $($library::)+Error) -> Failure {
                let exit: fn(&$($library::)+Error) -> Exit = $exit;
                Failure::Library(error.to_string(), exit(&error))
            }
        }
    )*};
}

failures! {
    termwise_attention: |_| Exit::Usage,
    termwise_base::files: |error| usage(error.source.kind() == io::ErrorKind::NotFound),
    termwise_base::threads: |_| Exit::Failure,
    termwise_convert: of_conversion,
    termwise_data: |error| usage(error.is_usage()),
    termwise_generate: |error| usage(error.is_usage()),
    termwise_lab: |error| usage(error.is_usage()),
    termwise_llama: |_| Exit::Failure,
    termwise_report: |_| Exit::Failure,
    termwise_serve: |_| Exit::Failure,
}

impl From<termwise_train::Error> for Failure {
    fn from(error: termwise_train::Error) -> Failure {
        // Rank 0 has said what it is.
        let message = if matches!(error, termwise_train::Error::FirstRank) { String::new() } else { error.to_string() };
        Failure::Library(message, of_training(&error))
    }
}

fn usage(usage: bool) -> Exit {
    if usage { Exit::Usage } else { Exit::Failure }
}

fn of_training(error: &termwise_train::Error) -> Exit {
    match error {
        termwise_train::Error::RunLocked { .. } => Exit::Locked,
        error => usage(error.is_usage()),
    }
}

/// What was stopped is kept.
fn of_conversion(error: &termwise_convert::Error) -> Exit {
    match error {
        termwise_convert::Error::Stopped => Exit::Interrupted,
        error => usage(error.is_usage()),
    }
}
