//! Edge cases of inputs and sizes: NaN and infinity, very large windows, many query heads per KV head, states of another layer.

use termwise_attention::{Attention, Error, FusedOptions, Inputs, Layer, Mode, Rope, RopeScaling, State, StateKind};

use crate::support::same_isa;

/// Numbers between −0.5 and 0.5.
fn numbers(n: usize, salt: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + salt * 104_729 + 13) % 1009) as f32 / 1009.0 - 0.5).collect()
}

/// q, k and v of T positions.
fn inputs(layer: &Layer, time: usize) -> [Vec<f32>; 3] {
    let mut salt = 0;
    layer.widths().map(|width| {
        salt += 1;
        numbers(time * width, salt)
    })
}

/// y of every position, computed token by token.
fn stepped(layer: &Layer, [q, k, v]: &[Vec<f32>; 3], time: usize) -> Result<(State, Vec<f32>), Error> {
    let (mut state, [a, b, c]) = (layer.state(1)?, layer.widths());
    let mut y = vec![0.0; q.len()];
    let width = y.len() / time;
    for t in 0..time {
        let row = Inputs::new(&q[t * a..][..a], &k[t * b..][..b], &v[t * c..][..c]);
        state.step(&row, &mut y[t * width..][..width])?;
    }
    Ok((state, y))
}

/// y of all positions in one call.
fn at_once(layer: &Layer, [q, k, v]: &[Vec<f32>; 3], time: usize, mode: Mode) -> Result<Vec<f32>, Error> {
    let mut y = vec![0.0; q.len()];
    layer.fused_with(1, time, FusedOptions::default().mode(mode))?.infer(&Inputs::new(q, k, v), &mut y)?;
    Ok(y)
}

fn close(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len());
    let most = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(most < 1e-4, "{what}: {most:.1e}");
}

#[test]
fn a_cache_with_a_soft_cap_cannot_be_compressed() -> Result<(), Error> {
    let _isa = same_isa();
    let layer = Layer::new(2, 1, 4).variant("softmax rope=off")?;
    let (mut state, _) = stepped(&layer, &inputs(&layer, 5), 5)?;
    for text in ["taylor=0..2 cap=5 rope=off", "power=2 cap=3 rope=off", "taylor=0..2 clamp=5 rope=off"] {
        let error = state.compress(&layer.with_heads([text; 2])?).expect_err(text).to_string();
        assert!(error.contains("no finite feature map"), "{error}");
        assert_eq!((state.position(0), state.heads()), (Some(5), layer.heads()), "the state is unchanged");
    }
    state.compress(&layer.with_heads(["taylor=0..2 rope=off"; 2])?)
}

#[test]
fn many_query_heads_share_one_windowed_cache() -> Result<(), Error> {
    let _isa = same_isa();
    for text in ["exp window=4 far(taylor=0..1) rope=off", "exp window=4 rope=off", "exp window=4 bits=8 rope=off", "softmax rope=off"] {
        let layer = Layer::new(300, 1, 8).variant(text)?;
        if !layer.aux_specs().is_empty() {
            continue;
        }
        let all = inputs(&layer, 9);
        close(&stepped(&layer, &all, 9)?.1, &at_once(&layer, &all, 9, Mode::Parallel)?, text);
    }
    Ok(())
}

#[test]
fn memory_of_large_windows_grows_with_the_stored_keys() -> Result<(), Error> {
    let _isa = same_isa();
    let softmax = Layer::new(2, 1, 4).variant("softmax rope=off")?;
    let all = inputs(&softmax, 300);
    let expected = at_once(&softmax, &all, 300, Mode::Parallel)?;
    for text in [
        "exp window=3 chosen=18446744073709551615 rope=off",
        "exp window=100000000000 chosen=8 rope=off",
        "exp window=18446744073709551615 sinks=18446744073709551615 chosen=18446744073709551615 rope=off",
        "exp window=262144 rope=off",
        "exp window=18446744073709551615 rope=off",
    ] {
        let layer = Layer::new(2, 1, 4).variant(text)?;
        close(&at_once(&layer, &all, 300, Mode::Auto)?, &expected, text);
        let (mut state, y) = stepped(&layer, &all, 300)?;
        close(&y, &expected, text);
        // 300 keys in blocks of 128: keys and values padded to 16, and the accumulated attention.
        assert!(state.bytes() < 384 * (4 + 16 + 1) * 4 + 4096, "{text}: {} bytes", state.bytes());
        assert!(layer.heads()[0].window_bytes(4, 4).is_some_and(|most| most > state.bytes()), "{text}");
        // Memory kept by `clear` is reused for shorter sequences.
        state.clear();
        let mut y = vec![0.0; 8];
        state.step(&Inputs::new(&all[0][..8], &all[1][..4], &all[2][..4]), &mut y)?;
        close(&y, &expected[..8], text);
    }
    Ok(())
}

#[test]
fn nan_scores_are_kept_in_the_largest_score() -> Result<(), Error> {
    let _isa = same_isa();
    let rope = Rope::new(4, 100.0, None)?;
    for text in ["softmax", "softmax window=3", "exp window=3 far(taylor=0..2)", "taylor=0..2", "exp window=2 chosen=2"] {
        let layer = Layer::new(2, 1, 4).rope(rope.clone()).variant(text)?;
        let mut all = inputs(&layer, 40);
        assert!(stepped(&layer, &all, 40)?.0.largest_score(0, 0).is_some_and(f64::is_finite), "{text}");
        all[1][4 * 5] = f32::NAN;
        let (state, _) = stepped(&layer, &all, 40)?;
        let bounds = [0, 1].map(|head| state.largest_score(0, head).unwrap_or(0.0));
        assert!(bounds.iter().all(|bound| bound.is_nan()), "{text}, stepped: {bounds:?}");
        let mut state = layer.state(1)?;
        let mut engine = layer.fused_with(1, 20, FusedOptions::default().continues(StateKind::Auto))?;
        for half in 0..2 {
            let mut y = vec![0.0; 20 * 8];
            let of = |x: &[f32]| x[half * x.len() / 2..][..x.len() / 2].to_vec();
            let [q, k, v] = all.each_ref().map(|x| of(x));
            engine.extend(&mut state, &Inputs::new(&q, &k, &v), &mut y)?;
            let bounds = [0, 1].map(|head| state.largest_score(0, head).unwrap_or(0.0));
            assert!(bounds.iter().all(|bound| bound.is_nan()), "{text}, extended by part {half}: {bounds:?}");
        }
    }
    Ok(())
}

#[test]
fn nonfinite_values_change_only_the_rows_that_attend_to_them() -> Result<(), Error> {
    let _isa = same_isa();
    let time = 300;
    for (text, seen) in [
        ("softmax rope=off", usize::MAX),
        ("taylor=0..2 rope=off", usize::MAX),
        ("exp window=5 rope=off", 5),
        ("exp window=150 sinks=2 rope=off", 150),
        ("exp window=5 decay=linear rope=off", 5),
    ] {
        let layer = Layer::new(2, 1, 4).variant(text)?;
        if !layer.aux_specs().is_empty() {
            continue;
        }
        let clean = inputs(&layer, time);
        for mode in ["parallel", "chunk=16", "auto"] {
            let mode: Mode = mode.parse()?;
            if matches!(mode, Mode::Chunk(_)) && !text.starts_with("taylor") {
                continue;
            }
            let expected = at_once(&layer, &clean, time, mode)?;
            for at in [0, 35, 127, 128, 202, 299] {
                for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                    let mut all = clean.clone();
                    all[2][4 * at + 1] = value;
                    let sinks = if text.contains("sinks") { 2 } else { 0 };
                    let found = at_once(&layer, &all, time, mode)?;
                    for (t, (found, expected)) in found.chunks(8).zip(expected.chunks(8)).enumerate() {
                        let sees = t >= at && (at < sinks || t - at < seen);
                        let what = format!("{text}, {mode}: row {t}, {value} at {at}");
                        // The other columns of the values are unchanged.
                        assert_eq!((found[0].to_bits(), found[2].to_bits()), (expected[0].to_bits(), expected[2].to_bits()), "{what}");
                        assert_eq!(found[1].is_finite() && found[5].is_finite(), !sees, "{what}");
                        assert!(sees || found[1].to_bits() == expected[1].to_bits(), "{what}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn states_of_another_rope_are_rejected() -> Result<(), Error> {
    let _isa = same_isa();
    let path = std::env::temp_dir().join(format!("termwise-{}-angles.safetensors", std::process::id()));
    let layer = |rope: Rope, text: &str| Layer::new(2, 1, 4).rope(rope).variant(text);
    let rope = |theta: f64, scaling: Option<RopeScaling>| Rope::new(4, theta, scaling.as_ref());
    for text in ["softmax", "taylor=0..2", "softmax window=3"] {
        let own = layer(rope(10_000.0, None)?, text)?;
        let (state, _) = stepped(&own, &inputs(&own, 6), 6)?;
        state.save(&path)?;
        State::load(&path, &own, 1, StateKind::Auto)?;
        for (other, word) in [
            (rope(500_000.0, None)?, "rotary frequency 1 of layer 0 is 0.01, expected 0.00141"),
            (rope(10_000.0, Some(RopeScaling::Linear { factor: 4.0 }))?, "rotary frequency 0 of layer 0 is 1, expected 0.25"),
        ] {
            let error = State::load(&path, &layer(other, text)?, 1, StateKind::Auto).expect_err("other angles").to_string();
            assert!(error.contains(word) && error.contains("theta"), "{error}");
        }
        // Files of earlier versions do not record the frequencies.
        let bytes = std::fs::read(&path).expect("a file");
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).expect("a header");
        let mut metadata = header.metadata().clone().expect("metadata");
        metadata.remove("layer.0.rope").expect("recorded");
        let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
        std::fs::write(&path, safetensors::serialize(tensors.iter(), Some(metadata)).expect("bytes")).expect("written");
        let error = State::load(&path, &own, 1, StateKind::Auto).expect_err("no record").to_string();
        assert!(error.contains("earlier versions") && error.contains("save the state again"), "{error}");
    }
    // Without RoPE there are no frequencies to compare.
    let plain = |theta| layer(rope(theta, None)?, "softmax rope=off");
    let own = plain(100.0)?;
    stepped(&own, &inputs(&own, 6), 6)?.0.save(&path)?;
    State::load(&path, &plain(200.0)?, 1, StateKind::Auto)?;
    std::fs::remove_file(&path).expect("removed");
    Ok(())
}
