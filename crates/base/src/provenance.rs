//! The build, machine and command that produced a result.

use std::ffi::OsString;
use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A build of the program. The default is an unknown build.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Build {
    /// Version of the program; empty if unknown.
    pub version: String,
    /// Git commit of the build; `None` outside a repository.
    #[serde(default)]
    pub commit: Option<String>,
    /// Whether the working tree differed from that commit.
    #[serde(default)]
    pub modified: bool,
}

/// `0.1.0 (2be16063c5a1, modified)`.
impl fmt::Display for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let modified = if self.modified { ", modified" } else { "" };
        match &self.commit {
            _ if self.version.is_empty() => write!(f, "build unknown"),
            Some(commit) => write!(f, "{} ({}{modified})", self.version, commit.get(..12).unwrap_or(commit)),
            None => write!(f, "{} (commit unknown)", self.version),
        }
    }
}

/// The origin of a result. The default is an unknown origin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// The build.
    #[serde(flatten)]
    pub build: Build,
    /// The instruction set used. Results differ between instruction sets in the last digits.
    #[serde(default)]
    pub instructions: String,
    /// The processor's model name; empty if unknown.
    #[serde(default, alias = "cpu")]
    pub processor: String,
    /// The command line, quoted for a shell.
    #[serde(default)]
    pub command: String,
}

impl Provenance {
    /// The provenance of this process, with its build, instruction set and command line.
    pub fn here(build: Build, instructions: &str, words: &[OsString]) -> Provenance {
        Provenance { build, instructions: instructions.into(), processor: processor(), command: command_line(words) }
    }

    /// Whether both have the same build and instruction set, and so should compute the same values.
    pub fn agrees(&self, other: &Provenance) -> bool {
        self.build == other.build && self.instructions == other.instructions
    }

    /// The build, followed by the instruction set if known: `0.1.0 (be16063c5a12) avx512`.
    pub fn name(&self) -> String {
        format!("{} {}", self.build, self.instructions).trim_end().to_owned()
    }
}

/// The distinct names of these builds; `build unknown` for an empty list.
pub fn names(all: &[Provenance]) -> String {
    let mut names: Vec<String> = Vec::new();
    for name in all.iter().map(Provenance::name) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if names.is_empty() { Build::default().to_string() } else { names.join(", then ") }
}

/// The processor's model name; empty if unknown.
pub fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.find(|(key, _)| key.trim() == "model name").map_or(String::new(), |(_, value)| value.trim().to_owned())
}

/// The command line, quoted for a shell. The program is recorded by its file name, because its folder differs between machines.
fn command_line(words: &[OsString]) -> String {
    let Some((program, rest)) = words.split_first() else { return String::new() };
    let program = Path::new(program).file_name().unwrap_or(program);
    let words = std::iter::once(program).chain(rest.iter().map(OsString::as_os_str));
    words.map(|word| quoted(&word.to_string_lossy())).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_=./:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made_by(commit: &str, command: &str) -> Provenance {
        let build = Build { version: "1.2.3".into(), commit: Some(commit.into()), modified: false };
        Provenance { build, instructions: "avx2".into(), processor: "some".into(), command: command.into() }
    }

    #[test]
    fn builds_have_names() {
        let build =
            |version: &str, commit: Option<&str>, modified| Build { version: version.into(), commit: commit.map(Into::into), modified };
        assert_eq!(build("1.2.3", Some("0123456789abcdef"), true).to_string(), "1.2.3 (0123456789ab, modified)");
        assert_eq!(build("1.2.3", Some("0123"), false).to_string(), "1.2.3 (0123)");
        assert_eq!(build("1.2.3", None, false).to_string(), "1.2.3 (commit unknown)");
        assert_eq!(names(&[]), "build unknown");
        assert_eq!(names(&[Provenance::default()]), "build unknown");
        assert_eq!(names(&[made_by("a", ""), made_by("b", ""), made_by("a", "")]), "1.2.3 (a) avx2, then 1.2.3 (b) avx2");
    }

    #[test]
    fn a_command_line_names_the_program_without_its_folder() {
        let words = ["/some/folder/termwise", "eval", "/data/a b.txt"].map(OsString::from);
        assert_eq!(command_line(&words), "termwise eval '/data/a b.txt'");
        assert_eq!(command_line(&[]), "");
    }

    #[test]
    fn commands_are_quoted_for_a_shell() {
        assert_eq!(["a=b", "x y", "it's", ""].map(quoted), ["a=b", "'x y'", "'it'\\''s'", "''"]);
    }
}
