//! Figures of `cargo xtask rack tiering`: local memory of each tenant and page migrations over time, as
//! SVG. The numbers are written beside them, as JSON.

use std::path::{Path, PathBuf};

use plotters::prelude::*;

use super::{Mode, Run, Sample};
use crate::failure::Failure;

/// Colours of the tenants, from the colour-blind safe palette of Okabe and Ito.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
    RGBColor(0, 0, 0),
];
/// Width and height of a figure in pixels.
const SIZE_PX: (u32, u32) = (1200, 460);
/// Height of an axis with headroom for the legend, relative to the largest value.
const HEADROOM: f64 = 1.25;

/// Panel: a title, and lines with a name each.
struct Panel {
    title: &'static str,
    lines: Vec<Line>,
}

struct Line {
    name: String,
    points: Vec<(f64, f64)>,
    /// Value that the line should reach, drawn as a dashed line.
    expected: Option<f64>,
}

/// Writes the figure of a run and its numbers to a directory.
///
/// # Errors
/// Returns an error if the figure cannot be drawn or a file cannot be written.
pub(super) fn write(folder: &Path, run: &Run) -> Result<(), Failure> {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let name: String = format!("{} {}", mode_name(run.mode), run.scenario).chars().map(plain).collect();
    let path = |extension: &str| folder.join(format!("live-{name}.{extension}"));
    let title = format!("{}: {}", mode_name(run.mode), run.scenario);
    let svg = draw(&title, &panels(run)).map_err(|error| Failure::UnexpectedOutput {
        program: path("svg").display().to_string(),
        reason: error.to_string(),
    })?;
    let write_file =
        |path: PathBuf, text: String| std::fs::write(&path, text).map_err(Failure::file_error("write", path));
    write_file(path("svg"), svg)?;
    write_file(path("json"), serde_json::to_string_pretty(run).expect("numbers and names can be serialized"))
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
            title: "local memory (MiB), dashed: expected",
            lines: run.tenants.iter().enumerate().map(tenant).collect(),
        },
        Panel { title: "migrated pages/s", lines: vec![pages, demoted] },
    ]
}

fn draw(title: &str, panels: &[Panel]) -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE_PX).into_drawing_area();
        root.fill(&WHITE)?;
        let root = root.titled(title, ("sans-serif", 18))?;
        for (panel, area) in panels.iter().zip(root.split_evenly((1, panels.len()))) {
            let points = || panel.lines.iter().flat_map(|line| &line.points);
            let x_max = points().map(|(x, _)| *x).fold(1.0, f64::max);
            let expected = panel.lines.iter().filter_map(|line| line.expected);
            let y_max = points().map(|(_, y)| *y).chain(expected).fold(1.0, f64::max);
            let mut chart = ChartBuilder::on(&area)
                .caption(panel.title, ("sans-serif", 15))
                .margin(10)
                .x_label_area_size(36)
                .y_label_area_size(56)
                .build_cartesian_2d(0.0..x_max, 0.0..y_max * HEADROOM)?;
            chart.configure_mesh().x_desc("Time (s)").max_light_lines(0).draw()?;
            for (line, colour) in panel.lines.iter().zip(COLOURS.into_iter().cycle()) {
                chart
                    .draw_series(LineSeries::new(line.points.iter().copied(), colour.stroke_width(2)))?
                    .label(&line.name)
                    .legend(move |(x, y)| {
                        PathElement::new(vec![(x, y), (x + 20, y)], colour.stroke_width(2))
                    });
                if let Some(expected) = line.expected {
                    let ends = [(0.0, expected), (x_max, expected)];
                    chart.draw_series(DashedLineSeries::new(ends, 6, 4, colour.into()))?;
                }
            }
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::UpperRight)
                .background_style(WHITE)
                .border_style(BLACK)
                .draw()?;
        }
        root.present()?;
    }
    Ok(svg)
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
