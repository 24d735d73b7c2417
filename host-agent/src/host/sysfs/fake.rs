//! Simulated sysfs in a temporary directory, for tests. Writes change only the written file.

use std::{fs, os::unix::fs::symlink, path::PathBuf};

use super::Sysfs;

/// Simulated sysfs, whose directory is removed when the value is dropped.
pub(crate) struct FakeSysfs {
    folder: tempfile::TempDir,
    pub(crate) sysfs: Sysfs,
}

impl FakeSysfs {
    /// Creates a tree with these files, given as relative path and contents.
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let sysfs = Sysfs::at(folder.path().canonicalize().unwrap());
        let fake = Self { folder, sysfs };
        fake.files("", files);
        fake
    }

    /// Adds files below a directory, given as relative path and contents. Existing files are
    /// replaced.
    pub(crate) fn files(&self, below: &str, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = self.path(below).join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
    }

    /// Adds a symbolic link to a directory, and creates the directory if necessary.
    pub(crate) fn link(&self, at: &str, to: &str) {
        fs::create_dir_all(self.path(to)).unwrap();
        fs::create_dir_all(self.path(at).parent().unwrap()).unwrap();
        symlink(self.path(to), self.path(at)).unwrap();
    }

    /// Returns the absolute path of a file in the tree.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join(name)
    }
}
