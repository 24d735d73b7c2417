//! Measures the rates at which slices come online and go offline.
//!
//! Goal: 1 GB/s or more. This rate suffices with a buffer of free slices (Pond, section 4.4). The
//! times come from the metrics of an agent on an emulated host. Both backends are measured with
//! untouched slices and with slices filled by a VM. The backend `memory_block` is also measured
//! with a slice whose pages the kernel must first migrate to other slices of the node.

use std::{
    fmt::Write as _,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use benches::{
    failure::Failure,
    programs,
    report::{format_ratio, format_table},
};
use clap::Parser;
use emulated_host::rack::{Device, Plan, Rack, RackPlan};

/// Goal for the rate of each operation, in bytes per second.
const CALL_GOAL_BYTES_PER_S: f64 = 1e9;
/// Size of a slice in bytes.
const SLICE_BYTES: f64 = (1u64 << 30) as f64;
/// Number of slices of the device. Slices are added and removed one at a time.
const SLICE_COUNT: u32 = 2;
/// Memory that a VM writes to fill a slice, in MiB. Less than a slice, because the kernel reserves
/// some memory of each node.
const VM_FILL_MIB: u32 = 960;
/// Memory that a running VM writes before another slice is removed, in MiB.
const MIGRATED_MIB: u32 = 512;
/// Address at which the agent serves its metrics.
const METRICS_ADDRESS: &str = "127.0.0.1:9751";
/// Socket on which the agent provides memory.
const HOST_MEMORY_SOCKET: &str = "/run/tarn-agent/host-memory.sock";
/// Names of the agent's operations on a slice, in order of execution.
const CALL_NAMES: [&str; 3] = ["online", "scrub", "offline"];
const BACKEND_NAMES: [&str; 2] = ["dax", "memory_block"];
/// Maximum duration of every wait and command. Long, because emulated hosts are slow.
const TIMEOUT: Duration = Duration::from_secs(180);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Measure the rates at which slices come online and go offline
#[derive(Debug, Parser)]
struct Args {
    /// Number of times that a slice is added and removed in each state. The report shows means
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Flag that cargo passes to benchmarks, without effect
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
            eprintln!("slice_speed: {}", failure.error_chain());
            ExitCode::FAILURE
        }
    }
}

fn measure(args: &Args) -> Result<String, Failure> {
    let measured = BACKEND_NAMES.iter().map(|backend| Backend::measure(backend, args.rounds));
    Ok(report(&measured.collect::<Result<Vec<_>, _>>()?))
}

/// Total duration and number of calls of one operation.
#[derive(Clone, Copy, Debug, Default)]
struct CallTimes {
    seconds: f64,
    count: f64,
}

impl CallTimes {
    fn delta_since(self, before: Self) -> Self {
        Self { seconds: self.seconds - before.seconds, count: self.count - before.count }
    }

    /// Returns the mean duration of a call in seconds.
    fn mean_duration_s(self) -> f64 {
        self.seconds / self.count
    }
}

/// Call times of one backend, in the order of [`CALL_NAMES`].
type BackendTimes = [CallTimes; 3];

struct Backend {
    name: &'static str,
    empty: BackendTimes,
    full: BackendTimes,
    /// Call times of the removal of a slice whose pages the kernel migrates first. `None` if the
    /// backend does not migrate pages.
    migrating: Option<CallTimes>,
}

impl Backend {
    fn measure(name: &'static str, rounds: u32) -> Result<Self, Failure> {
        let mut rack = SingleHostRack::start(name)?;
        rack.add_and_remove_slice("warm", None)?;
        let empty =
            rack.measure_calls(rounds, |rack, n| rack.add_and_remove_slice(&format!("empty{n}"), None))?;
        let full = rack.measure_calls(rounds, |rack, n| {
            rack.add_and_remove_slice(&format!("full{n}"), Some(VM_FILL_MIB))
        })?;
        let migrating = match name {
            "memory_block" => Some(rack.measure_calls(rounds, Self::remove_with_page_migration)?[2]),
            _ => None,
        };
        Ok(Self { name, empty, full, migrating })
    }

    /// Removes a slice that contains pages of a running VM. The slice of this VM was added later,
    /// so the kernel must migrate the pages.
    fn remove_with_page_migration(rack: &mut SingleHostRack, n: u32) -> Result<(), Failure> {
        let (first, second) = (format!("first{n}"), format!("stays{n}"));
        rack.reserve(&first)?;
        rack.reserve(&second)?;
        rack.start_vm(&second, MIGRATED_MIB)?;
        rack.tarn(&format!("release {first}"))?;
        rack.wait_slices_free(1)?;
        rack.end_vm(&second)?;
        rack.wait_slices_free(SLICE_COUNT)
    }
}

/// Rack of one emulated host. The agent of the host reports the durations of its calls.
struct SingleHostRack {
    rack: Rack,
    _folder: tempfile::TempDir,
}

impl SingleHostRack {
    fn start(backend: &str) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("tarn-rack-").tempdir();
        let folder = folder.map_err(Failure::file_error("create a folder in", std::env::temp_dir()))?;
        let hosts = Plan::new(1, vec![Device { serial: 0x7a0, gib: SLICE_COUNT, is_aligned: true }]);
        let mut plan = RackPlan::new(hosts, programs::rack_programs()?, backend);
        plan.hosts.programs.push(plan.programs.tarn.clone());
        plan.agent_toml_extra = format!("metrics_listen = {METRICS_ADDRESS:?}\n");
        eprintln!("{backend}: booting a host");
        let rack = Rack::start(&emulated_host::Artifacts::locate()?, plan, folder.path(), || true)?;
        Ok(Self { rack, _folder: folder })
    }

    /// Runs `work` `rounds` times. Returns the times of the agent's calls during these runs.
    fn measure_calls(
        &mut self,
        rounds: u32,
        mut work: impl FnMut(&mut Self, u32) -> Result<(), Failure>,
    ) -> Result<BackendTimes, Failure> {
        let before = self.call_times()?;
        for round in 0..rounds {
            work(self, round)?;
        }
        let after = self.call_times()?;
        Ok(std::array::from_fn(|call| after[call].delta_since(before[call])))
    }

    /// Adds a slice for a VM, writes `fill_mib` MiB of it if given, and removes the slice.
    fn add_and_remove_slice(&mut self, vm: &str, fill_mib: Option<u32>) -> Result<(), Failure> {
        self.reserve(vm)?;
        match fill_mib {
            Some(mib) => {
                self.start_vm(vm, mib)?;
                self.end_vm(vm)?;
            }
            None => drop(self.tarn(&format!("release {vm}"))?),
        }
        self.wait_slices_free(SLICE_COUNT)
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
             tarn test-vmm --socket {HOST_MEMORY_SOCKET} --vm {vm} --touch {mib} --verify 1 < /run/{vm}.in > /run/{vm}.out 2>&1 &"
        ))?;
        self.wait_until(&format!("VM {vm} to write its memory"), || {
            Ok(self.run(&format!("cat /run/{vm}.out"))?.contains("dirty"))
        })
    }

    fn end_vm(&self, vm: &str) -> Result<(), Failure> {
        self.run(&format!("kill $(cat /run/{vm}.sleep)")).map(drop)
    }

    fn wait_slices_free(&self, slices: u32) -> Result<(), Failure> {
        let free = || Ok(self.tarn("get slices")?.matches(" free ").count() == slices as usize);
        self.wait_until(&format!("{slices} free slices"), free)
    }

    fn wait_until(&self, event: &str, condition: impl Fn() -> Result<bool, Failure>) -> Result<(), Failure> {
        let deadline = Instant::now() + TIMEOUT;
        while !condition()? {
            if Instant::now() > deadline {
                let last_state = self.rack.hosts().as_slice()[0].agent_log();
                return Err(Failure::TimedOut {
                    event: event.to_owned(),
                    seconds: TIMEOUT.as_secs(),
                    last_state,
                });
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn run(&self, command: &str) -> Result<String, Failure> {
        Ok(self.rack.hosts().as_slice()[0].run_with_timeout(command, TIMEOUT)?.text)
    }

    fn tarn(&self, arguments: &str) -> Result<String, Failure> {
        let argument_list: Vec<&str> = arguments.split_whitespace().collect();
        let mut tarn = self.rack.tarn_command(&argument_list);
        let output = tarn.output().map_err(|source| Failure::Start { program: "tarn".into(), source })?;
        let reply = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(reply(&output.stdout)),
            false => Err(Failure::UnexpectedReply {
                subject: format!("tarn {arguments}"),
                reply: reply(&output.stderr),
            }),
        }
    }

    fn call_times(&self) -> Result<BackendTimes, Failure> {
        let text = self.run(&format!("wget -q -O - http://{METRICS_ADDRESS}/metrics"))?;
        Ok(CALL_NAMES.map(|call| CallTimes {
            seconds: parse_metric_sample(&text, "sum", call),
            count: parse_metric_sample(&text, "count", call),
        }))
    }
}

/// Returns a sample of the agent's histogram of call durations, or 0 before the first call.
fn parse_metric_sample(text: &str, of: &str, call: &str) -> f64 {
    let name = format!("tarn_agent_host_call_seconds_{of}{{");
    let label = format!("call=\"{call}\"");
    let line = text.lines().find(|line| line.starts_with(&name) && line.contains(&label));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
}

fn report(backends: &[Backend]) -> String {
    let mut rows = Vec::new();
    for backend in backends {
        let migrating = backend.migrating.map(|calls| [CallTimes::default(), CallTimes::default(), calls]);
        let states =
            [("empty", Some(backend.empty)), ("full", Some(backend.full)), ("pages to move", migrating)];
        for (state, call_times) in
            states.into_iter().filter_map(|(state, call_times)| Some((state, call_times?)))
        {
            let cell = |calls: CallTimes| match calls.count > 0.0 {
                true => format!("{:.3}", calls.mean_duration_s()),
                false => "-".to_owned(),
            };
            let mut row = vec![format!("{} {state}", backend.name)];
            row.extend(call_times.map(cell));
            rows.push(row);
        }
    }
    let mut text = format_table(&["seconds for 1 GiB", "online", "scrub", "offline"], &rows);
    for backend in backends {
        let name = backend.name;
        for (state, call_times) in [("empty", backend.empty), ("full", backend.full)] {
            for (call, calls) in CALL_NAMES.iter().zip(call_times) {
                let ratio_to_goal = SLICE_BYTES / calls.mean_duration_s() / CALL_GOAL_BYTES_PER_S;
                let _ = writeln!(
                    text,
                    "{}",
                    format_ratio(&format!("{name}_{state}_{call}_vs_1GBps"), ratio_to_goal)
                );
            }
        }
        if let Some(migrating) = backend.migrating {
            let ratio_to_goal = SLICE_BYTES / migrating.mean_duration_s() / CALL_GOAL_BYTES_PER_S;
            let _ =
                writeln!(text, "{}", format_ratio(&format!("{name}_moving_offline_vs_1GBps"), ratio_to_goal));
        }
    }
    text
}
