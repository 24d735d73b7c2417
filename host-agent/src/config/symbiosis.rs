//! Section `[symbiosis]` of host.toml: the tenants, the local memory and the link to remote memory
//! that they share, and the enforcement of shares.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use fairness::market::Supply;
use units::{
    Name, Ns,
    limits::{
        LINK_BANDWIDTH_MB_S_MAX, LOCAL_MEMORY_MIB_PER_HOST_MAX, SHARES_EPOCH_DEFAULT, SHARES_EPOCH_MAX,
        SHARES_EPOCH_MIN, TENANTS_PER_HOST_MAX, WEIGHT_MAX, WEIGHT_MIN, is_weight,
    },
};

use config_file::{Field, Section};

/// Settings of Symbiosis.
#[derive(Clone, Debug, PartialEq)]
pub struct Symbiosis {
    /// Directory of cgroup v2. Each child cgroup is a tenant.
    pub cgroups: PathBuf,
    /// Resources that the tenants share.
    pub supply: Supply,
    /// Interval between decisions on shares.
    pub epoch: Ns,
    /// Default for the enforcement of shares.
    pub enforce: EnforcementMethod,
    /// Swap device that holds the tenants' remote memory.
    pub remote: PathBuf,
    /// Settings of tenants that differ from the defaults.
    pub tenants: BTreeMap<Name, TenantSettings>,
}

/// Method of enforcing a tenant's share.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum EnforcementMethod {
    /// The kernel swaps out memory above the share; swapping is limited to the share of the link.
    Swap,
    /// The share of local memory is the tenant's protection in fair tiering. Without fair tiering, it is only
    /// reported.
    Tiered,
    /// The share is only reported.
    Advise,
}

impl EnforcementMethod {
    /// Returns the name of this method in host.toml.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Swap => "swap",
            Self::Tiered => "tiered",
            Self::Advise => "advise",
        }
    }
}

impl EnforcementMethod {
    /// Returns the reason why this method does not enforce the share of a tenant. Empty if it does, or if it
    /// only reports shares by design. `has_tiering` means that fair tiering is enabled.
    pub const fn unenforced_reason(self, is_vm: bool, has_tiering: bool) -> &'static str {
        match self {
            Self::Tiered if is_vm => {
                "the share is not enforced: the reservation determines the memory of VMs"
            }
            Self::Tiered if !has_tiering => "the share is not enforced: host.toml has no section [tiering]",
            Self::Swap | Self::Tiered | Self::Advise => "",
        }
    }
}

/// Validated settings of one tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TenantSettings {
    /// Weight of the tenant; a weight set by the scheduler has precedence.
    pub weight: f64,
    /// Guaranteed local memory, in MiB.
    pub least_mib: u64,
    /// Method of enforcing the tenant's share.
    pub enforce: EnforcementMethod,
}

pub(super) fn parse(mut section: Section<'_>, base: &Path) -> Option<Symbiosis> {
    let cgroups = section.take_required("cgroups", |field| field.to_path(base));
    let memory_mib =
        section.take_required("memory_mib", |field| field.to_integer(1..=LOCAL_MEMORY_MIB_PER_HOST_MAX));
    let bandwidth_mb_s =
        section.take_required("bandwidth_mb_s", |field| field.to_integer(1..=LINK_BANDWIDTH_MB_S_MAX));
    let (min, max) = (SHARES_EPOCH_MIN.as_ms() / 1000, SHARES_EPOCH_MAX.as_ms() / 1000);
    let epoch = section.take_optional("epoch_s", |field| field.to_integer(min..=max).map(Ns::secs));
    let enforce = section.take_required("enforce", parse_enforce);
    let remote = section.take_required("remote", |field| field.to_path(base));
    let tenants = section.take_optional("tenants", |field| field.to_named_section(TENANTS_PER_HOST_MAX));
    section.reject_unknown_keys();
    let tenants = tenants?.map_or(Some(BTreeMap::new()), |tenants| {
        tenants.read_named_fields(|field| parse_tenant(field.read(Field::to_section)?, enforce, memory_mib))
    });
    Some(Symbiosis {
        cgroups: cgroups?,
        supply: Supply::new(memory_mib?, bandwidth_mb_s?),
        epoch: epoch?.unwrap_or(SHARES_EPOCH_DEFAULT),
        enforce: enforce?,
        remote: remote?,
        tenants: tenants?,
    })
}

/// Parses the settings of a tenant. `default` and `memory_mib` are the values of `[symbiosis]`;
/// `None` if they are invalid.
fn parse_tenant(
    mut section: Section<'_>,
    default: Option<EnforcementMethod>,
    memory_mib: Option<u64>,
) -> Option<TenantSettings> {
    let weight = section.take_optional("weight", |field| {
        let weight = field.to_number()?;
        let rule = || format!("must be from {WEIGHT_MIN} to {WEIGHT_MAX}");
        is_weight(weight).then_some(weight).ok_or_else(rule)
    });
    let least_mib =
        section.take_optional("least_mib", |field| match (field.to_integer(0..=u64::MAX)?, memory_mib) {
            (least, Some(memory)) if least > memory => {
                Err(format!("must be at most symbiosis.memory_mib ({memory})"))
            }
            (least, _) => Ok(least),
        });
    let enforce = section.take_optional("enforce", parse_enforce);
    section.reject_unknown_keys();
    Some(TenantSettings {
        weight: weight?.unwrap_or(1.0),
        least_mib: least_mib?.unwrap_or(0),
        enforce: enforce?.or(default)?,
    })
}

fn parse_enforce(field: &Field<'_>) -> Result<EnforcementMethod, String> {
    let text = field.as_str()?;
    let all = [EnforcementMethod::Swap, EnforcementMethod::Tiered, EnforcementMethod::Advise];
    let found = all.into_iter().find(|enforce| enforce.name() == text);
    found.ok_or_else(|| "must be swap, tiered or advise".to_owned())
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
        [symbiosis]
        cgroups = "/sys/fs/cgroup/tenants"
        memory_mib = 2048
        bandwidth_mb_s = 100
        enforce = "swap"
        remote = "/dev/vdb"
    "#;

    fn parse(text: &str) -> Result<Symbiosis, String> {
        let config = Config::parse(text, Path::new("/etc/tarn/host.toml"));
        config.map(|config| config.symbiosis.unwrap()).map_err(|error| units::chain(&error))
    }

    #[track_caller]
    fn assert_rejected(from: &str, to: &str, message: &str) {
        assert!(MINIMAL_CONFIG.contains(from), "MINIMAL_CONFIG does not contain {from:?}");
        let error = parse(&MINIMAL_CONFIG.replacen(from, to, 1)).unwrap_err();
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn omitted_symbiosis_keys_have_defaults() {
        let symbiosis = parse(MINIMAL_CONFIG).unwrap();
        assert_eq!(symbiosis.epoch, Ns::secs(30));
        assert_eq!(symbiosis.supply, Supply::new(2048, 100));
        let with_tenant = format!("{MINIMAL_CONFIG}[symbiosis.tenants.db]\nweight = 2\nenforce = \"advise\"");
        let tenant = parse(&with_tenant).unwrap().tenants[&Name::new("db").unwrap()];
        assert_eq!(tenant, TenantSettings { weight: 2.0, least_mib: 0, enforce: EnforcementMethod::Advise });
        let with_defaults = parse(&format!("{MINIMAL_CONFIG}[symbiosis.tenants.db]")).unwrap();
        assert_eq!(with_defaults.tenants[&Name::new("db").unwrap()].enforce, EnforcementMethod::Swap);
    }

    #[test]
    fn invalid_value_is_an_error_with_field_value_and_rule() {
        assert_rejected("2048", "0", "symbiosis.memory_mib = 0: must be a whole number from 1 to");
        assert_rejected("100", "0", "symbiosis.bandwidth_mb_s = 0: must be a whole number from 1 to");
        assert_rejected(
            "\"swap\"",
            "\"swop\"",
            "symbiosis.enforce = \"swop\": must be swap, tiered or advise",
        );
        assert_rejected("remote", "#", "symbiosis.remote: is missing");
        assert_rejected(
            "remote",
            "epoch_s = 0\nremote",
            "symbiosis.epoch_s = 0: must be a whole number from 1 to 3600",
        );
    }

    #[test]
    fn invalid_tenant_is_an_error_with_its_name() {
        let assert_rejected = |tenant: &str, message: &str| {
            let error = parse(&format!("{MINIMAL_CONFIG}{tenant}")).unwrap_err();
            assert!(error.contains(message), "{error}");
        };
        let tenant = |line: &str| format!("[symbiosis.tenants.db]\n{line}");
        let rule = "symbiosis.tenants.db.weight = 0: must be from 0.01 to 10000";
        assert_rejected(&tenant("weight = 0"), rule);
        let rule = "symbiosis.tenants.db.least_mib = 9999: must be at most symbiosis.memory_mib (2048)";
        assert_rejected(&tenant("least_mib = 9999"), rule);
        assert_rejected(&tenant("wieght = 1"), "symbiosis.tenants.db.wieght: unknown key");
        assert_rejected(&tenant("enforce = \"no\""), "symbiosis.tenants.db.enforce = \"no\": must be swap");
        assert_rejected("[symbiosis.tenants]\n\"../db\" = {}", "\"../db\" is not a name");
        assert_rejected("[symbiosis.tenants]\ndb = 1", "symbiosis.tenants.db = 1: must be a table");
        let many: String =
            (0..=TENANTS_PER_HOST_MAX).map(|n| format!("[symbiosis.tenants.t{n}]\n")).collect();
        assert_rejected(&many, "has 257 names: must have at most 256");
    }
}
