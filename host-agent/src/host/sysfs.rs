//! Access to sysfs: reading and writing of attribute files, directories and links. The root is an
//! argument, so that tests can use a simulated tree. All changes to devices of the kernel use
//! [`Sysfs::write`].

use std::{
    fs::{self, OpenOptions},
    io,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    str::FromStr,
};

use rustix::io::Errno;

/// Error of an access to sysfs.
#[derive(Debug, thiserror::Error)]
pub enum SysfsError {
    /// A file, directory or link could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file, directory or link.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// A value could not be written, usually because the kernel rejects it.
    #[error("cannot write {value:?} to {}", path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Rejected value.
        value: String,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// A file has unexpected contents.
    #[error("{} contains {text:?}, expected {expected}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Contents of the file.
        text: String,
        /// Expected contents, such as `a number`.
        expected: &'static str,
    },
}

impl SysfsError {
    /// Returns whether a read failed because the file does not exist or was removed meanwhile.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Read { errno, .. } if is_gone(errno))
    }
}

/// Parses a list of numbers and ranges such as `0-2,5`; `None` if the text is not such a list.
pub fn parse_ranges<N: FromStr + Copy>(list: &str) -> Option<Vec<RangeInclusive<N>>> {
    let range = |item: &str| {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').filter(|item| !item.is_empty()).map(range).collect()
}

fn is_gone(errno: &io::Error) -> bool {
    let codes = [Errno::NOENT, Errno::NODEV, Errno::SRCH];
    codes.iter().any(|code| errno.raw_os_error() == Some(code.raw_os_error()))
}

/// File tree such as /sys. Paths are relative to its root, or absolute if they come from
/// [`Sysfs::target`].
#[derive(Clone, Debug)]
pub struct Sysfs(PathBuf);

impl Sysfs {
    /// Returns the tree below a directory, without accessing it.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self(root.into())
    }

    /// Returns the contents of a file without trailing white space.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn text(&self, file: impl AsRef<Path>) -> Result<String, SysfsError> {
        let path = self.0.join(file);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(text.trim_end().to_owned()),
            Err(errno) => Err(SysfsError::Read { path, errno }),
        }
    }

    /// Returns the number in a file: decimal, or hexadecimal after `0x`.
    ///
    /// # Errors
    /// The file cannot be read, or does not contain a number.
    pub fn number(&self, file: impl AsRef<Path>) -> Result<u64, SysfsError> {
        let text = self.text(&file)?;
        let number = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => text.parse(),
        };
        number.map_err(|_| self.unreadable_error(file, text, "a number"))
    }

    /// Returns the error of a file with unexpected contents.
    pub fn unreadable_error(
        &self,
        file: impl AsRef<Path>,
        text: String,
        expected: &'static str,
    ) -> SysfsError {
        SysfsError::Unreadable { path: self.0.join(file), text, expected }
    }

    /// Writes a value to a file by a single system call.
    ///
    /// # Errors
    /// The error of the kernel; `Interrupted` if a signal interrupted the call.
    pub fn write(&self, file: impl AsRef<Path>, value: &str) -> Result<(), SysfsError> {
        let path = self.0.join(file);
        let opened = OpenOptions::new().write(true).truncate(true).open(&path);
        // `write_all` of the standard library would retry an interrupted call.
        match opened.and_then(|file| Ok(rustix::io::pwrite(&file, value.as_bytes(), 0)?)) {
            Ok(_) => Ok(()),
            Err(errno) => Err(SysfsError::Write { path, value: value.to_owned(), errno }),
        }
    }

    /// Returns the names in a directory that begin with a prefix and a digit, in ascending order of
    /// their numbers.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn numbered_names(&self, folder: impl AsRef<Path>, prefix: &str) -> Result<Vec<String>, SysfsError> {
        let path = self.0.join(folder);
        let listed: io::Result<Vec<_>> = fs::read_dir(&path).and_then(Iterator::collect);
        let listed = listed.map_err(|errno| SysfsError::Read { path, errno })?;
        let names = listed.iter().filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<_> = names.filter(|name| is_numbered(name, prefix)).collect();
        names.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
        Ok(names)
    }

    /// Returns the absolute path of a file or directory after following all links.
    ///
    /// # Errors
    /// The file does not exist, or a link cannot be read.
    pub fn target(&self, path: impl AsRef<Path>) -> Result<PathBuf, SysfsError> {
        let path = self.0.join(path);
        fs::canonicalize(&path).map_err(|errno| SysfsError::Read { path, errno })
    }

    /// Returns whether a file or directory exists.
    pub fn has(&self, path: impl AsRef<Path>) -> bool {
        self.0.join(path).exists()
    }

    /// Returns the name of the driver to which a device is bound, if any. Returns `None` also if
    /// the device does not exist.
    ///
    /// # Errors
    /// The link to the driver cannot be read.
    pub fn driver(&self, device: impl AsRef<Path>) -> Result<Option<String>, SysfsError> {
        match self.target(device.as_ref().join("driver")) {
            Ok(driver) => Ok(driver.file_name().map(|name| name.to_string_lossy().into_owned())),
            Err(error) if error.is_gone() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn is_numbered(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
}

#[cfg(test)]
pub(crate) mod fake;

#[cfg(test)]
mod tests {
    use super::fake::FakeSysfs;

    #[test]
    fn decimal_and_hexadecimal_numbers_are_parsed() {
        let fake = FakeSysfs::new(&[("a", "0xac0000000"), ("b", "4294967296"), ("c", "lots")]);
        assert_eq!(fake.sysfs.number("a").unwrap(), 43 << 30);
        assert_eq!(fake.sysfs.number("b").unwrap(), 4 << 30);
        let error = fake.sysfs.number("c").unwrap_err().to_string();
        assert!(error.ends_with("/c contains \"lots\", expected a number"), "{error}");
    }

    #[test]
    fn numbered_names_are_sorted_by_number() {
        let files = ["decoder2.10", "decoder2.9", "decoders_committed", "dport1"];
        let fake = FakeSysfs::new(&files.map(|name| (name, "")));
        assert_eq!(fake.sysfs.numbered_names("", "decoder").unwrap(), ["decoder2.9", "decoder2.10"]);
    }

    #[test]
    fn write_error_contains_file_value_and_cause() {
        let fake = FakeSysfs::new(&[("there", "1")]);
        fake.sysfs.write("there", "2").unwrap();
        assert_eq!(fake.sysfs.text("there").unwrap(), "2");
        let error = units::chain(&fake.sysfs.write("region0/commit", "1").unwrap_err());
        assert!(
            error.contains("cannot write \"1\" to ") && error.contains("/region0/commit: No such"),
            "{error}"
        );
    }

    #[test]
    fn missing_device_is_gone_and_has_no_driver() {
        let fake = FakeSysfs::new(&[]);
        assert!(fake.sysfs.text("dax1.1/size").unwrap_err().is_gone());
        assert_eq!(fake.sysfs.driver("dax1.1").unwrap(), None);
    }
}
