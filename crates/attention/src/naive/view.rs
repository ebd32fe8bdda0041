//! One head of one batch row for analysis: prepared queries, keys and values in float64.

use std::ops::Range;

use crate::epilogue::{self, Post, Row};
use crate::naive::gates::count;
use crate::naive::head::Head;
use crate::parts::cap;
use crate::parts::gate::PostGate;
use crate::{AuxKind, Error, Inputs, Layer, Variant};

/// The inputs of a head after convolution, RoPE, φ and gates:
///
/// ```text
/// x_ts = min( cap(q_t·k_s), clamp )                  score; scale is part of q
/// u_t  = Σ_{s seen} exp(c_t − c_s) · w(x_ts) · v_s   I_s and κ_s are part of v
/// z_t  = Σ_{s seen} exp(c_t − c_s) · w(x_ts)
/// y_t  = P_t ⊙ N( O_t · u_t / D(z_t, S_t) )          finish
/// ```
///
/// Position t attends to s if s ≤ t and s is not [hidden](View::hidden) between the sinks and the window.
///
/// Values are those of the float32 inputs; conversions to float64 are exact.
pub struct View {
    /// The variant of the head with learned coefficients inserted.
    pub variant: Variant,
    /// Positions that are not padding.
    pub length: usize,
    /// Head dimension of q and k.
    pub d: usize,
    /// Head dimension of v.
    pub e: usize,
    /// [length, d]
    pub q: Vec<f64>,
    /// [length, d]
    pub k: Vec<f64>,
    /// [length, e]
    pub v: Vec<f64>,
    /// c_t, all zero without decay.
    pub log_decay: Vec<f64>,
    out: Vec<f64>,
    /// One per position, or [length, e].
    post: Vec<f64>,
    /// b of a sum with a sink.
    sink: Option<f64>,
    /// γ and β of the norm, empty if it has none.
    weight: Vec<f64>,
    bias: Vec<f64>,
}

/// The sums over the keys of a row, scaled by e^−ρ.
#[derive(Clone, Copy, Debug)]
pub struct ScaledSums<'a> {
    /// u_t·e^−ρ [e]
    pub u: &'a [f64],
    /// z_t·e^−ρ
    pub z: f64,
    /// ρ
    pub rho: f64,
}

/// The first part of the variant that a view of this many positions does not support.
fn unsupported_part(variant: &Variant, length: usize) -> Option<&'static str> {
    [
        // A window that covers the whole sequence leaves no key to the far branch.
        (variant.far.is_some() && variant.window.is_some_and(|window| window < length), "far"),
        (variant.heavy_hitters.is_some() && variant.window.is_some_and(|window| window < length), "chosen"),
        (variant.write.is_some(), "write"),
        (variant.decay.as_ref().is_some_and(|decay| decay.by_channel()), "decay=…,channel"),
    ]
    .into_iter()
    .find_map(|(there, word)| there.then_some(word))
}

impl View {
    /// Head `head` of batch row `row` in inputs with B rows of T positions.
    pub fn new(layer: &Layer, batch: usize, time: usize, inputs: &Inputs<f32>, row: usize, head: usize) -> Result<View, Error> {
        let shape = layer.shape(batch, time)?;
        layer.check(&shape, inputs, 1)?;
        inputs.check_no_documents()?;
        if row >= batch || head >= shape.heads {
            return Err(Error::Shape(format!("row {row} and head {head} are not among {batch} rows and {} heads", shape.heads)));
        }
        let own = Head::new(layer, inputs, &shape, row, head);
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let parameter = |aux| if own.variant.needs(aux) { wide(inputs.aux(aux)) } else { Vec::new() };
        let (d, e, length) = (own.near.q.width, own.e, own.length);
        if let Some(part) = unsupported_part(&own.variant, length) {
            let reason = format!("a view of a head does not support `{part}`; remove `{part}`");
            return Err(Error::Combination { variant: own.variant.to_string(), reason });
        }
        let factors = own.gates.input.iter().zip(&own.gates.key_weights).map(|(&gate, &key)| f64::from(gate) * f64::from(key));
        Ok(View {
            length,
            d,
            e,
            q: (0..length)
                .flat_map(|t| own.near.q.row(t).iter().map(move |&x| (t, x)))
                .map(|(t, x)| own.near.scales[t] * f64::from(x))
                .collect(),
            k: (0..length).flat_map(|s| own.near.k.row(s)).map(|&x| f64::from(x)).collect(),
            v: factors.enumerate().flat_map(|(s, factor)| own.v.row(s).iter().map(move |&x| factor * f64::from(x))).collect(),
            out: wide(&own.gates.output),
            post: wide(&own.gates.post),
            sink: own.variant.denominator.has_sink().then(|| f64::from(inputs.aux(AuxKind::Sink)[head])),
            weight: parameter(AuxKind::NormWeight),
            bias: parameter(AuxKind::NormBias),
            log_decay: own.log_decay,
            variant: own.variant,
        })
    }

    /// The keys up to t that are not visible from t: those between the sinks and the window.
    pub fn hidden(&self, t: usize) -> Range<usize> {
        self.variant.distance().far(t)
    }

    /// The keys that are visible from t, in ascending order.
    pub fn seen(&self, t: usize) -> impl Iterator<Item = usize> + use<> {
        self.variant.distance().near(t)
    }

    /// x from q·k: the soft cap, then the clamp. NaN stays NaN.
    #[inline(always)]
    pub fn score(&self, product: f64) -> f64 {
        let x = self.variant.near.cap.map_or(product, |c| cap::value(product, c));
        match self.variant.near.clamp {
            Some(clamp) if x > clamp => clamp,
            _ => x,
        }
    }

    /// y_t [e] from the sums of `variant`, whose kernel may differ from that of the head. Returns D·e^−ρ.
    pub fn finish(&self, variant: &Variant, t: usize, sums: ScaledSums, y: &mut [f64]) -> f64 {
        let ScaledSums { u, z, rho } = sums;
        let by_channel = self.variant.post_gate.as_ref().is_some_and(PostGate::by_channel);
        let row = Row {
            z,
            count: count(variant, t),
            rho,
            out: self.out[t],
            post: if by_channel { Post::Each(&self.post[t * self.e..][..self.e]) } else { Post::One(self.post[t]) },
            sink: self.sink.map_or(0.0, |b| (b - rho).exp()),
            weight: &self.weight,
            bias: &self.bias,
            norm_reads_scale: variant.norm_restores_scale(),
        };
        epilogue::forward(variant, row, u, y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, AuxTensor, AuxTensors, Rope};

    #[test]
    fn unsupported_parts_are_rejected() {
        let (q, kv) = ([0.1; 5 * 2 * 4], [0.2; 5 * 4]);
        let view = |text: &str| {
            let layer = Layer::new(2, 1, 4).variant(&*format!("{text} rope=off")).expect("possible");
            let numbers = [0.0; 64];
            let mut aux_tensors = AuxTensors::default();
            layer.aux_specs().iter().for_each(|spec| aux_tensors.set(spec.aux, &numbers[..spec.values(5)]));
            View::new(&layer, 1, 5, &Inputs::new(&q, &kv, &kv).with_aux(aux_tensors), 0, 0).map(drop)
        };
        for (text, part) in [
            ("exp window=4 far(taylor=0..2)", "`far`"),
            ("power=1 over=none write=delta", "`write`"),
            ("power=1 over=none decay=sigmoid,channel", "`decay=…,channel`"),
        ] {
            assert!(view(text).is_err_and(|error| error.to_string().contains(part)), "{text}");
        }
        assert_eq!(view("exp window=5 far(taylor=0..2)"), Ok(()));
    }

    #[test]
    fn sums_over_a_view_match_naive_attention() {
        let numbers = |n: usize, seed: usize| (0..n).map(|i| ((i * 7 + seed * 13) % 23) as f32 / 11.5 - 1.0).collect::<Vec<f32>>();
        for text in [
            "softmax",
            "exp clamp=0.2 over=length in out norm=layer",
            "taylor=0..3 decay=softplus conv=2",
            "linear_cosine",
            "exp window=3 sinks=1 cap=0.5",
            "exp window=2 over=sum,sink post=sigmoid,channel qk_norm=rms",
            "exp window=4 over=length decay=softplus",
            "taylor=0..2 dim=3 window=5 sinks=2",
        ] {
            let layer = Layer::new(4, 2, 6).rope(Rope::new(6, 100.0, None).expect("a rope")).variant(text).expect("possible");
            let (q, kv) = (numbers(2 * 7 * 4 * 6, 1), numbers(2 * 7 * 2 * 6, 2));
            let data: Vec<(AuxTensor, Vec<f32>)> =
                layer.aux_specs().iter().enumerate().map(|(i, spec)| (spec.aux, numbers(spec.values(14), 3 + i))).collect();
            let mut aux_tensors = AuxTensors::default();
            data.iter().for_each(|(aux, values)| aux_tensors.set(*aux, &values[..]));
            let lengths = [7, 5];
            let inputs = Inputs::new(&q, &kv, &kv).with_aux(aux_tensors).lengths(&lengths[..]);
            let mut expected = vec![0.0f32; 2 * 7 * 4 * 6];
            layer.naive::<f32>(2, 7).expect("an engine").infer(&inputs, &mut expected).expect("a pass");
            for (row, head) in [(0, 0), (0, 3), (1, 1)] {
                let view = View::new(&layer, 2, 7, &inputs, row, head).expect("a view");
                assert_eq!(view.length, lengths[row]);
                for t in 0..view.length {
                    let (mut u, mut z, mut y) = (vec![0.0; view.e], 0.0, vec![0.0; view.e]);
                    assert_eq!(view.seen(t).count() + view.hidden(t).len(), t + 1);
                    for s in view.seen(t) {
                        let x = view.score((0..view.d).map(|i| view.q[t * view.d + i] * view.k[s * view.d + i]).sum::<f64>());
                        let weight = (view.log_decay[t] - view.log_decay[s]).exp() * view.variant.near.kernel.value(x);
                        z += weight;
                        (0..view.e).for_each(|i| u[i] += weight * view.v[s * view.e + i]);
                    }
                    view.finish(&view.variant, t, ScaledSums { u: &u, z, rho: 0.0 }, &mut y);
                    for (i, y) in y.iter().enumerate() {
                        let expected = f64::from(expected[((row * 7 + t) * 4 + head) * 6 + i]);
                        assert!((y - expected).abs() < 2e-5 * (1.0 + expected.abs()), "{text} row {row} head {head} t {t}: {y} {expected}");
                    }
                }
            }
        }
    }
}
