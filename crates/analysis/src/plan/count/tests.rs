use termwise_attention::{Inputs, Layer, Rope, Shape};

use super::*;

fn variant(text: &str) -> Variant {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

fn layer(text: &str, heads: usize, kv_heads: usize, d: usize) -> Attention {
    Attention::of_layer(&vec![variant(text); heads], Sizes { kv_heads, d })
}

/// Operations of plain loops, counted individually.
#[derive(Default)]
struct Loops {
    operations: u64,
}

impl Loops {
    fn multiply_add(&mut self) {
        self.operations += 2;
    }

    /// Σ q·k, then y += w·v.
    fn pair(&mut self, d: usize) {
        (0..d).for_each(|_| self.multiply_add());
        (0..d).for_each(|_| self.multiply_add());
    }

    /// All products x_i·x_j·… with i ≤ j ≤ … of these orders: their number, with one multiplication per product of order 2 or above.
    fn monomials(&mut self, d: usize, orders: &[usize]) -> usize {
        let highest = orders.iter().copied().max().unwrap_or(0);
        let mut level: Vec<usize> = vec![0];
        let mut kept = usize::from(orders.contains(&0));
        for n in 1..=highest {
            level = level.iter().flat_map(|&least| least..d).collect();
            self.operations += if n >= 2 { level.len() as u64 } else { 0 };
            kept += if orders.contains(&n) { level.len() } else { 0 };
        }
        kept
    }

    fn update(&mut self, d: usize, orders: &[usize], columns: usize, decays: bool) {
        for _ in 0..self.monomials(d, orders) {
            for _ in 0..columns {
                self.multiply_add();
                self.operations += u64::from(decays);
            }
        }
    }

    fn query(&mut self, d: usize, orders: &[usize], columns: usize) {
        for _ in 0..self.monomials(d, orders) {
            self.operations += 1;
            (0..columns).for_each(|_| self.multiply_add());
        }
    }
}

/// Variant string, its orders, columns, whether it decays.
fn cases() -> Vec<(&'static str, Vec<usize>, usize, bool)> {
    vec![
        ("taylor=0..2", vec![0, 1, 2], 5, false),
        ("taylor=0..3 over=length", vec![0, 1, 2, 3], 4, false),
        ("taylor=1,3 over=none", vec![1, 3], 4, false),
        ("power=2", vec![2], 5, false),
        ("feature=elu", vec![1], 5, false),
        ("taylor=0..2 decay=softplus", vec![0, 1, 2], 5, true),
    ]
}

#[test]
fn operations_match_plain_loops() {
    let (d, heads, kv_heads) = (4, 4, 2);
    for (text, orders, columns, decays) in cases() {
        let counts = layer(text, heads, kv_heads, d);
        // A head with a decay has its own state.
        let units = if decays { heads } else { kv_heads };
        for (t, l) in [(1, 1), (7, 3), (9, 3), (5, 8), (12, 1)] {
            let (mut parallel, mut chunk) = (Loops::default(), Loops::default());
            for position in 0..t {
                let start = position / l * l;
                for _ in 0..heads {
                    (0..=position).for_each(|_| parallel.pair(d));
                    (start..=position).for_each(|_| chunk.pair(d));
                    if start > 0 {
                        chunk.query(d, &orders, columns);
                    }
                }
                (0..units).for_each(|_| chunk.update(d, &orders, columns, decays));
            }
            let total = |work: Work| (work.flops * t as f64).round() as u64;
            assert_eq!(total(counts.parallel(t as u64)), parallel.operations, "{text} parallel {t}");
            assert_eq!(total(counts.chunk(t as u64, l as u64)), chunk.operations, "{text} chunk {t} {l}");

            let (mut recurrent, mut cached) = (Loops::default(), Loops::default());
            (0..units).for_each(|_| recurrent.update(d, &orders, columns, decays));
            (0..heads).for_each(|_| recurrent.query(d, &orders, columns));
            (0..heads).for_each(|_| (0..t).for_each(|_| cached.pair(d)));
            assert_eq!(counts.recurrent(t as u64).flops as u64, recurrent.operations, "{text} recurrent");
            assert_eq!(counts.cached(t as u64).flops as u64, cached.operations, "{text} cache {t}");
        }
    }
}

#[test]
fn heads_without_a_state_have_a_cache_in_every_mode() {
    let (exp, series) = (variant("softmax"), variant("taylor=0..2"));
    let sizes = Sizes { kv_heads: 2, d: 4 };
    let mixed = Attention::of_layer(&[exp.clone(), exp.clone(), series.clone(), series.clone()], sizes);
    let [endless, finite] = [exp, series].map(|v| Attention::of_layer(&[v.clone(), v], Sizes { kv_heads: 1, d: 4 }));
    assert_eq!(mixed, [endless, finite].into_iter().sum());
    assert_eq!(mixed.recurrent(10).flops, endless.cached(10).flops + finite.recurrent(10).flops);
    assert!((mixed.chunk(10, 3).flops - endless.parallel(10).flops - finite.chunk(10, 3).flops).abs() < 1e-9);
    assert_eq!(endless.recurrent(10), endless.cached(10));
    assert!((endless.chunk(10, 3).flops - endless.parallel(10).flops).abs() < 1e-9);
}

/// Compares with the bytes of actual states, including other state and blocks of caches.
#[test]
fn memory_matches_actual_states() {
    const CASES: [(&str, usize, usize); 6] = [
        ("taylor=0..2", 4, 2),
        ("taylor=0..2 over=length", 4, 1),
        ("power=3 in", 4, 2),
        ("feature=elu", 2, 2),
        ("taylor=0..2 decay=softplus", 4, 2),
        ("taylor=0..1 over=position", 4, 2),
    ];
    let carried = |shape: &Shape| 8 + shape.kv_heads * 8 + shape.heads * (4 * 8 + 4);
    for (d, (text, heads, kv_heads)) in [8, 16, 20].into_iter().flat_map(|d| CASES.map(|case| (d, case))) {
        let shape = Shape { batch: 1, time: 1, heads, kv_heads, d, e: d };
        let heads_of = vec![variant(text); heads];
        let rope = Rope::new(d, 1e4, None).expect("a rope");
        let state = Layer::new(heads, kv_heads, d).rope(rope).heads(&heads_of).and_then(|layer| layer.state(1)).expect("a state");
        let planned = Attention::of_layer(&heads_of, Sizes { kv_heads, d });
        let real = state.bytes() - carried(&shape);
        assert_eq!(planned.kept_bytes(7), real as u64, "{text}: {planned:?}");
        assert_eq!(planned.growth(), 0);
        assert!(!planned.has_state() || state.is_constant());
    }
    let d = 16;
    // Two heads of a KV head with different orders.
    let heads = [variant("taylor=0..2"), variant("taylor=0..1"), variant("taylor=0..2"), variant("softmax")];
    let planned = Attention::of_layer(&heads, Sizes { kv_heads: 2, d });
    assert_eq!(planned.state, (153 + 17 + 153) * 17);
    assert_eq!(planned.growth(), 4 * 2 * 16);
    assert_eq!(planned.cache, 2 * 4 * 2 * 16);
}

/// Windows, sinks and far states, when they are full.
#[test]
fn memory_of_full_windows_matches_actual_states() {
    let carried = |shape: &Shape| 8 + shape.kv_heads * 8 + shape.heads * (4 * 8 + 4);
    for (text, heads, kv_heads) in [
        ("exp window=20", 4, 2),
        ("exp window=20 sinks=3 chosen=9", 4, 2),
        ("exp window=20 sinks=3 bits=8", 4, 2),
        ("exp window=140 sinks=3 chosen=9 bits=4", 2, 1),
        ("exp window=140 sinks=3", 2, 2),
        ("exp window=20 sinks=3 far(taylor=0..2 dim=4)", 4, 2),
        ("exp window=20 far(taylor=0..2)", 2, 1),
        ("exp window=20 far(feature=elu)", 2, 1),
        ("exp window=20 sinks=3 decay=softplus in", 4, 2),
        ("exp window=20 far(taylor=0..2) decay=softplus", 2, 1),
    ] {
        let (d, heads_of) = (8, vec![variant(&format!("{text} rope=off")); heads]);
        let layer = Layer::new(heads, kv_heads, d).heads(&heads_of).expect("a layer");
        let mut state = layer.state(1).expect("a state");
        let ([q, k, v], mut y) = (layer.widths().map(|width| vec![0.1; width]), vec![0.0; heads * d]);
        let extras: Vec<_> = layer.aux_specs().iter().map(|spec| (spec.aux, vec![0.1; spec.values(1)])).collect();
        for _ in 0..400 {
            let inputs = extras.iter().fold(Inputs::new(&q, &k, &v), |inputs, (extra, values)| inputs.with(*extra, values));
            state.step(&inputs, &mut y).unwrap_or_else(|error| panic!("{error}"));
        }
        let planned = Attention::of_layer(&heads_of, Sizes { kv_heads, d });
        let shape = Shape { batch: 1, time: 1, heads, kv_heads, d, e: d };
        assert_eq!(planned.kept_bytes(400), (state.bytes() - carried(&shape)) as u64, "{text}: {planned:?}");
        assert_eq!(planned.growth(), 0, "{text}");
    }
    assert!(layer("exp window=20 far(exp)", 2, 1, 8).growth() > 0);
}

#[test]
fn states_beyond_the_limit_of_the_engine_are_caches() {
    assert!(!layer("taylor=0..8", 1, 1, 64).has_state() && !layer("taylor=0..2 clamp=5", 1, 1, 64).has_state());
    assert!(!layer("taylor=0..150", 2, 1, 256).has_state());
    assert!(layer("taylor=0..4", 1, 1, 64).has_state());
}

#[test]
fn bytes_moved_match_the_memory() {
    let counts = layer("taylor=0..2", 4, 2, 64);
    assert_eq!(counts.recurrent(5).bytes, (2 * 2 * 139_425 * 4) as f64, "two states, read and written");
    assert_eq!(counts.cached(5).bytes, (5 * 2 * 2 * 64 * 4) as f64);
    assert_eq!(layer("softmax in", 4, 2, 64).cache_growth(), 2 * 2 * 64 * 4 + 4 * 4, "one weight per head");
    assert_eq!(layer("softmax decay=softplus", 4, 2, 64).cache_growth(), 2 * 2 * 64 * 4 + 4 * 8);
    // One tile reads the keys of its own positions once.
    assert_eq!(counts.parallel(128).bytes, 4.0 * 512.0 * 64.5 / 128.0);
    // Chunks as long as the context: one update, no query.
    let short = counts.chunk(100, 100);
    assert_eq!(short.bytes * 100.0, (2 * 4 * 2 * 139_425) as f64 + 4.0 * 512.0 * 5050.0 / 100.0);
}
