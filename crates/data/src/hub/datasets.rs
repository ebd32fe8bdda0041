//! Hugging Face data sets, through the standard cache.

use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};
use hf_hub::{Cache, Repo, RepoType};

use super::remote::{self as hub, Hub, OFFLINE, silent};
use crate::error::{Error, Result};
use crate::sources::{ENDINGS, SourceFile};

/// Maximum number of attempts to fetch all files from the same revision.
const ATTEMPTS: usize = 3;

/// The files of `hf://datasets/<owner>/<name>[@<revision>]/<glob>`, sorted by name, fetched if they are not cached.
///
/// The hub provides the list of matching files, so an incomplete cache is never mistaken for the complete data set. With `HF_HUB_OFFLINE` set, the
/// matching files of the cached snapshot are used.
pub(super) fn files(requested: &str) -> Result<Vec<SourceFile>> {
    let refuse = |problem: String| Error::DataSource { requested: requested.into(), problem };
    let (repo, pattern) = parse(requested).ok_or_else(|| refuse("write it as hf://datasets/<owner>/<name>[@<revision>]/<glob>".into()))?;
    let pattern = Pattern::new(&pattern).map_err(|error| refuse(format!("not a valid glob: {error}")))?;
    let (cache, offline) = (hub::cache().map_err(refuse)?, hub::offline());
    let found =
        if offline { cached(&cache, &repo, &pattern).map_err(refuse)? } else { fetched(&cache, &repo, &pattern).map_err(refuse)? };
    if found.is_empty() {
        return Err(refuse(match offline {
            true => {
                format!("{OFFLINE} is set and the cache in {} contains no matching file that ends in {ENDINGS}", cache.path().display())
            }
            false => format!("no file of the data set matches and ends in {ENDINGS}"),
        }));
    }
    Ok(found)
}

/// Owner and name with the revision, and the glob.
fn parse(requested: &str) -> Option<(Repo, String)> {
    let mut parts = requested.strip_prefix("hf://datasets/")?.splitn(3, '/');
    let (owner, name, pattern) = (parts.next()?, parts.next()?, parts.next()?);
    let repo = hub::repo(owner, name, RepoType::Dataset)?;
    (!pattern.is_empty()).then(|| (repo, pattern.to_owned()))
}

/// `*` matches within a path component, `**` matches any directories.
fn matches(pattern: &Pattern, name: &str) -> bool {
    pattern.matches_with(name, MatchOptions { require_literal_separator: true, ..MatchOptions::new() })
}

/// All files of one snapshot. If the hub has a newer revision than the cache, fetching the first missing file updates the revision, and files found in the
/// cache before are fetched again.
fn fetched(cache: &Cache, repo: &Repo, pattern: &Pattern) -> std::result::Result<Vec<SourceFile>, String> {
    let hub = Hub::new(cache, repo, false)?;
    for _ in 0..ATTEMPTS {
        let mut names = hub.names().map_err(silent)?;
        names.retain(|name| matches(pattern, name) && SourceFile::new(name).is_some());
        names.sort();
        let fetch = |name: &String| hub.get(name).map_err(|error| format!("{name} cannot be fetched: {error}"));
        let paths = names.iter().map(fetch).collect::<std::result::Result<Vec<_>, _>>()?;
        let snapshot = |(path, name): (&PathBuf, &String)| path.ancestors().nth(Path::new(name).components().count()).map(Path::to_owned);
        let mut snapshots = paths.iter().zip(&names).map(snapshot);
        let first = snapshots.next();
        if snapshots.all(|other| first.as_ref() == Some(&other)) {
            return paths.into_iter().map(|path| SourceFile::new(path).ok_or("the cache contains it under another name".into())).collect();
        }
    }
    Err("the data set changed while it was fetched; try again, or name a revision: hf://datasets/<owner>/<name>@<revision>/<glob>".into())
}

/// The files of the snapshot of the revision.
fn cached(cache: &Cache, repo: &Repo, pattern: &Pattern) -> std::result::Result<Vec<SourceFile>, String> {
    let snapshot = hub::snapshot(cache, repo)?;
    let mut names = Vec::new();
    list(&snapshot, "", &mut names).map_err(|error| format!("cannot list {}: {error}", snapshot.display()))?;
    names.retain(|name| matches(pattern, name));
    names.sort();
    Ok(names.iter().filter_map(|name| SourceFile::new(snapshot.join(name))).collect())
}

/// Paths of the files below `folder`, with slashes as on the hub.
fn list(folder: &Path, place: &str, names: &mut Vec<String>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path: PathBuf = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let name = format!("{place}{name}");
        // A snapshot contains links to files; its directories are not links.
        if path.is_file() {
            names.push(name);
        } else if path.is_dir() && !path.is_symlink() {
            list(&path, &format!("{name}/"), names)?;
        }
    }
    Ok(())
}
