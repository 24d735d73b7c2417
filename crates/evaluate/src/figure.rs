//! Figures as SVG: lines, dots and bars with axes and a legend. Each series has a colour, a mark
//! and dashes of its own, so that colour-blind readers can distinguish the series.

mod scale;

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use cli_runtime::Failure;
use plotters::{
    coord::{Shift, types::RangedCoordf64},
    element::DashedPathElement,
    prelude::*,
};

use scale::AxisRange;
pub(super) use scale::Scale;
use serde::Serialize;

/// Figure with one or more panels side by side.
#[derive(Clone, Debug)]
pub(super) struct Figure(pub Vec<Panel>);

/// Panel of a figure: series in one coordinate system. A linear axis starts at 0, or below the
/// smallest value if that is negative. A logarithmic axis starts at a power of ten.
#[derive(Clone, Debug)]
pub(super) struct Panel {
    pub title: String,
    pub x_title: &'static str,
    pub y_title: &'static str,
    pub x: Scale,
    pub y: Scale,
    /// Largest value on the horizontal axis. Points with a larger x are not drawn.
    pub x_max: f64,
    pub series: Vec<Series>,
}

/// Points that have one style and one entry in the legend.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub name: String,
    pub style: SeriesStyle,
    pub points: Vec<Point>,
}

/// Style in which the points of a series are drawn. The index selects colour, mark and dashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SeriesStyle {
    /// Marks that a line connects in the order of the points.
    Line(usize),
    /// Marks without a line.
    Mark(usize),
    /// Bar from 0 to each point, with a mark.
    Bar(usize),
    /// Small dots without a line.
    Dots,
    /// Ring around each point.
    Ring,
    /// Horizontal line through each point.
    HorizontalLine,
    /// Vertical line through each point.
    VerticalLine,
}

/// Point of a series, with the y values of both ends of its error bar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub x: f64,
    pub y: f64,
    pub error_bar: Option<(f64, f64)>,
}

impl Point {
    /// Creates a point without an error bar.
    pub fn new(x: f64, y: f64) -> Self {
        Self { x, y, error_bar: None }
    }
}

/// Colours of the series, from the colour-blind safe palette of Okabe and Ito.
const SERIES_COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];
/// Dashes of the series: lengths of dash and gap in pixels; `None` is a solid line.
const DASH_PATTERNS: [Option<(i32, i32)>; 6] =
    [None, Some((9, 4)), Some((3, 3)), Some((14, 4)), Some((6, 6)), Some((2, 5))];
const MARK_RADIUS_PX: i32 = 4;
/// Horizontal offsets of the lines with error bars, so that error bars at the same x do not
/// overlap.
const SERIES_OFFSET_PX: [i32; 3] = [-4, 0, 4];
/// Fraction of a name's width on the axis that the bars for this name cover.
const BARS_WIDTH_FRACTION: f64 = 0.8;

const PANEL_WIDTH_PX: u32 = 600;
const PLOT_HEIGHT_PX: u32 = 400;
const TITLE_HEIGHT_PX: u32 = 44;
const LEGEND_LINE_HEIGHT_PX: u32 = 22;
const LEGEND_LEFT_PX: i32 = 70;
const LEGEND_SAMPLE_WIDTH_PX: i32 = 40;
const MARGIN_PX: u32 = 14;
const AXIS_LABELS_HEIGHT_PX: u32 = 48;
const REFERENCE_LINE_COLOUR: RGBColor = RGBColor(90, 90, 90);
const GRID_COLOUR: RGBColor = RGBColor(225, 225, 225);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type DrawResult = Result<(), Box<dyn std::error::Error + Send + Sync>>;
type PixelPosition = (i32, i32);

/// Draws a figure and writes it to a file, atomically.
///
/// # Errors
/// [`Failure::File`] if the figure cannot be drawn or the file cannot be written.
pub(super) fn write(path: &Path, figure: &Figure) -> Result<(), Failure> {
    let failed =
        |error| Failure::File { operation: "write", path: path.to_owned(), errno: io::Error::other(error) };
    write_atomically(path, draw(figure).map_err(failed)?.as_bytes())
}

/// Creates the directory of the figures. It is called before the computation, so that an error is
/// reported early.
///
/// # Errors
/// [`Failure::File`] if the directory cannot be created.
pub(super) fn create_folder(folder: &Path) -> Result<(), Failure> {
    let failed = |errno| Failure::File { operation: "create directory", path: folder.to_owned(), errno };
    fs::create_dir_all(folder).map_err(failed)
}

/// Checks that a file can be written, without changing an existing file. Devices and pipes are not checked.
///
/// # Errors
/// [`Failure::File`] if the file cannot be written.
pub(super) fn check_writable(path: &Path) -> Result<(), Failure> {
    let check = || match Destination::find(path)? {
        Destination::Stream => Ok(()),
        Destination::File(path) => fs::remove_file(new_temporary_file(&path)?.1),
    };
    check().map_err(|errno| Failure::File { operation: "write", path: path.to_owned(), errno })
}

/// Kind of a file that is written.
enum Destination {
    /// Device or pipe.
    Stream,
    /// Regular file, without symbolic links in its path if it exists.
    File(PathBuf),
}

impl Destination {
    fn find(path: &Path) -> io::Result<Self> {
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(metadata) if metadata.is_file() => fs::canonicalize(path).map(Self::File),
            Ok(_) => Ok(Self::Stream),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::File(path.to_owned())),
            Err(error) => Err(error),
        }
    }
}

/// Creates a temporary file in the directory of a file. A file of another program is not changed.
fn new_temporary_file(path: &Path) -> io::Result<(fs::File, PathBuf)> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.partial", std::process::id()));
    Ok((fs::File::create_new(&temporary)?, temporary.into()))
}

/// Writes bytes to a file atomically: to a temporary file, which is then renamed. Devices and pipes are
/// written directly.
///
/// # Errors
/// [`Failure::File`] if the file cannot be written.
pub(super) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let write = || match Destination::find(path)? {
        Destination::Stream => fs::OpenOptions::new().write(true).open(path)?.write_all(bytes),
        Destination::File(path) => {
            let (mut file, temporary) = new_temporary_file(&path)?;
            let written = file.write_all(bytes).and_then(|()| fs::rename(&temporary, path));
            if written.is_err() {
                let _ = fs::remove_file(&temporary); // the first error is reported
            }
            written
        }
    };
    write().map_err(|errno| Failure::File { operation: "write", path: path.to_owned(), errno })
}

/// Writes results to a file atomically, as JSON.
///
/// # Errors
/// [`Failure::File`] if the file cannot be written.
pub(super) fn write_json(path: &Path, results: &impl Serialize) -> Result<(), Failure> {
    let failed = |error| Failure::File {
        operation: "write",
        path: path.to_owned(),
        errno: io::Error::other::<serde_json::Error>(error),
    };
    write_atomically(path, &serde_json::to_vec_pretty(results).map_err(failed)?)
}

fn draw(Figure(panels): &Figure) -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
    let mut svg = String::new();
    let lines = panels.iter().map(|panel| panel.series.len()).max().unwrap_or_default();
    let legend = u32::try_from(lines)? * LEGEND_LINE_HEIGHT_PX + 2 * MARGIN_PX;
    let plot_px =
        PLOT_HEIGHT_PX + panels.iter().map(|panel| panel.x.extra_label_height_px()).max().unwrap_or_default();
    let width = PANEL_WIDTH_PX * u32::try_from(panels.len())?;
    {
        let root = SVGBackend::with_string(&mut svg, (width, TITLE_HEIGHT_PX + plot_px + legend))
            .into_drawing_area();
        root.fill(&WHITE)?;
        for (panel, area) in panels.iter().zip(root.split_evenly((1, panels.len()))) {
            let (title, rest) = area.split_vertically(TITLE_HEIGHT_PX);
            let (plot, legend) = rest.split_vertically(plot_px);
            let middle = i32::try_from(PANEL_WIDTH_PX / 2)?;
            title.draw(&Text::new(panel.title.clone(), (middle, 16), text_style(17).pos(CENTRE_ANCHOR)))?;
            panel.draw(&plot)?;
            panel.draw_legend(&legend)?;
        }
        root.present()?;
    }
    Ok(svg)
}

const CENTRE_ANCHOR: plotters::style::text_anchor::Pos = plotters::style::text_anchor::Pos {
    h_pos: plotters::style::text_anchor::HPos::Center,
    v_pos: plotters::style::text_anchor::VPos::Top,
};

const VERTICAL_TEXT_ANCHOR: plotters::style::text_anchor::Pos = plotters::style::text_anchor::Pos {
    h_pos: plotters::style::text_anchor::HPos::Right,
    v_pos: plotters::style::text_anchor::VPos::Top,
};

fn text_style(size: i32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&BLACK)
}

/// Coordinate system of a panel. Converts values to pixels of the panel's area.
struct PlotFrame<'a, 'b> {
    area: &'a Area<'b>,
    chart: &'a Chart<'b>,
    scales: [&'a Scale; 2],
    x: AxisRange,
    y: AxisRange,
}

impl PlotFrame<'_, '_> {
    /// Converts values in the units of the scales to pixels.
    fn pixel(&self, x: f64, y: f64) -> PixelPosition {
        self.pixel_of_position(self.scales[0].position(x), self.scales[1].position(y))
    }

    fn pixel_of_position(&self, x: f64, y: f64) -> PixelPosition {
        let (left_px, top_px) = self.area.get_base_pixel();
        let (x, y) = self.chart.backend_coord(&(x, y));
        (x - left_px, y - top_px)
    }

    /// Returns the width of the axis per name, in pixels.
    fn name_width_px(&self, names: usize) -> f64 {
        f64::from(self.pixel_of_position(self.x.to, 0.0).0 - self.pixel_of_position(self.x.from, 0.0).0)
            / names.max(1) as f64
    }
}

impl Panel {
    /// Draws the axes with their labels, and all series.
    fn draw(&self, area: &Area<'_>) -> DrawResult {
        let visible: Vec<Series> = self.series.iter().map(|series| series.clip_to(self.x_max)).collect();
        let points = || visible.iter().flat_map(|series| &series.points);
        let heights = || points().flat_map(|point| [Some((point.y, point.y)), point.error_bar]).flatten();
        let x = self.x.axis_range(points().map(|point| point.x));
        let y = self.y.axis_range(heights().flat_map(|(low, high)| [low, high]));
        let mut chart = ChartBuilder::on(area)
            .margin_right(if self.x == Scale::Logarithmic { 2 * MARGIN_PX } else { MARGIN_PX })
            .margin_left(MARGIN_PX)
            .x_label_area_size(AXIS_LABELS_HEIGHT_PX + self.x.extra_label_height_px())
            .y_label_area_size(54)
            .build_cartesian_2d(x.from..x.to, y.from..y.to)?;
        let (x_label, y_label) = (|at: &f64| self.x.label(*at), |at: &f64| self.y.label(*at));
        chart
            .configure_mesh()
            .x_desc(self.x_title)
            .y_desc(self.y_title)
            .axis_desc_style(text_style(15))
            .label_style(text_style(13))
            .x_label_formatter(&x_label)
            .y_label_formatter(&y_label)
            .x_labels(self.x.labels_max(x))
            .y_labels(self.y.labels_max(y))
            .max_light_lines(0)
            .bold_line_style(GRID_COLOUR)
            .draw()?;
        let frame = PlotFrame { area, chart: &chart, scales: [&self.x, &self.y], x, y };
        self.draw_names(&frame)?;
        (0..).zip(&visible).try_for_each(|(index, series)| series.draw(&frame, self.slot(&frame, index)))
    }

    /// Draws the names on the horizontal axis, with separators. Many names are written vertically.
    fn draw_names(&self, frame: &PlotFrame<'_, '_>) -> DrawResult {
        let Scale::Names(names) = &self.x else { return Ok(()) };
        for (name, x) in names.iter().zip(0_i32..) {
            let edge = f64::from(x) + 0.5;
            let (foot, top) =
                (frame.pixel_of_position(edge, frame.y.from), frame.pixel_of_position(edge, frame.y.to));
            frame.area.draw(&PathElement::new(vec![foot, top], GRID_COLOUR))?;
            let (x, y) = frame.pixel_of_position(f64::from(x), frame.y.from);
            let (style, px) = if self.x.are_names_vertical() {
                (text_style(12).transform(FontTransform::Rotate270).pos(VERTICAL_TEXT_ANCHOR), (x - 7, y + 6))
            } else {
                (text_style(13).pos(CENTRE_ANCHOR), (x, y + 8))
            };
            frame.area.draw(&Text::new(name.clone(), px, style))?;
        }
        Ok(())
    }

    /// Returns the position and width of a series' bars, relative to the centre of a name.
    fn slot(&self, frame: &PlotFrame<'_, '_>, index: usize) -> BarSlot {
        let is_grouped = |style: SeriesStyle| matches!(style, SeriesStyle::Bar(_) | SeriesStyle::Mark(_));
        let series = &self.series[index];
        match &self.x {
            Scale::Names(names) if is_grouped(series.style) => {
                let count = |series: &[Series]| series.iter().filter(|s| is_grouped(s.style)).count() as f64;
                let group = BARS_WIDTH_FRACTION * frame.name_width_px(names.len());
                let (before, all) = (count(&self.series[..index]), count(&self.series));
                BarSlot {
                    offset: round_px(group * ((before + 0.5) / all - 0.5)),
                    width: round_px(group / all),
                }
            }
            _ => BarSlot { offset: series.offset_px(), width: 0 },
        }
    }

    /// Draws the legend, one line per series.
    fn draw_legend(&self, area: &Area<'_>) -> DrawResult {
        for (series, index) in self.series.iter().zip(0..) {
            let y = i32::try_from(LEGEND_LINE_HEIGHT_PX)? * index + 18;
            let middle = LEGEND_LEFT_PX + LEGEND_SAMPLE_WIDTH_PX / 2;
            let ends = match series.style {
                SeriesStyle::VerticalLine => [(middle, y + 9), (middle, y - 9)],
                _ => [(LEGEND_LEFT_PX, y), (LEGEND_LEFT_PX + LEGEND_SAMPLE_WIDTH_PX, y)],
            };
            if !matches!(
                series.style,
                SeriesStyle::Dots | SeriesStyle::Ring | SeriesStyle::Mark(_) | SeriesStyle::Bar(_)
            ) {
                draw_line(area, series.style, &ends)?;
            }
            draw_mark(area, series.style, (middle, y))?;
            area.draw(&Text::new(
                series.name.clone(),
                (LEGEND_LEFT_PX + LEGEND_SAMPLE_WIDTH_PX + 12, y - 5),
                text_style(14),
            ))?;
        }
        Ok(())
    }
}

impl Series {
    fn clip_to(&self, x_max: f64) -> Self {
        let points = self.points.iter().filter(|point| point.x <= x_max).copied().collect();
        Self { points, ..self.clone() }
    }

    fn draw(&self, frame: &PlotFrame<'_, '_>, slot: BarSlot) -> DrawResult {
        let (area, style) = (frame.area, self.style);
        for point in &self.points {
            let ((x, y), (left, foot), (right, top)) = (
                frame.pixel(point.x, point.y),
                frame.pixel_of_position(frame.x.from, frame.y.from),
                frame.pixel_of_position(frame.x.to, frame.y.to),
            );
            match style {
                SeriesStyle::HorizontalLine => draw_line(area, style, &[(left, y), (right, y)])?,
                SeriesStyle::VerticalLine => draw_line(area, style, &[(x, foot), (x, top)])?,
                SeriesStyle::Bar(_) => draw_bar(area, style, frame.pixel(point.x, 0.0), (x, y), slot)?,
                SeriesStyle::Line(_) | SeriesStyle::Mark(_) | SeriesStyle::Dots | SeriesStyle::Ring => {}
            }
        }
        let at = |x, y| {
            let (x, y) = frame.pixel(x, y);
            (x + slot.offset, y)
        };
        for (point, (low, high)) in self.points.iter().filter_map(|point| Some((point, point.error_bar?))) {
            draw_error_bar(area, style, at(point.x, low), at(point.x, high))?;
        }
        let path: Vec<PixelPosition> = self.points.iter().map(|point| at(point.x, point.y)).collect();
        if let SeriesStyle::Line(_) = style {
            draw_line(area, style, &path)?;
        }
        path.into_iter().try_for_each(|px| draw_mark(area, style, px))
    }

    fn offset_px(&self) -> i32 {
        match self.style {
            SeriesStyle::Line(index) if self.points.iter().any(|point| point.error_bar.is_some()) => {
                SERIES_OFFSET_PX[index % SERIES_OFFSET_PX.len()]
            }
            _ => 0,
        }
    }
}

/// Offset and width of the bars of one series, in pixels, so that bars of several series fit side
/// by side.
#[derive(Clone, Copy)]
struct BarSlot {
    offset: i32,
    width: i32,
}

fn round_px(px: f64) -> i32 {
    #[expect(clippy::cast_possible_truncation, reason = "pixels of a drawing")]
    let px = px.round() as i32;
    px
}

fn colour(style: SeriesStyle) -> RGBColor {
    match style {
        SeriesStyle::Line(index) | SeriesStyle::Mark(index) | SeriesStyle::Bar(index) => {
            SERIES_COLOURS[index % SERIES_COLOURS.len()]
        }
        SeriesStyle::Dots => SERIES_COLOURS[0],
        SeriesStyle::Ring => BLACK,
        SeriesStyle::HorizontalLine | SeriesStyle::VerticalLine => REFERENCE_LINE_COLOUR,
    }
}

fn draw_line(area: &Area<'_>, style: SeriesStyle, path: &[PixelPosition]) -> DrawResult {
    let (width, dashes) = match style {
        SeriesStyle::Line(index) => (2, DASH_PATTERNS[index % DASH_PATTERNS.len()]),
        SeriesStyle::Mark(_)
        | SeriesStyle::Bar(_)
        | SeriesStyle::Dots
        | SeriesStyle::Ring
        | SeriesStyle::HorizontalLine
        | SeriesStyle::VerticalLine => (1, Some((5, 3))),
    };
    let style = colour(style).stroke_width(width);
    match dashes {
        None => area.draw(&PathElement::new(path.to_vec(), style))?,
        Some((on, off)) => area.draw(&DashedPathElement::new(path.to_vec(), on, off, style))?,
    }
    Ok(())
}

/// Draws a bar in a pale colour, so that its mark and error bar are visible.
fn draw_bar(
    area: &Area<'_>,
    style: SeriesStyle,
    (_, from): PixelPosition,
    (x, to): PixelPosition,
    slot: BarSlot,
) -> DrawResult {
    let half = (slot.width / 2 - 1).max(1);
    let corners = [(x + slot.offset - half, from), (x + slot.offset + half, to)];
    area.draw(&Rectangle::new(corners, colour(style).mix(0.45).filled()))?;
    Ok(area.draw(&Rectangle::new(corners, colour(style).stroke_width(1)))?)
}

fn draw_error_bar(
    area: &Area<'_>,
    style: SeriesStyle,
    (x, low): PixelPosition,
    (_, high): PixelPosition,
) -> DrawResult {
    let style = colour(style).mix(0.6).stroke_width(1);
    let cap = |y| vec![(x - 2, y), (x + 2, y)];
    for path in [vec![(x, low), (x, high)], cap(low), cap(high)] {
        area.draw(&PathElement::new(path, style))?;
    }
    Ok(())
}

fn draw_mark(area: &Area<'_>, style: SeriesStyle, (x, y): PixelPosition) -> DrawResult {
    const M: i32 = MARK_RADIUS_PX;
    let index = match style {
        SeriesStyle::Dots => {
            return Ok(area.draw(&Circle::new((x, y), 3, colour(style).mix(0.5).filled()))?);
        }
        SeriesStyle::Ring => {
            return Ok(area.draw(&Circle::new((x, y), 2 * M, colour(style).stroke_width(2)))?);
        }
        SeriesStyle::HorizontalLine | SeriesStyle::VerticalLine => return Ok(()),
        SeriesStyle::Line(index) | SeriesStyle::Mark(index) | SeriesStyle::Bar(index) => index,
    };
    let filled = colour(style).filled();
    let polygon = |corners: &[PixelPosition]| {
        Polygon::new(corners.iter().map(|(dx, dy)| (x + dx, y + dy)).collect::<Vec<_>>(), filled)
    };
    match index % SERIES_COLOURS.len() {
        0 => area.draw(&Circle::new((x, y), M, filled))?,
        1 => area.draw(&polygon(&[(-M, -M), (M, -M), (M, M), (-M, M)]))?,
        2 => area.draw(&polygon(&[(0, -M - 1), (M + 1, M), (-M - 1, M)]))?,
        3 => area.draw(&polygon(&[(0, -M - 2), (M + 2, 0), (0, M + 2), (-M - 2, 0)]))?,
        4 => area.draw(&Cross::new((x, y), M, colour(style).stroke_width(2)))?,
        _ => area.draw(&Circle::new((x, y), M, colour(style).stroke_width(2)))?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn files_of_other_programs_and_links_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("results.json.partial"), "other").unwrap();
        fs::write(path("target.json"), "before").unwrap();
        symlink("target.json", path("link.json")).unwrap();
        for name in ["results.json", "link.json"] {
            check_writable(&path(name)).unwrap();
            write_json(&path(name), &7).unwrap();
        }
        assert_eq!(fs::read_to_string(path("results.json.partial")).unwrap(), "other");
        assert_eq!(fs::read_to_string(path("results.json")).unwrap(), "7");
        assert_eq!(fs::read_to_string(path("target.json")).unwrap(), "7");
        assert!(fs::symlink_metadata(path("link.json")).unwrap().is_symlink());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4, "no temporary file is left");
    }

    #[test]
    fn directories_are_rejected_and_devices_are_written() {
        let folder = tempfile::tempdir().unwrap();
        for result in [check_writable(folder.path()), write_atomically(folder.path(), b"x")] {
            assert!(matches!(result, Err(Failure::File { operation: "write", .. })), "{result:?}");
        }
        let null = Path::new("/dev/null");
        check_writable(null).unwrap();
        write_atomically(null, b"x").unwrap();
        assert!(!fs::metadata(null).unwrap().is_file());
        let missing = folder.path().join("missing/file");
        assert!(check_writable(&missing).is_err());
    }
}
