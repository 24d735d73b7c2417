//! Figures of `tarn plan`: required DRAM and saved DRAM against the pool size, as in figures 1c and
//! 11 of Pond.

use std::path::Path;

use cli_runtime::Failure;

use super::{
    options::Policy,
    report::{Plan, PolicyResult},
};
use crate::figure::{self, Figure, Panel, Point, Scale, Series, SeriesStyle};

/// Draws the figures and writes them into a directory.
///
/// # Errors
/// [`Failure::File`] if a figure cannot be written.
pub(super) fn write_all(folder: &Path, plan: &Plan) -> Result<(), Failure> {
    let required = panel(
        plan,
        "DRAM required with pools",
        "Required DRAM (% of DRAM without pools)",
        Scale::PercentDetail,
        |result| result.dram_required,
    );
    let saved = panel(
        plan,
        "DRAM saved with pools",
        "Saved DRAM (% of DRAM without pools)",
        Scale::Percent,
        |result| result.dram_saved,
    );
    figure::write(&folder.join("plan-required.svg"), &Figure(vec![required]))?;
    figure::write(&folder.join("plan-saved.svg"), &Figure(vec![saved]))
}

fn panel(
    plan: &Plan,
    title: &str,
    y_title: &'static str,
    y: Scale,
    value: impl Fn(&PolicyResult) -> f64,
) -> Panel {
    let means = plan.means(value);
    let mut policies: Vec<Policy> = Vec::new();
    for (policy, ..) in &means {
        if !policies.contains(policy) {
            policies.push(*policy);
        }
    }
    let series = policies.iter().enumerate().map(|(index, policy)| {
        let of_policy = means.iter().filter(|(of, ..)| of == policy);
        let mut points: Vec<Point> =
            of_policy.map(|(_, sockets, mean)| Point::new(f64::from(*sockets), *mean)).collect();
        points.sort_by(|one, other| one.x.total_cmp(&other.x));
        Series { name: legend(*policy), style: SeriesStyle::Line(index), points }
    });
    Panel {
        title: title.to_owned(),
        x_title: "Sockets per pool",
        y_title,
        x: Scale::Number,
        y,
        x_max: f64::INFINITY,
        series: series.collect(),
    }
}

fn legend(policy: Policy) -> String {
    match policy {
        Policy::None => "no pool".to_owned(),
        Policy::Frigid => "frigid memory on a pool".to_owned(),
        Policy::Full => "frigid memory, and VMs that tolerate latency, on a pool".to_owned(),
        Policy::Static(share) => format!("{} % of each VM's memory on a pool", 100.0 * share.get()),
    }
}
