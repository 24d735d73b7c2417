//! Rule: no file contains markers of unfinished work, debug output, or machine-specific paths.

use super::{Violation, sources::Sources};

/// Path of this file, which is exempt because it contains the forbidden words.
const THIS_FILE: &str = "xtask/src/tidy/forbidden_words.rs";
/// Forbidden words, each with advice on a replacement.
const FORBIDDEN_WORDS: &[(&str, &str)] = &[
    ("TODO", "implement the missing part"),
    ("FIXME", "fix the problem"),
    ("XXX", "describe the problem"),
    ("HACK", "describe the reason, or fix the problem"),
    ("todo!", "implement the missing part"),
    ("unimplemented!", "implement the missing part"),
    ("dbg!", "use tracing with fields"),
    ("/home/", "take the path as an argument"),
    ("/root/", "take the path as an argument"),
];

/// Reports each line with a forbidden word.
pub fn check_forbidden_words(sources: &Sources) -> Vec<Violation> {
    let texts = sources.texts.iter().filter(|(path, _)| *path != THIS_FILE && !path.ends_with(".lock"));
    let lines =
        texts.flat_map(|(path, text)| text.lines().enumerate().map(move |(n, line)| (path, n + 1, line)));
    let violations = lines.filter_map(|(path, line, text)| {
        let (word, fix) = FORBIDDEN_WORDS.iter().find(|(word, _)| text.contains(word))?;
        Some(Violation { path: path.clone(), line, message: format!("must not contain {word:?}"), fix })
    });
    violations.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    #[test]
    fn forbidden_words_are_reported_in_any_file() {
        let files =
            [("a.rs", "//! A.\n// TODO: all of it\n"), ("b.md", "see /home/me/b\n"), ("c.md", "fine\n")];
        assert_eq!(locations(&check_forbidden_words(&sources(&files))), ["a.rs:2", "b.md:1"]);
    }
}
