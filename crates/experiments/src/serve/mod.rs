//! A live dashboard of the runs in a directory.
//!
//! - [`live`]: the metrics of all runs, read as they grow;
//! - [`look`]: attention and memory of a run's model on a text;
//! - [`server`]: the page and its requests, only for this machine and with a token;
//! - `http`: the HTTP server below it, with limits on sizes, times and connections.
//!
//! Nothing is written. Requests use names of runs that the server has found itself, so no request contains a path.

mod http;
pub mod live;
pub mod look;
pub mod server;

pub use server::{Server, Stop};

/// Errors of the server. Each states the request, the finding and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A directory that cannot be read.
    #[error("cannot read the directory of runs {}: {source}; name an existing directory, such as runs", path.display())]
    Folder {
        /// The path.
        path: std::path::PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A port that is not available.
    #[error("cannot listen on port {port} of this machine: {reason}; choose another one with --port, or omit it")]
    Port {
        /// The port.
        port: u16,
        /// The cause.
        reason: String,
    },
    /// No random numbers for a token.
    #[error("cannot get random numbers for a token from the system: {0}")]
    Random(String),
}
