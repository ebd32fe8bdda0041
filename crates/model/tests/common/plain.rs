//! A plain float64 Llama, the reference of the float32 passes.

use termwise_attention::{Attention, AuxSource, AuxTensors, Inputs, Variant};
use termwise_model::Model;

/// y [M, N] = x Wᵀ
fn product(x: &[f64], w: &[f64], width: usize) -> Vec<f64> {
    let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(a, b)| a * b).sum::<f64>();
    x.chunks(width).flat_map(|x| w.chunks(width).map(move |w| dot(x, w))).collect()
}

fn norm(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    let row = |x: &[f64]| {
        let r = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + eps).sqrt();
        x.iter().zip(w).map(|(x, w)| x * r * w).collect::<Vec<_>>()
    };
    x.chunks(w.len()).flat_map(row).collect()
}

/// Logits [T, V] of a sequence, with the attention that `heads` gives each layer.
pub fn logits(model: &Model, heads: impl Fn(usize) -> Vec<Variant>, ids: &[u32]) -> Vec<f64> {
    let config = &model.config;
    let weight = |name: &str| model.params.get(name).expect(name).iter().map(|&x| x as f64).collect::<Vec<f64>>();
    let (c, i, d, t) = (config.hidden_size, config.intermediate_size, config.head_dim, ids.len());
    let queries = config.num_attention_heads * d;
    let embedding = weight("model.embed_tokens.weight");
    let mut x: Vec<f64> = ids.iter().flat_map(|&id| embedding[id as usize * c..][..c].to_vec()).collect();
    for layer in 0..config.num_hidden_layers {
        let at = |name: &str| weight(&format!("model.layers.{layer}.{name}"));
        let h = norm(&x, &at("input_layernorm.weight"), config.rms_norm_eps);
        let [q, k, v] = ["q", "k", "v"].map(|name| product(&h, &at(&format!("self_attn.{name}_proj.weight")), c));
        let planned = config.attention_layer(layer, &heads(layer)).expect("a layer");
        let mut values = Vec::new();
        for spec in planned.aux_specs() {
            let name = format!("self_attn.{}", spec.name);
            values.push((
                spec.aux,
                match &spec.source {
                    AuxSource::Parameter { .. } => at(&name),
                    AuxSource::Projection { outputs, bias } => {
                        let mut signal = product(&h, &at(&format!("{name}.weight")), c);
                        if *bias {
                            let bias = at(&format!("{name}.bias"));
                            signal.chunks_mut(*outputs).for_each(|row| row.iter_mut().zip(&bias).for_each(|(x, b)| *x += b));
                        }
                        signal
                    }
                },
            ));
        }
        let mut aux_tensors = AuxTensors::default();
        values.iter().for_each(|(aux, values)| aux_tensors.set(*aux, &values[..]));
        let mut y = vec![0.0; t * queries];
        let inputs = Inputs::new(&q, &k, &v).with_aux(aux_tensors);
        planned.naive::<f64>(1, t).expect("an attention").infer(&inputs, &mut y).expect("attention");
        let step = product(&y, &at("self_attn.o_proj.weight"), queries);
        x.iter_mut().zip(step).for_each(|(x, step)| *x += step);
        let h = norm(&x, &at("post_attention_layernorm.weight"), config.rms_norm_eps);
        let (gate, up) = (product(&h, &at("mlp.gate_proj.weight"), c), product(&h, &at("mlp.up_proj.weight"), c));
        let inner: Vec<f64> = gate.iter().zip(up).map(|(g, up)| g / (1.0 + (-g).exp()) * up).collect();
        let step = product(&inner, &at("mlp.down_proj.weight"), i);
        x.iter_mut().zip(step).for_each(|(x, step)| *x += step);
    }
    product(&norm(&x, &weight("model.norm.weight"), config.rms_norm_eps), &weight("lm_head.weight"), c)
}

/// The prompt and its greedy continuation, recomputing the whole sequence for each token.
pub fn greedy(model: &Model, heads: impl Fn(usize) -> Vec<Variant> + Copy, prompt: &[u32], total: usize) -> Vec<u32> {
    let mut ids = prompt.to_vec();
    while ids.len() < total {
        let all = logits(model, heads, &ids);
        ids.push(argmax(&all[all.len() - model.config.vocab_size..]));
    }
    ids
}

/// The first index of the largest value.
pub fn argmax<T: PartialOrd>(values: &[T]) -> u32 {
    (0..values.len()).fold(0, |best, i| if values[i] > values[best] { i } else { best }) as u32
}
