//! Rule: the code map in ARCHITECTURE.md lists all folders, and only existing folders. Descriptions
//! are not checked.

use std::collections::BTreeSet;

use super::{Violation, sources::Sources};

const ARCHITECTURE: &str = "ARCHITECTURE.md";
/// Heading above the code map. The map is the first code block after this heading.
const CODE_MAP_HEADING: &str = "## Code map";

/// Reports folders that are missing in the map, and lines of the map whose folder does not exist.
pub fn check_code_map(sources: &Sources) -> Vec<Violation> {
    let text = sources.texts.get(ARCHITECTURE).map_or("", String::as_str);
    let mapped = mapped_folders(text);
    let folders = top_level_folders(sources);
    let stale = mapped.iter().filter(|(_, folder)| !folders.contains(folder.as_str()));
    let stale = stale.map(|(line, folder)| {
        violation(*line, format!("folder {folder} is in the code map but does not exist"))
    });
    let missing = folders.iter().filter(|folder| !mapped.iter().any(|(_, mapped)| mapped == *folder));
    let missing = missing.map(|folder| violation(1, format!("folder {folder} is not in the code map")));
    stale.chain(missing).collect()
}

fn violation(line: usize, message: String) -> Violation {
    let fix = "update the code map in ARCHITECTURE.md: one line per folder, starting with its name";
    Violation { path: ARCHITECTURE.to_owned(), line, message, fix }
}

/// Returns the folders in the map with their line numbers. A folder is the first word of a line
/// without indentation.
fn mapped_folders(text: &str) -> Vec<(usize, String)> {
    let lines = text.lines().enumerate().skip_while(|(_, line)| *line != CODE_MAP_HEADING);
    let block = lines.skip_while(|(_, line)| !line.starts_with("```")).skip(1);
    let block = block.take_while(|(_, line)| !line.starts_with("```"));
    let names = block.filter(|(_, line)| !line.starts_with(' '));
    names.filter_map(|(n, line)| Some((n + 1, line.split_whitespace().next()?.to_owned()))).collect()
}

/// Returns the visible top-level folders of the repository. `crates/` is replaced by the folders in
/// it.
fn top_level_folders(sources: &Sources) -> BTreeSet<&str> {
    let folder = |path: &str| {
        let depth = if path.starts_with("crates/") { 2 } else { 1 };
        path.match_indices('/').nth(depth - 1).map(|(at, _)| at + 1)
    };
    let paths = sources.texts.keys().filter(|path| !path.starts_with('.'));
    paths.filter_map(|path| folder(path).map(|end| &path[..end])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::sources;

    const MAP: &str = "# Architecture\n\n## Code map\n\nText.\n\n```text\ncrates/pool/   the ledger\n  life.rs\nproto/   the wire\n```\n";

    fn violations(folders: &[&str]) -> Vec<String> {
        let files = folders.iter().map(|folder| format!("{folder}Cargo.toml")).collect::<Vec<_>>();
        let files =
            files.iter().map(|path| (path.as_str(), "")).chain([(ARCHITECTURE, MAP)]).collect::<Vec<_>>();
        check_code_map(&sources(&files)).into_iter().map(|violation| violation.message).collect()
    }

    #[test]
    fn matching_map_passes() {
        assert_eq!(violations(&["crates/pool/", "proto/"]), [""; 0]);
    }

    #[test]
    fn folder_missing_in_map_is_reported() {
        assert_eq!(
            violations(&["crates/pool/", "proto/", "crates/soft/"]),
            ["folder crates/soft/ is not in the code map"]
        );
    }

    #[test]
    fn map_line_without_folder_is_reported() {
        assert_eq!(violations(&["crates/pool/"]), ["folder proto/ is in the code map but does not exist"]);
    }
}
