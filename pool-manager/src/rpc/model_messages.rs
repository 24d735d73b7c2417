//! Validates requests about outcomes and models, and converts the responses.

use std::{collections::HashMap, ops::RangeInclusive};

use prediction::{
    file::Kind,
    frigid::{Groups, Outcome, VmRequest, VmUsage},
    import::Format,
    qos::LabelledRun,
    sensitivity::{PDM_MIN, SLOWDOWN_RANGE, SLOWDOWN_RULE, Workload, measured_counters, measured_value},
};
use proto::v1 as wire;
use units::limits::{
    CLOCK_SKEW_MAX, CORES_PER_HOST_MAX, LOCAL_MEMORY_MIB_PER_HOST_MAX, OUTCOMES_PER_REQUEST_MAX,
    WORKLOAD_LABELS_MAX,
};
use units::{Bytes, Fraction, LATENCY_RATIO_RANGE, LATENCY_RATIO_RULE, UnixMs};

use crate::{
    convert::{
        InvalidField,
        profile::{check_group_name, parse_counters, parse_profile},
    },
    forecasts::{Evaluation, Labels, ModelSummary, new_ended_vm},
    records::forecast_rows::{Counters, EndedVm, MeasuredMove, VmStart},
};

/// Validates the outcomes of ended VMs. `now` is the current time; no VM can have ended later.
///
/// # Errors
/// [`InvalidField`] for the first invalid outcome, with its index.
pub fn parse_outcomes(request: wire::AddOutcomesRequest, now: UnixMs) -> Result<Vec<EndedVm>, InvalidField> {
    if request.outcomes.len() > OUTCOMES_PER_REQUEST_MAX {
        let rule = format!("must be at most {OUTCOMES_PER_REQUEST_MAX} per request");
        return Err(InvalidField::new("outcomes", request.outcomes.len(), rule));
    }
    let numbered = request.outcomes.into_iter().enumerate();
    let at = |(number, item)| {
        parse_outcome(item, now).map_err(|InvalidField { field, problem }| InvalidField {
            field,
            problem: format!("{problem} (outcome {number}, counted from 0)"),
        })
    };
    numbered.map(at).collect()
}

fn parse_outcome(o: wire::Outcome, now: UnixMs) -> Result<EndedVm, InvalidField> {
    let memory = |field, bytes: u64, min: u64| {
        let max = LOCAL_MEMORY_MIB_PER_HOST_MAX << 20;
        let within = (min..=max).contains(&bytes);
        let error = || InvalidField::new(field, bytes, format!("must be from {min} to {max} bytes"));
        within.then_some(Bytes::new(bytes)).ok_or_else(error)
    };
    let requested = memory("requested_bytes", o.requested_bytes, 1)?;
    let peak = memory("peak_bytes", o.peak_bytes, 0)?;
    let measured = |field, bytes: Option<u64>| bytes.map(|bytes| memory(field, bytes, 0)).transpose();
    if o.ended_unix_ms < o.started_unix_ms {
        return Err(InvalidField::new(
            "ended_unix_ms",
            o.ended_unix_ms,
            "must not be before started_unix_ms",
        ));
    }
    if o.ended_unix_ms > now.0 + CLOCK_SKEW_MAX.as_ms() {
        return Err(InvalidField::new("ended_unix_ms", o.ended_unix_ms, "must not be in the future"));
    }
    let number = |field, number: f64, max: f64| {
        let error = || InvalidField::new(field, number, format!("must be a number from 0 to {max}"));
        (0.0..=max).contains(&number).then_some(number).ok_or_else(error)
    };
    let cores = number("cores", o.cores, CORES_PER_HOST_MAX.into())?;
    let busy_percent =
        o.cpu_utilization_percent.map(|busy| number("cpu_utilization_percent", busy, 1e5)).transpose()?;
    let usage = VmUsage {
        p99: measured("p99_bytes", o.p99_bytes)?,
        mean: measured("mean_bytes", o.mean_bytes)?,
        busy_percent,
    };
    let (groups, counters) = parse_profile(o.vm, o.profile)?;
    let begins = UnixMs(o.started_unix_ms);
    let request = VmRequest { groups, requested, cores: (cores > 0.0).then_some(cores), begins };
    let start = VmStart { request, counters, prediction: None, pool_only: false };
    Ok(new_ended_vm(start, peak, UnixMs(o.ended_unix_ms), usage).expect("the requested memory is not 0"))
}

/// Converts the outcome of an ended VM.
pub fn outcome_message(vm: EndedVm) -> wire::Outcome {
    let EndedVm { start: VmStart { request, counters, .. }, outcome } = vm;
    let Outcome { ended, usage, .. } = outcome;
    let peak_bytes = outcome.peak(request.requested).get();
    let counters = counters.map(|counters| named_counters(&counters)).unwrap_or_default();
    let Groups { vm, key, kind, place } = request.groups;
    wire::Outcome {
        vm,
        profile: Some(wire::VmProfile { key, kind, place, counters }),
        requested_bytes: request.requested.get(),
        cores: request.cores.unwrap_or_default(),
        started_unix_ms: request.begins.0,
        ended_unix_ms: ended.0,
        peak_bytes,
        p99_bytes: usage.p99.map(Bytes::get),
        mean_bytes: usage.mean.map(Bytes::get),
        cpu_utilization_percent: usage.busy_percent,
    }
}

/// Converts a measured move.
pub fn measured_move_message(
    MeasuredMove { vm, program, measured, loss }: MeasuredMove,
) -> wire::MeasuredMove {
    let run = wire::LabelledWorkload {
        program,
        counters: named_counters(&loss.before.counters),
        slowdown: loss.loss,
        pool_load_share: measured_value(loss.before.pool_loads),
        latency_ratio: measured_value(loss.before.latency_ratio),
    };
    wire::MeasuredMove {
        vm,
        measured_unix_ms: measured.0,
        run: Some(run),
        counters_after: named_counters(&loss.after),
        standard_error: loss.standard_error,
    }
}

fn named_counters(counters: &Counters) -> HashMap<String, f64> {
    measured_counters(counters).map(|(name, number)| (name.to_owned(), number)).collect()
}

/// Converts the kind of a model.
///
/// # Errors
/// [`InvalidField`] if the kind is unspecified.
pub fn parse_kind(kind: wire::ModelKind) -> Result<Kind, InvalidField> {
    match kind {
        wire::ModelKind::Frigid => Ok(Kind::Frigid),
        wire::ModelKind::Sensitivity => Ok(Kind::Sensitivity),
        wire::ModelKind::Loss => Ok(Kind::Loss),
        wire::ModelKind::Unspecified => Err(InvalidField::new(
            "kind",
            kind.as_str_name(),
            "must be MODEL_KIND_FRIGID, MODEL_KIND_SENSITIVITY or MODEL_KIND_LOSS",
        )),
    }
}

/// Converts the format of a model file. Returns `None` for Tarn's own format.
///
/// # Errors
/// [`InvalidField`] if the format is unspecified.
pub fn parse_format(format: wire::ModelFormat) -> Result<Option<Format>, InvalidField> {
    match format {
        wire::ModelFormat::Tarn => Ok(None),
        wire::ModelFormat::Lightgbm => Ok(Some(Format::LightGbm)),
        wire::ModelFormat::Onnx => Ok(Some(Format::Onnx)),
        wire::ModelFormat::Unspecified => {
            let rule = "must be MODEL_FORMAT_TARN, MODEL_FORMAT_LIGHTGBM or MODEL_FORMAT_ONNX";
            Err(InvalidField::new("format", format.as_str_name(), rule))
        }
    }
}

/// Validates labelled workloads, the training data of a model of latency sensitivity.
///
/// # Errors
/// [`InvalidField`] with the first field that violates a rule.
pub fn parse_labels(labels: wire::Labels) -> Result<Labels<Workload>, InvalidField> {
    parse_labels_of(labels, |item| {
        let pool = [(POOL_LOADS_FIELD, item.pool_load_share), (LATENCY_RATIO_FIELD, item.latency_ratio)];
        if let Some((field, value)) = pool.into_iter().find_map(|(field, value)| Some((field, value?))) {
            return Err(InvalidField::new(field, value, "must be absent for a model of latency sensitivity"));
        }
        parse_workload(item)
    })
}

/// Validates labelled runs with pool memory, the training data of a model of the loss of running VMs.
///
/// # Errors
/// [`InvalidField`] with the first field that violates a rule.
pub fn parse_labelled_runs(labels: wire::Labels) -> Result<Labels<LabelledRun>, InvalidField> {
    let number = |field, value: Option<f64>, range: RangeInclusive<f64>, rule| match value {
        Some(value) if !range.contains(&value) => Err(InvalidField::new(field, value, rule)),
        value => Ok(value.unwrap_or(f64::NAN)),
    };
    parse_labels_of(labels, |item| {
        let rule = "must be a fraction from 0 to 1";
        let pool_loads = number(POOL_LOADS_FIELD, item.pool_load_share, 0.0..=1.0, rule)?;
        let latency_ratio =
            number(LATENCY_RATIO_FIELD, item.latency_ratio, LATENCY_RATIO_RANGE, LATENCY_RATIO_RULE)?;
        Ok(LabelledRun::new(parse_workload(item)?, pool_loads, latency_ratio))
    })
}

const POOL_LOADS_FIELD: &str = "labels.workloads.pool_load_share";
const LATENCY_RATIO_FIELD: &str = "labels.workloads.latency_ratio";

fn parse_workload(item: wire::LabelledWorkload) -> Result<Workload, InvalidField> {
    if !SLOWDOWN_RANGE.contains(&item.slowdown) {
        return Err(InvalidField::new("labels.workloads.slowdown", item.slowdown, SLOWDOWN_RULE));
    }
    let program = check_group_name("labels.workloads.program", item.program)?;
    if program.is_empty() {
        return Err(InvalidField::new("labels.workloads.program", "\"\"", "must not be empty"));
    }
    if item.counters.is_empty() {
        return Err(InvalidField::new("labels.workloads.counters", "(none)", "must not be empty"));
    }
    let counters = parse_counters("labels.workloads.counters", &item.counters)?;
    Ok(Workload { program, counters, slowdown: item.slowdown })
}

fn parse_labels_of<T>(
    labels: wire::Labels,
    parse: impl Fn(wire::LabelledWorkload) -> Result<T, InvalidField>,
) -> Result<Labels<T>, InvalidField> {
    let wire::Labels { workloads, pdm, modelled } = labels;
    if workloads.len() > WORKLOAD_LABELS_MAX {
        return Err(InvalidField::new(
            "labels.workloads",
            workloads.len(),
            format!("must be at most {WORKLOAD_LABELS_MAX}"),
        ));
    }
    let rule = || format!("must be from {PDM_MIN} to 1: 0.05 is 5 %");
    let error = || InvalidField::new("labels.pdm", pdm, rule());
    let pdm = Fraction::new(pdm).ok().filter(|pdm| pdm.get() >= PDM_MIN).ok_or_else(error)?;
    let workloads = workloads.into_iter().map(parse).collect::<Result<_, _>>()?;
    Ok(Labels { workloads, pdm, modelled })
}

/// Converts the properties of a model.
pub fn model_message(summary: ModelSummary) -> wire::Model {
    let provenance = summary.provenance;
    let kind = match summary.kind {
        Kind::Frigid => wire::ModelKind::Frigid,
        Kind::Sensitivity => wire::ModelKind::Sensitivity,
        Kind::Loss => wire::ModelKind::Loss,
    };
    let metrics = provenance.metrics.iter().map(|result| wire::Metric {
        target_rate: result.rate_target,
        actual_rate: result.rate_actual,
        share: result.frigid_share,
        samples: result.vms.into(),
    });
    let cutoff = |cutoff: &prediction::sensitivity::Cutoff| wire::Metric {
        target_rate: cutoff.fp,
        actual_rate: cutoff.fp,
        share: cutoff.placed,
        samples: provenance.rows,
    };
    let (cutoffs, accuracy) = match summary.evaluation {
        Evaluation::None => (Vec::new(), None),
        Evaluation::Cutoffs(cutoffs) => (cutoffs, None),
        Evaluation::Accuracy(accuracy) => (Vec::new(), Some(accuracy)),
    };
    wire::Model {
        kind: kind.into(),
        version: summary.version,
        serving: summary.is_serving,
        trained_by: provenance.trained_by,
        created_unix_ms: provenance.made.0,
        rows: provenance.rows,
        window_start_unix_ms: provenance.window.map(|(begins, _)| begins.0),
        window_end_unix_ms: provenance.window.map(|(_, ends)| ends.0),
        bytes: summary.bytes as u64,
        modelled: provenance.modelled,
        measured_moves: provenance.measured_moves,
        pdm: summary.pdm.map(Fraction::get),
        metrics: metrics.chain(cutoffs.iter().map(cutoff)).collect(),
        loss_accuracy: accuracy.map(|accuracy| wire::LossAccuracy {
            runs: accuracy.runs,
            flagged_harmed: accuracy.flagged_harmed,
            flagged_unharmed: accuracy.flagged_unharmed,
        }),
        comparison: summary.comparison.map(|c| wire::Comparison {
            version: c.version,
            vms: c.vms as u64,
            rate: c.rate.get(),
            share: c.share,
            share_of_serving: c.share_of_serving,
        }),
    }
}
