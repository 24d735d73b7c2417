//! Memory blocks of one slice, switched online and offline together: all of them, or the switched
//! ones are restored and the error names the failed block, the reason, and the state of the others.

use std::{fmt, io, time::Duration};

use crate::host::{
    blocks::{Block, FOLDER},
    interrupt::{self, Steps},
    sysfs::{Sysfs, SysfsError},
};

/// Time for the kernel to empty one block. It moves pages at gigabytes per second, and tries for
/// ever if one is held.
const BLOCK_OFFLINE_MAX: Duration = Duration::from_secs(20);

/// Target state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    /// Be memory of the node, for pages that can be moved and no others.
    Online,
    /// Offline.
    Offline,
}

impl To {
    fn word(self) -> &'static str {
        match self {
            Self::Online => "online_movable",
            Self::Offline => "offline",
        }
    }

    fn back(self) -> Self {
        match self {
            Self::Online => Self::Offline,
            Self::Offline => Self::Online,
        }
    }
}

impl fmt::Display for To {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Online { "online" } else { "offline" })
    }
}

/// Block that did not reach its target state.
#[derive(Debug, thiserror::Error)]
#[error("{block} does not go {to}{}; {done} of {of} blocks had gone {to}, {}", with(*pages_in_use), outcome(back))]
pub struct Refused {
    /// Which one.
    pub block: String,
    /// Target state.
    pub to: To,
    /// Pages in use, if known.
    pub pages_in_use: Option<u64>,
    /// How many had done so before.
    pub done: usize,
    /// How many the slice has.
    pub of: usize,
    /// Result for the other blocks: restored, or the reason why one was not.
    pub back: Result<Vec<String>, Box<SysfsError>>,
    /// Why not.
    #[source]
    pub errno: io::Error,
}

fn with(pages_in_use: Option<u64>) -> String {
    pages_in_use.map_or_else(String::new, |pages| format!(", {pages} of its pages are in use"))
}

fn outcome(back: &Result<Vec<String>, Box<SysfsError>>) -> String {
    match back {
        Ok(blocks) if blocks.is_empty() => "none to put back".to_owned(),
        Ok(blocks) => format!("put back: {}", blocks.join(" ")),
        Err(error) => format!("not all put back: {}", units::chain(error)),
    }
}

/// Switches blocks in this order; those that are so already are passed over.
///
/// # Errors
/// [`Refused`], once the others are restored, or the kernel's error.
pub fn switch(sysfs: &Sysfs, blocks: &[Block], to: To) -> Result<(), Refused> {
    let work = (sysfs.clone(), blocks.to_vec());
    let switched = interrupt::stepwise(BLOCK_OFFLINE_MAX, move |steps| all(&work.0, &work.1, to, steps));
    switched.unwrap_or_else(|errno| {
        let block = blocks.first().map_or_else(String::new, |block| block.name.clone());
        Err(Refused { block, to, pages_in_use: None, done: 0, of: blocks.len(), back: Ok(Vec::new()), errno })
    })
}

fn all(sysfs: &Sysfs, blocks: &[Block], to: To, steps: &Steps<'_>) -> Result<(), Refused> {
    let of = blocks.len();
    let refused = |block: &Block, errno| Refused {
        block: block.name.clone(),
        to,
        pages_in_use: None,
        done: 0,
        of,
        back: Ok(Vec::new()),
        errno,
    };
    if to == To::Online {
        let online = blocks.iter().filter(|block| !block.is_offline());
        online
            .into_iter()
            .try_for_each(|block| see_movable(sysfs, block).map_err(|errno| refused(block, errno)))?;
    }
    let mut done: Vec<&Block> = Vec::new();
    for block in blocks.iter().filter(|block| block.is_offline() == (to == To::Online)) {
        if let Err(error) = tell(sysfs, block, to, steps) {
            let back = put_back(sysfs, &done, to.back(), steps);
            return Err(Refused { done: done.len(), back, ..refused(block, errno(error)) });
        }
        done.push(block);
    }
    Ok(())
}

/// A block onlined by another program may contain pages that never move again.
fn see_movable(sysfs: &Sysfs, block: &Block) -> io::Result<()> {
    let zone = sysfs.text(format!("{FOLDER}/{}/valid_zones", block.name)).map_err(errno)?;
    match zone.as_str() {
        "Movable" => Ok(()),
        zone => Err(io::Error::other(format!("somebody brought it online in zone {zone}, not Movable"))),
    }
}

fn tell(sysfs: &Sysfs, block: &Block, to: To, steps: &Steps<'_>) -> Result<(), SysfsError> {
    steps.next();
    sysfs.write(format!("{FOLDER}/{}/state", block.name), to.word())
}

fn put_back(
    sysfs: &Sysfs,
    blocks: &[&Block],
    to: To,
    steps: &Steps<'_>,
) -> Result<Vec<String>, Box<SysfsError>> {
    blocks
        .iter()
        .rev()
        .map(|block| tell(sysfs, block, to, steps).map(|()| block.name.clone()))
        .collect::<Result<_, _>>()
        .map_err(Box::new)
}

fn errno(error: SysfsError) -> io::Error {
    match error {
        SysfsError::Write { errno, .. } if errno.kind() == io::ErrorKind::Interrupted => {
            let seconds = BLOCK_OFFLINE_MAX.as_secs();
            io::Error::new(io::ErrorKind::TimedOut, format!("given up after {seconds} s"))
        }
        SysfsError::Write { errno, .. } | SysfsError::Read { errno, .. } => errno,
        other => io::Error::other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sysfs::made_up::MadeUp;

    fn block(number: u32, state: &str) -> Block {
        Block { name: format!("memory{number}"), state: state.to_owned() }
    }

    fn state(made_up: &MadeUp, number: u32) -> String {
        made_up.sysfs.text(format!("{FOLDER}/memory{number}/state")).unwrap()
    }

    /// Three blocks, of which the last does not exist for writes.
    fn machine(state: &str) -> (MadeUp, Vec<Block>) {
        let made_up = MadeUp::new(&[]);
        for number in [1, 2] {
            made_up.files(&format!("{FOLDER}/memory{number}"), &[("state", state)]);
        }
        (made_up, [1, 2, 3].map(|number| block(number, state)).to_vec())
    }

    #[test]
    fn switch_skips_blocks_already_in_target_state() {
        let (made_up, mut blocks) = machine("offline");
        blocks[2].state = "online".to_owned();
        made_up.files(&format!("{FOLDER}/memory3"), &[("valid_zones", "Movable")]);
        switch(&made_up.sysfs, &blocks, To::Online).unwrap();
        assert_eq!(
            (state(&made_up, 1).as_str(), state(&made_up, 2).as_str()),
            ("online_movable", "online_movable")
        );
    }

    #[test]
    fn block_online_in_unmovable_zone_is_rejected() {
        let (made_up, mut blocks) = machine("offline");
        blocks[2].state = "online".to_owned();
        made_up.files(&format!("{FOLDER}/memory3"), &[("valid_zones", "Normal")]);
        let said = units::chain(&switch(&made_up.sysfs, &blocks, To::Online).unwrap_err());
        assert!(said.ends_with("somebody brought it online in zone Normal, not Movable"), "{said}");
        assert_eq!(state(&made_up, 1), "offline");
    }

    #[test]
    fn failed_switch_restores_blocks_and_names_the_cause() {
        let (made_up, blocks) = machine("online");
        let refused = switch(&made_up.sysfs, &blocks, To::Offline).unwrap_err();
        assert!(
            state(&made_up, 1).starts_with("online_movable")
                && state(&made_up, 2).starts_with("online_movable")
        );
        let said = units::chain(&Refused { pages_in_use: Some(17), ..refused });
        assert_eq!(
            said,
            "memory3 does not go offline, 17 of its pages are in use; 2 of 3 blocks had gone offline, put back: memory2 \
             memory1: No such file or directory (os error 2)"
        );
    }
}
