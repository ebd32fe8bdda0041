//! Access to the Hugging Face hub through the standard cache: shared code, and models.

use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use hf_hub::api::sync::{Api, ApiBuilder, ApiRepo};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use indicatif::ProgressBar;

use crate::error::{Error, Result};

/// If set to a value other than 0 or empty, only the cache is used.
pub(crate) const OFFLINE: &str = "HF_HUB_OFFLINE";
/// Files of a model other than its weights. The first is required.
const FILES: [&str; 5] = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Maximum number of requests per file, and the pause before the second; later pauses are longer.
const ATTEMPTS: u32 = 4;
const RETRY_DELAY: Duration = Duration::from_millis(300);

type Problem<T> = std::result::Result<T, String>;

/// Whether only the cache may be used.
pub(crate) fn offline() -> bool {
    std::env::var(OFFLINE).is_ok_and(|value| !matches!(value.as_str(), "" | "0"))
}

/// The cache; an error if there is no directory for it.
pub(crate) fn cache() -> Problem<Cache> {
    if std::env::var_os("HF_HOME").is_none() && std::env::home_dir().is_none() {
        return Err("there is no home directory for the cache; set HF_HOME".into());
    }
    Ok(Cache::from_env())
}

/// A repository from its owner and `name[@revision]`, with slashes in the revision as %2F.
pub(crate) fn repo(owner: &str, name: &str, kind: RepoType) -> Option<Repo> {
    let (name, revision) = name.split_once('@').unwrap_or((name, "main"));
    // These become directory names on the hub and in its cache, and must not leave it.
    let plain = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains(['/', '\\', '\0']);
    let revision = revision.replace("%2F", "/");
    (plain(owner) && plain(name) && revision.split('/').all(plain)).then(|| Repo::with_revision(format!("{owner}/{name}"), kind, revision))
}

/// A repository on the hub and its cache directory. File names, ETags and commits sent by the hub become parts of paths, and
/// HF_ENDPOINT may name any server. All of them are therefore validated.
pub(crate) struct Hub {
    api: Api,
    remote: ApiRepo,
    cached: CacheRepo,
    progress: bool,
}

impl Hub {
    /// Progress bars are drawn on a terminal for large files.
    pub(crate) fn new(cache: &Cache, repo: &Repo, progress: bool) -> Problem<Hub> {
        let api = ApiBuilder::from_env().build().map_err(silent)?;
        Ok(Hub {
            remote: api.repo(repo.clone()),
            api,
            cached: cache.repo(repo.clone()),
            progress: progress && std::io::stderr().is_terminal(),
        })
    }

    /// The names of all files.
    pub(crate) fn names(&self) -> Problem<Vec<String>> {
        let names: Vec<String> =
            self.remote.info().map_err(|error| error.to_string())?.siblings.into_iter().map(|file| file.rfilename).collect();
        let inside =
            |name: &str| !name.contains(['\\', '\0']) && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        match names.iter().find(|name| name.is_empty() || !inside(name)) {
            None => Ok(names),
            Some(name) => Err(format!("it lists the file `{name}`, which would be outside of the repository; nothing is fetched")),
        }
    }

    /// The path of a file in the cache, fetched if necessary. The name is one of [`Hub::names`].
    pub(crate) fn get(&self, name: &str) -> Problem<PathBuf> {
        if let Some(path) = self.cached.get(name) {
            return Ok(path);
        }
        let url = self.remote.url(name);
        let found = self.api.metadata(&url).map_err(|error| error.to_string())?;
        let (tag, commit) = (found.etag(), found.commit_hash());
        for (what, text) in [("tag", tag), ("commit", commit)] {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if text.is_empty() || text.len() > 200 || text.starts_with('.') || !text.chars().all(plain) {
                return Err(format!("the hub sent the {what} `{text}`, which is not a valid name in the cache"));
            }
        }
        let (blob, pointer) = (self.cached.blob_path(tag), self.cached.pointer_path(commit).join(name));
        let failed = |error: std::io::Error| format!("cannot write it to the cache: {error}");
        if !blob.is_file() {
            self.download(&url, found.size() as u64, &blob)?;
        }
        std::fs::create_dir_all(pointer.parent().unwrap_or(Path::new("."))).map_err(failed)?;
        if !pointer.exists() {
            // Up from snapshots/COMMIT and the directories in the name.
            let up: PathBuf = std::iter::repeat_n("..", 1 + Path::new(name).components().count()).collect();
            link(&up.join("blobs").join(tag), &blob, &pointer).map_err(failed)?;
        }
        self.cached.create_ref(commit).map_err(failed)?;
        Ok(pointer)
    }

    /// Fetches a file of this size, resuming an earlier attempt.
    fn download(&self, url: &str, size: u64, blob: &Path) -> Problem<()> {
        let failed = |error: std::io::Error| format!("cannot write it to the cache: {error}");
        std::fs::create_dir_all(blob.parent().unwrap_or(Path::new("."))).map_err(failed)?;
        let mut part = blob.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        let mut file = File::options().create(true).append(true).open(&part).map_err(failed)?;
        // Another process may be fetching it.
        file.lock().map_err(failed)?;
        if blob.is_file() {
            return Ok(());
        }
        let bar = if self.progress { ProgressBar::new(size) } else { ProgressBar::hidden() };
        let (mut problem, mut attempt, mut most) = ("the responses do not have the announced length".to_owned(), 0, 0);
        loop {
            let have = file.metadata().map_err(failed)?.len();
            if have == size {
                break;
            }
            if have < size && have > most {
                // Continue as long as bytes are received.
                (most, attempt) = (have, 0);
            }
            if attempt == ATTEMPTS {
                return Err(problem);
            }
            attempt += 1;
            let answer = match self.remote.info_request().uri(url).header("range", format!("bytes={have}-")).call() {
                Ok(answer) => answer,
                Err(error) => {
                    problem = error.to_string();
                    std::thread::sleep(RETRY_DELAY * attempt);
                    continue;
                }
            };
            let partial = answer.status().as_u16() == 206;
            if have > size || !partial {
                // It is complete, or the cached part belongs to another file.
                file.set_len(0).map_err(failed)?;
            }
            if have > size && partial {
                continue;
            }
            bar.set_position(if partial { have } else { 0 });
            // At most one byte more than announced, to detect a response that is too long.
            let mut reader = bar.wrap_read(answer.into_body().into_reader()).take(size + 1 - if partial { have } else { 0 });
            if let Err(error) = std::io::copy(&mut reader, &mut file) {
                problem = error.to_string();
            }
        }
        bar.finish_and_clear();
        file.sync_all().and_then(|()| std::fs::rename(&part, blob)).map_err(failed)
    }
}

/// A symbolic link to a file of the cache if the system supports it, otherwise a copy.
fn link(relative: &Path, file: &Path, place: &Path) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        let _ = file;
        std::os::unix::fs::symlink(relative, place)
    }
    #[cfg(not(unix))]
    {
        let _ = relative;
        std::fs::rename(file, place)
    }
}

/// The error message for a failed request.
pub(crate) fn silent(error: impl std::fmt::Display) -> String {
    format!("the hub does not respond ({error}); set {OFFLINE}=1 to use the cached files")
}

/// The cached snapshot of the revision.
pub(crate) fn snapshot(cache: &Cache, repo: &Repo) -> Problem<PathBuf> {
    let folder = cache.path().join(repo.folder_name());
    let commit = std::fs::read_to_string(folder.join("refs").join(repo.revision())).unwrap_or(repo.revision().to_owned());
    let snapshot = folder.join("snapshots").join(commit.trim());
    if !snapshot.is_dir() {
        let place = cache.path().display();
        return Err(format!("{OFFLINE} is set and the cache in {place} does not contain it; fetch it once without {OFFLINE}"));
    }
    Ok(snapshot)
}

/// The directory of `hf://<owner>/<name>[@<revision>]`: configuration, tokenizer and safetensors, fetched if they are not cached.
pub(crate) fn model(requested: &str, rest: &str) -> Result<PathBuf> {
    let refuse = |problem: String| Error::HubModel { requested: requested.into(), problem };
    let parsed = rest.split_once('/').and_then(|(owner, name)| repo(owner, name, RepoType::Model));
    let repo = parsed.ok_or_else(|| refuse("write it as hf://<owner>/<name>[@<revision>]".into()))?;
    let cache = cache().map_err(refuse)?;
    if offline() { snapshot(&cache, &repo).map_err(refuse) } else { fetched(&cache, &repo).map_err(refuse) }
}

/// Only the configuration of such a model.
pub(crate) fn config(requested: &str, rest: &str) -> Result<PathBuf> {
    let refuse = |problem: String| Error::HubModel { requested: requested.into(), problem };
    let parsed = rest.split_once('/').and_then(|(owner, name)| repo(owner, name, RepoType::Model));
    let repo = parsed.ok_or_else(|| refuse("write it as hf://<owner>/<name>[@<revision>]".into()))?;
    let cache = cache().map_err(refuse)?;
    if offline() {
        return Ok(snapshot(&cache, &repo).map_err(refuse)?.join(FILES[0]));
    }
    let hub = Hub::new(&cache, &repo, false).map_err(refuse)?;
    hub.get(FILES[0]).map_err(|error| refuse(format!("cannot fetch its {}: {error}", FILES[0])))
}

fn fetched(cache: &Cache, repo: &Repo) -> Problem<PathBuf> {
    let hub = Hub::new(cache, repo, true)?;
    let missing = |error| format!("cannot fetch it ({error}); check owner, name and revision, or set {OFFLINE}=1 to use the cache");
    let there = hub.names().map_err(missing)?;
    let has = |name: &str| there.iter().any(|file| file == name);
    if !has(FILES[0]) {
        return Err(format!("the repository contains no {}; only models in Hugging Face format are supported", FILES[0]));
    }
    let mut names: Vec<String> = FILES.iter().filter(|name| has(name)).map(|&name| name.to_owned()).collect();
    let fetch = |name: &str| hub.get(name).map_err(|error| format!("{name} cannot be fetched: {error}"));
    if has(WEIGHTS) {
        names.push(WEIGHTS.into());
    } else if has(INDEX) {
        let index = fetch(INDEX)?;
        names.push(INDEX.into());
        names.extend(shards(&index)?.into_iter().filter(|shard| has(shard)));
    } else {
        return Err(format!("the repository contains neither {WEIGHTS} nor {INDEX}; other weight formats are not supported"));
    }
    let mut folders = Vec::new();
    for name in &names {
        folders.push(fetch(name)?.parent().map(Path::to_owned).ok_or("the cache has no directory for it")?);
    }
    folders.dedup();
    match folders.len() {
        1 => Ok(folders.swap_remove(0)),
        _ => Err("the repository changed while it was fetched; try again".into()),
    }
}

/// The files in an index. An invalid index is reported when the model is read.
fn shards(index: &Path) -> Problem<Vec<String>> {
    let text = termwise_base::files::read_text(index).map_err(|error| format!("cannot read {}: {error}", index.display()))?;
    let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let map = value.get("weight_map").and_then(serde_json::Value::as_object);
    let mut names: Vec<String> = map.into_iter().flat_map(|map| map.values()).filter_map(|name| Some(name.as_str()?.to_owned())).collect();
    names.sort();
    names.dedup();
    Ok(names)
}
