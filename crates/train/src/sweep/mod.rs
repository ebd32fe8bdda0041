//! Many runs from one file: a base and axes, every combination of the axes' values once.
//!
//! ```toml
//! metric = "held_out.loss"     # what learning rates and variants are compared by, the smaller the better
//!
//! [base]                       # any training settings, or the name of a file with them: base = "small.toml"
//! steps = 1000
//!
//! [axes]                       # keys of the settings, dotted, or their last parts where that is enough
//! attention = ["softmax conv=3", "linear_elu conv=3"]
//! lr = [1e-3, 3e-3]
//! seed = [1, 2, 3]
//! ```
//!
//! A [`Plan`] is the file with every combination resolved to complete settings. [`run()`] gives those that are not finished to a
//! [`Runner`], several at a time. A run is known by a hash of its complete settings, so a sweep can be broken off, extended by
//! further values and started again: what is finished is not run twice. [`Summary`] is the outcome: mean ± standard deviation over
//! seeds, and the best learning rate of each combination of the other axes.
//!
//! # The folder of a sweep
//! ```text
//! runs/<hash>.toml     complete settings of a run
//! runs/<hash>/         its folder, the runner's own
//! runs/<hash>.log      what its process printed
//! runs/<hash>.json     how it ended, once it has: a [`Record`]
//! runs/<hash>.claim-0  which process is at it: host, process, and by its time when that was last alive
//! runs.csv             one line a run
//! summary.csv          one line for runs that differ by seed alone
//! best.csv             one line for runs that differ by seed and learning rate alone
//! summary.json         all of it
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
