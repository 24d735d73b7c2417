//! `tarn get shares`, `get weights`, `set weights` and `explain shares`: shares and weights of a
//! host's tenants. The host's agent computes the shares.

mod text;

use clap::Args;
use proto::v1;
use serde::Serialize;
use units::{Name, QuotedText};

use crate::{
    Connection, Failure, Format, print,
    table::{Column, Row, col, format_timestamp, percent, size, text_or_dash, wide},
    view::non_empty,
};

/// Host whose tenants are shown.
#[derive(Clone, Debug, Args)]
pub struct HostArg {
    /// Name of the host
    pub host: Name,
}

/// Options of `tarn set weights`.
#[derive(Clone, Debug, Args)]
pub struct SetWeights {
    /// Name of the host
    pub host: Name,
    /// Tenant (name of its cgroup) and weight from 0.01 to 10000; 0 removes a weight. Other tenants
    /// keep their weights
    #[arg(required = true, value_name = "TENANT=WEIGHT", value_parser = parse_weight)]
    pub weights: Vec<(Name, f64)>,
}

/// Parses a weight as TENANT=WEIGHT. The manager checks the range.
fn parse_weight(text: &str) -> Result<(Name, f64), String> {
    let (tenant, number) = text.split_once('=').ok_or("must be TENANT=WEIGHT, such as web=2")?;
    let weight = number
        .parse()
        .map_err(|_| format!("{} is not a number: must be TENANT=WEIGHT", QuotedText(number)))?;
    Ok((Name::new(tenant).map_err(|error| error.to_string())?, weight))
}

/// Prints the tenants of a host, one per row.
pub(crate) async fn list(args: HostArg, manager: &Connection, format: Format) -> Result<(), Failure> {
    let shares = load(args.host, manager).await?;
    print::list(format, &shares.tenants)?;
    if shares.state == SHARE_STATE_BLOCKED {
        let reason = shares.reason.map(|reason| format!(": {reason}")).unwrap_or_default();
        print::note(format, &format!("the last epoch did not update shares and estimates{reason}"));
    }
    let step = shares.certificate.as_ref().map(|certificate| certificate.step);
    if let Some(step) = step.filter(|step| shares.state == SHARE_STATE_SET && *step < FULL_STEP_MIN) {
        print::note(
            format,
            &format!(
                "shares change gradually: {} of the change was applied in this epoch, and gains refer to the current shares",
                percent(step)
            ),
        );
    }
    let (host, at) = (&shares.host, format_timestamp(shares.at_unix_ms));
    let no_tenants = if shares.tenants.is_empty() { ": no tenants, or not measured yet" } else { "" };
    print::note(format, &format!("reported by host {host} at {at}{no_tenants}"));
    Ok(())
}

/// Prints the shares of the last epoch with explanations.
pub(crate) async fn explain(args: HostArg, manager: &Connection, format: Format) -> Result<(), Failure> {
    let shares = load(args.host, manager).await?;
    print::value(format, &shares, |_| shares.to_text())
}

/// Loads the last shares of a host.
///
/// # Errors
/// The host has not reported any, or the manager is unreachable.
pub(crate) async fn load(host: Name, manager: &Connection) -> Result<Shares, Failure> {
    let request = v1::GetSharesRequest { host: host.into() };
    Ok(manager.call(manager.admin().get_shares(request)).await?.into())
}

/// Prints all weights set on a host.
pub(crate) async fn list_weights(args: HostArg, manager: &Connection, format: Format) -> Result<(), Failure> {
    // A request without weights changes nothing and returns all weights that are set.
    set_weights(SetWeights { host: args.host, weights: Vec::new() }, manager, format).await
}

/// Sets weights and prints all weights set on the host.
pub(crate) async fn set_weights(
    args: SetWeights,
    manager: &Connection,
    format: Format,
) -> Result<(), Failure> {
    let weight = |(tenant, weight): (Name, f64)| v1::Weight { tenant: tenant.into(), weight };
    let weights = args.weights.into_iter().map(weight).collect();
    let request = v1::SetWeightsRequest { host: args.host.into(), weights };
    let set = manager.call(manager.scheduler().set_weights(request)).await?.weights;
    let weight = |w: v1::Weight| Weight { tenant: w.tenant, weight: w.weight };
    print::list(format, &set.into_iter().map(weight).collect::<Vec<_>>())
}

/// Smallest step that is printed as 100.0 %. A step is the fraction of a change that was applied.
const FULL_STEP_MIN: f64 = 0.9995;
/// State after an epoch that updated the shares.
const SHARE_STATE_SET: &str = "set";
/// State after an epoch that could not update the shares.
const SHARE_STATE_BLOCKED: &str = "blocked";

/// Weight of one tenant as printed by `tarn get weights`.
#[derive(Clone, Debug, Serialize)]
struct Weight {
    tenant: String,
    weight: f64,
}

/// Share of local memory (MiB) and link bandwidth (MB/s).
#[derive(Clone, Debug, Serialize)]
struct Share {
    memory_mib: u64,
    bandwidth_mb_s: u64,
}

/// Shares and measurements of one tenant at the end of an epoch.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tenant {
    pub(crate) tenant: String,
    weight: f64,
    enforcer: String,
    fair: Option<Share>,
    share: Option<Share>,
    memory_used_mib: u64,
    bandwidth_used_mb_s: f64,
    /// Fraction of time in which the tenant was stalled on memory or I/O, 0 to 1.
    stalled: f64,
    bandwidth_demand_mb_s: f64,
    /// Estimated throughput relative to an equal split.
    gain: f64,
    access_source: String,
    /// Relative error of the estimated gain, 0 to 1.
    error: f64,
    problem: Option<String>,
}

/// Verifiable properties of the computed shares.
#[derive(Clone, Debug, Serialize)]
struct Certificate {
    status: String,
    memory_price: f64,
    dividend: f64,
    rounds: u32,
    refinements: u32,
    step: f64,
    memory_excess: f64,
    bandwidth_excess: f64,
    budget_excess: f64,
    sharing_incentive: f64,
    worst_off: Option<String>,
    envy: Option<f64>,
}

/// Result of a host's last epoch.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Shares {
    host: String,
    epoch: u64,
    at_unix_ms: u64,
    supply: Option<Share>,
    state: String,
    reason: Option<String>,
    pub(crate) tenants: Vec<Tenant>,
    certificate: Option<Certificate>,
}

impl From<v1::Share> for Share {
    fn from(s: v1::Share) -> Self {
        Self { memory_mib: s.memory_mib, bandwidth_mb_s: s.bandwidth_mb_s }
    }
}

impl From<v1::TenantShare> for Tenant {
    fn from(t: v1::TenantShare) -> Self {
        Self {
            tenant: t.tenant,
            weight: t.weight,
            enforcer: t.enforcer,
            fair: t.fair.map(Share::from),
            share: t.share.map(Share::from),
            memory_used_mib: t.memory_used_mib,
            bandwidth_used_mb_s: t.bandwidth_used_mb_s,
            stalled: t.stalled,
            bandwidth_demand_mb_s: t.bandwidth_demand_mb_s,
            gain: t.gain,
            access_source: t.access_source,
            error: t.error,
            problem: non_empty(t.problem),
        }
    }
}

impl From<v1::ShareCertificate> for Certificate {
    fn from(c: v1::ShareCertificate) -> Self {
        Self {
            status: c.status,
            memory_price: c.memory_price,
            dividend: c.dividend,
            rounds: c.rounds,
            refinements: c.refinements,
            step: c.step,
            memory_excess: c.memory_excess,
            bandwidth_excess: c.bandwidth_excess,
            budget_excess: c.budget_excess,
            sharing_incentive: c.sharing_incentive,
            worst_off: non_empty(c.worst_off),
            envy: c.envy,
        }
    }
}

impl From<v1::Shares> for Shares {
    fn from(s: v1::Shares) -> Self {
        let state = match v1::ShareState::try_from(s.state) {
            Ok(v1::ShareState::Set) => SHARE_STATE_SET.to_owned(),
            Ok(v1::ShareState::Unchanged) => "unchanged".to_owned(),
            Ok(v1::ShareState::Blocked) => SHARE_STATE_BLOCKED.to_owned(),
            Ok(v1::ShareState::Unspecified) | Err(_) => format!("number-{}", s.state),
        };
        Self {
            host: s.host,
            epoch: s.epoch,
            at_unix_ms: s.at_unix_ms,
            supply: s.supply.map(Share::from),
            state,
            reason: non_empty(s.reason),
            tenants: s.tenants.into_iter().map(Tenant::from).collect(),
            certificate: s.certificate.map(Certificate::from),
        }
    }
}

fn format_mib(mib: u64) -> String {
    size(mib.saturating_mul(1 << 20))
}

fn format_memory(share: Option<&Share>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format_mib(share.memory_mib))
}

fn format_link(share: Option<&Share>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{}MB/s", share.bandwidth_mb_s))
}

fn format_rate(mb_s: f64) -> String {
    format!("{mb_s:.0}MB/s")
}

/// Formats a throughput relative to an equal split as a gain in percent. Avoids a minus sign for
/// gains that are rounded to zero.
fn format_gain(gain: f64) -> String {
    let tenths = ((gain - 1.0) * 1000.0).round() + 0.0;
    percent(tenths / 1000.0)
}

impl Row for Weight {
    const COLUMNS: &'static [Column<Self>] =
        &[col("TENANT", |w| w.tenant.clone()), col("WEIGHT", |w| w.weight.to_string())];
}

impl Row for Tenant {
    const COLUMNS: &'static [Column<Self>] = &[
        col("TENANT", |t| t.tenant.clone()),
        col("WEIGHT", |t| t.weight.to_string()),
        col("ENFORCER", |t| t.enforcer.clone()),
        col("MEMORY/FAIR", |t| {
            format!("{}/{}", format_memory(t.share.as_ref()), format_memory(t.fair.as_ref()))
        }),
        col("LINK", |t| format_link(t.share.as_ref())),
        col("STALLED", |t| percent(t.stalled)),
        col("GAIN", |t| format_gain(t.gain)),
        wide("MEMORY USED", |t| format_mib(t.memory_used_mib)),
        wide("LINK USED", |t| format_rate(t.bandwidth_used_mb_s)),
        wide("LINK DEMAND", |t| format_rate(t.bandwidth_demand_mb_s)),
        wide("ACCESS SOURCE", |t| t.access_source.clone()),
        wide("ERROR", |t| percent(t.error)),
        wide("PROBLEM", |t| text_or_dash(t.problem.as_ref())),
    ];
}
