//! Damage to every page of a small store: reads are right, or fail with a clear error.

use super::*;

const PAGE: usize = 4096;

/// Damages the bytes of a store.
type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);

/// Flipped bits, bytes and pages, and a file cut off anywhere: nothing panics, also not when the store is closed.
#[test]
fn damage_to_any_page_is_found_or_harmless() {
    let disk = disk(0);
    let mut story = Story { disk: disk.clone(), ..Story::new(0) };
    story.work().unwrap();
    story.store = None;
    let image = disk.with_bytes(|bytes| bytes.clone());
    let mut chance = Chance(7);
    let (mut harmless, mut found) = (0, 0);
    for start in (0..image.len()).step_by(PAGE) {
        let at = start + chance.below(PAGE);
        let bit = 1 << chance.below(8);
        let damages: [(&str, Damage<'_>); 7] = [
            ("first byte", &|bytes| bytes[start] ^= 0xff),
            ("a bit", &|bytes| bytes[at] ^= bit),
            ("a byte", &|bytes| bytes[start + at % 64] ^= 0xff),
            ("zeros", &|bytes| bytes[start..start + PAGE].fill(0)),
            ("ones", &|bytes| bytes[start..start + PAGE].fill(0xff)),
            ("cut off before", &|bytes| bytes.truncate(start.max(1))),
            ("cut off within", &|bytes| bytes.truncate(at.max(1))),
        ];
        for (what, damage) in damages {
            disk.with_bytes(|bytes| {
                bytes.clone_from(&image);
                damage(bytes);
            });
            let opened = RedbStore::open(disk.clone()).and_then(|mut store| {
                let facts = facts(&mut store)?;
                store.commit(&[put(Table::Hosts, b"h", b"0")]).map(|()| facts)
            });
            match opened {
                Ok(facts) => {
                    assert!(facts == story.acknowledged, "made up facts: {what} at {at}");
                    harmless += 1;
                }
                Err(StoreError::Corrupt { .. }) => found += 1,
                Err(other) => panic!("{what} at {at}: {other}"),
            }
        }
    }
    assert!(found > 100 && harmless > 100, "{found} found, {harmless} harmless");
}
