//! Figures of `cargo xtask rack tiering`: local memory of each tenant and page migrations over time, as
//! SVG. The numbers are written beside them, as JSON.

use std::path::Path;

use super::{Mode, Run, Sample};
use crate::{
    failure::Failure,
    line_figure::{self, Line, Panel},
};

/// Writes the figure of a run and its numbers to a directory.
///
/// # Errors
/// Returns an error if the figure cannot be drawn or a file cannot be written.
pub(super) fn write(folder: &Path, run: &Run) -> Result<(), Failure> {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let name: String = format!("{} {}", mode_name(run.mode), run.scenario).chars().map(plain).collect();
    let path = |extension: &str| folder.join(format!("live-{name}.{extension}"));
    let title = format!("{}: {}", mode_name(run.mode), run.scenario);
    line_figure::write(&path("svg"), &title, &panels(run))?;
    let numbers = serde_json::to_string_pretty(run).expect("numbers and names can be serialized");
    std::fs::write(path("json"), numbers).map_err(Failure::file_error("write", path("json")))
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::NoControl => "no control",
        Mode::Kernel => "kernel",
        Mode::Equilibria => "equilibria",
    }
}

fn panels(run: &Run) -> [Panel; 2] {
    let tenant = |(at, name): (usize, &String)| Line {
        name: name.clone(),
        points: run.timeline.iter().map(|sample| (sample.second, sample.local_mib[at])).collect(),
        expected: Some(run.expected_mib[at]),
    };
    let rate = |of: fn(&Sample) -> u64| {
        let pair = |pair: &[Sample]| {
            let seconds = (pair[1].second - pair[0].second).max(f64::EPSILON);
            (pair[1].second, of(&pair[1]).saturating_sub(of(&pair[0])) as f64 / seconds)
        };
        run.timeline.windows(2).map(pair).collect()
    };
    let pages = Line { name: "all".to_owned(), points: rate(|sample| sample.migrated_pages), expected: None };
    let demoted =
        Line { name: "demoted".to_owned(), points: rate(|sample| sample.demoted_pages), expected: None };
    [
        Panel {
            title: "local memory (MiB), dashed: expected".to_owned(),
            lines: run.tenants.iter().enumerate().map(tenant).collect(),
        },
        Panel { title: "migrated pages/s".to_owned(), lines: vec![pages, demoted] },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figure_contains_a_line_per_tenant_and_the_numbers_are_beside_it() {
        let sample = |second: f64, a: f64, migrated_pages: u64| Sample {
            second,
            local_mib: vec![a, 40.0],
            migrated_pages,
            demoted_pages: migrated_pages / 2,
            promoted_pages: 0,
        };
        let run = Run {
            mode: Mode::Equilibria,
            scenario: "120/40 bound 80".to_owned(),
            tenants: vec!["b".to_owned(), "a".to_owned()],
            expected_mib: vec![80.0, 40.0],
            local_mib: vec![80.0, 40.0],
            bound_excess_mib: vec![Some(40.0), None],
            converged_s: Some(4.0),
            migrated_pages_per_s: 0.0,
            has_kernel_promotions: false,
            timeline: vec![sample(0.0, 120.0, 100), sample(2.0, 90.0, 300), sample(4.0, 80.0, 300)],
        };
        let [local, pages] = panels(&run);
        assert_eq!(local.lines[0].points, [(0.0, 120.0), (2.0, 90.0), (4.0, 80.0)]);
        assert_eq!((&*local.lines[1].name, local.lines[1].expected), ("a", Some(40.0)));
        assert_eq!(pages.lines[0].points, [(2.0, 100.0), (4.0, 0.0)]);
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &run).unwrap();
        let text = |extension: &str| {
            std::fs::read_to_string(
                folder.path().join(format!("live-equilibria-120-40-bound-80.{extension}")),
            )
            .unwrap()
        };
        let svg = text("svg");
        assert!(
            svg.contains("equilibria: 120/40 bound 80") && svg.matches("<polyline").count() >= 4,
            "{svg}"
        );
        let numbers: serde_json::Value = serde_json::from_str(&text("json")).unwrap();
        assert_eq!(numbers["timeline"][1]["local_mib"][0], 90.0);
    }
}
