//! Rule: each constant in `limits.rs` is used by another file. Whether the limit is enforced is
//! checked by the tests of the other file.

use super::{Violation, rust::identifiers_outside, sources::Sources};

/// Path of the file with all limits.
const LIMITS_FILE: &str = "crates/units/src/limits.rs";

/// Reports each limit that no other file uses.
pub fn check_limits_are_used(sources: &Sources) -> Vec<Violation> {
    let Some(limits) = sources.rust.iter().find(|file| file.path == LIMITS_FILE) else {
        return vec![violation(1, "file not found".to_owned())];
    };
    let used = identifiers_outside(&sources.rust, LIMITS_FILE);
    let unused = limits.constants().into_iter().filter(|(_, name)| !used.contains(name));
    unused.map(|(line, name)| violation(line, format!("limit {name} is not used"))).collect()
}

fn violation(line: usize, message: String) -> Violation {
    Violation { path: LIMITS_FILE.to_owned(), line, message, fix: "enforce the limit, or remove it" }
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
