//! Rule: docs/metrics.md lists every metric. The tests of the services check the values.

use super::{Violation, sources::Sources};

/// Path of the reference of all metrics.
const METRICS_PAGE: &str = "docs/metrics.md";
/// Prefix of the names of Tarn metrics.
const METRIC_PREFIX: &str = "tarn_";
/// Prefix of the standard metrics of gRPC servers, which do not have [`METRIC_PREFIX`].
const GRPC_PREFIX: &str = "grpc_server_";
/// Suffixes that the registry adds to a name for the unit and for counters.
const METRIC_SUFFIXES: &[&str] = &["", "_total", "_seconds", "_seconds_total", "_bytes", "_bytes_total"];
/// Methods of a metrics registry whose first argument is the name of a metric.
const REGISTER_METHODS: &[&str] = &["register", "register_with_unit"];

/// Reports each metric that the reference does not list.
pub fn check_metrics_are_documented(sources: &Sources) -> Vec<Violation> {
    let reference = sources.texts.get(METRICS_PAGE).map_or("", String::as_str);
    let calls = sources
        .non_test_files()
        .flat_map(|file| file.first_string_arguments(REGISTER_METHODS).into_iter().map(move |at| (file, at)));
    let missing = calls.filter(|(_, (_, name))| !is_listed(reference, name));
    let violation = |(file, (line, name)): (&super::rust::RustFile, (usize, String))| Violation {
        path: file.path.clone(),
        line,
        message: format!("metric {METRIC_PREFIX}{name} is not documented in {METRICS_PAGE}"),
        fix: "describe the metric in docs/metrics.md, or remove the metric",
    };
    missing.map(violation).collect()
}

fn is_listed(reference: &str, name: &str) -> bool {
    METRIC_SUFFIXES.iter().any(|end| {
        let prefix = if name.starts_with(GRPC_PREFIX) { "" } else { METRIC_PREFIX };
        let full_name = format!("{prefix}{name}{end}");
        // The reference lists a metric with or without labels.
        reference.contains(&format!("`{full_name}`")) || reference.contains(&format!("`{full_name}{{"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    #[test]
    fn metric_missing_in_reference_is_reported() {
        let code = "//! M.\nfn a() {\n    r.register(\"slices\", h);\n    r.register(\"fences\", h);\n\
                    \x20   r.register_with_unit(\"scrub\", h, u);\n    r.register(\"hidden\", h);\n}\n";
        let reference = "`tarn_slices{emc}`, `tarn_fences_total` and `tarn_scrub_bytes_total`";
        let files = [("pool-manager/src/metrics.rs", code), (METRICS_PAGE, reference)];
        assert_eq!(
            locations(&check_metrics_are_documented(&sources(&files))),
            ["pool-manager/src/metrics.rs:6"]
        );
    }
}
