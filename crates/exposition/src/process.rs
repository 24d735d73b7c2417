//! Metrics of this process from /proc, with the names that Prometheus client libraries use. Values
//! that /proc does not provide are omitted.

use std::fs;

use crate::append_metric;

/// Appends the metrics of this process, read from /proc, to a page.
pub fn append_metrics(page: &mut String) {
    let mut gauge = |name: &str, help: &str, value: Option<String>| {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        if let Some(value) = value {
            append_metric(page, name, "", kind, help, &value);
        }
    };
    let stat = fs::read_to_string("/proc/self/stat").ok();
    let stat = stat.as_deref().and_then(ProcessStat::parse);
    let stat_value = |value: fn(&ProcessStat) -> String| stat.as_ref().map(value);
    let help = "User and system CPU time in seconds.";
    gauge("process_cpu_seconds_total", help, stat_value(|stat| ticks_to_seconds(stat.cpu_ticks).to_string()));
    let start =
        stat.as_ref().zip(boot_time_s()).map(|(stat, boot)| boot + ticks_to_seconds(stat.start_ticks));
    let help = "Start time of the process since the Unix epoch in seconds.";
    gauge("process_start_time_seconds", help, start.map(|start| start.to_string()));
    let help = "Resident memory in bytes.";
    gauge("process_resident_memory_bytes", help, stat_value(|stat| stat.resident_bytes.to_string()));
    let help = "Virtual memory in bytes.";
    gauge("process_virtual_memory_bytes", help, stat_value(|stat| stat.virtual_bytes.to_string()));
    gauge("process_threads", "Threads of the process.", stat_value(|stat| stat.threads.to_string()));
    let open = fs::read_dir("/proc/self/fd").ok().map(|fds| fds.count().saturating_sub(1));
    gauge("process_open_fds", "Open file descriptors.", open.map(|fds| fds.to_string()));
    gauge("process_max_fds", "Maximum number of open file descriptors.", max_file_descriptors());
}

/// Fields of /proc/self/stat.
#[derive(Debug, PartialEq, Eq)]
struct ProcessStat {
    cpu_ticks: u64,
    threads: u64,
    start_ticks: u64,
    virtual_bytes: u64,
    resident_bytes: u64,
}

impl ProcessStat {
    /// Parses the fields after the program name, because the name may contain spaces and
    /// parentheses. The first of these fields is `state`, field 3 in proc(5).
    fn parse(text: &str) -> Option<Self> {
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self {
            cpu_ticks: field(14)? + field(15)?,
            threads: field(20)?,
            start_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_bytes: field(24)? * rustix::param::page_size() as u64,
        })
    }
}

fn ticks_to_seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

fn boot_time_s() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.parse().ok()
}

fn max_file_descriptors() -> Option<String> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let soft = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    soft.split_whitespace().next().filter(|soft| *soft != "unlimited").map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_parsed_if_program_name_has_parentheses() {
        let text =
            "7 (a) b (c) S 1 7 7 0 -1 4194560 9 0 0 0 120 30 0 0 20 0 5 0 4242 8192 3 18446744073709551615 1";
        let page = rustix::param::page_size() as u64;
        let stat = ProcessStat {
            cpu_ticks: 150,
            threads: 5,
            start_ticks: 4242,
            virtual_bytes: 8192,
            resident_bytes: 3 * page,
        };
        assert_eq!(ProcessStat::parse(text), Some(stat));
        assert_eq!(ProcessStat::parse("7 (a) S 1"), None);
    }

    #[test]
    fn metrics_of_this_process_are_complete() {
        let mut page = String::new();
        append_metrics(&mut page);
        for name in
            ["cpu_seconds_total", "start_time_seconds", "resident_memory_bytes", "threads", "open_fds"]
        {
            let prefix = format!("process_{name} ");
            let line = page.lines().find_map(|line| line.strip_prefix(&prefix));
            let value: f64 = line.unwrap_or_else(|| panic!("{name} in {page}")).parse().unwrap();
            assert!(value >= 0.0, "{name} {value}");
        }
    }
}
