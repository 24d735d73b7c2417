//! Section `[tiering]` of host.toml: the tenants whose pages move between local and slower memory, the
//! memory that they share, and the limits on the rate of page moves.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use config_file::{Field, Section};
use units::{
    Bytes, Name, Ns,
    limits::{
        LOCAL_MEMORY_MIB_PER_HOST_MAX, PAGE_MOVES_MIB_PER_S_DEFAULT, PAGE_MOVES_MIB_PER_S_MAX,
        TENANTS_PER_HOST_MAX, TIERING_STEP_DEFAULT, TIERING_STEP_MAX, TIERING_STEP_MIN,
    },
};

/// Settings of fair tiering.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tiering {
    /// Directory of cgroup v2. Each child cgroup is a tenant.
    pub cgroups: PathBuf,
    /// Local memory that the tenants share; `None` for all memory of nodes with processors.
    pub local: Option<Bytes>,
    /// Slower memory that the tenants share; `None` for all memory of nodes without processors, or of the
    /// reservation.
    pub slow: Option<Bytes>,
    /// Reservation whose slices are slower memory of the tenants, by its VM name. The backend
    /// `memory_block` requires it, because the other slices belong to VMs.
    pub reservation: Option<Name>,
    /// Interval between decisions.
    pub step: Ns,
    /// Rate limit of demotions of all tenants together, in bytes per second.
    pub demotion_bytes_per_s: u64,
    /// Rate limit of promotions of all tenants together, in bytes per second.
    pub promotion_bytes_per_s: u64,
    /// Settings of tenants that differ from the defaults.
    pub tenants: BTreeMap<Name, TenantSettings>,
}

/// Validated settings of one tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantSettings {
    /// Local memory that demotion does not take from the tenant while the tenant uses it.
    pub protection: Option<Bytes>,
    /// Local memory that the tenant may use at most, also if more is free.
    pub bound: Option<Bytes>,
}

pub(super) fn parse(mut section: Section<'_>, base: &Path) -> Option<Tiering> {
    let mib = |field: &Field<'_>| field.to_integer(1..=LOCAL_MEMORY_MIB_PER_HOST_MAX).map(Bytes::mib);
    let rate = |field: &Field<'_>| field.to_integer(1..=PAGE_MOVES_MIB_PER_S_MAX);
    let cgroups = section.take_required("cgroups", |field| field.to_path(base));
    let local = section.take_optional("local_mib", mib);
    let slow = section.take_optional("slow_mib", mib);
    let reservation = section.take_optional("reservation", Field::to_name);
    let (min, max) = (TIERING_STEP_MIN.as_ms() / 1000, TIERING_STEP_MAX.as_ms() / 1000);
    let step = section.take_optional("step_s", |field| field.to_integer(min..=max).map(Ns::secs));
    let demotion = section.take_optional("demotion_mib_s", rate);
    let promotion = section.take_optional("promotion_mib_s", rate);
    let step_s = step.flatten().unwrap_or(TIERING_STEP_DEFAULT).as_ms() / 1000;
    let moves_huge_pages = promotion.flatten().is_none_or(|mib: u64| mib.saturating_mul(step_s) >= 2);
    let rule = "must be at least 2 MiB (a huge page) per step_s";
    let can_promote = section.check(moves_huge_pages, "promotion_mib_s", rule);
    let tenants = section.take_optional("tenants", |field| field.to_named_section(TENANTS_PER_HOST_MAX));
    section.reject_unknown_keys();
    can_promote?;
    let tenants = tenants?.map_or(Some(BTreeMap::new()), |tenants| {
        tenants.read_named_fields(|field| parse_tenant(field.read(Field::to_section)?, local.flatten()))
    });
    let bytes_per_s = |mib: Option<u64>| Bytes::mib(mib.unwrap_or(PAGE_MOVES_MIB_PER_S_DEFAULT)).get();
    Some(Tiering {
        cgroups: cgroups?,
        local: local?,
        slow: slow?,
        reservation: reservation?,
        step: step?.unwrap_or(TIERING_STEP_DEFAULT),
        demotion_bytes_per_s: bytes_per_s(demotion?),
        promotion_bytes_per_s: bytes_per_s(promotion?),
        tenants: tenants?,
    })
}

/// Parses the settings of a tenant. `local` is the memory that the tenants share, if it is limited and
/// valid.
fn parse_tenant(mut section: Section<'_>, local: Option<Bytes>) -> Option<TenantSettings> {
    let at_most_local = |field: &Field<'_>| {
        let value = Bytes::mib(field.to_integer(0..=LOCAL_MEMORY_MIB_PER_HOST_MAX)?);
        match local {
            Some(local) if value > local => {
                Err(format!("must be at most tiering.local_mib ({})", local.get() / Bytes::mib(1).get()))
            }
            _ => Ok(value),
        }
    };
    let protection = section.take_optional("protection_mib", at_most_local);
    let bound = section.take_optional("bound_mib", at_most_local);
    let is_ordered = match (protection.flatten(), bound.flatten()) {
        (Some(protection), Some(bound)) => protection <= bound,
        _ => true,
    };
    let ordered = section.check(is_ordered, "bound_mib", "must be at least protection_mib");
    section.reject_unknown_keys();
    ordered?;
    Some(TenantSettings { protection: protection?, bound: bound? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const MINIMAL_CONFIG: &str = r#"
        [agent]
        host = "h0"
        runtime_dir = "run"
        token_file = "h0.token"
        [backend]
        kind = "emulated"
        [tiering]
        cgroups = "/sys/fs/cgroup/tenants"
        local_mib = 2048
    "#;

    fn parse(more: &str) -> Result<Tiering, String> {
        let config = Config::parse(&format!("{MINIMAL_CONFIG}{more}"), Path::new("/etc/tarn/host.toml"));
        config.map(|config| config.tiering.unwrap()).map_err(|error| units::chain(&error))
    }

    #[test]
    fn omitted_tiering_keys_have_defaults() {
        let tiering = parse("").unwrap();
        assert_eq!((tiering.local, tiering.slow), (Some(Bytes::gib(2)), None));
        assert_eq!(tiering.step, TIERING_STEP_DEFAULT);
        assert_eq!(tiering.demotion_bytes_per_s, tiering.promotion_bytes_per_s);
        let tiering = parse("[tiering.tenants.db]\nprotection_mib = 80\nbound_mib = 80").unwrap();
        let db = tiering.tenants[&Name::new("db").unwrap()];
        assert_eq!((db.protection, db.bound), (Some(Bytes::mib(80)), Some(Bytes::mib(80))));
    }

    #[test]
    fn invalid_tiering_value_is_an_error_with_field_value_and_rule() {
        for (more, message) in [
            ("step_s = 0", "tiering.step_s = 0: must be a whole number from 1 to 60"),
            ("promotion_mib_s = 0", "tiering.promotion_mib_s = 0: must be a whole number from 1 to"),
            (
                "step_s = 1\npromotion_mib_s = 1",
                "tiering.promotion_mib_s = 1: must be at least 2 MiB (a huge page) per step_s",
            ),
            ("slow_mib = -1", "tiering.slow_mib = -1: must be a whole number from 1 to"),
            ("reservation = \"tenants\"", "must not have it with others"),
            ("loacl_mib = 1", "tiering.loacl_mib: unknown key"),
            (
                "[tiering.tenants.db]\nprotection_mib = 4096",
                "tiering.tenants.db.protection_mib = 4096: must be at most tiering.local_mib (2048)",
            ),
            (
                "[tiering.tenants.db]\nprotection_mib = 90\nbound_mib = 80",
                "tiering.tenants.db.bound_mib = 80: must be at least protection_mib",
            ),
            ("[tiering.tenants]\n\"../db\" = {}", "\"../db\" is not a name"),
        ] {
            let error = parse(more).unwrap_err();
            assert!(error.contains(message), "{more}: {error}");
        }
    }
}
