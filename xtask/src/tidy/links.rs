//! Rule: every relative link in a Markdown page leads to a file, and to a heading if it names one.
//! Links to other sites are not followed.

use std::collections::BTreeSet;

use super::{Violation, sources::Sources};

/// Reports each relative link without a target.
pub fn resolve(sources: &Sources) -> Vec<Violation> {
    let pages = sources.with_suffix(".md");
    pages.flat_map(|(path, text)| broken(path, text, sources)).collect()
}

fn broken(path: &str, text: &str, sources: &Sources) -> Vec<Violation> {
    let links =
        text.lines().enumerate().flat_map(|(n, line)| targets(line).map(move |target| (n + 1, target)));
    let broken = links.filter(|(_, target)| !is_external(target) && !has_target(path, target, sources));
    let violation = |(line, target): (usize, &str)| Violation {
        path: path.to_owned(),
        line,
        message: format!("the link to {target} has no target"),
        fix: "name an existing file, relative to the page, and a heading of it",
    };
    broken.map(violation).collect()
}

/// Returns the targets of the inline links of one line.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

fn is_external(target: &str) -> bool {
    target.contains("://") || target.starts_with("mailto:")
}

fn has_target(page: &str, target: &str, sources: &Sources) -> bool {
    let (file, heading) =
        target.split_once('#').map_or((target, None), |(file, heading)| (file, Some(heading)));
    let file = if file.is_empty() { page.to_owned() } else { relative(page, file) };
    match (sources.texts.get(&file), heading) {
        (Some(text), Some(heading)) => anchors(text).contains(heading),
        (Some(_), None) => true,
        // A folder is a prefix of its files.
        (None, _) => sources.texts.keys().any(|path| path.starts_with(&format!("{file}/"))),
    }
}

/// Returns the path from the root of a file named relative to a page.
fn relative(page: &str, file: &str) -> String {
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

/// Returns the anchors of a page's headings, as GitHub and mdBook name them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#').trim())).collect()
}

fn anchor(heading: &str) -> String {
    let lower_case = heading.to_lowercase();
    let anchor = lower_case.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    anchor.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    const TARGET: (&str, &str) = ("docs/b.md", "# Backup and restore\n");

    fn violations_of(link: &str) -> Vec<String> {
        let page = format!("# A\n\nSee [it]({link}).\n");
        places(&resolve(&sources(&[("docs/a.md", &page), TARGET])))
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
