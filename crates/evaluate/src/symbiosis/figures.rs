//! Figures of shares (Spirit's figures 1, 3, 6, 8 and 9) from traces, each with its numbers. Each
//! figure has a module; this one writes the files.

mod changes;
mod gains;
mod kinds;
mod rounds;
mod time;

use std::{fs, path::Path};

use cli_runtime::{Failure, Format, print};
use serde::Serialize;
use sim::symbiosis::{Host, SMALL_HOST_TENANTS, Tenant};
use units::Fraction;

use super::{Compared, Trace, json};
use crate::figure::{self, Figure, Look, Point, Series};

/// Inputs of the figures.
pub(super) struct Shown {
    pub traces: Vec<Trace>,
    pub tenants: Vec<Tenant>,
    pub compared: Vec<Compared>,
    /// Local memory, as a fraction of the footprints.
    pub memory: Fraction,
}

impl Shown {
    /// A small host.
    fn host(&self) -> Host {
        Host { memory: self.memory.get() * SMALL_HOST_TENANTS as f64 }
    }
}

/// Creates the folder before the computation, so that an error is reported early.
///
/// # Errors
/// It cannot be created.
pub(super) fn make_folder(folder: &Path) -> Result<(), Failure> {
    let failed = |errno| Failure::File { operation: "make the folder", path: folder.to_owned(), errno };
    fs::create_dir_all(folder).map_err(failed)
}

/// Draws all figures into a folder.
///
/// # Errors
/// A file cannot be written, or a trace cannot be read again.
pub(super) fn write_all(folder: &Path, shown: &Shown, format: Format) -> Result<(), Failure> {
    let (figure, numbers) = kinds::drawn(shown);
    write(folder, "figure-1", &figure, &numbers)?;
    let (figure, numbers) = rounds::drawn(shown);
    write(folder, "figure-3", &figure, &numbers)?;
    let (figure, numbers) = gains::by_kind(shown);
    write(folder, "figure-6", &figure, &numbers)?;
    let (figure, numbers) = gains::by_mix(shown);
    write(folder, "figure-6-mixes", &figure, &numbers)?;
    let (figure, numbers) = time::drawn(shown);
    write(folder, "figure-8", &figure, &numbers)?;
    match changes::drawn(shown, format)? {
        Some((figure, numbers)) => write(folder, "figure-9", &figure, &numbers),
        None => {
            print::note(format, "figure 9 is left out: of one trace, no tenant can turn to another");
            Ok(())
        }
    }
}

fn write(folder: &Path, name: &str, figure: &Figure, numbers: &impl Serialize) -> Result<(), Failure> {
    let beside = folder.join(format!("{name}.json"));
    figure::write_whole(&beside, &json(&beside, numbers)?)?;
    figure::write(&folder.join(format!("{name}.svg")), figure)
}

fn line(nth: usize, name: impl Into<String>, points: impl Iterator<Item = (f64, f64)>) -> Series {
    let points = points.map(|(x, y)| Point::new(x, y)).collect();
    Series { name: name.into(), look: Look::Line(nth), points }
}

fn across(name: &str, y: f64) -> Series {
    Series { name: name.to_owned(), look: Look::Across, points: vec![Point::new(0.0, y)] }
}
