//! `tarn test-vmm`: a process that attaches the memory of a VM as a VMM would, but without KVM and
//! a guest. It attaches to the agent, verifies that the slices are zeroed, maps them and writes a
//! pattern. It verifies the pattern when its stdin is closed. Each result is printed as a line of
//! JSON. If a slice is revoked, the process is killed on access, like a guest.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt as _, FileTypeExt as _},
    path::{Path, PathBuf},
};

use cli_runtime::{Failure, print};
use host_memory::{Client, ClientError};
use proto::v1::MemoryForm;
use rustix::fs::SeekFrom;
use serde::{Deserialize, Serialize};
use units::{SLICE, limits::TEST_VMM_TOUCHED_MIB_MAX};
use vm_memory::{Bytes as _, FileOffset, MmapRegion, VolatileMemory as _};

const MIB: usize = 1 << 20;
/// Block of zeros. Comparing blocks is many times faster than comparing single bytes.
static ZEROS: [u8; MIB] = [0; MIB];

/// Options of `tarn test-vmm`.
#[derive(Clone, Debug, clap::Args)]
pub struct TestVmmArgs {
    /// Socket of the agent of this host
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// VM whose slices are used
    #[arg(long)]
    vm: String,
    /// Memory to write in each slice, from its start
    #[arg(long, value_name = "MIB", default_value_t = 1, value_parser = clap::value_parser!(u64).range(0..=TEST_VMM_TOUCHED_MIB_MAX))]
    touch: u64,
    /// Verify only this much memory of each slice that can only be mapped (device-dax)
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(0..=TEST_VMM_TOUCHED_MIB_MAX))]
    verify: Option<u64>,
}

/// Findings of a test VMM before it uses its slices.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct InitialFindings {
    pub(super) vm: String,
    /// Slices that the test VMM read.
    pub(super) slices: Vec<u32>,
    /// Slices that contained non-zero bytes.
    pub(super) dirty: Vec<u32>,
}

/// Findings of a test VMM at its end.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct FinalFindings {
    pub(super) vm: String,
    /// Slices that no longer contain the pattern of the test VMM.
    pub(super) overwritten: Vec<u32>,
}

/// Slice as received from the agent, not mapped yet.
struct ReceivedSlice {
    slice: u32,
    epoch: u64,
    offset: u64,
    bytes: u64,
    file: File,
}

/// Slice mapped by the test VMM.
struct Slice {
    number: u32,
    epoch: u64,
    memory: MmapRegion,
}

/// Uses the slices of a VM until stdin is closed.
///
/// # Errors
/// [`Failure::File`] if the agent provides no memory, or the memory cannot be read, mapped or
/// written.
pub fn run(args: &TestVmmArgs) -> Result<(), Failure> {
    let failed = |operation| move |errno| Failure::File { operation, path: args.socket.clone(), errno };
    let slices = attach_slices(&args.socket, &args.vm).map_err(failed("attach through"))?;
    let dirty = find_dirty_slices(&slices, args.verify).map_err(failed("read slices of"))?;
    let numbers = slices.iter().map(|received| received.slice).collect();
    let mapped = slices.into_iter().map(map_slice).collect::<io::Result<Vec<_>>>();
    let mapped = mapped.map_err(failed("map slices of"))?;
    let touched_bytes = usize::try_from(args.touch).expect("limited by the option") * MIB;
    mapped
        .iter()
        .try_for_each(|slice| write_pattern(slice, &args.vm, touched_bytes))
        .map_err(failed("write slices of"))?;
    print_line(&InitialFindings { vm: args.vm.clone(), slices: numbers, dirty })?;
    io::copy(&mut io::stdin().lock(), &mut io::sink())
        .map_err(failed("wait for the end of stdin with slices of"))?;
    let changed = mapped.iter().filter_map(|slice| match is_pattern_intact(slice, &args.vm, touched_bytes) {
        Ok(true) => None,
        Ok(false) => Some(Ok(slice.number)),
        Err(errno) => Some(Err(errno)),
    });
    let overwritten = changed.collect::<io::Result<_>>().map_err(failed("read the pattern in slices of"))?;
    print_line(&FinalFindings { vm: args.vm.clone(), overwritten })
}

/// Attaches to a VM as its VMM, and returns the VM's slices.
fn attach_slices(socket: &Path, vm: &str) -> io::Result<Vec<ReceivedSlice>> {
    let to_io_error = |error: ClientError| io::Error::other(units::chain(&error));
    let client = Client::connect(socket).map_err(to_io_error)?;
    let memory = client.attach(vm, MemoryForm::Descriptors).map_err(to_io_error)?;
    let received = memory.regions.into_iter().filter_map(|region| {
        let (slice, epoch) = region.slice?;
        let (offset, bytes) = (region.offset, region.bytes);
        Some(region.into_file().map(|file| ReceivedSlice { slice, epoch, offset, bytes, file }))
    });
    received.collect()
}

fn print_line<T: Serialize>(line: &T) -> Result<(), Failure> {
    print::out(&(serde_json::to_string(line).expect("texts and numbers serialize to JSON") + "\n"))
}

/// Returns the slices that contain non-zero bytes. Holes in files are not read.
fn find_dirty_slices(slices: &[ReceivedSlice], verify_mib: Option<u64>) -> io::Result<Vec<u32>> {
    let mut dirty = Vec::new();
    for received in slices {
        let is_zero = match is_device_dax(&received.file)? {
            true => is_zero_mapped(received, verify_mib)?,
            false => {
                is_zero(&received.file, received.offset, received.offset.saturating_add(received.bytes))?
            }
        };
        if !is_zero {
            dirty.push(received.slice);
        }
    }
    Ok(dirty)
}

/// Returns whether a file is a device-dax device, which has no holes and can only be mapped.
fn is_device_dax(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.file_type().is_char_device())
}

fn is_zero_mapped(received: &ReceivedSlice, verify_mib: Option<u64>) -> io::Result<bool> {
    let memory = map_slice_shared(received)?;
    let steps = verify_mib.map_or(usize::MAX, |mib| usize::try_from(mib).unwrap_or(usize::MAX));
    let mut bytes = vec![0; MIB];
    for at in (0..memory.size()).step_by(MIB).take(steps) {
        memory.as_volatile_slice().read_slice(&mut bytes, at).map_err(io::Error::other)?;
        if bytes != ZEROS {
            return Ok(false);
        }
    }
    Ok(true)
}

fn is_zero(file: &File, from: u64, end: u64) -> io::Result<bool> {
    if file.metadata()?.len() < end {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the slice is truncated"));
    }
    let mut at = from;
    while at < end {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) if start < end => start,
            Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        };
        let stop = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(end);
        if !is_zero_range(file, start, stop)? {
            return Ok(false);
        }
        at = stop;
    }
    Ok(true)
}

fn is_zero_range(file: &File, mut at: u64, end: u64) -> io::Result<bool> {
    let mut bytes = vec![0; MIB];
    while at < end {
        let length = usize::try_from(end - at).map_or(MIB, |remaining| remaining.min(MIB));
        file.read_exact_at(&mut bytes[..length], at)?;
        if bytes[..length] != ZEROS[..length] {
            return Ok(false);
        }
        at += length as u64;
    }
    Ok(true)
}

/// Maps a slice and closes its file descriptor. The mapping stays valid.
fn map_slice(received: ReceivedSlice) -> io::Result<Slice> {
    let memory = map_slice_shared(&received)?;
    Ok(Slice { number: received.slice, epoch: received.epoch, memory })
}

fn map_slice_shared(received: &ReceivedSlice) -> io::Result<MmapRegion> {
    let bytes = usize::try_from(received.bytes).ok().filter(|bytes| *bytes as u64 == SLICE.get());
    let bytes = bytes.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the slice is not 1 GiB"))?;
    let file = FileOffset::new(received.file.try_clone()?, received.offset);
    MmapRegion::from_file(file, bytes).map_err(io::Error::other)
}

/// Returns the pattern of a VM for one MiB of a slice, by its index. The pattern is unique for the
/// owner and the slice, and contains no zero bytes.
fn pattern(vm: &str, slice: u32, epoch: u64, mib_index: usize) -> Vec<u8> {
    let text = format!("{vm} {slice} {epoch} {mib_index}\n");
    let mut bytes = text.repeat(MIB.div_ceil(text.len())).into_bytes();
    bytes.truncate(MIB);
    bytes
}

fn write_pattern(slice: &Slice, vm: &str, touched_bytes: usize) -> io::Result<()> {
    let memory = slice.memory.as_volatile_slice();
    for at in (0..touched_bytes).step_by(MIB) {
        let bytes = pattern(vm, slice.number, slice.epoch, at / MIB);
        memory.write_slice(&bytes, at).map_err(io::Error::other)?;
    }
    Ok(())
}

fn is_pattern_intact(slice: &Slice, vm: &str, touched_bytes: usize) -> io::Result<bool> {
    let memory = slice.memory.as_volatile_slice();
    let mut bytes = vec![0; MIB];
    for at in (0..touched_bytes).step_by(MIB) {
        memory.read_slice(&mut bytes, at).map_err(io::Error::other)?;
        if bytes != pattern(vm, slice.number, slice.epoch, at / MIB) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received_slice() -> ReceivedSlice {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SLICE.get()).unwrap();
        ReceivedSlice { slice: 5, epoch: 2, offset: 0, bytes: SLICE.get(), file }
    }

    #[test]
    fn slice_with_one_nonzero_byte_is_dirty() {
        let received = received_slice();
        assert_eq!(find_dirty_slices(std::slice::from_ref(&received), None).unwrap(), [0; 0]);
        received.file.write_all_at(&[0; 9], 12_345).unwrap();
        assert_eq!(
            find_dirty_slices(std::slice::from_ref(&received), None).unwrap(),
            [0; 0],
            "written zeros are not dirty"
        );
        received.file.write_all_at(&[1], SLICE.get() - 1).unwrap();
        assert_eq!(find_dirty_slices(&[received], None).unwrap(), [5]);
    }

    #[test]
    fn truncated_slice_is_an_error() {
        let received = received_slice();
        received.file.set_len(4096).unwrap();
        assert!(find_dirty_slices(&[received], None).is_err());
    }

    #[test]
    fn pattern_overwritten_by_another_vm_is_detected() {
        let received = received_slice();
        let file = received.file.try_clone().unwrap();
        let slice = map_slice(received).unwrap();
        write_pattern(&slice, "a", 2 * MIB).unwrap();
        assert!(is_pattern_intact(&slice, "a", 2 * MIB).unwrap());
        assert!(!is_pattern_intact(&slice, "b", MIB).unwrap());
        file.write_all_at(b"x", MIB as u64 + 7).unwrap();
        assert!(is_pattern_intact(&slice, "a", MIB).unwrap());
        assert!(!is_pattern_intact(&slice, "a", 2 * MIB).unwrap());
    }
}
