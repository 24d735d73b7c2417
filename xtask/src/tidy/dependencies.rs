//! Rules for dependencies between crates: the manifests may contain only the dependencies in the
//! tables of this file. `pure.rs` checks how pure crates use the standard library.

use std::collections::BTreeMap;

use toml::{Table, Value};

use super::{Violation, sources::Sources};

/// Internal dependencies that each crate may have. Every crate must be listed here.
const ALLOWED_INTERNAL: &[(&str, &[&str])] = &[
    ("units", &[]),
    ("pool", &["units"]),
    ("prediction", &["units"]),
    ("fairness", &["units"]),
    ("tiering", &["units"]),
    ("soft", &["units"]),
    ("soft-c", &["units", "soft"]),
    ("sim", &["units", "pool", "prediction", "fairness", "tiering"]),
    ("proto", &[]),
    ("host-memory", &["units", "proto"]),
    ("emulated-host", &[]),
    ("local-rack", &[]),
    ("config-file", &["units"]),
    ("service-files", &["units", "config-file"]),
    ("exposition", &[]),
    ("etcd", &[]),
    ("cli-runtime", &["units", "proto"]),
    ("evaluate", &["units", "prediction", "proto", "sim", "host-memory", "cli-runtime"]),
    ("cli", &["units", "prediction", "proto", "host-memory", "cli-runtime", "evaluate"]),
    (
        "pool-manager",
        &["units", "pool", "prediction", "proto", "config-file", "service-files", "exposition", "etcd"],
    ),
    (
        "host-agent",
        &[
            "units",
            "pool",
            "fairness",
            "tiering",
            "soft",
            "proto",
            "host-memory",
            "config-file",
            "service-files",
            "exposition",
        ],
    ),
    ("vmm-plugin", &["units", "proto", "host-memory"]),
    ("xtask", &["units", "sim", "emulated-host", "local-rack"]),
    (
        "tests",
        &[
            "units",
            "pool",
            "soft",
            "sim",
            "proto",
            "etcd",
            "emulated-host",
            "local-rack",
            "cli",
            "pool-manager",
            "host-agent",
        ],
    ),
    (
        "benches",
        &[
            "units",
            "tests",
            "pool",
            "prediction",
            "fairness",
            "tiering",
            "soft",
            "sim",
            "proto",
            "etcd",
            "emulated-host",
            "local-rack",
            "cli",
            "pool-manager",
            "host-agent",
        ],
    ),
];

/// Names of the pure crates. The results of a pure crate depend only on its arguments.
pub const PURE_CRATES: &[&str] = &["units", "pool", "prediction", "fairness", "tiering", "sim"];

/// External dependencies that pure crates may have. As used in pure crates, these dependencies use
/// no clock, file, thread, socket or environment variable.
const PURE_ALLOWED_EXTERNAL: &[&str] = &[
    "csv",
    "humantime", // used only to format times that are passed as arguments
    "indexmap",
    "postcard",
    "prost",
    "rand",
    "rand_pcg",
    "rustc-hash",
    "serde",
    "serde_json",
    "smallvec",
    "thiserror",
];
/// External dependencies that only the tests of pure crates may have.
const PURE_TESTS_ALLOWED_EXTERNAL: &[&str] = &["flate2", "postcard", "proptest", "stateright", "toml"];

/// Returns the folder of a crate, relative to the root of the repository.
pub fn folder_of(name: &str) -> String {
    match name {
        "units" | "pool" | "prediction" | "fairness" | "tiering" | "soft" | "soft-c" | "sim"
        | "host-memory" | "emulated-host" | "local-rack" | "config-file" | "service-files" | "exposition"
        | "etcd" | "cli-runtime" | "evaluate" | "cli" => {
            format!("crates/{name}")
        }
        _ => name.to_owned(),
    }
}

/// Dependency of a crate, as found in its manifest.
struct Import<'a> {
    crate_name: String,
    path: &'a str,
    line: usize,
    dependency: String,
    is_test_only: bool,
}

/// Reports internal dependencies that the table does not allow, and crates that are not in the
/// table.
pub fn check_internal_imports(sources: &Sources) -> Vec<Violation> {
    let crates: BTreeMap<String, &str> = manifests(sources).map(|(path, name, _)| (name, path)).collect();
    let unknown = crates.iter().filter(|(name, _)| allowed_dependencies(name).is_none()).map(|(name, path)| Violation {
        path: (*path).to_owned(),
        line: 1,
        message: format!("crate {name} is not in the table of allowed dependencies"),
        fix: "add the crate and its allowed dependencies to ALLOWED_INTERNAL in xtask/src/tidy/dependencies.rs",
    });
    let all = manifests(sources).flat_map(|(path, name, table)| crate_imports(path, &name, &table, sources));
    let forbidden = all.filter(|import| {
        crates.contains_key(&import.dependency)
            && allowed_dependencies(&import.crate_name)
                .is_some_and(|allowed_names| !allowed_names.contains(&import.dependency.as_str()))
    });
    let forbidden = forbidden.map(|import| Violation {
        path: import.path.to_owned(),
        line: import.line,
        message: format!("crate {} must not import {}", import.crate_name, import.dependency),
        fix: "connect the two crates in a service, or propose a change of ALLOWED_INTERNAL in dependencies.rs",
    });
    unknown.chain(forbidden).collect()
}

/// Reports external dependencies of pure crates that are not in [`PURE_ALLOWED_EXTERNAL`] or, for
/// tests, in [`PURE_TESTS_ALLOWED_EXTERNAL`].
pub fn check_external_imports(sources: &Sources) -> Vec<Violation> {
    let all = manifests(sources).flat_map(|(path, name, table)| crate_imports(path, &name, &table, sources));
    let disallowed = all
        .filter(|import| PURE_CRATES.contains(&import.crate_name.as_str()) && !is_allowed_external(import));
    let violation = |import: Import<'_>| Violation {
        path: import.path.to_owned(),
        line: import.line,
        message: format!("pure crate {} must not import {}", import.crate_name, import.dependency),
        fix: "take the result as an argument; if the dependency is pure, add it to PURE_ALLOWED_EXTERNAL in dependencies.rs",
    };
    disallowed.map(violation).collect()
}

fn is_allowed_external(import: &Import<'_>) -> bool {
    let dependency = import.dependency.as_str();
    let is_internal = ALLOWED_INTERNAL.iter().any(|(name, _)| *name == dependency);
    is_internal
        || PURE_ALLOWED_EXTERNAL.contains(&dependency)
        || (import.is_test_only && PURE_TESTS_ALLOWED_EXTERNAL.contains(&dependency))
}

fn allowed_dependencies(crate_name: &str) -> Option<&'static [&'static str]> {
    ALLOWED_INTERNAL.iter().find(|(name, _)| *name == crate_name).map(|(_, allowed_names)| *allowed_names)
}

/// Returns the path, package name and content of each manifest.
fn manifests(sources: &Sources) -> impl Iterator<Item = (&str, String, Table)> {
    let manifests = sources.with_suffix("Cargo.toml");
    manifests.filter_map(|(path, text)| {
        let table: Table = text.parse().ok()?;
        let name = table.get("package")?.get("name")?.as_str()?.to_owned();
        Some((path, name, table))
    })
}

fn crate_imports<'a>(path: &'a str, crate_name: &str, table: &Table, sources: &Sources) -> Vec<Import<'a>> {
    let text = &sources.texts[path];
    let per_target = table.get("target").and_then(Value::as_table).into_iter().flat_map(Table::values);
    let scopes = [table].into_iter().chain(per_target.filter_map(Value::as_table));
    let sections = scopes.flat_map(|scope| {
        ["dependencies", "build-dependencies", "dev-dependencies"].map(|name| (name, scope.get(name)))
    });
    let entries_by_section = sections.flat_map(|(section, content)| {
        let entries = content.and_then(Value::as_table).into_iter().flatten();
        entries.map(move |(key, value)| (section == "dev-dependencies", key, value))
    });
    let import = |(is_test_only, key, value): (bool, &String, &Value)| Import {
        crate_name: crate_name.to_owned(),
        path,
        line: 1 + text.lines().position(|line| line.starts_with(key.as_str())).unwrap_or(0),
        // A renamed dependency has the name of its crate in the key `package`.
        dependency: value.get("package").and_then(Value::as_str).unwrap_or(key).to_owned(),
        is_test_only,
    };
    entries_by_section.map(import).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    fn manifest(name: &str, rest: &str) -> String {
        format!("[package]\nname = \"{name}\"\n{rest}")
    }

    fn workspace(pool: &str) -> Sources {
        sources(&[
            ("crates/units/Cargo.toml", &manifest("units", "")),
            ("crates/pool/Cargo.toml", &manifest("pool", pool)),
            ("crates/sim/Cargo.toml", &manifest("sim", "")),
        ])
    }

    const POOL_MANIFEST_LINE_4: [&str; 1] = ["crates/pool/Cargo.toml:4"];

    #[test]
    fn allowed_imports_pass() {
        let workspace = workspace("[dependencies]\nunits = { workspace = true }\nserde = \"1\"\n");
        assert_eq!(
            (check_internal_imports(&workspace), check_external_imports(&workspace)),
            (vec![], vec![])
        );
    }

    #[test]
    fn disallowed_internal_import_is_reported() {
        assert_eq!(
            locations(&check_internal_imports(&workspace("[dependencies]\nsim = { workspace = true }\n"))),
            POOL_MANIFEST_LINE_4
        );
    }

    #[test]
    fn dev_build_renamed_and_platform_imports_are_reported() {
        assert_eq!(
            locations(&check_internal_imports(&workspace("[dev-dependencies]\nsim = \"1\"\n"))),
            POOL_MANIFEST_LINE_4
        );
        assert_eq!(
            locations(&check_internal_imports(&workspace("[build-dependencies]\nsim = \"1\"\n"))),
            POOL_MANIFEST_LINE_4
        );
        assert_eq!(
            locations(&check_internal_imports(&workspace("[dependencies]\nworld = { package = \"sim\" }\n"))),
            POOL_MANIFEST_LINE_4
        );
        assert_eq!(
            locations(&check_internal_imports(&workspace(
                "[target.'cfg(unix)'.dependencies]\nsim = \"1\"\n"
            ))),
            POOL_MANIFEST_LINE_4
        );
    }

    #[test]
    fn crate_missing_in_table_is_reported() {
        let workspace = sources(&[("crates/attic/Cargo.toml", &manifest("attic", ""))]);
        assert_eq!(locations(&check_internal_imports(&workspace)), ["crates/attic/Cargo.toml:1"]);
    }

    #[test]
    fn disallowed_external_import_is_reported() {
        assert_eq!(
            locations(&check_external_imports(&workspace("[dependencies]\ntokio = \"1\"\n"))),
            POOL_MANIFEST_LINE_4
        );
        assert_eq!(
            locations(&check_external_imports(&workspace("[dependencies]\nproptest = \"1\"\n"))),
            POOL_MANIFEST_LINE_4
        );
        assert_eq!(
            locations(&check_external_imports(&workspace("[dev-dependencies]\nproptest = \"1\"\n"))),
            [""; 0]
        );
    }
}
