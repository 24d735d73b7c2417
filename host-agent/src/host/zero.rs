//! Zeroing of sparse files, and verification that they are zero. Holes read as zeros, so only
//! allocated parts of a file are read.

use std::{
    fs::File,
    io,
    ops::Range,
    os::{fd::AsFd, unix::fs::FileExt},
};

use rustix::{
    fs::{FallocateFlags, SeekFrom, fallocate, seek},
    io::Errno,
};

/// Number of bytes that one call reads or writes.
const STEP_BYTES: usize = 256 << 10;
static ZEROS: [u8; STEP_BYTES] = [0; STEP_BYTES];

/// Returns the offset of the first non-zero byte, rounded down to the start of the read that found
/// it; `None` if the first `bytes` bytes are zero.
pub(super) fn first_nonzero_offset(file: &File, bytes: u64) -> io::Result<Option<u64>> {
    let mut from = 0;
    while let Some(data) = next_data(file, from, bytes)? {
        if let Some(at) = first_nonzero_offset_in(file, data.clone())? {
            return Ok(Some(at));
        }
        from = data.end;
    }
    Ok(None)
}

/// Zeroes the first `bytes` bytes of a file. Their memory is released if the file system supports
/// hole punching.
pub(super) fn fill_with_zeros(file: &File, bytes: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match fallocate(file.as_fd(), flags, 0, bytes) {
        Err(Errno::OPNOTSUPP) => write_zeros(file, bytes),
        done => Ok(done?),
    }
}

/// Zeroes a file by writing, for file systems without hole punching.
fn write_zeros(file: &File, bytes: u64) -> io::Result<()> {
    split_into_steps(0..bytes).try_for_each(|step| file.write_all_at(zeros_of_length(&step), step.start))
}

/// Returns the next allocated range at or after `from`; `None` if there is only a hole.
pub(super) fn next_data(file: &File, from: u64, bytes: u64) -> io::Result<Option<Range<u64>>> {
    if from >= bytes {
        return Ok(None);
    }
    match seek(file, SeekFrom::Data(from)) {
        Ok(start) => {
            Ok(Some(start..seek(file, SeekFrom::Hole(start))?.min(bytes)).filter(|data| data.start < bytes))
        }
        Err(Errno::NXIO) => Ok(None),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Some(from..bytes)), // no support for holes
        Err(errno) => Err(errno.into()),
    }
}

fn first_nonzero_offset_in(file: &File, data: Range<u64>) -> io::Result<Option<u64>> {
    let mut buffer = vec![0; STEP_BYTES];
    for step in split_into_steps(data) {
        let zeros = zeros_of_length(&step);
        let read = &mut buffer[..zeros.len()];
        file.read_exact_at(read, step.start)?;
        if read != zeros {
            return Ok(Some(step.start));
        }
    }
    Ok(None)
}

fn zeros_of_length(step: &Range<u64>) -> &'static [u8] {
    let bytes = usize::try_from(step.end - step.start).expect("a step has at most STEP_BYTES bytes");
    &ZEROS[..bytes]
}

fn split_into_steps(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    range.step_by(STEP_BYTES).map(move |start| start..end.min(start + STEP_BYTES as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 64 << 20;

    /// Creates a sparse file and writes single bytes, given as offset and value.
    fn sparse_file(writes: &[(u64, u8)]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(BYTES).unwrap();
        for (at, byte) in writes {
            file.write_all_at(&[*byte], *at).unwrap();
        }
        file
    }

    #[test]
    fn single_nonzero_byte_is_found_anywhere() {
        for at in [0, 1, STEP_BYTES as u64 - 1, STEP_BYTES as u64, BYTES / 2 + 17, BYTES - 1] {
            let offset = first_nonzero_offset(&sparse_file(&[(at, 1)]), BYTES)
                .unwrap()
                .expect("a non-zero byte exists");
            assert!(offset <= at && at < offset + STEP_BYTES as u64, "{at} was found at {offset}");
        }
    }

    #[test]
    fn holes_and_written_zeros_are_zero() {
        assert_eq!(first_nonzero_offset(&sparse_file(&[]), BYTES).unwrap(), None);
        assert_eq!(first_nonzero_offset(&sparse_file(&[(5, 0), (BYTES - 1, 0)]), BYTES).unwrap(), None);
    }

    #[test]
    fn zeroed_file_is_zero_and_uses_no_memory() {
        use std::os::unix::fs::MetadataExt;
        let file = sparse_file(&[(0, 7), (BYTES / 2, 8), (BYTES - 1, 9)]);
        fill_with_zeros(&file, BYTES).unwrap();
        assert_eq!(first_nonzero_offset(&file, BYTES).unwrap(), None);
        assert_eq!(file.metadata().unwrap().len(), BYTES);
        assert_eq!(file.metadata().unwrap().blocks(), 0);
    }

    #[test]
    fn zeroing_without_hole_punching_works() {
        let file = sparse_file(&[(0, 7), (BYTES - 1, 9)]);
        write_zeros(&file, BYTES).unwrap();
        assert_eq!(first_nonzero_offset(&file, BYTES).unwrap(), None);
    }
}
