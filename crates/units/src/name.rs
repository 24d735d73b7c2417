//! Names of hosts, EMCs, VMs and clients, and request IDs for idempotent requests.

use std::{borrow::Borrow, fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{
    QuotedText,
    limits::{ERROR_VALUE_CHARS_MAX, NAME_BYTES_MAX, REQUEST_ID_BYTES_MAX},
};

/// Error for text that is not a valid name. The message contains the text, shortened, and the rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} is not a name: must be 1 to {max} of A-Z a-z 0-9 . _ : - and not begin with a dot or dash",
    QuotedText(value)
)]
pub struct NameError {
    value: String,
    max: usize,
}

fn check_name(text: &str, max: usize) -> Result<Arc<str>, NameError> {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b':' | b'-');
    let starts_valid = !matches!(text.as_bytes().first(), None | Some(b'.' | b'-'));
    if starts_valid && text.len() <= max && text.bytes().all(allowed) {
        Ok(Arc::from(text))
    } else {
        Err(NameError { value: text.chars().take(ERROR_VALUE_CHARS_MAX + 1).collect(), max })
    }
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $max:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
        #[serde(try_from = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Creates a name after checking its length and characters.
            ///
            /// # Errors
            /// [`NameError`] if the text is empty, too long, or contains other characters.
            pub fn new(text: &str) -> Result<Self, NameError> {
                check_name(text, $max).map(Self)
            }

            /// Returns the name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(&self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl std::str::FromStr for $name {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                Self::new(text)
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;

            fn try_from(text: String) -> Result<Self, NameError> {
                Self::new(&text)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0.as_ref().to_owned()
            }
        }
    };
}

name_type!(
    /// Name of a host, an EMC, a VM or a client. Every valid name is also a safe file name.
    Name, NAME_BYTES_MAX
);
name_type!(
    /// Request ID chosen by a client. A repeated request with the same ID returns the first result.
    RequestId, REQUEST_ID_BYTES_MAX
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_names_are_rejected_with_the_rule() {
        assert_eq!(Name::new("vm-1.a:b_c").unwrap().as_str(), "vm-1.a:b_c");
        for invalid_text in ["", ".", "..", "a/b", "-x", "a b", "ä", &"x".repeat(NAME_BYTES_MAX + 1)] {
            let error = Name::new(invalid_text).unwrap_err().to_string();
            assert!(error.contains("must be 1 to"), "{error}");
        }
    }

    #[test]
    fn long_text_is_shortened_in_the_error() {
        let error = RequestId::new(&"x".repeat(3000)).unwrap_err().to_string();
        assert!(error.starts_with(r#""xxx"#) && error.contains("xxx…\" is not a name"), "{error}");
        assert!(error.len() < 400, "{error}");
    }
}
