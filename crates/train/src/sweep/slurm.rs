//! A sweep as a Slurm array of jobs that share one folder.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use termwise_base::files::{create_folder, write_whole};

use super::plan::Plan;
use super::schedule::State;
use crate::error::{Error, Result};

/// Largest number of jobs unless it is given.
const MAX_JOBS: usize = 16;

/// What a job script starts.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SlurmJob {
    /// Name of the sweep.
    pub name: String,
    /// Folder of results.
    pub folder: PathBuf,
    /// Number of unfinished runs.
    pub open: usize,
    /// Whether a run needs a GPU.
    pub gpu: bool,
    /// Number of jobs; default: the number of unfinished runs, at most 16.
    pub jobs: Option<usize>,
    /// Options of sbatch, such as `--partition=long`.
    pub options: Vec<String>,
    /// The command of each job.
    pub command: Vec<OsString>,
    /// Threads per job.
    pub threads: usize,
}

impl SlurmJob {
    /// All open runs of a plan.
    pub fn of(name: &str, folder: &Path, plan: &Plan, states: &[State]) -> SlurmJob {
        let open = states.iter().filter(|state| matches!(state, State::Open)).count();
        let gpu = plan.jobs.iter().any(|job| job.settings.get("engine").and_then(toml::Value::as_str) == Some("torch"));
        SlurmJob { name: name.into(), folder: folder.to_owned(), open, gpu, ..SlurmJob::default() }
    }

    /// Writes `submit.sbatch` into the folder of results. Returns its path and its text.
    ///
    /// # Errors
    /// If a name or an option contains a line break, or if the file cannot be written.
    pub fn write(&self) -> Result<(PathBuf, String)> {
        let here = std::env::current_dir().map_err(Error::io("find", "the current folder"))?;
        let text = script(self, &here).map_err(|problem| Error::Setting {
            place: String::new(),
            key: "submit".into(),
            found: "slurm".into(),
            expected: problem,
        })?;
        create_folder(&self.folder)?;
        let path = self.folder.join("submit.sbatch");
        write_whole(&path, text.as_bytes())?;
        Ok((path, text))
    }
}

/// The words of a command line without the program and without the flags of submission.
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

/// The text of a job script that starts in folder `here`.
fn script(job: &SlurmJob, here: &Path) -> std::result::Result<String, String> {
    let quoted = |text: &str| {
        let plain = !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "-_=./:,+@%".contains(c));
        if plain { text.to_owned() } else { format!("'{}'", text.replace('\'', "'\\''")) }
    };
    let command: Vec<String> = job.command.iter().map(|word| quoted(&word.to_string_lossy())).collect();
    let folder: PathBuf = std::path::absolute(&job.folder).unwrap_or_else(|_| job.folder.clone());
    // Slurm replaces its own patterns in names of files.
    let log = folder.to_string_lossy().replace('%', "%%") + "/slurm-%A-%a.log";
    let named = [("the name of the sweep", job.name.as_str()), ("the folder", log.as_str())];
    let mut lines = named.into_iter().chain(job.options.iter().map(|option| ("--sbatch", option.as_str())));
    if let Some((name, text)) = lines.find(|(_, text)| text.contains(['\n', '\r'])) {
        return Err(format!("{name} is {text:?}, but a line of a Slurm script cannot contain a line break; leave it out"));
    }
    let gpu = if job.gpu { "#SBATCH --gpus-per-task=1\n" } else { "" };
    let more: String = job.options.iter().map(|option| format!("#SBATCH {option}\n")).collect();
    let (open, threads, jobs) = (job.open, job.threads, job.jobs.unwrap_or(job.open.clamp(1, MAX_JOBS)));
    Ok(format!(
        "#!/bin/bash
# {name}: {open} runs by {jobs} jobs that share one folder. Each job takes the next unclaimed run, and takes over those of jobs that died.
# Submit the script again to resume.
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
        name = job.name,
        job = quoted(&format!("termwise-{}", job.name)),
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
        let job = SlurmJob {
            name: "a b".into(),
            folder: "/sweeps/a b".into(),
            open: 12,
            jobs: Some(3),
            options: vec!["--partition=x".into()],
            command: kept,
            threads: 4,
            ..SlurmJob::default()
        };
        let text = script(&job, Path::new("/home/it's")).expect("a script");
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
        let percent = SlurmJob { folder: "/sweeps/50%A".into(), ..job.clone() };
        let text = script(&percent, Path::new("/")).expect("a script");
        assert!(text.contains("#SBATCH --output=/sweeps/50%%A/slurm-%A-%a.log\n"), "{text}");
        for (folder, option) in [("/a\nrm -r b", "--x"), ("/a", "--x\nrm -r b"), ("/a", "--x\r")] {
            let wrong = SlurmJob { folder: folder.into(), options: vec![option.into()], ..job.clone() };
            assert!(script(&wrong, Path::new("/")).expect_err(option).contains("line break"));
        }
    }

    #[test]
    fn a_script_is_written_into_the_folder_of_results() {
        let folder = tempfile::tempdir().expect("a folder");
        let job = SlurmJob { folder: folder.path().join("new"), open: 100, ..SlurmJob::default() };
        let (path, text) = job.write().expect("a script");
        assert_eq!(std::fs::read_to_string(path).expect("a file"), text);
        assert!(text.contains("#SBATCH --array=0-15\n"), "at most 16 jobs: {text}");
    }
}
