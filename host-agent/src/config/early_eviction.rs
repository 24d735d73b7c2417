//! Section `[early_eviction]` of host.toml: the tenants whose memory is evicted before they reach their
//! limit, the swap device that receives it, and the settings of the policy.

use std::path::{Path, PathBuf};

use config_file::{Field, Section};
use tiering::evict::Settings;
use units::{
    Bytes, Fraction, Ns,
    limits::{EVICTION_CYCLE_DEFAULT, EVICTION_CYCLE_MAX, EVICTION_CYCLE_MIN, LOCAL_MEMORY_MIB_PER_HOST_MAX},
};

/// Default for the smallest threshold, in percent of the limit.
const LOWER_PERCENT_DEFAULT: u8 = 50;
/// Default for the distance of the largest threshold from the limit: that of Fastswap.
const RESERVE_MIB_DEFAULT: u64 = 8;
/// Largest eviction rate of a tenant before its first eviction, in MB/s.
const EVICTION_MB_S_MAX: u64 = 1_000_000;
/// Bytes per MB.
const BYTES_PER_MB: u64 = 1_000_000;

/// Settings of early eviction.
#[derive(Clone, Debug, PartialEq)]
pub struct EarlyEviction {
    /// Directory of cgroup v2. Each child cgroup with a memory limit is a tenant.
    pub cgroups: PathBuf,
    /// Swap device that receives the evicted memory.
    pub device: PathBuf,
    /// Settings of the policy.
    pub settings: Settings,
    /// Whether the class of a tenant also determines the priority of its I/O.
    pub io_classes: bool,
}

pub(super) fn parse(mut section: Section<'_>, base: &Path) -> Option<EarlyEviction> {
    let cgroups = section.take_required("cgroups", |field| field.to_path(base));
    let device = section.take_required("device", |field| field.to_path(base));
    let is_adaptive = section.take_optional("threshold", |field| match field.as_str()? {
        "adaptive" => Ok(true),
        "fixed" => Ok(false),
        _ => Err("must be adaptive or fixed".to_owned()),
    });
    let (min, max) = (EVICTION_CYCLE_MIN.as_ms(), EVICTION_CYCLE_MAX.as_ms());
    let cycle = section.take_optional("cycle_ms", |field| field.to_integer(min..=max).map(Ns::ms));
    let lower = section.take_optional("lower_percent", |field| field.to_integer(1..=100_u8));
    let is_fixed = is_adaptive == Some(Some(false));
    let has_range = section.check(
        !is_fixed || matches!(lower, Some(None)),
        "lower_percent",
        "must be omitted with threshold = \"fixed\"",
    );
    let mib = |field: &Field<'_>| field.to_integer(1..=LOCAL_MEMORY_MIB_PER_HOST_MAX);
    let reserve = section.take_optional("reserve_mib", mib);
    let nominal = section.take_optional("nominal_mb_s", |field| field.to_integer(1..=EVICTION_MB_S_MAX));
    let io_classes = section.take_optional("io_classes", Field::to_bool);
    section.reject_unknown_keys();
    has_range?;
    // If the smallest threshold is the limit, it is also the largest one, which is fixed.
    let lower = if is_adaptive?.unwrap_or(true) { lower?.unwrap_or(LOWER_PERCENT_DEFAULT) } else { 100 };
    let settings = Settings {
        cycle: cycle?.unwrap_or(EVICTION_CYCLE_DEFAULT),
        lower: Fraction::new(f64::from(lower) / 100.0).ok()?,
        reserve: Bytes::mib(reserve?.unwrap_or(RESERVE_MIB_DEFAULT)),
        nominal_eviction_bytes_per_s: nominal?
            .map_or(Settings::default().nominal_eviction_bytes_per_s, |mb_s| Bytes::new(mb_s * BYTES_PER_MB)),
        ..Settings::default()
    };
    Some(EarlyEviction {
        cgroups: cgroups?,
        device: device?,
        settings,
        io_classes: io_classes?.unwrap_or(false),
    })
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
        [early_eviction]
        cgroups = "/sys/fs/cgroup/tenants"
        device = "/dev/nbd0"
    "#;

    fn parse(more: &str) -> Result<EarlyEviction, String> {
        let config = Config::parse(&format!("{MINIMAL_CONFIG}{more}"), Path::new("/etc/tarn/host.toml"));
        config.map(|config| config.early_eviction.unwrap()).map_err(|error| units::chain(&error))
    }

    #[test]
    fn omitted_keys_have_the_defaults_of_the_policy() {
        let eviction = parse("").unwrap();
        assert_eq!(eviction.settings, Settings { cycle: Ns::ms(500), ..Settings::default() });
        assert!(!eviction.io_classes);
    }

    #[test]
    fn fixed_threshold_is_the_limit_without_the_reserve() {
        let settings = parse("threshold = \"fixed\"\nreserve_mib = 16").unwrap().settings;
        let limit = Bytes::mib(1000);
        assert_eq!(settings.lower_threshold(limit), Bytes::mib(984));
        assert_eq!(settings.upper_threshold(limit), Bytes::mib(984));
    }

    #[test]
    fn nominal_eviction_rate_is_in_mb_per_second() {
        let settings = parse("nominal_mb_s = 40").unwrap().settings;
        assert_eq!(settings.nominal_eviction_bytes_per_s, Bytes::new(40_000_000));
    }

    #[test]
    fn tenants_of_symbiosis_use_the_same_device() {
        let symbiosis = |cgroups, remote| {
            let more = format!(
                "[symbiosis]\ncgroups = \"{cgroups}\"\nmemory_mib = 100\nbandwidth_mb_s = 10\nenforce = \"swap\"\nremote = \"{remote}\""
            );
            parse(&more).map(drop)
        };
        symbiosis("/sys/fs/cgroup/tenants", "/dev/nbd0").unwrap();
        symbiosis("/sys/fs/cgroup/others", "/dev/vdb").unwrap();
        let error = symbiosis("/sys/fs/cgroup/tenants", "/dev/vdb").unwrap_err();
        assert!(error.contains("device = \"/dev/nbd0\" must be symbiosis.remote (/dev/vdb)"), "{error}");
    }

    #[test]
    fn invalid_value_is_an_error_with_field_value_and_rule() {
        for (more, message) in [
            ("cycle_ms = 99", "early_eviction.cycle_ms = 99: must be a whole number from 100 to 10000"),
            ("lower_percent = 0", "early_eviction.lower_percent = 0: must be a whole number from 1 to 100"),
            ("threshold = \"best\"", "early_eviction.threshold = \"best\": must be adaptive or fixed"),
            ("reserve_mib = 0", "early_eviction.reserve_mib = 0: must be a whole number from 1 to"),
            ("nominal_mb_s = 0", "early_eviction.nominal_mb_s = 0: must be a whole number from 1 to 1000000"),
            (
                "threshold = \"fixed\"\nlower_percent = 60",
                "early_eviction.lower_percent = 60: must be omitted with threshold = \"fixed\"",
            ),
            ("io_classes = 1", "early_eviction.io_classes = 1: must be true or false"),
            ("cylce_ms = 1", "early_eviction.cylce_ms: unknown key"),
            (
                "[tiering]\ncgroups = \"/sys/fs/cgroup/tenants\"",
                "must have other cgroups than [tiering], because both write memory.reclaim",
            ),
        ] {
            let error = parse(more).unwrap_err();
            assert!(error.contains(message), "{more}: {error}");
        }
    }
}
