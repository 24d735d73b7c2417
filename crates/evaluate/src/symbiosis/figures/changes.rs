//! Figure 9: shares of tenants that change their behaviour. Four share a host; two of them switch
//! from the trace that is most sensitive to bandwidth to the one most sensitive to memory, and
//! back. `sim` simulates it.

use cli_runtime::{Failure, Format, print};
use serde::Serialize;
use sim::symbiosis::{
    Activity, CHANGES, ChangeResponse, Epoch, RESPONSE_EPOCHS_MAX, SMALL_HOST_TENANTS, TENANTS, TenantEpoch,
    change_responses, most_different, simulate_changes,
};

use super::{super::touches, Shown, line};
use crate::figure::{Figure, Look, Panel, Point, Scale, Series};

/// All epochs, with the result of each change.
#[derive(Serialize)]
pub(super) struct Numbers {
    activities: [String; 2],
    followed: Vec<Change>,
    epochs: Vec<Vec<Row>>,
}

/// Fractions of all memory and of the link. Epochs and tenants are numbered from 1.
#[derive(Serialize)]
struct Change {
    epoch: usize,
    tenant: usize,
    to: String,
    memory_before: f64,
    memory_two_epochs_later: f64,
    memory_in_the_long_run: f64,
    bandwidth_before: f64,
    bandwidth_two_epochs_later: f64,
    bandwidth_in_the_long_run: f64,
    /// Epochs from the change to the first in which both shares are within 5 % of the long run, or
    /// of an equal share if that is more.
    epochs_until_within_5_percent: Option<usize>,
    within_5_percent_two_epochs_later: bool,
    /// Largest deviation in any epoch from two epochs later on.
    wanders: f64,
}

/// Tenant in an epoch.
#[derive(Serialize)]
struct Row {
    does: String,
    memory_share: f64,
    bandwidth_share: f64,
    misses: f64,
    /// 1 without slowdown.
    throughput: f64,
    throughput_of_equal_split: f64,
}

/// Returns `None` with fewer than two traces.
pub(super) fn drawn(shown: &Shown, format: Format) -> Result<Option<(Figure, Numbers)>, Failure> {
    let Some((stream, cache)) = most_different(&shown.tenants, shown.host().equal(SMALL_HOST_TENANTS)) else {
        return Ok(None);
    };
    let read = |at: usize| -> Result<(String, Vec<u32>), Failure> {
        let name = shown.tenants[at].name.clone();
        Ok((name, touches(&shown.traces[at].path)?.unwrap_or_default()))
    };
    let activities = Activity::pair([read(stream)?, read(cache)?]);
    let epochs = simulate_changes(&activities, shown.memory.get(), &CHANGES);
    let names = activities.map(|activity| activity.name);
    let followed = change_responses(&epochs, &CHANGES);
    followed.iter().for_each(|one| print::note(format, &said(one, &names)));
    let figure = figure(&epochs, &names);
    let change = |one: &ChangeResponse| change(one, &names);
    let numbers = Numbers {
        followed: followed.iter().map(change).collect(),
        epochs: epochs
            .iter()
            .map(|epoch| epoch.tenants.iter().map(|one| row(one, &names)).collect())
            .collect(),
        activities: names,
    };
    Ok(Some((figure, numbers)))
}

fn said(one: &ChangeResponse, names: &[String; 2]) -> String {
    let percent = crate::percent;
    let when = one.epochs.map_or_else(
        || "never comes within 5 % of its long run".to_owned(),
        |epochs| format!("is within 5 % of its long run in epoch {}", one.change.epoch + epochs + 1),
    );
    format!(
        "figure 9: tenant {} turns to {} with epoch {}; its share {when}: memory from {} to {} after {RESPONSE_EPOCHS_MAX} epochs and {} in the long run, \
         bandwidth from {} to {} and {}",
        one.change.tenant + 1,
        names[one.change.to],
        one.change.epoch + 1,
        percent(one.before.memory),
        percent(one.settled.memory),
        percent(one.long_run.memory),
        percent(one.before.bandwidth),
        percent(one.settled.bandwidth),
        percent(one.long_run.bandwidth),
    )
}

fn change(one: &ChangeResponse, names: &[String; 2]) -> Change {
    Change {
        epoch: one.change.epoch + 1,
        tenant: one.change.tenant + 1,
        to: names[one.change.to].clone(),
        memory_before: one.before.memory,
        memory_two_epochs_later: one.settled.memory,
        memory_in_the_long_run: one.long_run.memory,
        bandwidth_before: one.before.bandwidth,
        bandwidth_two_epochs_later: one.settled.bandwidth,
        bandwidth_in_the_long_run: one.long_run.bandwidth,
        epochs_until_within_5_percent: one.epochs,
        within_5_percent_two_epochs_later: one.is_settled_in_time(),
        wanders: one.deviation_max,
    }
}

fn row(played: &TenantEpoch, names: &[String; 2]) -> Row {
    Row {
        does: names[played.activity].clone(),
        memory_share: played.share.memory,
        bandwidth_share: played.share.bandwidth,
        misses: played.misses,
        throughput: played.throughput,
        throughput_of_equal_split: played.equal_split_throughput,
    }
}

fn figure(epochs: &[Epoch], names: &[String; 2]) -> Figure {
    let panel = |title: &str, y_title, value: fn(&TenantEpoch) -> f64| {
        let mut series: Vec<Series> =
            (0..TENANTS).map(|tenant| of_tenant(epochs, tenant, names, value)).collect();
        series.push(turns());
        Panel {
            title: title.to_owned(),
            x_title: "Epoch",
            y_title,
            x: Scale::Number,
            y: Scale::Percent,
            x_max: f64::INFINITY,
            series,
        }
    };
    Figure(vec![
        panel("(a) Local memory", "Share of all memory (%)", |one| one.share.memory),
        panel("(b) Link", "Share of the link (%)", |one| one.share.bandwidth),
        panel("(c) Throughput", "Throughput (% of that of the same with an equal split)", |one| {
            one.throughput / one.equal_split_throughput
        }),
    ])
}

fn of_tenant(epochs: &[Epoch], tenant: usize, names: &[String; 2], value: fn(&TenantEpoch) -> f64) -> Series {
    let turns = CHANGES.iter().filter(|change| change.tenant == tenant);
    let turns: String = turns.map(|turn| format!(", {} from {}", names[turn.to], turn.epoch + 1)).collect();
    let points = (1_u32..).zip(epochs).map(|(n, epoch)| (f64::from(n), value(&epoch.tenants[tenant])));
    line(tenant, format!("tenant {}: {}{turns}", tenant + 1, names[0]), points)
}

/// Boundary between two epochs.
fn turns() -> Series {
    let at = |change: &sim::symbiosis::Change| Point::new(change.epoch as f64 + 0.5, 0.0);
    let points = CHANGES.iter().map(at).collect();
    Series { name: "a tenant turns".to_owned(), look: Look::Upright, points }
}
