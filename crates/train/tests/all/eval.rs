//! Evaluation in windows: every token is scored once, with the context that the stride implies.

use crate::common;

use common::settings;
use termwise_data::{Result, Rows, Source};
use termwise_model::{Batch, Model, Objective, SessionOptions};
use termwise_train::eval::{Windows, evaluate};

/// A document of 50 tokens, split at any position.
#[derive(Debug)]
pub struct Stream;

const TOKENS: usize = 50;

fn token(at: usize) -> u32 {
    (at * at * 7 + at / 3) as u32 % common::VOCABULARY as u32
}

impl Source for Stream {
    fn vocabulary(&self) -> usize {
        common::VOCABULARY
    }

    fn fingerprint(&self) -> String {
        "stream".into()
    }

    fn train(&self, _: u64, _: u64, _: usize, _: usize, _: &mut Rows) -> Result<()> {
        unreachable!("nothing is trained here")
    }

    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<bool> {
        out.reset(rows, time);
        let first = index as usize * rows * time;
        for (place, at) in (first..TOKENS.min(first + rows * time)).enumerate() {
            out.ids[place] = token(at);
            out.labels[place] = token(at + 1) as i32;
            out.bytes += 3;
        }
        Ok(first < TOKENS)
    }
}

pub fn model() -> Model {
    let config = settings("attention = \"softmax\"\ninit_std = 0.3").config(common::VOCABULARY).expect("a configuration");
    Model::fresh(config, 5).expect("a model")
}

/// The mean loss if token `at` is predicted with the context from `begin(at)` on.
fn by_hand(model: &Model, begin: impl Fn(usize) -> usize) -> f64 {
    let loss = |at: usize| {
        let ids: Vec<u32> = (begin(at)..=at).map(token).collect();
        let mut labels = vec![-100; ids.len()];
        labels[ids.len() - 1] = token(at + 1) as i32;
        let mut session = model.session(1, ids.len(), SessionOptions::default()).expect("a session");
        session.loss(&model.params, &Batch::new(&ids, &labels)).expect("a loss").sum
    };
    (0..TOKENS).map(loss).sum::<f64>() / TOKENS as f64
}

#[test]
fn windows_have_the_context_that_the_stride_implies() {
    let model = model();
    for (length, stride) in [(8, 8), (8, 3), (8, 1), (20, 7), (64, 64), (64, 5)] {
        // A window consists of `stride` new tokens and as many before them as fit.
        let expected = by_hand(&model, |at| (at / stride * stride).saturating_sub(length - stride));
        for batch in [1, 3] {
            let found = evaluate(&model, &Stream, Windows { batch, length, stride }, 0).expect("an evaluation");
            assert_eq!(found.tokens, TOKENS as u64);
            assert!((found.loss - expected).abs() < 1e-5, "length {length}, stride {stride}, batch {batch}: {} {expected}", found.loss);
            let bits = found.bits_per_byte.expect("text");
            assert!((bits - found.loss / 2f64.ln() / 3.0).abs() < 1e-9);
        }
    }
}

#[test]
fn strides_are_rejected_for_separate_documents_and_invalid_windows() {
    let model = model();
    let evaluate = |source: &dyn Source, length, stride| evaluate(&model, source, Windows { batch: 2, length, stride }, 0);
    assert!(evaluate(&common::Walk::default(), 16, 16).is_ok());
    for (source, length, stride) in
        [(&common::Walk::default() as &dyn Source, 16, 8), (&Stream as _, 8, 9), (&Stream as _, 8, 0), (&Stream as _, 0, 0)]
    {
        assert!(evaluate(source, length, stride).is_err(), "{source:?} {length} {stride}");
    }
}
