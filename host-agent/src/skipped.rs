//! Reporting of test parts that cannot run on this machine. The integration tests also include this
//! file.

use std::{fs::File, io::Write as _};

/// Reports that a part of a test is skipped: on standard error, and in the summary of `cargo xtask
/// test`.
pub(crate) fn report_skipped(part: &str) {
    eprintln!("SKIPPED: {part}");
    if let Some(list) = std::env::var_os("TARN_LEFT_OUT") {
        let list = File::options().append(true).create(true).open(list);
        list.and_then(|mut list| writeln!(list, "{part}")).expect("the list of skipped tests is writable");
    }
}
