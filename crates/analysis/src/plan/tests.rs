use super::*;

fn planned(model: &str, change: impl FnOnce(&mut Options)) -> Plan {
    let mut options = Options { model: model.into(), hardware: vec!["a100".into()], ..Options::default() };
    change(&mut options);
    plan(&options).unwrap_or_else(|error| panic!("{error}"))
}

fn column<'a>(plan: &'a Plan, label: &str) -> &'a Column {
    plan.columns.iter().find(|column| column.label == label).unwrap_or_else(|| panic!("no {label}"))
}

/// A model with one layer and one head of this size.
fn one_head(folder: &tempfile::TempDir, d: usize) -> String {
    let config = format!(
        r#"{{"model_type": "llama", "vocab_size": 10, "hidden_size": {d}, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": false}}"#
    );
    std::fs::write(folder.path().join("config.json"), config).expect("a file");
    folder.path().display().to_string()
}

#[test]
fn states_and_break_evens_match_the_specification() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = planned(&one_head(&folder, 64), |_| {});
    let labels: Vec<&str> = plan.columns.iter().map(|column| column.label.as_str()).collect();
    assert_eq!(labels, ["exp", "0..2", "0..3", "0..4"], "order 6 would have too many rows");
    assert_eq!((column(&plan, "0..2").state_bytes, column(&plan, "0..2").break_even.memory), (4 * 139_425, Some(1089)));
    assert_eq!((column(&plan, "0..3").state_bytes / 4, column(&plan, "0..3").break_even.memory), (3_113_825, Some(24_327)));
    assert_eq!(column(&plan, "exp").break_even, BreakEven { memory: None, decode: None, chunk: None, auto: None });
    assert_eq!(column(&plan, "exp").cache_bytes, 4096 * 128 * 4);
    assert_eq!(column(&plan, "exp").state_bytes, column(&plan, "exp").cache_bytes);
    assert!(!column(&plan, "exp").constant && column(&plan, "0..2").constant);

    let plan = planned(&one_head(&folder, 16), |_| {});
    for (label, floats, tokens) in [("0..2", 2_601, 81), ("0..3", 16_473, 515), ("0..4", 82_365, 2_574)] {
        let column = column(&plan, label);
        assert_eq!((column.state_bytes, column.break_even.memory), (4 * floats, Some(tokens)), "{label}");
        assert_eq!(column.cache_bytes, 4096 * 32 * 4);
    }
    assert!(column(&plan, "0..3").warnings.iter().any(|warning| warning.contains("odd")));
    assert!(column(&plan, "0..2").warnings.is_empty());
}

#[test]
fn parameters_match_the_paper() {
    let small = planned("paper-small", |_| {});
    assert_eq!(small.model.parameters, 2 * 32_000 * 1024 + 20 * (4 * 1024 * 1024 + 3 * 1024 * 2048 + 2 * 1024) + 1024);
    assert_eq!((small.model.parameters as f64 / 1e6).round(), 275.0);
    let large = planned("paper-large", |_| {});
    assert_eq!((large.model.parameters as f64 / 1e7).round(), 208.0);
    assert_eq!((small.context, small.model.vocabulary), (1024, 32_000));
    let kinds: Vec<(&str, u64)> = small.model.parameters_by_kind.iter().map(|kind| (kind.kind.as_str(), kind.count)).collect();
    let expected = [
        ("embedding", 32_768_000),
        ("attention", 20 * 4 * 1024 * 1024),
        ("mlp", 20 * 3 * 1024 * 2048),
        ("norms", 41 * 1024),
        ("output", 32_768_000),
    ];
    assert_eq!(kinds, expected);
    assert_eq!(small.model.multiplied, small.model.parameters - 32_768_000 - 41 * 1024);
}

/// Every matrix of a model in plain loops.
#[test]
fn operations_of_matrices_match_plain_loops() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = r#"{"model_type": "llama", "vocab_size": 11, "hidden_size": 12, "intermediate_size": 7, "num_hidden_layers": 3, "head_dim": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": TIED}"#;
    for tied in [false, true] {
        std::fs::write(folder.path().join("config.json"), config.replace("TIED", &tied.to_string())).expect("a file");
        let plan = planned(&folder.path().display().to_string(), |options| options.attention = Some("exp over=length in out".into()));
        let mut operations = 0;
        let mut product = |rows: usize, columns: usize| (0..rows).for_each(|_| (0..columns).for_each(|_| operations += 2));
        for _ in 0..3 {
            // q, k, v, o; input and output gates; gate, up, down.
            for (rows, columns) in [(8, 12), (4, 12), (4, 12), (12, 8), (1, 12), (2, 12), (7, 12), (7, 12), (12, 7)] {
                product(rows, columns);
            }
        }
        product(11, 12);
        let cost = plan.columns[0].cached;
        assert_eq!(cost.flops - cost.attention_flops, operations as f64, "tied: {tied}");
        assert_eq!(cost.attention_flops, (3 * 2 * 64 * (2 * 4 + 2 * 4)) as f64);
        let extras = plan.model.parameters_by_kind.iter().find(|kind| kind.kind == "attention extras").map(|kind| kind.count);
        assert_eq!(extras, Some(3 * (12 + 1 + 2 * 12 + 2)));
    }
}

#[test]
fn break_evens_separate_the_slower_from_the_faster() {
    let plan = planned("paper-small", |_| {});
    let machine = &plan.hardware[0];
    for column in &plan.columns[1..] {
        let BreakEven { memory, decode, chunk, .. } = column.break_even;
        let (memory, decode, chunk) = (memory.expect("a state"), decode.expect("finite"), chunk.expect("finite"));
        let seconds = |work: Work| machine.seconds(work);
        let counts = &column.counts;
        assert!(seconds(counts.recurrent(decode)) <= seconds(counts.cached(decode)));
        assert!(seconds(counts.recurrent(decode - 1)) > seconds(counts.cached(decode - 1)));
        assert!(seconds(counts.chunk(chunk, plan.chunk)) <= seconds(counts.parallel(chunk)));
        assert!(seconds(counts.chunk(chunk - 1, plan.chunk)) > seconds(counts.parallel(chunk - 1)));
        // This machine is memory-bound, and a state is read and written while a cache is only read.
        assert!((decode as f64 / memory as f64 - 2.0).abs() < 0.01, "{memory} {decode}");
    }
    // The engine's own break-even, with measured rates, is close to the count.
    let even = &column(&plan, "0..2").break_even;
    assert!(even.auto.is_some_and(|auto| (2_000..20_000).contains(&auto)), "{even:?}");
}

#[test]
fn rows_share_weights_but_not_states() {
    let (one, eight) = (planned("paper-small", |_| {}), planned("paper-small", |options| options.batch = 8));
    let [a, b] = [&one, &eight].map(|plan| column(plan, "0..2"));
    assert_eq!((8 * a.state_bytes, 8 * a.cache_bytes), (b.state_bytes, b.cache_bytes));
    assert_eq!((a.break_even.memory, a.break_even.chunk), (b.break_even.memory, b.break_even.chunk));
    let (a, b) = (a.recurrent.expect("a state"), b.recurrent.expect("a state"));
    assert_eq!((a.flops, a.attention_bytes), (b.flops, b.attention_bytes));
    let weights = 4.0 * one.model.multiplied as f64;
    assert!((a.bytes - b.bytes - weights * 7.0 / 8.0).abs() < 1.0);
    assert!(b.seconds < a.seconds);
}

#[test]
fn the_order_that_fits_is_the_highest() {
    let folder = tempfile::tempdir().expect("a folder");
    let name = one_head(&folder, 16);
    let fits =
        |memory: u64, batch: u64| planned(&name, |options| (options.memory, options.batch) = (Some(memory), batch)).fits.expect("a memory");
    let state = 4 * 82_365;
    assert_eq!(fits(state, 1).order, Some(4));
    assert_eq!(fits(state - 1, 1).order, Some(2));
    assert_eq!((fits(8 * state, 8).order, fits(8 * state - 1, 8).order), (Some(4), Some(2)));
    assert_eq!(fits(67, 1).order, None, "order 0 has 17 numbers");
    assert_eq!(fits(68, 1).order, Some(0));
    let tight = fits(state, 1);
    assert_eq!(tight.order_beside_weights, Some(2), "{tight:?}");
    assert_eq!(fits(state + tight.weights, 1).order_beside_weights, Some(4));
    assert_eq!((tight.cache_tokens, fits(8 * state, 8).cache_tokens), (2573, 2573));
    assert_eq!(fits(1, 1).cache_tokens_beside_weights, 0);
    // Only states that the engine supports.
    assert!(fits(1 << 50, 1).order.is_some_and(|order| (8..40).contains(&order)));
    // Feature maps have no orders.
    let feature = planned(&name, |options| (options.attention, options.memory) = (Some("feature=elu".into()), Some(1 << 30)));
    assert_eq!((feature.columns.len(), feature.fits.and_then(|fits| fits.order)), (1, None));
}

#[test]
fn training_follows_from_operations_and_parameters() {
    let plan = planned("paper-small", |options| {
        (options.tokens, options.batch) = (Some(1_000_000_000), 36);
        options.hardware = vec!["a100".into(), "rtx4090".into()];
    });
    let Training { tokens, tokens_a_step, parameter_bytes, times, .. } = &plan.training;
    assert_eq!((*tokens, *tokens_a_step, *parameter_bytes), (1_000_000_000, 36 * 1024, 16 * plan.model.parameters));
    assert_eq!(times.len(), 2 * plan.columns.len());
    let exp = &times[0];
    assert_eq!((exp.hardware.as_str(), exp.column.as_str(), exp.mode.as_str()), ("a100", "exp", "parallel"));
    // 6 times the matrices and 3.5 times 4·H·d·(T+1)/2 per layer.
    let flops = 6.0 * plan.model.multiplied as f64 + 3.5 * 20.0 * 4.0 * 1024.0 * 1025.0 / 2.0;
    assert_eq!(exp.flops_a_token, flops);
    let optimizer = 28.0 * plan.model.parameters as f64 / (2039e9 * 0.7) / (36.0 * 1024.0);
    let expected = 1e9 * (flops / (312e12 * 0.4) + optimizer);
    assert!((exp.seconds / expected - 1.0).abs() < 1e-12 && (exp.tokens_a_second * exp.seconds / 1e9 - 1.0).abs() < 1e-12);
    // In each layer 2·(C + 1), 4·H·d, 2·I; at the end C + 1; two bytes each.
    let activations = 2 * 36 * 1024 * (20 * (2 * 1025 + 4 * 1024 + 2 * 2048) + 1025);
    assert_eq!(exp.memory, parameter_bytes + activations);
    assert!(!exp.too_large && plan.training.times.last().is_some_and(|time| !time.too_large));
    assert!(planned("paper-large", |options| options.hardware = vec!["rtx4090".into()]).training.times[0].too_large);
    let long = planned("paper-small", |options| options.context = Some(65_536));
    assert_eq!(long.training.times[1].mode, "chunk");
    assert_eq!(long.training.tokens, 20 * long.model.parameters);
}

#[test]
fn attention_can_be_replaced_and_mistakes_are_reported() {
    let plan = planned("tiny", |options| options.attention = Some("gated_softmax clamp=off".into()));
    assert_eq!(plan.columns[1].attention, plan.columns[0].attention.replace("exp", "taylor=0..2"));
    // A clamped series has no finite state, and `generate --order` keeps the clamp: there are no truncations to show.
    let clamped = planned("tiny", |options| options.attention = Some("gated_softmax".into()));
    assert_eq!((clamped.columns.len(), clamped.fits.and_then(|fits| fits.order)), (1, None));
    assert_eq!(planned("tiny", |options| options.attention = Some("taylor=0..5 norm=l2".into())).columns[0].label, "0..5");
    assert_eq!(planned("tiny", |options| options.attention = Some("power=2".into())).columns[0].label, "power=2");
    let fail = |change: &dyn Fn(&mut Options)| {
        let mut options = Options { hardware: vec!["a100".into()], ..Options::default() };
        change(&mut options);
        plan_error(&options)
    };
    assert!(fail(&|options| options.model = "paper-smal".into()).contains("did you mean `paper-small`?"));
    assert!(fail(&|options| options.model = "no-such-thing".into()).contains("config.json"));
    assert!(fail(&|options| options.hardware = vec!["a10".into()]).contains("did you mean `a100`?"));
    assert!(fail(&|options| options.attention = Some("softmx".into())).contains("softmax"));
    let folder = tempfile::tempdir().expect("a folder");
    assert!(fail(&|options| options.model = folder.path().display().to_string()).contains("config.json"));
}

fn plan_error(options: &Options) -> String {
    plan(options).expect_err("a mistake").to_string()
}

#[test]
fn extreme_sizes_do_not_overflow() {
    let plan = planned("paper-deep", |options| {
        (options.context, options.batch) = (Some(1 << 53), 1 << 53);
        options.tokens = Some(1 << 53);
    });
    assert!(plan.columns.iter().all(|column| column.parallel.seconds.is_finite() && column.cached.flops.is_finite()));
    assert!(plan.training.times.iter().all(|time| time.too_large && time.seconds.is_finite()));
    assert!(plan.figure().to_svg().contains("</svg>"));
    let shortest = planned("tiny", |options| (options.context, options.chunk) = (Some(0), Some(0)));
    assert_eq!((shortest.context, shortest.chunk), (1, 1));
}

#[test]
fn the_figure_shows_every_state_and_break_even() {
    let plan = planned("paper-small", |_| {});
    let svg = plan.figure().to_svg();
    for text in ["KV cache / parallel", "orders 0..2", "orders 0..3", "orders 0..4", ">1,089<", ">24,327<", "NVIDIA A100"] {
        assert!(svg.contains(text), "{text}");
    }
    let figure = plan.figure();
    assert_eq!(figure.charts().count(), 3);
    // The lines cross at the marks.
    let chart = figure.charts().next().expect("three");
    let points = |index: usize| match &chart.layers[index] {
        termwise_report::Layer::Line(line) => line.points.clone(),
        other => panic!("{other:?}"),
    };
    let (cache, state) = (points(0), points(1));
    for ((t, cache), (_, state)) in cache.into_iter().zip(state) {
        assert_eq!(cache >= state, t > 1089.0, "{t}");
    }
}

#[test]
fn plans_survive_a_json_round_trip() {
    for options in [
        Options { model: "paper-small".into(), hardware: vec!["a100".into(), "rtx4090".into()], ..Options::default() },
        Options {
            model: "tiny".into(),
            attention: Some("power=2".into()),
            hardware: vec!["h100".into()],
            memory: Some(2 << 30),
            ..Options::default()
        },
    ] {
        let plan = plan(&options).expect("a plan");
        termwise_report::reads_again(&plan);
        termwise_report::survives_edits(&plan, 4000);
    }
}
