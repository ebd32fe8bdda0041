//! Settings: layers, presets, messages, and arbitrary file contents.

use proptest::prelude::*;
use termwise_train::Settings;
use termwise_train::settings::keys::{KEYS, Kind};
use termwise_train::settings::presets::{MODELS, RECIPES};
use termwise_train::settings::{Layer, keys};

fn resolve(texts: &[&str]) -> Result<Settings, termwise_train::Error> {
    let layers = texts.iter().map(|text| Layer::parse(text, "test.toml")).collect::<Result<Vec<_>, _>>()?;
    Settings::resolve(&layers)
}

fn message(text: &str) -> String {
    resolve(&[text]).expect_err("invalid settings").to_string()
}

#[test]
fn later_layers_override_earlier_ones_and_presets_are_below_their_layer() {
    let settings = resolve(&["model = \"small-test\"\nbatch = 3\nmlp = 100", "batch = 5\nlr = 1"]).expect("settings");
    assert_eq!((settings.hidden, settings.mlp, settings.batch, settings.lr), (256, 100, 5, 1.0));
    let settings = resolve(&["hidden = 32", "model = \"small-test\""]).expect("settings");
    assert_eq!(settings.hidden, 256, "a preset on the command line is above sizes in a file");
    let settings = resolve(&["heads = 2\nlayers = 1"]).expect("settings");
    assert_eq!((settings.head_dim, settings.kv_heads), (32, 2));
}

#[test]
fn the_paper_recipe_matches_the_paper() {
    let paper = resolve(&["recipe = \"paper\""]).expect("settings");
    assert_eq!((paper.hidden, paper.mlp, paper.heads, paper.layers), (1024, 2048, 16, 20));
    assert_eq!((paper.batch, paper.length, paper.steps, paper.warmup, paper.horizon), (36, 1024, 100_000, 10_000, 1_000_000));
    assert_eq!((paper.beta1, paper.beta2, paper.adam_eps, paper.weight_decay, paper.lr), (0.9, 0.999, 1e-7, 0.01, 1e-4));
    assert!((paper.schedule().rate(100_000) / paper.lr - 0.909).abs() < 1e-3);
    assert_eq!(paper.clip_limit().expect("a limit"), None);
    let gated = resolve(&["recipe = \"paper\"\nattention = \"gated_softmax\""]).expect("settings");
    assert_eq!(gated.clip_limit().expect("a limit"), Some(1.0));
    // 275 million parameters with the tokenizer of Llama 2.
    let count = paper.config(32_000).expect("a configuration").parameter_count().expect("a count");
    assert!((270_000_000..280_000_000).contains(&count), "{count}");
}

#[test]
fn every_preset_resolves_and_settings_round_trip_through_toml() {
    let models = MODELS.iter().map(|model| format!("model = \"{}\"", model.0));
    let recipes = RECIPES.iter().map(|recipe| format!("recipe = \"{}\"\nend_of_document = \"x\"\nheld_out = 0.5", recipe.0));
    let map = "heads = 2\n[attention]\ndefault = \"softmax\"\nlayers = {\"0\" = {heads = {\"1\" = \"norm\"}}}".to_owned();
    for text in models.chain(recipes).chain([map]) {
        let settings = resolve(&[&text]).expect("settings");
        let again = Settings::from_toml(&settings.to_toml(), "settings.toml").expect("settings");
        assert_eq!(settings, again, "{}", settings.to_toml());
        assert_eq!(settings.hash(), again.hash());
    }
}

#[test]
fn names_and_hashes_depend_only_on_the_computation() {
    let base = resolve(&[""]).expect("settings");
    assert!(base.name().starts_with("tiny-softmax-"), "{}", base.name());
    for free in ["steps = 800\nlog_every = 3", "threads = 7", "keep = 5\neval_every = 1\ncheckpoint_every = 0"] {
        assert_eq!(base.hash(), resolve(&[free]).expect("settings").hash(), "{free}");
    }
    for changed in ["seed = 2", "lr = 0.5", "attention = \"norm\"", "batch = 2", "clip = 0"] {
        let other = resolve(&[changed]).expect("settings");
        assert_ne!(base.hash(), other.hash(), "{changed}");
        assert_eq!(other.differences(&base).len(), 1, "{changed}");
    }
    let [base, moved] = ["", "data = \"elsewhere\""].map(|data| resolve(&["recipe = \"default\"", data]).expect("settings"));
    assert_ne!(base.hash(), moved.hash());
    assert!(moved.differences(&base).is_empty(), "data are compared by their fingerprint");
}

#[test]
fn messages_state_the_value_and_the_requirement() {
    for (text, parts) in [
        ("hiden = 3", ["test.toml", "hiden", "did you mean `hidden`?"]),
        ("zzzz = 3", ["test.toml", "zzzz", "--help"]),
        ("batch = \"x\"", ["`batch`", "\"x\"", "whole number"]),
        ("batch = -1", ["`batch`", "-1", "whole number"]),
        ("batch = 0", ["`batch`", "0", "from 1"]),
        ("lr = nan", ["`lr`", "nan", "finite"]),
        ("beta1 = 1.0", ["`beta1`", "1", "below 1"]),
        ("adam_eps = 0", ["`adam_eps`", "0", "positive"]),
        ("decay = \"linaer\"", ["test.toml", "linaer", "linear"]),
        ("model = \"papersmall\"", ["model", "papersmall", "paper-small"]),
        ("recipe = \"papr\"", ["recipe", "papr", "paper"]),
        ("heads = 3", ["`hidden`", "64", "heads = 3"]),
        ("attention = \"sofmax\"", ["sofmax", "softmax", ""]),
        ("data = []", ["`data`", "[]", "builtin"]),
        ("batch = ", ["test.toml", "", ""]),
    ] {
        let message = message(text);
        assert!(parts.iter().all(|part| message.contains(part)), "{text}: {message}");
    }
}

#[test]
fn flags_are_parsed_by_type() {
    assert_eq!(Kind::Count.parse("10_000"), Some(10_000i64.into()));
    assert_eq!(Kind::Count.parse("-1"), None);
    assert_eq!(Kind::Number.parse("1e-4"), Some(1e-4.into()));
    assert_eq!(Kind::Number.parse("inf"), None);
    assert_eq!(Kind::Switch.parse("yes"), None);
    assert!(Kind::Attention.parse(r#"{"default": "norm"}"#).is_some_and(|value| value.is_table()));
    assert!(KEYS.iter().all(|key| keys::find(key.name).is_some_and(|found| found.help == key.help)));
    let mut names: Vec<&str> = KEYS.iter().map(|key| key.name).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), KEYS.len());
}

#[test]
fn overflowing_sizes_are_rejected() {
    assert!(Settings::from_toml("hidden = 64\nheads = 4\nhead_dim = 4611686018427387904", "x").is_err());
}

#[test]
fn inference_only_attention_is_rejected() {
    for (text, part) in [("softmax window=8 chosen=4", "chosen"), ("softmax window=8 bits=8", "bits")] {
        let error = Settings::from_toml(&format!("attention = \"{text}\""), "x").expect_err(text).to_string();
        assert!(error.contains(&format!("`{part}` is inference-only")), "{error}");
    }
    let mixed = "attention = {default = \"softmax\", layers = {\"0\" = \"softmax window=8 bits=4\"}}";
    assert!(Settings::from_toml(mixed, "x").is_err_and(|error| error.to_string().contains("`bits` is inference-only")));
    assert!(Settings::from_toml("attention = \"softmax window=8 sinks=2\"", "x").is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_toml_is_valid_or_an_error(text in "\\PC{0,80}") {
        let _ = Settings::from_toml(&text, "x");
    }

    #[test]
    fn arbitrary_values_are_valid_or_an_error(
        pairs in proptest::collection::vec((0..KEYS.len(), prop_oneof![
            any::<i64>().prop_map(|n| n.to_string()),
            (0..40i64).prop_map(|n| n.to_string()),
            any::<f64>().prop_map(|x| format!("{x:?}").replace("NaN", "nan")),
            any::<bool>().prop_map(|b| b.to_string()),
            "[a-z0-9=. -]{0,12}".prop_map(|text| format!("\"{text}\"")),
            Just("{default = \"norm\", layers = {\"0-1\" = \"softmax\"}}".to_owned()),
        ]), 0..6)
    ) {
        let mut text = String::new();
        for (key, value) in pairs {
            // A directory of that name would have to exist.
            if KEYS[key].name != "from" {
                text += &format!("{} = {value}\n", KEYS[key].name);
            }
        }
        if let Ok(settings) = Settings::from_toml(&text, "x") {
            prop_assert_eq!(&Settings::from_toml(&settings.to_toml(), "y").expect("its own text"), &settings);
        }
    }
}
