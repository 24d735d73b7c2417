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
use units::Name;

/// Maximum number of characters of an invalid value in a message.
const SHOWN_CHARS_MAX: usize = 80;

/// Violated rule of the configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Line number, from 1; `None` if the violation concerns the whole file.
    pub line: Option<usize>,
    /// Path of the field, such as `agent.allowed_uids[1]`; empty if the file is not valid TOML.
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

/// Contents of a configuration file, and the violations found so far.
#[derive(Debug)]
pub(super) struct Text<'a> {
    text: &'a str,
    violations: RefCell<Vec<Violation>>,
}

impl<'a> Text<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, violations: RefCell::default() }
    }

    /// Parses the text. Returns `None` after reporting syntax errors.
    pub(super) fn parse(&self) -> Option<DeTable<'a>> {
        let (document, errors) = DeTable::parse_recoverable(self.text);
        for error in &errors {
            let offset = error.span().map(|span| span.start);
            self.report(offset, String::new(), None, format!("invalid TOML: {}", error.message()));
        }
        errors.is_empty().then(|| document.into_inner())
    }

    /// Returns all violations, sorted by line.
    pub(super) fn into_violations(self) -> Vec<Violation> {
        let mut violations = self.violations.into_inner();
        violations.sort_by_key(|violation| violation.line);
        violations
    }

    fn report(&self, offset: Option<usize>, field: String, value: Option<String>, rule: String) {
        let line =
            offset.map(|offset| self.text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1);
        self.violations.borrow_mut().push(Violation { line, field, value, rule });
    }
}

/// TOML table from which the caller takes fields one by one; [`Section::reject_unknown_keys`]
/// reports the others.
#[derive(Debug)]
pub(super) struct Section<'a> {
    text: &'a Text<'a>,
    path: String,
    offset: Option<usize>,
    remaining: BTreeMap<&'a str, (usize, &'a Spanned<DeValue<'a>>)>,
    known: Vec<&'static str>,
}

impl<'a> Section<'a> {
    pub(super) fn root(text: &'a Text<'a>, table: &'a DeTable<'a>) -> Self {
        Self::new(text, String::new(), None, table)
    }

    fn new(text: &'a Text<'a>, path: String, offset: Option<usize>, table: &'a DeTable<'a>) -> Self {
        let entries = table.iter().map(|(key, value)| (key.get_ref().as_ref(), (key.span().start, value)));
        Self { text, path, offset, remaining: entries.collect(), known: Vec::new() }
    }

    fn take(&mut self, key: &'static str) -> Option<Field<'a>> {
        self.known.push(key);
        let (_, value) = self.remaining.remove(key)?;
        Some(Field { text: self.text, path: self.field(key), value })
    }

    fn field(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// Returns whether the file contains a field that the caller has not taken yet.
    pub(super) fn has(&self, key: &str) -> bool {
        self.remaining.contains_key(key)
    }

    /// Takes a required field. Returns `None` after reporting that it is missing or invalid.
    pub(super) fn required<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&Field<'a>) -> Result<T, String>,
    ) -> Option<T> {
        let Some(field) = self.take(key) else {
            self.text.report(self.offset, self.field(key), None, "is missing".to_owned());
            return None;
        };
        field.read(read)
    }

    /// Takes an optional field. Returns `None` after reporting an invalid value, and `Some(None)`
    /// if the field is missing.
    pub(super) fn optional<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&Field<'a>) -> Result<T, String>,
    ) -> Option<Option<T>> {
        self.take(key).map_or(Some(None), |field| field.read(read).map(Some))
    }

    /// Takes an optional list, which must not be empty. Returns `None` after reporting a violation,
    /// and `Some(None)` if the field is missing.
    pub(super) fn list<T>(
        &mut self,
        key: &'static str,
        mut read: impl FnMut(&Field<'a>) -> Result<T, String>,
    ) -> Option<Option<Vec<T>>> {
        let Some(items) = self.optional(key, Field::items)? else { return Some(None) };
        let items: Vec<Option<T>> = items.iter().map(|item| item.read(&mut read)).collect();
        items.into_iter().collect::<Option<Vec<T>>>().map(Some)
    }

    /// Takes an optional table. Returns `None` if it is missing, or after reporting a violation.
    pub(super) fn section(&mut self, key: &'static str) -> Option<Section<'a>> {
        self.optional(key, Field::section).flatten()
    }

    /// Reads all remaining fields, whose keys are names that the file defines. Returns `None` after
    /// reporting a violation.
    pub(super) fn named<T>(self, read: impl Fn(&Field<'a>) -> Option<T>) -> Option<BTreeMap<Name, T>> {
        let entry = |(key, (_, value)): (&&'a str, &(usize, &'a Spanned<DeValue<'a>>))| {
            let field = Field { text: self.text, path: self.field(key), value };
            let name = field.read(|_| Name::new(key).map_err(|error| error.to_string()));
            let settings = read(&field);
            Some((name?, settings?))
        };
        let entries: Vec<_> = self.remaining.iter().map(entry).collect();
        entries.into_iter().collect()
    }

    /// Reports that field `key` violates `rule`, and returns `None`, unless `holds` is true.
    pub(super) fn check(&self, holds: bool, key: &'static str, rule: &str) -> Option<()> {
        if !holds {
            self.text.report(self.offset, self.field(key), None, rule.to_owned());
        }
        holds.then_some(())
    }

    /// Reports all fields that were not taken as unknown.
    pub(super) fn reject_unknown_keys(self) {
        let rule = format!("unknown key; must be one of {}", self.known.join(", "));
        for (key, (offset, _)) in &self.remaining {
            self.text.report(Some(*offset), self.field(key), None, rule.clone());
        }
    }
}

/// Value of a field, with its path and its position in the file.
#[derive(Debug)]
pub(super) struct Field<'a> {
    text: &'a Text<'a>,
    path: String,
    value: &'a Spanned<DeValue<'a>>,
}

impl<'a> Field<'a> {
    /// Reads the value. Returns `None` after reporting the rule that it violates.
    pub(super) fn read<T>(&self, read: impl FnOnce(&Field<'a>) -> Result<T, String>) -> Option<T> {
        read(self).map_err(|rule| self.report(rule)).ok()
    }

    fn report(&self, rule: String) {
        let span = self.value.span();
        let shown = self.text.text[span.clone()].lines().next().unwrap_or_default();
        let shown = shown.chars().take(SHOWN_CHARS_MAX).collect();
        self.text.report(Some(span.start), self.path.clone(), Some(shown), rule);
    }

    pub(super) fn section(&self) -> Result<Section<'a>, String> {
        let table = self.value.get_ref().as_table().ok_or("must be a table")?;
        Ok(Section::new(self.text, self.path.clone(), Some(self.value.span().start), table))
    }

    /// Parses a table whose keys are names; see [`Section::named`]. At most `max` are allowed.
    pub(super) fn names(&self, max: usize) -> Result<Section<'a>, String> {
        let section = self.section()?;
        let count = section.remaining.len();
        if count <= max { Ok(section) } else { Err(format!("has {count} names: must have at most {max}")) }
    }

    fn items(&self) -> Result<Vec<Field<'a>>, String> {
        let items = self.value.get_ref().as_array().ok_or("must be a list")?;
        if items.is_empty() {
            return Err("must not be empty".to_owned());
        }
        let item = |(i, value)| Field { text: self.text, path: format!("{}[{i}]", self.path), value };
        Ok(items.iter().enumerate().map(item).collect())
    }

    pub(super) fn str(&self) -> Result<&'a str, String> {
        self.value.get_ref().as_str().ok_or_else(|| "must be a string in quotes".to_owned())
    }

    pub(super) fn name(&self) -> Result<Name, String> {
        Name::new(self.str()?).map_err(|error| error.to_string())
    }

    /// Parses a path. A relative path is resolved against `base`, which is absolute.
    pub(super) fn path(&self, base: &Path) -> Result<PathBuf, String> {
        match self.str()? {
            "" => Err("must not be an empty path".to_owned()),
            path => Ok(base.join(path)),
        }
    }

    pub(super) fn integer<T>(&self, range: RangeInclusive<T>) -> Result<T, String>
    where
        T: Copy + Display + PartialOrd + TryFrom<u64>,
    {
        let integer = self.value.get_ref().as_integer();
        let number = integer.and_then(|n| u64::from_str_radix(n.as_str(), n.radix()).ok());
        let number = number.and_then(|n| T::try_from(n).ok()).filter(|n| range.contains(n));
        number.ok_or_else(|| format!("must be a whole number from {} to {}", range.start(), range.end()))
    }

    pub(super) fn number(&self) -> Result<f64, String> {
        let value = self.value.get_ref();
        let digits = value.as_float().map(|n| n.as_str()).or(value.as_integer().map(|n| n.as_str()));
        digits.and_then(|digits| digits.parse().ok()).ok_or_else(|| "must be a number".to_owned())
    }
}
