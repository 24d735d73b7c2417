//! Rules of dependencies between crates, checked against the manifests with a table. The use of a
//! dependency is checked by `pure.rs` and reviewers.

use std::collections::BTreeMap;

use toml::{Table, Value};

use super::{Complaint, sources::Sources};

/// Which rooms each room may look into. Anything not listed is an error, so the map cannot go stale.
const MAY_USE: &[(&str, &[&str])] = &[
    ("units", &[]),
    ("pool", &["units"]),
    ("prediction", &["units"]),
    ("fairness", &["units"]),
    ("sim", &["units", "pool", "prediction", "fairness"]),
    ("proto", &[]),
    ("host-memory", &["units", "proto"]),
    ("emulated-host", &[]),
    ("exposition", &[]),
    ("cli-runtime", &["units", "proto"]),
    ("evaluate", &["units", "prediction", "proto", "sim", "host-memory", "cli-runtime"]),
    ("cli", &["units", "prediction", "proto", "host-memory", "cli-runtime", "evaluate"]),
    ("pool-manager", &["units", "pool", "prediction", "proto", "exposition"]),
    ("host-agent", &["units", "pool", "fairness", "proto", "host-memory", "exposition"]),
    ("vmm-plugin", &["units", "proto", "host-memory"]),
    ("xtask", &["units", "emulated-host"]),
    ("tests", &["units", "pool", "sim", "proto", "emulated-host", "cli", "pool-manager", "host-agent"]),
    (
        "benches",
        &[
            "units",
            "pool",
            "prediction",
            "fairness",
            "sim",
            "proto",
            "emulated-host",
            "cli",
            "pool-manager",
            "host-agent",
        ],
    ),
];

/// Rooms in which everything is decided by arguments.
pub const PURE: &[&str] = &["units", "pool", "prediction", "fairness", "sim"];

/// External dependencies of pure crates, none of which uses a clock, file, thread, socket or the
/// environment for its purpose here.
const PURE_MAY_USE: &[&str] = &[
    "csv",
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
/// Additional dependencies of their tests.
const PURE_TESTS_MAY_USE: &[&str] = &["flate2", "postcard", "proptest", "stateright", "toml"];

/// Where a room lies.
pub fn folder_of(room: &str) -> String {
    match room {
        "units" | "pool" | "prediction" | "fairness" | "sim" | "host-memory" | "emulated-host"
        | "exposition" | "cli-runtime" | "evaluate" | "cli" => {
            format!("crates/{room}")
        }
        _ => room.to_owned(),
    }
}

/// One line of a manifest that imports something.
struct Import<'a> {
    room: String,
    path: &'a str,
    line: usize,
    what: String,
    only_tests: bool,
}

/// Complains about each import of a room that the map does not allow, and about rooms that the map does not know.
pub fn imports(sources: &Sources) -> Vec<Complaint> {
    let rooms: BTreeMap<String, &str> = manifests(sources).map(|(path, room, _)| (room, path)).collect();
    let unknown = rooms.iter().filter(|(room, _)| allowed(room).is_none()).map(|(room, path)| Complaint {
        path: (*path).to_owned(),
        line: 1,
        what: format!("the map does not know the room {room}"),
        mend: "add it to MAY_USE in xtask/src/tidy/rooms.rs, with the rooms it may look into",
    });
    let all = manifests(sources).flat_map(|(path, room, table)| imports_of(path, &room, &table, sources));
    let forbidden = all.filter(|import| {
        rooms.contains_key(&import.what)
            && allowed(&import.room).is_some_and(|may| !may.contains(&import.what.as_str()))
    });
    let forbidden = forbidden.map(|import| Complaint {
        path: import.path.to_owned(),
        line: import.line,
        what: format!("{} may not import {}", import.room, import.what),
        mend: "let a service introduce the two to each other, or argue for a change of the map",
    });
    unknown.chain(forbidden).collect()
}

/// Reports external dependencies of pure crates that are not listed as harmless.
pub fn externals(sources: &Sources) -> Vec<Complaint> {
    let all = manifests(sources).flat_map(|(path, room, table)| imports_of(path, &room, &table, sources));
    let foreign = all.filter(|import| PURE.contains(&import.room.as_str()) && !harmless(import));
    let complaint = |import: Import<'_>| Complaint {
        path: import.path.to_owned(),
        line: import.line,
        what: format!("{} is pure and may not import {}", import.room, import.what),
        mend: "take what it would fetch as an argument; if it fetches nothing, add it to PURE_MAY_USE in rooms.rs",
    };
    foreign.map(complaint).collect()
}

fn harmless(import: &Import<'_>) -> bool {
    let what = import.what.as_str();
    let of_the_house = MAY_USE.iter().any(|(room, _)| *room == what);
    of_the_house || PURE_MAY_USE.contains(&what) || (import.only_tests && PURE_TESTS_MAY_USE.contains(&what))
}

fn allowed(room: &str) -> Option<&'static [&'static str]> {
    MAY_USE.iter().find(|(name, _)| *name == room).map(|(_, may)| *may)
}

/// Each package's manifest, its name and its content.
fn manifests(sources: &Sources) -> impl Iterator<Item = (&str, String, Table)> {
    let manifests = sources.ending("Cargo.toml");
    manifests.filter_map(|(path, text)| {
        let table: Table = text.parse().ok()?;
        let room = table.get("package")?.get("name")?.as_str()?.to_owned();
        Some((path, room, table))
    })
}

fn imports_of<'a>(path: &'a str, room: &str, table: &Table, sources: &Sources) -> Vec<Import<'a>> {
    let text = &sources.texts[path];
    let per_target = table.get("target").and_then(Value::as_table).into_iter().flat_map(Table::values);
    let scopes = [table].into_iter().chain(per_target.filter_map(Value::as_table));
    let sections = scopes.flat_map(|scope| {
        ["dependencies", "build-dependencies", "dev-dependencies"].map(|name| (name, scope.get(name)))
    });
    let named = sections.flat_map(|(section, content)| {
        let entries = content.and_then(Value::as_table).into_iter().flatten();
        entries.map(move |(key, value)| (section == "dev-dependencies", key, value))
    });
    let import = |(only_tests, key, value): (bool, &String, &Value)| Import {
        room: room.to_owned(),
        path,
        line: 1 + text.lines().position(|line| line.starts_with(key.as_str())).unwrap_or(0),
        // Under another name it is still the same room.
        what: value.get("package").and_then(Value::as_str).unwrap_or(key).to_owned(),
        only_tests,
    };
    named.map(import).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    fn manifest(name: &str, rest: &str) -> String {
        format!("[package]\nname = \"{name}\"\n{rest}")
    }

    fn house(pool: &str) -> Sources {
        sources(&[
            ("crates/units/Cargo.toml", &manifest("units", "")),
            ("crates/pool/Cargo.toml", &manifest("pool", pool)),
            ("crates/sim/Cargo.toml", &manifest("sim", "")),
        ])
    }

    const HERE: [&str; 1] = ["crates/pool/Cargo.toml:4"];

    #[test]
    fn what_the_map_allows_is_fine() {
        let house = house("[dependencies]\nunits = { workspace = true }\nserde = \"1\"\n");
        assert_eq!((imports(&house), externals(&house)), (vec![], vec![]));
    }

    #[test]
    fn a_pure_room_that_looks_into_another_is_found() {
        assert_eq!(places(&imports(&house("[dependencies]\nsim = { workspace = true }\n"))), HERE);
    }

    #[test]
    fn neither_tests_nor_builds_nor_other_names_nor_one_platform_is_a_way_around() {
        assert_eq!(places(&imports(&house("[dev-dependencies]\nsim = \"1\"\n"))), HERE);
        assert_eq!(places(&imports(&house("[build-dependencies]\nsim = \"1\"\n"))), HERE);
        assert_eq!(places(&imports(&house("[dependencies]\nworld = { package = \"sim\" }\n"))), HERE);
        assert_eq!(places(&imports(&house("[target.'cfg(unix)'.dependencies]\nsim = \"1\"\n"))), HERE);
    }

    #[test]
    fn a_room_that_is_not_on_the_map_is_found() {
        let house = sources(&[("crates/attic/Cargo.toml", &manifest("attic", ""))]);
        assert_eq!(places(&imports(&house)), ["crates/attic/Cargo.toml:1"]);
    }

    #[test]
    fn a_runtime_in_a_pure_room_is_found() {
        assert_eq!(places(&externals(&house("[dependencies]\ntokio = \"1\"\n"))), HERE);
        assert_eq!(places(&externals(&house("[dependencies]\nproptest = \"1\"\n"))), HERE);
        assert_eq!(places(&externals(&house("[dev-dependencies]\nproptest = \"1\"\n"))), [""; 0]);
    }
}
