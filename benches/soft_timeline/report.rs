//! Table, result lines and numbers of the figure.

use std::{path::PathBuf, time::Duration};

use benches::{
    failure::Failure,
    report::{format_ratio, format_table},
};
use serde_json::{Value, json};

use crate::{
    load::{Counts, KEYS_PER_SECOND},
    run::{Run, Scheme},
    timeline::Refill,
};

/// Environment variable with the folder for the numbers of figures. `cargo xtask bench --figures` sets it, and draws
/// each file that a line `figure PATH` names.
const FIGURES_ENV: &str = "TARN_FIGURES";
const MIB: f64 = (1 << 20) as f64;

/// Results with names and units. Smaller values are better.
fn results(run: &Run) -> [(&'static str, f64, &'static str); 4] {
    let refill = run.timeline.refill();
    let of_refill = |value: fn(Refill) -> f64| refill.map_or(f64::INFINITY, value);
    [
        ("handover", run.handover.as_secs_f64() * 1e3, "ms"),
        ("outage", run.outage.as_secs_f64() * 1e3, "ms"),
        ("refill", of_refill(|refill| refill.time.as_secs_f64()), "s"),
        ("refill_reads", of_refill(|refill| refill.backend_reads as f64), "reads"),
    ]
}

/// Formats the results of all schemes with a latency of the backend: a table, times, and the ratios of each scheme to
/// soft memory.
pub fn format(latency: Duration, runs: &[Run]) -> String {
    let suffix = suffix(latency);
    let mut report = format!(
        "{KEYS_PER_SECOND} keys per second, backend latency {} ms\n{}",
        latency.as_millis(),
        table(runs)
    );
    for run in runs {
        for (result, value, unit) in results(run) {
            let name = run.scheme.name();
            report += &format!("time soft_timeline_{result}{suffix}_{name} {value:.1} {unit}\n");
        }
        if let Some(counters) = run.daemon {
            let (requests, pages) = (counters.requests, counters.reclaimed);
            report += &format!("time soft_timeline_requests{suffix} {requests} requests\n");
            report += &format!("time soft_timeline_reclaimed{suffix} {pages} pages\n");
        }
    }
    let Some(soft) = runs.iter().find(|run| run.scheme == Scheme::Soft).map(results) else { return report };
    for run in runs.iter().filter(|run| run.scheme != Scheme::Soft) {
        for ((result, value, _), (_, ours, _)) in results(run).into_iter().zip(soft) {
            let name = format!("soft_timeline_{result}{suffix}_vs_{}", run.scheme.name());
            report += &(format_ratio(&name, value / ours) + "\n");
        }
    }
    report
}

/// Returns the part of a name that contains the latency.
fn suffix(latency: Duration) -> String {
    if latency.is_zero() { String::new() } else { format!("_{}ms", latency.as_millis()) }
}

fn table(runs: &[Run]) -> String {
    let head = [
        "",
        "memory after ms",
        "no reply ms",
        "unanswered",
        "steady after s",
        "backend reads",
        "steady hits %",
        "errors",
    ];
    let row = |run: &Run| {
        let [handover, outage, refill, reads] = results(run).map(|(_, value, _)| value);
        let unanswered = run.timeline.samples.last().map_or(0, |sample| sample.counts.unanswered);
        vec![
            run.scheme.description().to_owned(),
            format!("{handover:.1}"),
            format!("{outage:.1}"),
            unanswered.to_string(),
            format!("{refill:.1}"),
            format!("{reads}"),
            format!("{:.1}", run.timeline.steady_hit_ratio() * 100.0),
            run.errors.to_string(),
        ]
    };
    format_table(&head, &runs.iter().map(row).collect::<Vec<_>>())
}

/// Writes the numbers of the figure for a latency of the backend, if a folder for figures is set.
///
/// # Errors
/// [`Failure`] if the file cannot be written.
pub fn write_figure(latency: Duration, runs: &[Run]) -> Result<(), Failure> {
    let Some(folder) = std::env::var_os(FIGURES_ENV).map(PathBuf::from) else { return Ok(()) };
    let path = folder.join(format!("soft-timeline{}.json", suffix(latency).replace('_', "-")));
    let title = format!(
        "12 of 20 MiB for a second process; {KEYS_PER_SECOND} keys/s; a miss costs {} ms",
        latency.as_millis()
    );
    let numbers = json!({ "title": title, "panels": panels(runs) });
    std::fs::write(&path, format!("{numbers:#}\n")).map_err(Failure::file_error("write", &path))?;
    println!("figure {}", path.display());
    Ok(())
}

fn panels(runs: &[Run]) -> Value {
    let line = |name: &str, points: Vec<(f64, f64)>| json!({ "name": name, "points": points });
    let rates = |value: &dyn Fn(Counts, f64) -> f64| {
        let lines = runs.iter().map(|run| line(run.scheme.description(), run.timeline.rates(value)));
        lines.collect::<Vec<_>>()
    };
    let mut memory: Vec<Value> = runs
        .iter()
        .map(|run| {
            let points = run.timeline.points(|sample| sample.cache_bytes as f64 / MIB);
            line(run.scheme.description(), points)
        })
        .collect();
    memory.extend(runs.first().map(|run| {
        line("second process, resident", run.timeline.points(|sample| sample.second_bytes as f64 / MIB))
    }));
    json!([
        { "title": "memory (MiB)", "lines": memory },
        {
            "title": "answered keys/s",
            "lines": rates(&|counts, seconds| (counts.hits + counts.misses) as f64 / seconds),
        },
        { "title": "hit ratio (%)", "lines": rates(&|counts, _| counts.hit_ratio() * 100.0) },
    ])
}
