//! Rule: files and folders have names of the domain, not generic ones.

use super::{Complaint, sources::Sources};

/// Generic names.
const EMPTY: &[&str] = &["util", "utils", "helper", "helpers", "data", "misc", "common", "manager2", "stuff"];
/// Shared by the services on the wire, where `common` is the usual name.
const EXCEPT: &str = "proto/";

/// Complains about each path with such a name in it.
pub fn files(sources: &Sources) -> Vec<Complaint> {
    let paths = sources.texts.keys().filter(|path| !path.starts_with(EXCEPT));
    let empty = paths.filter_map(|path| {
        let name = path.split('/').map(|part| part.split('.').next().unwrap_or(part));
        let name = name.into_iter().find(|name| EMPTY.contains(&name.to_lowercase().as_str()))?;
        Some((path, name))
    });
    let complaint = |(path, name): (&String, &str)| Complaint {
        path: path.clone(),
        line: 1,
        what: format!("the name {name} says nothing"),
        mend: "name it after what it is about",
    };
    empty.map(complaint).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    #[test]
    fn an_empty_name_is_found() {
        let files_ =
            [("crates/a/src/utils.rs", ""), ("crates/a/src/helpers/b.rs", ""), ("crates/a/src/lease.rs", "")];
        assert_eq!(
            places(&files(&sources(&files_))),
            ["crates/a/src/helpers/b.rs:1", "crates/a/src/utils.rs:1"]
        );
    }
}
