//! Usage errors of the command line. An error shows each value once, escaped and shortened.

use std::error::Error as _;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use units::{QuotedText, escaped, shortened};

/// Last line of an error, identical to the last line in clap's own errors.
const HELP_HINT: &str = "For more information, try '--help'.";

/// Returns the error with each value escaped and shortened.
pub(crate) fn with_printable_values(mut error: clap::Error, command: &clap::Command) -> clap::Error {
    if let Some(message) = rejected_value_message(&error) {
        return clap::Error::raw(error.kind(), format!("{message}\n\n{HELP_HINT}\n")).with_cmd(command);
    }
    for kind in [ContextKind::InvalidArg, ContextKind::InvalidSubcommand, ContextKind::InvalidValue] {
        let Some(ContextValue::String(value)) = error.get(kind) else { continue };
        let printable = to_printable(value);
        if printable != *value {
            error.insert(kind, ContextValue::String(printable));
            error.remove(ContextKind::Suggested); // the suggestion repeats the value
        }
    }
    error
}

/// Returns the message about a value that its parser rejected, or `None` for another error. Removes
/// the value from the start of the parser's error, because the message already contains the value.
/// The parsers of this workspace quote the value, and clap's `range` does not.
fn rejected_value_message(error: &clap::Error) -> Option<String> {
    let (Some(ContextValue::String(argument)), Some(ContextValue::String(value)), ErrorKind::ValueValidation) =
        (error.get(ContextKind::InvalidArg), error.get(ContextKind::InvalidValue), error.kind())
    else {
        return None;
    };
    let reason = error.source()?.to_string();
    let prefixes = [format!("{} is ", QuotedText(value)), format!("{value} is ")];
    let stripped = prefixes.iter().find_map(|prefix| reason.strip_prefix(prefix.as_str()));
    let reason = stripped.unwrap_or(&reason);
    Some(format!("invalid value '{}' for '{argument}': {reason}", to_printable(value)))
}

fn to_printable(value: &str) -> String {
    escaped(&shortened(value))
}
