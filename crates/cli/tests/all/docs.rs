//! The documentation: its links lead somewhere, its summary lists every page, and its reference is that of this program.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::support;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn pages() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|name| root().join(name)).into();
    let mut folders = vec![root().join("docs")];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).expect("documentation").map(|entry| entry.expect("a file").path()) {
            match path.extension() {
                _ if path.is_dir() => folders.push(path),
                Some(ending) if ending == "md" => found.push(path),
                _ => {}
            }
        }
    }
    found
}

/// Text outside of blocks of code, and outside of `code`.
fn prose(page: &str) -> String {
    let mut out = String::new();
    let mut fence: Option<usize> = None;
    for line in page.lines() {
        let ticks = line.trim_start().chars().take_while(|&c| c == '`').count();
        match fence {
            Some(open) if ticks >= open && line.trim().len() == ticks => fence = None,
            None if ticks >= 3 => fence = Some(ticks),
            None if !line.starts_with("    ") => {
                let parts = line.split('`').enumerate().filter(|(i, _)| i % 2 == 0).map(|(_, part)| part);
                out += &(parts.collect::<Vec<_>>().join(" ") + "\n");
            }
            _ => {}
        }
    }
    out
}

/// The addresses of `[words](address)` and `[name]: address`.
fn links(page: &str) -> Vec<String> {
    let text = prose(page);
    let inline = text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
    let named = text.lines().filter(|line| line.starts_with('[')).filter_map(|line| Some(line.split_once("]: ")?.1.trim()));
    inline.chain(named).map(str::to_owned).collect()
}

/// The anchors of headings, as forges and mdBook make them.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter_map(|line| line.strip_prefix('#')).map(|line| line.trim_start_matches('#').trim());
    let slug = |text: &str| {
        let kept = text.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
    };
    headings.map(slug).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let (mut count, mut broken) = (0, Vec::new());
    for page in pages() {
        let text = std::fs::read_to_string(&page).expect("a page");
        for link in links(&text).into_iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            count += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() { page.clone() } else { page.parent().expect("a folder").join(file) };
            let there = target.exists();
            let named = anchor.is_empty() || std::fs::read_to_string(&target).is_ok_and(|text| anchors(&text).contains(anchor));
            if !there || !named {
                broken.push(format!("{}: {link}", page.strip_prefix(root()).unwrap_or(&page).display()));
            }
        }
    }
    assert!(count > 40, "{count} links");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn every_page_is_in_the_summary_and_names_nothing_that_a_user_does_not_have() {
    let docs = root().join("docs");
    let summary = std::fs::read_to_string(docs.join("SUMMARY.md")).expect("a summary");
    let listed: BTreeSet<PathBuf> = links(&summary).iter().map(|link| docs.join(link)).collect();
    let there: BTreeSet<PathBuf> = pages().into_iter().filter(|page| page.starts_with(&docs) && !page.ends_with("SUMMARY.md")).collect();
    assert_eq!(there.difference(&listed).collect::<Vec<_>>(), Vec::<&PathBuf>::new(), "pages that the summary does not list");
    let readme = std::fs::read_to_string(root().join("README.md")).expect("a page");
    assert!(!readme.contains("../shared") && !readme.contains("/work/"), "the README names a path that a user does not have");
}

#[test]
fn the_reference_is_that_of_this_program() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().to_str().expect("a plain path");
    support::termwise(&["completions", "man", "--markdown", "--out", out]).env_remove("COLUMNS").assert().success();
    for name in ["commands.md", "settings.md", "parts.md", "combinations.md"] {
        let made = std::fs::read_to_string(folder.path().join(name)).expect("a page");
        let kept = std::fs::read_to_string(root().join("docs/reference").join(name)).unwrap_or_default();
        assert!(made.len() > 1000 && !made.contains("CARGO"), "{name}");
        let differs = made.lines().zip(kept.lines()).find(|(a, b)| a != b);
        assert!(
            made == kept,
            "docs/reference/{name} is not that of this program ({differs:?}); regenerate it: termwise completions man --markdown --out docs/reference"
        );
    }
}
