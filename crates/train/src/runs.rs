//! Status and results of the runs in a directory.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use termwise_report::{Block, Cell, Document, Documented, Table, duration};

use crate::checkpoint::SETTINGS;
use crate::error::{Error, Result};
use crate::metrics::{LastEvaluation, Line, METRICS, Tail};
use crate::run::is_locked;

/// Runs, newest last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Runs {
    /// The runs.
    pub runs: Vec<Run>,
}

/// The state of a run's directory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The directory.
    pub folder: PathBuf,
    /// The variant of all heads and layers, as in its settings.
    #[serde(default)]
    pub attention: Option<String>,
    /// Its status.
    pub status: Status,
    /// Steps done, as logged.
    pub step: u64,
    /// Total steps; absent if its settings cannot be read.
    pub steps: Option<u64>,
    /// The last training loss.
    pub loss: Option<f64>,
    /// The held-out loss of the last evaluation; absent if there was none or it was NaN or infinite.
    pub held_out: Option<f64>,
    /// Seconds since the last write.
    pub age: f64,
}

/// The status of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// All steps are done.
    Finished,
    /// No process works on it, and the loss of its last evaluation was NaN or infinite.
    Diverged,
    /// A process works on it.
    Running,
    /// It is incomplete and can be resumed.
    Stopped,
}

impl Status {
    /// The status of a run with logged steps, from its total steps and whether its last evaluation was NaN or infinite.
    pub fn of(folder: &Path, step: Option<u64>, steps: Option<u64>, diverged: bool) -> Status {
        let finished = step.is_some() && step == steps;
        match () {
            () if finished && !diverged => Status::Finished,
            () if !finished && is_locked(folder) => Status::Running,
            () if diverged => Status::Diverged,
            () => Status::Stopped,
        }
    }

    /// As one word.
    pub fn name(self) -> &'static str {
        match self {
            Status::Finished => "finished",
            Status::Diverged => "diverged",
            Status::Running => "running",
            Status::Stopped => "stopped",
        }
    }
}

/// Number of bytes at the end of `metrics.jsonl` that contain the last losses. A line has a few hundred bytes.
const END: u64 = 64 * 1024;

impl Runs {
    /// The runs in these directories, see [`find`].
    ///
    /// # Errors
    /// If a directory cannot be read. A damaged run is listed with everything that can be read.
    pub fn list(folders: &[PathBuf]) -> Result<Runs> {
        let mut runs = Vec::new();
        for folder in folders {
            runs.extend(find(folder).map_err(Error::io("read the folder", folder))?.iter().map(|path| Run::look(path)));
        }
        runs.sort_by(|a, b| b.age.total_cmp(&a.age).then_with(|| a.folder.cmp(&b.folder)));
        Ok(Runs { runs })
    }
}

fn is_run(folder: &Path) -> bool {
    folder.join(SETTINGS).is_file()
}

/// Search depth below a directory: `runs/NAME`, `sweeps/NAME/RUN`, and one more.
const DEPTH: usize = 3;

/// The run directories in a directory, sorted: itself if it is a run, otherwise those up to three levels below. Links, hidden directories and directories
/// inside a run are not searched. Unreadable subdirectories are skipped.
///
/// # Errors
/// If the directory itself cannot be read.
pub fn find(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    fn below(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
        if is_run(folder) {
            found.push(folder.into());
        } else if depth > 0 {
            for entry in std::fs::read_dir(folder)?.flatten() {
                // The type of the entry itself: a link may be circular or leave the directory.
                let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
                if is_folder && !is_hidden(&entry.path()) {
                    let _ = below(&entry.path(), depth - 1, found);
                }
            }
        }
        Ok(())
    }
    let mut found = Vec::new();
    below(folder, DEPTH, &mut found)?;
    found.sort();
    Ok(found)
}

/// The saved settings of a run, parsed leniently: unknown settings are kept, and an unreadable file gives an empty table.
pub fn saved_settings(folder: &Path) -> toml::Table {
    std::fs::read_to_string(folder.join(SETTINGS)).unwrap_or_default().parse().unwrap_or_default()
}

/// Total steps in the saved settings.
pub fn steps_of(settings: &toml::Table) -> Option<u64> {
    settings.get("steps")?.as_integer()?.try_into().ok()
}

/// Whether a directory is hidden, as is a run that is being replaced.
pub fn is_hidden(folder: &Path) -> bool {
    folder.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

impl Run {
    fn look(folder: &Path) -> Run {
        let settings = saved_settings(folder);
        let mut run = Run {
            folder: folder.to_owned(),
            attention: settings.get("attention").and_then(toml::Value::as_str).map(str::to_owned),
            status: Status::Stopped,
            step: 0,
            steps: steps_of(&settings),
            loss: None,
            held_out: None,
            age: f64::INFINITY,
        };
        let mut last = LastEvaluation::Missing;
        // The first line may be incomplete. A damaged file is read as far as possible.
        for line in Tail::from_end(folder, END).read().unwrap_or_default().lines.into_iter().flatten() {
            run.step = line.step();
            last = last.after(&line);
            if let Line::Train(train) = line {
                run.loss = Some(train.loss);
            }
        }
        if let LastEvaluation::Finite(_, evaluation) = last {
            run.held_out = Some(evaluation.loss);
        }
        let written = |name: &str| std::fs::metadata(folder.join(name)).and_then(|data| data.modified()).ok();
        let newest = [METRICS, SETTINGS, "checkpoints"].into_iter().filter_map(written).max();
        run.age = newest.map_or(0.0, |time| SystemTime::now().duration_since(time).map_or(0.0, |age| age.as_secs_f64()));
        run.status = Status::of(folder, Some(run.step), run.steps, matches!(last, LastEvaluation::NotFinite(_)));
        run
    }
}

impl Documented for Runs {
    const KIND: &'static str = "runs";

    fn document(&self) -> Document {
        if self.runs.is_empty() {
            let text = "No runs found; start one with `termwise train`.";
            return Document { title: String::new(), lead: vec![Block::text(text)], sections: Vec::new() };
        }
        let mut table = Table::new("", ["run", "attention", "status", "step", "of", "loss", "held-out", "age"]);
        for run in &self.runs {
            table.rows.push(vec![
                Cell::code(run.folder.display().to_string()),
                Cell::maybe(run.attention.as_deref(), Cell::code),
                Cell::text(run.status.name()),
                Cell::Count(run.step),
                Cell::maybe(run.steps, Cell::Count),
                Cell::maybe(run.loss, |loss| Cell::Number(loss, 4)),
                match run.status {
                    Status::Diverged => Cell::text("not finite"),
                    _ => Cell::maybe(run.held_out, |loss| Cell::Number(loss, 4)),
                },
                Cell::text(duration(run.age)),
            ]);
        }
        Document { title: String::new(), lead: vec![Block::table("runs", table)], sections: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::settings::Settings;

    #[test]
    fn runs_are_found_up_to_three_levels_below() {
        let folder = tempfile::tempdir().expect("a folder");
        let make = |name: &str| {
            let run = folder.path().join(name);
            std::fs::create_dir_all(&run).expect("a folder");
            std::fs::write(run.join(SETTINGS), "steps = 3\nattention = \"taylor=0..2\"\nunknown = 1\n").expect("written");
            run
        };
        let expected = ["a", "play/b", "sweeps/book/c"].map(make);
        for name in ["a/checkpoints/step-00000003", "1/2/3/4", ".a.removed"] {
            make(name);
        }
        #[cfg(unix)]
        std::os::unix::fs::symlink(folder.path(), folder.path().join("link")).expect("a link");
        assert_eq!(find(folder.path()).expect("a folder"), expected);
        assert_eq!(find(&expected[1]).expect("a run"), expected[1..2]);
        let listed = Runs::list(&[folder.path().to_owned()]).expect("a folder");
        assert_eq!(listed.runs.len(), 3);
        assert!(listed.runs.iter().all(|run| (run.attention.as_deref(), run.steps) == (Some("taylor=0..2"), Some(3))));
        assert!(listed.document().to_html().contains("taylor=0..2"));
    }

    #[test]
    fn damaged_runs_are_listed() {
        let folder = tempfile::tempdir().expect("a folder");
        let make = |name: &str, settings: &str, metrics: &str| {
            let run = folder.path().join(name);
            std::fs::create_dir(&run).expect("a folder");
            std::fs::write(run.join("settings.toml"), settings).expect("written");
            std::fs::write(run.join(METRICS), metrics).expect("written");
            run
        };
        let settings = Settings::resolve(&[]).expect("defaults");
        let line = |step: u64, loss: f64| {
            format!(
                "{{\"kind\":\"train\",\"step\":{step},\"time\":0.0,\"loss\":{loss},\"lr\":0.1,\"tokens\":1,\"tokens_per_second\":1.0}}\n"
            )
        };
        let long: String = (1..settings.steps).map(|step| line(step, 3.0)).collect();
        make("a", &settings.to_toml(), &format!("{long}{}", line(settings.steps, 2.5)));
        let held = make("b", &settings.to_toml(), &format!("{}{{\"kind\":\"train\",\"st", line(7, 3.5)));
        make("c", "this is not a settings file", "\u{0}\n");
        let held_out = |step: u64, found: &str| format!("{{\"kind\":\"held_out\",\"step\":{step},\"time\":0.0,{found}}}\n");
        let (good, bad) = ("\"tokens\":1,\"loss\":2.0,\"perplexity\":7.4", "\"loss\":null,\"finite\":false");
        let diverged = [held_out(5, good), line(settings.steps, 2.5), held_out(settings.steps, bad)].concat();
        make("d", &settings.to_toml(), &diverged);
        std::fs::create_dir(folder.path().join("no-run")).expect("a folder");
        let lock = File::create(held.join("run.lock")).expect("a file");
        lock.lock().expect("a lock");
        let mut found = Runs::list(&[folder.path().to_owned()]).expect("a folder").runs;
        found.sort_by(|a, b| a.folder.cmp(&b.folder));
        let seen: Vec<_> = found.iter().map(|run| (run.status, run.step, run.steps, run.loss)).collect();
        let steps = Some(settings.steps);
        assert_eq!(seen[0], (Status::Finished, settings.steps, steps, Some(2.5)));
        assert_eq!(seen[1], (Status::Running, 7, steps, Some(3.5)));
        assert_eq!(seen[2], (Status::Stopped, 0, None, None));
        assert_eq!((seen[3], found[3].held_out), ((Status::Diverged, settings.steps, steps, Some(2.5)), None), "never the loss of step 5");
        let text = Runs { runs: vec![found[3].clone()] }.document().to_terminal(&termwise_report::Terminal::default());
        assert!(text.contains("diverged") && text.contains("not finite") && !text.contains("2.0000"), "{text}");
        drop(lock);
        let one = Runs::list(std::slice::from_ref(&held)).expect("a run");
        assert_eq!((one.runs.len(), one.runs[0].status), (1, Status::Stopped));
        termwise_report::reads_again(&one);
        assert!(Runs::list(&[folder.path().join("missing")]).is_err());

        // A run that is being replaced.
        std::fs::rename(&held, folder.path().join(".b.replaced")).expect("another name");
        assert_eq!(Runs::list(&[folder.path().to_owned()]).expect("a folder").runs.len(), 3);
    }
}
