//! Parser for compound options in Cloud Hypervisor's syntax:
//! `size=2GiB,hugepages=on,host_numa_node=1`. The caller takes each key that it supports from the
//! parser. A remaining key is an error.

use std::{fmt::Display, str::FromStr};

use units::{Bytes, QuotedText, SizeError, shortened};

/// Error in a compound option, with the option, such as `--memory`, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option}: {reason}")]
pub struct OptionError {
    option: &'static str,
    reason: String,
}

/// Parser for one compound option, which is split into `key=value` pairs.
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
            let Some((key, value)) = part.split_once('=') else {
                return Err(error(format!("{} must be key=value", QuotedText(part))));
            };
            if parts.iter().any(|(existing, _)| *existing == key) {
                return Err(error(format!("{} is given twice", shortened(key))));
            }
            parts.push((key, value));
        }
        Ok(Self { option, parts, recognized: Vec::new() })
    }

    /// Returns an error about this option with the given reason.
    pub fn error(&self, reason: impl Display) -> OptionError {
        OptionError { option: self.option, reason: reason.to_string() }
    }

    /// Takes a key from the option and returns the value as text.
    pub fn string_option(&mut self, key: &'static str) -> Option<&'a str> {
        self.recognized.push(key);
        let index = self.parts.iter().position(|(existing, _)| *existing == key)?;
        Some(self.parts.swap_remove(index).1)
    }

    /// Takes a key from the option and returns the parsed value. Returns `None` if the key is
    /// absent.
    ///
    /// # Errors
    /// [`OptionError`] if the value cannot be parsed. `rule` completes the message "… is not".
    pub fn parse_option<T: FromStr>(
        &mut self,
        key: &'static str,
        rule: &str,
    ) -> Result<Option<T>, OptionError> {
        let Some(text) = self.string_option(key) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| self.error(format!("{key}={} is not {rule}", QuotedText(text))))
    }

    /// Takes a key from the option and returns the value as a size in bytes.
    ///
    /// # Errors
    /// [`OptionError`] if the value is not a size such as `2GiB`.
    pub fn size_option(&mut self, key: &'static str) -> Result<Option<Bytes>, OptionError> {
        let Some(text) = self.string_option(key) else { return Ok(None) };
        text.parse().map(Some).map_err(|error: SizeError| self.error(format!("{key}={error}")))
    }

    /// Takes a key from the option and returns whether the value is `on` or `true`.
    ///
    /// # Errors
    /// [`OptionError`] if the value is not `on`, `true`, `off` or `false`.
    pub fn on_off_option(&mut self, key: &'static str) -> Result<Option<bool>, OptionError> {
        match self.string_option(key) {
            None => Ok(None),
            Some("on" | "true") => Ok(Some(true)),
            Some("off" | "false") => Ok(Some(false)),
            Some(other) => Err(self.error(format!("{key}={} is not on or off", QuotedText(other)))),
        }
    }

    /// Checks that the caller has taken all keys of the option.
    ///
    /// # Errors
    /// [`OptionError`] that names the first unknown key.
    pub fn finish(self) -> Result<(), OptionError> {
        match self.parts.first() {
            None => Ok(()),
            Some((key, _)) => {
                let keys = self.recognized.join(", ");
                Err(self.error(format!("unknown key {}: must be one of {keys}", QuotedText(key))))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(text: &str) -> String {
        let read = || {
            let mut parts = OptionParser::new("--memory", text)?;
            parts.size_option("size")?;
            parts.on_off_option("shared")?;
            parts.finish()
        };
        read().unwrap_err().to_string()
    }

    #[test]
    fn keys_are_accepted_in_any_order() {
        let mut parts = OptionParser::new("--memory", "size=2GiB,shared=off").unwrap();
        assert_eq!(parts.on_off_option("shared").unwrap(), Some(false));
        assert_eq!(parts.size_option("size").unwrap(), Some(Bytes::gib(2)));
        assert_eq!(parts.string_option("more"), None);
        parts.finish().unwrap();
    }

    #[test]
    fn option_error_names_option_value_and_rule() {
        assert_eq!(error_of("size"), "--memory: \"size\" must be key=value");
        assert_eq!(error_of("size=2GiB,size=3GiB"), "--memory: size is given twice");
        let error = error_of("size=two");
        assert!(error.starts_with("--memory: size=\"two\" is not a size: must be a whole number"), "{error}");
        assert_eq!(
            error_of("size=99999999TiB"),
            "--memory: size=\"99999999TiB\" is too large: must be less than 16777216TiB"
        );
        assert_eq!(error_of("shared=yes"), "--memory: shared=\"yes\" is not on or off");
        assert_eq!(error_of("sharde=on"), "--memory: unknown key \"sharde\": must be one of size, shared");
    }
}
