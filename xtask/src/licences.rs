//! Whether everything that is built in may be built in: each package's licence lets it be passed on under ours, and each
//! comes from the registry or from this house. A part of `cargo xtask lint`.

use serde::Deserialize;

use crate::{failure::Failure, repository::cargo};

/// Licences that ask for no more than their text being passed on.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];
/// Where packages may come from; those of this house come from nowhere.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Metadata of all packages.
#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    license: Option<String>,
    source: Option<String>,
}

/// Complains about every package at once.
///
/// # Errors
/// A package has another licence or another source, or cargo does not report it.
pub fn run() -> Result<(), Failure> {
    let asked = cargo(&["metadata", "--format-version", "1", "--locked"]).output();
    let said = asked.map_err(Failure::start("cargo metadata"))?;
    let metadata: Metadata = serde_json::from_slice(&said.stdout).map_err(|wrong| Failure::Answer {
        program: "cargo metadata".to_owned(),
        why: format!("{wrong}: {}", String::from_utf8_lossy(&said.stderr)),
    })?;
    let wrong: Vec<String> = metadata.packages.iter().filter_map(wrong).collect();
    if wrong.is_empty() { Ok(()) } else { Err(Failure::Result(wrong.join("\n"))) }
}

fn wrong(package: &Package) -> Option<String> {
    let Package { name, license, source } = package;
    if !license.as_deref().is_some_and(allowed) {
        return Some(format!("{name}: licence {license:?} is not in ALLOWED in xtask/src/licences.rs"));
    }
    let foreign = source.as_deref().filter(|source| *source != REGISTRY)?;
    Some(format!("{name}: comes from {foreign}, not from the registry"))
}

/// Whether a licence expression can be met: `A OR B` by either, `A AND B` only by both. A slash is an old OR.
fn allowed(expression: &str) -> bool {
    let plain = expression.replace('/', " OR ").replace(['(', ')'], "");
    // `(A OR B) AND C` has OR inside AND: AND is parsed first.
    let inside = expression.contains('(');
    let met = |one: &str| ALLOWED.contains(&one.trim());
    if inside {
        plain.split(" AND ").all(|all| all.split(" OR ").any(met))
    } else {
        plain.split(" OR ").any(|one| one.split(" AND ").all(met))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_met_by_one_of_its_licences() {
        assert!(allowed("MIT OR Apache-2.0 OR LGPL-2.1-or-later"));
        assert!(allowed("Unlicense/MIT"));
        assert!(!allowed("GPL-3.0-only OR AGPL-3.0-only"));
    }

    #[test]
    fn what_is_asked_for_together_must_all_be_met() {
        assert!(allowed("MIT AND BSD-3-Clause"));
        assert!(allowed("(MIT OR Apache-2.0) AND Unicode-3.0"));
        assert!(!allowed("(MIT OR Apache-2.0) AND GPL-2.0-only"));
        assert!(!allowed("MIT AND GPL-2.0-only"));
    }

    #[test]
    fn a_package_without_a_licence_or_from_elsewhere_is_wrong() {
        let package = |license: Option<&str>, source: &str| Package {
            name: "p".to_owned(),
            license: license.map(str::to_owned),
            source: Some(source.to_owned()),
        };
        assert_eq!(wrong(&package(Some("MIT"), REGISTRY)), None);
        assert!(wrong(&package(None, REGISTRY)).is_some());
        assert!(wrong(&package(Some("MIT"), "git+https://example.org/p")).is_some());
    }
}
