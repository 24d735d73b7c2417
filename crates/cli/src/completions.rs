//! Generation of shell completions and manual pages from the definition of the command line.

use std::fs;

use clap_complete::Shell;

use crate::{Failure, args::Man, command, print};

/// Prints the completion script for a shell on stdout.
pub(crate) fn print(shell: Shell) -> Result<(), Failure> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command(), "tarn", &mut text);
    print::out(&String::from_utf8_lossy(&text))
}

/// Writes a manual page for `tarn` and for each of its commands into a directory. Creates the
/// directory if it does not exist.
pub(crate) fn write_man_pages(args: &Man) -> Result<(), Failure> {
    let failed = |errno| Failure::File { operation: "write manual pages to", path: args.dir.clone(), errno };
    fs::create_dir_all(&args.dir).map_err(failed)?;
    clap_mangen::generate_to(command(), &args.dir).map_err(failed)
}
