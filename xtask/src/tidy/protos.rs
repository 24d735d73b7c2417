//! Rule: each message, enum and service in `.proto` files has a comment. Requests, responses and
//! empty messages need no comment, because the comment of their RPC describes them.

use super::{Violation, sources::Sources};

/// Folder of the protocol of Tarn. Proto files of other projects are not checked.
const PROTO_FOLDER: &str = "proto/";

/// Reports each declaration without a comment.
pub fn check_protos_are_documented(sources: &Sources) -> Vec<Violation> {
    let own = sources.with_suffix(".proto").filter(|(path, _)| path.starts_with(PROTO_FOLDER));
    own.flat_map(|(path, text)| undocumented_declarations(path, text)).collect()
}

fn undocumented_declarations(path: &str, text: &str) -> Vec<Violation> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let undocumented_declarations = lines.iter().enumerate().filter_map(|(n, line)| {
        let above = n.checked_sub(1).map_or("", |above| lines[above]);
        let name = declared_name(line)?;
        (!above.starts_with("//") && !is_documented_by_rpc(name, line)).then(|| (n + 1, name.to_owned()))
    });
    let violation = |(line, name)| Violation {
        path: path.to_owned(),
        line,
        message: format!("{name} must have a comment"),
        fix: "add a comment above the declaration, with units and ranges",
    };
    undocumented_declarations.map(violation).collect()
}

fn declared_name(line: &str) -> Option<&str> {
    let after = ["message ", "enum ", "service "].iter().find_map(|kind| line.strip_prefix(kind))?;
    Some(after.split([' ', '{']).next().unwrap_or(after))
}

fn is_documented_by_rpc(name: &str, line: &str) -> bool {
    name.ends_with("Request") || name.ends_with("Response") || line.ends_with("{}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    #[test]
    fn undocumented_message_is_reported() {
        let text = "// A file.\n\n// A host.\nmessage Host {\n}\nenum State {\n}\nmessage GetRequest {\n}\n";
        assert_eq!(
            locations(&check_protos_are_documented(&sources(&[("proto/a.proto", text)]))),
            ["proto/a.proto:6"]
        );
    }
}
