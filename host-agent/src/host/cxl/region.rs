//! Region of a memory device: an existing region is used, otherwise a region over the whole device
//! is created. An incomplete region of a killed agent or of a failed attempt is deleted first.

use std::path::{Path, PathBuf};

use units::Bytes;

use super::{
    super::slices::{self, Region, Slices},
    BUS, DeviceState, Problem, Sysfs, SysfsError,
    plan::{self, RegionPlan},
    topology::{self, Decoder, Memdev, Window},
};

/// File in sysfs that binds a region to its driver.
const BIND_FILE: &str = "bus/cxl/drivers/cxl_region/bind";
/// Value of the file `commit` of a committed region.
const DECODER_COMMITTED: &str = "1";

/// Region of a device, present or planned.
pub(super) enum RegionState {
    /// The device has a region of this name.
    Present(String),
    /// The device has no region; this is the plan to create one.
    Missing(RegionPlan),
}

/// Deletes the incomplete region of a device, if any, and returns the state of the device's region.
pub(super) fn prepare_region(sysfs: &Sysfs, memdev: &Memdev) -> Result<RegionState, Problem> {
    let endpoint = find_endpoint(sysfs, memdev)?;
    remove_incomplete_regions(
        sysfs,
        &topology::windows(sysfs, &endpoint)?,
        &topology::decoders(sysfs, &endpoint)?,
    )?;
    read_state(sysfs, memdev, &endpoint)
}

/// Returns the state of a device's region, without changing it.
pub(super) fn inspect(sysfs: &Sysfs, memdev: &Memdev) -> Result<DeviceState, Problem> {
    let endpoint = find_endpoint(sysfs, memdev)?;
    let decoders = topology::decoders(sysfs, &endpoint)?;
    for window in topology::windows(sysfs, &endpoint)? {
        if let Some(name) = incomplete_regions(sysfs, &window, &decoders)?.pop() {
            return Ok(DeviceState::Incomplete(name));
        }
    }
    match read_state(sysfs, memdev, &endpoint)? {
        RegionState::Present(name) => inspect_existing_region(sysfs, name),
        RegionState::Missing(RegionPlan { bytes, windows, rejected, .. }) => {
            let best = windows.into_iter().next();
            let best = best.ok_or(Problem::NoWindow { bytes, tried: rejected })?;
            Ok(DeviceState::NoRegion { window: best.name, start: best.start })
        }
    }
}

fn inspect_existing_region(sysfs: &Sysfs, name: String) -> Result<DeviceState, Problem> {
    let folder = usable_region_folder(sysfs, &name)?;
    if sysfs.driver(&folder)?.is_none() {
        return Ok(DeviceState::Unbound(name));
    }
    Ok(DeviceState::Present(Slices::inspect(sysfs, read_region(sysfs, &folder, &name)?)?))
}

fn find_endpoint(sysfs: &Sysfs, memdev: &Memdev) -> Result<PathBuf, Problem> {
    if memdev.bytes.slices_floor() == Bytes::ZERO {
        return Err(Problem::TooSmall { bytes: memdev.bytes });
    }
    let no_endpoint = || Problem::NoEndpoint { name: memdev.name.clone() };
    topology::endpoint(sysfs, memdev)?.ok_or_else(no_endpoint)
}

fn read_state(sysfs: &Sysfs, memdev: &Memdev, endpoint: &Path) -> Result<RegionState, Problem> {
    let decoders = topology::decoders(sysfs, endpoint)?;
    match &*decoders.iter().filter(|decoder| !decoder.region.is_empty()).collect::<Vec<_>>() {
        [] => {
            let (bytes, bridge) = (memdev.bytes.slices_floor(), topology::bridge(sysfs, endpoint)?);
            let (windows, rejected) =
                plan::select_windows(topology::windows(sysfs, endpoint)?, bridge, bytes);
            Ok(RegionState::Missing(RegionPlan { bytes, decoders, windows, rejected }))
        }
        [decoder] if decoder.at == 0 => Ok(RegionState::Present(decoder.region.clone())),
        [decoder] => Err(Problem::NotFromStart { region: decoder.region.clone(), at: decoder.at }),
        several => Err(Problem::Regions(several.iter().map(|decoder| decoder.region.clone()).collect())),
    }
}

/// Binds the existing region to its driver if necessary, and returns it.
pub(super) fn use_existing_region(sysfs: &Sysfs, name: &str) -> Result<Region, Problem> {
    let folder = usable_region_folder(sysfs, name)?;
    if sysfs.driver(&folder)?.is_none() {
        slices::check_online_policy(sysfs)?;
        sysfs.write(BIND_FILE, name)?;
    }
    read_region(sysfs, &folder, name)
}

fn usable_region_folder(sysfs: &Sysfs, name: &str) -> Result<PathBuf, Problem> {
    let folder = sysfs.target(Path::new(BUS).join(name))?;
    let ways = sysfs.number(folder.join("interleave_ways"))?;
    if ways != 1 {
        return Err(Problem::Interleaved { region: name.to_owned(), ways });
    }
    let mode = sysfs.text(folder.join("mode"))?;
    if mode == "ram" { Ok(folder) } else { Err(Problem::NotRam { region: name.to_owned(), mode }) }
}

fn read_region(sysfs: &Sysfs, folder: &Path, name: &str) -> Result<Region, Problem> {
    Ok(Region {
        base: sysfs.number(folder.join("resource"))?,
        bytes: Bytes::new(sysfs.number(folder.join("size"))?),
        folder: find_dax_region(sysfs, folder, name)?,
        name: name.to_owned(),
    })
}

fn find_dax_region(sysfs: &Sysfs, region: &Path, name: &str) -> Result<PathBuf, Problem> {
    let folders = sysfs.numbered_names(region, "dax_region")?;
    let mut folders = folders.iter().map(|folder| region.join(folder));
    let usable = folders.find(|folder| sysfs.has(folder.join("dax_region")));
    usable.ok_or_else(|| Problem::NoDax { region: name.to_owned() })
}

/// Creates a region in the first window that the kernel accepts.
pub(super) fn create(sysfs: &Sysfs, plan: RegionPlan) -> Result<Region, Problem> {
    slices::check_online_policy(sysfs)?; // else the kernel could online the new region's memory
    let RegionPlan { bytes, decoders, windows, rejected: mut tried } = plan;
    free_decoders(sysfs, &decoders)?;
    let Some(decoder) = decoders.first() else { return Err(Problem::NoWindow { bytes, tried }) };
    for window in windows {
        match create_in_window(sysfs, &window, decoder, bytes) {
            Ok(region) => return use_existing_region(sysfs, &region),
            Err(error) => {
                tried.push(format!("{}: {}", window.name, units::chain(&error)));
                remove_incomplete_regions(sysfs, &[window], &decoders)?;
                free_decoders(sysfs, &decoders)?;
            }
        }
    }
    Err(Problem::NoWindow { bytes, tried })
}

/// Creates and commits a region by writing its settings in the order that the kernel requires.
fn create_in_window(
    sysfs: &Sysfs,
    window: &Window,
    decoder: &Decoder,
    bytes: Bytes,
) -> Result<String, SysfsError> {
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
    sysfs.write(region.join("commit"), DECODER_COMMITTED)?;
    Ok(name)
}

/// Deletes regions that were never committed and contain no other device.
fn remove_incomplete_regions(
    sysfs: &Sysfs,
    windows: &[Window],
    decoders: &[Decoder],
) -> Result<(), SysfsError> {
    for window in windows {
        for name in incomplete_regions(sysfs, window, decoders)? {
            tracing::warn!(region = name, window = window.name, "deleting incomplete CXL region");
            sysfs.write(window.folder.join("delete_region"), &name)?;
        }
    }
    Ok(())
}

fn incomplete_regions(
    sysfs: &Sysfs,
    window: &Window,
    decoders: &[Decoder],
) -> Result<Vec<String>, SysfsError> {
    let mut names = Vec::new();
    for name in sysfs.numbered_names(&window.folder, "region")? {
        if is_region_incomplete(sysfs, &window.folder.join(&name), decoders)? {
            names.push(name);
        }
    }
    Ok(names)
}

fn is_region_incomplete(sysfs: &Sysfs, region: &Path, decoders: &[Decoder]) -> Result<bool, SysfsError> {
    if sysfs.text(region.join("commit"))? == DECODER_COMMITTED {
        return Ok(false);
    }
    let targets =
        sysfs.numbered_names(region, "target")?.into_iter().map(|target| sysfs.text(region.join(target)));
    let targets: Vec<_> = targets.collect::<Result<_, _>>()?;
    let is_ours =
        |target: &String| target.is_empty() || decoders.iter().any(|decoder| decoder.name == *target);
    Ok(targets.iter().all(is_ours))
}

/// Releases the device memory that decoders without a region have allocated, in reverse order as
/// the kernel requires.
fn free_decoders(sysfs: &Sysfs, decoders: &[Decoder]) -> Result<(), SysfsError> {
    for decoder in decoders.iter().rev() {
        let dpa_size = decoder.folder.join("dpa_size");
        if sysfs.number(&dpa_size)? > 0 {
            sysfs.write(dpa_size, "0")?;
        }
    }
    Ok(())
}
