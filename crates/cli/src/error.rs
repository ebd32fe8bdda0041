//! Exit codes, and their mapping from library errors.

use std::io;

use termwise_train::run::{EXIT_INTERRUPTED, EXIT_LOCKED};

/// An exit code. A named model, text or settings file that is missing is a usage error in every command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Success = 0,
    Failure = 1,
    Usage = 2,
    Partial = 3,
    Locked = EXIT_LOCKED as isize,
    Interrupted = EXIT_INTERRUPTED as isize,
}

impl Exit {
    /// Success.
    pub fn done((): ()) -> Exit {
        Exit::Success
    }

    /// `Interrupted` if the work was stopped.
    pub fn stopped(stopped: bool) -> Exit {
        if stopped { Exit::Interrupted } else { Exit::Success }
    }

    /// `Failure` unless all checks passed.
    pub fn passed(passed: bool) -> Exit {
        if passed { Exit::Success } else { Exit::Failure }
    }
}

/// The error of a command.
#[derive(Debug)]
pub enum Failure {
    /// The message of a library error, and the exit code.
    Library(String, Exit),
    /// Standard output cannot be written.
    Output(io::Error),
}

impl Failure {
    /// A usage error.
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
        // Rank 0 has printed the error.
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

fn of_conversion(error: &termwise_analysis::kv::Error) -> Exit {
    match error {
        termwise_analysis::kv::Error::Stopped => Exit::Interrupted,
        error => usage(error.is_usage()),
    }
}
