//! Rule: the code map in the README is the folders, each of them and nothing else. What it says about them is for readers.

use std::collections::BTreeSet;

use super::{Complaint, sources::Sources};

const README: &str = "README.md";
/// The heading under which the map is, as the first block of code.
const HEADING: &str = "## The house";

/// Complains about folders that the map lacks and about lines of the map without a folder.
pub fn matches(sources: &Sources) -> Vec<Complaint> {
    let readme = sources.texts.get(README).map_or("", String::as_str);
    let drawn = drawn(readme);
    let folders = folders(sources);
    let gone = drawn.iter().filter(|(_, folder)| !folders.contains(folder.as_str()));
    let gone = gone.map(|(line, folder)| complaint(*line, format!("{folder} is in the map and not here")));
    let missing = folders.iter().filter(|folder| !drawn.iter().any(|(_, drawn)| drawn == *folder));
    let missing = missing.map(|folder| complaint(1, format!("{folder} is here and not in the map")));
    gone.chain(missing).collect()
}

fn complaint(line: usize, what: String) -> Complaint {
    let mend = "bring the map under \"The house\" up to date: one line for each folder, its name first";
    Complaint { path: README.to_owned(), line, what, mend }
}

/// Folders named by the map, each the first word of a line that does not begin with a space.
fn drawn(readme: &str) -> Vec<(usize, String)> {
    let lines = readme.lines().enumerate().skip_while(|(_, line)| *line != HEADING);
    let block = lines.skip_while(|(_, line)| !line.starts_with("```")).skip(1);
    let block = block.take_while(|(_, line)| !line.starts_with("```"));
    let names = block.filter(|(_, line)| !line.starts_with(' '));
    names.filter_map(|(n, line)| Some((n + 1, line.split_whitespace().next()?.to_owned()))).collect()
}

/// Folders at the top that are not hidden, and those in `crates/` instead of `crates/` itself.
fn folders(sources: &Sources) -> BTreeSet<&str> {
    let folder = |path: &str| {
        let depth = if path.starts_with("crates/") { 2 } else { 1 };
        path.match_indices('/').nth(depth - 1).map(|(at, _)| at + 1)
    };
    let seen = sources.texts.keys().filter(|path| !path.starts_with('.'));
    seen.filter_map(|path| folder(path).map(|end| &path[..end])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::sources;

    const MAP: &str = "# Tarn\n\n## The house\n\nWords.\n\n```text\ncrates/pool/   the ledger\n  life.rs\nproto/   the wire\n```\n";

    fn complaints(folders: &[&str]) -> Vec<String> {
        let files = folders.iter().map(|folder| format!("{folder}Cargo.toml")).collect::<Vec<_>>();
        let files = files.iter().map(|path| (path.as_str(), "")).chain([(README, MAP)]).collect::<Vec<_>>();
        matches(&sources(&files)).into_iter().map(|complaint| complaint.what).collect()
    }

    #[test]
    fn a_true_map_is_fine() {
        assert_eq!(complaints(&["crates/pool/", "proto/"]), [""; 0]);
    }

    #[test]
    fn a_folder_that_is_not_in_the_map_is_found() {
        assert_eq!(
            complaints(&["crates/pool/", "proto/", "crates/soft/"]),
            ["crates/soft/ is here and not in the map"]
        );
    }

    #[test]
    fn a_line_without_a_folder_is_found() {
        assert_eq!(complaints(&["crates/pool/"]), ["proto/ is in the map and not here"]);
    }
}
