//! Checks the directories that the manager owns: the store and the paths of EMCs. They must not be
//! nested, because deleting an unused directory would also delete the nested one.

use std::path::{Component, Path, PathBuf};

/// Directories named by the fields parsed so far.
#[derive(Debug, Default)]
pub(super) struct Directories(Vec<Directory>);

/// Directory, and the field that names it.
#[derive(Debug)]
struct Directory {
    field: String,
    /// Path without `.` and `..`.
    path: PathBuf,
}

impl Directories {
    /// Adds the directory at the absolute `path`, which is the value of `field`.
    ///
    /// # Errors
    /// Returns the violated rule if the directory equals, contains or is inside a directory added
    /// earlier.
    pub(super) fn add(&mut self, field: &str, path: &Path) -> Result<(), String> {
        let path = normalize_path(path);
        let violation = self.0.iter().find_map(|other| other.find_violation(&path));
        self.0.push(Directory { field: field.to_owned(), path });
        violation.map_or(Ok(()), Err)
    }
}

impl Directory {
    /// Returns the violated rule if `path` equals, contains or is inside this directory.
    fn find_violation(&self, path: &Path) -> Option<String> {
        let Self { field, path: other } = self;
        let relation = if path == other {
            return Some(format!("is already {field}: must be unique"));
        } else if path.starts_with(other) {
            "is inside"
        } else if other.starts_with(path) {
            "contains"
        } else {
            return None;
        };
        Some(format!("{relation} {field} ({}): must be separate directories", other.display()))
    }
}

/// Removes `.` and `..` from an absolute path. Does not resolve symbolic links, so that the result
/// does not depend on existing directories.
fn normalize_path(path: &Path) -> PathBuf {
    let mut normalized = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                normalized.pop();
            }
            Component::CurDir => {}
            component => normalized.push(component),
        }
    }
    normalized
}
