//! Parser for compound options in Cloud Hypervisor's syntax:
//! `size=2GiB,hugepages=on,host_numa_node=1`. The meaning of each key is the caller's; a key that
//! the caller does not take is an error.

use std::{fmt::Display, str::FromStr};

use units::Bytes;

/// Error in a compound option: the option's name and the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option}: {reason}")]
pub struct OptionError {
    option: &'static str,
    reason: String,
}

/// One compound option, split into its `key=value` pairs.
#[derive(Debug)]
pub struct OptionParser<'a> {
    option: &'static str,
    parts: Vec<(&'a str, &'a str)>,
    recognized: Vec<&'static str>,
}

impl<'a> OptionParser<'a> {
    /// Splits an option into `key=value` pairs.
    ///
    /// # Errors
    /// [`OptionError`] if a part is not `key=value` or a key is repeated.
    pub fn new(option: &'static str, text: &'a str) -> Result<Self, OptionError> {
        let error = |reason| OptionError { option, reason };
        let mut parts: Vec<(&str, &str)> = Vec::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let Some((name, value)) = part.split_once('=') else {
                return Err(error(format!("{part:?} is not name=value")));
            };
            if parts.iter().any(|(known, _)| *known == name) {
                return Err(error(format!("{name} is given twice")));
            }
            parts.push((name, value));
        }
        Ok(Self { option, parts, recognized: Vec::new() })
    }

    /// Builds an error about this option.
    pub fn error(&self, reason: impl Display) -> OptionError {
        OptionError { option: self.option, reason: reason.to_string() }
    }

    /// Takes the value of a key as text.
    pub fn string(&mut self, name: &'static str) -> Option<&'a str> {
        self.recognized.push(name);
        let index = self.parts.iter().position(|(known, _)| *known == name)?;
        Some(self.parts.swap_remove(index).1)
    }

    /// Takes the value of a key and parses it.
    ///
    /// # Errors
    /// [`OptionError`] if the value does not parse; the message names `rule`.
    pub fn parse<T: FromStr>(&mut self, name: &'static str, rule: &str) -> Result<Option<T>, OptionError> {
        let Some(text) = self.string(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| self.error(format!("{name}={text:?} is not {rule}")))
    }

    /// Takes the value of a key as a size.
    ///
    /// # Errors
    /// [`OptionError`] if the value is not a size.
    pub fn size(&mut self, name: &'static str) -> Result<Option<Bytes>, OptionError> {
        self.parse(name, "a size, such as 512MiB or 2GiB")
    }

    /// Takes the value of a key as `on` or `off`.
    ///
    /// # Errors
    /// [`OptionError`] if the value is neither.
    pub fn on_off(&mut self, name: &'static str) -> Result<Option<bool>, OptionError> {
        match self.string(name) {
            None => Ok(None),
            Some("on" | "true") => Ok(Some(true)),
            Some("off" | "false") => Ok(Some(false)),
            Some(other) => Err(self.error(format!("{name}={other:?} is not on or off"))),
        }
    }

    /// Checks that all keys were taken.
    ///
    /// # Errors
    /// [`OptionError`] naming the first unknown key.
    pub fn finish(self) -> Result<(), OptionError> {
        match self.parts.first() {
            None => Ok(()),
            Some((name, _)) => {
                Err(self
                    .error(format!("unknown key {name:?}: must be one of {}", self.recognized.join(", "))))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(text: &str) -> String {
        let read = || {
            let mut parts = OptionParser::new("memory", text)?;
            parts.size("size")?;
            parts.on_off("shared")?;
            parts.finish()
        };
        read().unwrap_err().to_string()
    }

    #[test]
    fn options_are_taken_by_name() {
        let mut parts = OptionParser::new("memory", "size=2GiB,shared=off").unwrap();
        assert_eq!(parts.on_off("shared").unwrap(), Some(false));
        assert_eq!(parts.size("size").unwrap(), Some(Bytes::gib(2)));
        assert_eq!(parts.string("more"), None);
        parts.finish().unwrap();
    }

    #[test]
    fn option_error_names_option_value_and_rule() {
        assert_eq!(error_of("size"), "memory: \"size\" is not name=value");
        assert_eq!(error_of("size=2GiB,size=3GiB"), "memory: size is given twice");
        assert_eq!(error_of("size=two"), "memory: size=\"two\" is not a size, such as 512MiB or 2GiB");
        assert_eq!(error_of("shared=yes"), "memory: shared=\"yes\" is not on or off");
        assert_eq!(error_of("sharde=on"), "memory: unknown key \"sharde\": must be one of size, shared");
    }
}
