//! Parts of tests that cannot run on this machine. The integration tests include this file, too.

use std::{fs::File, io::Write as _};

/// Prints a part of a test that is left out, also in the summary of `cargo xtask test`.
pub(crate) fn left_out(what: &str) {
    eprintln!("LEFT OUT: {what}");
    if let Some(list) = std::env::var_os("TARN_LEFT_OUT") {
        let list = File::options().append(true).create(true).open(list);
        list.and_then(|mut list| writeln!(list, "{what}"))
            .expect("the list of left-out tests can be written");
    }
}
