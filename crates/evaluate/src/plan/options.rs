//! Options of `tarn plan`, and their checks.

use std::{fmt, str::FromStr, time::Duration};

use clap::{Args, ValueEnum};
use cli_runtime::{Failure, options::duration};
use serde::{Serialize, Serializer};
use sim::plan::Cluster;
use units::{
    Bytes, Fraction, Ns,
    limits::{CORES_PER_HOST_MAX, LOCAL_MEMORY_MIB_PER_HOST_MAX, PLAN_SAMPLE_INTERVAL_MIN, PLAN_SOCKETS_MAX},
};

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

/// Prices of memory.
#[derive(Clone, Copy, Debug, Default, Args)]
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
    /// The socket in the column `socket` of the trace; a VM that does not fit there is rejected
    AsTraced,
}

/// Policy for the part of each VM's memory that is on a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Policy {
    /// All memory is local.
    None,
    /// The same fraction of each VM's memory is on a pool.
    Static(Fraction),
}

impl Policy {
    /// Returns the fraction of each VM's memory that is on a pool.
    pub(super) fn share(self) -> Fraction {
        match self {
            Self::None => Fraction::default(),
            Self::Static(share) => share,
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::None);
        }
        let share = text.strip_prefix("static=").and_then(|share| share.parse().ok());
        let share = share.and_then(|share: f64| Fraction::new(share).ok());
        share.map(Self::Static).ok_or_else(|| "must be none, or static=F with F from 0 to 1".to_owned())
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Static(share) => write!(f, "static={}", share.get()),
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
    duration(text).map(to_ns)
}

/// Parses the time between two samples.
pub(super) fn parse_interval(text: &str) -> Result<Ns, String> {
    let interval = to_ns(duration(text)?);
    if interval < PLAN_SAMPLE_INTERVAL_MIN {
        return Err(format!("must be at least {PLAN_SAMPLE_INTERVAL_MIN}"));
    }
    Ok(interval)
}

fn to_ns(duration: Duration) -> Ns {
    Ns::from(duration)
}

/// Parses a number above 0.
fn parse_positive(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number.filter(|number| *number > 0.0 && number.is_finite()).ok_or_else(|| "must be a number above 0".to_owned())
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
        for text in ["none", "static=0.5", "static=0", "static=1"] {
            assert_eq!(text.parse::<Policy>().unwrap().to_string(), text);
        }
        for text in ["", "static", "static=", "static=1.1", "static=-0.1", "static=nan", "half"] {
            let rule = "must be none, or static=F with F from 0 to 1";
            assert_eq!(text.parse::<Policy>(), Err(rule.to_owned()), "{text}");
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
        assert!(parse_positive("nan").is_err() && parse_positive("-1").is_err() && parse_positive("inf").is_err());
    }
}
