//! Output on stdout and stderr in the requested format. `table.rs` formats tables.

use std::io::{self, Write as _};

use serde::Serialize;

use crate::{
    Failure, Format,
    table::{self, Row},
};

/// Prints a list of items, one row or one array element per item.
pub fn list<T: Row + Serialize>(format: Format, items: &[T]) -> Result<(), Failure> {
    value(format, &items, |all_columns| table::rows(items, all_columns))
}

/// Prints one item, as a table of one row.
pub fn one<T: Row + Serialize>(format: Format, item: &T) -> Result<(), Failure> {
    value(format, item, |all_columns| table::rows(std::slice::from_ref(item), all_columns))
}

/// Prints a value as JSON, as YAML, or as the text returned by `text`. The argument of `text` is
/// true for the format `wide`, which shows all columns.
pub fn value<T: Serialize>(
    format: Format,
    item: &T,
    text: impl FnOnce(bool) -> String,
) -> Result<(), Failure> {
    match format {
        Format::Table | Format::Csv => out(&sanitize(&text(false))),
        Format::Wide => out(&sanitize(&text(true))),
        Format::Json => out(&(as_json(serde_json::to_string_pretty(item))? + "\n")),
        Format::Yaml => out(&as_yaml(item)?),
    }
}

/// Prints one item of a stream as text, as one line of JSON or as one YAML document.
pub fn print_stream_item<T: Serialize>(
    format: Format,
    item: &T,
    text: impl FnOnce() -> String,
) -> Result<(), Failure> {
    match format {
        Format::Table | Format::Wide | Format::Csv => out(&sanitize(&text())),
        Format::Json => out(&(as_json(serde_json::to_string(item))? + "\n")),
        Format::Yaml => out(&format!("---\n{}", as_yaml(item)?)),
    }
}

/// Prints a note on stderr, as a line of text, as one line of JSON or as one YAML document.
pub fn note(format: Format, text: &str) {
    let line = format_note(format, text);
    // A closed stderr is ignored, because a note is not essential.
    let _ = writeln!(io::stderr().lock(), "{}", sanitize(&line));
}

fn format_note(format: Format, text: &str) -> String {
    let note = serde_json::json!({ "note": text });
    match format {
        Format::Json => note.to_string(),
        Format::Yaml => serde_norway::to_string(&note)
            .map_or_else(|_| text.to_owned(), |yaml| format!("---\n{}", yaml.trim_end())),
        Format::Table | Format::Wide | Format::Csv => format!("note: {text}"),
    }
}

/// Replaces control characters except line breaks, so that text from other hosts cannot send escape
/// sequences to the terminal.
pub fn sanitize(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Writes text to stdout. All output on stdout uses this function, so that a closed pipe always
/// causes [`Failure::Output`].
pub fn out(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(Failure::Output)
}

fn as_json(text: Result<String, serde_json::Error>) -> Result<String, Failure> {
    text.map_err(|error| Failure::Output(io::Error::other(error)))
}

fn as_yaml<T: Serialize>(item: &T) -> Result<String, Failure> {
    serde_norway::to_string(item).map_err(|error| Failure::Output(io::Error::other(error)))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize as _;

    use super::*;

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(
            sanitize("reason: \u{1b}[2Jgone\r\n\u{9b}31m"),
            "reason: \u{fffd}[2Jgone\u{fffd}\n\u{fffd}31m"
        );
    }

    #[test]
    fn yaml_notes_are_separate_documents() {
        let output = ["two: words", "- more"].map(|text| format_note(Format::Yaml, text)).join("\n");
        let documents = serde_norway::Deserializer::from_str(&output);
        let notes: Vec<String> = documents
            .map(|document| serde_norway::Value::deserialize(document).unwrap())
            .map(|note| note["note"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(notes, ["two: words", "- more"]);
    }
}
