//! One run: a full cache under load, the request of the second process, and the time after its end.

use std::{
    thread,
    time::{Duration, Instant},
};

use benches::{
    cache_client::{Client, Reply},
    cache_servers::{Kind, Programs, Server},
    failure::Failure,
};
use rustix::process::Signal;
use soft::budget::{Counters, Settings};
use tests::soft_daemon::SoftDaemon;
use units::Bytes;

use crate::{
    load::{KEYS, Load, VALUE, key_name},
    second_process::{self, SecondProcess},
    timeline::{Sample, Timeline},
};

/// Soft memory in bytes.
const TOTAL_BYTES: u64 = 20 << 20;
/// Memory of all values in `soft-cache`, in bytes.
const CACHE_BYTES: u64 = 10 << 20;
/// Memory that the second process leaves to the cache, in bytes.
const LEFT_BYTES: u64 = TOTAL_BYTES - second_process::BYTES as u64;
/// Budget of Redis before it is killed, in bytes. It suffices for all values.
const REDIS_BYTES: u64 = 64 << 20;
/// Largest budget that `soft-cache` requests of the daemon, in bytes.
const CACHE_BYTES_MAX: u64 = 64 << 20;
/// Duration of the load before the request, with both processes, and after the end of the second process.
const PHASES: [Duration; 3] = [Duration::from_secs(5), Duration::from_secs(25), Duration::from_secs(10)];
/// Time after the request in which the longest time without a reply is measured.
const OUTAGE_TIME: Duration = Duration::from_secs(2);
/// Interval between samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// Method by which the second process gets memory of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// The daemon takes soft memory from the cache.
    Soft,
    /// `soft-cache` without a daemon is killed, and started again with less memory.
    Restart,
    /// Redis is killed, and started again with less memory.
    Redis,
}

impl Scheme {
    /// All schemes, the one with soft memory first.
    pub const ALL: [Self; 3] = [Self::Soft, Self::Restart, Self::Redis];

    /// Returns the name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Soft => "soft",
            Self::Restart => "restart",
            Self::Redis => "redis",
        }
    }

    /// Returns a description for tables and figures.
    pub fn description(self) -> &'static str {
        match self {
            Self::Soft => "soft-cache, soft memory",
            Self::Restart => "soft-cache, killed",
            Self::Redis => "redis-server, killed",
        }
    }
}

/// Results of a run.
#[derive(Clone, Debug)]
pub struct Run {
    pub scheme: Scheme,
    pub timeline: Timeline,
    /// Time from the request until the second process has its memory.
    pub handover: Duration,
    /// Longest time without a reply of the cache in the first seconds after the request.
    pub outage: Duration,
    /// Number of error replies.
    pub errors: u64,
    /// Counters of the daemon.
    pub daemon: Option<Counters>,
}

/// Cache and second process of a run.
struct Machine<'a> {
    programs: &'a Programs,
    scheme: Scheme,
    server: Server,
    second: Option<SecondProcess>,
    /// Budget of the server after a restart, in bytes.
    left_bytes: u64,
    /// Connection for samples.
    observer: Option<Client>,
}

/// Runs a scheme with a latency of the backend.
///
/// # Errors
/// [`Failure`] if a program fails, or if the daemon took no memory from the cache.
pub fn run(programs: &Programs, scheme: Scheme, backend_latency: Duration) -> Result<Run, Failure> {
    let settings = Settings { over_reclaim_percent: 0, ..Settings::default() };
    let daemon = (scheme == Scheme::Soft).then(|| SoftDaemon::start(Bytes::new(TOTAL_BYTES), settings));
    let mut machine = Machine::start(programs, scheme, daemon.as_ref())?;
    let load = Load::new(machine.server.address, backend_latency);
    let mut run = Run {
        scheme,
        timeline: Timeline::default(),
        handover: Duration::ZERO,
        outage: Duration::ZERO,
        errors: 0,
        daemon: None,
    };
    load.run_during(|| machine.observe(&load, &mut run))?;
    run.errors = load.errors();
    run.daemon = daemon.map(|daemon| daemon.next_report().counters);
    if run.daemon.is_some_and(|counters| counters.requests == 0 || counters.reclaimed == 0) {
        let reply = format!("no requests or no reclaimed pages: {:?}", run.daemon);
        return Err(Failure::UnexpectedReply { subject: "soft memory daemon".to_owned(), reply });
    }
    Ok(run)
}

impl<'a> Machine<'a> {
    /// Starts a cache with all values, and the second process.
    fn start(programs: &'a Programs, scheme: Scheme, daemon: Option<&SoftDaemon>) -> Result<Self, Failure> {
        let socket = daemon.map(SoftDaemon::socket);
        let server = match (scheme, &socket) {
            (Scheme::Redis, _) => programs.start(Kind::Redis, REDIS_BYTES)?,
            (_, Some(socket)) => programs.start_with_daemon(socket, CACHE_BYTES_MAX)?,
            (_, None) => programs.start(Kind::SoftCache, TOTAL_BYTES)?,
        };
        let mut client = server.connect()?;
        let empty = used_memory(&mut client)?;
        let errors = client.set_all((0..KEYS).map(key_name), &VALUE)?;
        let values = used_memory(&mut client)? - empty;
        if errors > 0 {
            let reply = format!("{errors} of {KEYS} values were rejected");
            return Err(Failure::UnexpectedReply { subject: scheme.description().to_owned(), reply });
        }
        let left_bytes = match scheme {
            Scheme::Redis => empty + values * LEFT_BYTES / CACHE_BYTES,
            Scheme::Soft | Scheme::Restart => LEFT_BYTES,
        };
        let second = Some(SecondProcess::start(socket.as_deref())?);
        Ok(Self { programs, scheme, server, second, left_bytes, observer: Some(client) })
    }

    /// Runs the phases.
    fn observe(&mut self, load: &Load, run: &mut Run) -> Result<(), Failure> {
        let samples = &mut run.timeline.samples;
        samples.push(self.sample(load)?);
        self.sample_until(load.elapsed() + PHASES[0], load, samples)?;
        run.timeline.request = samples.len() - 1;
        load.take_longest_gap();
        let request = load.elapsed();
        run.handover = self.request_memory()?;
        self.sample_until(request + OUTAGE_TIME, load, samples)?;
        run.outage = load.take_longest_gap();
        self.sample_until(request + PHASES[1], load, samples)?;
        run.timeline.end = samples.len();
        self.second = None;
        self.sample_until(load.elapsed() + PHASES[2], load, samples)
    }

    /// Makes the second process request its memory, and returns the time until it has the memory. Without soft memory,
    /// the server is killed before.
    fn request_memory(&mut self) -> Result<Duration, Failure> {
        let start = Instant::now();
        if self.scheme != Scheme::Soft {
            self.server.process.signal(Signal::KILL);
            self.server.process.wait()?;
        }
        let request = self.second.as_mut().map(SecondProcess::request);
        let kind = match self.scheme {
            Scheme::Soft => None,
            Scheme::Restart => Some(Kind::SoftCache),
            Scheme::Redis => Some(Kind::Redis),
        };
        if let Some(kind) = kind {
            self.server = self.programs.start_at(self.server.address, kind, self.left_bytes)?;
        }
        let request = request.map(|request| request.join().expect("the thread does not panic"));
        Ok(request.transpose()?.map_or(Duration::ZERO, |end| end - start))
    }

    /// Appends samples until a time since the start of the load.
    fn sample_until(&mut self, end: Duration, load: &Load, samples: &mut Vec<Sample>) -> Result<(), Failure> {
        loop {
            let left = end.saturating_sub(load.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            // The last interval is not much shorter than others, so that its rates are comparable.
            let is_last = left < SAMPLE_INTERVAL * 3 / 2;
            thread::sleep(if is_last { left } else { SAMPLE_INTERVAL });
            samples.push(self.sample(load)?);
        }
    }

    fn sample(&mut self, load: &Load) -> Result<Sample, Failure> {
        if self.observer.is_none() {
            self.observer = self.server.connect().ok();
        }
        let used = self.observer.as_mut().map(used_memory);
        if matches!(used, Some(Err(_))) {
            self.observer = None; // the server was killed
        }
        Ok(Sample {
            time: load.elapsed(),
            cache_bytes: used.and_then(Result::ok).unwrap_or(0),
            second_bytes: self.second.as_ref().map_or(Ok(0), SecondProcess::memory_bytes)?,
            counts: load.counts(),
        })
    }
}

/// Returns the memory that a server uses for values, in bytes. That of Redis also contains its other memory.
fn used_memory(client: &mut Client) -> Result<u64, Failure> {
    let reply = client.execute(&[b"INFO", b"memory"])?;
    let text = String::from_utf8_lossy(client.value());
    let used = text.lines().find_map(|line| line.strip_prefix("used_memory:")?.trim().parse().ok());
    used.filter(|_| reply == Reply::Success).ok_or_else(|| Failure::UnexpectedReply {
        subject: "INFO memory".to_owned(),
        reply: format!("{reply:?} {text}"),
    })
}
