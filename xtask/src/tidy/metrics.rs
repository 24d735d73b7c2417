//! Rule: docs/metrics.md lists every metric. Values are checked by the tests of the services.

use super::{Violation, sources::Sources};

/// Reference of metrics.
const REFERENCE: &str = "docs/metrics.md";
/// Prefix of all metrics of Tarn.
const PREFIX: &str = "tarn_";
/// Prefix of the common metrics of gRPC servers.
const COMMON: &str = "grpc_server_";
/// Suffixes that the registry adds: unit and counter.
const ENDINGS: &[&str] = &["", "_total", "_seconds", "_bytes", "_bytes_total"];
/// Methods of a registry whose first argument is a name.
const REGISTER_METHODS: &[&str] = &["register", "register_with_unit"];

/// Reports each metric that the reference does not list.
pub fn documented(sources: &Sources) -> Vec<Violation> {
    let reference = sources.texts.get(REFERENCE).map_or("", String::as_str);
    let calls = sources
        .shipped()
        .flat_map(|file| file.calls_with_text(REGISTER_METHODS).into_iter().map(move |at| (file, at)));
    let missing = calls.filter(|(_, (_, name))| !is_listed(reference, name));
    let violation = |(file, (line, name)): (&super::rust::RustFile, (usize, String))| Violation {
        path: file.path.clone(),
        line,
        message: format!("the metric {PREFIX}{name} is not in {REFERENCE}"),
        fix: "describe it there, or remove it",
    };
    missing.map(violation).collect()
}

fn is_listed(reference: &str, name: &str) -> bool {
    ENDINGS.iter().any(|end| {
        let prefix = if name.starts_with(COMMON) { "" } else { PREFIX };
        let full_name = format!("{prefix}{name}{end}");
        // With or without labels.
        reference.contains(&format!("`{full_name}`")) || reference.contains(&format!("`{full_name}{{"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places, sources};

    #[test]
    fn metric_missing_in_reference_is_reported() {
        let code = "//! M.\nfn a() {\n    r.register(\"slices\", h);\n    r.register(\"fences\", h);\n\
                    \x20   r.register_with_unit(\"scrub\", h, u);\n    r.register(\"hidden\", h);\n}\n";
        let reference = "`tarn_slices{emc}`, `tarn_fences_total` and `tarn_scrub_bytes_total`";
        let files = [("pool-manager/src/metrics.rs", code), (REFERENCE, reference)];
        assert_eq!(places(&documented(&sources(&files))), ["pool-manager/src/metrics.rs:6"]);
    }
}
