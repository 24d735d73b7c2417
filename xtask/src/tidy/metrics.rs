//! Rule: an operator finds each metric in the README. Whether its value is right is for the tests of the service.

use super::{Complaint, sources::Sources};

/// Where an operator looks.
const README: &str = "README.md";
/// What every metric of ours begins with.
const PREFIX: &str = "tarn_";
/// What the usual metrics of gRPC servers begin with, in any project.
const COMMON: &str = "grpc_server_";
/// What a name may get on its way out: its unit, and that it counts.
const ENDINGS: &[&str] = &["", "_total", "_seconds", "_bytes", "_bytes_total"];
/// Methods of a registry whose first argument is a name.
const REGISTER: &[&str] = &["register", "register_with_unit"];

/// Complains about each metric whose name the README does not mention.
pub fn documented(sources: &Sources) -> Vec<Complaint> {
    let readme = sources.texts.get(README).map_or("", String::as_str);
    let calls = sources
        .shipped()
        .flat_map(|file| file.calls_with_text(REGISTER).into_iter().map(move |at| (file, at)));
    let untold = calls.filter(|(_, (_, name))| !tells(readme, name));
    let complaint = |(file, (line, name)): (&super::rust::RustFile, (usize, String))| Complaint {
        path: file.path.clone(),
        line,
        what: format!("the metric {PREFIX}{name} is not in the README"),
        mend: "say there what it counts, or remove it",
    };
    untold.map(complaint).collect()
}

fn tells(readme: &str, name: &str) -> bool {
    ENDINGS.iter().any(|end| {
        let prefix = if name.starts_with(COMMON) { "" } else { PREFIX };
        let whole = format!("{prefix}{name}{end}");
        // With or without labels.
        readme.contains(&format!("`{whole}`")) || readme.contains(&format!("`{whole}{{"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    #[test]
    fn a_metric_nobody_is_told_of_is_found() {
        let code = "//! M.\nfn a() {\n    r.register(\"slices\", h);\n    r.register(\"fences\", h);\n\
                    \x20   r.register_with_unit(\"scrub\", h, u);\n    r.register(\"hidden\", h);\n}\n";
        let readme = "`tarn_slices{emc}`, `tarn_fences_total` and `tarn_scrub_bytes_total`";
        let files = [("pool-manager/src/metrics.rs", code), (README, readme)];
        assert_eq!(places(&documented(&sources(&files))), ["pool-manager/src/metrics.rs:6"]);
    }
}
