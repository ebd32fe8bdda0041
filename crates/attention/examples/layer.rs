//! One attention layer with gradients, compared with the naive computation in float64.
//!
//! ```text
//! cargo run --example layer -- "taylor=0..4 norm=l2"
//! ```

use termwise_attention::{Attention, Error, Extras, Grads, Inputs, Layer, Rope, relative_rms};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 16;

fn main() -> Result<(), Error> {
    let text = std::env::args().nth(1).unwrap_or_else(|| "taylor=0..4 norm=l2 out".into());
    let (batch, time) = (2, 100);

    // A layer is a value: checked and planned here, once, for every engine.
    let layer = Layer::new(HEADS, KV_HEADS, DIM).rope(Rope::new(DIM, 10_000.0, None)?).variant(text.as_str())?;
    println!("{}", layer.heads()[0].formula());

    // q, k and v side by side, as one matrix product leaves them; gates and parameters as the layer asks for them.
    let mut numbers = Numbers(1);
    let widths = layer.widths();
    let qkv = numbers.take(batch * time * widths.iter().sum::<usize>());
    let values: Vec<_> = layer.extras().iter().map(|spec| (spec.extra, numbers.take(spec.values(batch * time)))).collect();
    for spec in layer.extras() {
        println!("reads {:?} ({}), {} values", spec.extra, spec.name, spec.values(batch * time));
    }
    let mut extras = Extras::default();
    values.iter().for_each(|(extra, values)| extras.set(*extra, &values[..]));
    let inputs = Inputs::packed(&qkv, widths).extras(extras);

    // Forward hands out what backward needs.
    let mut attention = layer.fused(batch, time)?;
    let mut y = vec![0.0; batch * time * HEADS * DIM];
    let saved = attention.forward(&inputs, &mut y)?;
    if let Some(at) = saved.report().nonpositive {
        println!("the denominator of row {}, head {}, position {} is {}", at.row, at.head, at.position, at.value);
    }
    let dy = numbers.take(y.len());
    let mut dqkv = vec![0.0; qkv.len()];
    let mut gradients: Vec<_> = values.iter().map(|(extra, values)| (*extra, vec![0.0; values.len()])).collect();
    let mut grads = Grads::packed(&mut dqkv, widths);
    for (extra, gradient) in &mut gradients {
        grads = grads.with(*extra, gradient);
    }
    attention.backward(&inputs, &saved, &dy, &mut grads)?;

    // The naive engine has the same signature.
    let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let (wide_qkv, wide_values) = (wide(&qkv), values.iter().map(|(extra, values)| (*extra, wide(values))).collect::<Vec<_>>());
    let mut wide_inputs = Inputs::packed(&wide_qkv, widths);
    for (extra, values) in &wide_values {
        wide_inputs = wide_inputs.with(*extra, values);
    }
    let mut expected = vec![0.0; y.len()];
    layer.naive::<f64>(batch, time)?.infer(&wide_inputs, &mut expected)?;
    println!("relative error of y against float64: {:.1e}", relative_rms(&y, &expected));
    let size = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>().sqrt();
    println!("‖y‖ = {:.3}, ‖d(q, k, v)‖ = {:.3}", size(&y), size(&dqkv));
    gradients.iter().for_each(|(extra, gradient)| println!("‖d {extra:?}‖ = {:.3}", size(gradient)));
    Ok(())
}

/// Numbers between −1 and 1 that are the same everywhere.
struct Numbers(u64);

impl Numbers {
    fn take(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }
}
