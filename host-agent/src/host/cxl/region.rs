//! Region of a memory device: the existing one, or a new one over all of it. Remains of a killed
//! agent or a failed attempt are removed, so that the next attempt starts from nothing.

use std::path::{Path, PathBuf};

use units::Bytes;

use super::{
    super::slices::{self, Region, Slices},
    BUS, Problem, Sight, Sysfs, SysfsError,
    plan::{self, Bare},
    topology::{self, Decoder, Memdev, Window},
};

/// File that commits a region.
const DRIVER: &str = "bus/cxl/drivers/cxl_region/bind";
/// Value of a committed region.
const COMMITTED: &str = "1";

/// State of a device's region.
pub(super) enum Site {
    /// Region of this name.
    There(String),
    /// No region.
    Bare(Bare),
}

/// Inspects the region of a device, and removes an incomplete one.
pub(super) fn survey(sysfs: &Sysfs, memdev: &Memdev) -> Result<Site, Problem> {
    let endpoint = endpoint(sysfs, memdev)?;
    remove_unfinished(sysfs, &topology::windows(sysfs, &endpoint)?, &topology::decoders(sysfs, &endpoint)?)?;
    site(sysfs, memdev, &endpoint)
}

/// Inspects the region of a device, without changes.
pub(super) fn look(sysfs: &Sysfs, memdev: &Memdev) -> Result<Sight, Problem> {
    let endpoint = endpoint(sysfs, memdev)?;
    let decoders = topology::decoders(sysfs, &endpoint)?;
    for window in topology::windows(sysfs, &endpoint)? {
        if let Some(name) = unfinished(sysfs, &window, &decoders)?.pop() {
            return Ok(Sight::Unfinished(name));
        }
    }
    match site(sysfs, memdev, &endpoint)? {
        Site::There(name) => look_at(sysfs, name),
        Site::Bare(Bare { bytes, fit, others, .. }) => {
            let best = fit.into_iter().next();
            let best = best.ok_or(Problem::NoWindow { bytes, tried: others })?;
            Ok(Sight::Bare { window: best.name, start: best.start })
        }
    }
}

fn look_at(sysfs: &Sysfs, name: String) -> Result<Sight, Problem> {
    let folder = usable(sysfs, &name)?;
    if sysfs.driver(&folder)?.is_none() {
        return Ok(Sight::Unused(name));
    }
    Ok(Sight::There(Slices::look(sysfs, region(sysfs, &folder, &name)?)?))
}

fn endpoint(sysfs: &Sysfs, memdev: &Memdev) -> Result<PathBuf, Problem> {
    if memdev.bytes.slices_floor() == Bytes::ZERO {
        return Err(Problem::Small { bytes: memdev.bytes });
    }
    let no_endpoint = || Problem::NoEndpoint { name: memdev.name.clone() };
    topology::endpoint(sysfs, memdev)?.ok_or_else(no_endpoint)
}

fn site(sysfs: &Sysfs, memdev: &Memdev, endpoint: &Path) -> Result<Site, Problem> {
    let decoders = topology::decoders(sysfs, endpoint)?;
    match &*decoders.iter().filter(|decoder| !decoder.region.is_empty()).collect::<Vec<_>>() {
        [] => {
            let (bytes, bridge) = (memdev.bytes.slices_floor(), topology::bridge(sysfs, endpoint)?);
            let (fit, others) = plan::fitting(topology::windows(sysfs, endpoint)?, bridge, bytes);
            Ok(Site::Bare(Bare { bytes, decoders, fit, others }))
        }
        [decoder] if decoder.at == 0 => Ok(Site::There(decoder.region.clone())),
        [decoder] => Err(Problem::NotFromStart { region: decoder.region.clone(), at: decoder.at }),
        several => Err(Problem::Regions(several.iter().map(|decoder| decoder.region.clone()).collect())),
    }
}

/// Returns the existing region if it can be used.
pub(super) fn found(sysfs: &Sysfs, name: &str) -> Result<Region, Problem> {
    let folder = usable(sysfs, name)?;
    if sysfs.driver(&folder)?.is_none() {
        slices::see_policy(sysfs)?;
        sysfs.write(DRIVER, name)?;
    }
    region(sysfs, &folder, name)
}

fn usable(sysfs: &Sysfs, name: &str) -> Result<PathBuf, Problem> {
    let folder = sysfs.target(Path::new(BUS).join(name))?;
    let ways = sysfs.number(folder.join("interleave_ways"))?;
    if ways != 1 {
        return Err(Problem::Interleaved { region: name.to_owned(), ways });
    }
    let mode = sysfs.text(folder.join("mode"))?;
    if mode == "ram" { Ok(folder) } else { Err(Problem::NotRam { region: name.to_owned(), mode }) }
}

fn region(sysfs: &Sysfs, folder: &Path, name: &str) -> Result<Region, Problem> {
    Ok(Region {
        base: sysfs.number(folder.join("resource"))?,
        bytes: Bytes::new(sysfs.number(folder.join("size"))?),
        folder: dax_region(sysfs, folder, name)?,
        name: name.to_owned(),
    })
}

fn dax_region(sysfs: &Sysfs, region: &Path, name: &str) -> Result<PathBuf, Problem> {
    let folders = sysfs.numbered(region, "dax_region")?;
    let mut folders = folders.iter().map(|folder| region.join(folder));
    let usable = folders.find(|folder| sysfs.has(folder.join("dax_region")));
    usable.ok_or_else(|| Problem::NoDax { region: name.to_owned() })
}

/// Creates a region in the first window that accepts it.
pub(super) fn make(sysfs: &Sysfs, bare: Bare) -> Result<Region, Problem> {
    slices::see_policy(sysfs)?; // with a region the kernel may get memory that it keeps
    let Bare { bytes, decoders, fit, others: mut tried } = bare;
    free(sysfs, &decoders)?;
    let Some(decoder) = decoders.first() else { return Err(Problem::NoWindow { bytes, tried }) };
    for window in fit {
        match make_in(sysfs, &window, decoder, bytes) {
            Ok(region) => return found(sysfs, &region),
            Err(error) => {
                tried.push(format!("{}: {}", window.name, units::chain(&error)));
                remove_unfinished(sysfs, &[window], &decoders)?;
                free(sysfs, &decoders)?;
            }
        }
    }
    Err(Problem::NoWindow { bytes, tried })
}

/// Writes the settings of a region in the order required by the kernel.
fn make_in(sysfs: &Sysfs, window: &Window, decoder: &Decoder, bytes: Bytes) -> Result<String, SysfsError> {
    let bytes = bytes.get().to_string();
    let create = window.folder.join("create_ram_region");
    let name = sysfs.text(&create)?;
    sysfs.write(&create, &name)?;
    let region = window.folder.join(&name);
    let granularity = sysfs.text(window.folder.join("interleave_granularity"))?;
    sysfs.write(region.join("interleave_granularity"), &granularity)?;
    sysfs.write(region.join("interleave_ways"), "1")?;
    sysfs.write(decoder.folder.join("mode"), "ram")?;
    sysfs.write(decoder.folder.join("dpa_size"), &bytes)?;
    sysfs.write(region.join("size"), &bytes)?;
    sysfs.write(region.join("target0"), &decoder.name)?;
    sysfs.write(region.join("commit"), COMMITTED)?;
    Ok(name)
}

/// Removes regions that were never committed and contain no other device.
fn remove_unfinished(sysfs: &Sysfs, windows: &[Window], decoders: &[Decoder]) -> Result<(), SysfsError> {
    for window in windows {
        for name in unfinished(sysfs, window, decoders)? {
            tracing::warn!(region = name, window = window.name, "unfinished region removed");
            sysfs.write(window.folder.join("delete_region"), &name)?;
        }
    }
    Ok(())
}

fn unfinished(sysfs: &Sysfs, window: &Window, decoders: &[Decoder]) -> Result<Vec<String>, SysfsError> {
    let mut names = Vec::new();
    for name in sysfs.numbered(&window.folder, "region")? {
        if is_unfinished(sysfs, &window.folder.join(&name), decoders)? {
            names.push(name);
        }
    }
    Ok(names)
}

fn is_unfinished(sysfs: &Sysfs, region: &Path, decoders: &[Decoder]) -> Result<bool, SysfsError> {
    if sysfs.text(region.join("commit"))? == COMMITTED {
        return Ok(false);
    }
    let targets = sysfs.numbered(region, "target")?.into_iter().map(|target| sysfs.text(region.join(target)));
    let targets: Vec<_> = targets.collect::<Result<_, _>>()?;
    let is_ours =
        |target: &String| target.is_empty() || decoders.iter().any(|decoder| decoder.name == *target);
    Ok(targets.iter().all(is_ours))
}

/// Releases device memory allocated by decoders without a region, the last one first.
fn free(sysfs: &Sysfs, decoders: &[Decoder]) -> Result<(), SysfsError> {
    for decoder in decoders.iter().rev() {
        let taken = decoder.folder.join("dpa_size");
        if sysfs.number(&taken)? > 0 {
            sysfs.write(taken, "0")?;
        }
    }
    Ok(())
}
