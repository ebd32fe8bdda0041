//! Interactive demo: "softmax is a sum of recurrent networks".
//!
//! One HTML file with tiny models and their arithmetic in plain JavaScript (`arithmetic.js`). The models are ordinary training runs on
//! synthetic associative recall. Finished runs are reused. The tests of the program compare the arithmetic with the engine.

mod embedded;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::Serialize;
use termwise_attention::presets;
use termwise_base::provenance::Provenance;
use termwise_data::Prepare;
use termwise_data::language::{Language, LanguageConfig};
use termwise_model::Model;
use termwise_report::{ScriptedPage, json_for_script};
use termwise_train::progress::Display;
use termwise_train::settings::{Layer, Settings};
use termwise_train::source::cache_folder;
use termwise_train::{RunOptions, Start, train};

use crate::Error;
use embedded::Embedded;

/// Forward pass and memories in JavaScript, which the tests also run.
pub const ARITHMETIC: &str = include_str!("arithmetic.js");
const SCRIPT: &str = include_str!("page.js");
const STYLE: &str = include_str!("page.css");
const BODY: &str = include_str!("page.html");

/// Length of documents and of every text in the demo.
const LENGTH: usize = 32;
const FACTS: usize = 6;

/// One layer is enough: a short convolution combines a key with its value, and one attention step retrieves it. Heads of dimension 8 keep order 3 small enough to be drawn.
const SETTINGS: &str = r#"
recipe = "language"
language = "length=32 facts=6 keys=16 values=16 words=8"
length = 32
batch = 64
layers = 1
hidden = 32
heads = 2
head_dim = 8
mlp = 32
init_std = 0.18
steps = 1500
eval_every = 500
checkpoint_every = 0
keep = 1
log_every = 50
"#;

/// The models of the demo: name and attention.
pub const MODELS: [(&str, &str); 3] = [
    ("softmax", "exp over=sum conv=3"),
    ("decay", "exp over=sum decay=softplus conv=3"),
    // Unit keys with scale ½ between them, so w(k·k) stays below 2/β for any order.
    ("delta", "exp scale=4 write=delta,scale=0.5 over=none qk_norm=l2 norm=rms rope=off conv=3"),
];

/// Readable names of keys, values and words.
const KEYS: [&str; 16] = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo", "Mia", "Ned", "Ola", "Pia"];
const VALUES: [&str; 16] =
    ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay", "koi", "lynx", "mole", "newt", "owl", "pig"];
const WORDS: [&str; 8] = ["and", "so", "then", "but", "now", "also", "yet", "while"];
const EXAMPLE: &str = "Ada fox Ben owl Cleo cat Dan bee Eva koi Finn hen ? Cleo";

/// Options of [`run`].
#[derive(Clone, Debug)]
pub struct DemoOptions {
    /// HTML file to write.
    pub out: PathBuf,
    /// Directory of the training runs.
    pub runs: PathBuf,
    /// Training steps; default: 1500.
    pub steps: Option<usize>,
    /// Threads.
    pub threads: usize,
    /// Build and command, for the runs and the footer.
    pub provenance: Provenance,
}

/// A demo on disk.
#[derive(Clone, Debug)]
pub struct Demo {
    /// The HTML file.
    pub path: PathBuf,
    /// Its size.
    pub bytes: usize,
    /// Held-out loss on recall tokens per model, in nats.
    pub recall: Vec<(&'static str, f64)>,
}

/// Trains the models and writes the demo; `None` if `stop` was set before. `display` makes the display of each run.
///
/// # Errors
/// If a run cannot be trained or resumed, or the file cannot be written.
pub fn run(options: &DemoOptions, stop: &Arc<AtomicBool>, display: &dyn Fn() -> Display) -> Result<Option<Demo>, Error> {
    let mut above = format!("threads = {}\n", options.threads);
    above += &options.steps.map(|steps| format!("steps = {steps}\n")).unwrap_or_default();
    let above = Layer::parse(&above, "the arguments")?;
    let (mut models, mut recall) = (Vec::new(), Vec::new());
    for (name, attention) in MODELS {
        let settings = settings(attention, Some(above.clone()))?;
        let source = settings.open_source(&cache_folder(None), &Prepare::default())?;
        let folder = options.runs.join(name);
        let run = RunOptions {
            start: if folder.join("settings.toml").is_file() { Start::Resume } else { Start::Fresh },
            display: display(),
            stop: stop.clone(),
            files: settings.tokenizer_files()?,
            provenance: options.provenance.clone(),
            ..RunOptions::new(&folder)
        };
        let outcome = train(&settings, source.as_ref(), &run)?;
        drop(run);
        if !outcome.finished {
            return Ok(None);
        }
        recall.extend(outcome.held_out.and_then(|found| found.recall).map(|recall| (name, recall.loss)));
        models.push((name, Model::read(&outcome.checkpoint)?));
    }
    let mut made = format!("Made by termwise {} on {}.", options.provenance.build, options.provenance.instructions);
    if !recall.is_empty() {
        let losses: Vec<String> = recall.iter().map(|(name, loss)| format!("{name} {loss:.3}")).collect();
        made +=
            &format!(" Held-out loss on recall tokens, in nats: {}; that of a uniform prediction is {:.2}.", losses.join(", "), 16f64.ln());
    }
    let html = page(&models, &made)?;
    write(&html, &options.out)?;
    Ok(Some(Demo { path: options.out.clone(), bytes: html.len(), recall }))
}

/// The settings of the model with this attention, overridden by others.
pub fn settings(attention: &str, above: Option<Layer>) -> Result<Settings, Error> {
    let attention = Layer::parse(&format!("attention = \"{attention}\""), "the demo")?;
    let layers = [Some(Layer::parse(SETTINGS, "the demo")?), Some(attention), above];
    Ok(Settings::resolve(&layers.into_iter().flatten().collect::<Vec<_>>())?)
}

/// Data of the scripts.
#[derive(Serialize)]
struct Data {
    models: Vec<Embedded>,
    language: Sizes,
    /// The example, token by token.
    vocabulary: Vec<&'static str>,
    presets: serde_json::Map<String, serde_json::Value>,
    example: &'static str,
    length: usize,
    facts: usize,
    made: String,
}

/// Number of tokens of each kind, in order.
#[derive(Serialize)]
struct Sizes {
    marks: usize,
    words: usize,
    keys: usize,
    values: usize,
}

/// The data of the scripts as JSON: these models, by the names of [`MODELS`], and a provenance line.
pub fn data(models: &[(&str, Model)], made: &str) -> Result<String, Error> {
    let config: LanguageConfig = settings(MODELS[0].1, None)?.language.parse()?;
    let language = Language::new(config)?;
    let sizes = Sizes { marks: 2, words: WORDS.len(), keys: KEYS.len(), values: VALUES.len() };
    let vocabulary: Vec<&str> = ["•", "?"].into_iter().chain(WORDS).chain(KEYS).chain(VALUES).collect();
    let named = models.iter().map(|(name, model)| Embedded::new(name, model, vocabulary.len())).collect::<Result<_, _>>()?;
    debug_assert_eq!(vocabulary.len(), termwise_data::Source::vocabulary(&language));
    let presets = presets::all().iter().map(|preset| (preset.name.to_owned(), preset.text.into())).collect();
    let made = made.to_owned();
    Ok(json_for_script(&Data { models: named, language: sizes, vocabulary, presets, example: EXAMPLE, length: LENGTH, facts: FACTS, made }))
}

/// The HTML of the demo with these models.
pub fn page(models: &[(&str, Model)], made: &str) -> Result<String, Error> {
    let data = data(models, made)?;
    let page = ScriptedPage {
        title: "Softmax is a sum of recurrent networks",
        body: BODY,
        style: STYLE,
        data: &data,
        scripts: &[ARITHMETIC, SCRIPT],
        connects: false,
    };
    Ok(page.to_html())
}

/// Writes the demo.
pub fn write(html: &str, path: &Path) -> Result<(), Error> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        termwise_base::files::create_folder(folder).map_err(termwise_train::Error::from)?;
    }
    Ok(termwise_base::files::write_whole(path, html.as_bytes()).map_err(termwise_train::Error::from)?)
}
