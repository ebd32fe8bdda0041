//! From tokens to the last norm.

use termwise_attention::{Extras, Inputs};

use super::Nonpositive;
use super::clock::Stage;
use super::places::LayerPlaces;
use super::session::{Layer, Session, Sizes};
use crate::error::{Error, Result};
use crate::ops::{embedding, linear, rmsnorm, swiglu};
use crate::params::Params;

impl Session {
    /// Leaves the output of the last norm in `h`; the first denominator that was not positive.
    pub(super) fn forward(&mut self, params: &Params, ids: &[u32], lengths: Option<&[usize]>) -> Result<Option<Nonpositive>> {
        let Session { sizes, places, rope, layers, residuals, inverses, h, product, clock, .. } = self;
        let Sizes { c, i, queries, eps, .. } = *sizes;
        let w = params.values();
        let mut nonpositive = None;

        embedding::forward(ids, &w[places.embedding.clone()], &mut residuals[0], c);
        clock.forward(Stage::Embedding);
        rmsnorm::forward(&residuals[0], &w[places.layers[0].attention_norm.clone()], eps, h, &mut inverses[0]);
        clock.forward(Stage::Norm);

        for (l, (layer, at)) in layers.iter_mut().zip(&places.layers).enumerate() {
            linear::forward(h, &w[at.q.clone()], None, &mut layer.q, c);
            linear::forward(h, &w[at.k.clone()], None, &mut layer.k, c);
            linear::forward(h, &w[at.v.clone()], None, &mut layer.v, c);
            for (signal, (_, values)) in at.signals.iter().zip(&mut layer.signals) {
                let bias = signal.bias.clone().map(|range| &w[range]);
                linear::forward(h, &w[signal.weight.clone()], bias, values, c);
            }
            clock.forward(Stage::Projections);

            let Layer { attention, q, k, v, y, signals, gate, up } = layer;
            let inputs = Inputs { q, k, v, extras: extras(at, signals, w), lengths, rope };
            let report = attention.forward(&inputs, y).map_err(|source| Error::Layer { layer: l, source })?;
            nonpositive = nonpositive.or(report.nonpositive.map(|n| Nonpositive {
                layer: l,
                head: n.head,
                row: n.row,
                position: n.position,
                value: n.value,
            }));
            clock.forward(Stage::Attention);
            linear::forward(y, &w[at.o.clone()], None, h, queries);
            clock.forward(Stage::Projections);

            let (before, after) = residuals.split_at_mut(2 * l + 1);
            rmsnorm::forward_residual(&before[2 * l], &mut after[0], &w[at.mlp_norm.clone()], eps, h, &mut inverses[2 * l + 1]);
            clock.forward(Stage::Norm);

            linear::forward(h, &w[at.gate.clone()], None, gate, c);
            linear::forward(h, &w[at.up.clone()], None, up, c);
            clock.forward(Stage::Mlp);
            swiglu::forward(gate, up, product);
            clock.forward(Stage::Swiglu);
            linear::forward(product, &w[at.down.clone()], None, h, i);
            clock.forward(Stage::Mlp);

            let next = places.layers.get(l + 1).map_or(&places.norm, |next| &next.attention_norm);
            let (before, after) = residuals.split_at_mut(2 * l + 2);
            rmsnorm::forward_residual(&before[2 * l + 1], &mut after[0], &w[next.clone()], eps, h, &mut inverses[2 * l + 2]);
            clock.forward(Stage::Norm);
        }
        Ok(nonpositive)
    }
}

/// Gate signals of this batch, and parameters.
pub(super) fn extras<'a>(
    at: &LayerPlaces,
    signals: &'a [(termwise_attention::Extra, crate::ops::Buffer)],
    w: &'a [f32],
) -> Extras<&'a [f32]> {
    let mut extras = Extras::default();
    for (extra, values) in signals {
        extras.set(*extra, &values[..]);
    }
    for (extra, range) in &at.parameters {
        extras.set(*extra, &w[range.clone()]);
    }
    extras
}
