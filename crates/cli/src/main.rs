//! The program. The code is in the library of the same name.

fn main() -> std::process::ExitCode {
    termwise::run(std::env::args_os(), None).into()
}
