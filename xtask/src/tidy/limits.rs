//! Rule: each constant in `limits.rs` and its modules is used by another file. Whether the limit is enforced
//! is checked by the tests of the other file.

use super::{Violation, rust::identifiers_outside, sources::Sources};

/// Path of the file with the limits.
const LIMITS_FILE: &str = "crates/units/src/limits.rs";
/// Folder of its modules.
const LIMITS_FOLDER: &str = "crates/units/src/limits/";

/// Reports each limit that no other file uses.
pub fn check_limits_are_used(sources: &Sources) -> Vec<Violation> {
    let is_limits = |path: &str| path == LIMITS_FILE || path.starts_with(LIMITS_FOLDER);
    let files: Vec<_> = sources.rust.iter().filter(|file| is_limits(&file.path)).collect();
    if files.is_empty() {
        return vec![violation(LIMITS_FILE, 1, "file not found".to_owned())];
    }
    let used = identifiers_outside(&sources.rust, is_limits);
    let constants = files
        .into_iter()
        .flat_map(|file| file.constants().into_iter().map(|(line, name)| (&*file.path, line, name)));
    let unused = constants.filter(|(_, _, name)| !used.contains(name));
    unused.map(|(path, line, name)| violation(path, line, format!("limit {name} is not used"))).collect()
}

fn violation(path: &str, line: usize, message: String) -> Violation {
    Violation { path: path.to_owned(), line, message, fix: "enforce the limit, or remove it" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    const TWO_LIMITS: (&str, &str) =
        (LIMITS_FILE, "pub const A_MAX: u8 = 1;\npub const B_MAX: u8 = A_MAX;\n");

    #[test]
    fn unused_limit_is_reported() {
        let user = ("a.rs", "// A_MAX\nfn a() { assert!(1 < limits::B_MAX); }");
        assert_eq!(
            locations(&check_limits_are_used(&sources(&[TWO_LIMITS, user]))),
            [format!("{LIMITS_FILE}:1")]
        );
    }

    #[test]
    fn limit_in_a_module_is_checked() {
        let module = ("crates/units/src/limits/soft.rs", "pub const C_MAX: u8 = super::A_MAX;");
        let user = ("a.rs", "fn a() { b(A_MAX, B_MAX); }");
        assert_eq!(
            locations(&check_limits_are_used(&sources(&[TWO_LIMITS, module, user]))),
            ["crates/units/src/limits/soft.rs:1"]
        );
    }

    #[test]
    fn used_limits_pass() {
        assert_eq!(
            check_limits_are_used(&sources(&[TWO_LIMITS, ("a.rs", "fn a() { b(A_MAX, B_MAX); }")])),
            []
        );
    }

    #[test]
    fn missing_limits_file_is_reported() {
        assert_eq!(check_limits_are_used(&sources(&[])).len(), 1);
    }
}
