//! The program; everything is in the library of the same name.

fn main() -> std::process::ExitCode {
    termwise::main_with(std::env::args_os())
}
