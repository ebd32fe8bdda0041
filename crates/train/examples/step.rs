//! Times a training step (forward, backward, AdamW) and says where the time goes.
//!
//! ```text
//! cargo run --release -p termwise-train --example step -- [attention] [steps]
//! ```
//!
//! The shape is fixed: vocabulary 4096, width 256, 4 heads, 4 layers, MLP 512, batch 8 × 256, float32; threads as in RAYON_NUM_THREADS.

use std::time::Instant;

use termwise_llama::model::Stage;
use termwise_llama::{Batch, Config, Model, Objective, Options};
use termwise_train::{AdamW, AdamWConfig, clip, gradient_norm};

const ROWS: usize = 8;
const TIME: usize = 256;
const VOCABULARY: u32 = 4096;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let attention = arguments.next().unwrap_or_else(|| "softmax".into());
    let steps: usize = arguments.next().map_or(Ok(20), |text| text.parse())?;
    let config = format!(
        r#"{{"model_type": "llama", "vocab_size": {VOCABULARY}, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
            "num_attention_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": false,
            "attention_variant": "{attention}"}}"#
    );
    let mut model = Model::fresh(Config::from_json_str(&config, "the example's configuration")?, 1)?;
    let mut session = model.session(ROWS, TIME, Options::default())?;
    let mut grads = model.params.zeros_like();
    let mut optimizer = AdamW::new(&model.params, AdamWConfig::default());
    // Every token is a function of the one before it, so that there is something to learn.
    let ids: Vec<u32> = (0..(ROWS * TIME) as u32).map(|i| i * 2_654_435_761 % VOCABULARY).collect();
    let labels: Vec<i32> = ids.iter().map(|&id| (id * 5 + 3) as i32 % VOCABULARY as i32).collect();

    let (mut times, mut zero, mut norms, mut updates) = (Vec::new(), 0.0, 0.0, 0.0);
    for step in 0..steps + 3 {
        if step == 3 {
            // The first steps touch memory for the first time.
            (times, zero, norms, updates) = (Vec::new(), 0.0, 0.0, 0.0);
            session.clock.reset();
        }
        let start = Instant::now();
        grads.set_zero();
        let zeroed = Instant::now();
        let loss = session.loss_and_grad(&model.params, &Batch::new(&ids, &labels), &mut grads)?;
        let computed = Instant::now();
        let scale = clip(gradient_norm(&grads), 1.0);
        let measured = Instant::now();
        optimizer.step(&mut model.params, &grads, 1e-3, scale);
        let end = Instant::now();
        times.push((end - start).as_secs_f64() * 1e3);
        zero += (zeroed - start).as_secs_f64() * 1e3;
        norms += (measured - computed).as_secs_f64() * 1e3;
        updates += (end - measured).as_secs_f64() * 1e3;
        if step % 10 == 0 {
            println!("step {step:3}  loss {:.5}", loss.mean());
        }
    }
    times.sort_by(f64::total_cmp);
    println!("{attention}, {} threads: median {:.1} ms, fastest {:.1} ms a step", rayon::current_num_threads(), times[steps / 2], times[0]);
    println!("{:12} {:>9} {:>9}", "ms", "forward", "backward");
    for stage in Stage::ALL {
        let (forward, backward) = session.clock.spent(stage);
        let each = |time: std::time::Duration| time.as_secs_f64() * 1e3 / steps as f64;
        println!("{:12} {:9.2} {:9.2}", format!("{stage:?}"), each(forward), each(backward));
    }
    let each = |total: f64| total / steps as f64;
    println!("gradients to zero {:.2}, their norm {:.2}, AdamW {:.2}", each(zero), each(norms), each(updates));
    Ok(())
}
