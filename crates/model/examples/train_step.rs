//! A few steps of gradient descent on one batch: the loss of a tiny model decreases.
//!
//! ```text
//! cargo run --release -p termwise-model --example train_step
//! ```

use termwise_model::{Batch, Config, Model, Objective, Result, SessionOptions};

fn main() -> Result<()> {
    let text = r#"{"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "attention_variant": "taylor=0..4 norm=l2"}"#;
    let mut model = Model::fresh(Config::from_json_str(text, "tiny")?, 1)?;
    // Two rows of 12 tokens, and the token that follows each.
    let ids: Vec<u32> = (0..24).map(|i| i * 3 % 16).collect();
    let labels: Vec<i32> = ids.iter().map(|&id| (id as i32 + 3) % 16).collect();
    let batch = Batch::new(&ids, &labels);
    let mut session = model.session(2, 12, SessionOptions::default())?;
    let mut grads = model.params.zeros_like()?;
    for step in 0..10 {
        grads.set_zero();
        let loss = session.loss_and_grad(&model.params, &batch, &mut grads)?;
        println!("step {step}: loss {:.4}", loss.mean());
        model.params.values_mut().iter_mut().zip(grads.values()).for_each(|(w, g)| *w -= 0.5 * g);
    }
    Ok(())
}
