//! The thread pool, and long calls that Ctrl-C interrupts.

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

/// The pool of this process. A forked child has none of the threads of its parent and starts its own.
pub fn pool() -> PyResult<Arc<ThreadPool>> {
    let mut held = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some(pool) = held.as_ref().filter(|pool| pool.process == process) {
        return Ok(pool.pool.clone());
    }
    let count = held.as_ref().map_or_else(threads::available, |pool| pool.threads);
    let pool = Arc::new(threads::pool(count).map_err(runtime)?);
    // Dropping the pool of the parent would wait for threads that do not exist in this process.
    std::mem::forget(held.replace(Pool { process, threads: count, pool: pool.clone() }));
    Ok(pool)
}

/// Number of threads for calls.
#[pyfunction]
pub fn get_threads() -> usize {
    POOL.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or_else(threads::available, |pool| pool.threads)
}

/// Sets the number of threads for later calls.
#[pyfunction]
pub fn set_threads(count: Count) -> PyResult<()> {
    let Count(count) = count;
    if !(1..=1024).contains(&count) {
        return Err(crate::errors::input(format!("the number of threads must be from 1 to 1024, found {count}")));
    }
    let new = Pool { process: std::process::id(), threads: count, pool: Arc::new(threads::pool(count).map_err(runtime)?) };
    let old = POOL.lock().unwrap_or_else(PoisonError::into_inner).replace(new);
    if let Some(old) = old.filter(|old| old.process != std::process::id()) {
        std::mem::forget(old);
    }
    Ok(())
}

/// Runs `work` on the pool without the GIL; a panic becomes a RuntimeError.
pub fn compute<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    let pool = pool()?;
    py.detach(|| catch_unwind(AssertUnwindSafe(|| pool.install(work)))).map_err(panicked)
}

/// A panic as an exception that `except Exception` catches.
fn panicked(panic: Box<dyn Any + Send>) -> PyErr {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    crate::errors::failed(format!("internal error: {}; this is a bug in termwise, please report it", text.unwrap_or("a panic")))
}

/// Interface of a long call to its caller: events, and requests to stop.
pub struct Watch {
    /// Request to stop at the next consistent point.
    pub stop: Arc<AtomicBool>,
    /// Request to stop immediately.
    pub kill: Arc<AtomicBool>,
    events: Mutex<Sender<Value>>,
}

impl Watch {
    /// Sends an event to the callback.
    pub fn send(&self, event: Value) {
        // After an interrupt nothing receives events.
        let _ = self.events.lock().unwrap_or_else(PoisonError::into_inner).send(event);
    }

    /// [`Watch::send`] as an independent function.
    pub fn reporter(&self) -> impl Fn(Value) + Send + Sync + use<> {
        let events = Mutex::new(self.events.lock().unwrap_or_else(PoisonError::into_inner).clone());
        move |event| drop(events.lock().unwrap_or_else(PoisonError::into_inner).send(event))
    }
}

/// Runs a long call on the pool. Meanwhile this thread passes events to `callback` as JSON and checks signals. The first Ctrl-C, or an exception of the
/// callback, requests a stop and is raised after the call has stopped. A second Ctrl-C requests an immediate stop.
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
