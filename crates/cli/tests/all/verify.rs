//! `termwise verify`: valid, edited and unreadable reference files.

use std::path::{Path, PathBuf};

use predicates::prelude::*;
use predicates::str::contains;
use tempfile::TempDir;

use crate::support::{golden, termwise};

/// Checks only the reference files in this folder.
fn verify(folder: &Path) -> assert_cmd::assert::Assert {
    termwise(&["verify", "--only", "golden", "--golden", &folder.display().to_string()]).assert()
}

/// A copy of one reference file in a separate folder; `None` if the files are missing.
fn copied(name: &str) -> Option<(TempDir, PathBuf)> {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join(name);
    std::fs::copy(golden()?.join(name), &copy).expect("a reference file");
    Some((folder, copy))
}

/// Offset of the first byte of a tensor in a safetensors file.
fn first_byte(bytes: &[u8], tensor: &str) -> usize {
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("a header");
    8 + length + header[tensor]["data_offsets"][0].as_u64().expect("an offset") as usize
}

#[test]
fn the_reference_files_agree() {
    let Some(folder) = golden() else { return };
    let files = std::fs::read_dir(&folder)
        .expect("the folder")
        .filter(|entry| entry.as_ref().is_ok_and(|entry| entry.path().extension().is_some_and(|extension| extension == "safetensors")));
    let expected = format!("all pass: {} cases", files.count());
    let detailed = termwise(&["verify", "--only", "golden", "--golden", &folder.display().to_string(), "--details"]).assert();
    detailed.success().stdout(contains("softmax_taylor_80terms"));
    verify(&folder).success().stdout(contains(expected).and(contains("MISS").not()));
}

#[test]
fn identities_hold_for_another_seed_and_are_written_as_json() {
    let found = crate::support::json(&["verify", "--cases", "3", "--seed", "11", "--json", "--threads", "2"]);
    assert_eq!(found["summary"]["missed"], 0);
    let cases = found["cases"].as_array().expect("cases");
    assert_eq!(found["summary"]["cases"], cases.len());
    assert!(cases.iter().all(|case| case["passed"] == true && !case["measures"].as_array().expect("measures").is_empty()));
}

#[test]
fn a_tampered_value_is_found_and_named() {
    for tensor in ["logits", "grad:model.layers.1.self_attn.k_proj.weight", "loss", "grad:model.norm.weight"] {
        let Some((folder, file)) = copied("softmax_gate.safetensors") else { return };
        let mut bytes = std::fs::read(&file).expect("the copy");
        let at = first_byte(&bytes, tensor);
        let value = f32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        bytes[at..at + 4].copy_from_slice(&(value + 0.1).to_le_bytes());
        std::fs::write(&file, bytes).expect("the copy is written");
        verify(folder.path())
            .code(1)
            .stdout(contains("MISS: softmax_gate.safetensors").and(contains(tensor)).and(contains("1 missed: of 1 cases")));
    }
}

#[test]
fn another_attention_in_the_metadata_is_found() {
    let Some((folder, file)) = copied("softmax_divs.safetensors") else { return };
    let bytes = std::fs::read(&file).expect("the copy");
    let text = b"\"softmax_divs\"";
    let at = bytes.windows(text.len()).position(|window| window == text).expect("the name in the metadata");
    // The same length, so offsets stay valid: a variant with the same tensors, and one that does not exist.
    for (name, expected) in [(&b"softmax     "[..], "logits"), (b"softmax_divz", "did you mean `softmax_divs`?")] {
        let mut changed = bytes.clone();
        changed[at + 1..at + text.len() - 1].copy_from_slice(name);
        std::fs::write(&file, changed).expect("the copy is written");
        verify(folder.path()).code(1).stdout(contains("MISS").and(contains(expected)));
    }
}

#[test]
fn files_that_cannot_be_read_are_misses_with_a_reason() {
    let Some((folder, file)) = copied("softmax.safetensors") else { return };
    let bytes = std::fs::read(&file).expect("the copy");
    for (length, expected) in [(bytes.len() - 4, "truncated"), (100, "incomplete safetensors file"), (3, "incomplete safetensors file")] {
        std::fs::write(&file, &bytes[..length]).expect("the copy is written");
        verify(folder.path()).code(1).stdout(contains("MISS: softmax.safetensors").and(contains(expected)));
    }
}

#[test]
fn folders_without_files_are_misses() {
    let folder = tempfile::tempdir().expect("a folder");
    verify(folder.path()).code(1).stdout(contains("there is no .safetensors file"));
    verify(&folder.path().join("nowhere")).code(1).stdout(contains("cannot read the folder"));
}
