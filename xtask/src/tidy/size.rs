//! Rule: limits on the sizes of functions and files.

use super::{Complaint, rust::RustFile, sources::Sources};

/// Lines of a function, from `fn` to its closing brace.
const FUNCTION_LINES_MAX: usize = 70;
/// Lines of a file that are not test.
const FILE_LINES_MAX: usize = 800;

/// Functions above the limit, each with its length and reason.
const WHOLE: &[(&str, &str, usize, &str)] = &[(
    "crates/pool/src/slice.rs",
    "step",
    90,
    "the life of a slice is one match: a table, one arm for each move",
)];

/// Complains about each longer one.
pub fn lengths(sources: &Sources) -> Vec<Complaint> {
    sources.shipped().flat_map(|file| long_functions(file).chain(long_file(file))).collect()
}

fn long_functions(file: &RustFile) -> impl Iterator<Item = Complaint> {
    let long = file.functions().into_iter().filter(|(_, (name, lines))| *lines > lines_max(&file.path, name));
    long.map(|(line, (name, lines))| Complaint {
        path: file.path.clone(),
        line,
        what: format!("{name} has {lines} lines, more than {}", lines_max(&file.path, &name)),
        mend: "give its parts names of their own",
    })
}

fn lines_max(path: &str, name: &str) -> usize {
    let whole = WHOLE.iter().find(|(file, function, ..)| *file == path && *function == name);
    whole.map_or(FUNCTION_LINES_MAX, |(_, _, lines, _)| *lines)
}

fn long_file(file: &RustFile) -> Option<Complaint> {
    let lines = file.lines_shipped();
    (lines > FILE_LINES_MAX).then(|| Complaint {
        path: file.path.clone(),
        line: lines,
        what: format!("{lines} lines that are not test, more than {FILE_LINES_MAX}"),
        mend: "find the second subject in it and give that a file",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    fn function(lines: usize) -> String {
        format!("//! A.\nfn a() {{\n{}}}\n", "    b();\n".repeat(lines - 2))
    }

    #[test]
    fn the_longest_function_allowed_is_allowed() {
        assert_eq!(lengths(&sources(&[("a.rs", &function(FUNCTION_LINES_MAX))])), []);
    }

    #[test]
    fn a_longer_function_is_found_where_it_begins() {
        assert_eq!(places(&lengths(&sources(&[("a.rs", &function(FUNCTION_LINES_MAX + 1))]))), ["a.rs:2"]);
    }

    #[test]
    fn what_reads_best_whole_may_be_longer_and_not_endless() {
        let (path, name, lines, _) = WHOLE[0];
        let whole = |lines| function(lines).replace("fn a", &format!("fn {name}"));
        assert_eq!(lengths(&sources(&[(path, &whole(lines))])), []);
        assert_eq!(places(&lengths(&sources(&[(path, &whole(lines + 1))]))), [format!("{path}:2")]);
    }

    #[test]
    fn a_long_file_is_found_and_its_tests_are_not_counted() {
        let long = "const A: u8 = 0;\n".repeat(FILE_LINES_MAX);
        let tests = format!("#[cfg(test)]\nmod tests {{\n{long}}}\n");
        assert_eq!(lengths(&sources(&[("a.rs", &format!("{long}{tests}"))])), []);
        assert_eq!(lengths(&sources(&[("a.rs", &format!("{long}{tests}const B: u8 = 0;\n"))])).len(), 1);
    }
}
