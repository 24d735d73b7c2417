//! A disk: a raw file (VIRTIO 1.2, section 5.2). What was written is on the host's disk when the guest has flushed it, or, for
//! a driver that never flushes, when the write is answered.

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

use super::{Broken, Chain, Device};
use crate::{confine::threads::Work, memory::GuestMemory};

const KIND: u32 = 2;
const QUEUES: &[u16] = &[256];
/// The unit of addresses, whatever the disk's own is.
const SECTOR: u64 = 512;
/// How much is copied at a time.
const CHUNK: usize = 128 << 10;
/// The length of what a disk says it is called.
const NAME_BYTES: usize = 20;

/// A request may have several buffers, as many as are said.
const SEGMENTS: u64 = 1 << 2;
/// What a queue holds, but for a request's header and status.
const SEGMENTS_MAX: u32 = QUEUES[0] as u32 - 2;
const READ_ONLY: u64 = 1 << 5;
const FLUSH: u64 = 1 << 9;

const STATUS_OK: u8 = 0;
const STATUS_FAILED: u8 = 1;
const STATUS_UNSUPPORTED: u8 = 2;

/// Why a file is no disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// It cannot be used.
    #[error("disk: cannot {doing} {}", path.display())]
    File {
        /// What was tried.
        doing: &'static str,
        /// Which one.
        path: PathBuf,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// Somebody else uses it.
    #[error("disk: {} is in use by another process", .0.display())]
    Locked(PathBuf),
    /// It has no whole number of sectors, or none.
    #[error("disk: {} has {bytes} bytes: must be a whole number of sectors of {SECTOR} bytes, at least one", path.display())]
    Size {
        /// Which one.
        path: PathBuf,
        /// How long it is.
        bytes: u64,
    },
}

/// A disk.
#[derive(Debug)]
pub struct Block {
    file: File,
    sectors: u64,
    read_only: bool,
    /// Whether the driver says when it wants to be sure.
    flushes: bool,
    name: [u8; NAME_BYTES],
    buffer: Vec<u8>,
}

impl Block {
    /// Opens and locks a file.
    ///
    /// # Errors
    /// [`DiskError`]
    pub fn open(path: &Path, read_only: bool) -> Result<Self, DiskError> {
        let failed = |doing| move |errno| DiskError::File { doing, path: path.to_owned(), errno };
        let file = OpenOptions::new().read(true).write(!read_only).open(path).map_err(failed("open"))?;
        let kind = if read_only {
            FlockOperation::NonBlockingLockShared
        } else {
            FlockOperation::NonBlockingLockExclusive
        };
        // Programs lock files in either of two ways, and each sees nothing of the other: QEMU in the second.
        for lock in [flock, fcntl_lock] {
            match lock(&file, kind) {
                Err(Errno::WOULDBLOCK | Errno::ACCESS) => return Err(DiskError::Locked(path.to_owned())),
                other => other.map_err(|errno| failed("lock")(errno.into()))?,
            }
        }
        let bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0));
        let bytes = bytes.map_err(|errno| failed("measure")(errno.into()))?; // also of a block device
        if bytes == 0 || !bytes.is_multiple_of(SECTOR) {
            return Err(DiskError::Size { path: path.to_owned(), bytes });
        }
        let mut name = [0; NAME_BYTES];
        let text = path.file_name().unwrap_or_default().as_encoded_bytes();
        name.iter_mut().zip(text).for_each(|(to, from)| *to = *from);
        let buffer = vec![0; CHUNK];
        Ok(Self { file, sectors: bytes / SECTOR, read_only, flushes: false, name, buffer })
    }

    /// What was asked for, from and into the buffers of a chain; how many bytes were written into them.
    fn perform(
        &mut self,
        request: &Request,
        reader: &mut dyn io::Read,
        writer: &mut dyn io::Write,
    ) -> Result<u64, u8> {
        const IN: u32 = 0;
        const OUT: u32 = 1;
        const FLUSH: u32 = 4;
        const NAME: u32 = 8;
        match request.kind {
            IN => self.read(self.place(request.sector, request.writable)?, request.writable, writer),
            OUT if self.read_only => Err(STATUS_FAILED),
            OUT => self.write(self.place(request.sector, request.readable)?, request.readable, reader),
            FLUSH => self.file.sync_data().map(|()| 0).map_err(|_| STATUS_FAILED),
            NAME => writer.write_all(&self.name).map(|()| NAME_BYTES as u64).map_err(|_| STATUS_FAILED),
            _ => Err(STATUS_UNSUPPORTED),
        }
    }

    /// Where bytes lie, if the disk has them all.
    fn place(&self, sector: u64, bytes: u64) -> Result<u64, u8> {
        let whole = bytes.is_multiple_of(SECTOR);
        let end = sector.checked_add(bytes / SECTOR).filter(|end| whole && *end <= self.sectors);
        end.map(|_| sector * SECTOR).ok_or(STATUS_FAILED)
    }

    fn read(&mut self, at: u64, bytes: u64, writer: &mut dyn io::Write) -> Result<u64, u8> {
        for (at, count) in chunks(at, bytes) {
            let buffer = &mut self.buffer[..count];
            self.file.read_exact_at(buffer, at).map_err(|_| STATUS_FAILED)?;
            writer.write_all(buffer).map_err(|_| STATUS_FAILED)?;
        }
        Ok(bytes)
    }

    fn write(&mut self, at: u64, bytes: u64, reader: &mut dyn io::Read) -> Result<u64, u8> {
        for (at, count) in chunks(at, bytes) {
            let buffer = &mut self.buffer[..count];
            reader.read_exact(buffer).map_err(|_| STATUS_FAILED)?;
            self.file.write_all_at(buffer, at).map_err(|_| STATUS_FAILED)?;
        }
        if !self.flushes {
            self.file.sync_data().map_err(|_| STATUS_FAILED)?;
        }
        Ok(0)
    }
}

fn chunks(at: u64, bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let starts = (0..bytes).step_by(CHUNK);
    starts.map(move |done| (at + done, usize::try_from(bytes - done).unwrap_or(CHUNK).min(CHUNK)))
}

/// The header of a request, and how much room its buffers have beside header and status.
struct Request {
    kind: u32,
    sector: u64,
    readable: u64,
    writable: u64,
}

impl Device for Block {
    fn kind(&self) -> u32 {
        KIND
    }

    fn work(&self) -> Work {
        Work::Disk
    }

    fn features(&self) -> u64 {
        SEGMENTS | FLUSH | if self.read_only { READ_ONLY } else { 0 }
    }

    fn queues(&self) -> &'static [u16] {
        QUEUES
    }

    fn config(&self) -> Vec<u8> {
        let no_size_max = [0; 4];
        [&self.sectors.to_le_bytes()[..], &no_size_max, &SEGMENTS_MAX.to_le_bytes()].concat()
    }

    fn chosen(&mut self, features: u64) {
        self.flushes = features & FLUSH != 0;
    }

    fn serve(&mut self, _: usize, chain: Chain<'_>, memory: &GuestMemory) -> Result<Option<u32>, Broken> {
        let mut reader = chain.clone().reader(memory)?;
        let mut writer = chain.writer(memory)?;
        let (kind, _reserved): (u32, u32) = (reader.read_obj()?, reader.read_obj()?);
        let sector = reader.read_obj()?;
        let room = writer.available_bytes().checked_sub(1).ok_or_else(too_short)?; // its last byte is the status
        let mut status = writer.split_at(room)?;
        let request =
            Request { kind, sector, readable: reader.available_bytes() as u64, writable: room as u64 };
        let (code, written) = match self.perform(&request, &mut reader, &mut writer) {
            Ok(written) => (STATUS_OK, written),
            Err(code) => (code, 0),
        };
        status.write_all(&[code])?;
        Ok(Some(u32::try_from(written + 1).unwrap_or(u32::MAX)))
    }
}

fn too_short() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "no room for a status")
}
