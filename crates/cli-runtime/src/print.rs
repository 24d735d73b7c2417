//! Answers on stdout in the format that was asked for. What they look like is decided in `table.rs` and `view.rs`.

use std::io::{self, Write as _};

use serde::Serialize;

use crate::{
    Failure, Format,
    table::{self, Row},
};

/// A list of things.
pub fn list<T: Row + Serialize>(format: Format, things: &[T]) -> Result<(), Failure> {
    say(format, &things, |all_columns| table::rows(things, all_columns))
}

/// One thing, as a table of one row.
pub fn one<T: Row + Serialize>(format: Format, thing: &T) -> Result<(), Failure> {
    say(format, thing, |all_columns| table::rows(std::slice::from_ref(thing), all_columns))
}

/// Anything: for programs as it is, for people as `text` of whether every column is wanted.
pub fn say<T: Serialize>(
    format: Format,
    thing: &T,
    text: impl FnOnce(bool) -> String,
) -> Result<(), Failure> {
    match format {
        Format::Table => out(&plain(&text(false))),
        Format::Wide => out(&plain(&text(true))),
        Format::Json => out(&(as_json(serde_json::to_string_pretty(thing))? + "\n")),
        Format::Yaml => out(&as_yaml(thing)?),
    }
}

/// One of an endless row of things: a line of `text`, one JSON object a line, or one YAML document.
pub fn next<T: Serialize>(format: Format, thing: &T, text: impl FnOnce() -> String) -> Result<(), Failure> {
    match format {
        Format::Table | Format::Wide => out(&plain(&text())),
        Format::Json => out(&(as_json(serde_json::to_string(thing))? + "\n")),
        Format::Yaml => out(&format!("---\n{}", as_yaml(thing)?)),
    }
}

/// A word on stderr about how the command fares: a line, one JSON object a line, or one YAML document.
pub fn note(format: Format, text: &str) {
    let line = noted(format, text);
    // With stderr gone there is nobody left to tell.
    let _ = writeln!(io::stderr().lock(), "{}", plain(&line));
}

fn noted(format: Format, text: &str) -> String {
    let note = serde_json::json!({ "note": text });
    match format {
        Format::Json => note.to_string(),
        Format::Yaml => serde_norway::to_string(&note)
            .map_or_else(|_| text.to_owned(), |yaml| format!("---\n{}", yaml.trim_end())),
        Format::Table | Format::Wide => format!("note: {text}"),
    }
}

/// Reasons and messages are other people's words: in a terminal they must not become orders to it.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Text as it is. Everything that reaches stdout comes through here, so that a closed pipe is met in one place.
pub fn out(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(Failure::Output)
}

fn as_json(text: Result<String, serde_json::Error>) -> Result<String, Failure> {
    text.map_err(|wrong| Failure::Output(io::Error::other(wrong)))
}

fn as_yaml<T: Serialize>(thing: &T) -> Result<String, Failure> {
    serde_norway::to_string(thing).map_err(|wrong| Failure::Output(io::Error::other(wrong)))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize as _;

    use super::*;

    #[test]
    fn words_of_others_cannot_command_a_terminal() {
        assert_eq!(
            plain("reason: \u{1b}[2Jgone\r\n\u{9b}31m"),
            "reason: \u{fffd}[2Jgone\u{fffd}\n\u{fffd}31m"
        );
    }

    #[test]
    fn several_notes_are_as_many_documents_whatever_they_say() {
        let said = ["two: words", "- more"].map(|text| noted(Format::Yaml, text)).join("\n");
        let documents = serde_norway::Deserializer::from_str(&said);
        let notes: Vec<String> = documents
            .map(|document| serde_norway::Value::deserialize(document).unwrap())
            .map(|note| note["note"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(notes, ["two: words", "- more"]);
    }
}
