//! Rule: the first line of each Rust and proto file describes the file.

use super::{Complaint, sources::Sources};

const MEND: &str = "begin the file with what it is and what it leaves to others";

/// Complains about each file that begins with anything else.
pub fn first_lines(sources: &Sources) -> Vec<Complaint> {
    let rust = sources.ending(".rs").filter(|(_, text)| !text.starts_with("//! "));
    let wire = sources.ending(".proto").filter(|(_, text)| !text.starts_with("// "));
    let complaint = |(path, _): (&str, &str)| Complaint {
        path: path.to_owned(),
        line: 1,
        what: "the first line does not say what this file is".to_owned(),
        mend: MEND,
    };
    rust.chain(wire).map(complaint).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    #[test]
    fn a_file_without_a_header_is_found() {
        let files = [("a.rs", "//! What it is.\n"), ("b.rs", "use std::fs;\n"), ("c.proto", "syntax = 1;")];
        assert_eq!(places(&first_lines(&sources(&files))), ["b.rs:1", "c.proto:1"]);
    }
}
