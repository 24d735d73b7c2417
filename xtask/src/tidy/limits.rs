//! Rule: a limit that is named is a limit that is kept: each constant of `limits.rs` is used by some other file. Whether
//! it is used where it should be is for tests of the code that uses it.

use super::{Complaint, rust::idents_outside, sources::Sources};

/// Where all limits are.
const LIMITS: &str = "crates/units/src/limits.rs";

/// Complains about each limit that no other file names.
pub fn used(sources: &Sources) -> Vec<Complaint> {
    let Some(limits) = sources.rust.iter().find(|file| file.path == LIMITS) else {
        return vec![complaint(1, "there are no limits".to_owned())];
    };
    let used = idents_outside(&sources.rust, LIMITS);
    let unused = limits.constants().into_iter().filter(|(_, name)| !used.contains(name));
    unused.map(|(line, name)| complaint(line, format!("{name} limits nothing"))).collect()
}

fn complaint(line: usize, what: String) -> Complaint {
    Complaint { path: LIMITS.to_owned(), line, what, mend: "enforce it where it belongs, or remove it" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    const TWO: (&str, &str) = (LIMITS, "pub const A_MAX: u8 = 1;\npub const B_MAX: u8 = A_MAX;\n");

    #[test]
    fn a_limit_that_nothing_keeps_is_found() {
        let user = ("a.rs", "// A_MAX\nfn a() { assert!(1 < limits::B_MAX); }");
        assert_eq!(places(&used(&sources(&[TWO, user]))), [format!("{LIMITS}:1")]);
    }

    #[test]
    fn limits_that_are_kept_are_fine() {
        assert_eq!(used(&sources(&[TWO, ("a.rs", "fn a() { b(A_MAX, B_MAX); }")])), []);
    }

    #[test]
    fn a_house_without_limits_is_found() {
        assert_eq!(used(&sources(&[])).len(), 1);
    }
}
