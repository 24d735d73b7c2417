//! Figures as SVG: lines, dots and bars over percent, with a legend beneath. What is shown is a value that others make; here is how it
//! looks, in colours that colour-blind people tell apart, each with a mark and dashes of its own.

use std::{fs, io, path::Path};

use plotters::{coord::Shift, element::DashedPathElement, prelude::*};

use crate::Failure;

/// Panels, side by side.
#[derive(Clone, Debug)]
pub(super) struct Figure(pub Vec<Panel>);

/// One drawing. Its axes begin at nothing, or below where something is.
#[derive(Clone, Debug)]
pub(super) struct Panel {
    pub title: String,
    pub x_title: &'static str,
    pub y_title: &'static str,
    /// How far to the right is shown, as a share; what lies beyond is left out.
    pub x_max: f64,
    pub series: Vec<Series>,
}

/// What has one name in the legend.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub name: String,
    pub look: Look,
    pub points: Vec<Point>,
}

/// How points are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Joined in their order, in the colour, dashes and mark of this number.
    Line(usize),
    /// Each by itself.
    Dots,
    /// A ring around it.
    Ring,
    /// A line all across at the height of the point.
    Across,
    /// A line from the foot to the top at the place of the point.
    Upright,
}

/// Shares, 0 to 1; and the ends of its error bar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub x: f64,
    pub y: f64,
    pub bar: Option<(f64, f64)>,
}

impl Point {
    /// Without a bar.
    pub fn new(x: f64, y: f64) -> Self {
        Self { x, y, bar: None }
    }
}

/// What Okabe and Ito found that most people tell apart.
const COLOURS: [RGBColor; 5] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
];
/// Pixels drawn and left out.
const DASHES: [Option<(i32, i32)>; 5] = [None, Some((9, 4)), Some((3, 3)), Some((14, 4)), Some((6, 6))];
const MARK_PX: i32 = 4;
/// Lines with bars stand that far aside, so that bars at the same place are told apart.
const ASIDE_PX: [i32; 3] = [-4, 0, 4];

const WIDTH_PX: u32 = 600;
const PLOT_PX: u32 = 400;
const TITLE_PX: u32 = 44;
const LEGEND_LINE_PX: u32 = 22;
const LEGEND_LEFT_PX: i32 = 70;
const SAMPLE_PX: i32 = 40;
const MARGIN_PX: u32 = 14;
const GREY: RGBColor = RGBColor(90, 90, 90);
const PALE: RGBColor = RGBColor(225, 225, 225);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error + Send + Sync>>;
type Px = (i32, i32);

/// Writes it to a file, whole or not at all.
///
/// # Errors
/// The file cannot be written.
pub(super) fn write(path: &Path, figure: &Figure) -> Result<(), Failure> {
    let failed = |errno| Failure::File { tried: "write", path: path.to_owned(), errno };
    let svg = draw(figure).map_err(|wrong| failed(io::Error::other(wrong)))?;
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let written = fs::write(&partial, svg).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        // What matters is why it could not be written; a file that was not made cannot be removed.
        let _ = fs::remove_file(&partial);
    }
    written.map_err(failed)
}

fn draw(Figure(panels): &Figure) -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
    let mut svg = String::new();
    let lines = panels.iter().map(|panel| panel.series.len()).max().unwrap_or_default();
    let legend = u32::try_from(lines)? * LEGEND_LINE_PX + 2 * MARGIN_PX;
    let width = WIDTH_PX * u32::try_from(panels.len())?;
    {
        let root =
            SVGBackend::with_string(&mut svg, (width, TITLE_PX + PLOT_PX + legend)).into_drawing_area();
        root.fill(&WHITE)?;
        for (panel, area) in panels.iter().zip(root.split_evenly((1, panels.len()))) {
            let (title, rest) = area.split_vertically(TITLE_PX);
            let (plot, legend) = rest.split_vertically(PLOT_PX);
            let middle = i32::try_from(WIDTH_PX / 2)?;
            title.draw(&Text::new(panel.title.clone(), (middle, 16), font(17).pos(CENTRE)))?;
            panel.draw(&plot)?;
            panel.explain(&legend)?;
        }
        root.present()?;
    }
    Ok(svg)
}

const CENTRE: plotters::style::text_anchor::Pos = plotters::style::text_anchor::Pos {
    h_pos: plotters::style::text_anchor::HPos::Center,
    v_pos: plotters::style::text_anchor::VPos::Top,
};

fn font(size: i32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&BLACK)
}

/// How far the axes go, in percent: to the right from nothing, and from the foot to the top.
#[derive(Clone, Copy)]
struct Extent {
    right: f64,
    foot: f64,
    top: f64,
}

impl Extent {
    /// Of all points and their bars.
    fn of(shown: &[Series]) -> Self {
        let points = || shown.iter().flat_map(|series| &series.points);
        let heights = || points().flat_map(|point| [Some((point.y, point.y)), point.bar]).flatten();
        let below = -100.0 * heights().map(|(low, _)| low).fold(0.0, f64::min);
        Self {
            right: round_up(100.0 * points().map(|point| point.x).fold(0.0, f64::max)),
            foot: if below > 0.0 { -round_up(below) } else { 0.0 },
            top: round_up(100.0 * heights().map(|(_, high)| high).fold(0.0, f64::max)),
        }
    }
}

impl Panel {
    /// The axes and all that is on them.
    fn draw(&self, area: &Area<'_>) -> Drawn {
        let shown: Vec<Series> = self.series.iter().map(|series| series.within(self.x_max)).collect();
        let extent = Extent::of(&shown);
        let mut chart = ChartBuilder::on(area)
            .margin_right(MARGIN_PX)
            .margin_left(MARGIN_PX)
            .x_label_area_size(48)
            .y_label_area_size(54)
            .build_cartesian_2d(0.0..extent.right, extent.foot..extent.top)?;
        let label = |percent: &f64| format!("{}", (percent * 100.0).round() / 100.0);
        chart
            .configure_mesh()
            .x_desc(self.x_title)
            .y_desc(self.y_title)
            .axis_desc_style(font(15))
            .label_style(font(13))
            .x_label_formatter(&label)
            .y_label_formatter(&label)
            .x_labels(11)
            .y_labels(11)
            .max_light_lines(0)
            .bold_line_style(PALE)
            .draw()?;
        let (left_px, top_px) = area.get_base_pixel();
        let at = |x: f64, y: f64| {
            let (x, y) = chart.backend_coord(&(100.0 * x, 100.0 * y));
            (x - left_px, y - top_px)
        };
        shown.iter().try_for_each(|series| series.draw(area, extent, at))
    }

    /// What each series is called.
    fn explain(&self, area: &Area<'_>) -> Drawn {
        for (series, nth) in self.series.iter().zip(0..) {
            let y = i32::try_from(LEGEND_LINE_PX)? * nth + 18;
            let ends = [(LEGEND_LEFT_PX, y), (LEGEND_LEFT_PX + SAMPLE_PX, y)];
            if !matches!(series.look, Look::Dots | Look::Ring) {
                line(area, series.look, &ends)?;
            }
            mark(area, series.look, (LEGEND_LEFT_PX + SAMPLE_PX / 2, y))?;
            area.draw(&Text::new(series.name.clone(), (LEGEND_LEFT_PX + SAMPLE_PX + 12, y - 5), font(14)))?;
        }
        Ok(())
    }
}

impl Series {
    fn within(&self, x_max: f64) -> Self {
        let points = self.points.iter().filter(|point| point.x <= x_max).copied().collect();
        Self { points, ..self.clone() }
    }

    fn draw(&self, area: &Area<'_>, extent: Extent, at: impl Fn(f64, f64) -> Px) -> Drawn {
        let Extent { right, foot, top } = extent;
        for point in &self.points {
            match self.look {
                Look::Across => line(area, self.look, &[at(0.0, point.y), at(right / 100.0, point.y)])?,
                Look::Upright => {
                    line(area, self.look, &[at(point.x, foot / 100.0), at(point.x, top / 100.0)])?
                }
                Look::Line(_) | Look::Dots | Look::Ring => {}
            }
        }
        let at = |x, y| {
            let (x, y) = at(x, y);
            (x + self.aside_px(), y)
        };
        for (point, (low, high)) in self.points.iter().filter_map(|point| Some((point, point.bar?))) {
            bar(area, self.look, at(point.x, low), at(point.x, high))?;
        }
        let path: Vec<Px> = self.points.iter().map(|point| at(point.x, point.y)).collect();
        if let Look::Line(_) = self.look {
            line(area, self.look, &path)?;
        }
        path.into_iter().try_for_each(|px| mark(area, self.look, px))
    }

    fn aside_px(&self) -> i32 {
        match self.look {
            Look::Line(nth) if self.points.iter().any(|point| point.bar.is_some()) => {
                ASIDE_PX[nth % ASIDE_PX.len()]
            }
            _ => 0,
        }
    }
}

fn colour(look: Look) -> RGBColor {
    match look {
        Look::Line(nth) => COLOURS[nth % COLOURS.len()],
        Look::Dots => COLOURS[0],
        Look::Ring => BLACK,
        Look::Across | Look::Upright => GREY,
    }
}

fn line(area: &Area<'_>, look: Look, path: &[Px]) -> Drawn {
    let (width, dashes) = match look {
        Look::Line(nth) => (2, DASHES[nth % DASHES.len()]),
        Look::Dots | Look::Ring | Look::Across | Look::Upright => (1, Some((5, 3))),
    };
    let style = colour(look).stroke_width(width);
    match dashes {
        None => area.draw(&PathElement::new(path.to_vec(), style))?,
        Some((on, off)) => area.draw(&DashedPathElement::new(path.to_vec(), on, off, style))?,
    }
    Ok(())
}

fn bar(area: &Area<'_>, look: Look, (x, low): Px, (_, high): Px) -> Drawn {
    let style = colour(look).mix(0.6).stroke_width(1);
    let cap = |y| vec![(x - 2, y), (x + 2, y)];
    for path in [vec![(x, low), (x, high)], cap(low), cap(high)] {
        area.draw(&PathElement::new(path, style))?;
    }
    Ok(())
}

fn mark(area: &Area<'_>, look: Look, (x, y): Px) -> Drawn {
    const M: i32 = MARK_PX;
    let nth = match look {
        Look::Dots => return Ok(area.draw(&Circle::new((x, y), 3, colour(look).mix(0.5).filled()))?),
        Look::Ring => return Ok(area.draw(&Circle::new((x, y), 2 * M, colour(look).stroke_width(2)))?),
        Look::Across | Look::Upright => return Ok(()),
        Look::Line(nth) => nth,
    };
    let filled = colour(look).filled();
    let polygon = |corners: &[Px]| {
        Polygon::new(corners.iter().map(|(dx, dy)| (x + dx, y + dy)).collect::<Vec<_>>(), filled)
    };
    match nth % COLOURS.len() {
        0 => area.draw(&Circle::new((x, y), M, filled))?,
        1 => area.draw(&polygon(&[(-M, -M), (M, -M), (M, M), (-M, M)]))?,
        2 => area.draw(&polygon(&[(0, -M - 1), (M + 1, M), (-M - 1, M)]))?,
        3 => area.draw(&polygon(&[(0, -M - 2), (M + 2, 0), (0, M + 2), (-M - 2, 0)]))?,
        _ => area.draw(&Cross::new((x, y), M, colour(look).stroke_width(2)))?,
    }
    Ok(())
}

/// The next round number, so that an axis ends with a label: a few of 1, 2 or 5 times a power of ten.
fn round_up(percent: f64) -> f64 {
    let percent = percent.max(0.1);
    let ten = 10_f64.powf(percent.log10().floor() - 1.0);
    let steps = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0].map(|step| step * ten);
    let step = steps.into_iter().find(|step| percent / step <= 8.0).unwrap_or(percent);
    (percent / step - 1e-9).ceil() * step
}
