//! Rule: functions and files do not exceed a maximum number of lines.

use super::{Violation, rust::RustFile, sources::Sources};

/// Maximum number of lines of a function, from `fn` to the closing brace.
const FUNCTION_LINES_MAX: usize = 70;
/// Maximum number of lines of a file, without test code.
const FILE_LINES_MAX: usize = 800;

/// Exceptions: path, function, maximum number of lines, and reason.
const LENGTH_EXCEPTIONS: &[(&str, &str, usize, &str)] = &[(
    "crates/pool/src/slice.rs",
    "step",
    90,
    "the state machine of a slice is one match with one arm per transition",
)];

/// Reports functions and files that are too long.
pub fn check_lengths(sources: &Sources) -> Vec<Violation> {
    sources.non_test_files().flat_map(|file| long_functions(file).chain(long_file(file))).collect()
}

fn long_functions(file: &RustFile) -> impl Iterator<Item = Violation> {
    let long = file.functions().into_iter().filter(|(_, (name, lines))| *lines > lines_max(&file.path, name));
    long.map(|(line, (name, lines))| Violation {
        path: file.path.clone(),
        line,
        message: format!(
            "function {name} has {lines} lines: must be at most {}",
            lines_max(&file.path, &name)
        ),
        fix: "extract functions",
    })
}

fn lines_max(path: &str, name: &str) -> usize {
    let exception = LENGTH_EXCEPTIONS.iter().find(|(file, function, ..)| *file == path && *function == name);
    exception.map_or(FUNCTION_LINES_MAX, |(_, _, lines, _)| *lines)
}

fn long_file(file: &RustFile) -> Option<Violation> {
    let lines = file.count_non_test_lines();
    (lines > FILE_LINES_MAX).then(|| Violation {
        path: file.path.clone(),
        line: lines,
        message: format!("file has {lines} lines outside of tests: must be at most {FILE_LINES_MAX}"),
        fix: "move a part of the code to another file",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    fn function_with_lines(lines: usize) -> String {
        format!("//! A.\nfn a() {{\n{}}}\n", "    b();\n".repeat(lines - 2))
    }

    #[test]
    fn function_at_the_limit_passes() {
        assert_eq!(check_lengths(&sources(&[("a.rs", &function_with_lines(FUNCTION_LINES_MAX))])), []);
    }

    #[test]
    fn longer_function_is_reported_at_its_first_line() {
        assert_eq!(
            locations(&check_lengths(&sources(&[("a.rs", &function_with_lines(FUNCTION_LINES_MAX + 1))]))),
            ["a.rs:2"]
        );
    }

    #[test]
    fn exceptions_have_their_own_limit() {
        let (path, name, lines, _) = LENGTH_EXCEPTIONS[0];
        let exception = |lines| function_with_lines(lines).replace("fn a", &format!("fn {name}"));
        assert_eq!(check_lengths(&sources(&[(path, &exception(lines))])), []);
        assert_eq!(
            locations(&check_lengths(&sources(&[(path, &exception(lines + 1))]))),
            [format!("{path}:2")]
        );
    }

    #[test]
    fn long_file_is_reported_without_counting_its_tests() {
        let long = "const A: u8 = 0;\n".repeat(FILE_LINES_MAX);
        let tests = format!("#[cfg(test)]\nmod tests {{\n{long}}}\n");
        assert_eq!(check_lengths(&sources(&[("a.rs", &format!("{long}{tests}"))])), []);
        assert_eq!(
            check_lengths(&sources(&[("a.rs", &format!("{long}{tests}const B: u8 = 0;\n"))])).len(),
            1
        );
    }
}
