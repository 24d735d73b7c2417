//! Rule: another file uses each constant of `limits.rs`. Tests of that code check that it enforces
//! the limit.

use super::{Violation, rust::idents_outside, sources::Sources};

/// File with all limits.
const LIMITS: &str = "crates/units/src/limits.rs";

/// Reports each limit that no other file uses.
pub fn used(sources: &Sources) -> Vec<Violation> {
    let Some(limits) = sources.rust.iter().find(|file| file.path == LIMITS) else {
        return vec![violation(1, "the file with the limits is missing".to_owned())];
    };
    let used = idents_outside(&sources.rust, LIMITS);
    let unused = limits.constants().into_iter().filter(|(_, name)| !used.contains(name));
    unused.map(|(line, name)| violation(line, format!("{name} is not used"))).collect()
}

fn violation(line: usize, message: String) -> Violation {
    Violation { path: LIMITS.to_owned(), line, message, fix: "enforce the limit, or remove it" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    const TWO: (&str, &str) = (LIMITS, "pub const A_MAX: u8 = 1;\npub const B_MAX: u8 = A_MAX;\n");

    #[test]
    fn unused_limit_is_reported() {
        let user = ("a.rs", "// A_MAX\nfn a() { assert!(1 < limits::B_MAX); }");
        assert_eq!(places(&used(&sources(&[TWO, user]))), [format!("{LIMITS}:1")]);
    }

    #[test]
    fn used_limits_pass() {
        assert_eq!(used(&sources(&[TWO, ("a.rs", "fn a() { b(A_MAX, B_MAX); }")])), []);
    }

    #[test]
    fn missing_limits_file_is_reported() {
        assert_eq!(used(&sources(&[])).len(), 1);
    }
}
