//! Written files: links are followed; devices and pipes are written, not replaced.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::process::Command;

use crate::support::Place;

#[test]
fn outputs_go_through_links_pipes_and_devices() {
    let place = Place::new();
    place.train(&["--name", "a", "--quiet"]).assert().success();
    let writing = |out: &str| {
        let export = place.command(&["export", "torch", "softmax", "--out", out]);
        let state = place.command(&["generate", "a", "--prompt", "Tom", "--max-tokens", "0", "--save-state", out, "--quiet"]);
        [("export", export), ("state", state)]
    };
    let plain: Vec<Vec<u8>> = writing("plain")
        .into_iter()
        .map(|(_, mut command)| {
            command.assert().success();
            fs::read(place.path("plain")).expect("a file")
        })
        .collect();
    // The order of the entries in the header of a state file is not fixed.
    let same = |name: &str, found: &[u8], expected: &[u8]| if name == "state" { found.len() == expected.len() } else { found == expected };
    // A link, to a file in another folder.
    fs::create_dir(place.path("other")).expect("a folder");
    std::os::unix::fs::symlink("other/file", place.path("link")).expect("a link");
    for ((name, mut command), expected) in writing("link").into_iter().zip(&plain) {
        command.assert().success();
        assert!(fs::symlink_metadata(place.path("link")).expect("a link").is_symlink(), "{name}");
        assert!(same(name, &fs::read(place.path("other/file")).expect("the target"), expected), "{name}");
    }
    // A pipe.
    assert!(Command::new("mkfifo").arg(place.path("pipe")).status().expect("mkfifo").success());
    for ((name, mut command), expected) in writing("pipe").into_iter().zip(&plain) {
        let reader = std::thread::spawn({
            let pipe = place.path("pipe");
            move || fs::read(pipe).expect("a pipe")
        });
        command.assert().success();
        assert!(same(name, &reader.join().expect("a thread"), expected), "{name}");
        assert!(fs::metadata(place.path("pipe")).expect("a pipe").file_type().is_fifo(), "{name}");
    }
    // Standard output, which is a pipe here.
    let (_, mut export) = writing("/dev/stdout").into_iter().next().expect("a command");
    assert!(export.assert().success().get_output().stdout == plain[0]);
    // A device, a copy of /dev/null: a program that replaced it would leave a file.
    let device = place.path("null");
    let made = Command::new("mknod").arg(&device).args(["c", "1", "3"]).output().is_ok_and(|output| output.status.success());
    // Some containers create the node and refuse to open it.
    let usable = made && fs::File::options().write(true).open(&device).is_ok();
    if termwise_base::test_skip::need("device", "permission to create a device node", usable.then_some(())).is_none() {
        return;
    }
    for (name, mut command) in writing("null") {
        command.assert().success();
        assert!(fs::metadata(&device).expect("a device").file_type().is_char_device(), "{name}");
    }
}
