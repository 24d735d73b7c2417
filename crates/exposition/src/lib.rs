//! Metrics page and log of a service. The page has the Prometheus text format 0.0.4 and includes
//! metrics of the process and the build. Each service defines its own metrics and log messages.
#![forbid(unsafe_code)]

pub mod logs;
mod process;

use std::fmt;

use prometheus_client::{encoding::text::encode, registry::Registry};

/// HTTP content type of a metrics [`page`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Formats the metrics page of a program from its registries, with process and build metrics.
///
/// # Errors
/// [`fmt::Error`] if a metric cannot be formatted.
pub fn page(registries: &[&Registry], program: &str, version: &str) -> Result<String, fmt::Error> {
    let mut page = String::new();
    for registry in registries {
        let mut text = String::new();
        encode(&mut text, registry)?;
        to_text_format(&text, &mut page);
    }
    let help = "Version of the running program, always 1.";
    let labels = format!("{{program=\"{program}\",version=\"{version}\"}}");
    append_metric(&mut page, "tarn_build_info", &labels, "gauge", help, "1");
    process::append_metrics(&mut page);
    Ok(page)
}

/// Appends a metric family with a single sample to a page.
fn append_metric(page: &mut String, name: &str, labels: &str, kind: &str, help: &str, value: &str) {
    let lines = format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{labels} {value}\n");
    page.push_str(&lines);
}

/// Converts OpenMetrics text to the Prometheus text format 0.0.4. In this format, the HELP and TYPE
/// lines of a counter contain the name of the sample, including `_total`.
fn to_text_format(open_metrics: &str, page: &mut String) {
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            help = described.split_once(' ');
        } else if let Some(typed) = line.strip_prefix("# TYPE ") {
            let (family, kind) = typed.split_once(' ').unwrap_or((typed, "unknown"));
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                other => ("", other),
            };
            if let Some((_, text)) = help.take() {
                page.push_str(&format!("# HELP {family}{suffix} {text}\n"));
            }
            page.push_str(&format!("# TYPE {family}{suffix} {kind}\n"));
        } else if !line.starts_with('#') {
            page.push_str(line);
            page.push('\n');
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::{
        metrics::{counter::Counter, gauge::Gauge, histogram::Histogram},
        registry::Unit,
    };

    use super::*;

    fn example_page() -> String {
        let mut registry = Registry::with_prefix("tarn");
        registry.register("lease_expired", "Leases that expired", Counter::<u64>::default());
        registry.register_with_unit("scrub", "Zeroed", Unit::Bytes, Counter::<u64>::default());
        registry.register("emc_up", "1 if the EMC works", Gauge::<i64>::default());
        registry.register_with_unit("plan", "Time of a plan", Unit::Seconds, Histogram::new([0.5]));
        page(&[&registry], "pool-manager", "1.2.3").unwrap()
    }

    /// Checks that each sample follows the HELP and TYPE lines of its own metric.
    #[test]
    fn samples_follow_metadata_with_their_name() {
        let page = example_page();
        let (mut described, mut typed) = ("", ("", ""));
        for line in page.lines() {
            if let Some(text) = line.strip_prefix("# HELP ") {
                described = text.split_once(' ').expect("a text").0;
            } else if let Some(text) = line.strip_prefix("# TYPE ") {
                typed = text.split_once(' ').expect("a type");
                assert_eq!(described, typed.0, "{line}");
            } else {
                assert!(!line.starts_with('#'), "{line}");
                let (name, kind) = typed;
                let sample = line.split(['{', ' ']).next().unwrap();
                let suffix = sample.strip_prefix(name).unwrap_or_else(|| panic!("{line} in {name}"));
                let parts = if kind == "histogram" { &["_bucket", "_sum", "_count"][..] } else { &[""][..] };
                assert!(parts.contains(&suffix), "{line} in {name} of type {kind}");
                assert_eq!(kind == "counter", sample.ends_with("_total"), "{line} of type {kind}");
            }
        }
    }

    #[test]
    fn page_contains_service_build_and_process_metrics() {
        let page = example_page();
        for text in [
            "# HELP tarn_lease_expired_total Leases that expired.\n# TYPE tarn_lease_expired_total counter\n",
            "# TYPE tarn_scrub_bytes_total counter\ntarn_scrub_bytes_total 0\n",
            "tarn_build_info{program=\"pool-manager\",version=\"1.2.3\"} 1\n",
            "# TYPE process_cpu_seconds_total counter\n",
            "# TYPE process_resident_memory_bytes gauge\n",
        ] {
            assert!(page.contains(text), "{text} in {page}");
        }
        assert!(!page.contains("EOF") && !page.contains("UNIT"), "{page}");
    }
}
