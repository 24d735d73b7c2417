//! Deterministic simulation of a rack in one thread: the real state machines of manager and agents, with
//! simulated connections, disks, devices, hosts and clients that inject faults. After every step the
//! invariants are checked ([`check`](World::step)).
//!
//! The same seed gives the same run.

mod calm;
mod check;
mod clock;
mod device;
mod hosts;
mod machine;
mod migrations;
mod past;
mod people;
mod program;
mod rack;
mod scrubs;
mod store;
mod story;
mod trouble;
mod weather;
mod wire;

use std::{collections::BTreeMap, sync::Arc};

use pool::manager::SessionId;
use pool::protocol::{Have, Want};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;
use units::{EmcId, HostId, Ns, ReservationId};

use self::{
    check::{Truth, has_ended},
    clock::WallClock,
    device::Device,
    machine::{Job, Machine, Pid},
    people::People,
    program::Program,
    rack::RackFile,
    story::Story,
    trouble::Trouble,
    weather::Weather,
    wire::Wire,
};
pub use self::{
    store::{BACKUPS_MAX, MemoryStore, Store},
    story::{Failure, Summary},
};

/// Scheduled event.
#[derive(Debug)]
enum Happening {
    ManagerStarts,
    ManagerWakes,
    ManagerSettles(u64),
    /// The store has completed a batch of this run of the manager.
    StoreDone(u64),
    StoreRead(u64),
    /// The first queued call of this run to this device is made.
    DeviceTurn(u64, EmcId),
    /// The operator's fence command, started for this device by this run of the manager, has ended.
    CommandEnds(u64, EmcId, HostId),
    Boots(HostId),
    AgentStarts(HostId, u64),
    AgentWakes(HostId, u64),
    /// The host has completed a call of this run of the agent.
    HostDone(HostId, u64, Box<Job>),
    ProcessGone(HostId, u64, ReservationId),
    /// A process of this boot tries to attach memory.
    Asks(HostId, u64, Pid),
    /// A process uses its memory or ends.
    Lives(HostId, u64, Pid),
    Connects(HostId, u64),
    Welcome(SessionId),
    ToManager(SessionId, Box<Have>),
    /// The manager applies one part of a report.
    ToManagerPart(SessionId, Box<Have>),
    ToAgent(SessionId, Box<Want>),
    AsksReport(SessionId),
    ManagerHearsEnd(SessionId),
    AgentHearsEnd(SessionId),
    /// An agent that was to be rejected disconnects.
    IntruderLeaves(SessionId),
    PeopleAct,
    TroubleComes,
    TroubleEnds(Trouble),
}

/// A simulated rack with its clients and faults.
#[derive(Debug)]
pub struct World {
    seed: u64,
    rng: Pcg64,
    now: Ns,
    wall_clock: WallClock,
    steps: u64,
    queue: BTreeMap<(Ns, u64), Happening>,
    queued: u64,
    weather: Weather,
    program: Program,
    rack: RackFile,
    devices: Vec<Device>,
    machines: Vec<Machine>,
    wire: Wire,
    people: People,
    truth: Truth,
    story: Story,
    /// No further faults are injected.
    calm: bool,
}

impl World {
    /// Creates the world of a seed, with a store in memory.
    pub fn new(seed: u64) -> Self {
        let mut rng = Pcg64::seed_from_u64(seed);
        let weather = Weather::of(&mut rng);
        let store = Box::new(MemoryStore::new(rng.random(), weather.store_fails));
        Self::grow(seed, rng, weather, store)
    }

    /// Creates the world of a seed, with another store.
    pub fn with_store(seed: u64, store: Box<dyn Store>) -> Self {
        let mut rng = Pcg64::seed_from_u64(seed);
        let weather = Weather::of(&mut rng);
        Self::grow(seed, rng, weather, store)
    }

    fn grow(seed: u64, rng: Pcg64, weather: Weather, store: Box<dyn Store>) -> Self {
        let mut world = Self {
            seed,
            rng,
            now: Ns::ZERO,
            wall_clock: WallClock::default(),
            steps: 0,
            queue: BTreeMap::new(),
            queued: 0,
            devices: weather.devices(),
            machines: weather.machines(),
            program: Program::new(store),
            rack: RackFile::new(weather.rack.clone()),
            wire: Wire::default(),
            people: People::default(),
            truth: Truth::default(),
            story: Story::default(),
            calm: false,
            weather,
        };
        if world.weather.long_past {
            world.remember_past();
        }
        world.after(Ns::ZERO, Happening::ManagerStarts);
        for host in world.hosts() {
            world.after(Ns::ms(1), Happening::Boots(host));
        }
        world.after(Ns::ms(5), Happening::PeopleAct);
        world.after(Ns::ms(20), Happening::TroubleComes);
        world
    }

    /// Logs the latest events, to be printed with a failure.
    #[must_use]
    pub fn told(mut self, events: usize) -> Self {
        self.story.tell(events);
        self
    }

    /// Runs a number of steps, then until the world is quiescent.
    ///
    /// # Errors
    /// An invariant was violated.
    pub fn run(mut self, steps: u64) -> Result<Summary, Box<Failure>> {
        for _ in 0..steps {
            self.step()?;
        }
        self.settle()?;
        Ok(self.story.summary(self.steps))
    }

    /// Processes the next event and checks the invariants.
    ///
    /// # Errors
    /// An invariant was violated.
    pub fn step(&mut self) -> Result<(), Box<Failure>> {
        if let Some(((at, _), happening)) = self.queue.pop_first() {
            self.now = at;
            self.steps += 1;
            self.happen(happening);
            self.check();
        }
        self.story.failure(self.seed, self.steps).map_or(Ok(()), Err)
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::ManagerStarts => self.start_manager(),
            Happening::ManagerWakes => self.wake_manager(),
            Happening::ManagerSettles(life) => self.end_burst(life),
            Happening::StoreDone(life) => self.store_done(life),
            Happening::StoreRead(life) => self.store_read(life),
            Happening::DeviceTurn(life, emc) => self.device_turn(life, emc),
            Happening::CommandEnds(life, emc, host) => self.command_ends(life, emc, host),
            Happening::Boots(host) => self.boot(host),
            Happening::AgentStarts(host, boot) => self.start_agent(host, boot),
            Happening::AgentWakes(host, instance) => self.wake_agent(host, instance),
            Happening::HostDone(host, instance, job) => self.host_done(host, instance, *job),
            Happening::ProcessGone(host, instance, id) => self.process_gone(host, instance, id),
            Happening::Asks(host, boot, pid) => self.process_asks(host, boot, pid),
            Happening::Lives(host, boot, pid) => self.process_lives(host, boot, pid),
            Happening::Connects(host, instance) => self.connect(host, instance),
            Happening::Welcome(session) => self.welcome(session),
            Happening::ToManager(session, have) => self.manager_hears(session, *have),
            Happening::ToManagerPart(session, part) => self.manager_hears_part(session, *part),
            Happening::ToAgent(session, want) => self.agent_hears(session, *want),
            Happening::AsksReport(session) => self.agent_is_asked(session),
            Happening::ManagerHearsEnd(session) => self.manager_hears_end(session),
            Happening::AgentHearsEnd(session) => self.agent_hears_end(session),
            Happening::IntruderLeaves(session) => self.intruder_leaves(session),
            Happening::PeopleAct => self.people_act(),
            Happening::TroubleComes => self.trouble_comes(),
            Happening::TroubleEnds(trouble) => self.trouble_ends(trouble),
        }
    }

    fn at(&mut self, at: Ns, happening: Happening) {
        self.queued += 1; // events due at the same time occur in the order in which they were scheduled
        self.queue.insert((at.max(self.now), self.queued), happening);
    }

    fn after(&mut self, span: Ns, happening: Happening) {
        self.at(self.now.after(span), happening);
    }

    /// Draws a duration around `span`; one in twenty is ten times longer.
    fn about(&mut self, span: Ns) -> Ns {
        let usual = self.rng.random_range(span.0 / 2..=span.0 * 3 / 2);
        Ns(if self.rng.random_bool(0.05) { usual * 10 } else { usual })
    }

    fn between(&mut self, least: Ns, most: Ns) -> Ns {
        Ns(self.rng.random_range(least.0..=most.0))
    }

    fn chance(&mut self, part: f64) -> bool {
        self.rng.random_bool(part)
    }

    fn any<T: Clone>(&mut self, of: &[T]) -> Option<T> {
        (!of.is_empty()).then(|| of[self.rng.random_range(0..of.len())].clone())
    }

    fn hosts(&self) -> Vec<HostId> {
        self.machines.iter().map(|machine| machine.id).collect()
    }

    fn machine(&mut self, host: HostId) -> &mut Machine {
        self.machines.iter_mut().find(|machine| machine.id == host).expect("a host with a machine")
    }

    fn machine_of(&self, host: HostId) -> Option<&Machine> {
        self.machines.iter().find(|machine| machine.id == host)
    }

    fn say(&mut self, words: impl FnOnce() -> String) {
        self.story.say(self.now, words);
    }

    /// Records a violated invariant; only the first one is kept.
    fn blame(&mut self, promise: &'static str, what: String) {
        self.story.blame(promise, what);
    }
}

/// Batch of records of the manager.
type Records = Arc<Vec<pool::record::Record>>;

#[cfg(test)]
mod tests {
    use super::*;

    const SEEDS: u64 = 150;
    const STEPS: u64 = 1500;
    /// Events of rare worlds, which so few seeds may not contain.
    const RARE: [&str; 2] = ["long_pasts", "moves_asked_again"];

    /// A generator without output would weaken every check unnoticed.
    #[test]
    fn every_kind_of_event_occurs_within_a_few_seeds() {
        let mut sum = Summary::default();
        for seed in 0..SEEDS {
            sum += World::new(seed).run(STEPS).expect("every promise is kept");
        }
        let mut missing =
            sum.counts().into_iter().filter(|(name, count)| *count == 0 && !RARE.contains(name));
        assert_eq!(missing.next(), None, "{sum:?}");
    }
}
