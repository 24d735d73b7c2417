//! Options of `tarn plan`, and their checks.

use std::{fmt, path::PathBuf, str::FromStr};

use clap::{Args, ValueEnum};
use cli_runtime::{Failure, options::duration};
use prediction::operating_point::OperatorLimits;
use serde::{Serialize, Serializer};
use sim::plan::{
    Cluster,
    attachment::{Attachment, AttachmentRule},
    customers::Customers,
    slices::SliceReport,
};
use units::{
    Bytes, Fraction, Ns,
    limits::{
        CORES_PER_HOST_MAX, EMCS_MAX, EMCS_PER_HOST_MAX, HOSTS_MAX, LOCAL_MEMORY_MIB_PER_HOST_MAX,
        PLAN_SAMPLE_INTERVAL_MIN, PLAN_SOCKETS_MAX,
    },
};

use crate::frigid::TableFormat;

/// Number and size of the sockets.
#[derive(Clone, Debug, Args)]
pub(super) struct ClusterSize {
    /// Number of sockets of the cluster
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(PLAN_SOCKETS_MAX)))]
    sockets: u32,
    /// Cores of each socket
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(CORES_PER_HOST_MAX)))]
    cores_per_socket: u32,
    /// Memory of each socket without pools, divided by its cores, in GiB
    #[arg(long, value_name = "GIB", value_parser = parse_positive)]
    gib_per_core: f64,
}

impl ClusterSize {
    /// Returns the cluster.
    ///
    /// # Errors
    /// [`Failure::InvalidValue`] if a socket would have less than 1 MiB or more than 64 TiB.
    pub(super) fn cluster(&self) -> Result<Cluster, Failure> {
        let mib = (self.gib_per_core * f64::from(self.cores_per_socket) * 1024.0).round();
        if !(1.0..=LOCAL_MEMORY_MIB_PER_HOST_MAX as f64).contains(&mib) {
            return Err(Failure::InvalidValue {
                field: "--gib-per-core",
                value: self.gib_per_core.to_string(),
                rule: "must give each socket at least 1 MiB and at most 64 TiB".into(),
            });
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "range checked above")]
        let memory_per_socket = Bytes::mib(mib as u64);
        Ok(Cluster { sockets: self.sockets, cores_per_socket: self.cores_per_socket, memory_per_socket })
    }
}

/// Memory without pools, to which the results are relative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum BaselineKind {
    /// --gib-per-core
    #[default]
    Given,
    /// The largest memory in use on a socket at any time
    SocketPeak,
    /// The least memory that serves the VMs as well as --gib-per-core
    Least,
}

/// Models of the values that the trace does not contain, and the limits on slowed-down VMs.
#[derive(Clone, Debug, Args)]
pub(super) struct Models {
    /// Table of ended VMs from which the touched memory of VMs is drawn, as FORMAT=FILE with a FORMAT of
    /// `tarn evaluate frigid`; may be repeated; required for frigid, full and the column MISPREDICTED
    #[arg(long, value_name = "FORMAT=FILE")]
    pub usage: Vec<UsageTable>,
    /// PDM: permitted slowdown of a VM, in percent
    #[arg(long, value_name = "PERCENT", default_value = "5", value_parser = crate::parse_margin, requires = "usage")]
    pub pdm: Fraction,
    /// X: VMs that may be slowed down beyond the PDM, in percent of all VMs
    #[arg(long, value_name = "PERCENT", default_value = "2", value_parser = crate::parse_percent, requires = "usage")]
    pub exceed_max: Fraction,
    /// r: VMs slowed down beyond the PDM among those with overpredicted frigid memory, in percent, as
    /// the predictions assume [default: that of the modelled workloads]
    #[arg(long, value_name = "PERCENT", value_parser = crate::parse_percent, requires = "usage")]
    pub overpredicted_exceeds: Option<Fraction>,
    /// Seeds of the customers, their usage and their workloads; each seed has its own rows
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1", requires = "usage")]
    pub seed: Vec<u64>,
}

impl Models {
    /// Returns the paths of the usage tables.
    pub(super) fn usage_paths(&self) -> Vec<String> {
        self.usage.iter().map(|table| table.path.display().to_string()).collect()
    }

    /// Returns the limits on slowed-down VMs.
    pub(super) fn limits(&self, customers: &Customers) -> OperatorLimits {
        let modelled = customers.overpredicted_exceeds();
        let overpredicted_exceeds = self.overpredicted_exceeds.unwrap_or(modelled);
        OperatorLimits { exceed_max: self.exceed_max, overpredicted_exceeds }
    }
}

/// Usage table and its layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UsageTable {
    pub format: TableFormat,
    pub path: PathBuf,
}

impl FromStr for UsageTable {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text
            .split_once('=')
            .and_then(|(format, path)| Some((TableFormat::from_str(format, false).ok()?, path)));
        let (format, path) = parsed.ok_or_else(|| {
            "must be FORMAT=FILE with FORMAT bitbrains-week, nfcore-tasks or csv".to_owned()
        })?;
        Ok(Self { format, path: path.into() })
    }
}

/// Parses a fraction above 0 and at most 1.
pub(super) fn parse_local_fraction(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number
        .filter(|number| *number > 0.0 && *number <= 1.0)
        .ok_or_else(|| "must be above 0 and at most 1".to_owned())
}

/// Slices, and the devices that provide them.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Slices {
    /// Size of a slice: none (pool memory is not divided), or a power of two of MiB such as 256MiB, 1GiB
    /// or 2GiB. With slices, the ledger of the manager assigns them, and the pool memory of a VM is
    /// rounded down. An EMC has at most 16384 slices
    #[arg(long, value_name = "SIZE|none", default_value = "none", value_parser = parse_slice)]
    pub slice: SliceSize,
    /// Number of EMCs to which each socket is attached
    #[arg(long, value_name = "N", default_value_t = 1, requires = "slice", value_parser = clap::value_parser!(u32).range(1..=EMCS_PER_HOST_MAX as i64))]
    emcs_per_host: u32,
    /// Number of sockets that are attached to each EMC: a multiple of --emcs-per-host, whose quotient divides
    /// --pool-sockets [default: all sockets of the pool]
    #[arg(long, value_name = "N", requires = "slice", value_parser = clap::value_parser!(u32).range(1..))]
    hosts_per_emc: Option<u32>,
    /// Speed at which a host takes released slices offline, in GiB/s; 1 to 10 in Pond 4.5
    #[arg(long, value_name = "GIB", default_value = "1", value_parser = parse_positive, requires = "slice")]
    pub offline_gib_per_s: f64,
}

impl Slices {
    /// Returns the memory of each sparse pool, in which all EMCs are as large as the largest use of any EMC. Returns
    /// `None` if the sockets reach all EMCs, because such a pool needs less.
    pub(super) fn sparse_pool(&self, hosts: u32, report: Option<&SliceReport>) -> Option<SparsePool> {
        let is_sparse = self.hosts_per_emc.is_some_and(|attached| attached < hosts);
        let (slice_mib, report) = (self.slice.0?, report.filter(|_| is_sparse)?);
        let emcs = self.attachment().emcs(hosts);
        Some(SparsePool {
            mib: u64::from(emcs) * u64::from(report.in_use_per_emc_max) * slice_mib,
            buffer_slices: u64::from(emcs) * u64::from(report.buffer_per_emc()),
        })
    }

    /// Returns whether an option other than --slice differs from its default.
    pub(super) fn is_changed(&self) -> bool {
        self.emcs_per_host != 1 || self.hosts_per_emc.is_some() || self.offline_gib_per_s != 1.0
    }

    /// Returns the attachment of the sockets to EMCs.
    pub(super) fn attachment(&self) -> Attachment {
        Attachment { emcs_per_host: self.emcs_per_host, hosts_per_emc: self.hosts_per_emc }
    }

    /// Checks pools of `sockets` sockets with slices. `--slice none` permits all.
    ///
    /// # Errors
    /// [`Failure::InvalidValue`] if a rack cannot have this pool.
    pub(super) fn check(&self, sockets: u32) -> Result<(), Failure> {
        if self.slice.0.is_none() {
            return Ok(());
        }
        if sockets as usize > HOSTS_MAX {
            return Err(Failure::InvalidValue {
                field: "--pool-sockets",
                value: sockets.to_string(),
                rule: format!("must be at most {HOSTS_MAX} with --slice").into(),
            });
        }
        let rule = match self.attachment().check(sockets) {
            Ok(()) => return Ok(()),
            Err(AttachmentRule::TooManyHosts) => format!("must be at most --pool-sockets ({sockets})"),
            Err(AttachmentRule::Uneven) => format!(
                "must be a multiple of --emcs-per-host ({}), and the quotient must divide --pool-sockets \
                 ({sockets})",
                self.emcs_per_host
            ),
            Err(AttachmentRule::TooManyEmcs) => {
                format!("must be larger: pools of {sockets} sockets would have more than {EMCS_MAX} EMCs")
            }
        };
        let value = self.hosts_per_emc.unwrap_or_default().to_string();
        Err(Failure::InvalidValue { field: "--hosts-per-emc", value, rule: rule.into() })
    }
}

/// Memory of a sparse pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SparsePool {
    pub mib: u64,
    /// Slices that the pool needs in addition, so that no start waits.
    pub buffer_slices: u64,
}

/// Size of a slice in MiB; `None` if pool memory is not divided into slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SliceSize(pub Option<u64>);

/// Parses the size of a slice.
fn parse_slice(text: &str) -> Result<SliceSize, String> {
    if text == "none" {
        return Ok(SliceSize(None));
    }
    let size: Option<Bytes> = text.parse().ok();
    let mib = size.filter(|size| size.is_whole_mib()).map(|size| size.get() >> 20);
    mib.filter(|mib| mib.is_power_of_two() && *mib <= SLICE_MIB_MAX)
        .map(|mib| SliceSize(Some(mib)))
        .ok_or_else(|| "must be none, or a power of two from 1MiB to 64GiB".to_owned())
}

/// Largest slice, in MiB.
const SLICE_MIB_MAX: u64 = 64 << 10;

/// Prices of memory.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Prices {
    /// Price of local DRAM, to add the cost of each policy
    #[arg(long, value_name = "USD", value_parser = parse_positive, requires = "cxl_usd_per_gib")]
    pub dram_usd_per_gib: Option<f64>,
    /// Price of pool memory, with its share of the devices
    #[arg(long, value_name = "USD", value_parser = parse_positive, requires = "dram_usd_per_gib")]
    pub cxl_usd_per_gib: Option<f64>,
}

/// Rule for the socket of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Placement {
    /// The socket that fits best
    #[default]
    BestFit,
    /// The socket in the column `socket` of the trace; a VM without a socket, or that does not fit there, is rejected
    AsTraced,
}

/// Policy for the part of each VM's memory that is on a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Policy {
    /// All memory is local.
    None,
    /// The same fraction of each VM's memory is on a pool.
    Static(Fraction),
    /// Predicted frigid memory is on a pool.
    Frigid,
    /// Predicted frigid memory is on a pool, and the whole memory of VMs that tolerate its latency
    /// (Eq. 1 of Pond).
    Full,
}

impl Policy {
    /// Returns the fraction of each VM's memory that is on a pool, or the division of memory by
    /// predictions.
    pub(super) fn kind(self) -> PolicyKind {
        match self {
            Self::None => PolicyKind::FixedShare(Fraction::default()),
            Self::Static(share) => PolicyKind::FixedShare(share),
            Self::Frigid => PolicyKind::Predicted(Division::Frigid),
            Self::Full => PolicyKind::Predicted(Division::Full),
        }
    }

    /// Returns whether the policy needs predictions.
    pub(super) fn predicts(self) -> bool {
        matches!(self.kind(), PolicyKind::Predicted(_))
    }
}

/// Division of each VM's memory into local and pool memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Division {
    /// The whole memory is local, and also counts as used in the VM's pool. The results hold for every
    /// fixed share, because the placement is that without pools.
    Whole,
    /// A fixed share is on the pool, in whole slices. The placement is that without pools.
    Share(Fraction),
    /// Predicted frigid memory is on the pool.
    Frigid,
    /// Both predictions determine the memory on the pool.
    Full,
}

/// Kind of a policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum PolicyKind {
    /// The same fraction of each VM's memory is on a pool, with the placement without pools.
    FixedShare(Fraction),
    /// Predictions determine the memory on a pool.
    Predicted(Division),
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => return Ok(Self::None),
            "frigid" => return Ok(Self::Frigid),
            "full" => return Ok(Self::Full),
            _ => {}
        }
        let share = text.strip_prefix("static=").and_then(|share| share.parse().ok());
        let share = share.and_then(|share: f64| Fraction::new(share).ok());
        share
            .map(Self::Static)
            .ok_or_else(|| "must be none, frigid, full, or static=F with F from 0 to 1".to_owned())
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Static(share) => write!(f, "static={}", share.get()),
            Self::Frigid => f.write_str("frigid"),
            Self::Full => f.write_str("full"),
        }
    }
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Parses the length of the warm-up, which may be 0.
pub(super) fn parse_warm_up(text: &str) -> Result<Ns, String> {
    if text == "0" || text == "0s" {
        return Ok(Ns::ZERO);
    }
    duration(text).map(Ns::from)
}

/// Parses the time between two samples.
pub(super) fn parse_interval(text: &str) -> Result<Ns, String> {
    let interval = Ns::from(duration(text)?);
    if interval < PLAN_SAMPLE_INTERVAL_MIN {
        return Err(format!("must be at least {PLAN_SAMPLE_INTERVAL_MIN}"));
    }
    Ok(interval)
}

/// Range of prices, speeds and GiB per core.
const NUMBER_MIN: f64 = 1e-6;
const NUMBER_MAX: f64 = 1e9;

/// Parses a number between [`NUMBER_MIN`] and [`NUMBER_MAX`].
fn parse_positive(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number
        .filter(|number| (NUMBER_MIN..=NUMBER_MAX).contains(number))
        .ok_or_else(|| format!("must be a number between {NUMBER_MIN} and {NUMBER_MAX}"))
}

/// Checks that the values of an option differ.
///
/// # Errors
/// [`Failure::InvalidValue`] if a value is repeated.
pub(super) fn check_distinct<T: PartialEq + ToString>(
    option: &'static str,
    values: &[T],
) -> Result<(), Failure> {
    let is_repeated = |(at, value): &(usize, &T)| values[..*at].contains(value);
    match values.iter().enumerate().find(is_repeated) {
        None => Ok(()),
        Some((_, value)) => Err(Failure::InvalidValue {
            field: option,
            value: value.to_string(),
            rule: "must not be repeated".into(),
        }),
    }
}

/// Checks the number of values of an option.
///
/// # Errors
/// [`Failure::InvalidValue`] if there are more than `max`.
pub(super) fn check_count(option: &'static str, count: usize, max: usize) -> Result<(), Failure> {
    if count <= max {
        return Ok(());
    }
    let rule = format!("must be at most {max}").into();
    Err(Failure::InvalidValue { field: option, value: format!("{count} values"), rule })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_parsed_and_printed() {
        for text in ["none", "static=0.5", "static=0", "static=1", "frigid", "full"] {
            assert_eq!(text.parse::<Policy>().unwrap().to_string(), text);
        }
        for text in ["", "static", "static=", "static=1.1", "static=-0.1", "static=nan", "half"] {
            let rule = "must be none, frigid, full, or static=F with F from 0 to 1";
            assert_eq!(text.parse::<Policy>(), Err(rule.to_owned()), "{text}");
        }
    }

    #[test]
    fn usage_table_has_a_format_and_a_path() {
        let table = UsageTable { format: TableFormat::BitbrainsWeek, path: "a=b.csv".into() };
        assert_eq!("bitbrains-week=a=b.csv".parse(), Ok(table));
        assert!("a.csv".parse::<UsageTable>().is_err() && "x=a.csv".parse::<UsageTable>().is_err());
    }

    #[test]
    fn slice_is_none_or_a_power_of_two() {
        let sizes = [("none", None), ("256MiB", Some(256)), ("1GiB", Some(1024)), ("2GiB", Some(2048))];
        for (text, mib) in sizes {
            assert_eq!(parse_slice(text), Ok(SliceSize(mib)), "{text}");
        }
        for text in ["0", "3GiB", "128GiB", "512KiB", "x"] {
            assert!(parse_slice(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_have_lower_bounds() {
        assert_eq!(parse_warm_up("0"), Ok(Ns::ZERO));
        assert_eq!(parse_warm_up("1d"), Ok(Ns::secs(86_400)));
        assert_eq!(parse_interval("5m"), Ok(Ns::secs(300)));
        assert_eq!(parse_interval("999ms").unwrap_err(), "must be at least 1s");
        assert!(parse_interval("0s").is_err());
    }

    #[test]
    fn socket_needs_memory() {
        let size = |gib_per_core| ClusterSize { sockets: 2, cores_per_socket: 48, gib_per_core }.cluster();
        assert_eq!(size(3.0).unwrap().memory_per_socket, Bytes::gib(144));
        assert_eq!(size(0.0007).unwrap().memory_per_socket, Bytes::mib(34));
        for gib_per_core in [1e-9, 1e9] {
            let message = size(gib_per_core).unwrap_err().to_string();
            assert!(message.contains("must give each socket at least 1 MiB"), "{message}");
        }
        assert!(["nan", "-1", "0", "inf", "1e-7", "1e10"].iter().all(|text| parse_positive(text).is_err()));
    }
}
