//! All text files of the repository in memory. Rules are pure functions of these files, so that
//! their tests need no files on disk.

use std::{collections::BTreeMap, fs, path::Path};

use super::rust::RustFile;
use crate::failure::Failure;

/// Top-level folders that are not read: build results and version control.
const EXCLUDED_FOLDERS: &[&str] = &["target", ".git"];
/// Maximum depth of nested folders.
const FOLDER_DEPTH_MAX: usize = 16;

/// All text files of the repository, and the syntax trees of the Rust files.
#[derive(Default)]
pub struct Sources {
    /// Text of each file by path, relative to the root of the repository.
    pub texts: BTreeMap<String, String>,
    /// Parsed Rust files.
    pub rust: Vec<RustFile>,
}

impl Sources {
    /// Reads all text files below `root`, except the folders in [`EXCLUDED_FOLDERS`].
    ///
    /// # Errors
    /// Returns an error if a folder or file cannot be read or a Rust file cannot be parsed.
    pub fn read(root: &Path) -> Result<Self, Failure> {
        let mut texts = BTreeMap::new();
        read_folder(root, "", FOLDER_DEPTH_MAX, &mut texts)?;
        Self::parse(texts)
    }

    /// Parses the Rust files among the given texts.
    ///
    /// # Errors
    /// Returns an error if a Rust file cannot be parsed.
    pub fn parse(texts: BTreeMap<String, String>) -> Result<Self, Failure> {
        let rust = texts.iter().filter(|(path, _)| path.ends_with(".rs"));
        let mut rust = rust.map(|(path, text)| RustFile::parse(path, text)).collect::<Result<Vec<_>, _>>()?;
        super::rust::mark_test_modules(&mut rust);
        Ok(Self { texts, rust })
    }

    /// Returns the path and text of all files whose path has this suffix.
    pub fn with_suffix<'a>(&'a self, suffix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.texts
            .iter()
            .filter(move |(path, _)| path.ends_with(suffix))
            .map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Returns the Rust files that are not test code.
    pub fn non_test_files(&self) -> impl Iterator<Item = &RustFile> {
        self.rust.iter().filter(|file| !file.is_test)
    }
}

fn read_folder(
    root: &Path,
    folder: &str,
    depth: usize,
    texts: &mut BTreeMap<String, String>,
) -> Result<(), Failure> {
    let absolute = root.join(folder);
    if depth == 0 {
        return Err(Failure::BadResult(format!(
            "folder {}: must be nested at most {FOLDER_DEPTH_MAX} levels deep",
            absolute.display()
        )));
    }
    for entry in fs::read_dir(&absolute).map_err(Failure::file_error("list", &absolute))? {
        let entry = entry.map_err(Failure::file_error("list", &absolute))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if folder.is_empty() && EXCLUDED_FOLDERS.contains(&name.as_str()) {
            continue;
        }
        let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
        let kind = entry.file_type().map_err(Failure::file_error("stat", entry.path()))?;
        if kind.is_dir() {
            read_folder(root, &path, depth - 1, texts)?;
        } else if kind.is_file() {
            // Binary files are skipped because they have no lines to check.
            let bytes = fs::read(entry.path()).map_err(Failure::file_error("read", entry.path()))?;
            texts.extend(String::from_utf8(bytes).ok().map(|text| (path, text)));
        }
    }
    Ok(())
}

/// Creates a repository with these files, for tests of rules.
#[cfg(test)]
pub fn sources(files: &[(&str, &str)]) -> Sources {
    let texts = files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned()));
    Sources::parse(texts.collect()).unwrap()
}

/// Returns the sorted locations of violations as `path:line`, for tests of rules.
#[cfg(test)]
pub fn locations(violations: &[super::Violation]) -> Vec<String> {
    let mut locations: Vec<String> = violations.iter().map(|c| format!("{}:{}", c.path, c.line)).collect();
    locations.sort();
    locations
}
