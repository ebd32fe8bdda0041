//! Distribution of runs: several processes, on one or several machines, share the directory of a sweep without a global lock.
//!
//! A process that starts a run creates `runs/HASH.claim-N`, which fails if the file already exists, also on network file systems. The file identifies the process and is
//! rewritten every few seconds (heartbeat). The claim with the largest N is valid. If its process is known to be dead, or its heartbeat has not changed for
//! some time, another process takes over by creating the next N. A process that finds a larger N than its own has lost the run and stops it. Times are never compared between machines.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Intervals with which processes that share a directory detect each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Heartbeat interval.
    pub heartbeat: Duration,
    /// A process on another machine is considered dead after this time without a heartbeat.
    pub dead_after: Duration,
    /// Polling interval for runs of other processes.
    pub look: Duration,
}

impl Timing {
    /// Network file systems may show a change after up to a minute.
    pub const DEFAULT: Timing =
        Timing { heartbeat: Duration::from_secs(10), dead_after: Duration::from_secs(120), look: Duration::from_millis(500) };
}

/// The process that has claimed a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Who {
    pub host: String,
    pub pid: u32,
    /// Boot and PID namespace of the system; a PID is unique within it. Host names are not enough: containers may share one.
    #[serde(default)]
    pub namespace: Option<String>,
    /// Start time of the process in ticks since boot: PIDs are reused.
    #[serde(default)]
    pub started: Option<u64>,
}

impl Who {
    fn here() -> Who {
        let pid = std::process::id();
        Who { host: host(), pid, namespace: namespace(), started: started(pid) }
    }

    /// Whether the process is known to have ended. For processes in another namespace and for claims of earlier builds this is unknown; their heartbeat decides.
    fn is_gone(&self, here: &Who) -> bool {
        if self.namespace.is_none() || self.namespace != here.namespace || self.pid == here.pid && self.started == here.started {
            return false;
        }
        !is_alive(self.pid) || self.started.is_some() && started(self.pid).is_some_and(|started| Some(started) != self.started)
    }
}

/// The host name, for messages.
fn host() -> String {
    let named = std::env::var("HOSTNAME").ok().filter(|name| !name.is_empty());
    let read = || fs::read_to_string("/proc/sys/kernel/hostname").ok().map(|text| text.trim().to_owned());
    read().or(named).unwrap_or_else(|| "unknown".into())
}

/// The boot ID of the system and the PID namespace of this process; `None` if the system does not report them.
fn namespace() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", boot.trim(), namespace.display()))
}

/// The start time of a process in this namespace.
fn started(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program name, in parentheses, may contain any character; the start time is the 20th field after it.
    text.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

fn is_alive(pid: u32) -> bool {
    #[cfg(unix)]
    {
        let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
        // Only a process that does not exist is dead; one that cannot be queried may be alive.
        pid.is_none_or(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
    }
    #[cfg(not(unix))]
    {
        let _ = pid;
        true
    }
}

/// The claims in a directory of runs, as seen by this process.
pub(super) struct Claims {
    folder: PathBuf,
    timing: Timing,
    here: Who,
    /// Last heartbeat of each claim of other processes, and when it was first seen.
    seen: HashMap<(String, u64), (SystemTime, Instant)>,
}

/// A claim of another process.
#[derive(Clone, Debug)]
struct Other {
    number: u64,
    path: PathBuf,
}

/// The content of the directory: the newest claim of each run, and the runs that have ended.
#[derive(Default)]
pub(super) struct Listing {
    claims: HashMap<String, Other>,
    records: HashMap<String, ()>,
}

impl Listing {
    /// Whether a run has a record.
    pub fn has_record(&self, hash: &str) -> bool {
        self.records.contains_key(hash)
    }
}

impl Claims {
    pub fn new(folder: PathBuf, timing: Timing) -> Claims {
        Claims { folder, timing, here: Who::here(), seen: HashMap::new() }
    }

    /// Lists the directory once for all runs.
    pub fn list(&self) -> Result<Listing> {
        let mut listing = Listing::default();
        for entry in fs::read_dir(&self.folder).map_err(Error::io("list", &self.folder))? {
            let path = entry.map_err(Error::io("list", &self.folder))?.path();
            let Some((hash, ending)) = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.split_once('.')) else {
                continue;
            };
            if ending == "json" {
                listing.records.insert(hash.to_owned(), ());
            } else if let Some(number) = ending.strip_prefix("claim-").and_then(|number| number.parse().ok())
                && listing.claims.get(hash).is_none_or(|other| other.number < number)
            {
                listing.claims.insert(hash.to_owned(), Other { number, path: path.clone() });
            }
        }
        Ok(listing)
    }

    /// Claims a run that is unclaimed or whose process is dead; `None` if another process has it.
    pub fn take(&mut self, hash: &str, listing: &Listing) -> Result<Option<Claim>> {
        let other = listing.claims.get(hash);
        if other.is_some_and(|other| !self.is_dead(hash, other)) {
            return Ok(None);
        }
        let number = other.map_or(0, |other| other.number + 1);
        let path = self.place(hash, number);
        let mut file = match File::options().write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Ok(None),
            file => file.map_err(Error::io("claim a run with", &path))?,
        };
        let text = serde_json::to_string(&self.here).expect("a name and a number") + "\n";
        file.write_all(text.as_bytes()).map_err(Error::io("write", &path))?;
        let claim = Claim { path, text, hash: hash.to_owned(), number, folder: self.folder.clone(), lost: Arc::default() };
        // Another process may have claimed it concurrently: the previous claim must still exist, without one above it.
        let followed = other.is_none_or(|other| other.path.exists());
        if followed && !claim.is_lost()? {
            return Ok(Some(claim));
        }
        let _ = fs::remove_file(&claim.path);
        Ok(None)
    }

    fn place(&self, hash: &str, number: u64) -> PathBuf {
        self.folder.join(format!("{hash}.claim-{number}"))
    }

    fn is_dead(&mut self, hash: &str, other: &Other) -> bool {
        let who: Option<Who> = fs::read(&other.path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        if who.is_some_and(|who| who.is_gone(&self.here)) {
            return true;
        }
        let Ok(beat) = fs::metadata(&other.path).and_then(|file| file.modified()) else { return false };
        let seen = self.seen.entry((hash.to_owned(), other.number)).or_insert((beat, Instant::now()));
        if seen.0 != beat {
            *seen = (beat, Instant::now());
        }
        seen.1.elapsed() > self.timing.dead_after
    }
}

/// A run claimed by this process.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    path: PathBuf,
    text: String,
    hash: String,
    number: u64,
    folder: PathBuf,
    lost: Arc<AtomicBool>,
}

impl Claim {
    /// Set when another process has taken over the run.
    pub fn lost(&self) -> &AtomicBool {
        &self.lost
    }

    fn is_lost(&self) -> Result<bool> {
        let above = |number: u64| self.folder.join(format!("{}.claim-{number}", self.hash)).exists();
        Ok(above(self.number + 1))
    }

    /// Writes a heartbeat; returns false if the run is lost.
    fn beat(&self) -> bool {
        // Rewritten in place, so its time is that of the file system. A failure here is retried at the next heartbeat; the existence of the file already marks the owner.
        let written = File::options().write(true).open(&self.path).and_then(|mut file| file.write_all(self.text.as_bytes()));
        let gone = written.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound);
        if gone || self.is_lost().unwrap_or(false) {
            self.lost.store(true, Ordering::Relaxed);
        }
        !self.lost.load(Ordering::Relaxed)
    }

    /// Releases the run and removes the claims that it superseded, newest first, so that no older claim becomes valid. Does nothing if the run is lost.
    pub fn release(self) {
        if !self.beat() {
            return;
        }
        for number in (0..=self.number).rev() {
            // A file that cannot be removed is later treated as the claim of a dead process.
            let _ = fs::remove_file(self.folder.join(format!("{}.claim-{number}", self.hash)));
        }
    }
}

/// The claims of this process, kept alive by a thread.
#[derive(Default)]
pub(super) struct Held {
    claims: Mutex<Vec<Claim>>,
    over: AtomicBool,
}

impl Held {
    pub fn hold(&self, claim: &Claim) {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).push(claim.clone());
    }

    pub fn drop_claim(&self, claim: &Claim) {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).retain(|own| own.path != claim.path);
    }

    /// Ends [`Held::keep_alive`] on drop, also during a panic.
    pub fn until_dropped(&self) -> impl Drop {
        struct End<'a>(&'a AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        End(&self.over)
    }

    /// Sends heartbeats until the end.
    pub fn keep_alive(&self, timing: Timing) {
        let mut last = Instant::now();
        while !self.over.load(Ordering::Relaxed) {
            std::thread::sleep(timing.heartbeat.min(Duration::from_millis(50)));
            if last.elapsed() >= timing.heartbeat {
                last = Instant::now();
                let claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner).clone();
                claims.iter().for_each(|claim| {
                    claim.beat();
                });
            }
        }
    }
}

/// Removes claims on a run that has ended, left by processes that were killed between writing the record and releasing the claim.
pub(super) fn sweep_up(folder: &Path, hash: &str) {
    for number in 0.. {
        if fs::remove_file(folder.join(format!("{hash}.claim-{number}"))).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Timing =
        Timing { heartbeat: Duration::from_millis(5), dead_after: Duration::from_millis(60), look: Duration::from_millis(5) };

    fn claims(folder: &Path, host: &str, pid: u32) -> Claims {
        let namespace = Some(format!("boot of {host}"));
        Claims { here: Who { host: host.into(), pid, namespace, started: None }, ..Claims::new(folder.into(), QUICK) }
    }

    fn take(claims: &mut Claims) -> Option<Claim> {
        let listing = claims.list().expect("a folder");
        claims.take("a", &listing).expect("a folder")
    }

    #[test]
    fn a_run_is_claimed_once_and_released() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut one, mut two) = (claims(folder.path(), "x", 1), claims(folder.path(), "y", 1));
        let claim = take(&mut one).expect("nobody has it");
        assert!(take(&mut two).is_none() && take(&mut one).is_none());
        claim.release();
        take(&mut two).expect("it was given up").release();
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }

    #[test]
    fn a_claim_without_a_heartbeat_is_taken_over_and_its_owner_notices() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut sleeper, mut other, mut third) =
            (claims(folder.path(), "x", 1), claims(folder.path(), "y", 1), claims(folder.path(), "z", 1));
        let claim = take(&mut sleeper).expect("nobody has it");
        let begun = Instant::now();
        while begun.elapsed() < 3 * QUICK.dead_after {
            assert!(claim.beat() && take(&mut other).is_none(), "it has a heartbeat");
            std::thread::sleep(QUICK.heartbeat);
        }
        assert!(take(&mut other).is_none(), "the timeout has not passed");
        std::thread::sleep(2 * QUICK.dead_after);
        let taken = take(&mut other).expect("the timeout has passed");
        assert!(take(&mut third).is_none(), "its heartbeat is new");
        assert!(!claim.beat() && claim.lost().load(Ordering::Relaxed));
        claim.release();
        assert!(taken.beat(), "a process that lost a run does not release the claim of another");
        taken.release();
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }

    #[cfg(unix)]
    #[test]
    fn a_dead_process_on_this_machine_is_detected_immediately() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        let mut dead = claims(folder.path(), "x", child.id());
        take(&mut dead).expect("nobody has it");
        child.wait().expect("an end");
        assert!(take(&mut claims(folder.path(), "y", 1)).is_none(), "on another machine this is unknown");
        take(&mut claims(folder.path(), "x", std::process::id())).expect("it is dead").release();
    }

    /// Two containers with the same host name, each with a process of this PID.
    #[cfg(unix)]
    #[test]
    fn a_process_in_another_namespace_is_not_considered_dead() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        child.wait().expect("an end");
        let of = |namespace: Option<&str>, pid| {
            let here = Who { host: "x".into(), pid, namespace: namespace.map(str::to_owned), started: None };
            Claims { here, ..Claims::new(folder.path().into(), QUICK) }
        };
        for namespace in [Some("boot pid:[1]"), None] {
            let claim = take(&mut of(namespace, child.id())).expect("nobody has it");
            assert!(take(&mut of(Some("boot pid:[2]"), std::process::id())).is_none(), "{namespace:?}");
            claim.release();
        }
        take(&mut of(Some("boot pid:[1]"), child.id())).expect("nobody has it");
        take(&mut of(Some("boot pid:[1]"), std::process::id())).expect("it is dead").release();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_reused_pid_is_another_process() {
        let here = Who::here();
        assert!(here.namespace.is_some() && here.started.is_some());
        let earlier = Who { started: Some(1), ..here.clone() };
        assert!(earlier.is_gone(&here) && !here.is_gone(&here));
    }
}
