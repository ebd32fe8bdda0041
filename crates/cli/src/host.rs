//! Commands inside another program: what a command would print is handed out, what its bar would show is told, and a flag of the caller's takes the place of
//! signals.

use std::cell::RefCell;
use std::ffi::OsString;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use termwise_report::Document;

use crate::args;
use crate::context::Context;
use crate::error::{Exit, Failure};

/// Gets how many pieces are done, how many there are, and what is being done.
pub type Tell = Box<dyn Fn(u64, u64, &str) + Send + Sync>;

/// Who calls a command.
pub struct Host {
    /// Set by the caller, it asks the command to stop in good order.
    pub stop: Arc<AtomicBool>,
    /// Hears how far the command is.
    pub tell: Tell,
}

/// What a command found.
pub struct Found {
    /// In one word.
    pub kind: &'static str,
    /// As `--json` prints it.
    pub json: String,
    /// As people read it.
    pub document: Document,
}

/// Why it found nothing.
#[derive(Debug)]
pub struct Failed {
    /// What went wrong.
    pub message: String,
    /// Whether what was asked for makes no sense.
    pub is_usage: bool,
}

thread_local! {
    static HOST: RefCell<Option<Arc<Host>>> = const { RefCell::new(None) };
}

/// Who has called the command that runs on this thread, if that is another program.
pub fn host() -> Option<Arc<Host>> {
    HOST.with_borrow(Clone::clone)
}

/// Forgets the host, however a call ends.
struct Forget;

impl Drop for Forget {
    fn drop(&mut self) {
        HOST.set(None);
    }
}

/// Runs a command with these arguments, the first of which is the program's name, and gives what it would print. Remarks on standard error are those of the
/// command: `--quiet` leaves them out. Several threads can call at once.
pub fn call(args: &[OsString], host: Arc<Host>) -> Result<Found, Failed> {
    HOST.set(Some(host));
    let _forget = Forget;
    let cli = args::parse(args).map_err(|error| {
        let text = error.render().to_string();
        let message = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ").to_owned();
        Failed { message, is_usage: true }
    })?;
    let mut out = io::sink();
    let mut context = Context::new(&cli, args, None, &mut out);
    context.keeps = true;
    match crate::command(cli, &mut context) {
        Ok(_) => context.found.take().ok_or_else(|| Failed { message: "this command has no result".into(), is_usage: true }),
        Err(Failure::Library(message, exit)) => Err(Failed { message, is_usage: exit == Exit::Usage }),
        Err(Failure::Output(error)) => Err(Failed { message: error.to_string(), is_usage: false }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn called(words: &[&str]) -> Result<Found, Failed> {
        let told = Mutex::new(Vec::new());
        let tell = move |done: u64, of: u64, what: &str| told.lock().expect("nobody panics").push((done, of, what.to_owned()));
        let host = Host { stop: Arc::default(), tell: Box::new(tell) };
        let args: Vec<OsString> = ["termwise"].iter().chain(words).map(Into::into).collect();
        call(&args, Arc::new(host))
    }

    #[test]
    fn a_result_is_handed_out_and_a_wrong_word_is_named() {
        let found = called(&["variants", "softmax"]).expect("it is known");
        assert_eq!(found.kind, "variants");
        assert!(found.json.contains("\"made_by\"") && found.json.contains("termwise variants softmax"));
        for words in [&["variants", "softmaxx"][..], &["variants", "--nothing"]] {
            let failed = called(words).err().expect("it makes no sense");
            assert!(failed.is_usage && failed.message.contains(words[1]), "{}", failed.message);
        }
        // Signals and bars are the terminal's again.
        assert!(host().is_none());
    }
}
