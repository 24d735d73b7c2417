//! Rules for pure crates. A pure crate must not use clocks, files, threads, sockets, the
//! environment or unsafe code, and must use the shared clippy configuration. `dependencies.rs`
//! checks the dependencies of pure crates.

use super::{
    Violation,
    dependencies::{PURE_CRATES, folder_of},
    sources::Sources,
};

/// Paths that pure crates must not use, each with advice on a replacement.
const IMPURE_PATHS: &[(&str, &str)] = &[
    ("std::time::Instant", "take the time as an argument of type units::Ns"),
    ("std::time::SystemTime", "take the time as an argument of type units::UnixMs"),
    ("std::fs", "take bytes or impl Read as an argument"),
    ("std::net", "return the message as a value"),
    ("std::os", "move I/O out of this pure crate to a service crate"),
    ("std::process", "move I/O out of this pure crate to a service crate"),
    ("std::thread", "return the task as a value"),
    ("std::env", "take settings as arguments"),
    ("std::io::stdin", "take impl Read as an argument"),
    ("std::io::stdout", "return the output as a value"),
    ("std::io::stderr", "return the output as a value"),
];
/// Path of the clippy configuration, which also disallows these paths in macros and behind aliases.
const CLIPPY_CONFIG: &str = "crates/.clippy.toml";

/// Reports each use of a path in [`IMPURE_PATHS`] by a pure crate.
pub fn check_impure_paths(sources: &Sources) -> Vec<Violation> {
    let pure =
        sources.non_test_files().filter(|file| PURE_CRATES.iter().any(|name| is_in_crate(&file.path, name)));
    let paths_used = pure.flat_map(|file| file.paths().into_iter().map(move |at| (file, at)));
    let found = paths_used.filter_map(|(file, (line, path))| {
        let (_, fix) = IMPURE_PATHS.iter().find(|(prefix, _)| is_path_below(&path, prefix))?;
        Some(Violation {
            path: file.path.clone(),
            line,
            message: format!("pure crates must not use {path}"),
            fix,
        })
    });
    found.collect()
}

fn is_in_crate(path: &str, name: &str) -> bool {
    path.starts_with(&format!("{}/", folder_of(name)))
}

fn is_path_below(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Reports pure crates that allow unsafe code or override the clippy configuration.
pub fn check_purity_guards(sources: &Sources) -> Vec<Violation> {
    let without_config = (!sources.texts.contains_key(CLIPPY_CONFIG))
        .then(|| violation(CLIPPY_CONFIG, "file not found", "restore this file"));
    let overridden = sources.texts.keys().filter(|path| {
        PURE_CRATES.iter().any(|name| is_in_crate(path, name)) && path.ends_with("clippy.toml")
    });
    let overridden =
        overridden.map(|path| violation(path, "must not override crates/.clippy.toml", "remove this file"));
    let without_forbid = PURE_CRATES.iter().map(|name| format!("{}/src/lib.rs", folder_of(name)));
    let without_forbid = without_forbid.filter(|path| !forbids_unsafe(sources, path));
    let without_forbid = without_forbid
        .map(|path| violation(&path, "pure crates must forbid unsafe code", "add #![forbid(unsafe_code)]"));
    without_forbid.chain(without_config).chain(overridden).collect()
}

fn forbids_unsafe(sources: &Sources, path: &str) -> bool {
    let file = sources.rust.iter().find(|file| file.path == path);
    file.is_some_and(|file| file.attributes().iter().any(|(_, name)| name == "forbid(unsafe_code)"))
}

fn violation(path: &str, message: &str, fix: &'static str) -> Violation {
    Violation { path: path.to_owned(), line: 1, message: message.to_owned(), fix }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    fn violations(text: &str) -> Vec<String> {
        locations(&check_impure_paths(&sources(&[
            ("crates/pool/src/ledger.rs", text),
            ("host-agent/src/a.rs", text),
        ])))
    }

    #[test]
    fn clock_in_pure_crate_is_reported_for_any_import() {
        let expected = ["crates/pool/src/ledger.rs:1"];
        assert_eq!(violations("use std::time::Instant;"), expected);
        assert_eq!(
            violations("use std::{collections::BTreeMap, time::{Duration, SystemTime as T}};"),
            expected
        );
        assert_eq!(violations("fn a() { std::fs::read(\"b\"); }"), expected);
        assert_eq!(violations("use std::thread::{self};"), expected);
    }

    #[test]
    fn similar_names_and_test_code_pass() {
        let allowed =
            "use std::{time::Duration, environment};\n#[cfg(test)]\nmod tests {\n    use std::fs;\n}\n";
        assert_eq!(violations(allowed), [""; 0]);
    }

    #[test]
    fn pure_crate_without_guards_is_reported() {
        let text = "//! A.\n#![forbid(unsafe_code)]\n";
        let libs: Vec<String> =
            PURE_CRATES.iter().map(|name| format!("{}/src/lib.rs", folder_of(name))).collect();
        let mut files: Vec<(&str, &str)> = libs.iter().map(|lib| (lib.as_str(), text)).collect();
        files.push((CLIPPY_CONFIG, ""));
        assert_eq!(check_purity_guards(&sources(&files)), []);
        files[0].1 = "//! A.\n";
        files.push(("crates/pool/clippy.toml", ""));
        let expected = ["crates/pool/clippy.toml:1", &format!("{}:1", libs[0])];
        assert_eq!(locations(&check_purity_guards(&sources(&files))), expected);
        assert_eq!(
            locations(&check_purity_guards(&sources(&files[..libs.len()])))[0],
            format!("{CLIPPY_CONFIG}:1")
        );
    }
}
