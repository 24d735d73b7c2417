//! Rule: no code has an attribute that weakens tests, such as `ignore` or `should_panic`.

use super::{Violation, sources::Sources};

/// Forbidden attributes, each with advice on a replacement.
const FORBIDDEN_ATTRIBUTES: &[(&str, &str)] = &[
    ("ignore", "run the test, or remove it"),
    ("should_panic", "assert on the error"),
    ("allow(dead_code)", "remove dead code"),
];

/// Reports each use of an attribute in [`FORBIDDEN_ATTRIBUTES`].
pub fn check_attributes(sources: &Sources) -> Vec<Violation> {
    let used = sources.rust.iter().flat_map(|file| file.attributes().into_iter().map(move |at| (file, at)));
    let violations = used.filter_map(|(file, (line, attribute))| {
        let (name, fix) = FORBIDDEN_ATTRIBUTES.iter().find(|(name, _)| *name == attribute)?;
        Some(Violation { path: file.path.clone(), line, message: format!("must not use #[{name}]"), fix })
    });
    violations.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    #[test]
    fn ignored_test_is_reported() {
        let text =
            "//! A.\n#[cfg(test)]\nmod tests {\n    #[test]\n    #[ignore = \"slow\"]\n    fn a() {}\n}\n";
        assert_eq!(locations(&check_attributes(&sources(&[("a.rs", text)]))), ["a.rs:5"]);
    }
}
