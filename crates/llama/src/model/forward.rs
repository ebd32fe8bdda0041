//! From tokens to the last norm.

use termwise_attention::{Extra, Extras, Inputs};

use super::Nonpositive;
use super::clock::Stage;
use super::places::LayerPlaces;
use super::session::{Layer, Observed, Session, Sizes};
use crate::error::{Error, Result};
use crate::ops::{Buffer, embedding, linear, rmsnorm, swiglu};
use crate::params::Params;

impl Session {
    /// Leaves the output of the last norm in `h`; the first denominator that was not positive.
    pub(super) fn forward(
        &mut self,
        params: &Params,
        ids: &[u32],
        lengths: Option<&[usize]>,
        watch: &mut dyn FnMut(Observed),
    ) -> Result<Option<Nonpositive>> {
        let Session {
            sizes, places, attention: plans, engines, shape, keeps, layers, saved, residuals, inverses, h, product, clock, ..
        } = self;
        let Sizes { c, i, queries, eps, .. } = *sizes;
        let w = params.values();
        let mut nonpositive = None;

        embedding::forward(ids, &w[places.embedding.clone()], &mut residuals[0], c);
        clock.forward(Stage::Embedding);
        rmsnorm::forward(&residuals[0], &w[places.layers[0].attention_norm.clone()], eps, h, &mut inverses[0]);
        clock.forward(Stage::Norm);

        let kept = layers.len();
        for (l, (attention, at)) in engines.iter_mut().zip(&places.layers).enumerate() {
            let layer = &mut layers[l % kept];
            linear::forward(h, &w[at.q.clone()], None, &mut layer.q, c);
            linear::forward(h, &w[at.k.clone()], None, &mut layer.k, c);
            linear::forward(h, &w[at.v.clone()], None, &mut layer.v, c);
            for signal in &at.signals {
                let own = layer.signals.iter_mut().find(|(extra, _)| *extra == signal.extra);
                let (_, values) = own.expect("every signal of a layer has room");
                let bias = signal.bias.clone().map(|range| &w[range]);
                linear::forward(h, &w[signal.weight.clone()], bias, values, c);
            }
            clock.forward(Stage::Projections);

            let Layer { q, k, v, y, signals, gate, up } = layer;
            let inputs = Inputs::new(&**q, &**k, &**v).extras(extras(at, signals, w)).lengths(lengths);
            let failed = |source| Error::Layer { layer: l, source };
            let report = if *keeps {
                saved[l] = None;
                saved[l].insert(attention.forward(&inputs, y).map_err(failed)?).report()
            } else {
                attention.infer(&inputs, y).map_err(failed)?
            };
            nonpositive = nonpositive.or(report.nonpositive.map(|n| Nonpositive {
                layer: l,
                head: n.head,
                row: n.row,
                position: n.position,
                value: n.value,
            }));
            clock.forward(Stage::Attention);
            watch(Observed { layer: l, attention: &plans[l], shape: *shape, inputs: &inputs, y });
            linear::forward(y, &w[at.o.clone()], None, h, queries);
            clock.forward(Stage::Projections);

            let (before, after, inverse) = step(residuals, inverses, 2 * l);
            rmsnorm::forward_residual(before, after, &w[at.mlp_norm.clone()], eps, h, inverse);
            clock.forward(Stage::Norm);

            linear::forward(h, &w[at.gate.clone()], None, gate, c);
            linear::forward(h, &w[at.up.clone()], None, up, c);
            clock.forward(Stage::Mlp);
            swiglu::forward(gate, up, product);
            clock.forward(Stage::Swiglu);
            linear::forward(product, &w[at.down.clone()], None, h, i);
            clock.forward(Stage::Mlp);

            let next = places.layers.get(l + 1).map_or(&places.norm, |next| &next.attention_norm);
            let (before, after, inverse) = step(residuals, inverses, 2 * l + 1);
            rmsnorm::forward_residual(before, after, &w[next.clone()], eps, h, inverse);
            clock.forward(Stage::Norm);
        }
        Ok(nonpositive)
    }
}

/// Residual i, the next one, and that one's 1/rms; the first follows the last where two take turns.
fn step<'a>(residuals: &'a mut [Buffer], inverses: &'a mut [Buffer], i: usize) -> (&'a Buffer, &'a mut Buffer, &'a mut Buffer) {
    let (from, to) = (i % residuals.len(), (i + 1) % residuals.len());
    let [before, after] = residuals.get_disjoint_mut([from, to]).expect("at least two residuals");
    (before, after, &mut inverses[to])
}

/// Gate signals of this batch, and parameters.
pub(super) fn extras<'a>(at: &LayerPlaces, signals: &'a [(Extra, Buffer)], w: &'a [f32]) -> Extras<&'a [f32]> {
    let mut extras = Extras::default();
    for (extra, values) in signals.iter().filter(|(extra, _)| at.signals.iter().any(|signal| signal.extra == *extra)) {
        extras.set(*extra, &values[..]);
    }
    for (extra, range) in &at.parameters {
        extras.set(*extra, &w[range.clone()]);
    }
    extras
}
