//! Conversion between protobuf messages of the session and the types of `pool`. Messages of the
//! manager are validated.

use std::collections::BTreeMap;

use pool::protocol::{
    DesiredRehome, DesiredRelease, DesiredState, DesiredVm, FailureReason, Handle, Holding, ObservedRehome,
    ObservedState, ObservedVm, Removals, ScrubReport, SeenDevice,
};
use proto::v1 as wire;
use units::{
    Bytes, DesiredVersion, Epoch, InstanceId, Name, ReservationId, Revision, SliceId, UserId,
    limits::{REASON_BYTES_MAX, WEIGHT_MAX, WEIGHT_MIN, is_weight},
    truncated,
};

use crate::usage_table::TouchedMemory;

mod evictions;
mod shares;
mod soft_memory;
mod tenants;

pub use self::{
    evictions::to_wire_evictions, shares::to_wire_shares, soft_memory::to_wire_soft_memory,
    tenants::to_wire_tenants,
};

/// Invalid value in a message of the manager: its field, the value and the violated rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct InvalidMessage {
    field: &'static str,
    problem: String,
}

fn to_holding(slice: u32, epoch: u64) -> Holding {
    Holding { slice: SliceId(slice), epoch: Epoch(epoch) }
}

/// Validates and converts a desired state.
///
/// # Errors
/// [`InvalidMessage`] if a name, a reservation or a user id is invalid.
pub fn to_desired_state(w: wire::DesiredState) -> Result<DesiredState, InvalidMessage> {
    let vms = w.vms.into_iter().map(to_desired_vm).collect::<Result<BTreeMap<_, _>, _>>()?;
    let number = |generation, revision| DesiredVersion { generation, revision: Revision(revision) };
    let removals = Removals {
        vms: w.removed_vms.iter().map(|id| parse_reservation("removed_vms", id)).collect::<Result<_, _>>()?,
        slices: w.removed_slices.into_iter().map(SliceId).collect(),
    };
    Ok(DesiredState {
        number: number(w.generation, w.revision),
        base: w.base.map(|base| number(base.generation, base.revision)),
        instance: InstanceId(w.instance),
        vms,
        release: w.release.into_iter().map(to_desired_release).collect(),
        scrub: w
            .scrub
            .into_iter()
            .map(|s| (to_holding(s.slice, s.epoch), Handle::new("", s.handle)))
            .collect(),
        removals,
        fenced: w.fenced,
    })
}

fn parse_reservation(field: &'static str, text: &str) -> Result<ReservationId, InvalidMessage> {
    text.parse().map_err(|problem| InvalidMessage { field, problem })
}

fn to_desired_release(r: wire::DesiredRelease) -> (Holding, DesiredRelease) {
    (to_holding(r.slice, r.epoch), DesiredRelease { force: r.force, handle: Handle::new("", r.handle) })
}

fn to_desired_vm(vm: wire::DesiredVm) -> Result<(ReservationId, DesiredVm), InvalidMessage> {
    let name =
        Name::new(&vm.vm).map_err(|error| InvalidMessage { field: "vms.vm", problem: error.to_string() })?;
    let reservation = parse_reservation("vms.reservation", &vm.reservation)?;
    let slices = vm.slices.into_iter().map(|s| (to_holding(s.slice, s.epoch), Handle::new(s.emc, s.handle)));
    let local = Bytes::new(vm.local_bytes);
    let uid = vm.uid.map(UserId::new).transpose();
    let uid = uid.map_err(|error| InvalidMessage { field: "vms.uid", problem: error.to_string() })?;
    let (pinned, slices) = (vm.pinned, slices.collect());
    let rehome =
        vm.rehome_attempt.map(|attempt| DesiredRehome { attempt, is_cancelled: vm.rehome_cancelled });
    Ok((reservation, DesiredVm { vm: name, local, pinned, uid, slices, rehome }))
}

/// Validates and converts the weights of this host's tenants.
///
/// # Errors
/// [`InvalidMessage`] if a name or a weight is invalid.
pub fn to_weights(w: wire::Weights) -> Result<BTreeMap<Name, f64>, InvalidMessage> {
    let weight = |w: wire::Weight| {
        let name = Name::new(&w.tenant);
        let name =
            name.map_err(|error| InvalidMessage { field: "weights.tenant", problem: error.to_string() })?;
        let problem = format!("{}: must be from {WEIGHT_MIN} to {WEIGHT_MAX}", w.weight);
        if is_weight(w.weight) {
            Ok((name, w.weight))
        } else {
            Err(InvalidMessage { field: "weights.weight", problem })
        }
    };
    w.weights.into_iter().map(weight).collect()
}

fn to_wire_slice_epoch(h: Holding) -> wire::SliceEpoch {
    wire::SliceEpoch { slice: h.slice.0, epoch: h.epoch.0 }
}

/// Converts a pool device that is attached to this machine to a message.
pub fn to_wire_seen_device(d: SeenDevice) -> wire::SeenDevice {
    wire::SeenDevice { serial: d.serial, slices: d.slices, problem: d.problem }
}

fn to_wire_vm((reservation, vm): (ReservationId, ObservedVm)) -> wire::ObservedVm {
    let rehome_failure = match &vm.rehome {
        ObservedRehome::Failed { attempt, why } => {
            Some(wire::RehomeFailure { attempt: *attempt, reason: truncated(why.clone(), REASON_BYTES_MAX) })
        }
        ObservedRehome::None | ObservedRehome::Done => None,
    };
    wire::ObservedVm {
        vm: vm.vm.to_string(),
        pid: vm.pid,
        slices: vm.slices.into_iter().map(to_wire_slice_epoch).collect(),
        reservation: reservation.to_string(),
        local_bytes: vm.local.get(),
        pinned: vm.pinned,
        uid: vm.uid.map(u32::from),
        rehomed: vm.rehome == ObservedRehome::Done,
        rehome_failure,
    }
}

/// Converts a report of the observed state, and adds the touched memory of VMs.
pub fn to_wire_observed_state(
    instance: InstanceId,
    h: ObservedState,
    touched: Vec<(ReservationId, TouchedMemory)>,
) -> wire::ObservedState {
    let touched_memory = |(reservation, touched): (ReservationId, TouchedMemory)| wire::VmTouched {
        reservation: reservation.to_string(),
        local_bytes: touched.local.get(),
        pool_bytes: touched.pool.get(),
    };
    wire::ObservedState {
        instance: instance.0,
        generation: h.number.generation,
        revision: h.number.revision.0,
        complete: h.whole,
        sequence: h.sequence,
        after: h.after,
        online: h.online.into_iter().map(to_wire_slice_epoch).collect(),
        released: h.released.into_iter().map(to_wire_slice_epoch).collect(),
        scrubbed: h.scrubbed.into_iter().map(to_wire_scrub_result).collect(),
        failed: h.failed.into_iter().map(to_wire_slice_failure).collect(),
        vms: h.vms.into_iter().map(to_wire_vm).collect(),
        ended: h.ended.iter().map(ToString::to_string).collect(),
        clean: h.clean,
        touched: touched.into_iter().map(touched_memory).collect(),
    }
}

fn to_wire_scrub_result(s: ScrubReport) -> wire::ScrubResult {
    wire::ScrubResult {
        slice: s.holding.slice.0,
        epoch: s.holding.epoch.0,
        started_unix_ms: s.started.0,
        ended_unix_ms: s.ended.0,
        bytes_verified: s.verified.get(),
    }
}

fn to_wire_slice_failure(f: pool::protocol::SliceFailure) -> wire::SliceFailure {
    let reason = match f.reason {
        FailureReason::NotZero => wire::SliceFailureReason::NotZero,
        FailureReason::Host => wire::SliceFailureReason::Host,
    };
    wire::SliceFailure {
        slice: f.holding.slice.0,
        epoch: f.holding.epoch.0,
        reason: reason.into(),
        message: f.message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_user_is_converted_in_both_directions() {
        let desired = |uid| wire::DesiredVm {
            vm: "a".into(),
            reservation: "r-1".into(),
            local_bytes: 1 << 20,
            uid,
            ..Default::default()
        };
        let uid = |number| to_desired_vm(desired(number)).map(|(_, vm)| vm.uid);
        assert_eq!((uid(None), uid(Some(2001))), (Ok(None), Ok(UserId::new(2001).ok())));
        let error = uid(Some(u32::MAX)).expect_err("an invalid user id was accepted");
        assert_eq!(error.to_string(), "vms.uid: 4294967295 is not a user id: must be at most 4294967294");
        let rehome = |attempt, is_cancelled| {
            let rehomed =
                wire::DesiredVm { rehome_attempt: attempt, rehome_cancelled: is_cancelled, ..desired(None) };
            to_desired_vm(rehomed).expect("the message is valid").1.rehome
        };
        assert_eq!(rehome(None, true), None);
        for is_cancelled in [false, true] {
            assert_eq!(rehome(Some(2), is_cancelled), Some(DesiredRehome { attempt: 2, is_cancelled }));
        }
        let vm = pool::protocol::ObservedVm {
            vm: Name::new("a").expect("valid name"),
            pid: 7,
            slices: Vec::new(),
            local: Bytes::ZERO,
            pinned: false,
            uid: UserId::new(2001).ok(),
            rehome: ObservedRehome::None,
        };
        let report = ObservedState { vms: [(ReservationId(1), vm)].into(), ..ObservedState::default() };
        assert_eq!(to_wire_observed_state(InstanceId(1), report, Vec::new()).vms[0].uid, Some(2001));
    }
}
