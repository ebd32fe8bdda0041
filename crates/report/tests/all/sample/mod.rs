//! A report with every kind of block, from made-up values.

// Each test file and the gallery use some of these functions.
#![allow(dead_code)]

use termwise_report::{
    Axis, Band, Block, Cell, Chart, Document, DotPlot, Estimate, Figure, HeatMap, Layer, Line, Names, Point, Points, Rule, Scale, Section,
    Shade, Steps, Table, Tone, Unit,
};

/// A pseudorandom value from 0 to 1.
pub fn noise(seed: u64) -> f64 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678_9abc_def1);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

pub fn losses() -> Figure {
    let mut layers = Vec::new();
    let mut lines = Vec::new();
    for (color, (name, floor)) in
        [("softmax", 2.71), ("taylor=0..4", 2.76), ("taylor=0..2", 2.93), ("feature=elu", 3.21)].into_iter().enumerate()
    {
        let mean = |t: f64| floor + 4.2 * (-t / 700.0).exp() + 0.35 * (-t / 4000.0).exp();
        let steps = || (0..=60).map(|i| f64::from(i) * 100.0 + 50.0);
        let wide = |t: f64| 0.05 + 0.12 * noise(t as u64 + 7919 * color as u64);
        let name = name.to_string();
        layers.push(Layer::Band(Band {
            name: name.clone(),
            color,
            points: steps().map(|t| (t, mean(t) - wide(t), mean(t) + wide(t))).collect(),
        }));
        lines.push(Layer::Line(Line { name, color, dashed: false, points: steps().map(|t| (t, mean(t))).collect() }));
    }
    layers.append(&mut lines);
    layers.push(Layer::Rule(Rule { y: 2.58, label: "entropy of the language".into(), color: 5 }));
    let x = Axis::new("step", Scale::Linear, Unit::Number);
    let chart =
        Chart { title: "Held-out loss, mean of 3 seeds".into(), x, y: Axis::new("nats per token", Scale::Linear, Unit::Number), layers };
    let description = "Four falling curves that end in the order softmax, 0..4, 0..2, elu.".into();
    Figure { title: "Loss curves with the range of seeds".into(), description, panels: vec![chart.into()] }
}

pub fn dot_plot(long: bool) -> Figure {
    let names = ["0..1", "0..2", "0..3", "0..4", "0..6", "0..8", "exp"];
    let long_names = [
        "softmax",
        "softmax norm=l2 over=none",
        "taylor=0..4 norm=l2",
        "taylor=0..4,coef=learned",
        "gated_softmax norm=rms",
        "feature=elu scale=1",
    ];
    let categories: Vec<String> = if long { &long_names[..] } else { &names[..] }.iter().map(|s| s.to_string()).collect();
    let steps = |name: &str, color, shift: f64| Steps {
        name: name.into(),
        color,
        values: (0..categories.len())
            .map(|i| {
                (i != 4 || color != 2).then(|| {
                    Estimate::with_deviation(2.7 + shift + 0.5 * (-0.8 * i as f64).exp(), 0.004 + 0.03 * noise(i as u64 + color as u64))
                })
            })
            .collect(),
    };
    let plot = DotPlot {
        title: if long { "Loss of variants" } else { "Loss by highest order, d = 16 and d = 32" }.into(),
        label: if long { "" } else { "orders kept" }.into(),
        series: vec![steps("d = 16", 1, 0.0), steps("d = 32", 2, 0.04)],
        categories,
        value: Axis::new("nats per token", Scale::Linear, Unit::Number),
        colors: Vec::new(),
        rules: vec![Rule { y: 2.69, label: "softmax ≤ 2.69".into(), color: 0 }],
    };
    Figure { title: "DotPlot of orders".into(), description: "Loss falls with every order.".into(), panels: vec![plot.into()] }
}

pub fn spectrum(layers: usize, orders: usize) -> HeatMap {
    let value = |l: usize, n: usize| {
        let x = 1.0 + 6.0 * noise(l as u64);
        (n < orders - l % 3).then(|| (n as f64 * x.ln() - (1..=n).map(|k| (k as f64).ln()).sum::<f64>() - x).exp())
    };
    HeatMap {
        title: "Share of |xⁿ/n!| by layer and order".into(),
        x: Names::count("order n", orders),
        y: Names::count("layer", layers),
        values: (0..layers).map(|l| (0..orders).map(|n| value(l, n)).collect()).collect(),
        shade: Shade::Log,
        range: Some((1e-8, 1.0)),
        unit: Unit::Number,
    }
}

pub fn heads() -> HeatMap {
    HeatMap {
        title: "Σ over orders ≥ 4, per head".into(),
        x: Names::count("head", 8),
        y: Names::count("layer", 12),
        values: (0..12).map(|l| (0..8).map(|h| (l + h != 9).then(|| noise(l * 31 + h * 17))).collect()).collect(),
        shade: Shade::Linear,
        range: None,
        unit: Unit::Percent,
    }
}

pub fn differences() -> HeatMap {
    HeatMap {
        title: "Change of loss when a layer's orders are truncated".into(),
        x: Names::new("truncated to", ["0..1", "0..2", "0..3", "0..4", "0..6"]),
        y: Names::new("", ["embedding", "layer 0", "layer 1", "layer 2"]),
        values: (0..4).map(|l| (0..5).map(|h| Some(2.0 * noise(l * 13 + h * 7) - 1.0)).collect()).collect(),
        shade: Shade::Diverging,
        range: None,
        unit: Unit::Number,
    }
}

pub fn scatter() -> Figure {
    let points = |name: &str, color, shift: f64| {
        let point = |i: usize| {
            let bytes = 4096.0 * 6f64.powi(i as i32);
            Point::new(bytes, 2.7 + shift + 0.6 / (i + 1) as f64)
                .within(2.67 + shift + 0.6 / (i + 1) as f64, 2.73 + shift + 0.6 / (i + 1) as f64)
                .named(format!("0..{i}"))
        };
        Layer::Points(Points { name: name.into(), color, points: (0..6).map(point).collect() })
    };
    let line =
        Layer::Line(Line { name: "KV cache at 1,024 tokens".into(), color: 0, dashed: true, points: vec![(4e3, 2.68), (4e7, 2.68)] });
    let chart = Chart {
        title: "State against loss".into(),
        x: Axis::new("state per sequence", Scale::Log, Unit::Bytes),
        y: Axis::new("nats per token", Scale::Linear, Unit::Number),
        layers: vec![line, points("d = 16", 1, 0.0), points("d = 32", 2, 0.1), points("d = 64", 3, 0.25)],
    };
    Figure { title: "More state, less loss".into(), description: "Loss falls as the state grows.".into(), panels: vec![chart.into()] }
}

pub fn separation() -> Figure {
    let mut layers = Vec::new();
    for (i, name) in ["softmax", "linear", "norm"].into_iter().enumerate() {
        let at = move |x: f64| 1.0 / (1.0 + ((x - 2.0 - i as f64) * -1.8).exp());
        let xs = || (0..=50).map(|k| f64::from(k) * 0.1);
        layers.push(Layer::Band(Band {
            name: name.into(),
            color: i,
            points: xs().map(|x| (x, (at(x) - 0.06).max(0.0), (at(x) + 0.06).min(1.0))).collect(),
        }));
        layers.push(Layer::Line(Line { name: name.into(), color: i, dashed: false, points: xs().map(|x| (x, at(x))).collect() }));
    }
    let chart = Chart {
        title: "Success with 95 % intervals, n = 1000".into(),
        x: Axis::new("a₁", Scale::Linear, Unit::Number),
        y: Axis::new("", Scale::Linear, Unit::Percent),
        layers,
    };
    Figure { title: "Separation".into(), description: "Three rising curves.".into(), panels: vec![chart.into()] }
}

pub fn table() -> Table {
    let mut table =
        Table::new("Ablations: mean ± standard deviation over 3 seeds", ["variant", "loss", "change", "state", "parameters", "steps"]);
    for (i, name) in
        ["softmax", "taylor=0..4", "taylor=0..4,coef=learned decay=softplus conv=3", "feature=elu scale=1"].into_iter().enumerate()
    {
        let x = noise(i as u64);
        table.rows.push(vec![
            Cell::code(name),
            Cell::MeanSd(2.7 + 0.3 * x, 0.01 * x, 3),
            if i == 0 { Cell::Empty } else { Cell::Number(0.1 - 0.3 * x, 3) },
            Cell::Amount(1024.0 * 17f64.powi(i as i32), Unit::Bytes),
            Cell::Amount(1.2e6, Unit::Number),
            Cell::Number(6000.0, 0),
        ]);
    }
    table
}

pub fn page() -> Document {
    let figure = |name: &str, figure: Figure, caption: &str| Block::Figure { name: name.into(), figure, caption: caption.into() };
    let alone = |map: HeatMap| Figure { title: "Spectrum".into(), description: "Orders of each layer.".into(), panels: vec![map.into()] };
    let section = |heading: &str, blocks: Vec<Block>| Section { heading: heading.into(), blocks };
    let verdict = |tone, label: &str, claim: &str| Block::badge(tone, label, claim);
    Document {
        title: "Softmax attention, term by term: small-scale results".into(),
        lead: vec![
            Block::Text("Every number below comes from runs on **this machine**; see [the ablations](#ablations). Variants are written as `taylor=0..4`: Σ over n ≤ 4 of xⁿ/n!.".into()),
            verdict(Tone::Good, "reproduced", "Loss falls with every order and meets softmax at **10**."),
            verdict(Tone::Open, "inconclusive at this scale", "The norm takes the place of the denominator."),
            verdict(Tone::Bad, "contradicted", "Learned coefficients are always better than those of Taylor, at every order, in every layer and for every seed."),
        ],
        sections: vec![
            section("Loss curves", vec![Block::Text("Bands are the range of seeds.".into()), figure("loss", losses(), "Mean of three seeds; the band is the range."), figure("separation", separation(), "")]),
            section("DotPlot of orders", vec![figure("dots", dot_plot(false), "± one standard deviation."), figure("variants", dot_plot(true), "")]),
            section("Ablations", vec![Block::Table { name: "ablations".into(), table: table() }, Block::List(vec!["`conv=3` matters most.".into(), "Seeds differ by **0.01**.".into()])]),
            section("Spectra", vec![
                figure("spectrum", alone(spectrum(12, 10)), "Blank where nothing was measured."),
                figure("spectrum-large", alone(spectrum(40, 100)), ""),
                figure("heads", alone(heads()), ""),
                figure("differences", alone(differences()), "Blue is better, orange is worse."),
            ]),
            section("State against loss", vec![figure("state", scatter(), "Whiskers are one standard deviation.")]),
            section("How it was run", vec![Block::Code("termwise reproduce --seeds 3\ntermwise sweep variants.toml --parallel 2   # <variants> & \"seeds\"".into()), Block::Details { summary: "Settings".into(), blocks: vec![Block::Text("Width 64, 2 layers.".into()), Block::Table { name: "settings".into(), table: table() }] }]),
        ],
    }
}
