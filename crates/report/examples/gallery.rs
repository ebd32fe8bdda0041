//! Writes an HTML report with every kind of figure and table: `cargo run -p termwise-report --example gallery -- FOLDER`.

#[path = "../tests/all/sample/mod.rs"]
mod sample;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "gallery".into());
    println!("{}", sample::page().write(folder.as_ref())?.display());
    print!("{}", sample::page().to_terminal(&termwise_report::Terminal::default()));
    print!("\n{}\n{}", sample::heads().to_text(100), sample::spectrum(12, 40).to_text(80));
    Ok(())
}
