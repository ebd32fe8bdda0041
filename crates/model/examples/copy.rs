//! Reads every model in the folders below one folder and writes it below another: what another tool can check termwise's files with.
//!
//! `cargo run -p termwise-model --example copy -- FROM TO`

use std::path::PathBuf;

use termwise_model::Model;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut folders = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(from), Some(to)) = (folders.next(), folders.next()) else { return Err("two folders are needed: from, and to".into()) };
    for entry in std::fs::read_dir(from)? {
        let folder = entry?.path();
        if let (true, Some(name)) = (folder.join("config.json").is_file(), folder.file_name()) {
            let copy = to.join(name);
            std::fs::create_dir_all(&copy)?;
            Model::read(&folder)?.write(&copy, &Default::default())?;
            println!("{}", copy.display());
        }
    }
    Ok(())
}
