//! Rule: files and folders are named after terms of the domain and do not have generic names.

use super::{Violation, sources::Sources};

/// Generic names, which are not allowed.
const GENERIC_NAMES: &[&str] =
    &["util", "utils", "helper", "helpers", "data", "misc", "common", "manager2", "stuff"];
/// Folder of the wire protocol, which is exempt because `common` is the usual name for shared
/// messages.
const EXEMPT_PREFIX: &str = "proto/";

/// Reports each path that contains a generic name.
pub fn check_names(sources: &Sources) -> Vec<Violation> {
    let paths = sources.texts.keys().filter(|path| !path.starts_with(EXEMPT_PREFIX));
    let generic = paths.filter_map(|path| {
        let name = path.split('/').map(|part| part.split('.').next().unwrap_or(part));
        let name = name.into_iter().find(|name| GENERIC_NAMES.contains(&name.to_lowercase().as_str()))?;
        Some((path, name))
    });
    let violation = |(path, name): (&String, &str)| Violation {
        path: path.clone(),
        line: 1,
        message: format!("name {name:?} is generic"),
        fix: "rename the file or folder to a term of the domain",
    };
    generic.map(violation).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    #[test]
    fn generic_names_are_reported() {
        let files_ =
            [("crates/a/src/utils.rs", ""), ("crates/a/src/helpers/b.rs", ""), ("crates/a/src/lease.rs", "")];
        assert_eq!(
            locations(&check_names(&sources(&files_))),
            ["crates/a/src/helpers/b.rs:1", "crates/a/src/utils.rs:1"]
        );
    }
}
