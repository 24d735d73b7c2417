//! Simulated /sys in a temporary folder, for tests. Writes have no effects.

use std::{fs, os::unix::fs::symlink, path::PathBuf};

use super::Sysfs;

/// Tree that is removed when it is dropped.
pub(crate) struct FakeSysfs {
    folder: tempfile::TempDir,
    pub(crate) sysfs: Sysfs,
}

impl FakeSysfs {
    /// Creates a tree of files with contents.
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let sysfs = Sysfs::at(folder.path().canonicalize().unwrap());
        let fake = Self { folder, sysfs };
        fake.files("", files);
        fake
    }

    /// Adds files in a folder.
    pub(crate) fn files(&self, below: &str, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = self.path(below).join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
    }

    /// Adds a link to a folder.
    pub(crate) fn link(&self, at: &str, to: &str) {
        fs::create_dir_all(self.path(to)).unwrap();
        fs::create_dir_all(self.path(at).parent().unwrap()).unwrap();
        symlink(self.path(to), self.path(at)).unwrap();
    }

    /// Returns the path of a name.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join(name)
    }
}
