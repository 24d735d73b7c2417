//! Section `[soft_memory]` of host.toml: the size of soft memory, its socket, and the selection of clients that give
//! memory up.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use config_file::{Field, Section};
use soft::budget::Settings;
use units::{
    Bytes, Name, UserId,
    limits::{LOCAL_MEMORY_MIB_PER_HOST_MAX, SOFT_OVER_RECLAIM_PERCENT_MAX, SOFT_TARGETS_MAX},
};

use super::parse_allowed_uids;

/// Name of the socket in the runtime directory if `soft_memory.socket` is not set.
pub(super) const SOCKET_NAME: &str = "soft-memory.sock";
/// Default for the memory that stays available for other use.
const RESERVE_MIB_DEFAULT: u64 = 512;
/// Default for the stalled part of the time, in percent, from which on the memory of the host counts as short.
const STALLED_PERCENT_DEFAULT: u8 = 10;
/// Pages of 4 KiB per MiB.
const PAGES_PER_MIB: u64 = 256;

/// Settings of soft memory.
#[derive(Clone, Debug, PartialEq)]
pub struct SoftMemory {
    /// Socket for clients; `None` for the one in the runtime directory.
    pub socket: Option<PathBuf>,
    /// Users whose processes may use soft memory; `None` for those of `agent.allowed_uids`.
    pub allowed_uids: Option<BTreeSet<UserId>>,
    /// Largest size of soft memory, without slices.
    pub size: Bytes,
    /// Memory of the host that must stay available for other use.
    pub reserve: Bytes,
    /// Part of the time, in percent, in which a process waits for memory (pressure stall information, `some`), from
    /// which on the memory of the host counts as short.
    pub stalled_percent: u8,
    /// Reservation whose slices add to the size of soft memory, by its VM name.
    pub reservation: Option<Name>,
    /// Selection of clients that give memory up.
    pub settings: Settings,
}

impl SoftMemory {
    /// Returns the socket for clients.
    pub(super) fn socket_path(&self, runtime_dir: &Path) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| runtime_dir.join(SOCKET_NAME))
    }

    /// Returns the users whose processes may use soft memory. `agent_uids` are those of `agent.allowed_uids`.
    pub fn users<'a>(&'a self, agent_uids: &'a BTreeSet<UserId>) -> &'a BTreeSet<UserId> {
        self.allowed_uids.as_ref().unwrap_or(agent_uids)
    }
}

pub(super) fn parse(mut section: Section<'_>, base: &Path) -> Option<SoftMemory> {
    let mib = |field: &Field<'_>| field.to_integer(1..=LOCAL_MEMORY_MIB_PER_HOST_MAX);
    let socket = section.take_optional("socket", |field| config_file::to_socket_path(base, field.as_str()?));
    let allowed_uids = parse_allowed_uids(&mut section);
    let size = section.take_required("size_mib", mib);
    let reserve = section.take_optional("reserve_mib", mib);
    let stalled = section.take_optional("stalled_percent", |field| field.to_integer(1..=100_u8));
    let reservation = section.take_optional("reservation", Field::to_name);
    let targets = section.take_optional("targets_max", |field| field.to_integer(1..=SOFT_TARGETS_MAX as u64));
    let percent = section.take_optional("over_reclaim_percent", |field| {
        field.to_integer(0..=u64::from(SOFT_OVER_RECLAIM_PERCENT_MAX))
    });
    let client = section.take_optional("client_mib_max", mib);
    let kept = section.take_optional("client_mib_min", |field| {
        let mib = field.to_integer(0..=LOCAL_MEMORY_MIB_PER_HOST_MAX)?;
        let bounds = [("size_mib", size), ("client_mib_max", client.flatten())];
        match bounds.into_iter().find(|(_, bound)| bound.is_some_and(|bound| mib > bound)) {
            Some((key, bound)) => Err(format!("must be at most {key} = {}", bound.unwrap_or_default())),
            None => Ok(mib),
        }
    });
    section.reject_unknown_keys();
    let defaults = Settings::default();
    let settings = Settings {
        targets_max: targets?.map_or(Some(defaults.targets_max), |max| usize::try_from(max).ok())?,
        over_reclaim_percent: percent?
            .map_or(Some(defaults.over_reclaim_percent), |percent| u32::try_from(percent).ok())?,
        client_pages_max: client?.map_or(defaults.client_pages_max, |mib| mib * PAGES_PER_MIB),
        client_pages_min: kept?.map_or(defaults.client_pages_min, |mib| mib * PAGES_PER_MIB),
    };
    Some(SoftMemory {
        socket: socket?,
        allowed_uids: allowed_uids?,
        size: Bytes::mib(size?),
        reserve: Bytes::mib(reserve?.unwrap_or(RESERVE_MIB_DEFAULT)),
        stalled_percent: stalled?.unwrap_or(STALLED_PERCENT_DEFAULT),
        reservation: reservation?,
        settings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn parse(keys: &str) -> Result<SoftMemory, String> {
        let text = format!(
            "[agent]\nhost = \"h0\"\nruntime_dir = \"run\"\ntoken_file = \"t\"\n[backend]\nkind = \"emulated\"\n\
             [soft_memory]\n{keys}"
        );
        let config = Config::parse(&text, Path::new("/etc/tarn/host.toml"));
        config.map(|config| config.soft_memory.unwrap()).map_err(|error| units::chain(&error))
    }

    #[test]
    fn omitted_keys_have_defaults() {
        let soft_memory = parse("size_mib = 100").unwrap();
        let expected = SoftMemory {
            socket: None,
            allowed_uids: None,
            size: Bytes::mib(100),
            reserve: Bytes::mib(512),
            stalled_percent: 10,
            reservation: None,
            settings: Settings {
                targets_max: 4,
                over_reclaim_percent: 25,
                client_pages_max: 1 << 40,
                client_pages_min: 0,
            },
        };
        assert_eq!(soft_memory, expected);
    }

    #[test]
    fn all_keys_are_read() {
        let soft_memory = parse(
            "socket = \"soft.sock\"\nallowed_uids = [7]\nsize_mib = 100\nreserve_mib = 64\nstalled_percent = 20\n\
             reservation = \"soft\"\ntargets_max = 2\nover_reclaim_percent = 0\nclient_mib_max = 3\n\
             client_mib_min = 2\n",
        );
        let expected = SoftMemory {
            socket: Some("/etc/tarn/soft.sock".into()),
            allowed_uids: Some(BTreeSet::from([UserId::new(7).unwrap()])),
            size: Bytes::mib(100),
            reserve: Bytes::mib(64),
            stalled_percent: 20,
            reservation: Some(Name::new("soft").unwrap()),
            settings: Settings {
                targets_max: 2,
                over_reclaim_percent: 0,
                client_pages_max: 768,
                client_pages_min: 512,
            },
        };
        assert_eq!(soft_memory.unwrap(), expected);
    }

    #[test]
    fn invalid_keys_are_rejected_with_the_rule() {
        let cases = [
            ("", "soft_memory.size_mib: is missing"),
            ("size_mib = 0", "soft_memory.size_mib = 0: must be a whole number from 1 to 67108864"),
            ("size_mib = 1\ntargets_max = 65", "targets_max = 65: must be a whole number from 1 to 64"),
            (
                "size_mib = 1\nover_reclaim_percent = 101",
                "percent = 101: must be a whole number from 0 to 100",
            ),
            ("size_mib = 1\nallowed_uids = []", "soft_memory.allowed_uids = []: must not be empty"),
            ("size_mib = 1\nsize = 1", "size"),
            ("size_mib = 5\nclient_mib_min = 6", "client_mib_min = 6: must be at most size_mib = 5"),
            (
                "size_mib = 5\nclient_mib_max = 3\nclient_mib_min = 4",
                "client_mib_min = 4: must be at most client_mib_max = 3",
            ),
        ];
        for (keys, message) in cases {
            let error = parse(keys).unwrap_err();
            assert!(error.contains(message), "{keys}: {error}");
        }
    }
}
