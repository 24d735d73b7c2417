//! Figures of values over time as SVG: panels side by side, with lines, axes and a legend each.

use std::path::Path;

use plotters::prelude::*;
use serde::Deserialize;

use crate::failure::Failure;

/// Colours of the lines, from the colour-blind safe palette of Okabe and Ito.
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
/// Width and height of a panel in pixels.
const PANEL_PX: (u32, u32) = (600, 460);
/// Height of an axis with headroom for the legend, relative to the largest value.
const HEADROOM: f64 = 1.25;

/// Lines in one coordinate system.
#[derive(Debug, Deserialize)]
pub struct Panel {
    /// Title, which contains the unit of the values.
    pub title: String,
    /// Lines.
    pub lines: Vec<Line>,
}

/// Values over time.
#[derive(Debug, Deserialize)]
pub struct Line {
    /// Name in the legend.
    pub name: String,
    /// Times in seconds, and values.
    pub points: Vec<(f64, f64)>,
    /// Value that the line should reach, drawn as a dashed line.
    pub expected: Option<f64>,
}

/// Numbers of a figure, which a benchmark writes as JSON.
#[derive(Debug, Deserialize)]
struct Numbers {
    title: String,
    panels: Vec<Panel>,
}

/// Draws the figure of a file with numbers, beside this file.
///
/// # Errors
/// Returns an error if the file contains no numbers of a figure, or if the figure cannot be written.
pub fn draw_file(numbers: &Path) -> Result<(), Failure> {
    let text = std::fs::read_to_string(numbers).map_err(Failure::file_error("read", numbers))?;
    let parsed = serde_json::from_str(&text).map_err(|error| Failure::UnexpectedOutput {
        program: numbers.display().to_string(),
        reason: error.to_string(),
    });
    let Numbers { title, panels } = parsed?;
    write(&numbers.with_extension("svg"), &title, &panels)
}

/// Writes a figure.
///
/// # Errors
/// Returns an error if the figure cannot be drawn or the file cannot be written.
pub fn write(path: &Path, title: &str, panels: &[Panel]) -> Result<(), Failure> {
    let svg = draw(title, panels).map_err(|error| Failure::UnexpectedOutput {
        program: path.display().to_string(),
        reason: error.to_string(),
    })?;
    std::fs::write(path, svg).map_err(Failure::file_error("write", path))
}

fn draw(title: &str, panels: &[Panel]) -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
    let mut svg = String::new();
    let width_px = PANEL_PX.0 * u32::try_from(panels.len())?;
    {
        let root = SVGBackend::with_string(&mut svg, (width_px, PANEL_PX.1)).into_drawing_area();
        root.fill(&WHITE)?;
        let root = root.titled(title, ("sans-serif", 18))?;
        for (panel, area) in panels.iter().zip(root.split_evenly((1, panels.len()))) {
            let points = || panel.lines.iter().flat_map(|line| &line.points);
            let x_max = points().map(|(x, _)| *x).fold(1.0, f64::max);
            let expected = panel.lines.iter().filter_map(|line| line.expected);
            let y_max = points().map(|(_, y)| *y).chain(expected).fold(1.0, f64::max);
            let mut chart = ChartBuilder::on(&area)
                .caption(&panel.title, ("sans-serif", 15))
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
    fn figure_of_numbers_is_drawn_beside_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("timeline.json");
        let numbers = r#"{"title": "both", "panels": [
            {"title": "memory (MiB)", "lines": [
                {"name": "cache", "points": [[0.0, 10.0], [1.0, 8.0]]},
                {"name": "other", "points": [[0.0, 0.0], [1.0, 12.0]], "expected": 12.0}]},
            {"title": "hits (%)", "lines": [{"name": "cache", "points": [[0.5, 90.0]]}]}]}"#;
        std::fs::write(&path, numbers).unwrap();
        draw_file(&path).unwrap();
        let svg = std::fs::read_to_string(folder.path().join("timeline.svg")).unwrap();
        let contains = ["both", "memory (MiB)", "hits (%)", "other"].map(|text| svg.contains(text));
        assert!(contains == [true; 4] && svg.contains("width=\"1200\""), "{svg}");
        std::fs::write(&path, "{}").unwrap();
        let error = draw_file(&path).unwrap_err().to_string();
        assert!(error.contains("timeline.json") && error.contains("missing field `title`"), "{error}");
    }
}
