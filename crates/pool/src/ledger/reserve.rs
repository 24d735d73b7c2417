//! Reservations: capacity checks, choice of slices, and repeated requests. If possible, all slices
//! of a VM are from one EMC, because an EMC is a failure domain (Pond, section 4.4). To balance
//! load, the EMC with the most free slices is chosen.

use smallvec::SmallVec;
use units::limits::{RESERVATIONS_PER_HOST_MAX, SLICES_PER_HOST_MAX};
use units::{Bytes, EmcId, HostId, Name, Ns, ReservationId, SliceId, UserId};

use super::{Change, EmcEntry, HostEntry, Ledger, When, decision};
use crate::{
    audit::{Actor, DecisionKind, ExclusionReason, Subject},
    record::{Fence, Record, Rehome, RequestKey, Reservation, Scheduling, Stage},
    rejection::Rejection,
    slice::{Event, Owner},
};

/// Validated request to reserve memory and cores for a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserve {
    /// Identity of the request; a repeated request has the same key.
    pub request: RequestKey,
    /// Name of the host.
    pub host: Name,
    /// Name of the VM.
    pub vm: Name,
    /// Number of slices of pool memory.
    pub slices: u32,
    /// Local memory to reserve, in addition to the slices.
    pub local: Bytes,
    /// Number of cores to reserve.
    pub cores: u32,
    /// Whether the VM's pages must not be migrated.
    pub pinned: bool,
    /// Time until the reservation expires if it is not committed.
    pub commit_within: Ns,
    /// User who may access the VM's memory, in addition to root; `None` for the agent's user.
    pub uid: Option<UserId>,
}

/// Result of an accepted reservation request.
#[derive(Clone, Debug, PartialEq)]
pub enum ReserveOutcome {
    /// New reservation, and the change that creates it.
    New(ReservationId, Change),
    /// Existing reservation of an earlier request with the same key and content.
    Repeat(ReservationId),
}

/// Number of slices to take from one EMC.
struct EmcAllocation {
    emc: EmcId,
    slices: u32,
}

type Placement = SmallVec<[EmcAllocation; 2]>;

impl Ledger {
    /// Decides a request to reserve memory and cores for a VM.
    ///
    /// # Errors
    /// Returns an error if the request ID was used with other content or the VM has an active
    /// reservation. Also returns an error if the host accepts no reservations or has too little
    /// capacity.
    pub fn decide_reserve(&self, when: When, request: Reserve) -> Result<ReserveOutcome, Rejection> {
        if let Some(id) = self.by_request.get(&request.request) {
            return self.resolve_repeated_request(*id, &request);
        }
        if let Some(id) = self.by_vm.get(&request.vm) {
            return Err(self.vm_already_reserved(*id, &request.vm));
        }
        let host_id = self
            .find_host_by_name(&request.host)
            .ok_or_else(|| Rejection::NoSuchHost(request.host.clone()))?;
        let host = &self.hosts[&host_id];
        check_capacity(host, &request)?;
        let placement = self.choose_emcs(host, &request)?;
        Ok(ReserveOutcome::New(
            self.meta.next_reservation,
            self.reservation_change(when, request, host_id, &placement),
        ))
    }

    fn resolve_repeated_request(
        &self,
        id: ReservationId,
        request: &Reserve,
    ) -> Result<ReserveOutcome, Rejection> {
        let existing = &self.reservations[&id];
        // The host may have been removed; the ledger no longer contains its name.
        let host = self.hosts.get(&existing.host).map(|entry| &entry.host.name);
        let (slices, local) = existing.requested_memory();
        let same = [
            ("vm", existing.vm == request.vm),
            ("host", host.is_none_or(|name| *name == request.host)),
            ("pool_bytes", slices == request.slices as usize),
            ("local_bytes", local == request.local),
            ("cores", existing.cores == request.cores),
            ("pinned", existing.pinned == request.pinned),
            ("commit_within_ms", existing.commit_within == request.commit_within),
            ("uid", existing.uid == request.uid),
        ];
        match same.iter().find(|(_, same)| !same) {
            None => Ok(ReserveOutcome::Repeat(id)),
            Some((differs, _)) => {
                Err(Rejection::RequestReused { id: request.request.id.clone(), reservation: id, differs })
            }
        }
    }

    fn vm_already_reserved(&self, id: ReservationId, vm: &Name) -> Rejection {
        let host = self.hosts[&self.reservations[&id].host].host.name.clone();
        Rejection::VmAlreadyReserved { vm: vm.clone(), reservation: id, host }
    }

    /// Allocates slices from the EMCs with the most free slices first. If one EMC has enough free
    /// slices, all slices are from this EMC; otherwise they are from as few EMCs as possible.
    fn choose_emcs(&self, host: &HostEntry, request: &Reserve) -> Result<Placement, Rejection> {
        let mut placement = Placement::new();
        if request.slices == 0 {
            return Ok(placement);
        }
        let mut open: SmallVec<[(u32, EmcId); 4]> =
            self.reach(host).map(|(id, entry)| (entry.free(), id)).collect();
        open.sort_by_key(|(free, id)| (std::cmp::Reverse(*free), *id));
        let mut missing = request.slices;
        for (free, emc) in open {
            let slices = missing.min(free);
            if slices > 0 {
                placement.push(EmcAllocation { emc, slices });
                missing -= slices;
            }
        }
        if missing > 0 {
            return Err(Rejection::OutOfSlices {
                host: request.host.clone(),
                requested: request.slices,
                free: request.slices - missing,
                closed: self.excluded_emcs(host),
            });
        }
        Ok(placement)
    }

    /// Returns the attached EMCs that have free slices but cannot be used now, each with its number
    /// of free slices and the reason.
    fn excluded_emcs(&self, host: &HostEntry) -> Vec<(Name, u32, ExclusionReason)> {
        let attached = host.host.emcs.iter().filter_map(|id| Some((*id, self.emcs.get(id)?)));
        let closed = attached
            .filter_map(|(id, e)| Some((e.emc.name.clone(), e.free(), exclusion_reason(host, id, e)?)));
        closed.filter(|(_, free, _)| *free > 0).collect()
    }

    /// Returns the EMCs from which new reservations of a host may get slices.
    pub fn reach<'a>(&'a self, host: &'a HostEntry) -> impl Iterator<Item = (EmcId, &'a EmcEntry)> {
        let entries = host.host.emcs.iter().filter_map(|id| Some((*id, self.emcs.get(id)?)));
        entries.filter(|(id, entry)| exclusion_reason(host, *id, entry).is_none())
    }

    fn reservation_change(
        &self,
        when: When,
        request: Reserve,
        host: HostId,
        placement: &Placement,
    ) -> Change {
        let id = self.meta.next_reservation;
        let what = self.placement_decision(id, &request, host, placement);
        let (actor, subject) =
            (Actor::Client(request.request.client.clone()), Subject::Vm(request.vm.clone()));
        let mut slices: Vec<SliceId> = Vec::with_capacity(request.slices as usize);
        for allocation in placement {
            slices.extend(self.emcs[&allocation.emc].free.iter().take(allocation.slices as usize));
        }
        slices.sort_unstable();
        let mut records = Vec::with_capacity(slices.len() + 2);
        for slice in &slices {
            let slot = self.slot(*slice).expect("slices in the free set exist");
            let slot = slot.step(Event::Assign(Owner { host, reservation: id }));
            records.push(Record::Slice(*slice, slot.expect("slices in the free set accept an assignment")));
        }
        let reservation = Reservation {
            vm: request.vm,
            host,
            slices,
            local: request.local,
            cores: request.cores,
            pinned: request.pinned,
            request: request.request,
            commit_within: request.commit_within,
            created: when.wall,
            stage: Stage::Reserved {
                deadline: when.now.after(request.commit_within),
                deadline_unix: units::UnixMs(when.wall.0.saturating_add(request.commit_within.as_ms())),
            },
            uid: request.uid,
            has_process: false,
            rehome: Rehome::None,
        };
        records.push(Record::Reservation(id, reservation));
        records.push(decision(when, actor, subject, what));
        Change(records)
    }

    fn placement_decision(
        &self,
        reservation: ReservationId,
        request: &Reserve,
        host: HostId,
        placement: &Placement,
    ) -> DecisionKind {
        let host = &self.hosts[&host];
        let attached = &host.host.emcs;
        let most_free = placement.iter().filter_map(|chosen| Some(self.emcs.get(&chosen.emc)?.free())).max();
        let mut taken = Vec::with_capacity(placement.len());
        let mut others = Vec::with_capacity(attached.len() - placement.len());
        for (id, entry) in attached.iter().filter_map(|id| Some((id, self.emcs.get(id)?))) {
            let (name, free) = (entry.emc.name.clone(), entry.free());
            if let Some(allocation) = placement.iter().find(|chosen| chosen.emc == *id) {
                taken.push((name, allocation.slices, free));
            } else {
                let fewer = match free {
                    _ if free < request.slices => ExclusionReason::TooSmall,
                    _ if most_free == Some(free) => ExclusionReason::Tied,
                    _ => ExclusionReason::Fuller,
                };
                others.push((name, free, exclusion_reason(host, *id, entry).unwrap_or(fewer)));
            }
        }
        DecisionKind::Reserved {
            reservation,
            host: request.host.clone(),
            taken,
            others,
            local: request.local,
            cores: request.cores,
        }
    }
}

fn exclusion_reason(host: &HostEntry, emc: EmcId, entry: &EmcEntry) -> Option<ExclusionReason> {
    if host.unusable_emcs().contains_key(&emc) {
        return Some(ExclusionReason::NotSeen);
    }
    if entry.up && host.host.unconfirmed_fences.contains(&emc) {
        return Some(ExclusionReason::FenceUnconfirmed);
    }
    match (entry.up, entry.emc.scheduling) {
        (false, _) => Some(ExclusionReason::Failed),
        (true, Scheduling::Cordoned) => Some(ExclusionReason::Cordoned),
        (true, Scheduling::Draining) => Some(ExclusionReason::Draining),
        (true, Scheduling::Enabled) => None,
    }
}

/// Returns the reason why a host accepts no reservations according to the ledger; `None` if it
/// accepts them.
pub(super) fn unschedulable_reason(host: &HostEntry) -> Option<&'static str> {
    match (host.host.fence, host.host.scheduling, host.host.must_report) {
        (Fence::Fencing { .. }, _, _) => Some("being fenced"),
        (Fence::Fenced, _, _) => Some("fenced"),
        (_, Scheduling::Cordoned, _) => Some("cordoned"),
        (_, Scheduling::Draining, _) => Some("draining"),
        (_, _, true) => Some("waiting for its first report after a restore of the ledger"),
        (Fence::None, Scheduling::Enabled, false) => None,
    }
}

impl HostEntry {
    /// Returns the reason why the host accepts no reservations; `None` if it accepts them.
    pub fn unschedulable_reason(&self) -> Option<&'static str> {
        unschedulable_reason(self)
    }
}

fn check_capacity(host: &HostEntry, request: &Reserve) -> Result<(), Rejection> {
    let name = || request.host.clone();
    if let Some(why) = unschedulable_reason(host) {
        return Err(Rejection::HostNotSchedulable { host: name(), why });
    }
    if host.cores_free() < request.cores {
        return Err(Rejection::OutOfCores {
            host: name(),
            requested: request.cores,
            free: host.cores_free(),
        });
    }
    if host.local_free() < request.local {
        return Err(Rejection::OutOfLocal {
            host: name(),
            requested: request.local,
            free: host.local_free(),
        });
    }
    if host.reservations.len() + host.ended_reservations_with_process.len() >= RESERVATIONS_PER_HOST_MAX {
        return Err(Rejection::LimitExceeded {
            what: "reservations on one host",
            max: RESERVATIONS_PER_HOST_MAX as u64,
        });
    }
    if host.held.len() + request.slices as usize > SLICES_PER_HOST_MAX as usize {
        return Err(Rejection::LimitExceeded {
            what: "slices on one host",
            max: u64::from(SLICES_PER_HOST_MAX),
        });
    }
    Ok(())
}
