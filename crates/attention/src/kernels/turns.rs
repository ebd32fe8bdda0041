//! Sums that several threads add to one after another, in an order that does not depend on the threads.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use rayon::prelude::*;

/// Looks before a thread gives its core away; a turn comes after a few microseconds, or after many where threads share cores.
const LOOKS: usize = 200;

/// Runs f(0), f(1), … f(count − 1) on all threads, each taking the next number once it is free. What has begun is never held up by what has not,
/// so that a task may wait for those with lower numbers.
pub fn in_order(count: usize, f: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    (0..rayon::current_num_threads()).into_par_iter().with_max_len(1).for_each(|_| {
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= count {
                return;
            }
            f(task);
        }
    });
}

/// Whose turn it is, for each of many places.
#[derive(Default)]
pub struct Turns {
    next: Vec<AtomicU32>,
    broken: AtomicBool,
}

impl Turns {
    /// As many places, all at turn 0.
    pub fn reset(&mut self, places: usize) {
        self.next.resize_with(places, AtomicU32::default);
        self.next.iter_mut().for_each(|next| *next.get_mut() = 0);
        *self.broken.get_mut() = false;
    }

    /// Waits for this turn. What others wrote in earlier turns can be seen afterwards.
    ///
    /// # Panics
    /// Where a task with an earlier turn has panicked, which would be waited for in vain.
    pub fn wait(&self, place: usize, turn: usize) {
        for look in 0.. {
            if self.next[place].load(Ordering::Acquire) as usize == turn {
                return;
            }
            assert!(!self.broken.load(Ordering::Relaxed), "a task that others wait for has panicked");
            if look < LOOKS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    /// Ends the turn that was waited for.
    pub fn pass(&self, place: usize) {
        // Nobody else writes between two turns.
        self.next[place].store(self.next[place].load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// Runs a task that others may wait for: should it panic, they do as well.
    pub fn watch<T>(&self, task: impl FnOnce() -> T) -> T {
        struct Watch<'a>(&'a AtomicBool);
        impl Drop for Watch<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    self.0.store(true, Ordering::Relaxed);
                }
            }
        }
        let _watch = Watch(&self.broken);
        task()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sum whose order shows: x ← 3x + task.
    fn folded(threads: usize, tasks: usize, places: usize) -> Vec<u64> {
        let mut turns = Turns::default();
        turns.reset(places);
        let sums: Vec<AtomicUsize> = (0..places).map(|_| AtomicUsize::new(0)).collect();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        pool.install(|| {
            in_order(tasks, |task| {
                for (place, sum) in sums.iter().enumerate() {
                    turns.wait(place, task);
                    sum.store(sum.load(Ordering::Relaxed).wrapping_mul(3).wrapping_add(task), Ordering::Relaxed);
                    turns.pass(place);
                }
            });
        });
        sums.into_iter().map(|sum| sum.into_inner() as u64).collect()
    }

    #[test]
    fn sums_have_one_order_on_any_number_of_threads() {
        let expected = (0..300).fold(0u64, |sum, task| sum.wrapping_mul(3).wrapping_add(task));
        for threads in [1, 2, 3, 7] {
            assert_eq!(folded(threads, 300, 5), [expected; 5], "{threads} threads");
        }
    }

    #[test]
    fn a_panic_ends_those_who_wait() {
        let mut turns = Turns::default();
        turns.reset(1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("threads");
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.install(|| {
                in_order(6, |task| {
                    turns.watch(|| {
                        assert!(task != 1, "as asked");
                        turns.wait(0, task);
                        turns.pass(0);
                    });
                });
            });
        }));
        assert!(result.is_err());
        turns.reset(1);
        turns.wait(0, 0);
    }
}
