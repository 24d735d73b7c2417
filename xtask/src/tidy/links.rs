//! Rule: every relative link in a Markdown page has an existing file as its target and, if the link
//! names a heading, an existing heading. Links to other sites are not checked.

use std::collections::BTreeSet;

use super::{Violation, sources::Sources};

/// Reports each relative link whose target does not exist.
pub fn check_links(sources: &Sources) -> Vec<Violation> {
    let pages = sources.with_suffix(".md");
    pages.flat_map(|(path, text)| broken_links(path, text, sources)).collect()
}

fn broken_links(path: &str, text: &str, sources: &Sources) -> Vec<Violation> {
    let links =
        text.lines().enumerate().flat_map(|(n, line)| link_targets(line).map(move |target| (n + 1, target)));
    let broken = links.filter(|(_, target)| !is_external_link(target) && !has_target(path, target, sources));
    let violation = |(line, target): (usize, &str)| Violation {
        path: path.to_owned(),
        line,
        message: format!("target of link not found: {target}"),
        fix: "use the path of an existing file, relative to the page, and an existing heading in this file",
    };
    broken.map(violation).collect()
}

/// Returns the targets of all inline links in a line.
fn link_targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

fn is_external_link(target: &str) -> bool {
    target.contains("://") || target.starts_with("mailto:")
}

fn has_target(page: &str, target: &str, sources: &Sources) -> bool {
    let (file, heading) =
        target.split_once('#').map_or((target, None), |(file, heading)| (file, Some(heading)));
    let file = if file.is_empty() { page.to_owned() } else { to_repository_path(page, file) };
    match (sources.texts.get(&file), heading) {
        (Some(text), Some(heading)) => anchors(text).contains(heading),
        (Some(_), None) => true,
        // The target may be a folder, which is a prefix of the paths of its files.
        (None, _) => sources.texts.keys().any(|path| path.starts_with(&format!("{file}/"))),
    }
}

/// Converts a path relative to a page into a path relative to the root of the repository.
fn to_repository_path(page: &str, file: &str) -> String {
    let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in file.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." | "" => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Returns the anchors of all headings in a page, in the format of GitHub and mdBook.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| to_anchor(line.trim_start_matches('#').trim())).collect()
}

fn to_anchor(heading: &str) -> String {
    let lower_case = heading.to_lowercase();
    let anchor = lower_case.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    anchor.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    const TARGET_PAGE: (&str, &str) = ("docs/b.md", "# Backup and restore\n");

    fn violations_of(link: &str) -> Vec<String> {
        let page = format!("# A\n\nSee [it]({link}).\n");
        locations(&check_links(&sources(&[("docs/a.md", &page), TARGET_PAGE])))
    }

    #[test]
    fn links_to_files_headings_and_sites_pass() {
        for link in
            ["b.md", "b.md#backup-and-restore", "#a", "../docs/b.md", "../docs", "https://example.org/x"]
        {
            assert_eq!(violations_of(link), [""; 0], "{link}");
        }
    }

    #[test]
    fn links_without_target_are_reported() {
        for link in ["c.md", "b.md#backup", "docs/b.md"] {
            assert_eq!(violations_of(link), ["docs/a.md:3"], "{link}");
        }
    }
}
