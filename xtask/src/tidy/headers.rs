//! Rule: the first line of each Rust and proto file describes the file.

use super::{Violation, sources::Sources};

const FIX: &str = "start the file with a comment that describes the purpose of the file";

/// Reports each Rust and proto file whose first line is not a comment.
pub fn check_first_lines(sources: &Sources) -> Vec<Violation> {
    let rust_files = sources.with_suffix(".rs").filter(|(_, text)| !text.starts_with("//! "));
    let protos = sources.with_suffix(".proto").filter(|(_, text)| !text.starts_with("// "));
    let violation = |(path, _): (&str, &str)| Violation {
        path: path.to_owned(),
        line: 1,
        message: "the first line must be a comment that describes the file".to_owned(),
        fix: FIX,
    };
    rust_files.chain(protos).map(violation).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    #[test]
    fn file_without_header_is_reported() {
        let files = [("a.rs", "//! What it is.\n"), ("b.rs", "use std::fs;\n"), ("c.proto", "syntax = 1;")];
        assert_eq!(locations(&check_first_lines(&sources(&files))), ["b.rs:1", "c.proto:1"]);
    }
}
