//! `engine = torch`: the PyTorch trainer of the Python package, as a process with the same settings and directory.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use tempfile::NamedTempFile;

use crate::error::{Error, Result};
use crate::run::{EXIT_INTERRUPTED, EXIT_LOCKED, PlannedRun, Start};
use crate::sweep::{SweepControl, rank_variables, terminate};

/// Environment variable with the interpreter.
const PYTHON: &str = "TERMWISE_PYTHON";
/// The Python module of the trainer.
const MODULE: &str = "termwise.torch.train";
/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Exit code of the trainer for unusable arguments and settings.
const USAGE: i32 = 2;

/// Options of the process that do not affect its results.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TorchOptions {
    /// The Python interpreter.
    pub python: OsString,
    /// Number of processes, started by torchrun if there are several.
    pub processes: usize,
    /// Folder for tokenized text.
    pub cache: Option<PathBuf>,
    /// Suppress progress and warnings.
    pub quiet: bool,
}

/// How the process ended. It has printed its result or its error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TorchEnd {
    /// All steps are done.
    Finished,
    /// It was stopped and can be resumed.
    Interrupted,
    /// Another process is working in the directory.
    Locked,
    /// The arguments or settings are not usable.
    Usage,
    /// Any other error.
    Failed,
}

impl TorchOptions {
    /// One process of this interpreter.
    pub fn new(python: impl Into<OsString>) -> TorchOptions {
        TorchOptions { python: python.into(), processes: 1, cache: None, quiet: false }
    }
}

/// The interpreter: TERMWISE_PYTHON, `caller` (the one that called this program), that of the active environment, or `python3`.
pub fn interpreter(caller: Option<OsString>) -> OsString {
    let active = || Some(PathBuf::from(std::env::var_os("VIRTUAL_ENV")?).join("bin/python").into_os_string());
    std::env::var_os(PYTHON).filter(|named| !named.is_empty()).or(caller).or_else(active).unwrap_or_else(|| "python3".into())
}

/// Trains in a process of Python. `control.stop` requests a checkpoint, `control.kill` ends the process without one.
///
/// # Errors
/// If the interpreter or its modules are missing, or if the process cannot be started or is killed by a signal.
pub fn train(planned: &PlannedRun, options: &TorchOptions, control: &SweepControl) -> Result<TorchEnd> {
    check(&options.python)?;
    // Every setting, so the trainer does not need defaults, flags and recipes.
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().map_err(Error::io("create", std::env::temp_dir()))?;
    file.write_all(planned.settings.to_toml().as_bytes()).map_err(Error::io("write", file.path()))?;
    let (ended, terminated) = wait(command(planned, options, &file), control)?;
    end(ended, terminated)
}

fn command(planned: &PlannedRun, options: &TorchOptions, settings: &NamedTempFile) -> Command {
    let mut command = Command::new(&options.python);
    match options.processes {
        0 | 1 => command.args(["-m", MODULE]),
        n => command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", &n.to_string(), "-m", MODULE]),
    };
    command.arg(settings.path()).arg("--folder").arg(&planned.folder);
    match &planned.start {
        Start::Fresh => &mut command,
        Start::Replace => command.arg("--overwrite"),
        Start::Resume => command.arg("--resume"),
        Start::At(checkpoint) => command.arg("--resume").arg(checkpoint),
    };
    if let Some(cache) = &options.cache {
        command.arg("--cache").arg(cache);
    }
    if options.quiet {
        command.arg("--quiet");
    }
    rank_variables().for_each(|name| {
        command.env_remove(name);
    });
    command.stdin(Stdio::null());
    // A separate process group: Ctrl-C in the terminal reaches this process, which forwards it once.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command
}

/// Runs the process to its end. Returns its status and whether it was asked to stop.
fn wait(mut command: Command, control: &SweepControl) -> Result<(ExitStatus, bool)> {
    let name = Path::new(command.get_program()).to_owned();
    let mut child = command.spawn().map_err(Error::io("start", &name))?;
    let mut terminated = false;
    loop {
        if let Some(status) = child.try_wait().map_err(Error::io("wait for", &name))? {
            return Ok((status, terminated));
        }
        if control.kill.load(Ordering::Relaxed) {
            // It may have exited already.
            let _ = child.kill();
        } else if control.stop.load(Ordering::Relaxed) && !terminated {
            terminated = true;
            terminate(&mut child);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn end(status: ExitStatus, terminated: bool) -> Result<TorchEnd> {
    match status.code() {
        Some(0) => Ok(TorchEnd::Finished),
        Some(code) if code == i32::from(EXIT_INTERRUPTED) => Ok(TorchEnd::Interrupted),
        Some(code) if code == i32::from(EXIT_LOCKED) => Ok(TorchEnd::Locked),
        // torchrun has no exit code for a stop.
        _ if terminated => Ok(TorchEnd::Interrupted),
        Some(USAGE) => Ok(TorchEnd::Usage),
        Some(_) => Ok(TorchEnd::Failed),
        None => Err(Error::Process(format!("the PyTorch process ended with {status}; use --resume to continue"))),
    }
}

/// Checks that the interpreter has the required modules, without importing them.
fn check(python: &OsStr) -> Result<()> {
    let missing = "import importlib.util as u; print(' '.join(n for n in ('torch', 'termwise') if u.find_spec(n) is None))";
    let hint = format!(
        "engine = torch needs Python with PyTorch and the package termwise: install them with `pip install termwise torch`, or name another interpreter with {PYTHON}"
    );
    let output = Command::new(python).args(["-c", missing]).stdin(Stdio::null()).output();
    let name = python.to_string_lossy();
    let problem = match output {
        Err(error) => format!("cannot start `{name}`: {error}"),
        Ok(output) if !output.status.success() => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            format!("could not run Python interpreter `{name}`: {}", stderr.lines().last().unwrap_or("it printed no error"))
        }
        Ok(output) => match String::from_utf8_lossy(&output.stdout).trim() {
            "" => return Ok(()),
            modules => format!("`{name}` has no module {}", modules.replace(' ', " and no module ")),
        },
    };
    Err(Error::Python(format!("{problem}; {hint}")))
}

#[cfg(all(test, unix))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        command
    }

    fn control(stop: bool, kill: bool) -> SweepControl {
        SweepControl { stop: Arc::new(AtomicBool::new(stop)), kill: Arc::new(AtomicBool::new(kill)) }
    }

    #[test]
    fn exit_codes_have_a_meaning() {
        for (code, expected) in
            [(0, TorchEnd::Finished), (1, TorchEnd::Failed), (2, TorchEnd::Usage), (75, TorchEnd::Locked), (130, TorchEnd::Interrupted)]
        {
            let (status, terminated) = wait(shell(&format!("exit {code}")), &control(false, false)).expect("a shell");
            assert_eq!(end(status, terminated).expect("an exit code"), expected, "{code}");
        }
        let (status, terminated) = wait(shell("kill -9 $$"), &control(false, false)).expect("a shell");
        assert!(end(status, terminated).expect_err("killed").to_string().contains("--resume"));
    }

    #[test]
    fn a_stop_terminates_and_a_second_kills() {
        let begun = Instant::now();
        let (status, terminated) = wait(shell("sleep 600 & wait"), &control(true, false)).expect("a shell");
        assert_eq!(end(status, terminated).expect("a stop"), TorchEnd::Interrupted);
        // It ignores SIGTERM.
        let (status, terminated) = wait(shell("trap '' TERM; while :; do sleep 0.1; done"), &control(true, true)).expect("a shell");
        assert!(!terminated && end(status, terminated).is_err());
        assert!(begun.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn an_interpreter_without_the_modules_is_named() {
        for (python, problem) in
            [("/nowhere/python", "cannot start"), ("false", "could not run Python interpreter"), ("echo", "has no module")]
        {
            let error = check(OsStr::new(python)).expect_err(python);
            assert!(error.is_usage() && error.to_string().contains(problem) && error.to_string().contains(PYTHON), "{error}");
        }
    }

    #[test]
    fn the_process_gets_settings_and_start() {
        let file = NamedTempFile::new().expect("a file");
        let words = |start: Start, processes: usize| {
            let planned = PlannedRun { folder: "runs/a".into(), start, settings: crate::Settings::resolve(&[]).expect("the defaults") };
            let options = TorchOptions { processes, quiet: true, cache: Some("cache".into()), ..TorchOptions::new("python") };
            let command = command(&planned, &options, &file);
            let words: Vec<String> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
            words.join(" ").replace(&file.path().display().to_string(), "FILE")
        };
        let usual = "-m termwise.torch.train FILE --folder runs/a";
        assert_eq!(words(Start::Fresh, 1), format!("{usual} --cache cache --quiet"));
        assert_eq!(words(Start::Replace, 1), format!("{usual} --overwrite --cache cache --quiet"));
        assert_eq!(words(Start::At("c".into()), 1), format!("{usual} --resume c --cache cache --quiet"));
        assert_eq!(
            words(Start::Resume, 2),
            format!("-m torch.distributed.run --standalone --nproc-per-node 2 {usual} --resume --cache cache --quiet")
        );
    }
}
