//! Goal: slices come online and go offline at 1 GB/s or more, which suffices with a buffer of free
//! slices (Pond, section 4.4). Measured in a rack in a box by the agent's metrics, for both
//! backends: untouched slices, slices filled by a VM, and a slice whose pages the kernel has to
//! move to others of the node first.

use std::{
    fmt::Write as _,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use benches::{
    failure::Failure,
    programs,
    report::{ratio, table},
};
use clap::Parser;
use emulated_host::rack::{Device, Plan, Rack, RackPlan};

/// Sufficient rate, in bytes per second.
const SUFFICES: f64 = 1e9;
/// Bytes of a slice.
const SLICE: f64 = (1u64 << 30) as f64;
/// Slices of the device. One comes or goes at a time.
const SLICES: u32 = 2;
/// Memory that a VM writes to fill a slice, in MiB: a node needs some for itself.
const FILL_MIB: u32 = 960;
/// Memory of a VM while other slices leave, in MiB.
const MOVE_MIB: u32 = 512;
/// Where the agent's metrics are, in its host.
const METRICS: &str = "127.0.0.1:9751";
/// Where it hands out memory.
const SOCKET: &str = "/run/tarn-agent/host-memory.sock";
/// Operations on a slice, in order.
const CALLS: [&str; 3] = ["online", "scrub", "offline"];
const BACKENDS: [&str; 2] = ["dax", "memory_block"];
/// How long anything may take: hosts are emulated.
const WITHIN: Duration = Duration::from_secs(180);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How fast slices come and go
#[derive(Debug, Parser)]
struct Args {
    /// How often a slice comes and goes in each state; the report shows means
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    match measure(&Args::parse()) {
        Ok(report) => {
            print!("{report}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("slice_speed: {}", failure.story());
            ExitCode::FAILURE
        }
    }
}

fn measure(args: &Args) -> Result<String, Failure> {
    let measured = BACKENDS.iter().map(|backend| Backend::measure(backend, args.rounds));
    Ok(report(&measured.collect::<Result<Vec<_>, _>>()?))
}

/// Seconds that calls took, and how many there were.
#[derive(Clone, Copy, Debug, Default)]
struct Calls {
    seconds: f64,
    count: f64,
}

impl Calls {
    fn since(self, before: Self) -> Self {
        Self { seconds: self.seconds - before.seconds, count: self.count - before.count }
    }

    /// Seconds for a slice.
    fn mean(self) -> f64 {
        self.seconds / self.count
    }
}

/// By call, as in [`CALLS`].
type Speed = [Calls; 3];

struct Backend {
    name: &'static str,
    empty: Speed,
    full: Speed,
    /// Closing slices while their pages have somewhere to go, where that can be.
    moved: Option<Calls>,
}

impl Backend {
    fn measure(name: &'static str, rounds: u32) -> Result<Self, Failure> {
        let mut bed = RackOfOne::start(name)?;
        bed.come_and_go("warm", None)?;
        let empty = bed.during(rounds, |bed, n| bed.come_and_go(&format!("empty{n}"), None))?;
        let full = bed.during(rounds, |bed, n| bed.come_and_go(&format!("full{n}"), Some(FILL_MIB)))?;
        let moved = match name {
            "memory_block" => Some(bed.during(rounds, Self::go_beside)?[2]),
            _ => None,
        };
        Ok(Self { name, empty, full, moved })
    }

    /// A VM that came second stays with pages in slices that came first; those go.
    fn go_beside(bed: &mut RackOfOne, n: u32) -> Result<(), Failure> {
        let (first, stays) = (format!("first{n}"), format!("stays{n}"));
        bed.reserve(&first)?;
        bed.reserve(&stays)?;
        bed.start_vm(&stays, MOVE_MIB)?;
        bed.tarn(&format!("release {first}"))?;
        bed.until_free(1)?;
        bed.end_vm(&stays)?;
        bed.until_free(SLICES)
    }
}

/// Rack of one host, whose agent reports durations.
struct RackOfOne {
    rack: Rack,
    _folder: tempfile::TempDir,
}

impl RackOfOne {
    fn start(backend: &str) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("tarn-rack-").tempdir();
        let folder = folder.map_err(Failure::file("make a folder in", std::env::temp_dir()))?;
        let hosts = Plan::new(1, vec![Device { serial: 0x7a0, gib: SLICES, is_aligned: true }]);
        let mut plan = RackPlan::new(hosts, programs::of_rack()?, backend);
        plan.hosts.programs.push(plan.programs.tarn.clone());
        plan.agent_toml_extra = format!("metrics_listen = {METRICS:?}\n");
        eprintln!("{backend}: a host boots");
        let rack = Rack::start(&emulated_host::Artifacts::locate()?, plan, folder.path(), || true)?;
        Ok(Self { rack, _folder: folder })
    }

    /// Returns the durations of calls during repeated work.
    fn during(
        &mut self,
        rounds: u32,
        mut work: impl FnMut(&mut Self, u32) -> Result<(), Failure>,
    ) -> Result<Speed, Failure> {
        let before = self.speed()?;
        for round in 0..rounds {
            work(self, round)?;
        }
        let after = self.speed()?;
        Ok(std::array::from_fn(|call| after[call].since(before[call])))
    }

    /// A slice comes, is filled if it should be, and goes.
    fn come_and_go(&mut self, vm: &str, fill_mib: Option<u32>) -> Result<(), Failure> {
        self.reserve(vm)?;
        match fill_mib {
            Some(mib) => {
                self.start_vm(vm, mib)?;
                self.end_vm(vm)?;
            }
            None => drop(self.tarn(&format!("release {vm}"))?),
        }
        self.until_free(SLICES)
    }

    fn reserve(&self, vm: &str) -> Result<(), Failure> {
        self.tarn(&format!(
            "reserve --host h0 --vm {vm} --pool 1GiB --cores 1 --request-id {vm} --wait-ready"
        ))?;
        self.tarn(&format!("commit {vm}")).map(drop)
    }

    fn start_vm(&self, vm: &str, mib: u32) -> Result<(), Failure> {
        self.run(&format!(
            "mkfifo /run/{vm}.in; sleep 100000 > /run/{vm}.in 2> /dev/null & echo $! > /run/{vm}.sleep; \
             tarn stand-in-vm --socket {SOCKET} --vm {vm} --touch {mib} --look 1 < /run/{vm}.in > /run/{vm}.out 2>&1 &"
        ))?;
        self.until(&format!("{vm} has its memory"), || {
            Ok(self.run(&format!("cat /run/{vm}.out"))?.contains("dirty"))
        })
    }

    fn end_vm(&self, vm: &str) -> Result<(), Failure> {
        self.run(&format!("kill $(cat /run/{vm}.sleep)")).map(drop)
    }

    fn until_free(&self, slices: u32) -> Result<(), Failure> {
        let free = || Ok(self.tarn("get slices")?.matches(" free ").count() == slices as usize);
        self.until(&format!("{slices} slices are free"), free)
    }

    fn until(&self, what: &str, holds: impl Fn() -> Result<bool, Failure>) -> Result<(), Failure> {
        let give_up = Instant::now() + WITHIN;
        while !holds()? {
            if Instant::now() > give_up {
                let seen = self.rack.hosts().all()[0].agent_log();
                return Err(Failure::NotInTime { what: what.to_owned(), seconds: WITHIN.as_secs(), seen });
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    fn run(&self, command: &str) -> Result<String, Failure> {
        Ok(self.rack.hosts().all()[0].run_within(command, WITHIN)?.text)
    }

    fn tarn(&self, words: &str) -> Result<String, Failure> {
        let list: Vec<&str> = words.split_whitespace().collect();
        let mut tarn = self.rack.tarn(&list);
        let output = tarn.output().map_err(|source| Failure::Start { program: "tarn".into(), source })?;
        let answer = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(answer(&output.stdout)),
            false => Err(Failure::Answer { what: format!("tarn {words}"), answer: answer(&output.stderr) }),
        }
    }

    fn speed(&self) -> Result<Speed, Failure> {
        let text = self.run(&format!("wget -q -O - http://{METRICS}/metrics"))?;
        Ok(CALLS
            .map(|call| Calls { seconds: sample(&text, "sum", call), count: sample(&text, "count", call) }))
    }
}

/// A sample of the agent's histogram of calls; zero before the first.
fn sample(text: &str, of: &str, call: &str) -> f64 {
    let name = format!("tarn_agent_host_call_seconds_{of}{{");
    let label = format!("call=\"{call}\"");
    let line = text.lines().find(|line| line.starts_with(&name) && line.contains(&label));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
}

fn report(backends: &[Backend]) -> String {
    let mut rows = Vec::new();
    for backend in backends {
        let moved = backend.moved.map(|calls| [Calls::default(), Calls::default(), calls]);
        let states = [("empty", Some(backend.empty)), ("full", Some(backend.full)), ("pages to move", moved)];
        for (state, speed) in states.into_iter().filter_map(|(state, speed)| Some((state, speed?))) {
            let cell = |calls: Calls| match calls.count > 0.0 {
                true => format!("{:.3}", calls.mean()),
                false => "-".to_owned(),
            };
            let mut row = vec![format!("{} {state}", backend.name)];
            row.extend(speed.map(cell));
            rows.push(row);
        }
    }
    let mut text = table(&["seconds for 1 GiB", "online", "scrub", "offline"], &rows);
    for backend in backends {
        let name = backend.name;
        for (state, speed) in [("empty", backend.empty), ("full", backend.full)] {
            for (call, calls) in CALLS.iter().zip(speed) {
                let faster = SLICE / calls.mean() / SUFFICES;
                let _ = writeln!(text, "{}", ratio(&format!("{name}_{state}_{call}_vs_1GBps"), faster));
            }
        }
        if let Some(moved) = backend.moved {
            let faster = SLICE / moved.mean() / SUFFICES;
            let _ = writeln!(text, "{}", ratio(&format!("{name}_moving_offline_vs_1GBps"), faster));
        }
    }
    text
}
