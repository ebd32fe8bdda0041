//! Closed forms compared with the definitions, and figures with the reference.

use super::*;
use termwise_base::rng::Rng;
use termwise_base::threads;
use termwise_report::Documented;

/// Any network; orders for which the plain computation is in range.
fn network(rng: &mut Rng) -> Network {
    let order = rng.below(9) as u32;
    rng.pick(&[Network::Softmax, Network::Linear, Network::Power(order), Network::Taylor(order)])
}

fn setting(rng: &mut Rng, largest_n: usize) -> Setting {
    let n = 2 + rng.below(largest_n - 1) as u64;
    let d = 3 + rng.below(14);
    let b = rng.pick(&[0.0, 0.05, 0.1, 0.3, 1.0]);
    let a0 = rng.pick(&[0.0, 0.01, 0.09]);
    let a1 = 0.1 + 3.0 * rng.unit();
    Setting { n, d, m: 1 + rng.below(20), a0, a1, b, c: 1.0 - b, cross: rng.chance(0.5) }
}

#[test]
fn closed_forms_equal_the_plain_computation() {
    let mut rng = Rng::named(5, "naive");
    let (mut positive, mut cut_off, mut relative) = (0, 0, 0.0f64);
    for case in 0..1500 {
        let (network, setting) = (network(&mut rng), setting(&mut rng, 60));
        let mut draw = Draw::new(&setting, 9, case);
        // The ends, the middle, the last copy.
        draw.j3 = rng.pick(&[0, setting.n - 1, setting.n / 2, draw.j3]);
        let fast = Pair::new(network, &setting).expect("a setting").outputs(&draw);
        for (fast, a) in fast.into_iter().zip([setting.a0, setting.a1]) {
            let plain = naive::output(network, &setting, a, &draw);
            // The sum of the plain computation before τ is subtracted; cancellation loses its digits.
            let summed = setting.n as f64 * setting.m as f64 * (1.1 + a) * setting.length();
            assert!((fast - plain).abs() <= 1e-14 * summed, "{network} {setting:?} {a}: {fast} {plain}");
            if plain > 1e-2 * summed {
                relative = relative.max((fast / plain - 1.0).abs());
            }
            positive += (plain > 0.0) as usize;
        }
        cut_off += (setting.n % (setting.d as u64 - 2) != 0) as usize;
    }
    assert!(relative < 1e-12, "{relative:e}");
    assert!(positive > 300 && cut_off > 800, "{positive} {cut_off}");
}

#[test]
fn every_network_in_self_and_cross_attention_at_every_position_of_the_spike() {
    let networks = [Network::Softmax, Network::Linear, Network::Power(3), Network::Taylor(5)];
    for (network, cross) in networks.into_iter().flat_map(|network| [(network, false), (network, true)]) {
        // 23 rows in an identity of size 10: the last copy has three.
        let setting = Setting { a1: 3.0, cross, ..Setting::of(23) };
        let pair = Pair::new(network, &setting).expect("a setting");
        let mut positive = 0;
        for j3 in 0..setting.n {
            let mut draw = Draw::new(&setting, 2, j3);
            draw.j3 = j3;
            let plain = [setting.a0, setting.a1].map(|a| naive::output(network, &setting, a, &draw));
            for (fast, plain) in pair.outputs(&draw).into_iter().zip(plain) {
                assert!((fast - plain).abs() <= 1e-12 * plain.max(1.0), "{network} {cross} {j3}: {fast} {plain}");
                positive += (plain > 0.0) as usize;
            }
        }
        assert!(positive >= 20, "{network} {cross}: {positive}");
    }
}

#[test]
fn weights_have_the_stated_closed_forms() {
    let close = |x: f64, y: f64, what: &str| assert!((x / y - 1.0).abs() < 1e-12, "{what}: {x} {y}");
    for (n, a) in [(2u64, 0.5), (100, 0.01), (1000, 0.7), (1_000_000, 3.0)] {
        let rows = n as f64;
        let spike = |power: f64| 1.0 / (1.0 + (rows - 1.0) / power);
        let of = |network: Network, query: f64| network.weights(n, a, query).spike;
        close(of(Network::Softmax, 1.0), spike(rows.powf(a)), "softmax");
        close(of(Network::Softmax, 1.0 + a), spike(rows.powf(a * (1.0 + a))), "softmax of row j3");
        for query in [1.0, 1.0 + a] {
            close(of(Network::Linear, query), (1.0 + a) / (rows + a), "linear");
            close(of(Network::Power(7), query), spike((1.0 + a).powi(7)), "power");
            assert_eq!(of(Network::Power(1), query), of(Network::Linear, query));
            close(of(Network::Power(0), query), 1.0 / rows, "power 0");
            // A long series equals the exponential.
            close(of(Network::Taylor(2000), query), of(Network::Softmax, query), "taylor");
        }
    }
}

#[test]
fn weights_stay_in_range_if_their_parts_overflow() {
    let networks = [Network::Softmax, Network::Linear, Network::Power(MAX_ORDER), Network::Taylor(MAX_ORDER), Network::Taylor(300)];
    for (network, n, a) in
        networks.into_iter().flat_map(|network| [(network, 1u64 << 53, 30.0), (network, 2, 0.0), (network, 1 << 40, 0.09)])
    {
        for query in [1.0, 1.0 + a] {
            let Weights { spike, other } = network.weights(n, a, query);
            let sum = spike + (n - 1) as f64 * other;
            assert!((sum - 1.0).abs() < 1e-12 && spike >= other && other >= 0.0, "{network} {n} {a}: {spike} {other}");
        }
    }
}

#[test]
fn a_long_series_is_the_exponential() {
    for x in [0.0, 0.3, 20.0, 460.0, 461.0, 1000.0, 50_000.0] {
        let ln = network::ln_series(MAX_ORDER, x);
        assert!((ln - x).abs() <= 1e-12 * x.max(1e-3), "{x}: {ln}");
    }
    assert!((network::ln_series(2, 3.0) - 8.5f64.ln()).abs() < 1e-15);
}

/// All of y and j3, one vector, by the plain computation.
fn enumerated(network: Network, setting: &Setting) -> f64 {
    let mut successes = 0;
    for j3 in 0..setting.n {
        for signs in 0..1u32 << setting.d {
            let draw = Draw::of(j3, &[(0..setting.d).map(|k| signs >> k & 1 == 1).collect()]);
            let output = |a| naive::output(network, setting, a, &draw);
            // Rounding differences are not positive.
            successes += (output(setting.a0) < 1e-9 && output(setting.a1) > 1e-9) as u64;
        }
    }
    successes as f64 / (setting.n << setting.d) as f64
}

#[test]
fn the_closed_form_matches_an_enumeration_of_all_cases() {
    let mut rng = Rng::named(3, "all cases");
    let mut between = 0;
    for _ in 0..60 {
        let n = 2 + rng.below(12) as u64;
        let setting = Setting { d: 3 + rng.below(4), m: 1, ..Setting { n, ..setting(&mut rng, 12) } };
        let network = network(&mut rng);
        let (all, exact) = (enumerated(network, &setting), Pair::new(network, &setting).expect("a setting").exact());
        assert!((all - exact).abs() < 1e-12, "{network} {setting:?}: {all} {exact}");
        between += (all > 0.0 && all < 1.0) as usize;
    }
    assert!(between > 20, "{between}");
}

#[test]
fn simulated_rates_match_the_closed_form() {
    let mut rng = Rng::named(8, "shares");
    let (mut inside, mut between) = (0, 0);
    for seed in 0..60 {
        let network = network(&mut rng);
        let mut setting = setting(&mut rng, 200);
        // Also with more than one word of signs.
        setting.d = rng.pick(&[3, 12, 64, 65, 66, 130]);
        setting.b = rng.pick(&[0.09, 0.1, 0.12]);
        setting.c = 1.0 - setting.b;
        let pair = Pair::new(network, &setting).expect("a setting");
        let (share, exact) = (pair.simulate(2000, seed), pair.exact());
        inside += share.holds(exact) as usize;
        between += (exact > 0.02 && exact < 0.98) as usize;
        let deviation = (exact * (1.0 - exact) / 2000.0).sqrt();
        assert!((share.success - exact).abs() <= 5.0 * deviation + 1e-9, "{network} {setting:?}: {share:?} {exact}");
    }
    assert!(inside >= 52 && between > 15, "{inside} {between}");
}

#[test]
fn results_depend_on_the_seed_and_not_on_threads() {
    let pair = Pair::new(Network::Linear, &Setting { a1: 3.0, ..Setting::of(150) }).expect("a setting");
    let of = |count, seed| threads::pool(count).expect("a pool").install(|| pair.simulate(5000, seed));
    assert_eq!(of(1, 1), of(3, 1));
    assert_ne!(of(1, 1), of(1, 2));
    // Draws are indexed, and no two are equal.
    let setting = Setting::of(150);
    let draws: Vec<Draw> = (0..100).map(|index| Draw::new(&setting, 4, index)).collect();
    assert!(draws.iter().enumerate().all(|(i, draw)| *draw == Draw::new(&setting, 4, i as u64) && !draws[..i].contains(draw)));
}

#[test]
fn intervals_are_wilson_intervals() {
    // Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for (successes, draws, low, high) in
        [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]
    {
        let share = Share::new(successes, draws);
        assert!((share.low - low).abs() < 5e-5 && (share.high - high).abs() < 5e-5, "{share:?}");
    }
    assert!(Share::new(7, 7).holds(1.0) && Share::new(0, 7).holds(0.0));
}

#[test]
fn reference_figures_are_reproduced() {
    let reference = Reference::run(10_000, 1).expect("settings");
    for row in &reference.figures {
        let Setting { n, m, a1, .. } = row.point.setting;
        let what = format!("{} n {n} m {m} a_1 {a1}: {} {:?}", row.point.network, row.reference, row.point.share);
        // No probability of a response gives 0.25, 0.45, 0.70 and 0.93 at m = 1, 2, 5 and 10: these come from few draws.
        let expected = if m == 5 || m == 10 { Verdict::Chance } else { Verdict::Agrees };
        assert_eq!(row.verdict, expected, "{what}");
        assert!((row.point.exact - row.point.share.success).abs() < 0.02, "{what}: {}", row.point.exact);
    }
    // This is close: 300 draws would rarely give 0.70.
    let five = reference.figures.iter().find(|row| row.point.setting.m == 5).expect("a figure at m = 5");
    assert!(five.point.exact - five.reference > 0.005 + 1.96 * (five.point.exact * (1.0 - five.point.exact) / 300.0).sqrt());
    let off: Vec<_> = reference.orders.iter().filter(|row| row.found.order != Some(row.reference)).collect();
    assert!(off.iter().all(|row| row.verdict == Verdict::Chance), "{off:?}");
    let off: Vec<_> = off.iter().map(|row| (row.found.setting.n, row.found.setting.a1, row.found.series, row.found.order)).collect();
    assert_eq!(
        off,
        [
            (10_000, 0.7, Series::Power, Some(15)),
            (10_000, 1.0, Series::Power, Some(11)),
            (100_000, 1.0, Series::Taylor, Some(15)),
            // Linear attention is the power of order 1, whose reference here is 0.92.
            (100, 3.0, Series::Taylor, Some(1)),
            (100, 3.0, Series::Power, Some(1)),
        ]
    );
}

#[test]
fn all_reference_orders_follow_from_an_m_with_a_base_two_logarithm() {
    for row in Reference::run(1, 1).expect("settings").orders {
        let ComparedOrder { reference, found: BridgePoint { series, setting, .. }, .. } = row;
        let m = (setting.n as f64 / 0.01).log2().floor() as usize;
        let found = BridgePoint::find(series, &Setting { m, ..setting }, 1, 1).expect("a setting");
        assert_eq!(found.order, Some(reference), "{series:?} {setting:?}");
    }
}

#[test]
fn thresholds_of_the_spike_are_those_of_the_limit() {
    // The self-attention threshold is a² + a > 1 as n grows, that of cross-attention a > 1.
    let exact = |a1, cross| Pair::new(Network::Softmax, &Setting { a1, cross, ..Setting::of(1 << 50) }).expect("a setting").exact();
    assert!(exact(0.7, false) > 0.9 && exact(0.55, false) < 0.1, "{} {}", exact(0.7, false), exact(0.55, false));
    assert!(exact(1.1, true) > 0.9 && exact(0.7, true) < 0.1, "{} {}", exact(1.1, true), exact(0.7, true));
}

#[test]
fn the_bridge_grows_like_the_logarithm_of_n() {
    let bridge = Bridge { n: vec![1000, 1_000_000, 1_000_000_000], a1: vec![1.0], draws: 500, ..Bridge::default() };
    let points = bridge.run().expect("settings");
    for series in Series::ALL {
        let orders: Vec<(f64, f64)> = points
            .iter()
            .filter(|point| point.series == series)
            .map(|point| (point.order.map_or(f64::NAN, f64::from), point.predicted))
            .collect();
        let slope = (orders[2].0 - orders[0].0) / (orders[2].1 - orders[0].1);
        assert!((0.8..1.1).contains(&slope), "{orders:?}");
    }
    assert!(points.iter().all(|point| point.point.is_some_and(|point| point.exact >= REQUIRED_PROBABILITY)
        && point.below.is_some_and(|x| x < REQUIRED_PROBABILITY)));
    // No order distinguishes 0.011 from 0.01.
    let close = BridgePoint::find(Series::Power, &Setting { a1: 0.011, ..Setting::of(10) }, 10, 1).expect("a setting");
    assert_eq!((close.order, close.point, close.below), (None, None, None));
}

#[test]
fn mistakes_are_reported() {
    let usual = Setting::of(100);
    for (setting, words) in [
        (Setting { n: 0, ..usual }, "n = 0"),
        (Setting { n: 1, ..usual }, "2 or more"),
        (Setting { n: u64::MAX, ..usual }, "2^53"),
        (Setting { d: 2, ..usual }, "d = 2"),
        (Setting { m: 0, ..usual }, "m = 0"),
        (Setting { a0: -0.01, ..usual }, "a_0 = -0.01"),
        (Setting { a0: 0.1, ..usual }, "below 0.1"),
        (Setting { a1: -1.0, ..usual }, "a_1 = -1"),
        (Setting { a1: f64::NAN, ..usual }, "a_1 = NaN"),
        (Setting { a1: f64::INFINITY, ..usual }, "a_1 = inf"),
        (Setting { b: 0.2, ..usual }, "b + c = 1"),
        (Setting { b: -0.1, c: 1.1, ..usual }, "negative"),
        (Setting { b: f64::NAN, ..usual }, "b = NaN"),
    ] {
        let error = Pair::new(Network::Softmax, &setting).expect_err(words);
        assert!(error.is_usage() && error.to_string().contains(words), "{error}");
    }
    for text in
        ["", "sofmax", "power", "power=", "power=-1", "taylor=1.5", "taylor=2000000", "softmax=1", "linear=2", "power=3..1", "a=1..2"]
    {
        assert!(Network::list(text).is_err_and(|error| error.is_usage()), "{text}");
    }
    assert!(Point::measure(Network::Linear, &usual, 0, 1).is_err());
    assert!(Sweep::over_n(vec![Network::Linear], vec![], 1.0).grid().is_err());
}

#[test]
fn results_round_trip() {
    let sweep = Sweep { draws: 50, ..Sweep::over_n(vec![Network::Softmax, Network::Taylor(3)], vec![100, 1000], 1.0) };
    let mut heard = 0;
    let points = sweep.run(&mut |_, count| heard += count).expect("settings");
    assert_eq!((points.len(), heard), (4, 16));
    let text = serde_json::to_string(&points).expect("JSON");
    assert!(text.contains("\"network\":\"taylor=3\"") && text.contains("\"n\":1000"), "{text}");
    assert_eq!(serde_json::from_str::<Vec<Point>>(&text).expect("points"), points);
    let reference = Reference::run(20, 1).expect("settings");
    let text = serde_json::to_string(&reference).expect("JSON");
    assert_eq!(serde_json::from_str::<Reference>(&text).expect("a reference"), reference);
    assert_eq!(Network::list("power=2..4").expect("a list"), [2, 3, 4].map(Network::Power));
}

#[test]
fn figures_contain_every_line() {
    let points = Sweep { draws: 20, ..Sweep::over_n(vec![Network::Softmax, Network::Power(2)], vec![10, 100], 1.0) };
    let points = Sweep { d: vec![3, 12], ..points }.run(&mut |_, _| {}).expect("settings");
    let svg = success_figure(&points).to_svg();
    for words in ["softmax, d = 3", "power=2, d = 12", "Success against n", "a reconstruction"] {
        assert!(svg.contains(words), "{words}");
    }
    let networks = Network::list("taylor=0..3").expect("a list").into_iter().chain([Network::Softmax]).collect();
    let orders = Sweep { draws: 20, ..Sweep::over_n(networks, vec![100], 3.0) }.run(&mut |_, _| {}).expect("settings");
    let figure = success_figure(&orders);
    assert!(figure.to_svg().contains("Success against order"));
    let softmax = figure.charts().next().expect("a chart").layers.iter().find_map(|layer| match layer {
        termwise_report::Layer::Line(line) if line.name == "softmax" => Some((line.color, line.points.len())),
        _ => None,
    });
    // In the first colour, and constant over all orders.
    assert_eq!(softmax, Some((0, 4)));
    assert!(!success_figure(&[]).to_svg().is_empty() && !bridge_figure(&[]).to_svg().is_empty());
}

#[test]
fn documents_survive_a_json_round_trip() {
    let points = Sweep { draws: 50, ..Sweep::over_n(vec![Network::Softmax, Network::Taylor(3)], vec![10, 100], 0.7) };
    let points = points.run(&mut |_, _| {}).expect("points");
    let bridge = Bridge { n: vec![100], a1: vec![1.0, 0.011], draws: 50, ..Bridge::default() }.run().expect("orders");
    let reference = Some(Reference::run(50, 1).expect("figures"));
    let found = Separation { note: RECONSTRUCTION.into(), seed: 1, reference, points, bridge };
    termwise_report::reads_again(&found);
    let text = found.document().to_terminal(&termwise_report::Terminal::default());
    assert!(text.contains("A reconstruction of") && text.contains("none"), "{text}");
}
