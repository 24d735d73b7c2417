//! Formatting of values in error messages: escaped, and shortened to [`ERROR_VALUE_CHARS_MAX`].

use std::{borrow::Cow, fmt};

use crate::limits::ERROR_VALUE_CHARS_MAX;

/// Value in an error message, formatted in quotation marks. Control characters are escaped, and a
/// long value is shortened.
#[derive(Clone, Copy, Debug)]
pub struct QuotedText<'a>(pub &'a str);

impl fmt::Display for QuotedText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", shortened(self.0))
    }
}

/// Returns a text of at most [`ERROR_VALUE_CHARS_MAX`] characters, followed by `…` if characters
/// are missing.
pub fn shortened(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(ERROR_VALUE_CHARS_MAX) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
    }
}

/// Returns the beginning of a text, at most `bytes` bytes of whole characters.
pub fn truncated(mut text: String, bytes: usize) -> String {
    let end = (0..=bytes.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    text
}

/// Returns the beginning of a text from an untrusted source, at most `bytes` bytes. Control characters
/// and characters that change the direction of text become spaces, so that the text is one line.
pub fn single_line(text: &str, bytes: usize) -> String {
    let is_unsafe = |c: char| {
        c.is_control()
            || matches!(c, '\u{2028}' | '\u{2029}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    truncated(text.chars().map(|c| if is_unsafe(c) { ' ' } else { c }).collect(), bytes)
}

/// Returns a text with escaped control characters, such as `\n` for a line break.
pub fn escaped(text: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_debug().to_string() } else { c.to_string() };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn untrusted_text_is_one_line_without_direction_marks() {
        assert_eq!(single_line("a\nb\u{202e}c\u{1b}[31m\u{85}é", 64), "a b c [31m é");
        assert_eq!(single_line("éé", 3), "é");
    }

    #[test]
    fn truncated_text_consists_of_whole_characters() {
        let lengths = [0, 1, 2, 3, 9].map(|bytes| truncated("äöü".to_owned(), bytes).len());
        assert_eq!(lengths, [0, 0, 2, 2, 6]);
    }

    #[test]
    fn long_value_is_truncated_at_a_character_boundary() {
        let longest = "ä".repeat(ERROR_VALUE_CHARS_MAX);
        assert_eq!(shortened(&longest), longest);
        assert_eq!(shortened(&format!("{longest}ä")), format!("{longest}…"));
        assert_eq!(QuotedText("a\n\"b").to_string(), r#""a\n\"b""#);
        assert_eq!(escaped("a\n'ä\"\u{1b}"), "a\\n'ä\"\\u{1b}");
    }
}
