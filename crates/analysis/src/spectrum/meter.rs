//! Measures the heads of a model layer by layer, for any caller that runs the model.

use rayon::prelude::*;
use termwise_attention::{Inputs, Layer, Shape};

use super::head::{Failure, HeadStatistics, conclude, look};
use super::result::{ModelFacts, RowFacts, Spectrum, TextFacts};
use super::{Options, check_options, sample};
use crate::Error;

/// Accumulates the attention inputs of each layer over windows, and computes their spectrum.
#[derive(Clone, Debug)]
pub struct Meter {
    options: Options,
    heads: Vec<Vec<HeadStatistics>>,
    /// Measured queries of each batch row.
    rows: Vec<Vec<usize>>,
    /// Number of windows before this batch.
    before: usize,
    text: TextFacts,
    sampled: u64,
}

impl Meter {
    /// A meter without windows.
    pub fn new(options: Options) -> Result<Meter, Error> {
        check_options(&options)?;
        let text = TextFacts { data: Vec::new(), windows: 0, length: 0, tokens: 0 };
        Ok(Meter { options, heads: Vec::new(), rows: Vec::new(), before: 0, text, sampled: 0 })
    }

    /// Starts a batch: its first rows contain windows of these lengths. Further rows are not measured.
    pub fn begin(&mut self, lengths: &[usize]) {
        let Options { rows, seed, .. } = self.options;
        self.before = self.text.windows;
        self.rows = lengths.iter().enumerate().map(|(row, &length)| sample(rows, length, self.before + row, seed)).collect();
        self.sampled += self.rows.iter().map(|rows| rows.len() as u64).sum::<u64>();
        self.text.windows += lengths.len();
        self.text.length = self.text.length.max(lengths.iter().copied().max().unwrap_or(0));
        self.text.tokens += lengths.iter().sum::<usize>() as u64;
    }

    /// Measures a layer of this batch.
    pub fn see(&mut self, layer: usize, attention: &Layer, shape: &Shape, inputs: &Inputs<f32>) -> Result<(), Error> {
        self.look(layer, attention, shape, inputs)?.into_iter().for_each(|(head, found)| self.add(layer, head, found));
        Ok(())
    }

    /// Adds a window of a head.
    pub(super) fn add(&mut self, layer: usize, head: usize, found: HeadStatistics) {
        if self.heads.len() <= layer {
            self.heads.resize_with(layer + 1, Vec::new);
        }
        let known = self.heads[layer].len();
        self.heads[layer].resize_with(known.max(head + 1), HeadStatistics::default);
        self.heads[layer][head].merge(found);
    }

    /// Statistics of a layer for this batch, ordered by window, then head.
    pub(super) fn look(
        &self,
        layer: usize,
        attention: &Layer,
        shape: &Shape,
        inputs: &Inputs<f32>,
    ) -> Result<Vec<(usize, HeadStatistics)>, Error> {
        let jobs: Vec<(usize, usize)> = (0..self.rows.len()).flat_map(|row| (0..shape.heads).map(move |head| (row, head))).collect();
        let look = |&(row, head): &(usize, usize)| look(attention, inputs, shape, (row, head), &self.rows[row], &self.options);
        let results: Vec<Result<HeadStatistics, Failure>> = jobs.par_iter().map(look).collect();
        let own = |(&(row, head), result): (&(usize, usize), Result<HeadStatistics, Failure>)| match result {
            Ok(found) => Ok((head, found)),
            Err(error) => Err(error.within(layer, head, self.before + row)),
        };
        jobs.iter().zip(results).map(own).collect()
    }

    /// The spectrum of all windows.
    pub fn finish(self, model: ModelFacts, data: Vec<String>) -> Spectrum {
        let Meter { options, heads, text, sampled, .. } = self;
        let layers = heads.into_iter().enumerate().map(|(layer, heads)| conclude(layer, heads, &options)).collect();
        let rows = RowFacts { sampled, of: text.tokens, seed: options.seed };
        Spectrum { model, text: TextFacts { data, ..text }, rows, orders: options.orders, layers, timing: None }
    }
}
