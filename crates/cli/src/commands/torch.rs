//! `termwise train --engine torch`: starts the PyTorch trainer of the Python package with the same settings and directory.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use termwise_base::files;
use termwise_train::sweep::{rank_variables, terminate};
use termwise_train::{Settings, Start};

use super::train::TrainArgs;
use crate::context::Context;
use crate::error::{Exit, Failure};
use crate::progress::{stop_or, stop_with_input};

/// Environment variable with the interpreter.
const PYTHON: &str = "TERMWISE_PYTHON";
/// The Python module of the trainer.
const MODULE: &str = "termwise.torch.train";
/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Starts the trainer, forwards signals, and exits with its exit code.
pub fn run(args: &TrainArgs, settings: &Settings, (folder, start): (&Path, &Start), context: &Context) -> Result<Exit, Failure> {
    if context.ranks.collective.size() > 1 {
        return Err(Failure::usage(
            "engine = torch starts its own processes: run one process with --processes N, or use torchrun instead of mpirun",
        ));
    }
    let python = interpreter(context);
    check(&python)?;
    // Every setting, so the trainer does not need defaults, flags and recipes.
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().map_err(files::Error::io("create", std::env::temp_dir()))?;
    file.write_all(settings.to_toml().as_bytes()).map_err(files::Error::io("write", file.path().to_owned()))?;
    let mut command = Command::new(&python);
    match args.processes {
        1 => command.args(["-m", MODULE]),
        n => command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", &n.to_string(), "-m", MODULE]),
    };
    command.arg(file.path()).arg("--folder").arg(folder);
    match start {
        Start::Fresh => &mut command,
        Start::Replace => command.arg("--overwrite"),
        Start::Resume => command.arg("--resume"),
        Start::At(checkpoint) => command.arg("--resume").arg(checkpoint),
    };
    if let Some(cache) = &args.cache {
        command.arg("--cache").arg(cache);
    }
    if args.quiet {
        command.arg("--quiet");
    }
    rank_variables().for_each(|name| {
        command.env_remove(name);
    });
    command.stdin(Stdio::null());
    // A separate process group: Ctrl-C in the terminal reaches this process, which forwards it once.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let kill = Arc::new(AtomicBool::new(false));
    let flag = kill.clone();
    let stop = stop_or("waiting for the step and a checkpoint", move || flag.store(true, Ordering::Relaxed));
    if args.stop_with_input {
        stop_with_input(&stop);
    }
    let name = PathBuf::from(&python);
    let mut child = command.spawn().map_err(files::Error::io("start", &name))?;
    let mut terminated = false;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(files::Error::io("wait for", &name))? {
            break status;
        }
        if kill.load(Ordering::Relaxed) {
            // It may have exited already.
            let _ = child.kill();
        } else if stop.load(Ordering::Relaxed) && !terminated {
            terminated = true;
            terminate(&mut child);
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    match status.code() {
        Some(0) => Ok(Exit::Success),
        Some(code) if code == Exit::Interrupted as i32 => Ok(Exit::Interrupted),
        Some(code) if code == Exit::Locked as i32 => Ok(Exit::Locked),
        // torchrun has no exit code for a stop.
        _ if terminated => Ok(Exit::Interrupted),
        Some(code) if code == Exit::Usage as i32 => Ok(Exit::Usage),
        // It has printed the error.
        Some(_) => Ok(Exit::Failure),
        None => Err(Failure::Library(format!("the PyTorch process ended with {status}; use --resume to continue"), Exit::Failure)),
    }
}

/// The interpreter: TERMWISE_PYTHON, the one that called this program, that of the active environment, or `python3`.
fn interpreter(context: &Context) -> OsString {
    let active = || Some(PathBuf::from(std::env::var_os("VIRTUAL_ENV")?).join("bin/python").into_os_string());
    std::env::var_os(PYTHON)
        .filter(|named| !named.is_empty())
        .or_else(|| context.called_by())
        .or_else(active)
        .unwrap_or_else(|| "python3".into())
}

/// Checks that the interpreter has the required modules, without importing them.
fn check(python: &OsString) -> Result<(), Failure> {
    let missing = "import importlib.util as u; print(' '.join(n for n in ('torch', 'termwise') if u.find_spec(n) is None))";
    let hint = format!(
        "engine = torch needs Python with PyTorch and the package termwise: install them with `pip install termwise torch`, or name another interpreter with {PYTHON}"
    );
    let output = Command::new(python).args(["-c", missing]).stdin(Stdio::null()).output();
    let name = python.to_string_lossy();
    match output {
        Err(error) => Err(Failure::usage(format!("cannot start `{name}`: {error}; {hint}"))),
        Ok(output) if !output.status.success() => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let problem = stderr.lines().last().unwrap_or("it printed no error");
            Err(Failure::usage(format!("could not run Python interpreter `{name}`: {problem}; {hint}")))
        }
        Ok(output) => match String::from_utf8_lossy(&output.stdout).trim() {
            "" => Ok(()),
            modules => Err(Failure::usage(format!("`{name}` has no module {}; {hint}", modules.replace(' ', " and no module ")))),
        },
    }
}
