//! Names that exist, for those who typed one that does not. It changes only the hint of a refusal.

use crate::{
    Connection, Failure,
    args::{Ask, Explained, Kind, Mended, Migration, Place, Ref, Subject},
    failure,
    hint::{self, Subjects},
    lists,
};

/// As many names as a hint may hold.
const NAMES_SHOWN: usize = 8;
/// Typing errors that still count as near.
const SLIPS_MAX: usize = 2;

/// The names a question speaks of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    host: Option<String>,
    emc: Option<String>,
    vm: Option<String>,
    /// The VM, or its reservation as r-N.
    which: Option<String>,
    slice: Option<u32>,
}

impl Names {
    fn host(name: &impl ToString) -> Self {
        Self { host: Some(name.to_string()), ..Self::default() }
    }

    fn emc(name: &impl ToString) -> Self {
        Self { emc: Some(name.to_string()), ..Self::default() }
    }

    fn vm(which: &Ref) -> Self {
        match which {
            Ref::Vm(name) => {
                Self { vm: Some(name.to_string()), which: Some(name.to_string()), ..Self::default() }
            }
            Ref::Reservation(id) => Self { which: Some(id.to_string()), ..Self::default() },
        }
    }

    fn slice(slice: u32) -> Self {
        Self { slice: Some(slice), ..Self::default() }
    }

    /// The refusal with commands that name what was asked about.
    fn advise(self, refused: Failure) -> Failure {
        let subjects = Subjects { host: self.host, vm: self.which, slice: self.slice };
        match refused {
            Failure::Said(status) if subjects != Subjects::default() && !failure::broke(&status) => {
                let reason = Failure::Said(status.clone()).reason();
                match hint::for_refusal(status.code(), reason.as_deref(), &subjects) {
                    Some(hint) => Failure::Unknown { status, hint },
                    None => Failure::Said(status),
                }
            }
            refused => refused,
        }
    }

    /// Those in a question.
    pub(crate) fn of(ask: &Ask) -> Self {
        match ask {
            Ask::Get(kind) => Self::of_kind(kind),
            Ask::Describe(subject) | Ask::Explain(Explained::Subject(subject)) => Self::of_subject(subject),
            Ask::Explain(Explained::Shares(of)) => Self::host(&of.host),
            Ask::Weigh(weigh) => Self::host(&weigh.host),
            Ask::Reserve(reserve) => {
                Self { which: Some(reserve.vm.to_string()), ..Self::host(&reserve.host) }
            }
            Ask::Fence(fence) => Self::host(&fence.host),
            Ask::WaitReady(which) | Ask::Commit(which) => Self::vm(&which.which),
            Ask::Release(release) => Self::vm(&release.which),
            Ask::Cordon(Place::Host(named)) | Ask::Drain(Place::Host(named)) => Self::host(&named.name),
            Ask::Cordon(Place::Emc(named)) | Ask::Drain(Place::Emc(named)) => Self::emc(&named.name),
            Ask::Uncordon(Mended::Host(named)) => Self::host(&named.name),
            Ask::Uncordon(Mended::Emc(named)) => Self::emc(&named.name),
            Ask::Uncordon(Mended::Slice { slice, .. }) => Self::slice(*slice),
            Ask::Migration(Migration::Resolve { vm, .. }) => Self::vm(&Ref::Vm(vm.clone())),
            _ => Self::default(),
        }
    }

    fn of_kind(kind: &Kind) -> Self {
        match kind {
            Kind::Hosts(named) => named.name.as_ref().map(Self::host).unwrap_or_default(),
            Kind::Emcs(named) => named.name.as_ref().map(Self::emc).unwrap_or_default(),
            Kind::Reservations(asked) => asked.which.as_ref().map(Self::vm).unwrap_or_default(),
            Kind::Shares(of) => Self::host(&of.host),
            Kind::Rack | Kind::Slices(_) | Kind::Migrations(_) | Kind::Models | Kind::Alarms(_) => {
                Self::default()
            }
        }
    }

    fn of_subject(subject: &Subject) -> Self {
        match subject {
            Subject::Vm { which } => Self::vm(which),
            Subject::Host { name } => Self::host(name),
            Subject::Emc { name } => Self::emc(name),
            Subject::Rack | Subject::Slice { .. } => Self::default(),
        }
    }

    /// The refusal with names that exist, if it was about a name; else with advice.
    pub(crate) async fn explain(self, refused: Failure, to: &Connection) -> Failure {
        let hint = match refused.reason().as_deref() {
            Some("HOST_NOT_FOUND") => hint("hosts", self.host.clone(), hosts(to).await),
            Some("EMC_NOT_FOUND") => hint("EMCs", self.emc.clone(), emcs(to).await),
            Some("VM_NOT_FOUND") => hint("VMs", self.vm.clone(), vms(to).await),
            _ => None,
        };
        match (refused, hint) {
            (Failure::Said(status), Some(hint)) => Failure::Unknown { status, hint },
            (refused, _) => self.advise(refused),
        }
    }
}

async fn hosts(to: &Connection) -> Vec<String> {
    lists::hosts(to).await.unwrap_or_default().into_iter().map(|h| h.host).collect()
}

async fn emcs(to: &Connection) -> Vec<String> {
    lists::emcs(to).await.unwrap_or_default().into_iter().map(|e| e.emc).collect()
}

/// One page is enough to guess from.
async fn vms(to: &Connection) -> Vec<String> {
    let request = proto::v1::ListReservationsRequest::default();
    let page = to.ask(to.admin().list_reservations(request)).await;
    page.map(|page| page.reservations.into_iter().map(|r| r.vm).collect()).unwrap_or_default()
}

/// "did you mean h1? The hosts are h1, h2"; nothing if there are none.
fn hint(kind: &str, asked: Option<String>, known: Vec<String>) -> Option<String> {
    let asked = asked.filter(|_| !known.is_empty())?;
    let near = nearest(&asked, &known).map(|name| format!("did you mean {name}? ")).unwrap_or_default();
    let more = if known.len() > NAMES_SHOWN {
        format!(" and {} more", known.len() - NAMES_SHOWN)
    } else {
        String::new()
    };
    let shown = known.iter().take(NAMES_SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    Some(format!("{near}{kind} here: {shown}{more}"))
}

fn nearest<'a>(asked: &str, known: &'a [String]) -> Option<&'a String> {
    let slips = |name: &&String| strsim::damerau_levenshtein(asked, name);
    known.iter().min_by_key(slips).filter(|name| slips(name) <= SLIPS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_finger_is_met_with_the_name_that_was_meant() {
        let known = ["rack1-host1", "rack1-host2", "web"].map(str::to_owned).to_vec();
        let said = hint("hosts", Some("rack1-hsot2".to_owned()), known.clone());
        assert_eq!(
            said.as_deref(),
            Some("did you mean rack1-host2? hosts here: rack1-host1, rack1-host2, web")
        );
        let said = hint("hosts", Some("elsewhere".to_owned()), known);
        assert_eq!(said.as_deref(), Some("hosts here: rack1-host1, rack1-host2, web"));
        assert_eq!(hint("hosts", Some("h1".to_owned()), Vec::new()), None);
    }

    #[test]
    fn a_hint_stays_one_line_in_a_large_rack() {
        let known: Vec<_> = (0..1000).map(|n| format!("h{n}")).collect();
        let said = hint("hosts", Some("x".repeat(9)), known).unwrap();
        assert_eq!(said, "hosts here: h0, h1, h2, h3, h4, h5, h6, h7 and 992 more");
    }
}
