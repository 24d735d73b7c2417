//! Rule: each message, enum and service in `.proto` files has a comment. Requests, responses and
//! empty messages are explained by their call.

use super::{Complaint, sources::Sources};

/// Where our own words on the wire are; other projects explain theirs themselves.
const OWN: &str = "proto/";

/// Complains about each one without.
pub fn explained(sources: &Sources) -> Vec<Complaint> {
    let own = sources.ending(".proto").filter(|(path, _)| path.starts_with(OWN));
    own.flat_map(|(path, text)| bare(path, text)).collect()
}

fn bare(path: &str, text: &str) -> Vec<Complaint> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let bare = lines.iter().enumerate().filter_map(|(n, line)| {
        let above = n.checked_sub(1).map_or("", |above| lines[above]);
        let name = declared(line)?;
        (!above.starts_with("//") && !explained_by_its_call(name, line)).then(|| (n + 1, name.to_owned()))
    });
    let complaint = |(line, name)| Complaint {
        path: path.to_owned(),
        line,
        what: format!("{name} is not explained"),
        mend: "say above it what it is, with units and ranges",
    };
    bare.map(complaint).collect()
}

fn declared(line: &str) -> Option<&str> {
    let after = ["message ", "enum ", "service "].iter().find_map(|kind| line.strip_prefix(kind))?;
    Some(after.split([' ', '{']).next().unwrap_or(after))
}

fn explained_by_its_call(name: &str, line: &str) -> bool {
    name.ends_with("Request") || name.ends_with("Response") || line.ends_with("{}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    #[test]
    fn a_message_without_a_comment_is_found() {
        let text = "// A file.\n\n// A host.\nmessage Host {\n}\nenum State {\n}\nmessage GetRequest {\n}\n";
        assert_eq!(places(&explained(&sources(&[("proto/a.proto", text)]))), ["proto/a.proto:6"]);
    }
}
