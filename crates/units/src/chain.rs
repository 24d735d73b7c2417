//! Formatting of an error and its causes as one line.

use std::error::Error;

/// Returns an error and all its causes, separated by colons: "store: open /x: Permission denied".
/// Omits a cause with which the message of its error already ends.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.ends_with(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("open the store")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn chain_joins_an_error_with_its_causes() {
        assert_eq!(chain(&Outer(std::io::Error::other("no such disk"))), "open the store: no such disk");
    }

    #[test]
    fn cause_in_the_message_of_its_error_is_not_repeated() {
        assert_eq!(chain(&Outer(std::io::Error::other("the store"))), "open the store");
    }
}
