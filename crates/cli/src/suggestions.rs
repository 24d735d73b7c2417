//! Suggestions for misspelled names. The hint of a request with an unknown name contains the most
//! similar name and all existing names.

use crate::{
    Connection, Failure, ManagerCommand,
    args::{
        CordonTarget, ExplainSubject, Migration, Resource, Set, Subject, UncordonTarget, VmFilter,
        VmOrReservation,
    },
    failure,
    hint::{self, RequestSubjects},
    lists,
};

/// Maximum number of existing names in a hint.
const NAMES_SHOWN_MAX: usize = 8;
/// Maximum Damerau-Levenshtein distance of a suggested name from the requested name.
const EDIT_DISTANCE_MAX: usize = 2;

/// Names of resources in a command. They are inserted into hints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    host: Option<String>,
    emc: Option<String>,
    vm: Option<String>,
    /// Name of the VM, or the ID of its reservation (r-N).
    vm_or_reservation: Option<String>,
    slice: Option<u32>,
}

impl Names {
    fn host(name: &impl ToString) -> Self {
        Self { host: Some(name.to_string()), ..Self::default() }
    }

    fn emc(name: &impl ToString) -> Self {
        Self { emc: Some(name.to_string()), ..Self::default() }
    }

    fn vm(target: &VmOrReservation) -> Self {
        match target {
            VmOrReservation::Vm(name) => {
                let name = Some(name.to_string());
                Self { vm: name.clone(), vm_or_reservation: name, ..Self::default() }
            }
            VmOrReservation::Reservation(id) => {
                Self { vm_or_reservation: Some(id.to_string()), ..Self::default() }
            }
        }
    }

    fn slice(slice: u32) -> Self {
        Self { slice: Some(slice), ..Self::default() }
    }

    /// Adds a hint for this kind of error. Commands in the hint name the host, VM or slice of the
    /// request.
    fn add_generic_hint(self, failure: Failure) -> Failure {
        let subjects = RequestSubjects { host: self.host, vm: self.vm_or_reservation, slice: self.slice };
        match failure {
            Failure::Rejected(status)
                if subjects != RequestSubjects::default() && !failure::is_transport_error(&status) =>
            {
                let reason = Failure::Rejected(status.clone()).reason();
                match hint::hint_for_rejection(status.code(), reason.as_deref(), &subjects) {
                    Some(hint) => Failure::RejectedWithHint { status, hint },
                    None => Failure::Rejected(status),
                }
            }
            failure => failure,
        }
    }

    /// Collects the names in a command.
    pub(crate) fn from_command(command: &ManagerCommand) -> Self {
        use ManagerCommand as C;
        match command {
            C::Get(resource) => Self::from_resource(resource),
            C::Set(Set::Weights(args)) => Self::host(&args.host),
            C::Describe(subject) | C::Explain(ExplainSubject::Resource(subject)) => {
                Self::from_subject(subject)
            }
            C::Explain(ExplainSubject::Shares(args)) => Self::host(&args.host),
            C::Explain(ExplainSubject::Tenant(args)) => Self::host(&args.host),
            C::Reserve(args) => {
                Self { vm_or_reservation: Some(args.vm.to_string()), ..Self::host(&args.host) }
            }
            C::Fence(args) => Self::host(&args.host),
            C::WaitReady(args) | C::Commit(args) => Self::vm(&args.target),
            C::Release(args) => Self::vm(&args.target),
            C::Rehome(args) => Self::vm(&args.target),
            C::Cordon(CordonTarget::Host(args)) | C::Drain(CordonTarget::Host(args)) => {
                Self::host(&args.name)
            }
            C::Cordon(CordonTarget::Emc(args)) | C::Drain(CordonTarget::Emc(args)) => Self::emc(&args.name),
            C::Uncordon(UncordonTarget::Host(args)) => Self::host(&args.name),
            C::Uncordon(UncordonTarget::Emc(args)) => Self::emc(&args.name),
            C::Uncordon(UncordonTarget::Slice { slice, .. }) => Self::slice(*slice),
            C::Migration(Migration::Resolve { vm, .. }) => Self::vm(&VmOrReservation::Vm(vm.clone())),
            _ => Self::default(),
        }
    }

    fn from_resource(resource: &Resource) -> Self {
        match resource {
            Resource::Hosts(filter) => filter.name.as_ref().map(Self::host).unwrap_or_default(),
            Resource::Emcs(filter) => filter.name.as_ref().map(Self::emc).unwrap_or_default(),
            Resource::Reservations(filter) => filter.target.as_ref().map(Self::vm).unwrap_or_default(),
            Resource::Vms(VmFilter { vm: Some(vm) }) => Self::vm(&VmOrReservation::Vm(vm.clone())),
            Resource::Shares(args)
            | Resource::Tenants(args)
            | Resource::Evictions(args)
            | Resource::SoftMemory(args)
            | Resource::Weights(args) => Self::host(&args.host),
            Resource::Rack
            | Resource::Vms(VmFilter { vm: None })
            | Resource::Slices(_)
            | Resource::Migrations(_)
            | Resource::Models
            | Resource::Managers
            | Resource::Alarms(_) => Self::default(),
        }
    }

    fn from_subject(subject: &Subject) -> Self {
        match subject {
            Subject::Vm { target } => Self::vm(target),
            Subject::Host { name } => Self::host(name),
            Subject::Emc { name } => Self::emc(name),
            Subject::Rack | Subject::Slice { .. } => Self::default(),
        }
    }

    /// Adds a hint to an error. If a name was not found, the hint lists existing names. Otherwise,
    /// the hint depends on the reason of the error.
    pub(crate) async fn add_hint(self, failure: Failure, manager: &Connection) -> Failure {
        let suggestion = match failure.reason().as_deref() {
            Some("HOST_NOT_FOUND") => suggest("hosts", self.host.clone(), host_names(manager).await),
            Some("EMC_NOT_FOUND") => suggest("EMCs", self.emc.clone(), emc_names(manager).await),
            Some("VM_NOT_FOUND") => suggest("VMs", self.vm.clone(), vm_names(manager).await),
            _ => None,
        };
        match (failure, suggestion) {
            (Failure::Rejected(status), Some(hint)) => Failure::RejectedWithHint { status, hint },
            (failure, _) => self.add_generic_hint(failure),
        }
    }
}

async fn host_names(manager: &Connection) -> Vec<String> {
    lists::hosts(manager).await.unwrap_or_default().into_iter().map(|h| h.host).collect()
}

async fn emc_names(manager: &Connection) -> Vec<String> {
    lists::emcs(manager).await.unwrap_or_default().into_iter().map(|e| e.emc).collect()
}

/// Returns the VMs on the first page of reservations. One page is enough for a suggestion.
async fn vm_names(manager: &Connection) -> Vec<String> {
    let request = proto::v1::ListReservationsRequest::default();
    let page = manager.call(manager.admin().list_reservations(request)).await;
    page.map(|page| page.reservations.into_iter().map(|r| r.vm).collect()).unwrap_or_default()
}

/// Formats a hint such as "did you mean h1? available hosts: h1, h2". Returns `None` if no names
/// exist.
fn suggest(kind: &str, requested: Option<String>, existing: Vec<String>) -> Option<String> {
    let requested = requested.filter(|_| !existing.is_empty())?;
    let nearest = nearest_name(&requested, &existing);
    let question = nearest.map(|name| format!("did you mean {name}? ")).unwrap_or_default();
    let omitted = if existing.len() > NAMES_SHOWN_MAX {
        format!(" and {} more", existing.len() - NAMES_SHOWN_MAX)
    } else {
        String::new()
    };
    let shown = existing.iter().take(NAMES_SHOWN_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    Some(format!("{question}available {kind}: {shown}{omitted}"))
}

fn nearest_name<'a>(requested: &str, existing: &'a [String]) -> Option<&'a String> {
    let distance = |name: &&String| strsim::damerau_levenshtein(requested, name);
    existing.iter().min_by_key(distance).filter(|name| distance(name) <= EDIT_DISTANCE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hint_for_misspelled_name_contains_nearest_name() {
        let existing = ["rack1-host1", "rack1-host2", "web"].map(str::to_owned).to_vec();
        let hint = suggest("hosts", Some("rack1-hsot2".to_owned()), existing.clone());
        assert_eq!(
            hint.as_deref(),
            Some("did you mean rack1-host2? available hosts: rack1-host1, rack1-host2, web")
        );
        let hint = suggest("hosts", Some("elsewhere".to_owned()), existing);
        assert_eq!(hint.as_deref(), Some("available hosts: rack1-host1, rack1-host2, web"));
        assert_eq!(suggest("hosts", Some("h1".to_owned()), Vec::new()), None);
    }

    #[test]
    fn hint_lists_eight_names_and_counts_the_others() {
        let existing: Vec<_> = (0..1000).map(|n| format!("h{n}")).collect();
        let hint = suggest("hosts", Some("x".repeat(9)), existing).unwrap();
        assert_eq!(hint, "available hosts: h0, h1, h2, h3, h4, h5, h6, h7 and 992 more");
    }
}
