//! Sweeps: many runs from one file with a base and axes. Every combination of the axes' values is run once.
//!
//! ```toml
//! metric = "held_out.loss"     # metric to compare, smaller is better
//!
//! [base]                       # any training settings, or the name of a file with them: base = "small.toml"
//! steps = 1000
//!
//! [axes]                       # dotted setting keys, or their last components if unambiguous
//! attention = ["softmax conv=3", "linear_elu conv=3"]
//! lr = [1e-3, 3e-3]
//! seed = [1, 2, 3]
//! ```
//!
//! A [`Plan`] is the file with every combination resolved to complete settings. [`run()`] passes unfinished runs to a
//! [`Runner`], several at a time. A run is identified by a hash of its complete settings, so a sweep can be interrupted, extended by
//! further values and restarted without repeating finished runs. [`Summary`] is the result: mean ± standard deviation over
//! seeds, and the best learning rate for each combination of the other axes.
//!
//! # Directory of a sweep
//! ```text
//! runs/<hash>.toml     complete settings of a run
//! runs/<hash>/         directory of the run, owned by the runner
//! runs/<hash>.log      output of its process
//! runs/<hash>.json     its result, after it has ended: a [`Record`]
//! runs/<hash>.claim-0  the process working on it: host and PID; the modification time is its heartbeat
//! runs.csv             one line per run
//! summary.csv          one line per group of runs that differ only in the seed
//! best.csv             one line per group of runs that differ only in seed and learning rate
//! summary.json         everything
//! ```

mod claim;
mod command;
mod duplicates;
mod plan;
mod process;
mod progress;
mod record;
mod schedule;
mod schema;
mod shard;
mod slurm;
mod summary;
#[cfg(test)]
mod tests;
mod write;

pub use claim::Timing;
pub use command::{PlanSource, SweepControl, SweepOutcome, SweepRequest, execute, list};
pub use duplicates::{Equality, equalities};
pub use plan::{Axis, Job, Plan, Role, Schema};
pub use process::{PATIENCE, ProcessRunner, rank_variables, terminate};
pub use progress::Progress;
pub use record::{Metrics, Record, Status};
pub use schedule::{Control, Event, Options, Others, Outcome, Runner, State, Stop, run, states, writing_alone};
pub use schema::TrainingSchema;
pub use shard::Shard;
pub use slurm::{SlurmJob, without_submitting};
pub use summary::{Best, Group, Point, RunRow, Statistic, Summary};
