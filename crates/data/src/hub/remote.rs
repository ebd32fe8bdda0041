//! The Hugging Face hub through its ordinary cache: what data sets and models share, and models.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use crate::error::{Error, Result};

/// Set to anything but 0 or nothing: only the cache is used.
pub(crate) const OFFLINE: &str = "HF_HUB_OFFLINE";
/// Files of a model besides its weights, the first of which it must have.
const FILES: [&str; 5] = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

type Problem<T> = std::result::Result<T, String>;

/// Whether only the cache may be used.
pub(crate) fn offline() -> bool {
    std::env::var(OFFLINE).is_ok_and(|value| !matches!(value.as_str(), "" | "0"))
}

/// The cache; a problem where there is no place for it.
pub(crate) fn cache() -> Problem<Cache> {
    if std::env::var_os("HF_HOME").is_none() && std::env::home_dir().is_none() {
        return Err("there is no home folder for the cache; set HF_HOME".into());
    }
    Ok(Cache::from_env())
}

/// A repository by owner and name, the name with its revision: `name[@revision]`, slashes in it as %2F.
pub(crate) fn repo(owner: &str, name: &str, kind: RepoType) -> Option<Repo> {
    let (name, revision) = name.split_once('@').unwrap_or((name, "main"));
    // Names of folders on the hub and in its cache: nothing that could lead out of it.
    let plain = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains(['/', '\\', '\0']);
    let revision = revision.replace("%2F", "/");
    (plain(owner) && plain(name) && revision.split('/').all(plain)).then(|| Repo::with_revision(format!("{owner}/{name}"), kind, revision))
}

/// The hub's side of a repository. Bars are drawn on a terminal where files are large.
pub(crate) fn api(repo: &Repo, progress: bool) -> Problem<ApiRepo> {
    let api = ApiBuilder::from_env().with_progress(progress && std::io::stderr().is_terminal()).with_retries(3).build();
    Ok(api.map_err(silent)?.repo(repo.clone()))
}

/// What to say where a request fails.
pub(crate) fn silent(error: impl std::fmt::Display) -> String {
    format!("the hub does not answer ({error}); with {OFFLINE}=1 the files in the cache are used")
}

/// The cached snapshot to which the revision points.
pub(crate) fn snapshot(cache: &Cache, repo: &Repo) -> Problem<PathBuf> {
    let folder = cache.path().join(repo.folder_name());
    let commit = std::fs::read_to_string(folder.join("refs").join(repo.revision())).unwrap_or(repo.revision().to_owned());
    let snapshot = folder.join("snapshots").join(commit.trim());
    if !snapshot.is_dir() {
        let place = cache.path().display();
        return Err(format!("{OFFLINE} is set and the cache in {place} does not hold it; fetch it once without {OFFLINE}"));
    }
    Ok(snapshot)
}

/// The folder of `hf://<owner>/<name>[@<revision>]`: configuration, tokenizer and safetensors, fetched where the cache does not hold them.
pub(crate) fn model(asked: &str, rest: &str) -> Result<PathBuf> {
    let refuse = |problem: String| Error::HubModel { asked: asked.into(), problem };
    let parsed = rest.split_once('/').and_then(|(owner, name)| repo(owner, name, RepoType::Model));
    let repo = parsed.ok_or_else(|| refuse("write it as hf://<owner>/<name>[@<revision>]".into()))?;
    let cache = cache().map_err(refuse)?;
    if offline() { snapshot(&cache, &repo).map_err(refuse) } else { fetched(&repo).map_err(refuse) }
}

/// The configuration of such a model alone, without its weights.
pub(crate) fn config(asked: &str, rest: &str) -> Result<PathBuf> {
    let refuse = |problem: String| Error::HubModel { asked: asked.into(), problem };
    let parsed = rest.split_once('/').and_then(|(owner, name)| repo(owner, name, RepoType::Model));
    let repo = parsed.ok_or_else(|| refuse("write it as hf://<owner>/<name>[@<revision>]".into()))?;
    if offline() {
        return Ok(snapshot(&cache().map_err(refuse)?, &repo).map_err(refuse)?.join(FILES[0]));
    }
    api(&repo, false).map_err(refuse)?.get(FILES[0]).map_err(|error| refuse(format!("the hub does not give its {}: {error}", FILES[0])))
}

fn fetched(repo: &Repo) -> Problem<PathBuf> {
    let api = api(repo, true)?;
    let missing =
        |error| format!("the hub does not give it ({error}); check owner, name and revision, or set {OFFLINE}=1 to use the cache");
    let there: Vec<String> = api.info().map_err(missing)?.siblings.into_iter().map(|file| file.rfilename).collect();
    let has = |name: &str| there.iter().any(|file| file == name);
    if !has(FILES[0]) {
        return Err(format!("the repository holds no {}; only models in Hugging Face's form can be read", FILES[0]));
    }
    let mut names: Vec<String> = FILES.iter().filter(|name| has(name)).map(|&name| name.to_owned()).collect();
    let fetch = |name: &str| api.get(name).map_err(|error| format!("{name} cannot be fetched: {error}"));
    if has(WEIGHTS) {
        names.push(WEIGHTS.into());
    } else if has(INDEX) {
        let index = fetch(INDEX)?;
        names.push(INDEX.into());
        names.extend(shards(&index)?.into_iter().filter(|shard| has(shard)));
    } else {
        return Err(format!("the repository holds neither {WEIGHTS} nor {INDEX}; weights of other formats cannot be read"));
    }
    let mut folders = Vec::new();
    for name in &names {
        folders.push(fetch(name)?.parent().map(Path::to_owned).ok_or("the cache has no folder for it")?);
    }
    folders.dedup();
    match folders.len() {
        1 => Ok(folders.swap_remove(0)),
        _ => Err("the repository changed while it was fetched; try again".into()),
    }
}

/// The files that an index names; what is wrong with it is said when the model is read.
fn shards(index: &Path) -> Problem<Vec<String>> {
    let text = std::fs::read_to_string(index).map_err(|error| format!("cannot read {}: {error}", index.display()))?;
    let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let map = value.get("weight_map").and_then(serde_json::Value::as_object);
    let mut names: Vec<String> = map.into_iter().flat_map(|map| map.values()).filter_map(|name| Some(name.as_str()?.to_owned())).collect();
    names.sort();
    names.dedup();
    Ok(names)
}
