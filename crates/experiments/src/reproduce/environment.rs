//! Provenance of results: the machine and the program.

use serde::{Deserialize, Serialize};
use termwise_train::provenance::Provenance;

use termwise_base::threads;

/// The machine and the program that made results.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// The build that decided and wrote them; runs name their own.
    #[serde(flatten)]
    pub provenance: Provenance,
    /// Whether it was compiled with debug assertions, which makes it slower.
    pub debug: bool,
    /// Cores that this process may use.
    pub cores: usize,
    /// Bytes of memory; absent if the system does not report them.
    pub memory: Option<u64>,
    /// Operating system and architecture.
    pub system: String,
}

impl Environment {
    /// This machine and this program.
    pub fn here(provenance: Provenance) -> Environment {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kilobytes = field(&text, "MemTotal").and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
        Environment {
            provenance,
            debug: cfg!(debug_assertions),
            cores: threads::available(),
            memory: kilobytes.map(|kilobytes| kilobytes * 1024),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }
}

/// The first value of that name in lines of `name : value`.
fn field(text: &str, name: &str) -> Option<String> {
    text.lines().filter_map(|line| line.split_once(':')).find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "model\t\t: 6\nmodel name\t: Some CPU @ 2 GHz: fast\nmodel name\t: another\n";
        assert_eq!(field(text, "model name").as_deref(), Some("Some CPU @ 2 GHz: fast"));
        assert_eq!(field(text, "cores"), None);
    }
}
