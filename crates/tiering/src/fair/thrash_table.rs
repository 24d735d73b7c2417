//! Table of recently promoted pages: counts promotions that are followed by an early demotion
//! (Equilibria, section IV-F).

use std::collections::BTreeMap;

use units::{
    Bytes, Ns,
    limits::{THRASH_RESIDENCE_MAX, THRASH_TABLE_ENTRIES_MAX, TIERING_TENANTS_MAX},
};

use super::{
    Decision, SettingsError, TenantId,
    equations::{THRASH_LEVEL_MAX, mul_div},
    settings::require,
};

/// Number of entries among which a new entry replaces the oldest one.
const WAYS: usize = 8;
/// Largest sampling shift: one in a million pages.
const SAMPLE_SHIFT_MAX: u32 = 20;

/// Settings of a [`ThrashTable`]. The paper gives no values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrashTableSettings {
    /// Number of entries, a multiple of 8. Default: 65,536 (2 MiB).
    pub entries: usize,
    /// One in 2^`sample_shift` pages is sampled, by a hash of its key. Default: 8.
    pub sample_shift: u32,
    /// Longest time between promotion and demotion that counts as thrashing (t_resident). Default:
    /// 120 s.
    ///
    /// For a tenant with the thrash level k, the time is 2^k times as long. A tenant that promotes
    /// half as fast keeps its pages twice as long.
    pub residence_max: Ns,
    /// Promotion rate, in bytes per second. For a tenant with much local memory, the longest time is the
    /// time in which all of this memory is replaced at this rate, if that is longer than `residence_max`.
    /// Default: 256 MiB/s, a quarter of the default limit of a tenant.
    pub replacement_rate: Bytes,
}

impl Default for ThrashTableSettings {
    fn default() -> Self {
        Self {
            entries: 64 << 10,
            sample_shift: 8,
            residence_max: Ns::secs(120),
            replacement_rate: Bytes::mib(256),
        }
    }
}

/// Sampled promotions of a tenant. Both numbers increase; [`Counters`](super::Counters) contains
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrashCounts {
    /// Number of sampled promotions.
    pub promotions: u64,
    /// Number of sampled promotions that were followed by an early demotion.
    pub thrashed: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct TenantEntry {
    counts: ThrashCounts,
    level: u8,
    /// Local memory of the tenant.
    local: Bytes,
}

/// Recorded promotion.
#[derive(Clone, Copy, Debug)]
struct Promotion {
    tenant: TenantId,
    page: u64,
    at: Ns,
}

/// Table of fixed size with the recent promotions of sampled pages.
///
/// The paper clears the table every 5 s, so that a page that is promoted shortly before escapes. In
/// this table, each entry expires by its own age. A new entry replaces the oldest of 8 entries. An
/// entry that is replaced early is not counted as thrashing.
#[derive(Clone, Debug)]
pub struct ThrashTable {
    settings: ThrashTableSettings,
    promotions: Vec<Option<Promotion>>,
    tenants: BTreeMap<TenantId, TenantEntry>,
}

impl ThrashTable {
    /// Creates an empty table.
    ///
    /// # Errors
    /// [`SettingsError`] if a setting is out of range.
    pub fn new(settings: ThrashTableSettings) -> Result<Self, SettingsError> {
        let ThrashTableSettings { entries, sample_shift, residence_max, replacement_rate } = settings;
        require(
            entries > 0 && entries <= THRASH_TABLE_ENTRIES_MAX && entries.is_multiple_of(WAYS),
            "entries",
            entries as u64,
            "must be a multiple of 8 from 8 to 1048576",
        )?;
        require(sample_shift <= SAMPLE_SHIFT_MAX, "sample_shift", sample_shift.into(), "must be at most 20")?;
        require(
            residence_max > Ns::ZERO && residence_max <= THRASH_RESIDENCE_MAX,
            "residence_max",
            residence_max.0,
            "must be more than 0 and at most 1 h, in nanoseconds",
        )?;
        require(
            replacement_rate > Bytes::ZERO,
            "replacement_rate",
            replacement_rate.get(),
            "must be more than 0 bytes per second",
        )?;
        Ok(Self { settings, promotions: vec![None; entries], tenants: BTreeMap::new() })
    }

    /// Returns whether a page is sampled. `page` identifies the page within its tenant, for example
    /// by its virtual address.
    pub fn is_sampled(&self, tenant: TenantId, page: u64) -> bool {
        self.is_in_subsample(tenant, page, 0)
    }

    /// Returns whether a page remains sampled after the sample was halved this many times.
    pub fn is_in_subsample(&self, tenant: TenantId, page: u64, halvings: u32) -> bool {
        hash(tenant, page).trailing_zeros() >= self.settings.sample_shift + halvings
    }

    /// Records that a page was promoted at `now`. Pages that are not sampled are ignored.
    pub fn record_promotion(&mut self, tenant: TenantId, page: u64, now: Ns) {
        if !self.is_sampled(tenant, page) {
            return;
        }
        let Some(entry) = self.tenant_mut(tenant) else { return };
        entry.counts.promotions = entry.counts.promotions.saturating_add(1);
        let promotion = Promotion { tenant, page, at: now };
        let ways = self.ways(tenant, page);
        let same = ways.iter().position(|way| way.is_some_and(|known| known.is_of(tenant, page)));
        // `None` orders before each time, so an unused entry counts as the oldest one.
        let oldest = || (0..ways.len()).min_by_key(|way| ways[*way].map(|known| known.at));
        if let Some(way) = same.or_else(oldest) {
            ways[way] = Some(promotion);
        }
    }

    /// Records that a page was demoted at `now`. Returns whether its last promotion is so recent
    /// that the tenant thrashes this page.
    pub fn record_demotion(&mut self, tenant: TenantId, page: u64, now: Ns) -> bool {
        if !self.is_sampled(tenant, page) {
            return false;
        }
        let residence_max = self.residence_max(tenant);
        let way =
            self.ways(tenant, page).iter_mut().find(|way| way.is_some_and(|known| known.is_of(tenant, page)));
        let Some(promotion) = way.and_then(Option::take) else { return false };
        // A time before the promotion is a clock that ran backwards, which proves nothing.
        let is_thrashed = now >= promotion.at && now.since(promotion.at) < residence_max;
        if is_thrashed && let Some(entry) = self.tenants.get_mut(&tenant) {
            entry.counts.thrashed = entry.counts.thrashed.saturating_add(1);
        }
        is_thrashed
    }

    /// Returns the counts of a tenant since it was first recorded.
    pub fn counts(&self, tenant: TenantId) -> ThrashCounts {
        self.tenants.get(&tenant).map_or_else(ThrashCounts::default, |entry| entry.counts)
    }

    /// Applies a decision: stores the thrash levels, and removes tenants that the decision does not
    /// contain. The caller calls this function after each step.
    pub fn apply(&mut self, decision: &Decision) {
        let before = std::mem::take(&mut self.tenants);
        let entries = decision.tenants().iter().map(|report| {
            let counts = before.get(&report.tenant).map_or_else(ThrashCounts::default, |entry| entry.counts);
            let (level, local) = (report.thrash_level, report.fast().usage);
            (report.tenant, TenantEntry { counts, level, local })
        });
        self.tenants = entries.collect();
    }

    /// Returns the longest time between promotion and demotion that counts as thrashing for a tenant
    /// (t_resident), which depends on its local memory and its thrash level.
    pub fn residence_max(&self, tenant: TenantId) -> Ns {
        let TenantEntry { level, local, .. } = self.tenants.get(&tenant).copied().unwrap_or_default();
        let replacement = Ns(mul_div(local.get(), Ns::secs(1).0, self.settings.replacement_rate.get()));
        let longest = self.settings.residence_max.max(replacement.min(THRASH_RESIDENCE_MAX));
        Ns(longest.0 << level.min(THRASH_LEVEL_MAX))
    }

    /// Returns the entry of a tenant. Returns `None` for a new tenant if there are too many.
    fn tenant_mut(&mut self, tenant: TenantId) -> Option<&mut TenantEntry> {
        if self.tenants.len() >= TIERING_TENANTS_MAX && !self.tenants.contains_key(&tenant) {
            return None;
        }
        Some(self.tenants.entry(tenant).or_default())
    }

    /// Returns the entries that may contain a page.
    fn ways(&mut self, tenant: TenantId, page: u64) -> &mut [Option<Promotion>] {
        let sets = (self.promotions.len() / WAYS) as u64;
        // The low bits of the hash select the sampled pages, so the high bits select the set.
        let set = usize::try_from((hash(tenant, page) >> 32) % sets).unwrap_or(0);
        &mut self.promotions[set * WAYS..(set + 1) * WAYS]
    }
}

impl Promotion {
    fn is_of(&self, tenant: TenantId, page: u64) -> bool {
        self.tenant == tenant && self.page == page
    }
}

/// Returns a hash of a page (finalizer of SplitMix64, which mixes all bits).
fn hash(tenant: TenantId, page: u64) -> u64 {
    let mut x = page ^ u64::from(tenant.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
