//! A live page of the runs in a folder.
//!
//! - [`live`]: the metrics of all runs, read as they grow;
//! - [`look`]: attention and memory of a run's model on a text;
//! - [`server`]: the page and its requests, for this machine alone and with a token;
//! - `http`: the HTTP server below it, with limits on sizes, times and connections.
//!
//! Nothing is written. Runs are called by names that the server has found itself, so that no request names a path.

mod http;
pub mod live;
pub mod look;
pub mod server;

pub use server::{Server, Stop};

/// What can go wrong. Each says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A folder that cannot be read.
    #[error("cannot read the folder of runs {}: {source}; name a folder that is there, such as runs", path.display())]
    Folder {
        /// Which.
        path: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A port that is not free.
    #[error("cannot listen on port {port} of this machine: {reason}; choose another one with --port, or leave it out")]
    Port {
        /// Which.
        port: u16,
        /// Why.
        reason: String,
    },
    /// No random numbers for a token.
    #[error("the system gives no random numbers for a token: {0}")]
    Random(String),
}
