//! Rule: a test either proves something or is not there: none is left out, none succeeds by failing anywhere at all.

use super::{Complaint, sources::Sources};

/// Attributes that weaken a test, each with its alternative.
const FORBIDDEN: &[(&str, &str)] = &[
    ("ignore", "let it run, or remove it"),
    ("should_panic", "call what fails and assert on the error"),
    ("allow(dead_code)", "remove what is dead"),
];

/// Complains about each use of such an attribute.
pub fn all(sources: &Sources) -> Vec<Complaint> {
    let used = sources.rust.iter().flat_map(|file| file.attributes().into_iter().map(move |at| (file, at)));
    let found = used.filter_map(|(file, (line, attribute))| {
        let (name, mend) = FORBIDDEN.iter().find(|(name, _)| *name == attribute)?;
        Some(Complaint { path: file.path.clone(), line, what: format!("#[{name}]"), mend })
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    #[test]
    fn a_test_left_out_is_found() {
        let text =
            "//! A.\n#[cfg(test)]\nmod tests {\n    #[test]\n    #[ignore = \"slow\"]\n    fn a() {}\n}\n";
        assert_eq!(places(&all(&sources(&[("a.rs", text)]))), ["a.rs:5"]);
    }
}
