//! Several ranks, here threads, share a run: their number does not change any byte of the result.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::common::{Walk, options, run, settings, timeless, weights};
use crate::eval::Stream;
use termwise_model::{Model, SessionOptions};
use termwise_train::collective::threads::{Thread, team};
use termwise_train::eval::{Windows, evaluate, evaluate_with};
use termwise_train::{Collective, Error, Outcome, Result, RunOptions, Settings, Start, train};

/// The same work on this many ranks, all of which exist until all are done.
fn each<T: Send>(ranks: usize, work: impl Fn(Arc<Thread>) -> T + Sync) -> Vec<T> {
    let ranks: Vec<Arc<Thread>> = team(ranks).into_iter().map(Arc::new).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(|| work(rank.clone()))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

pub fn together(ranks: usize, settings: &Settings, folder: &Path, start: Start) -> Vec<Result<Outcome>> {
    each(ranks, |rank| train(settings, &Walk::default(), &RunOptions { collective: rank, ..options(folder, start.clone()) }))
}

fn first(outcomes: Vec<Result<Outcome>>) -> Outcome {
    let mut all = outcomes.into_iter().map(|outcome| outcome.expect("a run"));
    let first = all.next().expect("rank 0");
    assert!(all.all(|other| (other.step, other.loss, other.best) == (first.step, first.loss, first.best)), "ranks agree");
    first
}

#[test]
fn any_number_of_ranks_leaves_the_same_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, more) in [
        ("rows", "micro_batches = 4"),
        ("batches", "accumulate = 3\nbatch = 2\nmicro_batches = 3\nattention = \"norm conv=3\""),
        ("rows of batches", "accumulate = 2\nbatch = 4\nmicro_batches = 8\nattention = \"taylor=0..2 norm=l2\""),
        ("whole batches", "accumulate = 4\nbatch = 2\nmicro_batches = 2"),
        ("bf16", "micro_batches = 4\nprecision = \"bf16\""),
    ] {
        let settings = settings(&format!("steps = 6\n{more}"));
        let alone = folder.path().join(format!("{name} 1"));
        let expected = weights(&run(&settings, &alone, Start::Fresh));
        for ranks in [2, 3, 4, 8] {
            let place = folder.path().join(format!("{name} {ranks}"));
            let outcome = first(together(ranks, &settings, &place, Start::Fresh));
            assert!(weights(&outcome) == expected, "{name}, {ranks} ranks");
            assert_eq!(timeless(&place), timeless(&alone), "{name}, {ranks} ranks");
        }
    }
}

#[test]
fn micro_batches_give_the_same_gradient() {
    let folder = tempfile::tempdir().expect("a folder");
    let whole = run(&settings("steps = 6"), &folder.path().join("whole"), Start::Fresh);
    let cut = run(&settings("steps = 6\nmicro_batches = 4"), &folder.path().join("cut"), Start::Fresh);
    let [whole, cut] = [whole, cut].map(|outcome| outcome.loss.expect("a loss"));
    assert!((whole - cut).abs() < 1e-4 * whole, "{whole} {cut}");
    // Without micro-batches the settings do not contain the key: settings and names of earlier runs are unchanged.
    assert!(!settings("").to_toml().contains("micro_batches") && settings("micro_batches = 4").to_toml().contains("micro_batches = 4"));
    assert_eq!(settings("micro_batches = 1").hash(), settings("").hash());
    for (ranks, batch, accumulate, expected) in
        [(1, 16, 1, 8), (4, 16, 1, 8), (3, 12, 1, 4), (5, 12, 1, 6), (2, 3, 1, 3), (16, 32, 1, 16), (2, 1, 4, 4), (2, 1, 1, 1)]
    {
        let settings = settings(&format!("batch = {batch}\naccumulate = {accumulate}"));
        assert_eq!(settings.micro_batches_for(ranks), expected, "{ranks} ranks, {accumulate} batches of {batch}");
    }
    let refused = |more: &str| {
        let layers = [crate::common::SMALL, more].map(|text| termwise_train::settings::Layer::parse(text, "test").expect("TOML"));
        Settings::resolve(&layers).expect_err("it does not divide").to_string()
    };
    assert!(refused("micro_batches = 3").contains("micro_batches"));
}

#[test]
fn a_run_is_resumed_with_another_number_of_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    let whole = settings("micro_batches = 4");
    let expected = weights(&run(&whole, &folder.path().join("whole"), Start::Fresh));
    let place = folder.path().join("parts");
    // Only the last rank receives a stop request, as from a signal: all end after the same step.
    let outcomes = each(4, |rank| {
        let stop = Arc::new(AtomicBool::new(rank.rank() == 3));
        train(&whole, &Walk::default(), &RunOptions { collective: rank, stop, ..options(&place, Start::Fresh) })
    });
    let stopped = first(outcomes);
    assert!(!stopped.finished && stopped.step == 1);
    first(together(3, &settings("micro_batches = 4\nsteps = 7\nhorizon = 12"), &place, Start::Resume));
    let last = first(together(2, &whole, &place, Start::Resume));
    assert!(last.finished && weights(&last) == expected);
}

#[test]
fn a_failure_of_one_rank_reaches_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = settings("micro_batches = 4");
    run(&settings, folder.path(), Start::Fresh);
    // Rank 0 finds an existing run.
    let outcomes = together(3, &settings, folder.path(), Start::Fresh);
    assert!(matches!(outcomes[0], Err(Error::RunExists { .. })));
    assert!(outcomes[1..].iter().all(|outcome| matches!(outcome, Err(Error::FirstRank))), "{outcomes:?}");
    // Ranks with different data or settings.
    let place = folder.path().join("other");
    let outcomes = each(2, |rank| {
        let name = if rank.rank() == 0 { "a" } else { "b" };
        train(&settings, &Walk { name, ..Walk::default() }, &RunOptions { collective: rank, ..options(&place, Start::Fresh) })
    });
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Err(Error::RanksDiffer { what: "the data", .. }))), "{outcomes:?}");
    // Data that fail midway on rank 1 only: the caller drops the rank, and the others end with the saved checkpoint.
    let place = folder.path().join("broken");
    let mut ranks = team(2);
    let (one, zero) = (ranks.pop().expect("rank 1"), ranks.pop().expect("rank 0"));
    let outcomes = std::thread::scope(|scope| {
        let broken = Walk { broken_from: Some(7), ..Walk::default() };
        let (settings, place) = (&settings, &place);
        let other =
            scope.spawn(move || train(settings, &broken, &RunOptions { collective: Arc::new(one), ..options(place, Start::Fresh) }));
        let first = scope
            .spawn(move || train(settings, &Walk::default(), &RunOptions { collective: Arc::new(zero), ..options(place, Start::Fresh) }));
        [first, other].map(|rank| rank.join().expect("a rank"))
    });
    assert!(matches!(outcomes[0], Err(Error::RankLost { rank: 1 })) && matches!(outcomes[1], Err(Error::Data(_))), "{outcomes:?}");
    let resumed = run(&settings, &place, Start::Resume);
    assert!(resumed.finished && weights(&resumed) == weights(&run(&settings, &folder.path().join("again"), Start::Fresh)));
}

#[test]
fn an_evaluation_is_the_same_on_any_number_of_ranks() {
    let settings = settings("");
    let model = Model::fresh(settings.config(crate::common::VOCABULARY).expect("a configuration"), 1).expect("a model");
    for (length, limit) in [(16, 0), (16, 2), (8, 0)] {
        let windows = Windows { batch: 2, length, stride: length };
        let expected = evaluate(&model, &Walk::default(), windows, limit).expect("an evaluation");
        for ranks in [2, 3, 5] {
            let found = each(ranks, |rank| {
                evaluate_with(&model, &Walk::default(), windows, limit, SessionOptions::default(), &*rank).expect("an evaluation").0
            });
            assert!(found.iter().all(|found| *found == expected), "{ranks} ranks: {found:?}");
        }
    }
    // Overlapping windows are computed sequentially by each rank.
    let (model, windows) = (crate::eval::model(), Windows { batch: 2, length: 8, stride: 3 });
    let expected = evaluate(&model, &Stream, windows, 0).expect("an evaluation");
    let found = each(3, |rank| evaluate_with(&model, &Stream, windows, 0, SessionOptions::default(), &*rank).expect("an evaluation").0);
    assert!(found.iter().all(|found| *found == expected));
}
