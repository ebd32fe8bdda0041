//! Saved states, caches compressed into recurrent states, and the error bound of truncated softmax.

use std::path::PathBuf;

use safetensors::SafeTensors;
use termwise_attention::{Error, Shape, State, StateKind, Truncation, Variant, relative_rms};
use termwise_base::files::with_metadata;

use crate::support::{Case, Name, Rng, layer, planned, same_isa, shape, state_of};

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("termwise-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder can be made");
    folder
}

/// Position t of every row as a case with one position.
fn token(case: &Case<f32>, t: usize) -> Case<f32> {
    let Shape { batch, time, heads, e, .. } = case.shape;
    let mut one = case.clone();
    one.shape.time = 1;
    for (name, x) in &mut one.tensors {
        if !matches!(name, Name::AuxTensor(aux) if !aux.is_gate_logits()) {
            let width = x.len() / (batch * time);
            *x = (0..batch).flat_map(|b| x[(b * time + t) * width..][..width].to_vec()).collect();
        }
    }
    one.dy = vec![0.0; batch * heads * e];
    one
}

fn step(case: &Case<f32>, state: &mut State, t: usize) -> Vec<f32> {
    let mut y = vec![f32::NAN; case.shape.batch * case.shape.heads * case.shape.e];
    state.step(&token(case, t).inputs(), &mut y).unwrap_or_else(|error| panic!("{case}: {error}"));
    y
}

const TEXTS: [&str; 15] = [
    "taylor=0..3 over=sum",
    "taylor=0..2 over=length in out=cumulative decay=softplus conv=3 norm=layer",
    "softmax",
    "exp clamp=5 over=length in decay=linear conv=4",
    "feature=elu scale=1 over=sum post",
    "exp over=position norm=rms",
    "feature=identity over=none write=delta,2 decay=mamba qk_norm=l2 conv=2 norm=rms",
    "exp over=none write=delta,scale=0.3 qk_norm=l2 decay=softplus",
    "power=2 over=none write=delta,scale=0.8 qk_norm=l2 decay=mamba,channel conv=2",
    "exp over=sum decay=mamba,channel",
    "exp window=3 sinks=1 decay=softplus in",
    "exp window=3 decay=mamba,channel",
    "feature=elu window=2 sinks=2 far(taylor=0..2 dim=2) over=sum",
    "exp window=2 far(taylor=0..2 dim=1) decay=softplus",
    "exp window=2 sinks=1 bits=8",
];

#[test]
fn loaded_states_are_bit_identical_to_saved_states() {
    let _isa = same_isa();
    let (folder, mut rng) = (folder("round"), Rng(51));
    let shape = shape(2, 9, 4, 2, 6, 5);
    for text in TEXTS {
        let heads = layer(text, &shape);
        let case = Case::<f32>::random(&heads, shape, None, 1.0, &mut rng);
        for memory in [StateKind::Auto, StateKind::Cache] {
            for saved_at in [0, 4] {
                let mut state = state_of(&heads, &shape, memory).expect("possible");
                (0..saved_at).for_each(|t| drop(step(&case, &mut state, t)));
                let path = folder.join("state.safetensors");
                state.save(&path).expect("a file can be written");
                let mut loaded = State::load(&path, &planned(&heads, &shape).expect("possible"), 2, memory)
                    .unwrap_or_else(|error| panic!("{text}: {error}"));
                assert_eq!(loaded.position(1), Some(saved_at));
                for t in saved_at..shape.time {
                    let (a, b) = (step(&case, &mut state, t), step(&case, &mut loaded, t));
                    assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()), "{text} {memory:?} at {t}");
                    assert_eq!(state.largest_score(1, 3), loaded.largest_score(1, 3));
                }
                let again = folder.join("again.safetensors");
                state.save(&path).and_then(|()| loaded.save(&again)).expect("files can be written");
                assert!(std::fs::read(&path).ok() == std::fs::read(&again).ok(), "{text} {memory:?}: equal states give equal bytes");
                assert!(!folder.join(".state.safetensors.part").exists());
            }
        }
    }
    std::fs::remove_dir_all(folder).expect("the folder can be removed");
}

/// Earlier versions removed keys from the cache of a window in whole blocks.
#[test]
fn a_file_with_more_keys_than_the_window_restores_the_window() {
    let _isa = same_isa();
    let (folder, shape) = (folder("more"), shape(2, 9, 4, 2, 6, 5));
    let path = folder.join("state.safetensors");
    for (all, windowed) in [
        ("exp decay=softplus in", "exp window=3 sinks=1 decay=softplus in"),
        ("exp decay=mamba,channel", "exp window=4 decay=mamba,channel"),
        ("feature=elu over=length decay=sigmoid clamp=3", "feature=elu over=length decay=sigmoid clamp=3 window=2"),
    ] {
        let (all, heads) = (layer(all, &shape), layer(windowed, &shape));
        let case = Case::<f32>::random(&heads, shape, None, 1.0, &mut Rng(54));
        let mut state = state_of(&heads, &shape, StateKind::Auto).expect("possible");
        let mut whole = state_of(&all, &shape, StateKind::Cache).expect("possible");
        for t in 0..6 {
            step(&case, &mut state, t);
            step(&Case { heads: all.clone(), ..case.clone() }, &mut whole, t);
        }
        state.save(&path).expect("a file can be written");
        let (_, header) = SafeTensors::read_metadata(&std::fs::read(&path).expect("readable")).expect("a header");
        let metadata = header.metadata().clone().unwrap_or_default().into_iter().collect();
        let bytes = State::to_bytes(&[whole]).expect("possible");
        let tensors: Vec<_> = SafeTensors::deserialize(&bytes).expect("tensors").tensors();
        let file = with_metadata(&safetensors::serialize(tensors, None).expect("possible"), &metadata);
        std::fs::write(&path, file).expect("a file can be written");
        let mut loaded = State::load(&path, &planned(&heads, &shape).expect("possible"), 2, StateKind::Auto)
            .unwrap_or_else(|error| panic!("{windowed}: {error}"));
        for t in 6..shape.time {
            let (a, b) = (step(&case, &mut state, t), step(&case, &mut loaded, t));
            assert_eq!(a, b, "{windowed} at {t}");
        }
    }
    std::fs::remove_dir_all(folder).expect("the folder can be removed");
}

#[test]
fn files_of_another_variant_or_size_are_rejected_and_both_are_named() {
    let _isa = same_isa();
    let folder = folder("refuse");
    let path = folder.join("state.safetensors");
    let shape = shape(1, 5, 2, 1, 4, 5);
    let heads = layer("taylor=0..2", &shape);
    let case = Case::<f32>::random(&heads, shape, None, 1.0, &mut Rng(52));
    let mut state = state_of(&heads, &shape, StateKind::Auto).expect("possible");
    step(&case, &mut state, 0);
    state.save(&path).expect("a file can be written");
    let refusal =
        |heads: &[Variant], shape: Shape, memory| match State::load(&path, &planned(heads, &shape).expect("possible"), shape.batch, memory)
        {
            Err(Error::File { problem, .. }) => problem,
            other => panic!("{:?}", other.map(|_| ())),
        };
    let names = |problem: String, words: [&str; 2]| assert!(words.iter().all(|word| problem.contains(word)), "{problem}");
    names(refusal(&layer("taylor=0..3", &shape), shape, StateKind::Auto), ["taylor=0..2 over=sum", "taylor=0..3 over=sum"]);
    names(refusal(&heads, Shape { d: 6, ..shape }, StateKind::Auto), ["1 2 1 4 5", "1 2 1 6 5"]);
    names(refusal(&heads, Shape { batch: 2, ..shape }, StateKind::Auto), ["1 2 1 4 5", "2 2 1 4 5"]);
    names(refusal(&heads, shape, StateKind::Cache), ["natural", "cache"]);
    let planned = planned(&heads, &shape).expect("possible");
    let two = State::load_layers(&path, &[(&planned, StateKind::Auto); 2], 1);
    names(two.map(|_| ()).expect_err("one layer is not two").to_string(), ["`1`", "`2`"]);

    let bytes = std::fs::read(&path).expect("readable");
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let mut spoilt: Vec<Vec<u8>> = [0, 7, 8, header - 1, header, bytes.len() - 1].map(|n| bytes[..n].to_vec()).to_vec();
    for (from, to) in [
        (".positions\"", ".positionz\""),
        ("positions\":\"1\"", "positions\":\"9\""),
        ("F64", "F32"),
        ("[15,5]", "[5,15]"),
        (".key_norm", ".key_nork"),
    ] {
        let text = String::from_utf8_lossy(&bytes[..header]).into_owned();
        let changed = text.replace(from, to);
        let mut file = changed.into_bytes();
        if file.len() == header {
            file.extend(&bytes[header..]);
            spoilt.push(file);
        }
    }
    let mut longer = bytes.clone();
    longer[0..8].copy_from_slice(&u64::MAX.to_le_bytes());
    spoilt.push(longer);
    for (i, file) in spoilt.iter().enumerate() {
        std::fs::write(&path, file).expect("a file can be written");
        match State::load(&path, &planned, 1, StateKind::Auto) {
            Err(Error::File { .. }) => {}
            // Another position gives another valid state.
            Ok(state) if file.len() == bytes.len() => assert_eq!(state.position(0), Some(9), "file {i}"),
            other => panic!("file {i}: {:?}", other.map(|_| ())),
        }
    }
    assert!(matches!(State::load(&folder.join("nothing"), &planned, 1, StateKind::Auto), Err(Error::File { .. })));
    assert!(matches!(state.save(&folder.join("no/such/folder")), Err(Error::File { .. })));

    // The file of a cache with more positions than rows.
    let cached = state_of(&heads, &shape, StateKind::Cache).expect("possible");
    cached.save(&path).expect("a file can be written");
    let bytes = std::fs::read(&path).expect("readable");
    let at = bytes.windows(13).position(|w| w == b"positions\":\"0").expect("positions are there") + 12;
    let mut claim = bytes.clone();
    claim[at] = b'7';
    std::fs::write(&path, &claim).expect("a file can be written");
    names(State::load(&path, &planned, 1, StateKind::Cache).map(|_| ()).expect_err("no rows").to_string(), ["[0, 4]", "[7, 4]"]);
    std::fs::remove_dir_all(folder).expect("the folder can be removed");
}

#[test]
fn a_compressed_cache_equals_the_state_after_all_steps() {
    let _isa = same_isa();
    let mut rng = Rng(53);
    let shape = shape(2, 150, 4, 2, 4, 6);
    for (before, after) in [
        ("softmax", "taylor=0..4"),
        ("exp over=none norm=l2 in decay=softplus", "taylor=0..3 over=sum in decay=softplus"),
        ("exp clamp=5 over=length conv=3 out=cumulative", "taylor=0..2 over=length conv=3 out=cumulative"),
        ("exp over=position in", "power=2 scale=0.3 over=position in"),
        ("taylor=0..2", "taylor=0..2 norm=rms"),
        ("power=2 write=delta over=none qk_norm=l2", "power=2 write=delta over=none qk_norm=l2 norm=rms"),
    ] {
        let (old, new) = (layer(before, &shape), layer(after, &shape));
        let case = Case::<f32>::random(&new, shape, None, 1.0, &mut rng);
        let mut cache = state_of(&old, &shape, StateKind::Cache).expect("possible");
        let mut state = state_of(&new, &shape, StateKind::Auto).expect("possible");
        for t in 0..140 {
            step(&case, &mut cache, t);
            step(&case, &mut state, t);
        }
        cache.compress(&planned(&new, &shape).expect("possible")).unwrap_or_else(|error| panic!("{before}: {error}"));
        assert_eq!(cache.bytes(), state.bytes());
        assert_eq!(cache.position(1), Some(140));
        assert!(cache.is_constant());
        for t in 140..150 {
            let error = relative_rms(&step(&case, &mut cache, t), &step(&case, &mut state, t));
            assert!(error < 1e-5, "{before} to {after} at {t}: {error:e}");
        }
    }
    let refused = |before: &str, after: &str| {
        state_of(&layer(before, &shape), &shape, StateKind::Cache)
            .expect("possible")
            .compress(&planned(&layer(after, &shape), &shape).expect("possible"))
    };
    assert!(refused("softmax", "softmax").is_err());
    assert!(refused("softmax", "taylor=0..2 rope=off").is_err_and(|error| error.to_string().contains("exp over=sum")));
    assert!(
        refused("exp write=delta over=none", "taylor=0..2 write=delta over=none").is_err()
            && refused("power=1 over=none", "power=1 write=delta over=none").is_err()
    );
    assert!(refused("softmax", "taylor=0..2 in").is_err() && refused("softmax", "feature=relu").is_err());
    let mut moments = state_of(&layer("taylor=0..2", &shape), &shape, StateKind::Auto).expect("possible");
    assert!(moments.compress(&planned(&layer("taylor=0..3", &shape), &shape).expect("possible")).is_err());
    assert_eq!(moments.heads(), layer("taylor=0..2", &shape), "a rejection changes nothing");
}

/// y of softmax and of softmax truncated at order p in float64, with the largest |score| and the largest ‖v‖.
fn cut_errors(p: usize, spread: f64, rng: &mut Rng) -> (f64, f64) {
    let shape = shape(1, 40, 1, 1, 4, 6);
    let softmax: Variant = "softmax rope=off".parse().expect("a variant");
    let case = Case::<f64>::random(std::slice::from_ref(&softmax), shape, None, spread, rng);
    let mut cut = case.clone();
    cut.heads = vec![softmax.truncated(p).expect("possible")];
    let y = case.forward(&mut case.naive()).0;
    let y_cut = cut.forward(&mut cut.naive()).0;
    let rows = |name, n: usize| case.get(name).chunks_exact(n).map(|x| x.to_vec()).collect::<Vec<_>>();
    let (q, k, v) = (rows(Name::Q, 4), rows(Name::K, 4), rows(Name::V, 6));
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let pairs = (0..40).flat_map(|t| (0..=t).map(move |s| (t, s)));
    let largest = pairs.map(|(t, s)| q[t].iter().zip(&k[s]).map(|(q, k)| q * k).sum::<f64>().abs() / 2.0).fold(0.0, f64::max);
    let error = y.chunks_exact(6).zip(y_cut.chunks_exact(6)).map(|(a, b)| norm(&a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<_>>()));
    let longest = v.iter().map(|v| norm(v)).fold(0.0, f64::max);
    (error.fold(0.0, f64::max) / longest, Truncation::new(p, largest).expect("even").of_sum())
}

#[test]
fn the_truncation_bound_is_valid_and_tight() {
    let _isa = same_isa();
    let mut rng = Rng(54);
    let mut closest: f64 = 0.0;
    for p in [0, 2, 4, 8, 12] {
        for spread in [0.1, 0.5, 1.0, 2.0, 4.0] {
            for _ in 0..5 {
                let (error, bound) = cut_errors(p, spread, &mut rng);
                assert!(error <= bound, "order {p}, spread {spread}: error {error:e} above the bound {bound:e}");
                closest = closest.max(error / bound);
            }
        }
    }
    assert!(closest > 0.1, "the bound is never near: at best the error is {closest:e} of it");
    // Two keys at ±r with weights that make ρ̄ = √(ab) reach it.
    let (p, r) = (2usize, 1.5f64);
    let cut = Truncation::new(p, r).expect("even");
    let (a, b) = (1.0 - cut.missing, 1.0 + cut.excess);
    let share = (b - (a * b).sqrt()) / (b - a);
    let mean = share * a + (1.0 - share) * b;
    let reached = 2.0 * share * (1.0 - a / mean);
    assert!((reached / cut.of_sum() - 1.0).abs() < 1e-9);
}

#[test]
fn states_record_the_largest_score() {
    let _isa = same_isa();
    let shape = shape(1, 30, 2, 1, 4, 5);
    let mut rng = Rng(55);
    for text in ["softmax", "exp rope=off scale=-2", "taylor=0..2 scale=-0.7", "taylor=0..2 rope=off conv=2", "feature=relu"] {
        let heads = layer(text, &shape);
        let case = Case::<f32>::random(&heads, shape, None, 1.0, &mut rng);
        let mut state = state_of(&heads, &shape, StateKind::Auto).expect("possible");
        let mut cache = state_of(&heads, &shape, StateKind::Cache).expect("possible");
        for t in 0..30 {
            step(&case, &mut state, t);
            step(&case, &mut cache, t);
        }
        for head in 0..2 {
            let (bound, largest) = (state.largest_score(0, head).expect("a head"), cache.largest_score(0, head).expect("a head"));
            assert!(largest > 0.0 && bound >= largest * (1.0 - 1e-6) && bound < 40.0 * largest, "{text}: {bound} and {largest}");
            if text == "exp rope=off scale=-2" {
                let row = |name, t: usize, width: usize, at: usize| case.get(name)[t * width + at..][..4].to_vec();
                let score =
                    |t, s| -2.0 * row(Name::Q, t, 8, 4 * head).iter().zip(row(Name::K, s, 4, 0)).map(|(q, k)| (q * k) as f64).sum::<f64>();
                let expected = (0..30).flat_map(|t| (0..=t).map(move |s| (t, s))).map(|(t, s)| score(t, s).abs()).fold(0.0, f64::max);
                assert!((largest / expected - 1.0).abs() < 1e-6 && bound == largest, "{largest}, by hand {expected}");
            }
        }
    }
    // One key and one query against each other: the only score is negative.
    let opposed = layer("exp rope=off scale=1", &shape);
    let mut case = Case::<f32>::random(&opposed, shape, None, 1.0, &mut rng);
    case.get_mut(Name::Q).fill(1.0);
    case.get_mut(Name::K).fill(-3.0);
    let mut state = state_of(&opposed, &shape, StateKind::Auto).expect("possible");
    step(&case, &mut state, 0);
    assert_eq!(state.largest_score(0, 1), Some(12.0));
}
