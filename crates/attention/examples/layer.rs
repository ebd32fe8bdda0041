//! The forward and backward pass of one attention layer, compared with the reference engine in float64.
//!
//! ```text
//! cargo run -p termwise-attention --example layer -- "taylor=0..4 norm=l2"
//! ```

use termwise_attention::{Attention, AuxTensors, Error, Grads, Inputs, Layer, Rope, relative_rms};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 16;

fn main() -> Result<(), Error> {
    let variant = std::env::args().nth(1).unwrap_or_else(|| "taylor=0..4 norm=l2 out".into());
    let (batch, time) = (2, 100);

    // A layer is checked and planned once, for every engine.
    let layer = Layer::new(HEADS, KV_HEADS, DIM).rope(Rope::new(DIM, 10_000.0, None)?).variant(variant.as_str())?;
    println!("{}", layer.heads()[0].formula());

    // q, k and v packed into one tensor, as one matrix product computes them, and the auxiliary tensors that the layer reads.
    let mut random = Random(1);
    let widths = layer.widths();
    let qkv = random.take(batch * time * widths.iter().sum::<usize>());
    let values: Vec<_> = layer.aux_specs().iter().map(|spec| (spec.aux, random.take(spec.values(batch * time)))).collect();
    for spec in layer.aux_specs() {
        println!("reads {:?} ({}), {} values", spec.aux, spec.name, spec.values(batch * time));
    }
    let mut aux_tensors = AuxTensors::default();
    values.iter().for_each(|(aux, values)| aux_tensors.set(*aux, &values[..]));
    let inputs = Inputs::packed(&qkv, widths).with_aux(aux_tensors);

    // The forward pass returns the saved pass that the backward pass reads.
    let mut attention = layer.fused(batch, time)?;
    let mut y = vec![0.0; batch * time * HEADS * DIM];
    let saved = attention.forward(&inputs, &mut y)?;
    if let Some(at) = saved.report().nonpositive {
        println!("the denominator of row {}, head {}, position {} is {}", at.row, at.head, at.position, at.value);
    }
    let dy = random.take(y.len());
    let mut dqkv = vec![0.0; qkv.len()];
    let mut gradients: Vec<_> = values.iter().map(|(aux, values)| (*aux, vec![0.0; values.len()])).collect();
    let mut grads = Grads::packed(&mut dqkv, widths);
    for (aux, gradient) in &mut gradients {
        grads = grads.with(*aux, gradient);
    }
    attention.backward(&inputs, &saved, &dy, &mut grads)?;

    // The reference engine implements the same trait.
    let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let (wide_qkv, wide_values) = (wide(&qkv), values.iter().map(|(aux, values)| (*aux, wide(values))).collect::<Vec<_>>());
    let mut wide_inputs = Inputs::packed(&wide_qkv, widths);
    for (aux, values) in &wide_values {
        wide_inputs = wide_inputs.with(*aux, values);
    }
    let mut expected = vec![0.0; y.len()];
    layer.naive::<f64>(batch, time)?.infer(&wide_inputs, &mut expected)?;
    println!("relative error of y against float64: {:.1e}", relative_rms(&y, &expected));
    let norm = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>().sqrt();
    println!("‖y‖ = {:.3}, ‖d(q, k, v)‖ = {:.3}", norm(&y), norm(&dqkv));
    gradients.iter().for_each(|(aux, gradient)| println!("‖d {aux:?}‖ = {:.3}", norm(gradient)));
    Ok(())
}

/// A linear congruential generator of numbers between −1 and 1.
struct Random(u64);

impl Random {
    fn take(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }
}
