//! Symbiosis on this host: epoch after epoch, what tenants did becomes what shares are worth to them, and that becomes who has how much of the host's local
//! memory and of its link. What is best for whom the room `fairness` says; files of the kernel are the folder `host`'s.
//!
//! Shares stay as they are when anything is missing: a tenant that cannot be read, a limit that cannot be set, a weight that leaves somebody less than it must
//! have. A tenant that is gone is not missing. An agent that starts goes on from the shares on disk, and until it has measured an epoch changes nothing.

mod enforce;
mod kept;
mod meter;
mod report;
mod run;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use fairness::{
    epoch::{Change, Dealt, Decision, Epochs, Member, Weighed},
    market::{MarketError, Share, Supply},
    profile::Worth,
};
use units::{
    Bytes, Name,
    limits::{TENANTS_PER_HOST_MAX, TENANTS_WATCHED_MAX},
};

use self::{
    enforce::{Advice, Enforcer, Order, Swap, enforce},
    meter::{Measured, Meter},
};
pub use self::{
    kept::{Kept, KeptError},
    report::{Book, Certified, Report, State, TenantReport},
    run::{Running, start},
};
use crate::{
    config::symbiosis::{Enforce, Symbiosis as Config},
    host::{
        cgroup::{self, Cgroups, Counters},
        damon::{Damon, Watched},
        remote::{Remote, RemoteError},
    },
    records,
};

/// Why symbiosis does not start.
#[derive(Debug, thiserror::Error)]
pub enum SymbiosisError {
    /// The device that remote memory is on.
    #[error("symbiosis.remote")]
    Remote(#[from] RemoteError),
    /// What was dealt before.
    #[error(transparent)]
    Kept(#[from] KeptError),
}

/// Where the kernel shows its devices, and what is swapped to where.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// As `/sys`.
    pub sys: PathBuf,
    /// As `/proc/swaps`.
    pub swaps: PathBuf,
}

/// Who has how much.
#[derive(Debug)]
pub struct Symbiosis {
    config: Config,
    kernel: Kernel,
    cgroups: Cgroups,
    remote: Option<Remote>,
    damon: Damon,
    /// Those that are being watched, in their order.
    watched: Vec<Name>,
    meters: BTreeMap<Name, Meter>,
    epochs: Epochs,
    kept: Kept,
    runtime_dir: PathBuf,
    book: Arc<Book>,
    number: u64,
}

/// A cgroup that may be a tenant, as an epoch ends.
struct Candidate {
    name: Name,
    /// The record of a VM that runs in it, if one does: whether it is pinned, and its local memory.
    vm: Option<(bool, Bytes)>,
    counters: Counters,
}

/// One that takes part, with what is said of it.
struct Taking {
    name: Name,
    weight: f64,
    enforce: Enforce,
    least: Share,
    measured: Measured,
    most: Option<Bytes>,
}

/// Why shares stay as they are.
struct Missing(String);

impl Symbiosis {
    /// Goes on from what is on disk.
    ///
    /// # Errors
    /// The remote device is none, or what is on disk is not what was written.
    pub fn open(
        config: Config,
        runtime_dir: &Path,
        kernel: Kernel,
        book: Arc<Book>,
    ) -> Result<Self, SymbiosisError> {
        let remote = config.remote.as_deref().map(|path| Remote::open(path, &kernel.sys)).transpose()?;
        let kept = Kept::at(runtime_dir);
        let epochs = Epochs::from(kept.load()?);
        Ok(Self {
            cgroups: Cgroups::at(&config.cgroups),
            damon: Damon::at(&kernel.sys, kept.was_watching()),
            remote,
            watched: Vec::new(),
            meters: BTreeMap::new(),
            epochs,
            kept,
            runtime_dir: runtime_dir.to_owned(),
            book,
            number: 0,
            config,
            kernel,
        })
    }

    /// An epoch begins: pages are watched where the kernel can.
    pub fn begin(&mut self) {
        let names = self.cgroups.names().unwrap_or_default();
        let names = names.iter().filter_map(|name| Name::new(name).ok());
        let processes = |name: &Name| self.cgroups.processes(name.as_str()).unwrap_or_default();
        let with: Vec<(Name, Vec<u32>)> = names.map(|name| (name.clone(), processes(&name))).collect();
        let with = with.into_iter().filter(|(_, processes)| !processes.is_empty()).take(TENANTS_WATCHED_MAX);
        let (names, processes): (Vec<Name>, Vec<Vec<u32>>) = with.unzip();
        self.watched = Vec::new();
        if names.is_empty() {
            return;
        }
        self.kept.note_watching(true);
        match self.damon.watch(&processes) {
            Ok(()) => self.watched = names,
            Err(error) => {
                self.kept.note_watching(false);
                tracing::debug!(error = units::chain(&error), "nobody sees which pages are touched");
            }
        }
    }

    /// An epoch of so many seconds ends: who has how much from now on is decided, done, kept and told.
    pub fn end(&mut self, seconds: f64) -> Report {
        self.number += 1;
        let seen = self.seen();
        let mut tenants = Vec::new();
        let ended = self.decide(seconds, seen, &mut tenants);
        let report = match ended {
            Ok((state, certificate)) => self.report(state, String::new(), tenants, certificate),
            Err(Missing(why)) => {
                tracing::warn!(why, "shares stay as they are");
                self.report(State::Kept, why, self.as_they_were(), None)
            }
        };
        self.book.put(report.clone());
        report
    }

    /// Nobody is watched any more; limits stay.
    fn leave(&mut self) {
        self.seen();
    }

    /// What was seen of tenants' pages since the epoch began.
    fn seen(&mut self) -> BTreeMap<Name, Watched> {
        let names = std::mem::take(&mut self.watched);
        if names.is_empty() {
            return BTreeMap::new();
        }
        let seen = self.damon.take();
        self.kept.note_watching(false);
        match seen {
            Ok(seen) => names.into_iter().zip(seen).filter_map(|(name, seen)| Some((name, seen?))).collect(),
            Err(error) => {
                tracing::warn!(error = units::chain(&error), "DAMON does not end");
                BTreeMap::new()
            }
        }
    }

    fn decide(
        &mut self,
        seconds: f64,
        mut seen: BTreeMap<Name, Watched>,
        told: &mut Vec<TenantReport>,
    ) -> Result<(State, Option<Certified>), Missing> {
        let candidates = self.candidates()?;
        self.meters.retain(|name, _| candidates.iter().any(|candidate| candidate.name == *name));
        let miss = self.remote.as_mut().map_or(0.0, Remote::read_s);
        let mut taking = Vec::new();
        for Candidate { name, vm, counters } in candidates {
            let meter = self.meters.entry(name.clone()).or_default();
            let limit = self.epochs.dealt().and_then(|dealt| dealt.tenants.get(name.as_str()));
            let link = self.config.supply.bandwidth_mb_s as f64;
            let limit = limit.map_or(link, |one| one.share.bandwidth_mb_s as f64);
            let period = meter::Period { seconds, miss, limit, link };
            let measured = meter.measure(counters, seen.remove(&name), &period);
            match measured.map_err(|error| Missing(format!("{name}: {error}")))? {
                Some(measured) => taking.push(self.taking(name, vm, counters, measured)),
                None => {
                    let enforce = self.enforces(&name, vm.is_some());
                    told.push(TenantReport::new(&name, enforce, "its first epoch is measured only"));
                }
            }
        }
        if taking.is_empty() {
            return Err(Missing("no tenant has been measured for an epoch".to_owned()));
        }
        let (decision, before) = self.decided(&taking, told)?;
        let done = self.done(&taking, &decision, told);
        if done.is_err() {
            self.epochs.undone(before.clone());
            if let Some(before) = &before {
                self.kept.save(before).map_err(|error| Missing(units::chain(&error)))?;
            }
        }
        done?;
        let (state, way) = match decision.change {
            Change::Set { way } => (State::Set, way),
            Change::Held => (State::Held, 0.0),
        };
        let worst_off = taking[decision.certificate.worst_off].name.clone();
        Ok((state, Some(Certified { certificate: decision.certificate, way, worst_off })))
    }

    /// All cgroups whose processes share: those of pinned VMs have memory that nobody moves.
    fn candidates(&self) -> Result<Vec<Candidate>, Missing> {
        let missing = |error: &dyn std::error::Error| Missing(units::chain(error));
        self.check_swap()?;
        let names = self.cgroups.names().map_err(|error| missing(&error))?;
        if names.len() > TENANTS_PER_HOST_MAX {
            return Err(Missing(format!("{} tenants: there may be {TENANTS_PER_HOST_MAX}", names.len())));
        }
        let vms = records::noted(&self.runtime_dir).map_err(|error| missing(&error))?;
        let device = self.remote.as_ref().map(Remote::number);
        let mut candidates = Vec::new();
        for name in &names {
            let Ok(named) = Name::new(name) else {
                tracing::warn!(cgroup = name, "is no tenant: its name is none");
                continue;
            };
            let counters = match self.cgroups.counters(name, device) {
                Err(error) if cgroup::is_gone(&error) && !self.cgroups.is_there(name) => continue,
                read => read.map_err(|error| missing(&error))?,
            };
            let processes = self.cgroups.processes(name).unwrap_or_default();
            let vm = vms.iter().find(|vm| processes.contains(&vm.process.pid));
            let vm = vm.map(|vm| (vm.pinned, vm.local));
            if !matches!(vm, Some((true, _))) {
                candidates.push(Candidate { name: named, vm, counters });
            }
        }
        Ok(candidates)
    }

    /// A limit on a device to which no memory goes would take pages away and let nobody have them.
    fn check_swap(&self) -> Result<(), Missing> {
        let Some(remote) = &self.remote else { return Ok(()) };
        let swaps = std::fs::read_to_string(&self.kernel.swaps);
        let swaps =
            swaps.map_err(|error| Missing(format!("read {}: {error}", self.kernel.swaps.display())))?;
        if remote.is_swap(&swaps) {
            return Ok(());
        }
        Err(Missing(format!("symbiosis.remote: {} is not in use as swap", remote.path().display())))
    }

    fn taking(
        &self,
        name: Name,
        vm: Option<(bool, Bytes)>,
        counters: Counters,
        measured: Measured,
    ) -> Taking {
        let said = self.config.tenants.get(&name);
        let weight = self.weight(&name).or(said.map(|one| one.weight)).unwrap_or(1.0);
        // A guest's declared local node is never shrunk.
        let of_vm = vm.map_or(0, |(_, local)| local.get().div_ceil(Bytes::mib(1).get()));
        let memory_mib = said.map_or(0, |one| one.least_mib).max(of_vm);
        let enforce = self.enforces(&name, vm.is_some());
        let least = Share { memory_mib, bandwidth_mb_s: 0 };
        Taking { name, weight, enforce, least, measured, most: counters.most }
    }

    /// What becomes of a tenant's share: of a VM's, nothing that takes its memory away.
    fn enforces(&self, name: &Name, is_vm: bool) -> Enforce {
        let said = self.config.tenants.get(name).map_or(self.config.enforce, |one| one.enforce);
        if is_vm { Enforce::Tiered } else { said }
    }

    /// A tenant's weight by the manager's word; until there is one, as it was before the agent started.
    fn weight(&self, name: &Name) -> Option<f64> {
        match self.book.weights() {
            Some(weights) => weights.get(name).copied(),
            None => Some(self.epochs.dealt()?.tenants.get(name.as_str())?.weight),
        }
    }

    /// What is to be done, and what tenants had before.
    fn decided(
        &mut self,
        taking: &[Taking],
        told: &mut Vec<TenantReport>,
    ) -> Result<(Decision, Option<Dealt>), Missing> {
        let supply = self.config.supply;
        let members = taking.iter().map(|one| self.member(one, supply)).collect::<Result<Vec<_>, _>>()?;
        let before = self.epochs.dealt().cloned();
        let decision = self.epochs.decide(supply, &members).map_err(|error| named(&error, taking))?;
        for (at, one) in taking.iter().enumerate() {
            let learner = self.meters[&one.name].learner();
            told.push(TenantReport {
                weight: one.weight,
                fair: decision.fair[at],
                share: decision.shares[at],
                measured: Some(one.measured),
                wanted: learner.wanted(),
                gain: decision.gains[at],
                error: learner.error(),
                ..TenantReport::new(&one.name, one.enforce, one.enforce.caveat())
            });
        }
        Ok((decision, before))
    }

    fn member(&self, one: &Taking, supply: Supply) -> Result<Member<Worth>, Missing> {
        let most = one.most.map_or(f64::INFINITY, |most| most.get() as f64 / Bytes::mib(1).get() as f64);
        let utility = self.meters[&one.name].learner().worth(supply, most);
        let utility = utility.map_err(|error| Missing(format!("{}: {error}", one.name)))?;
        Ok(Member { name: one.name.as_str().into(), weight: one.weight, least: one.least, utility })
    }

    /// Keeps shares, and then sets limits.
    fn done(&self, taking: &[Taking], decision: &Decision, told: &mut [TenantReport]) -> Result<(), Missing> {
        let dealt = self.epochs.dealt().expect("something was decided");
        self.kept.save(dealt).map_err(|error| Missing(units::chain(&error)))?;
        let swap =
            self.remote.as_ref().map(|remote| Swap { cgroups: &self.cgroups, device: remote.number() });
        let by = |one: &Taking| -> &dyn Enforcer {
            match (one.enforce, &swap) {
                (Enforce::Swap, Some(swap)) => swap,
                (Enforce::Swap | Enforce::Tiered | Enforce::Advise, _) => &Advice,
            }
        };
        let orders = taking.iter().zip(&decision.shares);
        let orders: Vec<Order<'_>> =
            orders.map(|(one, share)| Order { tenant: &one.name, share: *share, by: by(one) }).collect();
        let failed = enforce(&orders).map_err(Missing)?;
        for (tenant, problem) in failed {
            tracing::warn!(%tenant, problem, "share not set");
            told.iter_mut().filter(|one| one.name == tenant).for_each(|one| one.problem.clone_from(&problem));
        }
        Ok(())
    }

    /// Shares that stay.
    fn as_they_were(&self) -> Vec<TenantReport> {
        let Some(dealt) = self.epochs.dealt() else { return Vec::new() };
        let named = dealt.tenants.iter().filter_map(|(name, one)| Some((Name::new(name).ok()?, one)));
        let one = |(name, one): (Name, &Weighed)| {
            let (weight, share) = (one.weight, one.share);
            TenantReport { weight, share, ..TenantReport::new(&name, self.enforces(&name, false), "") }
        };
        named.map(one).collect()
    }

    fn report(
        &self,
        state: State,
        why: String,
        tenants: Vec<TenantReport>,
        certified: Option<Certified>,
    ) -> Report {
        Report {
            epoch: self.number,
            at: report::now(),
            supply: self.config.supply,
            state,
            why,
            tenants,
            certified,
        }
    }
}

/// With the tenant's name instead of its place.
fn named(error: &MarketError, taking: &[Taking]) -> Missing {
    let name = error.tenant().and_then(|at| taking.get(at)).map(|one| one.name.to_string());
    Missing(name.map_or_else(|| error.to_string(), |name| format!("{name}: {error}")))
}
