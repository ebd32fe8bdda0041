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

    /// Whether the work was interrupted.
    pub fn stopped(stopped: bool) -> Exit {
        if stopped { Exit::Interrupted } else { Exit::Success }
    }

    /// Whether all checks passed.
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
    ($($error:ty => $exit:expr,)*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Failure {
                let exit: fn(&$error) -> Exit = $exit;
                Failure::Library(error.to_string(), exit(&error))
            }
        }
    )*};
}

failures! {
    termwise_attention::Error => |_| Exit::Usage,
    termwise_base::files::Error => |error| usage(error.source.kind() == io::ErrorKind::NotFound),
    termwise_base::threads::Error => |_| Exit::Failure,
    termwise_analysis::kv::Error => of_conversion,
    termwise_data::Error => |error| usage(error.is_usage()),
    termwise_model::GenerateError => |error| usage(error.is_usage()),
    termwise_analysis::Error => |error| usage(error.is_usage()),
    termwise_model::Error => |_| Exit::Failure,
    termwise_report::Error => |_| Exit::Failure,
    termwise_experiments::serve::Error => |_| Exit::Failure,
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
fn of_conversion(error: &termwise_analysis::kv::Error) -> Exit {
    match error {
        termwise_analysis::kv::Error::Stopped => Exit::Interrupted,
        error => usage(error.is_usage()),
    }
}
