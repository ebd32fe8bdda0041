//! Many runs in one folder, by several processes: flags that `sweep` and `reproduce` have in common.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};
use termwise_base::files::{self, create_folder, write_whole};
use termwise_train::log::tell;
use termwise_train::sweep::{Others, Shard};

use super::size;
use crate::context::Context;
use crate::error::{Exit, Failure};

/// Jobs of an array where nothing else is said.
const JOBS: usize = 16;

/// Who else works in the folder.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Several processes")]
pub struct ShareArgs {
    /// Process K of N: start with every N-th run, then take over remaining ones [default: from Slurm, Open MPI, PMI or Kubernetes]
    #[arg(long, value_name = "K/N")]
    pub shard: Option<Shard>,
    /// Exit when no unclaimed run is left
    #[arg(long)]
    pub no_wait: bool,
    /// Write a job script for a scheduler and submit it
    #[arg(long, value_enum, value_name = "SCHEDULER")]
    pub submit: Option<Scheduler>,
    /// With --submit: write and print the script only
    #[arg(long, requires = "submit")]
    pub dry_run: bool,
    /// With --submit: jobs [default: number of unfinished runs, at most 16]
    #[arg(long, requires = "submit", value_name = "N", value_parser = size(100_000))]
    pub jobs: Option<usize>,
    /// With --submit: option of sbatch, as in --sbatch=--partition=long; may be repeated
    #[arg(long, requires = "submit", value_name = "OPTION", allow_hyphen_values = true)]
    pub sbatch: Vec<String>,
}

/// Who starts processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scheduler {
    /// An array of jobs, by sbatch
    Slurm,
}

/// What is submitted.
pub struct Submitted<'a> {
    /// For people.
    pub name: &'a str,
    /// Of results.
    pub folder: &'a Path,
    /// That are not finished.
    pub open: usize,
    /// That some run needs a GPU.
    pub gpu: bool,
}

impl ShareArgs {
    /// The other processes.
    pub fn others(&self) -> Others {
        let shard = self.shard.or_else(|| Shard::of_environment(|name| std::env::var(name).ok()));
        Others { shard, wait: !self.no_wait, ..Others::USUAL }
    }

    /// Writes the script, and submits it unless it is only to be seen. `arguments` are those of this program without the flags of submitting.
    pub fn submit(&self, what: &Submitted, arguments: &[OsString], context: &mut Context) -> Result<Exit, Failure> {
        let here = std::env::current_dir().map_err(files::Error::io("find", "the current folder"))?;
        let program: Vec<OsString> = context.again()?;
        let jobs = self.jobs.unwrap_or(what.open.clamp(1, JOBS));
        let script =
            script(what, jobs, &self.sbatch, &here, &[&program[..], arguments].concat(), context.threads).map_err(Failure::usage)?;
        create_folder(what.folder)?;
        let path = what.folder.join("submit.sbatch");
        write_whole(&path, script.as_bytes())?;
        if self.dry_run {
            context.out.write_all(script.as_bytes())?;
            tell(&format!("written: {0}; submit it with: sbatch {0}", path.display()));
            return Ok(Exit::Success);
        }
        let status = Command::new("sbatch").arg(&path).status().map_err(|error| {
            let problem = if error.kind() == std::io::ErrorKind::NotFound { "there is no `sbatch` here".into() } else { error.to_string() };
            Failure::Library(
                format!("{problem}; the script is written, and can be submitted where Slurm is: sbatch {}", path.display()),
                Exit::Failure,
            )
        })?;
        Ok(Exit::passed(status.success()))
    }
}

/// The words of this command that its jobs are started with: all but those about submitting.
pub fn without_submitting(arguments: &[OsString]) -> Vec<OsString> {
    let with_value = ["--submit", "--jobs", "--sbatch"];
    let mut kept = Vec::new();
    let mut words = arguments.iter().skip(1);
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        if with_value.contains(&&*text) {
            words.next();
        } else if text != "--dry-run" && !with_value.iter().any(|flag| text.starts_with(&format!("{flag}="))) {
            kept.push(word.clone());
        }
    }
    kept
}

fn script(what: &Submitted, jobs: usize, options: &[String], here: &Path, words: &[OsString], threads: usize) -> Result<String, String> {
    let quoted = |text: &str| {
        let plain = !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "-_=./:,+@%".contains(c));
        if plain { text.to_owned() } else { format!("'{}'", text.replace('\'', "'\\''")) }
    };
    let command: Vec<String> = words.iter().map(|word| quoted(&word.to_string_lossy())).collect();
    let folder: PathBuf = std::path::absolute(what.folder).unwrap_or_else(|_| what.folder.into());
    // Slurm replaces its own patterns in names of files.
    let log = folder.to_string_lossy().replace('%', "%%") + "/slurm-%A-%a.log";
    let named = [("the name of the sweep", what.name), ("the folder", log.as_str())];
    let mut lines = named.into_iter().chain(options.iter().map(|option| ("--sbatch", option.as_str())));
    if let Some((name, text)) = lines.find(|(_, text)| text.contains(['\n', '\r'])) {
        return Err(format!("{name} is {text:?}, but a line of a Slurm script cannot contain a line break; leave it out"));
    }
    let gpu = if what.gpu { "#SBATCH --gpus-per-task=1\n" } else { "" };
    let more: String = options.iter().map(|option| format!("#SBATCH {option}\n")).collect();
    Ok(format!(
        "#!/bin/bash
# {name}: {open} runs by {jobs} jobs that share one folder. Each job takes the next run that nobody has, and takes up those of jobs that died,
# so that it does not matter which of them start, how fast they are or how long they live. Submit it again to go on.
#
#SBATCH --job-name={job}
#SBATCH --array=0-{last}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={threads}
{gpu}#SBATCH --time=24:00:00
# Two minutes before the time is over every run writes a checkpoint, and the job ends.
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={log}
{more}set -euo pipefail
cd {here}
# By srun, so that signals reach the program.
exec srun {command}
",
        name = what.name,
        open = what.open,
        job = quoted(&format!("termwise-{}", what.name)),
        last = jobs.max(1) - 1,
        log = quoted(&log),
        here = quoted(&here.to_string_lossy()),
        command = command.join(" "),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_started_without_the_flags_that_submit_them() {
        let words = [
            "termwise",
            "--threads",
            "4",
            "sweep",
            "a b.toml",
            "--submit",
            "slurm",
            "--dry-run",
            "--jobs=3",
            "--sbatch=--partition=x",
            "--retry",
        ];
        let kept = without_submitting(&words.map(OsString::from));
        assert_eq!(kept, ["--threads", "4", "sweep", "a b.toml", "--retry"].map(OsString::from));
        let what = Submitted { name: "a b", folder: Path::new("/sweeps/a b"), open: 12, gpu: false };
        let text = script(&what, 3, &["--partition=x".into()], Path::new("/home/it's"), &kept, 4).expect("a script");
        for line in [
            "#SBATCH --array=0-2",
            "#SBATCH --output='/sweeps/a b/slurm-%A-%a.log'",
            "#SBATCH --job-name='termwise-a b'",
            "#SBATCH --partition=x",
            "#SBATCH --signal=USR1@120",
            "cd '/home/it'\\''s'",
            "exec srun --threads 4 sweep 'a b.toml' --retry",
        ] {
            assert!(text.lines().any(|own| own == line), "{line}:\n{text}");
        }
        assert!(!text.contains("gpus"));
        let percent = Submitted { folder: Path::new("/sweeps/50%A"), ..what };
        let text = script(&percent, 3, &[], Path::new("/"), &kept, 4).expect("a script");
        assert!(text.contains("#SBATCH --output=/sweeps/50%%A/slurm-%A-%a.log\n"), "{text}");
        for (folder, option) in [("/a\nrm -r b", "--x"), ("/a", "--x\nrm -r b"), ("/a", "--x\r")] {
            let what = Submitted { name: "a", folder: Path::new(folder), open: 1, gpu: false };
            assert!(script(&what, 1, &[option.into()], Path::new("/"), &kept, 4).expect_err(option).contains("line break"));
        }
    }
}
