//! Reads every model in the subdirectories of one directory and writes it to another, so that other tools can check the written files.
//!
//! `cargo run -p termwise-model --example copy -- FROM TO`

use std::path::PathBuf;

use termwise_model::Model;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut folders = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(from), Some(to)) = (folders.next(), folders.next()) else { return Err("two directories are required: FROM and TO".into()) };
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
