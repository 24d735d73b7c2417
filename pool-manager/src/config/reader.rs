//! Reads fields of a TOML file one by one and collects all violations with line, value and rule.
//! Callers define the fields and their rules.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fmt::{self, Display},
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};
use units::{Name, Ns};

/// Maximum number of characters of an invalid value in a message.
const SHOWN_VALUE_CHARS_MAX: usize = 80;

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

/// Decodes the contents of a configuration file.
///
/// # Errors
/// [`Violation`] with the line of the first invalid byte if the contents are not UTF-8.
pub(super) fn decode(bytes: &[u8]) -> Result<&str, Violation> {
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
pub(super) struct SourceText<'a> {
    text: &'a str,
    violations: RefCell<Vec<Violation>>,
}

impl<'a> SourceText<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, violations: RefCell::default() }
    }

    /// Parses the text. Returns `None` after reporting syntax errors.
    pub(super) fn parse(&self) -> Option<DeTable<'a>> {
        let (document, errors) = DeTable::parse_recoverable(self.text);
        for error in &errors {
            let offset = error.span().map(|span| span.start);
            self.report_violation(offset, String::new(), None, format!("invalid TOML: {}", error.message()));
        }
        errors.is_empty().then(|| document.into_inner())
    }

    /// Returns all violations, sorted by line.
    pub(super) fn into_violations(self) -> Vec<Violation> {
        let mut violations = self.violations.into_inner();
        violations.sort_by_key(|violation| violation.line);
        violations
    }

    fn report_violation(&self, offset: Option<usize>, field: String, value: Option<String>, rule: String) {
        let line = offset.map(|offset| line_number_after(&self.text.as_bytes()[..offset]));
        self.violations.borrow_mut().push(Violation { line, field, value, rule });
    }
}

/// TOML table. The caller takes its fields one by one, and [`Section::reject_unknown_keys`] reports
/// the fields that were not taken.
#[derive(Debug)]
pub(super) struct Section<'a> {
    text: &'a SourceText<'a>,
    path: String,
    offset: Option<usize>,
    remaining: BTreeMap<&'a str, (usize, &'a Spanned<DeValue<'a>>)>,
    known_keys: Vec<&'static str>,
    taken_fields: BTreeMap<&'static str, Field<'a>>,
}

impl<'a> Section<'a> {
    pub(super) fn root(text: &'a SourceText<'a>, table: &'a DeTable<'a>) -> Self {
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
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.remaining.contains_key(key)
    }

    /// Returns whether the file contains a field that the caller has taken before.
    pub(super) fn is_present(&self, key: &str) -> bool {
        self.taken_fields.contains_key(key)
    }

    /// Takes a required field. Returns `None` after reporting that it is missing or invalid.
    pub(super) fn take_required<T>(
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
    pub(super) fn take_optional<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&Field<'a>) -> Result<T, String>,
    ) -> Option<Option<T>> {
        self.take(key).map_or(Some(None), |field| field.read(read).map(Some))
    }

    /// Takes an optional list of at most `max` items. Returns `None` after reporting a violation,
    /// and an empty list if the field is missing.
    pub(super) fn take_list<T>(
        &mut self,
        key: &'static str,
        max: usize,
        mut read: impl FnMut(&Field<'a>) -> Result<T, String>,
    ) -> Option<Vec<T>> {
        let items = self.take_optional(key, |field| field.to_items(max))?.unwrap_or_default();
        items.iter().map(|item| item.read(&mut read)).collect::<Vec<_>>().into_iter().collect()
    }

    /// Takes an optional table. Returns `None` if it is missing, or after reporting a violation.
    pub(super) fn take_section(&mut self, key: &'static str) -> Option<Section<'a>> {
        self.take_optional(key, Field::to_section).flatten()
    }

    /// Takes an array of at most `max` tables `[[key]]`.
    pub(super) fn take_sections(&mut self, key: &'static str, max: usize) -> Vec<Section<'a>> {
        let items = self.take_optional(key, |field| field.to_items(max)).flatten().unwrap_or_default();
        items.iter().filter_map(|item| item.read(Field::to_section)).collect()
    }

    /// Returns `Some` if `holds` is true. Otherwise, reports that field `key` violates `rule`, with
    /// the value of the field if the caller has taken it.
    pub(super) fn check(&self, holds: bool, key: &'static str, rule: &str) -> Option<()> {
        if !holds {
            match self.taken_fields.get(key) {
                Some(field) => field.report_violation(rule.to_owned()),
                None => self.text.report_violation(self.offset, self.field_path(key), None, rule.to_owned()),
            }
        }
        holds.then_some(())
    }

    /// Reports all fields that were not taken as unknown.
    pub(super) fn reject_unknown_keys(self) {
        let rule = format!("unknown key; must be one of {}", self.known_keys.join(", "));
        for (key, (offset, _)) in &self.remaining {
            self.text.report_violation(Some(*offset), self.field_path(key), None, rule.clone());
        }
    }
}

/// Value of a field, with its path and its position in the file.
#[derive(Clone, Debug)]
pub(super) struct Field<'a> {
    text: &'a SourceText<'a>,
    path: String,
    value: &'a Spanned<DeValue<'a>>,
}

impl<'a> Field<'a> {
    fn read<T>(&self, read: impl FnOnce(&Field<'a>) -> Result<T, String>) -> Option<T> {
        read(self).map_err(|rule| self.report_violation(rule)).ok()
    }

    fn report_violation(&self, rule: String) {
        let span = self.value.span();
        let shown = self.text.text[span.clone()].lines().next().unwrap_or_default();
        let shown = shown.chars().take(SHOWN_VALUE_CHARS_MAX).collect();
        self.text.report_violation(Some(span.start), self.path.clone(), Some(shown), rule);
    }

    /// Returns the path of the field, such as `emc[0].path`.
    pub(super) fn field_path(&self) -> &str {
        &self.path
    }

    pub(super) fn to_section(&self) -> Result<Section<'a>, String> {
        let table = self.value.get_ref().as_table().ok_or("must be a table")?;
        Ok(Section::new(self.text, self.path.clone(), Some(self.value.span().start), table))
    }

    fn to_items(&self, max: usize) -> Result<Vec<Field<'a>>, String> {
        let items = self.value.get_ref().as_array().ok_or("must be a list")?;
        if items.len() > max {
            return Err(format!("has {} items: must have at most {max}", items.len()));
        }
        let item = |(i, value)| Field { text: self.text, path: format!("{}[{i}]", self.path), value };
        Ok(items.iter().enumerate().map(item).collect())
    }

    pub(super) fn as_str(&self) -> Result<&'a str, String> {
        self.value.get_ref().as_str().ok_or_else(|| "must be a string in quotes".to_owned())
    }

    pub(super) fn to_name(&self) -> Result<Name, String> {
        Name::new(self.as_str()?).map_err(|error| error.to_string())
    }

    /// Parses a path; a relative path is resolved against `base`.
    pub(super) fn to_path(&self, base: &Path) -> Result<PathBuf, String> {
        to_absolute(base, self.as_str()?)
    }

    pub(super) fn to_integer<T>(&self, range: RangeInclusive<T>) -> Result<T, String>
    where
        T: Copy + Display + PartialOrd + TryFrom<u64>,
    {
        let integer = self.value.get_ref().as_integer();
        let number = integer.and_then(|n| u64::from_str_radix(n.as_str(), n.radix()).ok());
        let number = number.and_then(|n| T::try_from(n).ok()).filter(|n| range.contains(n));
        number.ok_or_else(|| format!("must be a whole number from {} to {}", range.start(), range.end()))
    }

    pub(super) fn to_number(&self) -> Result<f64, String> {
        let value = self.value.get_ref();
        let digits = value.as_float().map(|n| n.as_str()).or(value.as_integer().map(|n| n.as_str()));
        digits.and_then(|digits| digits.parse().ok()).ok_or_else(|| "must be a number".to_owned())
    }

    /// Parses a number of seconds, which may be fractional, and checks its range.
    pub(super) fn to_duration(&self, range: RangeInclusive<Ns>) -> Result<Ns, String> {
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

/// Returns the absolute form of `path`; a relative path is resolved against `base`.
pub(super) fn to_absolute(base: &Path, path: &str) -> Result<PathBuf, String> {
    match path {
        "" => Err("must not be an empty path".to_owned()),
        path if path.contains('\0') => Err("must not contain a NUL character".to_owned()),
        path => std::path::absolute(base.join(path)).map_err(|errno| format!("is not a valid path: {errno}")),
    }
}
