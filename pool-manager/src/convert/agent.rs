//! Validates and converts messages from agents, and converts desired states for agents.

use std::collections::BTreeMap;

use pool::protocol::{
    DesiredRelease, DesiredState, FailureReason, Hello, Holding, ObservedRehome, ObservedState, ObservedVm,
    ScrubReport, SeenDevice, SliceFailure,
};
use proto::v1 as wire;
use units::limits::{EMCS_PER_HOST_MAX, NAME_BYTES_MAX, REASON_BYTES_MAX, RESERVATIONS_PER_HOST_MAX};
use units::{
    Bytes, DesiredVersion, Epoch, InstanceId, Name, ReservationId, Revision, SliceId, UnixMs, single_line,
};

use super::requests::{InvalidField, parse_local_memory, parse_name, parse_user_id};

/// Validates the first message of an agent, and returns the host's name and the agent's identity.
///
/// # Errors
/// [`InvalidField`] if the protocol version differs or a field is malformed.
pub fn parse_hello(h: wire::Hello) -> Result<(Name, Hello), InvalidField> {
    if h.protocol_version != proto::PROTOCOL_VERSION {
        let rule = format!("must be {}: update the older of manager and agent", proto::PROTOCOL_VERSION);
        return Err(InvalidField::new("protocol_version", h.protocol_version, rule));
    }
    if h.boot_id.is_empty() || h.boot_id.len() > 64 {
        return Err(InvalidField::new("boot_id", format!("{:?}", h.boot_id), "must have 1 to 64 bytes"));
    }
    if h.host_memory_socket.len() > 256 {
        return Err(InvalidField::new(
            "host_memory_socket",
            h.host_memory_socket.len(),
            "bytes: must be at most 256",
        ));
    }
    let name = parse_name("host", &h.host)?;
    let devices = h.devices.into_iter().map(parse_seen_device).collect::<Result<Vec<_>, _>>()?;
    if devices.len() > EMCS_PER_HOST_MAX {
        let rule = format!("must be at most {EMCS_PER_HOST_MAX}");
        return Err(InvalidField::new("devices", devices.len(), rule));
    }
    let (instance, boot_id, host_memory_socket) = (InstanceId(h.instance), h.boot_id, h.host_memory_socket);
    Ok((name, Hello { instance, boot_id, host_memory_socket, devices, can_rehome: h.can_rehome }))
}

fn parse_seen_device(d: wire::SeenDevice) -> Result<SeenDevice, InvalidField> {
    if d.serial.is_empty() || d.serial.len() > NAME_BYTES_MAX {
        let rule = format!("must have 1 to {NAME_BYTES_MAX} bytes");
        return Err(InvalidField::new("devices.serial", format!("{:?}", d.serial), rule));
    }
    let shown = |text: String| text.chars().take(REASON_BYTES_MAX / 4).collect();
    let problem = d.problem.map(shown); // divided by 4: a UTF-8 character has at most 4 bytes
    Ok(SeenDevice { serial: d.serial, slices: d.slices, problem })
}

fn to_holding(h: wire::SliceEpoch) -> Holding {
    Holding { slice: SliceId(h.slice), epoch: Epoch(h.epoch) }
}

pub(super) fn parse_reservation_id(text: &str) -> Result<ReservationId, InvalidField> {
    text.parse().map_err(|problem| InvalidField { field: "reservation", problem })
}

/// Validates the observed state that an agent reports.
///
/// # Errors
/// [`InvalidField`] if a field is malformed, or if there are more than
/// [`RESERVATIONS_PER_HOST_MAX`] VMs.
pub fn parse_report(h: wire::ObservedState) -> Result<ObservedState, InvalidField> {
    if h.vms.len() > RESERVATIONS_PER_HOST_MAX {
        let rule = format!("must be at most {RESERVATIONS_PER_HOST_MAX} VMs");
        return Err(InvalidField::new("vms", h.vms.len(), &rule));
    }
    Ok(ObservedState {
        sequence: h.sequence,
        after: h.after,
        part: 0,
        is_continued: false,
        number: DesiredVersion { generation: h.generation, revision: Revision(h.revision) },
        whole: h.complete,
        online: h.online.into_iter().map(to_holding).collect(),
        released: h.released.into_iter().map(to_holding).collect(),
        scrubbed: h.scrubbed.into_iter().map(to_scrub_report).collect(),
        failed: h.failed.into_iter().map(parse_slice_failure).collect::<Result<_, _>>()?,
        vms: h.vms.into_iter().map(parse_observed_vm).collect::<Result<BTreeMap<_, _>, _>>()?,
        ended: h.ended.iter().map(|id| parse_reservation_id(id)).collect::<Result<_, _>>()?,
        clean: h.clean,
    })
}

/// Returns the touched memory of each VM: the sum of touched local and pool memory.
///
/// # Errors
/// [`InvalidField`] if the ID of a reservation is malformed.
pub fn parse_touched_memory(
    reports: Vec<wire::VmTouched>,
) -> Result<Vec<(ReservationId, Bytes)>, InvalidField> {
    let touched = |vm: wire::VmTouched| {
        let bytes = Bytes::new(vm.local_bytes.saturating_add(vm.pool_bytes));
        Ok((parse_reservation_id(&vm.reservation)?, bytes))
    };
    reports.into_iter().map(touched).collect()
}

fn to_scrub_report(s: wire::ScrubResult) -> ScrubReport {
    ScrubReport {
        holding: Holding { slice: SliceId(s.slice), epoch: Epoch(s.epoch) },
        started: UnixMs(s.started_unix_ms),
        ended: UnixMs(s.ended_unix_ms),
        verified: Bytes::new(s.bytes_verified),
    }
}

fn parse_slice_failure(f: wire::SliceFailure) -> Result<SliceFailure, InvalidField> {
    let reason = match f.reason() {
        wire::SliceFailureReason::NotZero => FailureReason::NotZero,
        wire::SliceFailureReason::Host => FailureReason::Host,
        wire::SliceFailureReason::Unspecified => {
            return Err(InvalidField::new("failed.reason", f.reason, "must be NOT_ZERO or HOST"));
        }
    };
    let holding = Holding { slice: SliceId(f.slice), epoch: Epoch(f.epoch) };
    Ok(SliceFailure {
        holding,
        reason,
        message: f.message.chars().take(units::limits::REASON_BYTES_MAX).collect(),
    })
}

fn parse_observed_vm(vm: wire::ObservedVm) -> Result<(ReservationId, ObservedVm), InvalidField> {
    let slices = vm.slices.into_iter().map(to_holding).collect();
    let (name, local) = (parse_name("vm", &vm.vm)?, parse_local_memory(vm.local_bytes)?);
    let (pinned, uid) = (vm.pinned, vm.uid.map(parse_user_id).transpose()?);
    let rehome = match vm.rehome_failure {
        _ if vm.rehomed => ObservedRehome::Done,
        Some(wire::RehomeFailure { attempt, reason }) => {
            ObservedRehome::Failed { attempt, why: single_line(&reason, REASON_BYTES_MAX) }
        }
        None => ObservedRehome::None,
    };
    Ok((
        parse_reservation_id(&vm.reservation)?,
        ObservedVm { vm: name, pid: vm.pid, slices, local, pinned, uid, rehome },
    ))
}

/// Converts the desired state of a host for its agent.
pub fn desired_state_message(rack_uuid: String, w: DesiredState) -> wire::DesiredState {
    let slices = |slices: BTreeMap<Holding, _>| {
        let slice = |(h, handle): (Holding, pool::protocol::Handle)| wire::DesiredSlice {
            slice: h.slice.0,
            epoch: h.epoch.0,
            handle: handle.place.to_string(),
            emc: handle.emc.to_string(),
        };
        slices.into_iter().map(slice).collect()
    };
    let vm = |(reservation, v): (ReservationId, pool::protocol::DesiredVm)| wire::DesiredVm {
        vm: v.vm.to_string(),
        reservation: reservation.to_string(),
        local_bytes: v.local.get(),
        slices: slices(v.slices),
        pinned: v.pinned,
        uid: v.uid.map(u32::from),
        rehome_attempt: v.rehome.map(|rehome| rehome.attempt),
        rehome_cancelled: v.rehome.is_some_and(|rehome| rehome.is_cancelled),
    };
    let release = |(h, release): (Holding, DesiredRelease)| wire::DesiredRelease {
        slice: h.slice.0,
        epoch: h.epoch.0,
        force: release.force,
        handle: release.handle.place.to_string(),
    };
    let scrub = |(h, handle): (Holding, pool::protocol::Handle)| wire::DesiredScrub {
        slice: h.slice.0,
        epoch: h.epoch.0,
        handle: handle.place.to_string(),
    };
    wire::DesiredState {
        rack_uuid,
        generation: w.number.generation,
        revision: w.number.revision.0,
        instance: w.instance.0,
        vms: w.vms.into_iter().map(vm).collect(),
        release: w.release.into_iter().map(release).collect(),
        scrub: w.scrub.into_iter().map(scrub).collect(),
        fenced: w.fenced,
        base: w
            .base
            .map(|base| wire::DesiredVersion { generation: base.generation, revision: base.revision.0 }),
        removed_vms: w.removals.vms.iter().map(ToString::to_string).collect(),
        removed_slices: w.removals.slices.iter().map(|slice| slice.0).collect(),
    }
}

#[cfg(test)]
mod tests {
    use units::UserId;

    use super::*;

    #[test]
    fn report_with_too_many_vms_is_rejected_with_the_limit() {
        let message = |count| wire::ObservedState {
            vms: vec![wire::ObservedVm::default(); count],
            ..Default::default()
        };
        let InvalidField { field, problem } =
            parse_report(message(4097)).expect_err("an invalid message was accepted");
        assert_eq!(field, "vms");
        assert!(problem.contains("4097") && problem.contains("at most 4096"), "{problem}");
        assert_ne!(parse_report(message(4096)).expect_err("VMs without names were accepted").field, "vms");
    }

    #[test]
    fn local_memory_of_a_reported_vm_must_be_whole_mib() {
        let vm = |local_bytes| wire::ObservedVm {
            vm: "web".into(),
            pid: 7,
            slices: Vec::new(),
            reservation: ReservationId(1).to_string(),
            local_bytes,
            pinned: true,
            uid: None,
            rehomed: false,
            rehome_failure: None,
        };
        let (_, observed) = parse_observed_vm(vm(3 << 20)).expect("a valid VM was rejected");
        assert_eq!((observed.local, observed.pinned), (Bytes::mib(3), true));
        for bytes in [(3 << 20) + 1, u64::MAX] {
            let InvalidField { field, problem } =
                parse_observed_vm(vm(bytes)).expect_err("an invalid message was accepted");
            assert_eq!(field, "local_bytes");
            assert!(problem.contains(&bytes.to_string()), "{problem}");
        }
    }

    #[test]
    fn user_of_a_vm_is_converted_in_both_directions() {
        let vm =
            |uid| wire::ObservedVm { vm: "web".into(), reservation: "r-1".into(), uid, ..Default::default() };
        let (id, observed) = parse_observed_vm(vm(Some(2001))).expect("a valid VM was rejected");
        let uid = UserId::new(2001).ok();
        assert_eq!(
            (observed.uid, parse_observed_vm(vm(None)).expect("a valid VM was rejected").1.uid),
            (uid, None)
        );
        let InvalidField { field, problem } =
            parse_observed_vm(vm(Some(u32::MAX))).expect_err("an invalid message was accepted");
        assert_eq!(field, "uid");
        assert!(problem.contains("4294967295"), "{problem}");
        let ObservedVm { vm, local, pinned, uid, .. } = observed;
        let rehome = Some(pool::protocol::DesiredRehome { attempt: 3, is_cancelled: true });
        let desired_vm =
            pool::protocol::DesiredVm { vm, local, pinned, uid, slices: BTreeMap::new(), rehome };
        let desired = DesiredState {
            number: DesiredVersion::default(),
            base: None,
            instance: InstanceId(1),
            vms: [(id, desired_vm)].into(),
            release: BTreeMap::new(),
            scrub: BTreeMap::new(),
            removals: pool::protocol::Removals::default(),
            fenced: false,
        };
        let sent = &desired_state_message(String::new(), desired).vms[0];
        assert_eq!((sent.uid, sent.rehome_attempt, sent.rehome_cancelled), (Some(2001), Some(3), true));
    }
}
