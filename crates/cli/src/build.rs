//! Version and provenance of this build.

use std::ffi::OsString;
use std::sync::LazyLock;

use termwise_attention::simd::isa;
use termwise_base::provenance::{Build, Provenance};
use termwise_model::Precision;

/// The package version, and the commit that `build.rs` found.
pub fn build() -> Build {
    let commit = Some(env!("TERMWISE_COMMIT")).filter(|commit| !commit.is_empty()).map(Into::into);
    Build { version: env!("CARGO_PKG_VERSION").into(), commit, modified: env!("TERMWISE_MODIFIED") == "true" }
}

/// The provenance of this process, called with these words.
pub fn here(words: &[OsString]) -> Provenance {
    // In bf16, results differ between machines with and without bfloat16 instructions.
    let bf16 = if Precision::Bf16.warning().is_none() { " BF16" } else { "" };
    Provenance::here(build(), &format!("{}{bf16}", isa().name()), words)
}

/// For `-V`.
pub fn version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| build().to_string());
    &TEXT
}

/// For `--version`.
pub fn long_version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let Provenance { build, instructions, processor, .. } = here(&[]);
        let processor = if processor.is_empty() { "unknown processor".into() } else { processor };
        format!("{build}\n{instructions} on {processor}\n{} {}", std::env::consts::OS, std::env::consts::ARCH)
    });
    &TEXT
}
