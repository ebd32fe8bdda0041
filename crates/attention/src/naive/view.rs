//! One head of one batch row as the formula sees it, for those who look inside: prepared queries, keys and values in float64.

use crate::epilogue::{self, Post, Row};
use crate::naive::head::{Head, count};
use crate::parts::gate::PostGate;
use crate::{Error, Extra, Inputs, Layer, Variant};

/// What the rows of a head read, after convolution, RoPE, φ and gates:
///
/// ```text
/// x_ts = min( q_t·k_s, clamp )                      scale is part of q
/// u_t  = Σ_{s ≤ t} exp(c_t − c_s) · w(x_ts) · v_s   I_s and κ_s are part of v
/// z_t  = Σ_{s ≤ t} exp(c_t − c_s) · w(x_ts)
/// y_t  = P_t · N( O_t · u_t / D(z_t, S_t) )         finish
/// ```
///
/// Values are those of the float32 inputs; conversions to float64 are exact.
pub struct View {
    /// The head's variant, learned coefficients in place.
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
    post: Vec<f64>,
    /// γ and β of the norm, empty where it has none.
    weight: Vec<f64>,
    bias: Vec<f64>,
}

/// The first part that changes weights or outputs in a way that a view of so many positions does not show.
fn unseen(variant: &Variant, length: usize) -> Option<&'static str> {
    [
        // A window that holds the whole text hides nothing.
        (variant.window.is_some_and(|window| window < length), "window"),
        (variant.cap.is_some(), "cap"),
        (variant.centre.is_some(), "centre"),
        (variant.denominator.has_sink(), "sink"),
        (variant.post_gate.as_ref().is_some_and(PostGate::by_channel), "post=…,channel"),
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
        layer.check_fused()?;
        let own = Head::gather(layer, inputs, &shape, row, head);
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let parameter = |extra| if own.variant.needs(extra) { wide(inputs.extra(extra)) } else { Vec::new() };
        let (d, e, length) = (own.near.q.width, own.e, own.length);
        if let Some(part) = unseen(&own.variant, length) {
            let reason =
                format!("a look inside a head does not know `{part}` so far, and would show other weights than it has; leave `{part}` out");
            return Err(Error::Combination { variant: own.variant.to_string(), reason });
        }
        let scale = own.variant.scale_for(shape.d);
        let factors = own.in_gate.iter().zip(&own.key_weights).map(|(&gate, &key)| f64::from(gate) * f64::from(key));
        Ok(View {
            length,
            d,
            e,
            q: (0..length).flat_map(|t| own.near.q.row(t)).map(|&x| scale * f64::from(x)).collect(),
            k: (0..length).flat_map(|s| own.near.k.row(s)).map(|&x| f64::from(x)).collect(),
            v: factors.enumerate().flat_map(|(s, factor)| own.v.row(s).iter().map(move |&x| factor * f64::from(x))).collect(),
            out: wide(&own.out_gate),
            post: wide(&own.post_gate),
            weight: parameter(Extra::NormWeight),
            bias: parameter(Extra::NormBias),
            log_decay: own.log_decay,
            variant: own.variant,
        })
    }

    /// y_t [e] from u_t [e] and z_t, by `variant`, which may differ from the head's own in its kernel. Both sums have the
    /// log scale ρ taken out: their true values are u·e^ρ and z·e^ρ. Returns D·e^−ρ.
    pub fn finish(&self, variant: &Variant, t: usize, z: f64, rho: f64, u: &[f64], y: &mut [f64]) -> f64 {
        let row = Row {
            z,
            count: count(variant, t),
            rho,
            out: self.out[t],
            post: Post::One(self.post[t]),
            sink: 0.0,
            weight: &self.weight,
            bias: &self.bias,
        };
        epilogue::forward(variant, row, u, y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, Extras, Rope};

    #[test]
    fn what_a_view_does_not_show_is_refused() {
        let (q, kv) = ([0.1; 5 * 2 * 4], [0.2; 5 * 4]);
        let look = |text: &str| {
            let layer = Layer::new(2, 1, 4).variant(&*format!("{text} rope=off")).expect("possible");
            let sinks = [0.0; 2];
            let mut extras = Extras::default();
            layer.extras().iter().for_each(|spec| extras.set(spec.extra, &sinks[..]));
            View::new(&layer, 1, 5, &Inputs::new(&q, &kv, &kv).extras(extras), 0, 0).map(drop)
        };
        for (text, part) in [("exp window=4", "`window`"), ("exp cap=3", "`cap`"), ("exp over=sum,sink", "`sink`")] {
            assert!(look(text).is_err_and(|error| error.to_string().contains(part)), "{text}");
        }
        assert_eq!(look("exp window=5 far(taylor=0..2)"), Ok(()));
    }

    /// Sums over a view's rows are the naive attention.
    #[test]
    fn a_view_has_all_that_the_formula_needs() {
        let numbers = |n: usize, seed: usize| (0..n).map(|i| ((i * 7 + seed * 13) % 23) as f32 / 11.5 - 1.0).collect::<Vec<f32>>();
        for text in ["softmax", "exp clamp=0.2 over=length in out norm=layer", "taylor=0..3 decay=softplus conv=2", "linear_cosine"] {
            let layer = Layer::new(4, 2, 6).rope(Rope::new(6, 100.0, None).expect("a rope")).variant(text).expect("possible");
            let variant = &layer.heads()[0];
            let (q, kv) = (numbers(2 * 7 * 4 * 6, 1), numbers(2 * 7 * 2 * 6, 2));
            let data: Vec<(Extra, Vec<f32>)> =
                layer.extras().iter().enumerate().map(|(i, spec)| (spec.extra, numbers(spec.values(14), 3 + i))).collect();
            let mut extras = Extras::default();
            data.iter().for_each(|(extra, values)| extras.set(*extra, &values[..]));
            let lengths = [7, 5];
            let inputs = Inputs::new(&q, &kv, &kv).extras(extras).lengths(&lengths[..]);
            let mut expected = vec![0.0f32; 2 * 7 * 4 * 6];
            layer.naive::<f32>(2, 7).expect("an engine").infer(&inputs, &mut expected).expect("a pass");
            for (row, head) in [(0, 0), (0, 3), (1, 1)] {
                let view = View::new(&layer, 2, 7, &inputs, row, head).expect("a view");
                assert_eq!(view.length, lengths[row]);
                for t in 0..view.length {
                    let (mut u, mut z, mut y) = (vec![0.0; view.e], 0.0, vec![0.0; view.e]);
                    for s in 0..=t {
                        let dot = (0..view.d).map(|i| view.q[t * view.d + i] * view.k[s * view.d + i]).sum::<f64>();
                        let x = dot.min(variant.clamp.unwrap_or(f64::INFINITY));
                        let weight = (view.log_decay[t] - view.log_decay[s]).exp() * view.variant.kernel.value(x);
                        z += weight;
                        (0..view.e).for_each(|i| u[i] += weight * view.v[s * view.e + i]);
                    }
                    view.finish(&view.variant, t, z, 0.0, &u, &mut y);
                    for (i, y) in y.iter().enumerate() {
                        let expected = f64::from(expected[((row * 7 + t) * 4 + head) * 6 + i]);
                        assert!((y - expected).abs() < 2e-5 * (1.0 + expected.abs()), "{text} row {row} head {head} t {t}: {y} {expected}");
                    }
                }
            }
        }
    }
}
