//! Result files.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use termwise_base::provenance::{Build, Provenance};
use termwise_report::{Block, Document, Documented, made_by, read, write};

#[derive(Serialize, Deserialize)]
struct Answer {
    value: u32,
}

impl Documented for Answer {
    const KIND: &'static str = "answer";

    fn document(&self) -> Document {
        Document { title: String::new(), lead: vec![Block::text(format!("It is {}.", self.value))], sections: Vec::new() }
    }
}

#[test]
fn files_name_the_build_and_the_command() {
    let folder = tempfile::tempdir().expect("a folder");
    let build = Build { version: "1.2.3".into(), commit: Some("abc".into()), modified: false };
    let made = Provenance { build, instructions: "avx2".into(), processor: "some".into(), command: "termwise answer".into() };
    let page = write(&Answer { value: 42 }, folder.path(), Some(&made)).expect("written");
    let json: Value = serde_json::from_str(&std::fs::read_to_string(folder.path().join("answer.json")).expect("JSON")).expect("JSON");
    assert_eq!(made_by(&json), Some(made));
    assert_eq!(read::<Answer>(json).expect("an answer").value, 42);
    let page = std::fs::read_to_string(page).expect("a page");
    assert!(page.contains("Made by termwise 1.2.3 (abc), avx2 on some") && page.contains("termwise answer"), "{page}");
    write(&Answer { value: 42 }, folder.path(), None).expect("written");
    assert!(!std::fs::read_to_string(folder.path().join("answer.json")).expect("JSON").contains("made_by"));
}
