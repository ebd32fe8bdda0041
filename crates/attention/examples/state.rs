//! Recurrent states: a prompt in one call, then token by token; saving and loading; compressing a KV cache into a state.
//!
//! ```text
//! cargo run -p termwise-attention --example state
//! ```

use termwise_attention::{Error, FusedOptions, Inputs, Layer, Mode, Rope, State, StateKind, relative_rms};

const HEADS: usize = 2;
const DIM: usize = 16;
const WIDTH: usize = HEADS * DIM;

fn main() -> Result<(), Error> {
    let layer = |variant: &str| Layer::new(HEADS, HEADS, DIM).rope(Rope::new(DIM, 10_000.0, None)?).variant(variant);
    let taylor = layer("taylor=0..2")?;
    let (prompt, total) = (200, 232);
    let inputs: Vec<[f32; 3 * WIDTH]> =
        (0..total).map(|t| std::array::from_fn(|i| ((t * 31 + i * 17) % 101) as f32 / 101.0 - 0.5)).collect();
    let widths = taylor.widths();

    // The prompt in chunk mode, the rest token by token. The size of the state is constant.
    let mut state = taylor.state(1)?;
    let mut reader = taylor.fused_with(1, prompt, FusedOptions::default().mode(Mode::Chunk(None)).continues(StateKind::Auto))?;
    let mut y = vec![0.0; prompt * WIDTH];
    reader.extend(&mut state, &Inputs::packed(inputs[..prompt].as_flattened(), widths), &mut y)?;
    println!("{} positions in a state of {} bytes", state.position(0).unwrap_or(0), state.bytes());
    let from_prompt = steps(&mut state, &inputs[prompt..])?;
    println!("{} positions in a state of {} bytes", state.position(0).unwrap_or(0), state.bytes());

    // Token by token from the start gives the same outputs up to rounding. A saved and loaded state gives bit-identical outputs.
    let mut stepped = taylor.state(1)?;
    steps(&mut stepped, &inputs[..prompt])?;
    let path = std::env::temp_dir().join(format!("termwise-state-{}.safetensors", std::process::id()));
    stepped.save(&path)?;
    let loaded = State::load(&path, &taylor, 1, StateKind::Auto);
    let removed = std::fs::remove_file(&path);
    let (mut loaded, expected) = (loaded?, steps(&mut stepped, &inputs[prompt..])?);
    println!(
        "relative difference: {:.1e}; after saving and loading: {:.1e}",
        relative_rms(&from_prompt, &expected),
        relative_rms(&steps(&mut loaded, &inputs[prompt..])?, &expected)
    );
    if let Err(error) = removed {
        println!("{} could not be removed: {error}", path.display());
    }

    // Softmax stores all keys and values. Truncated at order 2, its cache becomes a state of constant size.
    let softmax = layer("softmax")?;
    let mut cache = softmax.state(1)?;
    steps(&mut cache, &inputs[..prompt])?;
    let (before, mut full_cache) = (cache.bytes(), cache.clone());
    cache.compress(&taylor)?;
    let (truncated, exact) = (steps(&mut cache, &inputs[prompt..])?, steps(&mut full_cache, &inputs[prompt..])?);
    println!(
        "KV cache of {before} bytes, state of {} bytes; truncation at order 2 changes y by {:.1e}",
        cache.bytes(),
        relative_rms(&truncated, &exact)
    );
    Ok(())
}

/// The outputs of a sequence, token by token.
fn steps(state: &mut State, inputs: &[[f32; 3 * WIDTH]]) -> Result<Vec<f32>, Error> {
    let mut all = Vec::new();
    for qkv in inputs {
        let mut y = [0.0; WIDTH];
        state.step(&Inputs::packed(qkv, [WIDTH; 3]), &mut y)?;
        all.extend(y);
    }
    Ok(all)
}
