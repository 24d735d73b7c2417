//! Figures of simulated evictions, as in figures 8 to 14 of Glitter.

use std::path::Path;

use cli_runtime::Failure;
use sim::eviction::{ClusterReport, EvictionScheme};

use super::study::{ClusterRow, FLOW_RATIO, Study};
use crate::figure::{self, Figure, Panel, Point, Scale, Series, SeriesStyle};

/// Draws all figures and writes them into a directory, with their numbers.
///
/// # Errors
/// [`Failure::File`] if a file cannot be written.
pub(super) fn write_all(folder: &Path, study: &Study) -> Result<(), Failure> {
    let workloads: Vec<&str> =
        study.parameters.workloads.iter().map(|workload| workload.name.as_str()).collect();
    let per_workload =
        |draw: &dyn Fn(&str) -> Panel| workloads.iter().map(|name| draw(name)).collect::<Vec<_>>();
    let write = |name: &str, panels: Vec<Panel>| {
        let numbers: Vec<_> = panels.iter().map(PanelNumbers::of).collect();
        figure::write_json(&folder.join(format!("{name}.json")), &numbers)?;
        figure::write(&folder.join(format!("{name}.svg")), &Figure(panels))
    };
    write("eviction-8-time", per_workload(&|workload| cluster_times(study, workload)))?;
    write("eviction-9-parts", vec![parts(study, &workloads)])?;
    write("eviction-10-one-task", per_workload(&|workload| one_task(study, workload, Value::Time)))?;
    write("eviction-11-urgent", per_workload(&|workload| one_task(study, workload, Value::Urgent)))?;
    write("eviction-12-flow-times", vec![flow_times(study, &workloads)])?;
    write("eviction-13-growth", vec![growth(study)])?;
    write("eviction-14-bandwidth", vec![bandwidth(study)])
}

/// Value of one task that a figure shows.
#[derive(Clone, Copy)]
enum Value {
    Time,
    Urgent,
}

/// Numbers of a panel.
#[derive(serde::Serialize)]
struct PanelNumbers<'a> {
    title: &'a str,
    x: &'static str,
    y: &'static str,
    series: Vec<(&'a str, Vec<(f64, f64)>)>,
}

impl<'a> PanelNumbers<'a> {
    fn of(panel: &'a Panel) -> Self {
        let points = |series: &Series| series.points.iter().map(|point| (point.x, point.y)).collect();
        let series = panel.series.iter().map(|series| (series.name.as_str(), points(series))).collect();
        Self { title: &panel.title, x: panel.x_title, y: panel.y_title, series }
    }
}

fn line(index: usize, name: &str, points: impl Iterator<Item = (f64, f64)>) -> Series {
    let points = points.map(|(x, y)| Point::new(x, y)).collect();
    Series { name: name.to_owned(), style: SeriesStyle::Line(index), points }
}

/// Creates a bar per workload with a value.
fn bars(index: usize, name: &str, workloads: &[&str], value: impl Fn(&str) -> Option<f64>) -> Series {
    let points = (0_u32..).zip(workloads);
    let points = points.filter_map(|(x, workload)| Some(Point::new(x.into(), value(workload)?)));
    Series { name: name.to_owned(), style: SeriesStyle::Bar(index), points: points.collect() }
}

fn panel(
    title: String,
    x_title: &'static str,
    y_title: &'static str,
    x: Scale,
    series: Vec<Series>,
) -> Panel {
    Panel { title, x_title, y_title, x, y: Scale::Number, x_max: f64::INFINITY, series }
}

fn cluster_rows<'a>(study: &'a Study, workload: &'a str) -> impl Iterator<Item = &'a ClusterRow> {
    study.cluster.iter().filter(move |row| row.workload == workload)
}

/// Returns the result of a workload at 40 % local memory.
fn report_at_40(study: &Study, workload: &str, scheme: EvictionScheme) -> Option<ClusterReport> {
    let mut rows = cluster_rows(study, workload);
    rows.find(|row| row.local_ratio == FLOW_RATIO && row.scheme == scheme).map(|row| row.report)
}

fn cluster_times(study: &Study, workload: &str) -> Panel {
    let series = EvictionScheme::ALL.iter().enumerate().map(|(index, scheme)| {
        let rows = cluster_rows(study, workload).filter(|row| row.scheme == *scheme);
        line(index, scheme.name(), rows.map(|row| (row.local_ratio, row.report.normalized_time)))
    });
    panel(
        workload.to_owned(),
        "Local memory",
        "Time / time without waiting",
        Scale::Percent,
        series.collect(),
    )
}

/// Gain of throughput with each scheme at 40 % local memory.
fn parts(study: &Study, workloads: &[&str]) -> Panel {
    let time = |workload: &str, scheme| Some(report_at_40(study, workload, scheme)?.normalized_time);
    let gain =
        |workload: &str, scheme| Some(time(workload, EvictionScheme::Fixed)? / time(workload, scheme)?);
    let schemes = EvictionScheme::ALL.iter().skip(1).enumerate();
    let series = schemes
        .map(|(index, scheme)| bars(index, scheme.name(), workloads, |workload| gain(workload, *scheme)));
    let title = "Throughput at 40 % local memory".to_owned();
    panel(title, "Workload", "Throughput / fixed", names(workloads), series.collect())
}

fn names(names: &[&str]) -> Scale {
    Scale::Names(names.iter().map(|name| (*name).to_owned()).collect())
}

fn one_task(study: &Study, workload: &str, value: Value) -> Panel {
    let rows = || study.one_task.iter().filter(|row| row.workload == workload);
    let of = |report: &sim::eviction::TaskReport| match value {
        Value::Time => report.normalized_time,
        Value::Urgent => report.urgent_gb,
    };
    let series = vec![
        line(0, "fixed", rows().map(|row| (row.local_ratio, of(&row.fixed)))),
        line(1, "thresholds", rows().map(|row| (row.local_ratio, of(&row.adaptive)))),
    ];
    let y_title = match value {
        Value::Time => "Time / time without waiting",
        Value::Urgent => "Evicted while blocked (GB)",
    };
    panel(format!("{workload}, one task"), "Local memory", y_title, Scale::Percent, series)
}

fn flow_times(study: &Study, workloads: &[&str]) -> Panel {
    let groups = [
        ("fixed, mean", EvictionScheme::Fixed, false),
        ("classes, mean", EvictionScheme::Classes, false),
        ("fixed, 99th percentile", EvictionScheme::Fixed, true),
        ("classes, 99th percentile", EvictionScheme::Classes, true),
    ];
    let series = groups.into_iter().enumerate().map(|(index, (name, scheme, is_p99))| {
        bars(index, name, workloads, |workload| {
            let report = report_at_40(study, workload, scheme)?;
            let seconds = if is_p99 { report.urgent_p99_s } else { report.urgent_mean_s };
            Some(seconds? * 1e3)
        })
    });
    let title = "Urgent eviction flows at 40 % local memory".to_owned();
    panel(title, "Workload", "Completion time (ms)", names(workloads), series.collect())
}

fn growth(study: &Study) -> Panel {
    let series = vec![
        line(0, "fixed", study.growth.iter().map(|row| (row.growth_mb_per_s, row.fixed.normalized_time))),
        line(
            1,
            "thresholds",
            study.growth.iter().map(|row| (row.growth_mb_per_s, row.adaptive.normalized_time)),
        ),
    ];
    let title = "One task with 16 GB at 40 % local memory".to_owned();
    panel(title, "Growth of the memory (MB/s)", "Time / time without waiting", Scale::Number, series)
}

fn bandwidth(study: &Study) -> Panel {
    let series = vec![
        line(0, "fixed", study.bandwidth.iter().map(|row| (row.bandwidth_ratio, row.fixed.normalized_time))),
        line(
            1,
            "classes",
            study.bandwidth.iter().map(|row| (row.bandwidth_ratio, row.classes.normalized_time)),
        ),
    ];
    let title = "First workload at 20 % local memory".to_owned();
    panel(title, "Part of the bandwidth", "Time / time without waiting", Scale::Percent, series)
}
