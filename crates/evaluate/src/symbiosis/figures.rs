//! Figures 1, 3, 6, 8 and 9 of Spirit, drawn from traces. Each figure has a module that computes
//! its data; this module writes the files.

mod changes;
mod gains;
mod kinds;
mod rounds;
mod time;

use std::path::Path;

use cli_runtime::{Failure, Format, print};
use serde::Serialize;
use sim::symbiosis::{Host, SMALL_HOST_TENANTS, Tenant};
use units::Fraction;

use super::{ComparedMix, Trace};
use crate::figure::{self, Figure, Point, Series, SeriesStyle};

/// Traces, tenants and results of schemes, from which the figures are drawn.
pub(super) struct FigureInputs {
    pub traces: Vec<Trace>,
    pub tenants: Vec<Tenant>,
    pub compared: Vec<ComparedMix>,
    /// Local memory of a host, as a fraction of the footprints of its tenants.
    pub memory: Fraction,
}

impl FigureInputs {
    /// Returns a host with memory for the tenants of a small mix.
    fn host(&self) -> Host {
        Host { memory: self.memory.get() * SMALL_HOST_TENANTS as f64 }
    }
}

/// Draws all figures and writes them into a directory.
///
/// # Errors
/// [`Failure::File`] if a file cannot be written, or a trace cannot be read again.
pub(super) fn write_all(folder: &Path, inputs: &FigureInputs, format: Format) -> Result<(), Failure> {
    let (figure, numbers) = kinds::draw(inputs);
    write_figure(folder, "figure-1", &figure, &numbers)?;
    let (figure, numbers) = rounds::draw(inputs);
    write_figure(folder, "figure-3", &figure, &numbers)?;
    let (figure, numbers) = gains::draw_by_kind(inputs);
    write_figure(folder, "figure-6", &figure, &numbers)?;
    let (figure, numbers) = gains::draw_by_mix(inputs);
    write_figure(folder, "figure-6-mixes", &figure, &numbers)?;
    let (figure, numbers) = time::draw(inputs);
    write_figure(folder, "figure-8", &figure, &numbers)?;
    match changes::draw(inputs, format)? {
        Some((figure, numbers)) => write_figure(folder, "figure-9", &figure, &numbers),
        None => {
            print::note(format, "figure 9 is not drawn: it needs at least two traces");
            Ok(())
        }
    }
}

fn write_figure(folder: &Path, name: &str, figure: &Figure, numbers: &impl Serialize) -> Result<(), Failure> {
    let json_path = folder.join(format!("{name}.json"));
    figure::write_json(&json_path, numbers)?;
    figure::write(&folder.join(format!("{name}.svg")), figure)
}

fn line_series(index: usize, name: impl Into<String>, points: impl Iterator<Item = (f64, f64)>) -> Series {
    let points = points.map(|(x, y)| Point::new(x, y)).collect();
    Series { name: name.into(), style: SeriesStyle::Line(index), points }
}

fn horizontal_line_series(name: &str, y: f64) -> Series {
    Series { name: name.to_owned(), style: SeriesStyle::HorizontalLine, points: vec![Point::new(0.0, y)] }
}
