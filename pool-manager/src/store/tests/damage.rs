//! Test that damages every page of a small store. The entries must be correct, or the store must be
//! rejected as corrupt.

use super::*;

const STORE_PAGE_BYTES: usize = 4096;
/// Bytes of the header with the two commit slots.
const COMMIT_SLOTS: std::ops::Range<usize> = 64..320;
/// Byte of the header with the flags.
const FLAGS_OFFSET: usize = 9;

/// Function that damages the bytes of a store.
type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);

/// Flips bits and bytes, overwrites pages and truncates the file. Nothing may panic, even when the
/// store is closed.
#[test]
fn damage_to_any_page_is_detected_or_harmless() {
    let disk = disk(0);
    let mut test = CrashTest { disk: disk.clone(), ..CrashTest::new(0) };
    test.run().unwrap();
    test.store = None;
    let image = disk.with_bytes(|bytes| bytes.clone());
    let mut rng = SplitMix64(7);
    let (mut harmless, mut detected) = (0, 0);
    for start in (0..image.len()).step_by(STORE_PAGE_BYTES) {
        let at = start + rng.below(STORE_PAGE_BYTES);
        let bit = 1 << rng.below(8);
        let damages: [(&str, Damage<'_>); 7] = [
            ("first byte", &|bytes| bytes[start] ^= 0xff),
            ("a bit", &|bytes| bytes[at] ^= bit),
            ("a byte", &|bytes| bytes[start + at % 64] ^= 0xff),
            ("zeros", &|bytes| bytes[start..start + STORE_PAGE_BYTES].fill(0)),
            ("ones", &|bytes| bytes[start..start + STORE_PAGE_BYTES].fill(0xff)),
            ("truncated before", &|bytes| bytes.truncate(start.max(1))),
            ("truncated within", &|bytes| bytes.truncate(at.max(1))),
        ];
        for (kind, damage) in damages {
            disk.with_bytes(|bytes| {
                bytes.clone_from(&image);
                damage(bytes);
            });
            let opened = RedbStore::open(disk.clone()).and_then(|mut store| {
                let entries = entries(&mut store)?;
                store.commit(&[put(Table::Hosts, b"h", b"0")]).map(|()| entries)
            });
            match opened {
                Ok(entries) => {
                    assert!(
                        entries == test.acknowledged,
                        "wrong entries after damage ({kind}) at offset {at}"
                    );
                    harmless += 1;
                }
                Err(StoreError::Corrupt { .. }) => detected += 1,
                Err(other) => panic!("unexpected error after damage ({kind}) at offset {at}: {other}"),
            }
        }
    }
    assert!(detected > 100 && harmless > 100, "{detected} detected, {harmless} harmless");
}

/// Damages each byte of the commit slots after an unclean stop. The last acknowledged batch must not
/// be lost silently.
#[test]
fn damaged_commit_slot_after_unclean_stop_is_detected() {
    let disk = disk(1);
    let mut test = CrashTest { disk: disk.clone(), ..CrashTest::new(1) };
    test.run().unwrap();
    let image = disk.with_bytes(|bytes| bytes.clone()); // the store is still open
    test.store = None;
    let open_damaged = |at: usize, bits: u8| {
        disk.with_bytes(|bytes| {
            bytes.clone_from(&image);
            bytes[at] ^= bits;
        });
        RedbStore::open(disk.clone()).and_then(|mut store| entries(&mut store))
    };
    assert_eq!(open_damaged(FLAGS_OFFSET, 0).unwrap(), test.acknowledged);
    let mut detected = 0;
    for at in COMMIT_SLOTS.chain([FLAGS_OFFSET]) {
        for bits in [0x01, 0x80, 0xff] {
            match open_damaged(at, bits) {
                Ok(entries) => assert!(entries == test.acknowledged, "byte {at} ^ {bits:#04x}: lost a batch"),
                Err(StoreError::Corrupt { .. }) => detected += 1,
                Err(other) => panic!("byte {at} ^ {bits:#04x}: {other}"),
            }
        }
    }
    assert!(detected >= 3 * 128, "only {detected} damages of the newest slot were detected");
}

/// Flips every combination of bits of the flags, after unclean stops and after a clean stop. The
/// newest commit is in either slot, and the first commit follows a two-phase commit. The last
/// acknowledged batch must not be lost silently.
#[test]
fn any_damage_to_the_flags_keeps_the_last_batch() {
    let disk = disk(2);
    let mut test = CrashTest { disk: disk.clone(), ..CrashTest::new(2) };
    test.run().unwrap();
    test.store = None; // closing makes a two-phase commit
    test.open().unwrap();
    let mut images = Vec::new();
    for _ in 0..4 {
        test.commit().unwrap();
        images.push((disk.with_bytes(|bytes| bytes.clone()), test.acknowledged.clone()));
    }
    test.store = None;
    images.push((disk.with_bytes(|bytes| bytes.clone()), test.acknowledged.clone()));
    for (n, (image, acknowledged)) in images.iter().enumerate() {
        for bits in 0..=u8::MAX {
            disk.with_bytes(|bytes| {
                bytes.clone_from(image);
                bytes[FLAGS_OFFSET] ^= bits;
            });
            let opened = RedbStore::open(disk.clone()).and_then(|mut store| {
                let entries = entries(&mut store)?;
                store.commit(&[put(Table::Hosts, b"h", b"0")]).map(|()| entries)
            });
            match opened {
                Ok(entries) => {
                    assert!(entries == *acknowledged, "batch {n}, flags ^ {bits:#04x}: lost a batch")
                }
                Err(StoreError::Corrupt { .. }) => {
                    assert_ne!(bits & !0b111, 0, "batch {n}, flags ^ {bits:#04x}")
                }
                Err(other) => panic!("batch {n}, flags ^ {bits:#04x}: {other}"),
            }
        }
    }
}
