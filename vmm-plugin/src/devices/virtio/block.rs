//! Block device (VIRTIO 1.2, section 5.2) on a raw image or a block device of the host. Written
//! data is durable on the host after the driver has flushed the device. If the driver does not
//! support FLUSH, data is durable when the write request completes.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, fcntl_lock, flock},
    io::Errno,
};

use super::{Chain, GuestDriverError, VirtioDevice};
use crate::{memory::GuestMemory, thread_role::ThreadRole};

const VIRTIO_ID_BLOCK: u32 = 2;
const QUEUE_SIZES: &[u16] = &[256];
/// Unit of disk addresses in requests, in bytes. The unit does not depend on the disk's block size.
const SECTOR_BYTES: u64 = 512;
/// Number of bytes that are copied at a time between the disk and guest memory.
const IO_CHUNK_BYTES: usize = 128 << 10;
/// Length of the device ID string, in bytes.
const VIRTIO_BLK_ID_BYTES: usize = 20;

/// Feature bit: the device limits the data buffers of a request to `seg_max`.
const VIRTIO_BLK_F_SEG_MAX: u64 = 1 << 2;
/// Maximum number of data buffers per request: the queue size minus the header and the status.
const SEGMENTS_PER_REQUEST_MAX: u32 = QUEUE_SIZES[0] as u32 - 2;
const VIRTIO_BLK_F_RO: u64 = 1 << 5;
const VIRTIO_BLK_F_FLUSH: u64 = 1 << 9;

const VIRTIO_BLK_S_OK: u8 = 0;
const VIRTIO_BLK_S_IOERR: u8 = 1;
const VIRTIO_BLK_S_UNSUPP: u8 = 2;

/// Error returned when a disk cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// A system call failed.
    #[error("--disk: cannot {operation} {}", path.display())]
    File {
        /// Failed operation, completing "cannot …".
        operation: &'static str,
        /// Path of the disk.
        path: PathBuf,
        /// Error returned by the system call.
        #[source]
        errno: io::Error,
    },
    /// Another process holds a flock or fcntl lock on the disk.
    #[error("--disk: {} is in use by another process", .0.display())]
    Locked(PathBuf),
    /// The disk's size is 0 or not a multiple of the sector size.
    #[error("--disk: {} has {bytes} bytes: must be a whole number of sectors of {SECTOR_BYTES} bytes, at least one", path.display())]
    Size {
        /// Path of the disk.
        path: PathBuf,
        /// Size of the disk, in bytes.
        bytes: u64,
    },
}

/// Block device of a guest.
#[derive(Debug)]
pub struct VirtioBlock {
    file: File,
    sectors: u64,
    read_only: bool,
    /// Whether the driver accepted the FLUSH feature.
    driver_flushes: bool,
    device_id: [u8; VIRTIO_BLK_ID_BYTES],
    buffer: Vec<u8>,
}

impl VirtioBlock {
    /// Opens and locks a raw image or a block device of the host.
    ///
    /// # Errors
    /// [`DiskError`] if the disk cannot be opened or is locked, or if its size is invalid.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, DiskError> {
        let failed = |operation| move |errno| DiskError::File { operation, path: path.to_owned(), errno };
        let file = OpenOptions::new().read(true).write(!read_only).open(path).map_err(failed("open"))?;
        let request_type = if read_only {
            FlockOperation::NonBlockingLockShared
        } else {
            FlockOperation::NonBlockingLockExclusive
        };
        // Both kinds of locks are needed, because flock and fcntl locks do not conflict with each
        // other. QEMU uses fcntl locks.
        for lock in [flock, fcntl_lock] {
            match lock(&file, request_type) {
                Err(Errno::WOULDBLOCK | Errno::ACCESS) => return Err(DiskError::Locked(path.to_owned())),
                other => other.map_err(|errno| failed("lock")(errno.into()))?,
            }
        }
        // The metadata of a block device does not contain the size, so seek to the end.
        let bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0));
        let bytes = bytes.map_err(|errno| failed("get the size of")(errno.into()))?;
        if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(DiskError::Size { path: path.to_owned(), bytes });
        }
        let mut device_id = [0; VIRTIO_BLK_ID_BYTES];
        let text = path.file_name().unwrap_or_default().as_encoded_bytes();
        device_id.iter_mut().zip(text).for_each(|(to, from)| *to = *from);
        let buffer = vec![0; IO_CHUNK_BYTES];
        Ok(Self { file, sectors: bytes / SECTOR_BYTES, read_only, driver_flushes: false, device_id, buffer })
    }

    /// Executes a request on the data buffers of a chain. Returns the number of bytes written to
    /// the buffers, or the status byte of an error.
    fn execute(
        &mut self,
        request: &BlockRequest,
        reader: &mut dyn io::Read,
        writer: &mut dyn io::Write,
    ) -> Result<u64, u8> {
        const VIRTIO_BLK_T_IN: u32 = 0;
        const VIRTIO_BLK_T_OUT: u32 = 1;
        const VIRTIO_BLK_T_FLUSH: u32 = 4;
        const VIRTIO_BLK_T_GET_ID: u32 = 8;
        match request.request_type {
            VIRTIO_BLK_T_IN => {
                self.read(self.byte_offset(request.sector, request.writable)?, request.writable, writer)
            }
            VIRTIO_BLK_T_OUT if self.read_only => Err(VIRTIO_BLK_S_IOERR),
            VIRTIO_BLK_T_OUT => {
                self.write(self.byte_offset(request.sector, request.readable)?, request.readable, reader)
            }
            VIRTIO_BLK_T_FLUSH => self.file.sync_data().map(|()| 0).map_err(|_| VIRTIO_BLK_S_IOERR),
            VIRTIO_BLK_T_GET_ID => writer
                .write_all(&self.device_id)
                .map(|()| VIRTIO_BLK_ID_BYTES as u64)
                .map_err(|_| VIRTIO_BLK_S_IOERR),
            _ => Err(VIRTIO_BLK_S_UNSUPP),
        }
    }

    /// Returns the offset of a sector range on the disk, in bytes. Returns an error status if
    /// `bytes` is not a multiple of the sector size or the range exceeds the disk.
    fn byte_offset(&self, sector: u64, bytes: u64) -> Result<u64, u8> {
        let whole = bytes.is_multiple_of(SECTOR_BYTES);
        let end = sector.checked_add(bytes / SECTOR_BYTES).filter(|end| whole && *end <= self.sectors);
        end.map(|_| sector * SECTOR_BYTES).ok_or(VIRTIO_BLK_S_IOERR)
    }

    fn read(&mut self, at: u64, bytes: u64, writer: &mut dyn io::Write) -> Result<u64, u8> {
        for (at, count) in chunk_ranges(at, bytes) {
            let buffer = &mut self.buffer[..count];
            self.file.read_exact_at(buffer, at).map_err(|_| VIRTIO_BLK_S_IOERR)?;
            writer.write_all(buffer).map_err(|_| VIRTIO_BLK_S_IOERR)?;
        }
        Ok(bytes)
    }

    fn write(&mut self, at: u64, bytes: u64, reader: &mut dyn io::Read) -> Result<u64, u8> {
        for (at, count) in chunk_ranges(at, bytes) {
            let buffer = &mut self.buffer[..count];
            reader.read_exact(buffer).map_err(|_| VIRTIO_BLK_S_IOERR)?;
            self.file.write_all_at(buffer, at).map_err(|_| VIRTIO_BLK_S_IOERR)?;
        }
        if !self.driver_flushes {
            self.file.sync_data().map_err(|_| VIRTIO_BLK_S_IOERR)?;
        }
        Ok(0)
    }
}

fn chunk_ranges(at: u64, bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let offsets = (0..bytes).step_by(IO_CHUNK_BYTES);
    offsets.map(move |offset| {
        (at + offset, usize::try_from(bytes - offset).unwrap_or(IO_CHUNK_BYTES).min(IO_CHUNK_BYTES))
    })
}

/// Header of a request, and the size of its data buffers in bytes.
struct BlockRequest {
    request_type: u32,
    sector: u64,
    readable: u64,
    writable: u64,
}

impl VirtioDevice for VirtioBlock {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn thread_role(&self) -> ThreadRole {
        ThreadRole::Block
    }

    fn device_features(&self) -> u64 {
        VIRTIO_BLK_F_SEG_MAX | VIRTIO_BLK_F_FLUSH | if self.read_only { VIRTIO_BLK_F_RO } else { 0 }
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }

    fn config_space(&self) -> Vec<u8> {
        let no_size_max = [0; 4];
        [&self.sectors.to_le_bytes()[..], &no_size_max, &SEGMENTS_PER_REQUEST_MAX.to_le_bytes()].concat()
    }

    fn set_driver_features(&mut self, features: u64) {
        self.driver_flushes = features & VIRTIO_BLK_F_FLUSH != 0;
    }

    fn process_chain(
        &mut self,
        _: usize,
        chain: Chain<'_>,
        memory: &GuestMemory,
    ) -> Result<Option<u32>, GuestDriverError> {
        let mut reader = chain.clone().reader(memory)?;
        let mut writer = chain.writer(memory)?;
        let (request_type, _reserved): (u32, u32) = (reader.read_obj()?, reader.read_obj()?);
        let sector = reader.read_obj()?;
        // The last byte of the chain receives the status.
        let data_bytes = writer.available_bytes().checked_sub(1).ok_or_else(missing_status_error)?;
        let mut status = writer.split_at(data_bytes)?;
        let request = BlockRequest {
            request_type,
            sector,
            readable: reader.available_bytes() as u64,
            writable: data_bytes as u64,
        };
        let (code, written) = match self.execute(&request, &mut reader, &mut writer) {
            Ok(written) => (VIRTIO_BLK_S_OK, written),
            Err(code) => (code, 0),
        };
        status.write_all(&[code])?;
        Ok(Some(u32::try_from(written + 1).unwrap_or(u32::MAX)))
    }
}

fn missing_status_error() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the request has no status byte")
}
