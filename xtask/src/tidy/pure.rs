//! Rules of pure crates: no clock, file, thread, socket or environment, no unsafe code, and clippy
//! lints for both. Their dependencies are checked in `rooms.rs`.

use super::{
    Complaint,
    rooms::{PURE, folder_of},
    sources::Sources,
};

/// Prefixes of impure paths, each with its alternative.
const WORLD: &[(&str, &str)] = &[
    ("std::time::Instant", "time is an argument: take a units::Ns"),
    ("std::time::SystemTime", "time is an argument: take a units::UnixMs"),
    ("std::fs", "take bytes, or impl Read, from the caller"),
    ("std::net", "return what to send as a value"),
    ("std::os", "the machine belongs to the services"),
    ("std::process", "the machine belongs to the services"),
    ("std::thread", "return what to do as a value"),
    ("std::env", "settings are arguments"),
    ("std::io::stdin", "take impl Read from the caller"),
    ("std::io::stdout", "return what to say as a value"),
    ("std::io::stderr", "return what to say as a value"),
];
/// Clippy settings that find the same behind macros and other names.
const WATCH: &str = "crates/.clippy.toml";

/// Complains about each such path.
pub fn paths(sources: &Sources) -> Vec<Complaint> {
    let pure = sources.shipped().filter(|file| PURE.iter().any(|room| in_room(&file.path, room)));
    let named = pure.flat_map(|file| file.paths().into_iter().map(move |at| (file, at)));
    let found = named.filter_map(|(file, (line, path))| {
        let (_, mend) = WORLD.iter().find(|(world, _)| within(&path, world))?;
        Some(Complaint { path: file.path.clone(), line, what: format!("a pure room uses {path}"), mend })
    });
    found.collect()
}

fn in_room(path: &str, room: &str) -> bool {
    path.starts_with(&format!("{}/", folder_of(room)))
}

fn within(path: &str, world: &str) -> bool {
    path.strip_prefix(world).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Complains about a pure room that could hold unsafe code, or that clippy does not watch.
pub fn guards(sources: &Sources) -> Vec<Complaint> {
    let unwatched =
        (!sources.texts.contains_key(WATCH)).then(|| complaint(WATCH, "is missing", "restore it"));
    let loosened = sources
        .texts
        .keys()
        .filter(|path| PURE.iter().any(|room| in_room(path, room)) && path.ends_with("clippy.toml"));
    let loosened = loosened.map(|path| complaint(path, "replaces crates/.clippy.toml", "remove it"));
    let unguarded = PURE.iter().map(|room| format!("{}/src/lib.rs", folder_of(room)));
    let unguarded = unguarded.filter(|path| !forbids_unsafe(sources, path));
    let unguarded =
        unguarded.map(|path| complaint(&path, "may hold unsafe code", "add #![forbid(unsafe_code)]"));
    unguarded.chain(unwatched).chain(loosened).collect()
}

fn forbids_unsafe(sources: &Sources, path: &str) -> bool {
    let file = sources.rust.iter().find(|file| file.path == path);
    file.is_some_and(|file| file.attributes().iter().any(|(_, name)| name == "forbid(unsafe_code)"))
}

fn complaint(path: &str, what: &str, mend: &'static str) -> Complaint {
    Complaint { path: path.to_owned(), line: 1, what: what.to_owned(), mend }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    fn look(text: &str) -> Vec<String> {
        places(&paths(&sources(&[("crates/pool/src/ledger.rs", text), ("host-agent/src/a.rs", text)])))
    }

    #[test]
    fn a_clock_in_a_pure_room_is_found_however_it_is_imported() {
        let here = ["crates/pool/src/ledger.rs:1"];
        assert_eq!(look("use std::time::Instant;"), here);
        assert_eq!(look("use std::{collections::BTreeMap, time::{Duration, SystemTime as T}};"), here);
        assert_eq!(look("fn a() { std::fs::read(\"b\"); }"), here);
        assert_eq!(look("use std::thread::{self};"), here);
    }

    #[test]
    fn what_is_only_named_alike_and_what_is_test_is_fine() {
        let fine =
            "use std::{time::Duration, environment};\n#[cfg(test)]\nmod tests {\n    use std::fs;\n}\n";
        assert_eq!(look(fine), [""; 0]);
    }

    #[test]
    fn a_pure_room_without_its_guards_is_found() {
        let text = "//! A.\n#![forbid(unsafe_code)]\n";
        let libs: Vec<String> = PURE.iter().map(|room| format!("{}/src/lib.rs", folder_of(room))).collect();
        let mut files: Vec<(&str, &str)> = libs.iter().map(|lib| (lib.as_str(), text)).collect();
        files.push((WATCH, ""));
        assert_eq!(guards(&sources(&files)), []);
        files[0].1 = "//! A.\n";
        files.push(("crates/pool/clippy.toml", ""));
        let expected = ["crates/pool/clippy.toml:1", &format!("{}:1", libs[0])];
        assert_eq!(places(&guards(&sources(&files))), expected);
        assert_eq!(places(&guards(&sources(&files[..libs.len()])))[0], format!("{WATCH}:1"));
    }
}
