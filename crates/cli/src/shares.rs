//! `tarn get shares`, `tarn explain shares` and `tarn weigh`: how the tenants of a host share it, why so, and how much they may have relative to
//! each other. Who gets how much is decided on the host.

mod text;

use clap::Args;
use proto::v1;
use serde::Serialize;
use units::Name;

use crate::{
    Connection, Failure, Format, print,
    table::{Column, Row, col, moment, percent, size, wide},
};

/// A host whose tenants share it.
#[derive(Clone, Debug, Args)]
pub struct OfHost {
    /// The host
    pub host: Name,
}

/// Tenants to weigh.
#[derive(Clone, Debug, Args)]
pub struct Weigh {
    /// The host
    pub host: Name,
    /// A tenant, as its cgroup is called, and its weight: 0.01 to 10000; 0 takes back what was set. Others stay; with none, those that are set are shown
    #[arg(value_name = "TENANT=WEIGHT", value_parser = weight)]
    pub weights: Vec<(Name, f64)>,
}

/// A tenant and its weight; which weights there are is the manager's to say.
fn weight(text: &str) -> Result<(Name, f64), String> {
    let (tenant, number) = text.split_once('=').ok_or("must be TENANT=WEIGHT, such as web=2")?;
    let weight = number.parse().map_err(|_| format!("{number:?} is not a number: must be TENANT=WEIGHT"))?;
    Ok((Name::new(tenant).map_err(|error| error.to_string())?, weight))
}

/// One tenant a row.
pub(crate) async fn list(of: OfHost, to: &Connection, format: Format) -> Result<(), Failure> {
    let shares = told(of, to).await?;
    print::list(format, &shares.tenants)?;
    if shares.state == KEPT {
        let why = shares.why.map(|why| format!(": {why}")).unwrap_or_default();
        print::note(
            format,
            &format!("shares, and all that is told of them, are as they were before the last epoch{why}"),
        );
    }
    let way = shares.certificate.as_ref().map(|certificate| certificate.way);
    if let Some(way) = way.filter(|way| shares.state == SET && *way < ALL) {
        print::note(
            format,
            &format!(
                "shares are on their way, {} of it gone in this epoch: gains are of where they are now",
                percent(way)
            ),
        );
    }
    let (host, at) = (&shares.host, moment(shares.at_unix_ms));
    let none =
        if shares.tenants.is_empty() { ": it has no tenants, or has not measured them yet" } else { "" };
    print::note(format, &format!("as host {host} told at {at}{none}"));
    Ok(())
}

/// Everything about the last epoch, in words.
pub(crate) async fn explain(of: OfHost, to: &Connection, format: Format) -> Result<(), Failure> {
    let shares = told(of, to).await?;
    print::say(format, &shares, |_| shares.text())
}

async fn told(of: OfHost, to: &Connection) -> Result<Shares, Failure> {
    let request = v1::GetSharesRequest { host: of.host.into() };
    Ok(to.ask(to.admin().get_shares(request)).await?.into())
}

/// Sets weights, and shows all that are set then.
pub(crate) async fn weigh(args: Weigh, to: &Connection, format: Format) -> Result<(), Failure> {
    let weight = |(tenant, weight): (Name, f64)| v1::Weight { tenant: tenant.into(), weight };
    let weights = args.weights.into_iter().map(weight).collect();
    let request = v1::SetWeightsRequest { host: args.host.into(), weights };
    let set = to.ask(to.scheduler().set_weights(request)).await?.weights;
    let weight = |w: v1::Weight| Weight { tenant: w.tenant, weight: w.weight };
    print::list(format, &set.into_iter().map(weight).collect::<Vec<_>>())
}

/// From here on, what would be printed as all.
const ALL: f64 = 0.9995;
/// What an epoch did that set shares anew, and one that changed nothing, as something was missing.
const SET: &str = "set";
const KEPT: &str = "kept";

/// What is set of one tenant.
#[derive(Clone, Debug, Serialize)]
struct Weight {
    tenant: String,
    weight: f64,
}

/// What one tenant gets, or might.
#[derive(Clone, Debug, Serialize)]
struct Share {
    memory_mib: u64,
    bandwidth_mb_s: u64,
}

/// One tenant after an epoch.
#[derive(Clone, Debug, Serialize)]
struct Tenant {
    tenant: String,
    weight: f64,
    enforcer: String,
    fair: Option<Share>,
    share: Option<Share>,
    memory_used_mib: u64,
    bandwidth_used_mb_s: f64,
    /// Part of its time, 0 to 1.
    waited: f64,
    bandwidth_wanted_mb_s: f64,
    /// Throughput against that with an equal split.
    gain: f64,
    learnt_from: String,
    /// How far the estimate may be off, 0 to 1.
    error: f64,
    problem: Option<String>,
}

/// What anybody can check of how shares came about.
#[derive(Clone, Debug, Serialize)]
struct Certificate {
    status: String,
    memory_price: f64,
    dividend: f64,
    rounds: u32,
    refinements: u32,
    way: f64,
    memory_left_over: f64,
    bandwidth_left_over: f64,
    overspent: f64,
    sharing_incentive: f64,
    worst_off: Option<String>,
    envy: Option<f64>,
}

/// What came of a host's last epoch.
#[derive(Clone, Debug, Serialize)]
struct Shares {
    host: String,
    epoch: u64,
    at_unix_ms: u64,
    supply: Option<Share>,
    state: String,
    why: Option<String>,
    tenants: Vec<Tenant>,
    certificate: Option<Certificate>,
}

fn some(text: String) -> Option<String> {
    if text.is_empty() { None } else { Some(text) }
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
            waited: t.stalled,
            bandwidth_wanted_mb_s: t.bandwidth_demand_mb_s,
            gain: t.gain,
            learnt_from: t.access_source,
            error: t.error,
            problem: some(t.problem),
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
            way: c.step,
            memory_left_over: c.memory_excess,
            bandwidth_left_over: c.bandwidth_excess,
            overspent: c.budget_excess,
            sharing_incentive: c.sharing_incentive,
            worst_off: some(c.worst_off),
            envy: c.envy,
        }
    }
}

impl From<v1::Shares> for Shares {
    fn from(s: v1::Shares) -> Self {
        let state = match v1::ShareState::try_from(s.state) {
            Ok(v1::ShareState::Set) => SET.to_owned(),
            Ok(v1::ShareState::Unchanged) => "held".to_owned(),
            Ok(v1::ShareState::Blocked) => KEPT.to_owned(),
            Ok(v1::ShareState::Unspecified) | Err(_) => format!("number-{}", s.state),
        };
        Self {
            host: s.host,
            epoch: s.epoch,
            at_unix_ms: s.at_unix_ms,
            supply: s.supply.map(Share::from),
            state,
            why: some(s.reason),
            tenants: s.tenants.into_iter().map(Tenant::from).collect(),
            certificate: s.certificate.map(Certificate::from),
        }
    }
}

fn mib(mib: u64) -> String {
    size(mib.saturating_mul(1 << 20))
}

fn memory(share: Option<&Share>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| mib(share.memory_mib))
}

fn link(share: Option<&Share>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{}MB/s", share.bandwidth_mb_s))
}

fn rate(mb_s: f64) -> String {
    format!("{mb_s:.0}MB/s")
}

/// How much more throughput, with no minus before nothing.
fn gained(gain: f64) -> String {
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
        col("ENFORCED", |t| t.enforcer.clone()),
        col("MEMORY/FAIR", |t| format!("{}/{}", memory(t.share.as_ref()), memory(t.fair.as_ref()))),
        col("LINK", |t| link(t.share.as_ref())),
        col("WAITS", |t| percent(t.waited)),
        col("GAIN", |t| gained(t.gain)),
        wide("MEMORY USED", |t| mib(t.memory_used_mib)),
        wide("LINK USED", |t| rate(t.bandwidth_used_mb_s)),
        wide("LINK WANTED", |t| rate(t.bandwidth_wanted_mb_s)),
        wide("LEARNT FROM", |t| t.learnt_from.clone()),
        wide("ERROR", |t| percent(t.error)),
        wide("PROBLEM", |t| t.problem.clone().unwrap_or_else(|| "-".to_owned())),
    ];
}
