//! Selection of the clients that give pages up for a request (Soft Memory, section 3.3 and 4).

use std::cmp::Reverse;

use units::limits::{SOFT_CLIENT_PAGES_MAX, SOFT_OVER_RECLAIM_PERCENT_MAX, SOFT_TARGETS_MAX};

use super::sample::{ClientSample, Pid};

/// Parameters of the selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Maximum number of clients that give pages up for one request, at most
    /// `units::limits::SOFT_TARGETS_MAX`.
    pub targets_max: usize,
    /// Additional demand as a percentage of the missing pages, at most
    /// `units::limits::SOFT_OVER_RECLAIM_PERCENT_MAX`. It amortizes the cost of a reclamation over later
    /// requests.
    pub over_reclaim_percent: u32,
    /// Maximum budget of a client in pages.
    pub client_pages_max: u64,
    /// Pages of its budget that a client never gives up for the requests of others. It gives them up if the host needs
    /// memory.
    pub client_pages_min: u64,
}

impl Default for Settings {
    /// The paper states no values. These disturb few clients, and reclaim a quarter more.
    fn default() -> Self {
        Self {
            targets_max: 4,
            over_reclaim_percent: 25,
            client_pages_max: SOFT_CLIENT_PAGES_MAX,
            client_pages_min: 0,
        }
    }
}

/// Pages that a client must give up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Process of the client.
    pub pid: Pid,
    /// Pages of its unused budget.
    pub unused_pages: u64,
    /// Pages that it uses and must reclaim from its structures.
    pub used_pages: u64,
}

impl Demand {
    /// Returns the total number of pages.
    pub fn pages(&self) -> u64 {
        self.unused_pages + self.used_pages
    }
}

/// Decision on a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The free pages suffice.
    Grant,
    /// The pages suffice after clients have given these pages up.
    Reclaim {
        /// Demands, at most one per client.
        demands: Vec<Demand>,
    },
    /// The permitted number of clients cannot give enough pages up.
    Deny {
        /// Pages that would still be missing.
        missing: u64,
    },
}

/// Decides on a request of `pages` pages by the client `requester`, which gives up no pages itself.
///
/// At equal weight, clients with more soft memory come first, and then lower process IDs. Pages in use are only
/// taken if the unused budgets do not suffice. If the unused budget of the first clients exhausts the number of
/// targets, the clients with the largest budgets are selected instead. A request is therefore denied only if no
/// permitted set of clients suffices.
///
/// Each client keeps `Settings::client_pages_min` pages. This is the only protection of a client from the requests of
/// others: the paper's daemon almost never denies a request, so that of two clients that both want all pages, the one
/// that requests more has more.
pub fn decide(
    settings: &Settings,
    free: u64,
    clients: &[ClientSample],
    requester: Pid,
    pages: u64,
) -> Decision {
    let missing = pages.saturating_sub(free);
    if missing == 0 {
        return Decision::Grant;
    }
    let kept = settings.client_pages_min;
    let mut eligible: Vec<ClientSample> =
        clients.iter().filter(|client| client.pid != requester && client.budget > kept).copied().collect();
    sort_by_weight(&mut eligible);
    let demands = select_enough(settings, &mut eligible, kept, missing, settings.quota(missing));
    match missing.saturating_sub(total(&demands)) {
        0 => Decision::Reclaim { demands },
        missing => Decision::Deny { missing },
    }
}

/// Selects clients in the order of their weights. If these cannot give enough pages up, selects those with the largest
/// budgets. Each client keeps `kept` pages.
fn select_enough(
    settings: &Settings,
    eligible: &mut Vec<ClientSample>,
    kept: u64,
    needed: u64,
    quota: u64,
) -> Vec<Demand> {
    let targets_max = settings.targets_max.min(SOFT_TARGETS_MAX);
    let by_weight = select(eligible, targets_max, kept, needed, quota);
    if total(&by_weight) >= needed {
        return by_weight;
    }
    keep_largest(eligible, targets_max, |client| client.budget);
    select(eligible, targets_max, kept, needed, quota)
}

/// Keeps the clients with the largest values, in the order of their weights.
fn keep_largest(clients: &mut Vec<ClientSample>, count: usize, value: impl Fn(&ClientSample) -> u64) {
    clients.sort_by_key(|client| Reverse(value(client)));
    clients.truncate(count);
    sort_by_weight(clients);
}

/// Selects clients that must give pages up because the host needs memory. `excess` is the number of pages by which
/// the budgets exceed the memory for soft memory, and `missing_memory` the number of pages of memory that must become
/// free now.
///
/// Unused budget has no memory that could become free. So if memory is missing, clients with pages in use are
/// selected, and give up their unused budget, too. If the clients with the largest weights cannot give enough up, those
/// with the most pages in use are selected. The result can contain fewer pages than are needed: the caller
/// repeats the call after the clients have answered.
pub fn decide_for_host(
    settings: &Settings,
    clients: &[ClientSample],
    excess: u64,
    missing_memory: u64,
) -> Vec<Demand> {
    let mut eligible: Vec<ClientSample> =
        clients.iter().filter(|client| client.budget > 0).copied().collect();
    sort_by_weight(&mut eligible);
    if missing_memory == 0 {
        return select_enough(settings, &mut eligible, 0, excess, excess);
    }
    let targets_max = settings.targets_max.min(SOFT_TARGETS_MAX);
    let mut missing = settings.quota(missing_memory);
    eligible.retain(|client| client.used() > 0);
    if eligible.iter().take(targets_max).map(ClientSample::used).sum::<u64>() < missing {
        keep_largest(&mut eligible, targets_max, ClientSample::used);
    }
    let mut demands = Vec::new();
    for client in eligible.iter().take(targets_max) {
        let used_pages = client.used().min(missing);
        if used_pages == 0 {
            break;
        }
        missing -= used_pages;
        demands.push(Demand { pid: client.pid, unused_pages: client.unused(), used_pages });
    }
    demands
}

impl Settings {
    /// Returns the pages to demand for a number of missing pages.
    fn quota(&self, missing: u64) -> u64 {
        let percent = self.over_reclaim_percent.min(SOFT_OVER_RECLAIM_PERCENT_MAX);
        missing.saturating_add(missing.saturating_mul(percent.into()).div_ceil(100))
    }
}

fn sort_by_weight(clients: &mut [ClientSample]) {
    clients.sort_by_key(|client| (Reverse((client.weight(), client.used())), client.pid));
}

fn total(demands: &[Demand]) -> u64 {
    demands.iter().map(Demand::pages).sum()
}

/// Selects clients in their order, first for their unused budget and, if this is less than `needed`, for the pages
/// in use. Each client keeps `kept` pages.
fn select(clients: &[ClientSample], targets_max: usize, kept: u64, needed: u64, quota: u64) -> Vec<Demand> {
    let unused = |client: &ClientSample| client.unused().min(client.budget.saturating_sub(kept));
    let used = |client: &ClientSample| client.budget.saturating_sub(kept) - unused(client);
    let mut demands: Vec<Demand> = Vec::new();
    let mut missing = quota;
    for client in clients.iter().filter(|client| unused(client) > 0) {
        if missing == 0 || demands.len() == targets_max {
            break;
        }
        let unused_pages = unused(client).min(missing);
        missing -= unused_pages;
        demands.push(Demand { pid: client.pid, unused_pages, used_pages: 0 });
    }
    if quota - missing >= needed {
        return demands;
    }
    for client in clients.iter().filter(|client| used(client) > 0) {
        if missing == 0 {
            break;
        }
        let used_pages = used(client).min(missing);
        match demands.iter().position(|demand| demand.pid == client.pid) {
            Some(index) => demands[index].used_pages = used_pages,
            None if demands.len() < targets_max => {
                demands.push(Demand { pid: client.pid, unused_pages: 0, used_pages });
            }
            None => continue,
        }
        missing -= used_pages;
    }
    demands
}
