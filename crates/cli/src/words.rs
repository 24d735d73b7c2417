//! The words of `tarn` for other programs: completions for shells, pages for man.

use std::fs;

use clap_complete::Shell;

use crate::{Failure, args::Man, command, print};

/// Completions for one shell, on stdout.
pub(crate) fn completions(shell: Shell) -> Result<(), Failure> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command(), "tarn", &mut text);
    print::out(&String::from_utf8_lossy(&text))
}

/// One page for `tarn` and one for each command, into a folder that is made if need be.
pub(crate) fn man(args: &Man) -> Result<(), Failure> {
    let failed = |errno| Failure::File { tried: "write manual pages to", path: args.dir.clone(), errno };
    fs::create_dir_all(&args.dir).map_err(failed)?;
    clap_mangen::generate_to(command(), &args.dir).map_err(failed)
}
