//! Figure 9: shares of tenants that change their behaviour. Four tenants share a host. Two of them
//! switch from the trace that is most sensitive to bandwidth to the trace that is most sensitive to
//! memory, and back. `sim` simulates the host.

use cli_runtime::{Failure, Format, print};
use serde::Serialize;
use sim::symbiosis::{
    ACTIVITY_CHANGES, ChangeResponse, Epoch, RESPONSE_EPOCHS_MAX, SMALL_HOST_TENANTS, TENANTS,
    TenantActivity, TenantEpoch, change_responses, most_different_traces, simulate_changes,
};

use super::{super::read_accesses, FigureInputs, line_series};
use crate::figure::{Figure, Panel, Point, Scale, Series, SeriesStyle};

/// Data of figure 9 as JSON: all epochs, and the response of the shares to each change.
#[derive(Serialize)]
pub(super) struct FigureData {
    activities: [String; 2],
    #[serde(rename = "followed")]
    changes: Vec<Change>,
    epochs: Vec<Vec<Row>>,
}

/// Response of a tenant's share to a change. Shares are fractions of all memory and of the link.
/// Epochs and tenants are numbered from 1.
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
    /// Number of epochs from the change until both shares deviate from their long-run mean by at
    /// most 5 %, relative to the larger of that mean and an equal share.
    epochs_until_within_5_percent: Option<usize>,
    within_5_percent_two_epochs_later: bool,
    /// Largest relative deviation from the long-run mean, from two epochs after the change on.
    #[serde(rename = "wanders")]
    deviation_max: f64,
}

/// Share and throughput of a tenant in one epoch.
#[derive(Serialize)]
struct Row {
    #[serde(rename = "does")]
    activity: String,
    memory_share: f64,
    bandwidth_share: f64,
    misses: f64,
    /// Throughput; 1 without any slowdown.
    throughput: f64,
    /// Throughput with an equal split, on the same scale.
    #[serde(rename = "throughput_of_equal_split")]
    equal_split_throughput: f64,
}

/// Simulates the changes and draws the figure. Returns `None` if there are fewer than two traces.
pub(super) fn draw(inputs: &FigureInputs, format: Format) -> Result<Option<(Figure, FigureData)>, Failure> {
    let Some((stream, cache)) =
        most_different_traces(&inputs.tenants, inputs.host().equal(SMALL_HOST_TENANTS))
    else {
        return Ok(None);
    };
    let read = |at: usize| -> Result<(String, Vec<u32>), Failure> {
        let name = inputs.tenants[at].name.clone();
        Ok((name, read_accesses(&inputs.traces[at].path)?.unwrap_or_default()))
    };
    let activities = TenantActivity::pair_with_equal_footprints([read(stream)?, read(cache)?]);
    let epochs = simulate_changes(&activities, inputs.memory.get(), &ACTIVITY_CHANGES);
    let names = activities.map(|activity| activity.name);
    let responses = change_responses(&epochs, &ACTIVITY_CHANGES);
    responses.iter().for_each(|response| print::note(format, &describe_response(response, &names)));
    let figure = draw_figure(&epochs, &names);
    let change = |response: &ChangeResponse| to_change(response, &names);
    let numbers = FigureData {
        changes: responses.iter().map(change).collect(),
        epochs: epochs
            .iter()
            .map(|epoch| epoch.tenants.iter().map(|tenant| to_row(tenant, &names)).collect())
            .collect(),
        activities: names,
    };
    Ok(Some((figure, numbers)))
}

fn describe_response(response: &ChangeResponse, names: &[String; 2]) -> String {
    let percent = crate::percent;
    let when = response.epochs.map_or_else(
        || "never comes within 5 % of its long-run mean".to_owned(),
        |epochs| {
            format!("is within 5 % of its long-run mean in epoch {}", response.change.epoch + epochs + 1)
        },
    );
    format!(
        "figure 9: tenant {} switches to {} in epoch {}; its share {when}: memory from {} to {} after {RESPONSE_EPOCHS_MAX} epochs and {} in the long run, \
         bandwidth from {} to {} and {}",
        response.change.tenant + 1,
        names[response.change.to],
        response.change.epoch + 1,
        percent(response.before.memory),
        percent(response.settled.memory),
        percent(response.long_run.memory),
        percent(response.before.bandwidth),
        percent(response.settled.bandwidth),
        percent(response.long_run.bandwidth),
    )
}

fn to_change(response: &ChangeResponse, names: &[String; 2]) -> Change {
    Change {
        epoch: response.change.epoch + 1,
        tenant: response.change.tenant + 1,
        to: names[response.change.to].clone(),
        memory_before: response.before.memory,
        memory_two_epochs_later: response.settled.memory,
        memory_in_the_long_run: response.long_run.memory,
        bandwidth_before: response.before.bandwidth,
        bandwidth_two_epochs_later: response.settled.bandwidth,
        bandwidth_in_the_long_run: response.long_run.bandwidth,
        epochs_until_within_5_percent: response.epochs,
        within_5_percent_two_epochs_later: response.is_settled_in_time(),
        deviation_max: response.deviation_max,
    }
}

fn to_row(tenant: &TenantEpoch, names: &[String; 2]) -> Row {
    Row {
        activity: names[tenant.activity].clone(),
        memory_share: tenant.share.memory,
        bandwidth_share: tenant.share.bandwidth,
        misses: tenant.misses,
        throughput: tenant.throughput,
        equal_split_throughput: tenant.equal_split_throughput,
    }
}

fn draw_figure(epochs: &[Epoch], names: &[String; 2]) -> Figure {
    let panel = |title: &str, y_title, value: fn(&TenantEpoch) -> f64| {
        let mut series: Vec<Series> =
            (0..TENANTS).map(|tenant| tenant_series(epochs, tenant, names, value)).collect();
        series.push(change_markers());
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
        panel("(a) Local memory", "Share of all memory (%)", |tenant| tenant.share.memory),
        panel("(b) Link", "Share of the link (%)", |tenant| tenant.share.bandwidth),
        panel("(c) Throughput", "Throughput (% of that with an equal split)", |tenant| {
            tenant.throughput / tenant.equal_split_throughput
        }),
    ])
}

fn tenant_series(
    epochs: &[Epoch],
    tenant: usize,
    names: &[String; 2],
    value: fn(&TenantEpoch) -> f64,
) -> Series {
    let changes = ACTIVITY_CHANGES.iter().filter(|change| change.tenant == tenant);
    let changes: String =
        changes.map(|change| format!(", {} from {}", names[change.to], change.epoch + 1)).collect();
    let points = (1_u32..).zip(epochs).map(|(n, epoch)| (f64::from(n), value(&epoch.tenants[tenant])));
    line_series(tenant, format!("tenant {}: {}{changes}", tenant + 1, names[0]), points)
}

/// Returns vertical lines between the epochs before and after each change.
fn change_markers() -> Series {
    let at = |change: &sim::symbiosis::Change| Point::new(change.epoch as f64 + 0.5, 0.0);
    let points = ACTIVITY_CHANGES.iter().map(at).collect();
    Series { name: "a tenant switches traces".to_owned(), style: SeriesStyle::VerticalLine, points }
}
