//! What is known for forecasts, in memory: outcomes, who serves, where it is operated, and VMs between their plan and their end. Nothing
//! here waits or writes; what is to be durable is handed back as entries.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use prediction::{
    file::{Content, Kind, ModelFile},
    frigid::{Ask, Calibration, Groups, History, Known, Live, Outcome, Usage},
    sensitivity,
};
use units::{
    Bytes, Fraction, HostId, Name, ReservationId, UnixMs,
    limits::{OUTCOMES_KEPT_MAX, OUTCOMES_PER_OPERATING_POINT, PLANS_COUNTED_MAX, PLANS_REMEMBERED_MAX},
};

use super::{
    point::{Point, Rules},
    rows::{self, Begun, Counters, Past, Remark},
};
use crate::store::Write;

/// What is known for forecasts.
#[derive(Debug)]
pub struct State {
    live: Live,
    /// Which version [`Live`] speaks by.
    frigid: Option<u32>,
    sensitivity: Option<(u32, sensitivity::Model)>,
    point: Point,
    kept: Kept,
    plans: Plans,
    /// VMs that have their memory.
    begun: BTreeMap<ReservationId, Begun>,
    peaks: BTreeMap<ReservationId, (HostId, Bytes)>,
}

/// Outcomes that are durable, the latest last.
#[derive(Debug, Default)]
struct Kept {
    next: u64,
    entries: VecDeque<Entry>,
    known: HashSet<u64>,
    since_point: usize,
    since_rebuilt: usize,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    number: u64,
    ended: UnixMs,
    fingerprint: u64,
}

/// Plans whose VMs have no memory yet, and how much was known of the latest.
#[derive(Debug, Default)]
struct Plans {
    by_vm: BTreeMap<Name, (u64, Begun)>,
    in_order: VecDeque<(u64, Name)>,
    next: u64,
    counted: VecDeque<(u64, bool)>,
}

/// What can be said of a VM before it starts.
#[derive(Clone, Debug)]
pub struct Foreseen {
    /// What is to be remembered of it.
    pub begun: Begun,
    /// What was known, as numbers, and what was said.
    pub known: Known,
    /// Where it is operated.
    pub point: Point,
    /// What its workload was told to be: version, probability of being slowed down beyond the margin, the margin.
    pub sensitivity: Option<(u32, f64, Fraction)>,
}

impl State {
    /// Of a rack without a past.
    pub fn new(rules: Rules) -> Self {
        Self {
            live: Live::default(),
            frigid: None,
            sensitivity: None,
            point: Point::nothing(rules),
            kept: Kept { next: 1, ..Kept::default() },
            plans: Plans::default(),
            begun: BTreeMap::new(),
            peaks: BTreeMap::new(),
        }
    }

    /// What can be said of a VM now.
    pub fn foresee(&self, ask: Ask, counters: Option<Counters>) -> Foreseen {
        let known = self.live.know(&ask);
        let remark = self.frigid.zip(known.said).map(|(version, said)| Remark { version, said });
        let sensitivity = counters.as_ref().zip(self.sensitivity.as_ref());
        let sensitivity = sensitivity
            .map(|(counters, (version, model))| (*version, model.probability(counters), model.pdm));
        Foreseen { begun: Begun { ask, counters, remark }, known, point: self.point, sensitivity }
    }

    /// A VM was planned: what was known and said of it is remembered until it has its memory.
    pub fn planned(&mut self, vm: &Name, begun: Begun) {
        self.plans.add(vm, begun);
    }

    /// A VM has its memory. What is to be durable of it: nothing if it was never planned, as the ledger knows what is known of it then.
    pub fn began(
        &mut self,
        id: ReservationId,
        vm: &Name,
        requested: Bytes,
        cores: u32,
        created: UnixMs,
    ) -> Option<Write> {
        if self.begun.contains_key(&id) {
            return None;
        }
        let Some(mut begun) = self.plans.take(vm) else {
            let groups = Groups { vm: vm.to_string(), ..Groups::default() };
            let ask = Ask { groups, requested, cores: Some(cores.into()), begins: created };
            self.begun.insert(id, Begun { ask, counters: None, remark: None });
            return None;
        };
        if begun.ask.requested != requested {
            begun.remark = None; // it was said of another VM
        }
        (begun.ask.requested, begun.ask.begins) = (requested, created);
        let write = rows::begun(id, &begun);
        self.begun.insert(id, begun);
        Some(write)
    }

    /// A VM's word about how much it has touched so far.
    pub fn touched(&mut self, host: HostId, id: ReservationId, bytes: Bytes) {
        let (of, peak) = self.peaks.entry(id).or_insert((host, Bytes::ZERO));
        (*of, *peak) = (host, bytes.max(*peak));
    }

    /// A host's agent is another one, or was away: what it said before may be too little by now, and it says it again.
    pub fn forget_peaks(&mut self, host: HostId) {
        self.peaks.retain(|_, (of, _)| *of != host);
    }

    /// A VM gave its memory back. What came of it, if its agent knew to the end how much it had touched; and what is to be durable.
    pub fn ended(&mut self, id: ReservationId, ended: UnixMs) -> (Option<Past>, Vec<Write>) {
        let Some(begun) = self.begun.remove(&id) else { return (None, Vec::new()) };
        let mut writes = vec![rows::not_begun(id)];
        let past = self.peaks.remove(&id).and_then(|(_, peak)| past(begun, peak, ended, Usage::default()));
        if let Some(past) = past.clone() {
            writes.extend(self.add(past));
        }
        (past, writes)
    }

    /// Takes in a VM that has ended. What is to be durable; nothing if it is known already.
    pub fn add(&mut self, past: Past) -> Option<Write> {
        let fingerprint = fingerprint(&past);
        if !self.kept.known.insert(fingerprint) {
            return None;
        }
        let number = self.kept.next;
        let write = rows::past(number, &past);
        self.take_in(number, &past, fingerprint);
        Some(write)
    }

    /// Takes in what a store has.
    pub fn load(&mut self, number: u64, past: &Past) {
        let fingerprint = fingerprint(past);
        if self.kept.known.insert(fingerprint) {
            self.take_in(number, past, fingerprint);
        }
    }

    /// Takes in what a store has of a VM that had its memory.
    pub fn load_begun(&mut self, id: ReservationId, begun: Begun) {
        self.begun.insert(id, begun);
    }

    fn take_in(&mut self, number: u64, past: &Past, fingerprint: u64) {
        let remark = past.begun.remark.filter(|remark| Some(remark.version) == self.frigid);
        self.live.end(&past.begun.ask, &past.outcome, remark.map(|remark| remark.said));
        self.kept.next = number + 1;
        self.kept.entries.push_back(Entry { number, ended: past.outcome.ended, fingerprint });
        self.kept.since_point += 1;
        self.kept.since_rebuilt += 1;
    }

    /// Forgets outcomes that are too many or too old; what is to be durable.
    pub fn forget(&mut self, before: UnixMs) -> Vec<Write> {
        let mut writes = Vec::new();
        let kept = &mut self.kept;
        while kept
            .entries
            .front()
            .is_some_and(|entry| kept.entries.len() > OUTCOMES_KEPT_MAX || entry.ended < before)
        {
            let entry = kept.entries.pop_front().expect("it was just seen");
            kept.known.remove(&entry.fingerprint);
            writes.push(rows::no_past(entry.number));
        }
        writes
    }

    /// VMs that are remembered as having their memory.
    pub fn running(&self) -> impl Iterator<Item = ReservationId> {
        self.begun.keys().copied()
    }

    /// How many outcomes are kept.
    pub fn outcomes(&self) -> usize {
        self.kept.entries.len()
    }

    /// The highest number of an outcome so far, and the next.
    pub fn next_outcome(&self) -> u64 {
        self.kept.next
    }

    /// Whether it is time to choose the operating point anew.
    pub fn is_point_due(&self) -> bool {
        self.kept.since_point >= OUTCOMES_PER_OPERATING_POINT
    }

    /// What a choice of the operating point is made of.
    pub fn basis(&self, rules: Rules) -> Basis {
        let cuts = self.sensitivity.as_ref().map(|(_, model)| model.cuts().to_vec());
        Basis {
            serving: self.serving(),
            calibration: self.live.calibration().clone(),
            cuts: cuts.unwrap_or_default(),
            history: self.plans.history(),
            rules,
        }
    }

    /// Operates there from now on, unless another model serves by now.
    pub fn set_point(&mut self, serving: [Option<u32>; 2], point: Point) {
        if serving == self.serving() {
            self.point = point;
            self.kept.since_point = 0;
        }
    }

    /// Where it is operated.
    pub fn point(&self) -> &Point {
        &self.point
    }

    /// Which versions serve: of frigid memory, and of latency sensitivity.
    pub fn serving(&self) -> [Option<u32>; 2] {
        [self.frigid, self.sensitivity.as_ref().map(|(version, _)| *version)]
    }

    /// Another model serves from now on, operated there. Outcomes of VMs that it spoke of before count, too.
    pub fn serve(&mut self, version: u32, file: ModelFile, calibration: Calibration, point: Point) {
        match file.content {
            Content::Frigid { model, .. } => {
                self.live.adopt(model, calibration);
                self.frigid = Some(version);
            }
            Content::Sensitivity { model, .. } => self.sensitivity = Some((version, model)),
        }
        self.point = point;
    }

    /// No model of this kind serves any more.
    pub fn serve_none(&mut self, kind: Kind, point: Point) {
        match kind {
            Kind::Frigid => {
                self.live.set_model(None);
                self.frigid = None;
            }
            Kind::Sensitivity => self.sensitivity = None,
        }
        self.point = point;
    }

    /// Whether groups hold much that was forgotten, so that a history is to be made anew.
    pub fn is_history_due(&self) -> bool {
        self.kept.since_rebuilt > 2 * OUTCOMES_KEPT_MAX
    }

    /// A history made anew of all outcomes below a number; another time if more have come since.
    pub fn set_history(&mut self, history: History, made_of: u64) {
        if made_of == self.kept.next {
            self.live.set_history(history);
            self.kept.since_rebuilt = self.kept.entries.len();
        }
    }
}

/// What a choice of the operating point is made of.
#[derive(Debug)]
pub struct Basis {
    /// Which versions served.
    pub serving: [Option<u32>; 2],
    /// Outcomes of late.
    pub calibration: Calibration,
    /// Of the model of latency sensitivity.
    pub cuts: Vec<sensitivity::Cut>,
    /// Of the memory of VMs of late, that of those whose counters were known.
    pub history: Fraction,
    /// What the operator allows.
    pub rules: Rules,
}

impl Basis {
    /// The choice; takes some milliseconds.
    pub fn choose(&self) -> Point {
        Point::choose(&self.calibration, &self.cuts, self.history, self.rules)
    }
}

impl Plans {
    fn add(&mut self, vm: &Name, begun: Begun) {
        let size = begun.ask.requested.get();
        if self.counted.len() == PLANS_COUNTED_MAX {
            self.counted.pop_front();
        }
        self.counted.push_back((size, begun.counters.is_some()));
        self.next += 1;
        self.by_vm.insert(vm.clone(), (self.next, begun));
        self.in_order.push_back((self.next, vm.clone()));
        while self.in_order.len() > PLANS_REMEMBERED_MAX {
            let (number, vm) = self.in_order.pop_front().expect("it was just seen");
            if self.by_vm.get(&vm).is_some_and(|(newest, _)| *newest == number) {
                self.by_vm.remove(&vm);
            }
        }
    }

    fn take(&mut self, vm: &Name) -> Option<Begun> {
        self.by_vm.remove(vm).map(|(_, begun)| begun)
    }

    /// Of the memory of the latest, that of those whose counters were known.
    fn history(&self) -> Fraction {
        let of = |wanted: fn(&&(u64, bool)) -> bool| {
            self.counted.iter().filter(wanted).map(|(size, _)| *size as f64).sum::<f64>()
        };
        let (known, all) = (of(|(_, known)| *known), of(|_| true));
        Fraction::new(if all > 0.0 { known / all } else { 0.0 }).expect("a part of a whole")
    }
}

/// What came of a VM that touched so much at most; none of one that asked for nothing.
pub fn past(begun: Begun, peak: Bytes, ended: UnixMs, usage: Usage) -> Option<Past> {
    let requested = begun.ask.requested;
    if requested == Bytes::ZERO {
        return None;
    }
    let left = requested.saturating_sub(peak);
    let untouched = Fraction::new(left.get() as f64 / requested.get() as f64).expect("a part of a whole");
    let ended = ended.max(begun.ask.begins);
    Some(Past { begun, outcome: Outcome { ended, untouched, usage } })
}

/// Tells VMs apart that ended: the same one is not told twice.
fn fingerprint(past: &Past) -> u64 {
    let ask = &past.begun.ask;
    let mut hasher = DefaultHasher::new();
    (ask.groups.all(), ask.begins, past.outcome.ended, ask.requested).hash(&mut hasher);
    past.outcome.untouched.get().to_bits().hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
