//! Step of fair tiering: the decision of the policy, demotions, and promotions.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use tiering::fair::{Candidates, Decision, FAST, Order, PromotionBudget, TenantId, TierSample, Urgency};
use units::{
    Bytes, Name, Ns, QuotedText,
    limits::{RECLAIM_BYTES_PER_CALL_MAX, TENANT_PROCESSES_MAX},
};

use super::{
    FairTiering, Observation, SLOW, Tenant,
    accesses::{TenantProcess, of_tenant},
    tenant::usage_of,
};
use crate::{
    host::{
        cgroup::{ReclaimResult, TierCounters},
        memory::usage::{HUGE_PAGE_BYTES, PAGE_BYTES},
        sysfs::{Sysfs, parse_ranges},
        tiers::{KernelMigration, Tiers, TiersError},
    },
    shares::now as unix_now,
    tiering_report::{Report, TenantReport},
};

/// Part of an ordered demotion that must leave local memory. The kernel may instead have reclaimed
/// pages that were already in slower memory.
const DEMOTION_EFFECT_DIVISOR: u64 = 4;
/// Number of pages that a processor counts before it updates the counters of a cgroup
/// (`MEMCG_CHARGE_BATCH` of Linux).
const COUNTED_PAGES_PER_CPU: u64 = 64;
/// Largest number of steps whose memory may be moved in one step, after a late step.
const LATE_STEPS_MAX: u32 = 2;

impl FairTiering {
    /// Decides, moves pages, and returns the report.
    pub(super) fn decide_and_move(&mut self, now: Ns, observation: &Observation) -> Report {
        let started = Instant::now();
        let step = self.inputs.config.step;
        let elapsed = self.last.filter(|last| *last <= now).map_or(step, |last| now.since(last));
        let interval = elapsed.as_duration().min(step.as_duration() * LATE_STEPS_MAX);
        self.last = Some(now);
        let decision = self.policy.step(&observation.host, &observation.samples).clone();
        self.thrash.apply(&decision);
        // Demotion leaves time for promotion, so that a step ends before the next one begins. After a late
        // step, more memory may be moved, but not for a longer time.
        let step = step.as_duration();
        self.demote(now, &decision, &observation.tiers, interval, started + step / 2);
        self.promote(now, &decision, &observation.tiers, interval, started + step * 7 / 8);
        self.detect_thrashing(now, &observation.tiers);
        self.report(&decision, observation.kernel)
    }

    /// Performs demotions until the rate limit or the deadline is reached. The next step decides again
    /// about the rest.
    fn demote(&mut self, now: Ns, decision: &Decision, tiers: &Tiers, interval: Duration, deadline: Instant) {
        let mut allowance = bytes_in(self.inputs.config.demotion_bytes_per_s, interval);
        for (name, bytes) in self.demotions(decision) {
            let bytes = Bytes::new(bytes.get().min(allowance) / PAGE_BYTES * PAGE_BYTES);
            if Instant::now() >= deadline {
                break;
            }
            if bytes == Bytes::ZERO {
                continue;
            }
            let requested = self.demote_tenant(now, &name, bytes, tiers, deadline);
            allowance = allowance.saturating_sub(requested.get());
        }
    }

    /// Returns the ordered demotions, the urgent ones first. Tenants take turns in being first, so that
    /// none uses the whole rate limit in every step.
    fn demotions(&self, decision: &Decision) -> Vec<(Name, Bytes)> {
        let names = self.names();
        let of = |order: &Order| match order {
            Order::Demote { tenant, tier: FAST, bytes, urgency } => {
                Some((names.get(tenant)?.clone(), *bytes, *urgency))
            }
            _ => None,
        };
        let mut orders: Vec<(Name, Bytes, Urgency)> = decision.orders().iter().filter_map(of).collect();
        let count = orders.len().max(1);
        orders.rotate_left(self.steps % count);
        orders.sort_by_key(|(_, _, urgency)| *urgency != Urgency::Immediate);
        orders.into_iter().map(|(name, bytes, _)| (name, bytes)).collect()
    }

    /// Demotes pages of a tenant. Returns the memory that the kernel was requested to demote.
    fn demote_tenant(
        &mut self,
        now: Ns,
        name: &Name,
        bytes: Bytes,
        tiers: &Tiers,
        deadline: Instant,
    ) -> Bytes {
        let Some(tenant) = self
            .tenants
            .get_mut(name)
            .filter(|tenant| tenant.backoff.is_over(now, tenant.usage(tiers)[FAST]))
        else {
            return Bytes::ZERO;
        };
        // If the tenant has ended, the next step removes it.
        let Ok(before) = self.cgroups.tier_counters(name.as_str()) else { return Bytes::ZERO };
        let (mut requested, mut is_complete, mut error) = (Bytes::ZERO, true, None);
        while is_complete && requested < bytes && Instant::now() < deadline {
            let chunk = bytes.saturating_sub(requested).min(Bytes::new(RECLAIM_BYTES_PER_CALL_MAX));
            requested = requested.saturating_add(chunk);
            match self.mover.demote(name, chunk) {
                Ok(result) => is_complete = result == ReclaimResult::Complete,
                Err(failed) => {
                    error = Some(units::chain(&failed));
                    break;
                }
            }
        }
        let Ok(after) = self.cgroups.tier_counters(name.as_str()) else { return requested };
        let moved = demoted_between(&before, &after, tiers);
        tenant.counters = after;
        tenant.moves.demoted = tenant.moves.demoted.saturating_add(moved);
        tracing::debug!(tenant = %name, ordered = %bytes, %requested, %moved, is_complete, "demoted pages");
        let has_effect = moved.get().saturating_mul(DEMOTION_EFFECT_DIVISOR) >= requested.get();
        let problem = match error {
            Some(error) => Some(error),
            None if has_effect => None,
            None if !is_complete => Some(format!(
                "the kernel demoted {moved} of {requested}: the rest is locked, protected by memory.min of a child cgroup, in use or has no room in slower memory"
            )),
            None if requested < self.counter_error => None, // the counters may not show it yet
            None => Some(format!(
                "the kernel demoted {moved} of {requested}, and reclaimed page cache or memory in slower memory instead"
            )),
        };
        match problem {
            None => (tenant.backoff, tenant.problem) = Default::default(),
            Some(problem) => {
                tenant.backoff.extend(now, usage_of(&tenant.counters, tiers)[FAST]);
                tenant.problem = problem;
            }
        }
        requested
    }

    /// Promotes pages. Tenants below their protection come first.
    fn promote(
        &mut self,
        now: Ns,
        decision: &Decision,
        tiers: &Tiers,
        interval: Duration,
        deadline: Instant,
    ) {
        let processes = self.monitored_processes(tiers);
        let reading = self.inputs.config.step.as_duration() / 4;
        self.promoter.begin_step(&processes, &*self.mover, tiers, now, reading);
        self.promoter.begin_promotions(interval, deadline);
        if let Some(stored) = &self.inputs.profiles {
            stored.store(self.promoter.profiles(&processes), |name| self.tenants.contains_key(name));
        }
        let Ok(TierSample { capacity, free }) = self.local_memory(tiers) else { return };
        let Ok(mut nodes) = self.local_nodes_with_room(tiers, capacity) else { return }; // a node was removed
        let mut rest = Bytes::new(bytes_in(self.inputs.config.promotion_bytes_per_s, interval));
        let mut promoted = Bytes::ZERO;
        let budgets = self.budgets(decision);
        for (at, (name, budget, limit)) in budgets.iter().enumerate() {
            let remaining = budgets.len() - at;
            let is_protected = budget.candidates == Candidates::All;
            let Some((target, of_node)) = self.promotion_target(name, &nodes) else { continue };
            let reserve = self.reserve(capacity, is_protected);
            let room = free.saturating_sub(promoted).saturating_sub(reserve).min(rest);
            // Tenants below their protection may use all the room, the others divide it.
            let equal = Bytes::new(room.get() / remaining as u64).max(Bytes::new(HUGE_PAGE_BYTES));
            let share = if is_protected { room } else { room.min(equal) };
            self.promoter.begin_tenant(remaining);
            let limit = share.min(*limit).min(of_node);
            let processes = of_tenant(&processes, name);
            let (moved, is_full) =
                self.promote_tenant(now, name, processes, (*budget, limit), interval, (tiers, target));
            rest = rest.saturating_sub(moved);
            promoted = promoted.saturating_add(moved);
            nodes.entry(target).and_modify(|room| *room = room.saturating_sub(moved));
            if is_full {
                nodes.remove(&target);
            }
        }
    }

    /// Promotes pages of a tenant to the node `target`, at most `limit`. Returns their size, and whether the
    /// node is full.
    fn promote_tenant(
        &mut self,
        now: Ns,
        name: &Name,
        processes: &[TenantProcess],
        (budget, limit): (PromotionBudget, Bytes),
        interval: Duration,
        (tiers, target): (&Tiers, u32),
    ) -> (Bytes, bool) {
        let (mut sum, mut is_full) = (Bytes::ZERO, false);
        let Some(tenant) = self.tenants.get_mut(name) else { return (sum, is_full) };
        let permitted = budget
            .bytes_per_s
            .map(|rate| tenant.promotion_credit.saturating_add(Bytes::new(bytes_in(rate.get(), interval))));
        let allowed = permitted.map_or(limit, |permitted| permitted.min(limit));
        for process in processes {
            let rest = allowed.saturating_sub(sum);
            let outcome =
                self.promoter.promote(process, budget.candidates, rest, &mut *self.mover, tiers, target);
            let moved = Bytes::new(outcome.pages.len() as u64 * PAGE_BYTES);
            let attempted = Bytes::new(outcome.attempted.saturating_mul(PAGE_BYTES));
            tenant.moves.promoted = tenant.moves.promoted.saturating_add(moved);
            tenant.moves.attempted = tenant.moves.attempted.saturating_add(attempted);
            tenant.promoted_pages.record(&mut self.thrash, tenant.id, process.pid, &outcome.pages, now);
            sum = sum.saturating_add(moved);
            if outcome.is_node_full {
                is_full = true;
                break;
            }
        }
        let unused = permitted.map_or(Bytes::ZERO, |permitted| permitted.saturating_sub(sum));
        tenant.promotion_credit = unused.min(Bytes::new(HUGE_PAGE_BYTES));
        let candidates = budget.candidates;
        tracing::debug!(tenant = %name, ?candidates, %allowed, moved = %sum, is_full, "promoted pages");
        (sum, is_full)
    }

    /// Returns the promotion budget of each tenant with pages that could be promoted, and the memory that it
    /// may promote in this step without a demotion near its bound. A tenant below its protection first
    /// reaches its protection, or exceeds it by less than a huge page. Memory above it is subject to the
    /// limits of the next step. Tenants below their protection come first. Otherwise, tenants take turns in
    /// being first.
    fn budgets(&self, decision: &Decision) -> Vec<(Name, PromotionBudget, Bytes)> {
        let (names, settings) = (self.names(), self.policy.settings());
        let of = |report: &tiering::fair::TenantReport| {
            let fast = report.fast();
            let name = names.get(&report.tenant).filter(|name| self.promoter.has_ranges(name))?;
            let bound = fast.bound.map_or(Bytes::new(u64::MAX), |bound| settings.threshold_of(bound));
            let limit = match report.budget.candidates {
                // A smaller limit than a huge page would promote nothing, and the tenant would remain below
                // its protection.
                Candidates::All => {
                    let huge_page = fast.usage.saturating_add(Bytes::new(HUGE_PAGE_BYTES));
                    bound.min(fast.scaled_protection.max(huge_page))
                }
                Candidates::Accessed | Candidates::Hot => bound,
            };
            Some((name.clone(), report.budget, limit.saturating_sub(fast.usage)))
        };
        let mut budgets: Vec<_> = decision.tenants().iter().filter_map(of).collect();
        let count = budgets.len().max(1);
        budgets.rotate_left(self.steps % count);
        budgets.sort_by_key(|(_, budget, _)| budget.candidates != Candidates::All);
        budgets
    }

    /// Returns the local memory that remains free after promotions. Below the low watermark, tenants are
    /// demoted. Demotion stops at the high watermark, so that the promotions of tenants above their
    /// protection do not cause further demotions.
    fn reserve(&self, capacity: Bytes, is_protected: bool) -> Bytes {
        let settings = self.policy.settings();
        if is_protected { settings.low_watermark.of(capacity) } else { settings.high_watermark.of(capacity) }
    }

    /// Returns the processes of tenants that have pages in slower memory, or of all tenants if Symbiosis
    /// needs their profiles, in their order. Processes that are younger than a step are omitted.
    fn monitored_processes(&mut self, tiers: &Tiers) -> Vec<TenantProcess> {
        let is_monitored =
            |tenant: &Tenant| self.inputs.profiles.is_some() || tenant.usage(tiers)[SLOW] > Bytes::ZERO;
        let monitored = self.tenants.iter().filter(|(_, tenant)| is_monitored(tenant));
        let processes = monitored.flat_map(|(name, _)| {
            let pids = self.cgroups.processes(name.as_str(), TENANT_PROCESSES_MAX).unwrap_or_default();
            pids.into_iter().map(|pid| TenantProcess { tenant: name.clone(), pid })
        });
        let processes: BTreeSet<TenantProcess> = processes.collect();
        let older = processes.intersection(&self.processes).cloned().collect();
        self.processes = processes;
        older
    }

    /// Returns the local nodes with room for promotions, and the room: available memory above the low
    /// watermark of the memory that the tenants share.
    pub(super) fn local_nodes_with_room(
        &self,
        tiers: &Tiers,
        capacity: Bytes,
    ) -> Result<BTreeMap<u32, Bytes>, TiersError> {
        let low = self.policy.settings().low_watermark;
        let mut nodes = BTreeMap::new();
        for node in &tiers.local {
            let (total, available) = self.available_memory(&[*node].into())?;
            let room = available.saturating_sub(low.of(total.min(capacity)));
            if room > Bytes::ZERO {
                nodes.insert(*node, room);
            }
        }
        Ok(nodes)
    }

    /// Returns the node to which pages of a tenant are promoted, with its room: among the nodes that the
    /// tenant's cpuset permits, the one with the most memory of the tenant, so that the pages are close to
    /// the processors that the tenant uses.
    pub(super) fn promotion_target(
        &self,
        tenant: &Name,
        nodes: &BTreeMap<u32, Bytes>,
    ) -> Option<(u32, Bytes)> {
        let usage = &self.tenants.get(tenant)?.counters.usage;
        let permitted = self.cgroups.memory_nodes(tenant.as_str());
        let is_permitted = |node: &u32| permitted.as_ref().is_none_or(|nodes| nodes.contains(node));
        let nodes = nodes.iter().filter(|(node, _)| is_permitted(node));
        let of_tenant = |node: &u32| usage.get(node).copied().unwrap_or_default();
        let with_room = nodes.filter(|(_, room)| **room >= Bytes::new(HUGE_PAGE_BYTES));
        with_room.max_by_key(|(node, room)| (of_tenant(node), **room)).map(|(node, room)| (*node, *room))
    }

    fn detect_thrashing(&mut self, now: Ns, tiers: &Tiers) {
        for tenant in self.tenants.values_mut() {
            tenant.promoted_pages.detect_demotions(&mut self.thrash, tenant.id, &*self.mover, tiers, now);
        }
    }

    fn names(&self) -> BTreeMap<TenantId, Name> {
        self.tenants.iter().map(|(name, tenant)| (tenant.id, name.clone())).collect()
    }

    fn report(&self, decision: &Decision, kernel: KernelMigration) -> Report {
        let promotion = Some(self.promoter.problem()).filter(|problem| !problem.is_empty());
        let promotion = promotion.map(|problem| format!("no pages are promoted: {problem}"));
        let interferences = kernel.interferences().into_iter().map(|(message, _)| message);
        let slow = decision.tiers()[SLOW];
        let slow_usage: Bytes = decision.tenants().iter().map(|tenant| tenant.tiers[SLOW].usage).sum();
        let excess = (slow_usage > slow.capacity).then(|| {
            let (used, limit) = (slow_usage.get() >> 20, slow.capacity.get() >> 20);
            format!("tenants use {used} MiB of slower memory, more than their {limit} MiB: the kernel demoted or allocated it")
        });
        let ignored = self.ignored.names().first().map(|name| {
            let count = self.ignored.names().len();
            format!(
                "{count} cgroups are ignored, for example {}: the name is invalid or the counters cannot be read",
                QuotedText(name)
            )
        });
        let problems = promotion.into_iter().chain(interferences).chain(excess).chain(ignored).collect();
        let decided: BTreeMap<TenantId, _> =
            decision.tenants().iter().map(|report| (report.tenant, *report)).collect();
        let tenant_report = |(name, tenant): (&Name, &Tenant)| {
            Some(TenantReport {
                name: name.clone(),
                decided: *decided.get(&tenant.id)?,
                moves: tenant.moves,
                refaulted: tenant.counters.refaulted,
                thrash: self.thrash.counts(tenant.id),
                problem: tenant.problem.clone(),
            })
        };
        Report {
            at: unix_now(),
            reason: String::new(),
            problems,
            tiers: [FAST, SLOW].map(|tier| decision.tiers()[tier]),
            tenants: self.tenants.iter().filter_map(tenant_report).collect(),
        }
    }
}

/// Returns the memory that a tenant's local memory has lost to slower memory. Without a counter of the
/// kernel, this is the decrease of local memory.
fn demoted_between(before: &TierCounters, after: &TierCounters, tiers: &Tiers) -> Bytes {
    match (before.demoted, after.demoted) {
        (Some(before), Some(after)) => after.saturating_sub(before),
        _ => usage_of(before, tiers)[FAST].saturating_sub(usage_of(after, tiers)[FAST]),
    }
}

/// Returns by how much the counters of a cgroup can be wrong: each online processor collects up to
/// [`COUNTED_PAGES_PER_CPU`] pages before it updates them. `sys` is the root of sysfs.
pub(super) fn counter_error(sys: &Sysfs) -> Bytes {
    let online = sys.text("devices/system/cpu/online").ok();
    let cpus = online.and_then(|text| Some(parse_ranges::<u64>(&text)?.into_iter().flatten().count()));
    Bytes::new(cpus.unwrap_or(1) as u64 * COUNTED_PAGES_PER_CPU * PAGE_BYTES)
}

/// Returns the bytes that are moved in an interval at a rate in bytes per second.
fn bytes_in(rate: u64, interval: Duration) -> u64 {
    let bytes = u128::from(rate).saturating_mul(interval.as_millis()) / 1000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
