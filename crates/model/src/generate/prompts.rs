//! Reading prompts from a file.

use std::path::Path;

use serde_json::Value;
use termwise_data::{Error, Result};

/// Reads the prompts of a file: JSON lines with a string `prompt` if the name ends in `.jsonl`, else one prompt per line. Empty lines are skipped.
pub fn read(path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path).map_err(termwise_base::files::Error::io("read the prompts", path))?;
    let json = path.extension().is_some_and(|extension| extension == "jsonl");
    let mut prompts = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        prompts.push(if json { parse(line, path, number as u64 + 1)? } else { line.to_owned() });
    }
    if prompts.is_empty() {
        return Err(Error::DataSource {
            requested: path.display().to_string(),
            problem: "the file contains no prompt; write one per line".into(),
        });
    }
    Ok(prompts)
}

fn parse(line: &str, path: &Path, number: u64) -> Result<String> {
    let bad = |problem: String| Error::Document { path: path.into(), unit: "line", number, problem };
    let value: Value = serde_json::from_str(line).map_err(|error| bad(format!("not valid JSON: {error}")))?;
    match value.get("prompt") {
        Some(Value::String(prompt)) => Ok(prompt.clone()),
        Some(other) => Err(bad(format!("`prompt` must be a string, found {other}"))),
        None => Err(bad("the key `prompt` is missing; write lines such as {\"prompt\": \"Once\"}".into())),
    }
}
