//! Tests of mappings with files in memory. Tests with emulated hosts use dax devices.

use std::{num::NonZeroU64, os::unix::fs::FileExt as _};

use super::*;

const BYTES: u64 = 5 << 20;

fn file() -> File {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(BYTES).unwrap();
    file
}

fn unthrottled() -> Throttle {
    Throttle::new(NonZeroU64::MAX)
}

#[test]
fn single_nonzero_byte_is_found_anywhere() {
    for at in [0, 1, 63, 64, 4096 + 17, SCRUB_STEP_BYTES as u64 - 1, SCRUB_STEP_BYTES as u64, BYTES - 1] {
        let file = file();
        let mapped = MappedMemory::map(&file, BYTES).unwrap();
        assert_eq!(mapped.first_nonzero_offset(None).unwrap(), None);
        file.write_all_at(b"x", at).unwrap();
        assert_eq!(mapped.first_nonzero_offset(None).unwrap(), Some(at / 64 * 64));
    }
}

#[test]
fn zeroed_memory_is_zero_in_file_and_counted_once() {
    let file = file();
    file.write_all_at(&vec![0xa5; usize::try_from(BYTES).unwrap()], 0).unwrap();
    let mapped = MappedMemory::map(&file, BYTES).unwrap();
    let progress = AtomicU64::new(7);
    mapped.zero(&unthrottled(), &progress).unwrap();
    mapped.flush_caches().unwrap();
    assert_eq!(progress.into_inner(), 7 + BYTES);
    assert_eq!(mapped.first_nonzero_offset(None).unwrap(), None);
    let mut read = vec![1; usize::try_from(BYTES).unwrap()];
    file.read_exact_at(&mut read, 0).unwrap();
    assert!(read.iter().all(|byte| *byte == 0));
}

#[test]
fn flush_keeps_contents_with_either_instruction() {
    let file = file();
    file.write_all_at(b"data", BYTES - 4).unwrap();
    for flush in [FlushInstruction::detect(), FlushInstruction::Clflush] {
        let mapped = MappedMemory { flush, ..MappedMemory::map(&file, BYTES).unwrap() };
        mapped.flush_caches().unwrap();
        assert_eq!(mapped.first_nonzero_offset(None).unwrap(), Some(BYTES - 64));
    }
}

#[test]
fn removed_memory_is_an_error_and_not_zero() {
    let file = file();
    file.write_all_at(&[1], BYTES - 1).unwrap();
    let mapped = MappedMemory::map(&file, BYTES).unwrap();
    file.set_len(BYTES / 2).unwrap();
    let assert_removed =
        |result: io::Result<()>| assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ENXIO));
    let progress = AtomicU64::new(0);
    assert_removed(mapped.zero(&unthrottled(), &progress));
    assert!(progress.into_inner() < BYTES / 2 + 1, "removed memory was counted as zeroed");
    assert_removed(mapped.first_nonzero_offset(None).map(drop));
    assert_removed(mapped.flush_caches());
    file.set_len(BYTES).unwrap();
    assert_removed(mapped.first_nonzero_offset(None).map(drop));
    assert_eq!(MappedMemory::map(&file, BYTES).unwrap().first_nonzero_offset(None).unwrap(), None);
}

#[test]
fn removed_memory_does_not_affect_other_threads() {
    let (intact, lost) = (file(), file());
    lost.set_len(0).unwrap();
    std::thread::scope(|scope| {
        let scrub = |file: &File| MappedMemory::map(file, BYTES)?.zero(&unthrottled(), &AtomicU64::new(0));
        let files = [&intact, &lost].into_iter().cycle().take(8);
        let threads: Vec<_> = files.map(|file| scope.spawn(move || scrub(file))).collect();
        let done: Vec<bool> = threads.into_iter().map(|thread| thread.join().unwrap().is_ok()).collect();
        assert_eq!(done, [true, false, true, false, true, false, true, false]);
    });
}

#[test]
fn unmappable_file_is_rejected() {
    let folder = File::open("/").unwrap();
    MappedMemory::map(&folder, BYTES).unwrap_err();
    for bytes in [0, 65] {
        assert_eq!(MappedMemory::map(&file(), bytes).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
