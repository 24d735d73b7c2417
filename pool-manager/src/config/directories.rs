//! Directories that the manager owns: the store and the paths of EMCs. No such directory may be
//! inside another one, because the removal of an abandoned one would remove the other.

use std::path::{Component, Path, PathBuf};

/// Directories read so far.
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
    /// Adds the directory that `field` names by an absolute path.
    ///
    /// # Errors
    /// Returns the violated rule if the directory is, contains or is inside an earlier one.
    pub(super) fn add(&mut self, field: &str, path: &Path) -> Result<(), String> {
        let path = normalize(path);
        let violation = self.0.iter().find_map(|other| other.find_violation(&path));
        self.0.push(Directory { field: field.to_owned(), path });
        violation.map_or(Ok(()), Err)
    }
}

impl Directory {
    /// Returns the rule that the directory `path` violates because of this directory.
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

/// Removes `.` and `..` from an absolute path. Does not resolve symbolic links, so that the check of
/// a file does not depend on existing directories.
fn normalize(path: &Path) -> PathBuf {
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
