//! Section `[symbiosis]` of host.toml: the tenants, the local memory and the link to remote memory
//! that they share, and the enforcement of shares.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use fairness::market::Supply;
use serde::Deserialize;
use units::{
    Name, Ns,
    limits::{
        EPOCH_DEFAULT, EPOCH_MAX, EPOCH_MIN, LINK_MB_S_MAX, LOCAL_MIB_PER_HOST_MAX, TENANTS_PER_HOST_MAX,
        WEIGHT_MAX, WEIGHT_MIN, is_weight,
    },
};

use super::{InvalidValue, invalid};

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
    pub enforce: Enforce,
    /// Swap device that holds the tenants' remote memory.
    pub remote: PathBuf,
    /// Settings of tenants that differ from the defaults.
    pub tenants: BTreeMap<Name, TenantSettings>,
}

/// Way in which a tenant's share is enforced.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Enforce {
    /// The kernel swaps out memory above the share; swapping is limited to the share of the link.
    Swap,
    /// The share is a target for a program that migrates pages between local and pool memory. There
    /// is no such program yet, so the share is only reported.
    Tiered,
    /// The share is only reported.
    Advise,
}

impl Enforce {
    /// Returns the name of this way in host.toml.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Swap => "swap",
            Self::Tiered => "tiered",
            Self::Advise => "advise",
        }
    }
}

impl Enforce {
    /// Returns the reason why shares are not enforced in this way; empty if they are, or are only
    /// reported by intention.
    pub const fn limitation(self) -> &'static str {
        match self {
            Self::Tiered => {
                "the share is not enforced: migration of pages between local and pool memory is not implemented"
            }
            Self::Swap | Self::Advise => "",
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
    /// Way in which the tenant's share is enforced.
    pub enforce: Enforce,
}

/// Contents of the section before validation.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawSymbiosis {
    cgroups: PathBuf,
    memory_mib: u64,
    bandwidth_mb_s: u64,
    epoch_s: Option<u64>,
    enforce: String,
    remote: PathBuf,
    #[serde(default)]
    tenants: BTreeMap<String, RawTenantSettings>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTenantSettings {
    weight: Option<f64>,
    least_mib: Option<u64>,
    enforce: Option<String>,
}

pub(super) fn check(raw: RawSymbiosis, base: &Path) -> Result<Symbiosis, InvalidValue> {
    let enforce = check_enforce("symbiosis.enforce", &raw.enforce)?;
    let supply = Supply {
        memory_mib: check_amount("symbiosis.memory_mib", raw.memory_mib, LOCAL_MIB_PER_HOST_MAX)?,
        bandwidth_mb_s: check_amount("symbiosis.bandwidth_mb_s", raw.bandwidth_mb_s, LINK_MB_S_MAX)?,
    };
    if raw.tenants.len() > TENANTS_PER_HOST_MAX {
        let rule = format!("must be at most {TENANTS_PER_HOST_MAX}");
        return Err(invalid("symbiosis.tenants", raw.tenants.len(), rule));
    }
    let tenant = |(name, settings): (&String, &RawTenantSettings)| {
        let name = Name::new(name).map_err(|error| invalid("symbiosis.tenants", name, error))?;
        let add_name = |invalid: InvalidValue| InvalidValue {
            rule: format!("{} (tenant {name})", invalid.rule),
            ..invalid
        };
        let settings = check_tenant(settings, enforce, supply).map_err(add_name)?;
        Ok((name, settings))
    };
    let tenants =
        raw.tenants.iter().map(tenant).collect::<Result<BTreeMap<Name, TenantSettings>, InvalidValue>>()?;
    Ok(Symbiosis {
        cgroups: base.join(raw.cgroups),
        supply,
        epoch: check_epoch(raw.epoch_s)?,
        enforce,
        remote: base.join(raw.remote),
        tenants,
    })
}

fn check_tenant(
    raw: &RawTenantSettings,
    enforce: Enforce,
    supply: Supply,
) -> Result<TenantSettings, InvalidValue> {
    let weight = raw.weight.unwrap_or(1.0);
    if !is_weight(weight) {
        let rule = format!("must be from {WEIGHT_MIN} to {WEIGHT_MAX}");
        return Err(invalid("symbiosis.tenants.weight", weight, rule));
    }
    let least_mib = raw.least_mib.unwrap_or(0);
    if least_mib > supply.memory_mib {
        let rule = format!("must be at most symbiosis.memory_mib ({})", supply.memory_mib);
        return Err(invalid("symbiosis.tenants.least_mib", least_mib, rule));
    }
    let enforce = match &raw.enforce {
        Some(text) => check_enforce("symbiosis.tenants.enforce", text)?,
        None => enforce,
    };
    Ok(TenantSettings { weight, least_mib, enforce })
}

fn check_enforce(field: &'static str, text: &str) -> Result<Enforce, InvalidValue> {
    let all = [Enforce::Swap, Enforce::Tiered, Enforce::Advise];
    let found = all.into_iter().find(|enforce| enforce.name() == text);
    found.ok_or_else(|| invalid(field, text, "must be swap, tiered or advise"))
}

fn check_amount(field: &'static str, value: u64, max: u64) -> Result<u64, InvalidValue> {
    let rule = format!("must be from 1 to {max}");
    if (1..=max).contains(&value) { Ok(value) } else { Err(invalid(field, value, rule)) }
}

fn check_epoch(seconds: Option<u64>) -> Result<Ns, InvalidValue> {
    let (min, max) = (EPOCH_MIN.as_ms() / 1000, EPOCH_MAX.as_ms() / 1000);
    match seconds {
        None => Ok(EPOCH_DEFAULT),
        Some(seconds) if (min..=max).contains(&seconds) => Ok(Ns::secs(seconds)),
        Some(seconds) => {
            Err(invalid("symbiosis.epoch_s", seconds, format!("must be from {min} to {max} seconds")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const MINIMAL: &str = r#"
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
        assert!(MINIMAL.contains(from), "MINIMAL does not contain {from:?}");
        let error = parse(&MINIMAL.replacen(from, to, 1)).unwrap_err();
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn omitted_symbiosis_keys_have_defaults() {
        let symbiosis = parse(MINIMAL).unwrap();
        assert_eq!(symbiosis.epoch, Ns::secs(30));
        assert_eq!(symbiosis.supply, Supply { memory_mib: 2048, bandwidth_mb_s: 100 });
        let with_tenant = format!("{MINIMAL}[symbiosis.tenants.db]\nweight = 2\nenforce = \"advise\"");
        let tenant = parse(&with_tenant).unwrap().tenants[&Name::new("db").unwrap()];
        assert_eq!(tenant, TenantSettings { weight: 2.0, least_mib: 0, enforce: Enforce::Advise });
        let with_defaults = parse(&format!("{MINIMAL}[symbiosis.tenants.db]")).unwrap();
        assert_eq!(with_defaults.tenants[&Name::new("db").unwrap()].enforce, Enforce::Swap);
    }

    #[test]
    fn invalid_value_is_an_error_with_field_value_and_rule() {
        assert_rejected("2048", "0", "symbiosis.memory_mib = \"0\": must be from 1 to");
        assert_rejected("100", "0", "symbiosis.bandwidth_mb_s = \"0\": must be from 1 to");
        assert_rejected(
            "\"swap\"",
            "\"swop\"",
            "symbiosis.enforce = \"swop\": must be swap, tiered or advise",
        );
        assert_rejected("remote", "#", "missing field `remote`");
        assert_rejected(
            "remote",
            "epoch_s = 0\nremote",
            "symbiosis.epoch_s = \"0\": must be from 1 to 3600 seconds",
        );
        let tenant = |line: &str| format!("[symbiosis.tenants.db]\n{line}\n#");
        assert_rejected(
            "remote = \"/dev/vdb\"",
            &format!("remote = \"/dev/vdb\"\n{}", tenant("weight = 0")),
            "tenants.weight = \"0\": must be from 0.01 to 10000 (tenant db)",
        );
        assert_rejected(
            "remote = \"/dev/vdb\"",
            &format!("remote = \"/dev/vdb\"\n{}", tenant("least_mib = 9999")),
            "at most symbiosis.memory_mib (2048)",
        );
        assert_rejected(
            "remote = \"/dev/vdb\"",
            &format!("remote = \"/dev/vdb\"\n{}", tenant("wieght = 1")),
            "unknown field `wieght`",
        );
    }
}
