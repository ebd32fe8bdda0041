//! Threads to compute on, and long work that Ctrl-C can end.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use rayon::ThreadPool;
use serde_json::Value;
use termwise_base::threads;

use crate::errors::{Count, runtime};

struct Pool {
    process: u32,
    threads: usize,
    pool: Arc<ThreadPool>,
}

static POOL: Mutex<Option<Pool>> = Mutex::new(None);

/// The pool of this process. After a fork the threads of the parent are not there, and the child has new ones.
pub fn pool() -> PyResult<Arc<ThreadPool>> {
    let mut held = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some(pool) = held.as_ref().filter(|pool| pool.process == process) {
        return Ok(pool.pool.clone());
    }
    let count = held.as_ref().map_or_else(threads::available, |pool| pool.threads);
    let pool = Arc::new(threads::pool(count).map_err(runtime)?);
    // That of the parent must not be dropped: it would wait for threads that are not there.
    std::mem::forget(held.replace(Pool { process, threads: count, pool: pool.clone() }));
    Ok(pool)
}

/// Threads that calls are computed on.
#[pyfunction]
pub fn get_threads() -> usize {
    POOL.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or_else(threads::available, |pool| pool.threads)
}

/// Compute on this many threads from now on; calls under way go on as they are.
#[pyfunction]
pub fn set_threads(count: Count) -> PyResult<()> {
    let Count(count) = count;
    if !(1..=1024).contains(&count) {
        return Err(crate::errors::input(format!("from 1 to 1024 threads are possible, found {count}")));
    }
    let new = Pool { process: std::process::id(), threads: count, pool: Arc::new(threads::pool(count).map_err(runtime)?) };
    let old = POOL.lock().unwrap_or_else(PoisonError::into_inner).replace(new);
    if let Some(old) = old.filter(|old| old.process != std::process::id()) {
        std::mem::forget(old);
    }
    Ok(())
}

/// Runs `work` on the pool, without the interpreter's lock; a panic is a RuntimeError.
pub fn compute<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    let pool = pool()?;
    py.detach(|| catch_unwind(AssertUnwindSafe(|| pool.install(work)))).map_err(panicked)
}

/// A panic as an exception that `except Exception` catches.
fn panicked(panic: Box<dyn Any + Send>) -> PyErr {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    crate::errors::failed(format!("internal error: {}; this is a bug in termwise, please report it", text.unwrap_or("a panic")))
}

/// What long work can do: tell how far it is, and see whether it should end.
pub struct Watch {
    /// It should end as soon as that is possible in good order.
    pub stop: Arc<AtomicBool>,
    /// It should end at once.
    pub kill: Arc<AtomicBool>,
    events: Mutex<Sender<Value>>,
}

impl Watch {
    /// Hands an event to the caller's function.
    pub fn tell(&self, event: Value) {
        // Nobody listens any more once the caller was interrupted.
        let _ = self.events.lock().unwrap_or_else(PoisonError::into_inner).send(event);
    }

    /// The same as a function of its own.
    pub fn teller(&self) -> impl Fn(Value) + Send + Sync + use<> {
        let events = Mutex::new(self.events.lock().unwrap_or_else(PoisonError::into_inner).clone());
        move |event| drop(events.lock().unwrap_or_else(PoisonError::into_inner).send(event))
    }
}

/// Runs long work in a thread of its own and on the pool. Here, meanwhile, what it tells is given to `callback` as JSON, and signals are seen: the first
/// Ctrl-C, and an exception of the callback, ask the work to stop, and are raised when it has; the second asks to stop at once.
pub fn supervise<T: Send>(
    py: Python<'_>,
    callback: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&Watch) -> PyResult<T> + Send,
) -> PyResult<T> {
    let pool = pool()?;
    let (send, receive) = channel();
    let receive = Mutex::new(receive);
    let (stop, kill) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let watch = Watch { stop: stop.clone(), kill: kill.clone(), events: Mutex::new(send) };
    std::thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let result = pool.install(|| work(&watch));
            drop(watch);
            result
        });
        let mut raised: Option<PyErr> = None;
        loop {
            let received = py.detach(|| receive.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(Duration::from_millis(50)));
            let mut seen = py.check_signals();
            match received {
                Err(RecvTimeoutError::Disconnected) => break,
                Ok(event) if raised.is_none() && seen.is_ok() => {
                    if let Some(callback) = callback {
                        seen = callback.call1((event.to_string(),)).map(drop);
                    }
                }
                _ => {}
            }
            if let Err(error) = seen {
                if raised.is_some() {
                    kill.store(true, Ordering::Relaxed);
                }
                stop.store(true, Ordering::Relaxed);
                raised.get_or_insert(error);
            }
        }
        let result = py.detach(|| worker.join()).map_err(panicked)?;
        match raised {
            Some(error) => Err(error),
            None => result,
        }
    })
}
