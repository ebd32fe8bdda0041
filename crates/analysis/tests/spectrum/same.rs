//! Results do not depend on threads, tiles, batches, or on how all rows are requested.

use serde_json::Value;
use termwise_analysis::spectrum::{Options, RowChoice, Spectrum, Tiles, measure_with};
use termwise_base::threads;
use termwise_train::collective::threads::team;

use crate::{all_rows, model, quoted, spectrum, texts};

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for attention in ["softmax", "gated_softmax_decay", "taylor=0..5 over=length"] {
        let model = model(&quoted(attention), 2, 0.5);
        let windows = texts(&[61, 40]);
        let of = |count: usize| {
            let pool = threads::pool(count).expect("threads");
            serde_json::to_string(&pool.install(|| spectrum(&model, &windows, &Options::default()))).expect("JSON")
        };
        let one = of(1);
        assert!([2, 3, 5].iter().all(|&count| of(count) == one), "{attention}");
    }
}

#[test]
fn any_number_of_ranks_gives_the_same_bits() {
    let model = model(&quoted("softmax"), 2, 0.5);
    // Long enough that each is a separate batch.
    let windows = texts(&[2100, 900, 2100, 33, 1200]);
    let options = Options { rows: RowChoice::Sampled(16), ..Options::default() };
    let json = |spectrum: Spectrum| serde_json::to_string(&Spectrum { timing: None, ..spectrum }).expect("JSON");
    let one = json(spectrum(&model, &windows, &options));
    for ranks in [2, 3, 8] {
        let team = team(ranks);
        let first = std::thread::scope(|scope| {
            let (model, windows, options) = (&model, &windows, &options);
            let mut threads = Vec::new();
            for rank in &team {
                threads.push(scope.spawn(move || measure_with(model, windows, options, rank, &mut |_| ()).expect("a spectrum")));
            }
            threads.into_iter().map(|thread| thread.join().expect("a rank")).collect::<Vec<_>>().swap_remove(0)
        });
        assert!(json(first) == one, "{ranks} ranks");
    }
}

/// All numbers of a JSON value, nulls as NaN.
fn numbers(value: &Value, into: &mut Vec<f64>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| numbers(value, into)),
        Value::Object(map) => map.values().for_each(|value| numbers(value, into)),
        Value::Number(number) => into.push(number.as_f64().unwrap_or(f64::NAN)),
        Value::Null => into.push(f64::NAN),
        _ => {}
    }
}

fn assert_close(a: &Spectrum, b: &Spectrum, what: &str) {
    let flat = |spectrum: &Spectrum| {
        let mut all = Vec::new();
        numbers(&serde_json::to_value(&spectrum.layers).expect("JSON"), &mut all);
        all
    };
    let (a, b) = (flat(a), flat(b));
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(&b) {
        assert!((a.is_nan() && b.is_nan()) || (a - b).abs() < 1e-11 * (1.0 + a.abs()), "{what}: {a} {b}");
    }
}

#[test]
fn tiles_of_any_size_give_the_same_numbers() {
    let model = model(&quoted("softmax"), 2, 0.5);
    let windows = texts(&[61, 64, 9]);
    let whole = spectrum(&model, &windows, &all_rows());
    for (rows, keys) in [(1, 8), (3, 24), (16, 1), (7, 64), (64, 256)] {
        let other = spectrum(&model, &windows, &Options { tiles: Tiles { rows, keys }, ..all_rows() });
        assert_close(&whole, &other, &format!("blocks of {rows}, tiles of {keys}"));
    }
}

#[test]
fn all_rows_can_be_requested_in_two_ways() {
    let model = model(&quoted("norm"), 2, 0.5);
    let windows = texts(&[50, 31]);
    let sampled = Options { rows: RowChoice::Sampled(50), ..Options::default() };
    assert_eq!(spectrum(&model, &windows, &all_rows()), spectrum(&model, &windows, &sampled));
}

#[test]
fn windows_are_independent() {
    // So many short windows that they run in several batches, the last one not full.
    let model = model(&quoted("softmax"), 2, 0.5);
    let one = texts(&[40]);
    let many: Vec<Vec<u32>> = (0..150).map(|_| one[0].clone()).collect();
    let (a, b) = (spectrum(&model, &one, &all_rows()), spectrum(&model, &many, &all_rows()));
    for (a, b) in a.layers.iter().zip(&b.layers).flat_map(|(a, b)| a.heads.iter().zip(&b.heads)) {
        assert_eq!(150 * a.pairs, b.pairs);
        let (a, b) = (a.cut.as_ref().expect("a series"), b.cut.as_ref().expect("a series"));
        for (a, b) in a.error.iter().flatten().zip(b.error.iter().flatten()) {
            assert!((a - b).abs() < 1e-6, "{a} {b}");
        }
    }
}

#[test]
fn the_json_reads_back() {
    let map = r#"{"default": "softmax", "layers": {"1": "linear_cosine"}}"#;
    let found = spectrum(&model(map, 2, 0.5), &texts(&[20]), &Options::default());
    let folder = tempfile::tempdir().expect("a folder");
    let page = termwise_report::write(&found, folder.path(), None).expect("files");
    assert!(std::fs::read_to_string(page).expect("a page").contains("Term spectrum"));
    for name in ["order-map", "error", "magnitude", "magnitude-map-all", "magnitude-map-positive", "magnitude-map-negative"] {
        for ending in ["svg", "png"] {
            assert!(folder.path().join(format!("figures/{name}.{ending}")).is_file(), "{name}.{ending}");
        }
    }
    let text = std::fs::read_to_string(folder.path().join("spectrum.json")).expect("a file");
    let value: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(serde_json::from_value::<Spectrum>(value).expect("a spectrum"), found);
}
