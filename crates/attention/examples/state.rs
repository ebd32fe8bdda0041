//! A state carried over: a prompt read at once, tokens one by one, a file in between, and a cache compressed into a state.
//!
//! ```text
//! cargo run --example state
//! ```

use termwise_attention::{Error, FusedOptions, Inputs, Layer, Memory, Mode, Rope, State, relative_rms};

const HEADS: usize = 2;
const DIM: usize = 16;
const WIDTH: usize = HEADS * DIM;

fn main() -> Result<(), Error> {
    let layer = |text: &str| Layer::new(HEADS, HEADS, DIM).rope(Rope::new(DIM, 10_000.0, None)?).variant(text);
    let taylor = layer("taylor=0..2")?;
    let (prompt, total) = (200, 232);
    let inputs: Vec<[f32; 3 * WIDTH]> =
        (0..total).map(|t| std::array::from_fn(|i| ((t * 31 + i * 17) % 101) as f32 / 101.0 - 0.5)).collect();
    let widths = taylor.widths();

    // The prompt at once, in chunks; the rest token by token. The state stays as large as it is.
    let mut state = taylor.state(1)?;
    let mut reader = taylor.fused_with(1, prompt, FusedOptions::default().mode(Mode::Chunk(None)).continues(Memory::Natural))?;
    let mut y = vec![0.0; prompt * WIDTH];
    reader.extend(&mut state, &Inputs::packed(inputs[..prompt].as_flattened(), widths), &mut y)?;
    println!("{:?} positions in a state of {} bytes", state.position(0), state.bytes());
    let from_prompt = steps(&mut state, &inputs[prompt..])?;
    println!("{:?} positions in a state of {} bytes", state.position(0), state.bytes());

    // One by one from the start gives the same, up to rounding; saved and loaded in between, the very same.
    let mut one_by_one = taylor.state(1)?;
    steps(&mut one_by_one, &inputs[..prompt])?;
    let path = std::env::temp_dir().join(format!("termwise-state-{}.safetensors", std::process::id()));
    one_by_one.save(&path)?;
    let loaded = State::load(&path, &taylor, 1, Memory::Natural);
    let removed = std::fs::remove_file(&path);
    let (mut loaded, expected) = (loaded?, steps(&mut one_by_one, &inputs[prompt..])?);
    println!(
        "relative difference: {:.1e}; after a file: {:.1e}",
        relative_rms(&from_prompt, &expected),
        relative_rms(&steps(&mut loaded, &inputs[prompt..])?, &expected)
    );
    if let Err(error) = removed {
        println!("{} could not be removed: {error}", path.display());
    }

    // Softmax keeps all keys and values. Cut at order 2, its cache becomes a state of constant size.
    let softmax = layer("softmax")?;
    let mut cache = softmax.state(1)?;
    steps(&mut cache, &inputs[..prompt])?;
    let (before, mut whole) = (cache.bytes(), cache.clone());
    cache.compress(&taylor)?;
    let (cut, exact) = (steps(&mut cache, &inputs[prompt..])?, steps(&mut whole, &inputs[prompt..])?);
    println!("cache of {before} bytes, state of {}; the cut at order 2 changes y by {:.1e}", cache.bytes(), relative_rms(&cut, &exact));
    Ok(())
}

/// The outputs of single tokens.
fn steps(state: &mut State, inputs: &[[f32; 3 * WIDTH]]) -> Result<Vec<f32>, Error> {
    let mut all = Vec::new();
    for qkv in inputs {
        let mut y = [0.0; WIDTH];
        state.step(&Inputs::packed(qkv, [WIDTH; 3]), &mut y)?;
        all.extend(y);
    }
    Ok(all)
}
