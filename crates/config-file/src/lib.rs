//! Configuration files of the services, in TOML. [`load`] reads a file. The caller takes its fields
//! one by one and states a rule for each. The error lists all violated rules, each with line,
//! field, value and rule. [`read_file`] reads other small files of the services, such as tokens.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fmt::{self, Display},
    fs::File,
    io,
    ops::RangeInclusive,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use rustix::fs::OFlags;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};
use units::{
    Name, Ns,
    limits::{
        CONFIG_VIOLATIONS_MAX, PATH_COMPONENT_BYTES_MAX, SERVICE_CONFIG_BYTES_MAX, SOCKET_PATH_BYTES_MAX,
    },
};

/// Error of a configuration file.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// The file violates rules. The message has a line for each violation.
    #[error("{}", list_violations(path, violations))]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// Violated rules, at least one, sorted by line.
        violations: Vec<Violation>,
    },
}

fn list_violations(path: &Path, violations: &[Violation]) -> String {
    let lines: Vec<String> =
        violations.iter().map(|violation| format!("{}: {violation}", path.display())).collect();
    lines.join("\n")
}

/// Reads a configuration file. `read` takes the fields of the top table and returns `None` after a
/// violation. Its second argument is the absolute path of the directory of the file, the base of
/// relative paths.
///
/// # Errors
/// [`ConfigError::Read`], or [`ConfigError::Invalid`] with all violations.
pub fn load<T>(path: &Path, read: impl FnOnce(Section<'_>, &Path) -> Option<T>) -> Result<T, ConfigError> {
    let failed = |errno| ConfigError::Read { path: path.to_owned(), errno };
    let invalid = |violation| ConfigError::Invalid { path: path.to_owned(), violations: vec![violation] };
    let contents = read_file(path, SERVICE_CONFIG_BYTES_MAX).map_err(failed)?;
    parse(decode_utf8(&contents).map_err(invalid)?, path, read)
}

/// Opens a regular file for reading. Follows symbolic links. Never waits, unlike opening a FIFO.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] if `path` is not a regular file, or another error of the
/// operating system.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
    check_regular(File::options().read(true).custom_flags(nonblocking).open(path)?)
}

/// Returns the file if it is a regular file.
///
/// # Errors
/// [`not_regular_error`], or another error of the operating system.
pub fn check_regular(file: File) -> io::Result<File> {
    if file.metadata()?.is_file() { Ok(file) } else { Err(not_regular_error()) }
}

/// Returns the error for a file that is not a regular file: [`io::ErrorKind::InvalidInput`].
pub fn not_regular_error() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "must be a regular file")
}

/// Opens and reads a regular file of at most `max` bytes.
///
/// # Errors
/// Errors of [`open_regular`] and [`read_limited`].
pub fn read_file(path: &Path, max: usize) -> io::Result<Vec<u8>> {
    open_regular(path).and_then(|file| read_limited(file, max))
}

/// Reads a file of at most `max` bytes.
///
/// # Errors
/// [`io::ErrorKind::FileTooLarge`] if the file is larger, or another error of the operating system.
pub fn read_limited(file: File, max: usize) -> io::Result<Vec<u8>> {
    let too_large = || io::Error::new(io::ErrorKind::FileTooLarge, format!("must have at most {max} bytes"));
    units::read_limited(file, max)?.ok_or_else(too_large)
}

/// Reads the contents of a configuration file, like [`load`]. `path` is the path of the file.
///
/// # Errors
/// [`ConfigError::Invalid`] with all violations. [`ConfigError::Read`] if `path` is relative and the
/// current directory cannot be determined.
pub fn parse<T>(
    text: &str,
    path: &Path,
    read: impl FnOnce(Section<'_>, &Path) -> Option<T>,
) -> Result<T, ConfigError> {
    let absolute = std::path::absolute(path);
    let absolute = absolute.map_err(|errno| ConfigError::Read { path: path.to_owned(), errno })?;
    let base = absolute.parent().unwrap_or(&absolute);
    let text = SourceText { text, violations: RefCell::default(), omitted: Cell::new(0) };
    let document = text.parse();
    let result = document.as_ref().and_then(|table| read(Section::root_section(&text, table), base));
    drop(document);
    let violations = text.into_violations();
    match result {
        Some(result) if violations.is_empty() => Ok(result),
        _ => Err(ConfigError::Invalid { path: path.to_owned(), violations }),
    }
}

/// Violated rule of the configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Line number, from 1; `None` if the violation concerns the whole file.
    pub line: Option<usize>,
    /// Path of the field, such as `host[2].emcs[0]`; empty if the file is not valid TOML.
    pub field: String,
    /// Value as written in the file; `None` if the field is missing or unknown.
    pub value: Option<String>,
    /// Rule that the field violates, such as "is missing".
    pub rule: String,
}

impl Violation {
    /// Returns the violation of a field whose value is the path of a file or folder.
    pub fn of_path(field: impl Into<String>, path: &Path, rule: String) -> Self {
        let value = units::escaped(&path.display().to_string());
        Self { line: None, field: field.into(), value: Some(value), rule }
    }
}

/// Returns an error with the violations in the configuration file `path`, unless there are none.
///
/// # Errors
/// [`ConfigError::Invalid`].
pub fn reject_violations(path: &Path, violations: Vec<Violation>) -> Result<(), ConfigError> {
    if violations.is_empty() {
        Ok(())
    } else {
        Err(ConfigError::Invalid { path: path.to_owned(), violations })
    }
}

impl Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        match (self.field.as_str(), &self.value) {
            ("", _) => f.write_str(&self.rule),
            (field, None) => write!(f, "{field}: {}", self.rule),
            (field, Some(value)) => write!(f, "{field} = {value}: {}", self.rule),
        }
    }
}

/// Decodes the contents of a file. The violation has the line of the first byte that is not UTF-8.
fn decode_utf8(bytes: &[u8]) -> Result<&str, Violation> {
    std::str::from_utf8(bytes).map_err(|error| {
        let (valid, invalid) = bytes.split_at(error.valid_up_to());
        let rule = format!("must be UTF-8, but contains the byte {:#04x}", invalid[0]);
        Violation { line: Some(line_number_after(valid)), field: String::new(), value: None, rule }
    })
}

/// Returns the number, from 1, of the last line in `before`, the beginning of a file.
fn line_number_after(before: &[u8]) -> usize {
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}

/// Contents of a configuration file, and the violations found so far.
#[derive(Debug)]
struct SourceText<'a> {
    text: &'a str,
    violations: RefCell<Vec<Violation>>,
    /// Number of violations above [`CONFIG_VIOLATIONS_MAX`], which are not stored.
    omitted: Cell<usize>,
}

impl<'a> SourceText<'a> {
    /// Parses the text. Returns `None` after reporting syntax errors.
    fn parse(&self) -> Option<DeTable<'a>> {
        let (document, errors) = DeTable::parse_recoverable(self.text);
        for error in &errors {
            let offset = error.span().map(|span| span.start);
            self.report_violation(offset, String::new(), None, format!("invalid TOML: {}", error.message()));
        }
        errors.is_empty().then(|| document.into_inner())
    }

    /// Returns all violations, sorted by line.
    fn into_violations(self) -> Vec<Violation> {
        let mut violations = self.violations.into_inner();
        violations.sort_by_key(|violation| violation.line);
        if self.omitted.get() > 0 {
            let rule = format!("{} further errors are not shown", self.omitted.get());
            violations.push(Violation { line: None, field: String::new(), value: None, rule });
        }
        violations
    }

    fn report_violation(&self, offset: Option<usize>, field: String, value: Option<String>, rule: String) {
        if self.violations.borrow().len() == CONFIG_VIOLATIONS_MAX {
            return self.omitted.set(self.omitted.get() + 1);
        }
        let line = offset.map(|offset| line_number_after(&self.text.as_bytes()[..offset]));
        self.violations.borrow_mut().push(Violation { line, field, value, rule });
    }
}

/// TOML table. The caller takes its fields one by one, and [`Section::reject_unknown_keys`] reports
/// the fields that were not taken.
#[derive(Debug)]
pub struct Section<'a> {
    text: &'a SourceText<'a>,
    path: String,
    offset: Option<usize>,
    remaining: BTreeMap<&'a str, (usize, &'a Spanned<DeValue<'a>>)>,
    known_keys: Vec<&'static str>,
    taken_fields: BTreeMap<&'static str, Field<'a>>,
}

impl<'a> Section<'a> {
    fn root_section(text: &'a SourceText<'a>, table: &'a DeTable<'a>) -> Self {
        Self::new(text, String::new(), None, table)
    }

    fn new(text: &'a SourceText<'a>, path: String, offset: Option<usize>, table: &'a DeTable<'a>) -> Self {
        let entries = table.iter().map(|(key, value)| (key.get_ref().as_ref(), (key.span().start, value)));
        Self {
            text,
            path,
            offset,
            remaining: entries.collect(),
            known_keys: Vec::new(),
            taken_fields: BTreeMap::new(),
        }
    }

    fn take(&mut self, key: &'static str) -> Option<Field<'a>> {
        self.known_keys.push(key);
        let (_, value) = self.remaining.remove(key)?;
        let field = Field { text: self.text, path: self.field_path(key), value };
        self.taken_fields.insert(key, field.clone());
        Some(field)
    }

    fn field_path(&self, key: &str) -> String {
        let key = units::escaped(key);
        if self.path.is_empty() { key } else { format!("{}.{key}", self.path) }
    }

    /// Returns whether the file contains a field.
    pub fn contains(&self, key: &str) -> bool {
        self.remaining.contains_key(key) || self.taken_fields.contains_key(key)
    }

    /// Takes a required field. Returns `None` after reporting that it is missing or invalid.
    pub fn take_required<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&Field<'a>) -> Result<T, String>,
    ) -> Option<T> {
        let Some(field) = self.take(key) else {
            self.text.report_violation(self.offset, self.field_path(key), None, "is missing".to_owned());
            return None;
        };
        field.read(read)
    }

    /// Takes an optional field. Returns `None` after reporting an invalid value, and `Some(None)`
    /// if the field is missing.
    pub fn take_optional<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&Field<'a>) -> Result<T, String>,
    ) -> Option<Option<T>> {
        self.take(key).map_or(Some(None), |field| field.read(read).map(Some))
    }

    /// Takes an optional list of at most `max` items. Returns `None` after reporting a violation,
    /// and an empty list if the field is missing.
    pub fn take_list<T>(
        &mut self,
        key: &'static str,
        max: usize,
        mut read: impl FnMut(&Field<'a>) -> Result<T, String>,
    ) -> Option<Vec<T>> {
        let items = self.take_optional(key, |field| field.to_items(max))?.unwrap_or_default();
        items.iter().map(|item| item.read(&mut read)).collect::<Vec<_>>().into_iter().collect()
    }

    /// Takes an optional table. Returns `None` if it is missing, or after reporting a violation.
    pub fn take_section(&mut self, key: &'static str) -> Option<Section<'a>> {
        self.take_optional(key, Field::to_section).flatten()
    }

    /// Takes an array of 1 to `max` tables `[[key]]`. Returns only the valid tables. If it reports
    /// an invalid array, it does not also report that the tables are missing.
    pub fn take_required_sections(&mut self, key: &'static str, max: usize) -> Vec<Section<'a>> {
        let Some(items) = self.take_optional(key, |field| field.to_items(max)) else { return Vec::new() };
        let items = items.unwrap_or_default();
        self.check(!items.is_empty(), key, &format!("at least one [[{key}]] is required"));
        items.iter().filter_map(|item| item.read(Field::to_section)).collect()
    }

    /// Reads all remaining fields, whose keys are names that the file defines. Returns `None` after
    /// reporting a violation.
    pub fn read_named_fields<T>(self, read: impl Fn(&Field<'a>) -> Option<T>) -> Option<BTreeMap<Name, T>> {
        let entry = |(key, (_, value)): (&&'a str, &(usize, &'a Spanned<DeValue<'a>>))| {
            let field = Field { text: self.text, path: self.field_path(key), value };
            let name = field.read(|_| Name::new(key).map_err(|error| error.to_string()));
            let settings = read(&field);
            Some((name?, settings?))
        };
        let entries: Vec<_> = self.remaining.iter().map(entry).collect();
        entries.into_iter().collect()
    }

    /// Returns `Some` if `holds` is true. Otherwise, reports that field `key` violates `rule`, with
    /// the value of the field if the caller has taken it.
    pub fn check(&self, holds: bool, key: &'static str, rule: &str) -> Option<()> {
        if !holds {
            match self.taken_fields.get(key) {
                Some(field) => field.report_violation(rule.to_owned()),
                None => self.text.report_violation(self.offset, self.field_path(key), None, rule.to_owned()),
            }
        }
        holds.then_some(())
    }

    /// Reports all fields that were not taken as unknown.
    pub fn reject_unknown_keys(self) {
        let rule = format!("unknown key; must be one of {}", self.known_keys.join(", "));
        for (key, (offset, _)) in &self.remaining {
            self.text.report_violation(Some(*offset), self.field_path(key), None, rule.clone());
        }
    }
}

/// Value of a field, with its path and its position in the file.
#[derive(Clone, Debug)]
pub struct Field<'a> {
    text: &'a SourceText<'a>,
    path: String,
    value: &'a Spanned<DeValue<'a>>,
}

impl<'a> Field<'a> {
    /// Reads the value. Returns `None` after reporting the rule that it violates.
    pub fn read<T>(&self, read: impl FnOnce(&Field<'a>) -> Result<T, String>) -> Option<T> {
        read(self).map_err(|rule| self.report_violation(rule)).ok()
    }

    fn report_violation(&self, rule: String) {
        let span = self.value.span();
        let shown = self.text.text[span.clone()].lines().next().unwrap_or_default();
        let shown = units::escaped(&units::shortened(shown));
        self.text.report_violation(Some(span.start), self.path.clone(), Some(shown), rule);
    }

    /// Returns the path of the field, such as `emc[0].path`.
    pub fn field_path(&self) -> &str {
        &self.path
    }

    /// Parses a table.
    ///
    /// # Errors
    /// The rule that the value violates.
    pub fn to_section(&self) -> Result<Section<'a>, String> {
        let table = self.value.get_ref().as_table().ok_or("must be a table")?;
        Ok(Section::new(self.text, self.path.clone(), Some(self.value.span().start), table))
    }

    /// Parses a table of at most `max` fields whose keys are names; see [`Section::read_named_fields`].
    ///
    /// # Errors
    /// The rule that the value violates.
    pub fn to_named_section(&self, max: usize) -> Result<Section<'a>, String> {
        let section = self.to_section()?;
        let count = section.remaining.len();
        if count <= max { Ok(section) } else { Err(format!("has {count} names: must have at most {max}")) }
    }

    fn to_items(&self, max: usize) -> Result<Vec<Field<'a>>, String> {
        let items = self.value.get_ref().as_array().ok_or("must be a list")?;
        if items.len() > max {
            return Err(format!("has {} items: must have at most {max}", items.len()));
        }
        let item = |(i, value)| Field { text: self.text, path: format!("{}[{i}]", self.path), value };
        Ok(items.iter().enumerate().map(item).collect())
    }

    /// Parses a string.
    ///
    /// # Errors
    /// The rule that the value violates.
    pub fn as_str(&self) -> Result<&'a str, String> {
        self.value.get_ref().as_str().ok_or_else(|| "must be a string in quotes".to_owned())
    }

    /// Returns whether the value is a whole number, which may be negative or out of range.
    pub fn is_integer(&self) -> bool {
        self.value.get_ref().as_integer().is_some()
    }

    /// Parses a name.
    ///
    /// # Errors
    /// The rule that the value violates.
    pub fn to_name(&self) -> Result<Name, String> {
        Name::new(self.as_str()?).map_err(|error| error.to_string())
    }

    /// Parses a path. A relative path is resolved against `base`.
    ///
    /// # Errors
    /// The rule that the value violates.
    pub fn to_path(&self, base: &Path) -> Result<PathBuf, String> {
        to_absolute_path(base, self.as_str()?)
    }

    /// Parses a whole number and checks its range.
    ///
    /// # Errors
    /// The rule that the value violates.
    pub fn to_integer<T>(&self, range: RangeInclusive<T>) -> Result<T, String>
    where
        T: Copy + Display + PartialOrd + TryFrom<u64>,
    {
        let integer = self.value.get_ref().as_integer();
        let number = integer.and_then(|n| u64::from_str_radix(n.as_str(), n.radix()).ok());
        let number = number.and_then(|n| T::try_from(n).ok()).filter(|n| range.contains(n));
        number.ok_or_else(|| format!("must be a whole number from {} to {}", range.start(), range.end()))
    }

    /// Parses `true` or `false`.
    ///
    /// # Errors
    /// The rule that the value violates.
    pub fn to_bool(&self) -> Result<bool, String> {
        self.value.get_ref().as_bool().ok_or_else(|| "must be true or false".to_owned())
    }

    /// Parses a number, which may be fractional.
    ///
    /// # Errors
    /// The rule that the value violates.
    pub fn to_number(&self) -> Result<f64, String> {
        let value = self.value.get_ref();
        let integer = value.as_integer().filter(|n| n.radix() == 10).map(|n| n.as_str());
        let digits = value.as_float().map(|n| n.as_str()).or(integer);
        digits.and_then(|digits| digits.parse().ok()).ok_or_else(|| "must be a decimal number".to_owned())
    }

    /// Parses a number of seconds, which may be fractional, and checks its range.
    ///
    /// # Errors
    /// The rule that the value violates.
    pub fn to_duration(&self, range: RangeInclusive<Ns>) -> Result<Ns, String> {
        let in_seconds = |ns: &Ns| ns.as_duration().as_secs_f64();
        let rule = || {
            format!(
                "must be a number of seconds from {} to {}",
                in_seconds(range.start()),
                in_seconds(range.end())
            )
        };
        let span = std::time::Duration::try_from_secs_f64(self.to_number().map_err(|_| rule())?);
        span.ok().map(Ns::from).filter(|span| range.contains(span)).ok_or_else(rule)
    }
}

/// Returns the absolute form of `path`. A relative path is resolved against `base`.
///
/// # Errors
/// The rule that the path violates.
pub fn to_absolute_path(base: &Path, path: &str) -> Result<PathBuf, String> {
    match path {
        "" => Err("must not be an empty path".to_owned()),
        path if path.contains('\0') => Err("must not contain a NUL character".to_owned()),
        path => {
            let path = std::path::absolute(base.join(path));
            let path = path.map_err(|errno| format!("is not a valid path: {errno}"))?;
            check_component_lengths(&path).map(|()| path)
        }
    }
}

fn check_component_lengths(path: &Path) -> Result<(), String> {
    let longest = path.components().map(|component| component.as_os_str().len()).max().unwrap_or_default();
    if longest <= PATH_COMPONENT_BYTES_MAX {
        return Ok(());
    }
    Err(format!(
        "has a component of {longest} bytes: each must have at most {PATH_COMPONENT_BYTES_MAX} bytes"
    ))
}

/// Returns the absolute form of the path of a unix socket. A relative path is resolved against
/// `base`.
///
/// # Errors
/// The rule that the path violates.
pub fn to_socket_path(base: &Path, path: &str) -> Result<PathBuf, String> {
    if path.starts_with('@') {
        return Err(
            "must be the path of a file: every local user can connect to an abstract socket".to_owned()
        );
    }
    if ["", ".", ".."].contains(&path.rsplit('/').next().unwrap_or_default()) && !path.is_empty() {
        return Err("must end with the name of a file, such as /run/tarn/manager.sock".to_owned());
    }
    let path = to_absolute_path(base, path)?;
    check_socket_path_length(&path).map(|()| path)
}

/// Checks that the kernel accepts the absolute path of a unix socket.
///
/// # Errors
/// The rule that the path violates.
pub fn check_socket_path_length(path: &Path) -> Result<(), String> {
    let bytes = path.as_os_str().len();
    if bytes <= SOCKET_PATH_BYTES_MAX {
        Ok(())
    } else {
        Err(format!("has a path of {bytes} bytes: must have at most {SOCKET_PATH_BYTES_MAX} bytes"))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek as _, Write as _};

    use super::*;

    /// Reads a file with the required number `n` and a list of at most two names.
    fn read(text: &str) -> Result<f64, String> {
        let result = parse(text, Path::new("/etc/x.toml"), |mut top, _| {
            let number = top.take_required("n", Field::to_number);
            let names = top.take_list("names", 2, Field::to_name);
            top.reject_unknown_keys();
            names.and(number)
        });
        result.map_err(|error| error.to_string())
    }

    #[test]
    fn error_has_file_line_field_value_and_rule() {
        assert_eq!(read("n = 1.5\nnames = [\"a\", \"b\"]"), Ok(1.5));
        let cases = [
            ("", "/etc/x.toml: n: is missing"),
            ("n = true", "/etc/x.toml: line 1: n = true: must be a decimal number"),
            ("n = 0x10", "/etc/x.toml: line 1: n = 0x10: must be a decimal number"),
            (
                "n = 1\nnames = [\"a\", \"b\", \"c\"]",
                "/etc/x.toml: line 2: names = [\"a\", \"b\", \"c\"]: has 3 items: must have at most 2",
            ),
            ("n = 1\nm = 2", "/etc/x.toml: line 2: m: unknown key; must be one of n, names"),
            (
                "n = 1\n\"\\u001b\\n\" = 2",
                "/etc/x.toml: line 2: \\u{1b}\\n: unknown key; must be one of n, names",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(read(text).unwrap_err(), expected);
        }
    }

    #[test]
    fn socket_path_must_name_a_file() {
        let parse = |path: &str| to_socket_path(Path::new("/etc"), path);
        assert_eq!(parse("run/a.sock").unwrap(), Path::new("/etc/run/a.sock"));
        for (path, rule) in [
            ("", "must not be an empty path"),
            ("@a", "every local user can connect to an abstract socket"),
            ("/", "must end with the name of a file"),
            ("/run/", "must end with the name of a file"),
            ("/run/.", "must end with the name of a file"),
            ("/run/..", "must end with the name of a file"),
            (&format!("/{}", "x".repeat(107)), "has a path of 108 bytes: must have at most 107 bytes"),
        ] {
            let error = parse(path).unwrap_err();
            assert!(error.contains(rule), "{path:?}: {error}");
        }
    }

    #[test]
    fn number_of_reported_errors_is_limited() {
        let unknown = |count: usize| (0..count).map(|i| format!("k{i} = 0\n")).collect::<String>() + "n = 1";
        let lines = |count| read(&unknown(count)).unwrap_err().lines().count();
        assert_eq!(lines(CONFIG_VIOLATIONS_MAX), CONFIG_VIOLATIONS_MAX);
        assert_eq!(lines(CONFIG_VIOLATIONS_MAX + 9), CONFIG_VIOLATIONS_MAX + 1);
        let error = read(&unknown(CONFIG_VIOLATIONS_MAX + 9)).unwrap_err();
        assert!(error.ends_with("/etc/x.toml: 9 further errors are not shown"), "{error}");
    }

    #[test]
    fn file_is_read_up_to_the_limit() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"1234").unwrap();
        let read = |max| {
            let mut file = file.try_clone().unwrap();
            file.rewind().unwrap();
            read_limited(file, max)
        };
        assert_eq!(read(4).unwrap(), b"1234");
        let error = read(3).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(error.to_string(), "must have at most 3 bytes");
    }

    #[test]
    fn only_regular_files_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, mode).unwrap();
        for path in [&fifo, folder.path(), Path::new("/dev/zero")] {
            let error = read_file(path, 4).unwrap_err();
            assert_eq!(error.to_string(), "must be a regular file", "{}", path.display());
        }
        let file = folder.path().join("file");
        std::fs::write(&file, "1234").unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(read_file(&link, 4).unwrap(), b"1234");
    }
}
