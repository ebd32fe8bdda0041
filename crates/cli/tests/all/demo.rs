//! The interactive demo: its computations compared with the engine, and the page in a browser.

use std::path::PathBuf;
use std::process::Command;

use crate::chromium::{self, Browser};
use crate::support::Place;
use serde_json::{Value, json};
use termwise_attention::{Attention, AuxKind, AuxTensor, AuxTensors, Inputs, Layer, Variant};
use termwise_experiments::demo::{ARITHMETIC, MODELS};
use termwise_model::{Model, ObservedAttention, SessionOptions};

/// Variants of every switch of the page, and custom ones, each after the name of the model with its weights.
fn variants() -> Vec<(&'static str, String)> {
    let mut list = Vec::new();
    let orders: Vec<String> = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64].map(|p| format!("taylor=0..{p}")).to_vec();
    for kernel in orders.iter().map(String::as_str).chain(["exp"]) {
        for window in ["", " window=4", " window=8", " window=16"] {
            for decay in ["", " decay=fixed"] {
                list.push(("softmax", format!("{kernel} over=sum conv=3{window}{decay}")));
            }
            list.push(("decay", format!("{kernel} over=sum decay=softplus conv=3{window}")));
        }
        for decay in ["", " decay=fixed"] {
            list.push(("delta", format!("{kernel} scale=4 write=delta,scale=0.5 over=none qk_norm=l2 norm=rms rope=off conv=3{decay}")));
        }
    }
    for text in [
        "exp over=none norm=l2 conv=3",
        "exp over=length clamp=2 norm=scaled_l2 conv=3",
        "exp cap=3 over=sum,eps=1e-3 rope=off conv=3",
        "exp over=sum,floor=1 clamp=5",
        "feature=elu scale=1 conv=3",
        "feature=relu over=sum,eps=1e-6 conv=3",
        "feature=l2 over=length conv=3",
        "feature=identity over=none norm=l2 conv=3",
        "power=2 over=sum,eps=1e-6 conv=3",
        "taylor=0,2,4 conv=3",
        "taylor=0..4 qk_norm=l2 scale=2 conv=3",
        "exp window=5 sinks=2 conv=3",
        "exp window=4 sinks=1 far(taylor=0..2) conv=3",
        "exp window=4 far(feature=elu scale=0.5) decay=fixed conv=3",
        "taylor=0..2 window=6 far(power=2 scale=0.25) over=length conv=3",
    ] {
        list.push(("softmax", text.into()));
    }
    list
}

/// A text of the page as tokens: facts, words between them, a question.
const TEXT: [u32; 20] = [0, 10, 31, 12, 27, 3, 14, 40, 15, 30, 5, 2, 20, 33, 11, 28, 9, 1, 14, 40];

/// Attention weights before the norm, [H, T, T]: the output for values that are 1 at one position and 0 elsewhere.
fn weights(seen: &ObservedAttention) -> Vec<Vec<Vec<f64>>> {
    let time = seen.shape.time;
    let (h, g, d) = (seen.shape.heads, seen.shape.kv_heads, seen.shape.d);
    let own = seen.attention.heads()[0].clone();
    let conv = own.conv;
    let variant = own.with_norm(Variant::default().norm);
    let sizes = Layer::new(h, g, d).value_dim(time);
    let sizes = match seen.attention.rope() {
        Some(rope) => sizes.rope(rope.clone()),
        None => sizes,
    };
    let layer = sizes.variant(variant).expect("possible");
    let rows = |width: usize, which: usize| -> Vec<f64> {
        let tensor = [seen.inputs.q(), seen.inputs.k()][which];
        (0..time).flat_map(|t| tensor.values()[t * tensor.stride(width)..][..width].to_vec()).map(f64::from).collect()
    };
    let (q, k) = (rows(h * d, 0), rows(g * d, 1));
    // The convolution ends with silu: select the current position, with an input whose silu is 1.
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let one = if conv.is_some() { 1.0 / silu(1.0) } else { 1.0 };
    let v: Vec<f64> = (0..time).flat_map(|s| (0..g).flat_map(move |_| (0..time).map(move |i| f64::from(u8::from(i == s))))).collect();
    let mut data: Vec<(AuxTensor, Vec<f64>)> = Vec::new();
    for spec in layer.aux_specs() {
        let values = match spec.aux.kind {
            AuxKind::ConvV => {
                let width = conv.expect("a convolution");
                (0..g * time).flat_map(|_| (0..width).map(move |j| f64::from(u8::from(j + 1 == width)))).collect()
            }
            extra => seen.inputs.get(extra).expect("what the model has").iter().map(|&x| f64::from(x)).collect(),
        };
        data.push((spec.aux, values));
    }
    let mut extras = AuxTensors::default();
    data.iter().for_each(|(extra, values)| extras.set(*extra, &values[..]));
    let mut y = vec![0.0f64; time * h * time];
    layer.naive::<f64>(1, time).expect("an engine").infer(&Inputs::new(&q, &k, &v).with_aux(extras), &mut y).expect("a pass");
    (0..h).map(|head| (0..time).map(|t| y[(t * h + head) * time..][..time].iter().map(|x| x * one).collect()).collect()).collect()
}

/// Results of the engine for a model with this attention.
fn native(model: &Model, text: &str) -> Value {
    let model = model.with_attention(text.parse::<Variant>().unwrap_or_else(|error| panic!("{text}: {error}"))).expect("weights suffice");
    let mut session = model.session(1, TEXT.len(), SessionOptions::default().forward_only(true)).expect("a session");
    let mut layers = Vec::new();
    let mut watch = |seen: ObservedAttention| layers.push(json!({"y": seen.y, "weights": weights(&seen)}));
    session.observe(&model.params, &TEXT, None, &mut watch).expect("a pass");
    let vocabulary = model.config.vocab_size;
    let mut logits = vec![0.0; TEXT.len() * vocabulary];
    session.logits(&model.params, 0..TEXT.len(), &mut logits).expect("logits");
    let probabilities: Vec<Vec<f64>> = logits.chunks(vocabulary).map(softmax).collect();
    json!({"layers": layers, "probabilities": probabilities})
}

fn softmax(row: &[f32]) -> Vec<f64> {
    let most = row.iter().copied().fold(f32::MIN, f32::max);
    let weights: Vec<f64> = row.iter().map(|&x| f64::from(x - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}

/// Returns the largest difference of each kind. Recurrent states are compared with sums over pairs.
const COMPARE: &str = r#"
const T = require("./arithmetic.js"), fs = require("fs");
const { data, cases, text } = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
const models = Object.fromEntries(data.models.map((model) => [model.name, T.load(model)]));
const out = cases.map(({ model, attention, expected }) => {
  const variant = T.read(attention, data.presets), found = T.run(models[model], text, variant);
  const worst = { probabilities: 0, y: 0, weights: 0, memory: 0 };
  const differ = (kind, a, b, size = 1) => { const x = Math.abs(a - b) / size; worst[kind] = x <= worst[kind] ? worst[kind] : x; };
  expected.probabilities.forEach((row, t) => row.forEach((p, i) => differ("probabilities", p, found.probabilities[t][i])));
  expected.layers.forEach(({ y, weights }, l) => found.layers[l].forEach((head, h) => {
    const heads = found.layers[l].length, e = head.y[0].length, size = Math.max(1, ...y.map(Math.abs));
    head.y.forEach((row, t) => row.forEach((x, i) => differ("y", x, y[(t * heads + h) * e + i], size)));
    weights[h].forEach((row, t) => {
      // Before a scale-free norm, weights are equal up to a factor.
      const size = (row) => { const most = Math.max(...row.map(Math.abs)); return variant.norm === "none" ? Math.max(1, most) : most; };
      const [a, b] = [size(row), variant.norm === "none" ? size(row) : size(head.weights[t])];
      row.forEach((w, s) => differ("weights", w / a, head.weights[t][s] / b));
    });
    const scale = variant.scale ?? 1 / Math.sqrt(head.k[0].length), { kernel } = variant;
    if (kernel.kind === "taylor" && kernel.orders.at(-1) <= 4 && variant.window === null && variant.norm === "none" && variant.over.kind === "sum") {
      const t = text.length - 1, sum = { u: new Array(e).fill(0), z: 0 };
      for (const n of kernel.orders) { const part = T.recall(head, T.memory(head, n, t), t, scale); sum.z += part.z; part.u.forEach((x, i) => { sum.u[i] += x; }); }
      sum.u.forEach((x, i) => differ("memory", x / sum.z, head.y[t][i]));
    }
  }));
  return { model, attention, ...worst };
});
console.log(JSON.stringify(out));
"#;

fn node() -> Option<PathBuf> {
    let found = std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join("node")).find(|file| file.is_file());
    termwise_base::test_skip::need("node", "Node.js", found)
}

/// The page with models trained for a few steps, and the folder of the runs.
fn page(place: &Place) -> (String, Value) {
    place.command(&["demo", "--steps", "60", "--out", "demo.html", "--runs", "runs"]).assert().success();
    let html = std::fs::read_to_string(place.path("demo.html")).expect("a page");
    let (_, data) = html.split_once("id=\"data\">").expect("data");
    let data = serde_json::from_str(data.split_once("</script>").expect("an end").0).expect("JSON");
    (html, data)
}

#[test]
fn the_demo_computes_the_same_values_as_the_engine() {
    let Some(node) = node() else { return };
    let place = Place::new();
    let (html, data) = page(&place);
    assert!(html.len() < 2_000_000, "{} bytes", html.len());
    let models: Vec<(&str, Model)> = MODELS
        .map(|(name, _)| (name, termwise_train::resolve::model(Some(&place.at(&format!("runs/{name}")))).expect("a run").folder))
        .map(|(name, folder)| (name, Model::read(folder).expect("a model")))
        .into();
    let cases: Vec<Value> = variants()
        .iter()
        .map(|(name, attention)| {
            let (_, model) = models.iter().find(|(model, _)| model == name).expect("a model");
            json!({"model": name, "attention": attention, "expected": native(model, attention)})
        })
        .collect();
    assert!(cases.len() > 250);
    std::fs::write(place.path("arithmetic.js"), ARITHMETIC).expect("a file");
    std::fs::write(place.path("compare.js"), COMPARE).expect("a file");
    std::fs::write(place.path("cases.json"), json!({"data": data, "cases": cases, "text": TEXT}).to_string()).expect("a file");
    let run = Command::new(node).arg(place.path("compare.js")).arg(place.path("cases.json")).output().expect("node runs");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let found: Vec<Value> = serde_json::from_slice(&run.stdout).expect("JSON");
    let mut worst = [0.0f64; 4];
    for case in &found {
        for (kind, worst) in ["probabilities", "y", "weights", "memory"].iter().zip(&mut worst) {
            // NaN becomes null in JSON.
            let difference = case[kind].as_f64().unwrap_or(f64::INFINITY);
            assert!(difference < 1e-5, "{kind} of {} differ by {difference}", case["attention"]);
            *worst = worst.max(difference);
        }
    }
    assert!(worst.iter().all(|&x| x > 0.0), "nothing was compared: {worst:?}");
    println!("{} variants; largest differences of probabilities, outputs, weights, memories: {worst:?}", found.len());
}

/// Variant strings that the page rejects: those that the engine also rejects, and those that only the engine supports.
#[test]
fn the_demo_rejects_unknown_words() {
    let Some(node) = node() else { return };
    let place = Place::new();
    std::fs::write(place.path("arithmetic.js"), ARITHMETIC).expect("a file");
    let wrong = [
        "foo",
        "window=0",
        "sinks=2",
        "far(exp)",
        "write=delta",
        "taylor=",
        "taylor=4..0",
        "exp taylor=0..2",
        "over=what",
        "taylor=0..999",
    ];
    let elsewhere =
        ["in", "out=cumulative", "dim=4", "feature=hedgehog", "norm=layer", "decay=mamba", "over=position", "taylor=0..2,coef=learned"];
    assert!(
        wrong.iter().all(|text| text.parse::<Variant>().and_then(|variant| variant.validate()).is_err()),
        "the engine knows one of these"
    );
    assert!(elsewhere.iter().all(|text| text.parse::<Variant>().is_ok()), "the engine does not know one of these");
    let list = json!([&wrong[..], &elsewhere[..]].concat());
    let script = format!(
        "const T = require({:?}); for (const text of {list}) {{ let said = ''; try {{ T.read(text) }} catch (error) {{ said = error.message }}; if (!said) {{ console.error(text); process.exit(1) }} }}",
        place.at("arithmetic.js")
    );
    let run = Command::new(node).args(["-e", &script]).output().expect("node runs");
    assert!(run.status.success(), "not refused: {}", String::from_utf8_lossy(&run.stderr));
}

#[test]
fn the_page_works_offline_on_narrow_and_wide_screens() {
    let Some(program) = termwise_base::test_skip::need("browser", "Chromium", chromium::find()) else { return };
    let place = Place::new();
    page(&place);
    let address = format!("file://{}", place.at("demo.html"));
    let mut browser = Browser::start(&program);
    for width in [360, 1280] {
        browser.open(&address, width);
        assert_eq!(browser.evaluate("document.body.dataset.ready"), "yes");
        assert!(browser.evaluate("performance.now()").as_f64().is_some_and(|ms| ms < 60_000.0));
        let overflow = browser.evaluate("document.documentElement.scrollWidth - window.innerWidth");
        assert!(overflow.as_f64().is_some_and(|x| x <= 0.0), "at {width}: {overflow}");
    }
    // The slider by keyboard: the address is updated and restores the state.
    browser.evaluate("document.getElementById('order').focus()");
    for _ in 0..18 {
        let key = |kind: &str| json!({"type": kind, "key": "ArrowLeft", "code": "ArrowLeft", "windowsVirtualKeyCode": 37});
        browser.call("Input.dispatchKeyEvent", key("rawKeyDown"));
        browser.call("Input.dispatchKeyEvent", key("keyUp"));
    }
    assert_eq!(browser.evaluate("document.getElementById('order-text').textContent"), "order 0");
    assert_eq!(browser.evaluate("document.getElementById('variant').value"), "taylor=0..0 over=sum conv=3");
    assert_eq!(browser.evaluate("location.hash"), "#o=0");
    browser.evaluate("document.querySelector('[name=write][value=delta]').click()");
    assert!(browser.evaluate("document.getElementById('variant').value").as_str().is_some_and(|text| text.contains("write=delta")));
    assert_eq!(browser.evaluate("document.getElementById('window').closest('fieldset').disabled"), true);
    // Another page in between: a change of the fragment alone does not reload.
    browser.open("about:blank", 1280);
    browser.open(&format!("{address}#o=2&w=8&s=Ada+fox+Ben+owl+%3F+Ada"), 1281);
    assert_eq!(browser.evaluate("document.getElementById('variant').value"), "taylor=0..2 over=sum conv=3 window=8");
    assert_eq!(browser.evaluate("document.querySelectorAll('#tokens li').length"), 7);
    // A custom variant, and an invalid one.
    let submit = |text: &str| {
        format!("document.getElementById('variant').value = {text:?}; document.getElementById('variant-form').requestSubmit();")
    };
    browser.evaluate(&submit("norm conv=3"));
    assert_eq!(browser.evaluate("document.getElementById('variant-problem').textContent"), "");
    assert!(browser.evaluate("location.hash").as_str().is_some_and(|hash| hash.contains("v=norm+conv%3D3")));
    browser.evaluate(&submit("<img src=x> taylor=9"));
    let problem = browser.evaluate("document.getElementById('variant-problem').textContent");
    assert!(problem.as_str().is_some_and(|text| text.contains("<img")), "{problem}");
    assert_eq!(browser.evaluate("document.querySelectorAll('img').length"), 0);
    let foreign: Vec<&str> = browser.requests().into_iter().filter(|url| !url.starts_with(&address) && *url != "about:blank").collect();
    assert!(foreign.is_empty(), "the page asked for {foreign:?}");
    assert!(browser.complaints().is_empty(), "{:?}", browser.complaints());
}
