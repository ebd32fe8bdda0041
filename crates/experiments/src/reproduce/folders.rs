//! A report of any runs: folders of runs, of sweeps, or of both.

use std::path::{Path, PathBuf};

use termwise_analysis::plan::{Kept, kept};
use termwise_report::{Block, Document, Figure, Section, counted};
use termwise_train::metrics::{LastEvaluation, METRICS};
use termwise_train::provenance;
use termwise_train::runs::is_hidden;
use termwise_train::settings::{Layer, Settings, keys};
use toml::{Table, Value};

use super::collect;
use super::experiment::{Metric, Variant};
use super::results::{Run, Summary, TaskOutcome, VariantOutcome};
use super::{figures, page};
use crate::Error;

const SETTINGS: &str = "settings.toml";

/// A run with its settings, as a table and as text.
struct FolderRun {
    settings: Table,
    text: String,
    run: Run,
}

/// A report of the runs in these folders: of a run, of a sweep, or of several runs. Links are relative to `out`, the folder of the report.
pub fn of_folders(folders: &[PathBuf], out: &Path) -> Result<Document, Error> {
    let mut found: Vec<FolderRun> = Vec::new();
    for folder in folders {
        // A run may be given by its name alone, as in other commands.
        let named = Path::new("runs").join(folder);
        let folder = if !folder.exists() && named.is_dir() { &named } else { folder };
        let runs = runs_in(folder)?;
        if runs.is_empty() {
            let problem = format!(
                "there is no run in {}; name a run, a folder with {SETTINGS} and {METRICS}, or a folder of such folders",
                folder.display()
            );
            return Err(Error::Sizes(problem));
        }
        for path in runs {
            if !found.iter().any(|other| other.run.hash == name_of(&path)) {
                found.push(read(&path, out)?);
            }
        }
    }
    let varied = varied(&found);
    let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
    for (index, one) in found.iter().enumerate() {
        // The attention needs no key, and legends have little room.
        let word = |key: &String| match (key.as_str(), plain(one.settings.get(key.as_str()))) {
            ("attention", value) => value,
            (key, value) => format!("{key}={value}"),
        };
        let words: Vec<String> = varied.iter().map(word).collect();
        let name = if words.is_empty() { one.run.attention.clone() } else { words.join(", ") };
        match groups.iter_mut().find(|(other, _)| *other == name) {
            Some((_, members)) => members.push(index),
            None => groups.push((name, vec![index])),
        }
    }
    let runs: Vec<Run> = found.iter().map(|one| one.run.clone()).collect();
    let measured = |metric: Metric| runs.iter().all(|run| run.held_out.is_some_and(|found| metric.of(&found).is_some()));
    let kept: Vec<Option<Kept>> = found.iter().map(|one| memory(&one.text)).collect();
    let section = |metric: Metric| section(metric, &groups, &runs, &kept);
    let mut sections = vec![section(Metric::Loss)];
    for metric in [Metric::Recall, Metric::Beyond, Metric::Error].into_iter().filter(|&metric| measured(metric)) {
        sections.push(section(metric));
    }
    let settings = |run: &Run| found.iter().find(|one| one.run.hash == run.hash).map(|one| one.text.clone());
    sections.push(Section { heading: "Runs and settings".into(), blocks: page::all_runs(&runs, settings) });
    let lead =
        format!("{}, {}; runs that differ only in the seed are grouped.", counted(runs.len(), "run"), counted(groups.len(), "setting"));
    let mut builds: Vec<(String, usize)> = Vec::new();
    for name in runs.iter().map(|run| provenance::names(&run.provenance)) {
        match builds.iter_mut().find(|(other, _)| *other == name) {
            Some((_, count)) => *count += 1,
            None => builds.push((name, 1)),
        }
    }
    let build = match &builds[..] {
        [(name, _)] => format!("All runs were made with termwise {name}."),
        several => format!("Runs: {}.", page::runs_made_by(several)),
    };
    let lead = vec![Block::Text(lead), Block::Text(build)];
    Ok(Document { title: "Runs compared".into(), lead, sections })
}

/// The memory of a run's model between tokens; `None` if its settings cannot be read.
fn memory(settings: &str) -> Option<Kept> {
    let settings = Settings::resolve(&[Layer::of_run(settings, "a run").ok()?]).ok()?;
    Some(kept(&settings.config(settings.vocab.max(2)).ok()?, settings.length as u64))
}

fn section(metric: Metric, groups: &[(String, Vec<usize>)], runs: &[Run], kept: &[Option<Kept>]) -> Section {
    let colours = figures::Colours::of(groups.iter().map(|(name, _)| name.as_str()));
    let variants = groups.iter().map(|(name, members)| variant(name, members, (runs, kept), metric)).collect();
    let task = TaskOutcome { task: "held-out data".into(), metric, separate_tuning: false, variants, claims: Vec::new() };
    let (short, heading, measured) = match metric {
        Metric::Loss => ("loss", "Loss", "Held-out loss"),
        Metric::Recall => ("recall", "Recall", "Held-out loss on recall tokens"),
        Metric::Beyond => ("beyond", "Beyond the training length", "Held-out loss beyond the training length"),
        Metric::Error => ("accuracy", "Errors", "Share of wrong answers"),
    };
    let mut blocks = Vec::new();
    let figures = [
        ("curves", "during training", figures::curves(heading, &task, runs, &colours)),
        ("dots", "at the end", figures::dot_plot(heading, &task, &colours)),
    ];
    for (what, when, figure) in figures {
        blocks.extend(figure.map(|figure| {
            let figure = Figure { title: format!("{measured} {when}"), ..figure };
            Block::Figure { name: format!("{short}-{what}"), figure, caption: String::new() }
        }));
    }
    blocks.push(Block::Table { name: short.into(), table: page::variants(&task, runs) });
    if metric == Metric::Loss {
        let figure = figures::training_loss(&task, runs, &colours);
        blocks.extend(figure.map(|figure| Block::Figure { name: "training-loss".into(), figure, caption: String::new() }));
    }
    Section { heading: heading.into(), blocks }
}

fn variant(name: &str, members: &[usize], (runs, kept): (&[Run], &[Option<Kept>]), metric: Metric) -> VariantOutcome {
    let kept = members.first().and_then(|&run| kept[run]);
    let evaluations = || members.iter().filter_map(|&run| runs[run].held_out);
    let summary = |numbers: Vec<f64>| Summary::of(&numbers);
    let loss = summary(evaluations().map(|found| found.loss).collect());
    let recall = summary(evaluations().filter_map(|found| Some(found.recall?.loss)).collect());
    VariantOutcome {
        variant: Variant {
            name: name.into(),
            attention: members.first().map_or(String::new(), |&run| runs[run].attention.clone()),
            settings: Table::new(),
            seeds: None,
        },
        state_bytes: kept.map(|kept| kept.bytes),
        state_numbers: kept.map(|kept| kept.numbers),
        constant_state: kept.is_some_and(|kept| kept.constant),
        numbers: members.iter().filter_map(|&run| runs[run].number(metric)).collect(),
        metric: summary(evaluations().filter_map(|found| metric.of(&found)).collect()),
        loss,
        recall,
        rest: summary(evaluations().filter_map(|found| Some(found.rest?.loss)).collect()),
        excess: summary(evaluations().filter_map(|found| Some(found.excess?.all)).collect()),
        within: summary(evaluations().filter_map(|found| Some(found.within?.loss)).collect()),
        beyond: summary(evaluations().filter_map(|found| Some(found.beyond?.loss)).collect()),
        rate: None,
        tuning: Vec::new(),
        runs: members.to_vec(),
        failed: members.iter().filter(|&&run| runs[run].status == "diverged").count(),
    }
}

/// The folder itself, those below it, or those below its `runs`.
fn runs_in(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let is_run = |path: &Path| path.join(SETTINGS).is_file() && path.join(METRICS).is_file();
    if is_run(folder) {
        return Ok(vec![folder.to_owned()]);
    }
    let mut runs = Vec::new();
    for place in [folder.to_owned(), folder.join("runs")] {
        if place.is_dir() {
            let entries = std::fs::read_dir(&place).map_err(termwise_model::Error::io("read", &place))?;
            runs.extend(entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| is_run(path) && !is_hidden(path)));
        }
    }
    runs.sort();
    Ok(runs)
}

fn name_of(path: &Path) -> String {
    path.canonicalize().unwrap_or(path.to_owned()).display().to_string()
}

fn read(path: &Path, out: &Path) -> Result<FolderRun, Error> {
    let file = path.join(SETTINGS);
    let text = std::fs::read_to_string(&file).map_err(termwise_model::Error::io("read", &file))?;
    let settings: Table =
        text.parse().map_err(|source| termwise_train::Error::Toml { place: file.display().to_string(), source: Box::new(source) })?;
    let number = |key: &str| settings.get(key).and_then(Value::as_integer).unwrap_or(0) as u64;
    let mut run = Run {
        hash: name_of(path),
        folder: relative(path, out),
        task: String::new(),
        attention: plain(settings.get("attention")),
        seed: number("seed"),
        rate: None,
        tuning: false,
        status: "open".into(),
        note: String::new(),
        seconds: 0.0,
        provenance: provenance::read(path),
        held_out: None,
        curve: Vec::new(),
        train: Vec::new(),
    };
    let (step, last) = collect::read_metrics(path, &mut run)?;
    match last {
        LastEvaluation::NotFinite(at) => {
            (run.status, run.note) = ("diverged".into(), format!("the held-out loss at step {at} is not finite"));
        }
        _ if step >= number("steps") => run.status = "finished".into(),
        _ => {}
    }
    Ok(FolderRun { settings, text, run })
}

/// From one folder to another, with the separators of addresses; the whole path where they have nothing in common.
fn relative(path: &Path, from: &Path) -> String {
    let full = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or(path.to_owned());
    let (path, from) = (full(path), full(from));
    let common = path.components().zip(from.components()).take_while(|(a, b)| a == b).count();
    let up = from.components().skip(common).map(|_| "..".to_owned());
    let down = path.components().skip(common).map(|part| part.as_os_str().to_string_lossy().into_owned());
    up.chain(down).collect::<Vec<_>>().join("/")
}

/// Keys, without the seed, in which runs differ.
fn varied(found: &[FolderRun]) -> Vec<String> {
    let mut keys: Vec<String> = Vec::new();
    for key in found.iter().flat_map(|one| one.settings.keys()) {
        let differs = || found.iter().any(|one| one.settings.get(key) != found[0].settings.get(key));
        if key != "seed" && keys::find(key).is_none_or(|key| key.effect.on_weights()) && !keys.contains(key) && differs() {
            keys.push(key.clone());
        }
    }
    // The horizon follows the steps unless it was set.
    if found.iter().all(|one| one.settings.get("horizon") == one.settings.get("steps")) {
        keys.retain(|key| key != "horizon");
    }
    // Defaults depend on the data, which the label names.
    let usual: Vec<Option<Table>> = found.iter().map(|one| defaults(one.settings.get("data")?)).collect();
    let is_default = |key: &str| {
        found.iter().zip(&usual).all(|(one, usual)| usual.as_ref().is_some_and(|usual| usual.get(key) == one.settings.get(key)))
    };
    keys.retain(|key| matches!(key.as_str(), "attention" | "data") || !is_default(key));
    keys
}

/// The default settings of a run on these data.
fn defaults(data: &Value) -> Option<Table> {
    let layer = Layer::new(Table::from_iter([("data".to_owned(), data.clone())]), "the data").ok()?;
    Settings::resolve(&[layer]).ok()?.to_toml().parse().ok()
}

fn plain(value: Option<&Value>) -> String {
    match value {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(items)) => items.iter().map(|item| plain(Some(item))).collect::<Vec<_>>().join(","),
        Some(other) => other.to_string(),
        None => "none".into(),
    }
}
