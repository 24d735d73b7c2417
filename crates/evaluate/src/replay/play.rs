//! Replays a trace in its order, with many concurrent calls. A VM that seems not to fit is tried
//! again when everything before it is done, and a third time while slices drain, so that rejections
//! result from the trace's packing and not from the speed of the replay.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use cli_runtime::{Failure, lists};
use indicatif::{ProgressBar, ProgressStyle};
use sim::{
    packing::{VmShape, median},
    trace::{Arrival, Event, EventKind, events},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    task::{JoinError, JoinSet},
    time::{Instant, timeout_at},
};
use units::{Bytes, Name, Ns};

use super::{
    Rack,
    calls::patiently,
    capacity::{Place, named},
    life::{self, Vm},
    losses, watcher,
};

/// How the progress bar looks.
const BAR: &str = "{elapsed_precise} [{wide_bar}] {pos}/{len} events, {per_sec}  {msg}";

/// A trace being played.
#[derive(Debug)]
pub(super) struct Play {
    rack: Arc<Rack>,
    room: Arc<Semaphore>,
    clients: u32,
    lives: JoinSet<Result<(), Failure>>,
    departing: BTreeMap<usize, oneshot::Sender<OwnedSemaphorePermit>>,
    comparing: JoinSet<Result<BTreeSet<String>, Failure>>,
    /// Reservations of which the ledger knew no more.
    lost: BTreeSet<String>,
    returns: u64,
    /// Slices on their way back for which waiting was in vain.
    stuck: u32,
    /// Nothing was asked for since the last picture that showed everything.
    settled: bool,
    stranded: Stranded,
    bar: ProgressBar,
}

/// Local memory that was free and of no use, over the time of the trace.
#[derive(Clone, Copy, Debug)]
struct Stranded {
    shape: VmShape,
    since: Ns,
    now: Bytes,
    byte_seconds: f64,
    seconds: f64,
}

impl Play {
    /// Plays nothing yet.
    pub(super) fn new(rack: Arc<Rack>, arrivals: &[Arrival], clients: u32) -> Self {
        let shape = median(arrivals.iter().map(need)).unwrap_or(VmShape { cores: 1, memory: Bytes::gib(1) });
        let stranded = Stranded { shape, since: Ns::ZERO, now: Bytes::ZERO, byte_seconds: 0.0, seconds: 0.0 };
        let bar = ProgressBar::new(0);
        bar.set_style(ProgressStyle::with_template(BAR).expect("a template of indicatif"));
        Self {
            rack,
            room: Arc::new(Semaphore::new(clients as usize)),
            clients,
            lives: JoinSet::new(),
            departing: BTreeMap::new(),
            comparing: JoinSet::new(),
            lost: BTreeSet::new(),
            returns: 0,
            stuck: 0,
            settled: false,
            stranded,
            bar,
        }
    }

    /// Plays all of it. VMs that stay are still there afterwards.
    pub(super) async fn through(&mut self, arrivals: &[Arrival]) -> Result<(), Failure> {
        let events = events(arrivals);
        self.bar.set_length(events.len() as u64);
        for event in events {
            self.look_around()?;
            self.event(event, arrivals).await?;
            self.bar.inc(1);
        }
        self.calm().await?;
        self.bar.finish_and_clear();
        Ok(())
    }

    async fn event(&mut self, event: Event, arrivals: &[Arrival]) -> Result<(), Failure> {
        let now = self.rack.free().now().stranded(self.stranded.shape);
        self.stranded.pass(event.at, now);
        match event.kind {
            EventKind::Arrive => self.arrive(event.index, &arrivals[event.index]).await,
            EventKind::Depart => self.depart(event.index).await,
        }
    }

    async fn arrive(&mut self, index: usize, arrival: &Arrival) -> Result<(), Failure> {
        let need = need(arrival);
        let permit = self.permit().await?;
        let first = self.rack.free().place(need, &BTreeSet::new());
        let place = match first {
            Some(place) => Some((place, permit)),
            None => {
                drop(permit);
                self.second_look(need).await?
            }
        };
        let Some((place, permit)) = place else {
            self.rack.tally().rejected += 1;
            return Ok(());
        };
        self.settled = false;
        let vm = Vm { name: format!("vm{}.{}", arrival.line, self.rack.run), need };
        let (depart, departing) = oneshot::channel();
        self.departing.insert(index, depart);
        self.lives.spawn(life::live(Arc::clone(&self.rack), vm, place, permit, departing));
        Ok(())
    }

    /// Its stand-in leaves and its memory is released; nothing if it was turned away or died.
    async fn depart(&mut self, index: usize) -> Result<(), Failure> {
        if let Some(depart) = self.departing.remove(&index).filter(|depart| !depart.is_closed()) {
            self.settled = false;
            let permit = self.permit().await?;
            // A VM that has just died needs no telling.
            drop(depart.send(permit));
        }
        Ok(())
    }

    async fn permit(&self) -> Result<OwnedSemaphorePermit, Failure> {
        Ok(Arc::clone(&self.room).acquire_owned().await.expect("nobody closes it"))
    }

    /// Waits until every call has been answered.
    async fn calm(&mut self) -> Result<(), Failure> {
        drop(self.room.acquire_many(self.clients).await.expect("nobody closes it"));
        self.look_around()
    }

    /// A place by a picture that shows everything asked for before; or, if slices on their way back could help, by later
    /// ones, for as long as was allowed.
    async fn second_look(&mut self, need: VmShape) -> Result<Option<(Place, OwnedSemaphorePermit)>, Failure> {
        self.calm().await?;
        if !self.settled {
            watcher::calm(&self.rack.to, &self.rack.free).await?;
            self.settled = true;
        }
        let mut place = self.rack.free().place(need, &BTreeSet::new());
        if place.is_none() {
            place = self.wait_for_slices(need).await?;
        }
        match place {
            Some(place) => Ok(Some((place, self.permit().await?))),
            None => Ok(None),
        }
    }

    async fn wait_for_slices(&mut self, need: VmShape) -> Result<Option<Place>, Failure> {
        if self.rack.settle == Duration::ZERO {
            return Ok(None);
        }
        let mut news = self.rack.news.clone();
        news.seen();
        let draining = self.draining().await?;
        let slices = draining.values().sum();
        self.stuck = self.stuck.min(slices);
        if slices == self.stuck || !self.rack.free().would_fit(need, &draining) {
            return Ok(None);
        }
        let deadline = Instant::now() + self.rack.settle;
        loop {
            let place = self.rack.free().place(need, &BTreeSet::new());
            if place.is_some() {
                return Ok(place);
            }
            if timeout_at(deadline, news.newer()).await.is_err() {
                self.stuck = self.draining().await?.values().sum();
                return Ok(None);
            }
        }
    }

    async fn draining(&self) -> Result<BTreeMap<Name, u32>, Failure> {
        let emcs = patiently(|| lists::emcs(&self.rack.to)).await?;
        emcs.into_iter().map(|emc| Ok((named(emc.emc)?, emc.draining))).collect()
    }

    /// Takes note of lives that ended, and has the ledger compared whenever the manager has come back.
    fn look_around(&mut self) -> Result<(), Failure> {
        while let Some(ended) = self.lives.try_join_next() {
            flat(ended)?;
        }
        while let Some(compared) = self.comparing.try_join_next() {
            self.lost.extend(flat(compared)?);
        }
        let returns = self.rack.news.returns();
        if returns != self.returns {
            self.returns = returns;
            self.comparing.spawn(losses::lost(Arc::clone(&self.rack)));
        }
        let tally = self.rack.tally();
        self.bar.set_message(format!("{} placed, {} rejected", tally.placed, tally.rejected));
        Ok(())
    }

    /// Compares a last time. Every reservation that the ledger did not know at any time.
    pub(super) async fn losses(&mut self) -> Result<usize, Failure> {
        while let Some(compared) = self.comparing.join_next().await {
            self.lost.extend(flat(compared)?);
        }
        self.lost.extend(losses::lost(Arc::clone(&self.rack)).await?);
        Ok(self.lost.len())
    }

    /// All that are still there go, so that the rack is as it was.
    pub(super) async fn everybody_leaves(&mut self) -> Result<(), Failure> {
        while let Some((index, _)) = self.departing.first_key_value() {
            let index = *index;
            self.depart(index).await?;
        }
        while let Some(ended) = self.lives.join_next().await {
            flat(ended)?;
        }
        Ok(())
    }

    /// The mean of stranded memory over the time of the trace, in bytes.
    pub(super) fn stranded_mean(&self) -> f64 {
        self.stranded.mean()
    }
}

fn need(arrival: &Arrival) -> VmShape {
    VmShape { cores: arrival.cores, memory: arrival.memory }
}

fn flat<T>(ended: Result<Result<T, Failure>, JoinError>) -> Result<T, Failure> {
    ended.unwrap_or_else(|error| Err(Failure::Problem(format!("a part of the replay broke: {error}"))))
}

#[expect(clippy::cast_precision_loss, reason = "means of sizes and times need no more than 52 bits")]
impl Stranded {
    /// Memory stranded until now was stranded since the last event.
    fn pass(&mut self, at: Ns, now: Bytes) {
        let seconds = at.since(self.since).0 as f64 / 1e9;
        self.byte_seconds += self.now.get() as f64 * seconds;
        self.seconds += seconds;
        (self.since, self.now) = (at, now);
    }

    fn mean(&self) -> f64 {
        if self.seconds > 0.0 { self.byte_seconds / self.seconds } else { self.now.get() as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stranded_memory_counts_for_as_long_as_it_is_stranded() {
        let shape = VmShape { cores: 1, memory: Bytes::gib(1) };
        let mut stranded =
            Stranded { shape, since: Ns::ZERO, now: Bytes::ZERO, byte_seconds: 0.0, seconds: 0.0 };
        stranded.pass(Ns::ZERO, Bytes::new(10));
        assert!((stranded.mean() - 10.0).abs() < 1e-9, "before any time has passed it is what it is");
        stranded.pass(Ns::secs(30), Bytes::new(50));
        stranded.pass(Ns::secs(40), Bytes::ZERO);
        assert!((stranded.mean() - 20.0).abs() < 1e-9);
    }
}
