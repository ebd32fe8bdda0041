//! The commit that the program is built from. Here and not in a library: a new commit compiles this crate again and no other.

use std::path::Path;
use std::process::Command;

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let git = |words: &[&str]| {
        let output = Command::new("git").current_dir(&root).args(words).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
    };
    // Sources that were unpacked inside somebody else's repository are not of its commit.
    let own = git(&["rev-parse", "--show-toplevel"]).and_then(|top| Path::new(&top).canonicalize().ok()) == root.canonicalize().ok();
    let commit = git(&["rev-parse", "HEAD"]).filter(|_| own).unwrap_or_default();
    let modified = own && git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|changes| !changes.is_empty());
    println!("cargo::rustc-env=TERMWISE_COMMIT={commit}");
    println!("cargo::rustc-env=TERMWISE_MODIFIED={modified}");
    // What can change the answer: sources, and where HEAD is. Cargo takes a path that does not exist as changed every time.
    let heads = ["HEAD", "logs/HEAD"].map(|name| git(&["rev-parse", "--git-path", name]).filter(|_| own));
    let paths = ["crates", "Cargo.toml", "Cargo.lock"].map(String::from).into_iter().chain(heads.into_iter().flatten());
    for path in paths.map(|path| root.join(path)).filter(|path| path.exists()) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
}
