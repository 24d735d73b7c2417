//! Rule: nothing is left for later and nothing points to one person's machine: some words are in no file.

use super::{Complaint, sources::Sources};

/// This file, which must name them.
const OWN: &str = "xtask/src/tidy/words.rs";
/// Forbidden words, each with its alternative.
const FORBIDDEN: &[(&str, &str)] = &[
    ("TODO", "do it"),
    ("FIXME", "mend it"),
    ("XXX", "say what it is"),
    ("HACK", "say why it must be so, or mend it"),
    ("todo!", "do it"),
    ("unimplemented!", "do it"),
    ("dbg!", "use tracing, with facts as fields"),
    ("/home/", "paths of one machine are arguments"),
    ("/root/", "paths of one machine are arguments"),
];

/// Complains about each line that holds one.
pub fn none_forbidden(sources: &Sources) -> Vec<Complaint> {
    let texts = sources.texts.iter().filter(|(path, _)| *path != OWN && !path.ends_with(".lock"));
    let lines =
        texts.flat_map(|(path, text)| text.lines().enumerate().map(move |(n, line)| (path, n + 1, line)));
    let found = lines.filter_map(|(path, line, text)| {
        let (word, mend) = FORBIDDEN.iter().find(|(word, _)| text.contains(word))?;
        Some(Complaint { path: path.clone(), line, what: format!("{word:?}"), mend })
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    #[test]
    fn a_word_left_for_later_is_found_in_any_file() {
        let files =
            [("a.rs", "//! A.\n// TODO: all of it\n"), ("b.md", "see /home/me/b\n"), ("c.md", "fine\n")];
        assert_eq!(places(&none_forbidden(&sources(&files))), ["a.rs:2", "b.md:1"]);
    }
}
