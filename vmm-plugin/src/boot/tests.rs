//! Tests of the loaders with hostile kernels and initrds. Each image is either loaded at allowed
//! addresses or rejected.

use std::io::Write as _;

use proptest::prelude::*;
use tempfile::NamedTempFile;
use units::Bytes;

use super::*;
use crate::layout::{Local, Performance, Pool, Shape};

const LOCAL_MIB: u64 = 64;

fn layout(pool: u32) -> Layout {
    let local = Local { cpus: 1, memory: Bytes::mib(LOCAL_MIB), performance: Performance::LOCAL };
    let pool = (pool > 0).then_some(Pool { slices: pool, performance: Performance::POOL });
    Layout::new(&Shape { local: vec![local], pool: pool.into_iter().collect() }, 48).unwrap()
}

fn memory(layout: &Layout) -> GuestMemory {
    let bytes = |range: &std::ops::Range<u64>| usize::try_from(range.end - range.start).unwrap();
    let ranges: Vec<_> =
        layout.regions.iter().map(|p| (GuestAddress(p.range.start), bytes(&p.range))).collect();
    GuestMemory::from_ranges(&ranges).unwrap()
}

fn image_file(content: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(content).unwrap();
    file
}

/// Overwrites the bytes of an image at an offset.
fn write_at(image: &mut [u8], at: usize, value: &[u8]) {
    image[at..at + value.len()].copy_from_slice(value);
}

/// Header fields of a bzImage that the loader reads.
#[derive(Clone, Debug)]
struct Header {
    setup_sectors: u8,
    start: u32,
    initrd_max: u32,
    preferred: u64,
    needs: u32,
}

impl Header {
    const LINUX: Self = Self {
        setup_sectors: 1,
        start: 0x10_0000,
        initrd_max: 0x7fff_ffff,
        preferred: 0x100_0000,
        needs: 0x10_0000,
    };

    fn to_image(&self) -> Vec<u8> {
        let mut image = vec![0x90; 8192];
        image[0x1f1] = self.setup_sectors;
        write_at(&mut image, 0x1f4, &[0; 4]); // with size 0, an image of any length is complete
        image[0x211] = 1;
        write_at(&mut image, 0x202, b"HdrS\x0f\x02");
        image[0x236] = 1;
        write_at(&mut image, 0x214, &self.start.to_le_bytes());
        write_at(&mut image, 0x22c, &self.initrd_max.to_le_bytes());
        write_at(&mut image, 0x258, &self.preferred.to_le_bytes());
        write_at(&mut image, 0x260, &self.needs.to_le_bytes());
        image
    }
}

/// Fields of an ELF file with one segment. All fields may have arbitrary values.
#[derive(Clone, Debug)]
struct ElfSegment {
    kind: u32,
    offset: u64,
    address: u64,
    in_file: u64,
    in_memory: u64,
    entry: u64,
    count: u16,
    note: [u32; 3],
}

impl ElfSegment {
    fn to_image(&self) -> Vec<u8> {
        let mut image = vec![0; 1024];
        write_at(&mut image, 0, b"\x7fELF\x02\x01\x01");
        write_at(&mut image, 24, &self.entry.to_le_bytes());
        write_at(&mut image, 32, &64_u64.to_le_bytes());
        write_at(&mut image, 54, &56_u16.to_le_bytes());
        write_at(&mut image, 56, &self.count.to_le_bytes());
        write_at(&mut image, 64, &self.kind.to_le_bytes());
        for (field, value) in
            (1..).zip([self.offset, self.address, self.address, self.in_file, self.in_memory])
        {
            write_at(&mut image, 64 + 8 * field, &value.to_le_bytes());
        }
        for (at, word) in (512..).step_by(4).zip(self.note) {
            write_at(&mut image, at, &word.to_le_bytes());
        }
        write_at(&mut image, 524, b"Xen\0\x00\x00\x10\x00");
        image
    }
}

/// Generates numbers near boundary values, and arbitrary numbers.
fn arbitrary_u64() -> impl Strategy<Value = u64> {
    let boundaries = [0, 1, 64, 512, 1 << 20, 3 << 30, 1 << 32, LOCAL_MIB << 20, 1 << 63, u64::MAX];
    let near = prop::sample::select(boundaries.to_vec());
    prop_oneof![(near, -2..3_i64).prop_map(|(near, by)| near.wrapping_add_signed(by)), any::<u64>()]
}

fn arbitrary_u32() -> impl Strategy<Value = u32> {
    arbitrary_u64().prop_map(|number| u32::try_from(number & u64::from(u32::MAX)).unwrap())
}

fn arbitrary_headers() -> impl Strategy<Value = Header> {
    let start = prop_oneof![3 => Just(0x10_0000), 1 => arbitrary_u32()];
    (any::<u8>(), start, arbitrary_u32(), arbitrary_u64(), arbitrary_u32()).prop_map(
        |(setup_sectors, start, initrd_max, preferred, needs)| Header {
            setup_sectors: setup_sectors % 20,
            start,
            initrd_max,
            preferred,
            needs,
        },
    )
}

fn arbitrary_segments() -> impl Strategy<Value = ElfSegment> {
    let address = prop_oneof![Just(1 << 20), arbitrary_u64()];
    let count = prop_oneof![6 => Just(1), 1 => any::<u16>()];
    let kind = prop_oneof![4 => Just(1), 4 => Just(4), 1 => any::<u32>()];
    let offset = prop_oneof![2 => Just(512), 1 => arbitrary_u64()];
    let note = prop_oneof![1 => Just([4, 4, 18]), 1 => (arbitrary_u32(), arbitrary_u32()).prop_map(|(name, desc)| [name, desc, 18])];
    (kind, offset, address, arbitrary_u64(), arbitrary_u64(), arbitrary_entry_addresses(), count, note)
        .prop_map(|(kind, offset, address, in_file, in_memory, entry, count, note)| ElfSegment {
            kind,
            offset,
            address,
            in_file,
            in_memory,
            entry,
            count,
            note,
        })
}

fn arbitrary_entry_addresses() -> impl Strategy<Value = u64> {
    prop_oneof![Just(1 << 20), arbitrary_u64()]
}

/// Loads a kernel image and an initrd, and checks the address of the initrd.
fn load_and_check(image: &[u8], initrd: &[u8], pool: u32) -> Result<(), BootError> {
    let layout = layout(pool);
    let memory = memory(&layout);
    let (image, initrd) = (image_file(image), image_file(initrd));
    let kernel = load_kernel(image.path(), &layout, &memory)?;
    if let Ok((at, bytes)) = load_initrd(initrd.path(), &kernel, &layout, &memory) {
        assert!(at % PAGE_BYTES == 0 && at >= HIGH_MEMORY_START && at >= kernel.kernel_end, "{at:#x}");
        assert!(at + bytes <= layout.low_memory_end(), "{at:#x}");
    }
    let kernel = Kernel {
        kernel: image.path().to_owned(),
        initrd: Some(initrd.path().to_owned()),
        command_line: String::new(),
    };
    load(&kernel, &layout, &[], &memory).map(drop)
}

#[test]
fn initrd_is_placed_as_high_as_the_kernel_allows() {
    let layout = layout(0);
    let memory = memory(&layout);
    let image =
        |header: Header| load_kernel(image_file(&header.to_image()).path(), &layout, &memory).unwrap();
    let initrd = image_file(&[7; 5000]);
    let load = |kernel| load_initrd(initrd.path(), &kernel, &layout, &memory);
    assert_eq!(load(image(Header::LINUX)).unwrap(), ((LOCAL_MIB << 20) - 8192, 5000));
    let low = Header { initrd_max: 0x1ff_ffff, ..Header::LINUX };
    assert_eq!(load(image(low)).unwrap(), (0x200_0000 - 8192, 5000));
    let error = load(image(Header { initrd_max: 0x110_0fff, ..Header::LINUX })).unwrap_err().to_string();
    assert!(error.starts_with("--initrd: 5000 bytes do not fit: 4096 are free"), "{error}");
}

/// Regression test: a device has a size of 0, so an initrd of 0 bytes was loaded.
#[test]
fn kernel_and_initrd_must_be_regular_files() {
    let layout = layout(0);
    let memory = memory(&layout);
    let kernel = load_kernel(image_file(&Header::LINUX.to_image()).path(), &layout, &memory).unwrap();
    let device = Path::new("/dev/zero");
    let errors = [
        load_kernel(device, &layout, &memory).map(drop).unwrap_err(),
        load_initrd(device, &kernel, &layout, &memory).map(drop).unwrap_err(),
    ];
    let errors = errors.map(|error| units::chain(&error));
    assert_eq!(
        errors,
        ["kernel", "initrd"]
            .map(|option| format!("--{option}: cannot read /dev/zero: must be a regular file"))
    );
}

/// Regression test: the end of the kernel overflowed when rounded up to a page.
#[test]
fn kernel_larger_than_guest_memory_is_rejected() {
    let too_large = Header { preferred: u64::MAX, ..Header::LINUX };
    let error = load_and_check(&too_large.to_image(), &[1; 509], 0).unwrap_err().to_string();
    assert!(error.starts_with(&format!("--kernel: {} bytes do not fit", u64::MAX)), "{error}");
}

#[test]
fn elf_with_too_many_segments_is_rejected() {
    let mut image = vec![0; 1 << 20];
    write_at(&mut image, 0, b"\x7fELF");
    write_at(&mut image, 56, &u16::MAX.to_le_bytes());
    let error = load_and_check(&image, &[], 0).unwrap_err().to_string();
    assert!(error.contains("an ELF of 65535 segments"), "{error}");
}

#[test]
fn command_line_too_long_or_with_nul_is_rejected() {
    let memory = memory(&layout(0));
    assert!(write_command_line(&"x".repeat(COMMAND_LINE_BYTES_MAX), &memory).is_ok());
    assert!(write_command_line(&"x".repeat(COMMAND_LINE_BYTES_MAX + 1), &memory).is_err());
    assert!(write_command_line("a\0b", &memory).is_err());
}

proptest! {
    #[test]
    fn arbitrary_bzimage_does_not_panic_the_loader(header in arbitrary_headers(), initrd in 0..20_000_usize, bytes in 0..8192_usize) {
        let _ = load_and_check(&header.to_image()[..bytes.max(0x300)], &vec![1; initrd], 1);
    }

    #[test]
    fn arbitrary_elf_does_not_panic_the_loader(segment in arbitrary_segments(), initrd in 0..20_000_usize) {
        let _ = load_and_check(&segment.to_image(), &vec![1; initrd], 1);
    }

    #[test]
    fn arbitrary_file_does_not_panic_the_loader(magic in any::<bool>(), rest in prop::collection::vec(any::<u8>(), 0..800)) {
        let image = [if magic { b"\x7fELF" } else { b"\x7f\0\0\0" }, &rest[..]].concat();
        let _ = load_and_check(&image, &[1], 0);
    }
}
